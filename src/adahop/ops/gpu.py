"""The GPU's form of each operation: Triton kernels on CUDA tensors (or, interpreted, on the CPU's in tests)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adahop.ops import gpu_draw, gpu_learn, gpu_subset
from adahop.ops.gpu_attend import attend
from adahop.ops.gpu_sums import edge_dot, energies, full_sum, gather_sum, known_energies, rows, table
from adahop.ops.kinds import Drawn, Flat, Odds
from adahop.ops.random import Stream

__all__ = [
    "attend", "draw", "edge_dot", "energies", "exp3", "flat", "full_sum", "gather_sum", "grow",
    "known_energies", "push", "rows", "serves", "table", "track",
]  # fmt: skip

BLOCK = 512  # neighbours scanned at a time
WARPS, MORE = 2, 4  # of a program that scans weights; that looks nodes up, or scans several times
MOST = 64  # slots of a target
_owner: dict[tuple, Tensor] = {}  # scratch of the updates, by device and size; at rest nobody owns a node
_track: dict[tuple, tuple[Tensor, Tensor, Tensor]] = {}


def serves(k: Tensor) -> bool:
    """Whether the draws' kernels hold so many slots: a handful a target, not one target with thousands."""
    return k.numel() > 0 and int(k.min()) >= 0 and int(k.max()) <= MOST


