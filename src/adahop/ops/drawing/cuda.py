"""Draws on a GPU: the launches of the Triton kernels (interpreted, they run on the CPU's tensors in tests)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adahop.ops.drawing import cuda_slots, cuda_subset
from adahop.ops.random import Stream
from adahop.ops.types import Drawn, Edges, Odds, Rows, Slots

BLOCK = 512  # neighbours scanned at a time
WARPS, MORE = 2, 4  # of a program that scans weights; that looks nodes up, or scans several times
FEW = 2  # self-loops of a row for which slots are left without a look at the batch
WIDE = 16  # draws without replacement up to which one binary serves: it takes seconds to compile
LOOPS = 8  # self-loops of a row up to which one binary serves
MOST = 64  # slots of a row: a handful each, not one row with thousands


def power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def padded(
    edges: Edges, rows: Rows, target: Tensor, k: int | Tensor, loops: int, how: str, odds: Odds, key: int | Stream
) -> Slots:
    """`loops` + k slots per row, see `cuda_slots`."""
    if how == "poisson" or odds.prefix is not None or edges.indices.numel() == 0:
        return NotImplemented
    target, row = target.contiguous(), rows.row.contiguous()  # seeds may be every other node of a tensor
    out = _empty(target, k, loops)
    if out.rows == 0:
        return out
    any_ = edges.begin  # stands where a kernel reads nothing
    stream = key if isinstance(key, Stream) else Stream(key, any_, 0)
    clip, clips = rows.since is not None or rows.until is not None, (any_, any_)
    if clip:
        since = torch.zeros_like(row) if rows.since is None else rows.since.contiguous()
        until = torch.full_like(row, edges.indices.numel()) if rows.until is None else rows.until.contiguous()
        clips = (since, until)
    weight, many = any_ if edges.weight is None else edges.weight.contiguous(), any_
    if isinstance(k, Tensor):
        many = k.contiguous()
    rest = (edges.indices, weight, row, target, many, *out[:5], *stream, out.rows, loops)
    args = (edges.begin, edges.first, edges.last, *clips, *rest)
    flags: dict[str, Any] = {
        "K": out.most, "KP": power(max(out.most, 2)), "LP": max(LOOPS, power(loops)), "EACH": isinstance(k, Tensor),
        "STEPS": isinstance(key, Stream), "WEIGHTED": edges.weight is not None, "CLIP": clip,
    }  # fmt: skip
    if odds.edge is None and odds.node is None:
        tb = max(1, 256 // flags["KP"])
        grid = (-(-out.rows // tb),)
        cuda_slots.uniform[grid](*args, **flags, TB=tb, SUBSET=how != "multinomial", num_warps=2)
        return out
    edge, node, shift = (any_ if t is None else t.contiguous() for t in (odds.edge, odds.node, odds.shift))
    more = (*args, edge, node, float(odds.eta), shift)
    flags |= {
        "BLK": BLOCK, "EDGE": odds.edge is not None, "NODE": odds.node is not None, "SHIFT": odds.shift is not None
    }  # fmt: skip
    if how == "multinomial":
        cuda_slots.multinomial[(out.rows,)](*more, **flags, num_warps=WARPS if odds.node is None else MORE)
    else:
        flags["KP"] = max(WIDE, flags["KP"])
        cuda_subset.subset[(out.rows,)](
            *more, **flags, LEVELS=BLOCK.bit_length() - 1, PAIRS=how == "depround", num_warps=MORE
        )
    return out


def _empty(target: Tensor, k: int | Tensor, loops: int) -> Slots:
    rows = target.numel()
    most = k if isinstance(k, int) else power(int(k.max())) if k.numel() else 0  # a few widths for all batches
    m, device = rows * (loops + most), target.device
    n_id = torch.empty(rows * (1 + most), dtype=torch.long, device=device)
    pos = torch.empty(m, dtype=torch.long, device=device)
    prob, scale, weight = torch.empty(3, m, device=device)
    return Slots(n_id, pos, prob, scale, weight, rows, loops, most)


def draw(edges: Edges, rows: Rows, k: Tensor, how: str, odds: Odds, key: int | Stream) -> Drawn:
    """The same without empty slots."""
    if how == "poisson" or odds.prefix is not None or edges.indices.numel() == 0 or k.numel() == 0:
        return NotImplemented
    low, high = torch.stack(torch.aminmax(k)).tolist()
    if low < 0 or high > MOST:
        return NotImplemented
    many = rows.row
    size = low if k.numel() == 1 else k
    loops = edges.loops  # of the graph, known since the first draw; a graph with many has its batch looked at
    if loops > FEW and many.numel():
        loops = int((edges.first[many] - edges.begin[many]).max())
    f = padded(edges, rows, many, size, loops, how, odds, key)
    used = f.scale > 0
    ptr = torch.zeros(f.rows + 1, dtype=torch.long, device=many.device)
    if used.numel():
        torch.cumsum(used.view(f.rows, -1).sum(1), 0, out=ptr[1:])
    kept = used.nonzero().flatten()  # one look at how many there are, for all three
    return Drawn(ptr, f.pos[kept], f.prob[kept], f.scale[kept])