def power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def flat(
    graph: tuple[Tensor, Tensor, Tensor, Tensor | None], dst: Tensor, k: int | Tensor, loops: int, how: str,
    odds: Odds, key: int | Stream,
) -> Flat:  # fmt: skip
    """`loops` + k slots a target, see `gpu_draw`; `graph` is (indptr, first, indices, weight), `k` one or a tensor."""
    indptr, first, indices, weight = graph
    out = _empty(dst, k, loops)
    if out.rows == 0:
        return out
    stream = key if isinstance(key, Stream) else Stream(key, indptr, 0)
    many = k if isinstance(k, Tensor) else dst
    args = (indptr, first, indices, indptr if weight is None else weight, dst, many, *out[:5], *stream, out.rows)
    flags: dict[str, Any] = {
        "K": out.most, "L": loops, "KP": power(max(out.most, 2)), "EACH": isinstance(k, Tensor),
        "STEPS": isinstance(key, Stream), "WEIGHTED": weight is not None,
    }  # fmt: skip
    if odds.edge is None and odds.node is None:
        tb = max(1, 256 // flags["KP"])
        grid = (-(-out.rows // tb),)
        gpu_draw.uniform[grid](*args, **flags, TB=tb, SUBSET=how != "multinomial", num_warps=2)
        return out
    form = 0 if odds.edge is None else 2 if odds.log else 1
    more = (*args, indptr if odds.edge is None else odds.edge, indptr if odds.node is None else odds.node, odds.eta)
    flags |= {"BLK": BLOCK, "EDGE": form, "NODE": odds.node is not None}
    if how == "multinomial":
        gpu_draw.multinomial[(out.rows,)](*more, **flags, num_warps=WARPS if odds.node is None else MORE)
    else:
        gpu_subset.subset[(out.rows,)](
            *more, **flags, LEVELS=BLOCK.bit_length() - 1, PAIRS=how == "depround", num_warps=MORE
        )
    return out


def _empty(dst: Tensor, k: int | Tensor, loops: int) -> Flat:
    rows = dst.numel()
    most = k if isinstance(k, int) else int(k.max()) if k.numel() else 0
    m, device = rows * (loops + most), dst.device
    n_id = torch.empty(rows * (1 + most), dtype=torch.long, device=device)
    pos = torch.empty(m, dtype=torch.long, device=device)
    prob, scale, weight = torch.empty(3, m, device=device)
    return Flat(n_id, pos, prob, scale, weight, rows, loops, most)


def draw(
    indptr: Tensor, first: Tensor, indices: Tensor, dst: Tensor, k: Tensor, how: str, odds: Odds, key: int | Stream
) -> Drawn:
    """The same without empty slots."""
    loops = int((first[dst] - indptr[dst]).max()) if dst.numel() else 0
    size = int(k[0]) if k.numel() == 1 else k.contiguous()
    f = flat((indptr, first, indices, None), dst, size, loops, how, odds, key)
    used = f.scale > 0
    ptr = torch.zeros(f.rows + 1, dtype=torch.long, device=dst.device)
    if used.numel():
        torch.cumsum(used.view(f.rows, -1).sum(1), 0, out=ptr[1:])
    return Drawn(ptr, f.pos[used], f.prob[used], f.scale[used])


def _claim(node: Tensor, nodes: int) -> Tensor:
    """Who owns each node of a block: the first row that has it."""
    name = (node.device, nodes)
    if name not in _owner:
        _owner[name] = torch.full((nodes,), 2147483647, dtype=torch.int32, device=node.device)
    gpu_learn.claim[(-(-node.numel() // 256),)](_owner[name], node, node.numel(), TB=256, num_warps=4)
    return _owner[name]


def grow(dst, ptr, pos, gain, first, indptr, weight) -> None:
    """weight[pos] *= exp(gain), a target's gains at once; see `gpu_learn`."""
    if dst.numel() == 0 or pos.numel() == 0:
        return
    most = int(ptr.diff().max()) if pos.numel() % dst.numel() else pos.numel() // dst.numel()
    owner = _claim(dst, first.numel())
    gpu_learn.grow[(dst.numel(),)](
        owner, dst, ptr, pos, gain, first, indptr, weight, S=power(most), BLK=BLOCK, num_warps=1
    )


def push(value: Tensor, n_id: Tensor, h: Tensor) -> None:
    """value[n_id] = h in the table's dtype; of a node that comes twice the first row is kept."""
    if n_id.numel():
        width = h.shape[1]
        gpu_learn.push[(n_id.numel(),)](
            _claim(n_id, len(value)), n_id, h.contiguous(), value, width, value.stride(0), BF=power(width), num_warps=4
        )


def exp3(node, ptr, pos, prob, scale, energy, first, indptr, weight, mean, visits, step, root, memory, once, slots):
    """One fused update of EXP3's state for a block with as many as `slots` edges a target."""
    if node.numel() == 0:
        return
    owner, many = _claim(node, first.numel()), power(slots)
    twice = slots <= MOST or pos.unique().numel() < pos.numel()  # whether a place may stand in a row twice
    gpu_learn.exp3[(node.numel(),)](
        owner, node, ptr, pos, prob, scale, energy, first, indptr, weight, mean, visits, step, memory,
        S=many, BLK=BLOCK, ROOT=root, ONCE=once, TWICE=twice, num_warps=min(8, max(1, many // 64)),
    )  # fmt: skip


def track(n_id, targets, src, ptr, weight, scale, energy, square, visits, level, memory, few, most, slots) -> None:
    """One update of the tracked norms of the sources of a block; `level` is one number, in place."""
    m = src.numel()
    if m == 0:
        return
    name = (src.device, square.numel())
    if name not in _track:
        total = torch.zeros(square.numel(), device=src.device)
        _track[name] = total, torch.zeros_like(total, dtype=torch.int32), total.new_zeros(2)
    total, times, seen = _track[name]
    owner, mean = _claim(n_id[:targets], square.numel()), torch.empty(m, device=src.device)
    gpu_learn.track_sum[(targets,)](
        owner, n_id, ptr, src, weight, scale, energy, total, times, S=power(slots), num_warps=1
    )
    blocks = (-(-m // 256),)
    gpu_learn.track_mean[blocks](n_id, src, total, times, mean, seen, m, TB=256)
    gpu_learn.track_level[(1,)](level, seen, float(few))
    gpu_learn.track_put[blocks](n_id, src, mean, level, square, visits, memory, most, m, TB=256)
