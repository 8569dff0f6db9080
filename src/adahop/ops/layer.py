"""Layer-wise draws: one draw of source nodes, shared by all targets of a layer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adahop.ops import Drawn, Odds, cpu_block, cpu_layer, draw, fast, over, reference, segment_sum

SMALLEST = 1e-30  # what cannot be told from zero beside the largest odds still counts as possible


class Near(NamedTuple):
    """The edges to true neighbours of some targets, in the order of the targets, and who speaks through them."""

    row: Tensor  # [M] the target of each edge
    place: Tensor  # [M] its place in the CSR
    local: Tensor  # [M] its source among the candidates; -1 where the source needs no draw
    nodes: Tensor  # [C] global ids of the candidates, as they first appear

    def total(self, value: Tensor) -> Tensor:
        """[C] the sum of an edge's value over the edges of each candidate."""
        if fast(value):
            out = np.zeros(self.nodes.numel(), value.numpy().dtype)
            cpu_layer.total(value.numpy(), self.local.numpy(), out)
            return torch.from_numpy(out)
        left = self.local >= 0
        return segment_sum(value[left], self.local[left], self.nodes.numel())


def near(indptr: Tensor, first: Tensor, indices: Tensor, dst: Tensor, inner: bool, scratch: Tensor) -> Near:
    """Scan the targets' neighbourhoods. With `inner`, sources that are targets themselves are no candidates.

    `scratch` [N] int32 holds -1 throughout.
    """
    if fast(dst):
        m = int((indptr[dst + 1] - first[dst]).sum())
        out = [np.empty(m, np.int64) for _ in range(4)]
        given = [t.numpy() for t in (indptr, first, indices, dst)]
        many = cpu_layer.scan(*given, inner, scratch.numpy(), *out)  # type: ignore[call-arg]
        out[3] = out[3][:many].copy()
        return Near(*map(torch.from_numpy, out))
    row, place = reference.spans(first[dst], indptr[dst + 1] - first[dst])
    head = dst if inner else dst[:0]
    n_id, local = reference.relabel(head, indices[place].long())
    return Near(row, place, (local - head.numel()).clamp(min=-1), n_id[head.numel() :])


def pick(odds: Tensor, k: int, how: str, key: int) -> tuple[Tensor, Tensor]:
    """(prob, scale) of every item after k draws in proportion to the odds; scale 0 where it was not drawn.

    With replacement prob = q and scale = count / (k q), else prob = pi and scale = 1 / pi. No more than k items: all,
    exactly.
    """
    n = odds.numel()
    if k < 0 or n <= k:
        one = torch.ones(n, device=odds.device)
        return one, one.clone()
    edge = (odds / odds.max().clamp(min=1e-300)).clamp(min=SMALLEST).masked_fill(odds <= 0, 0.0).float()
    ptr = torch.tensor([0, n], device=odds.device)
    start = ptr[:1].clone()
    nobody = torch.empty(0, dtype=torch.int32, device=odds.device)
    size = torch.tensor([k], device=odds.device)
    drawn = draw(ptr, start, nobody, start, size, how, Odds(edge=edge), key)
    prob, scale = torch.zeros(n, device=odds.device), torch.zeros(n, device=odds.device)
    prob[drawn.pos] = drawn.prob
    return prob, scale.index_add_(0, drawn.pos, drawn.scale)  # a node drawn twice is one source of twice the scale


def keep(indptr: Tensor, first: Tensor, dst: Tensor, near: Near, prob: Tensor, scale: Tensor) -> Drawn:
    """Of the targets' edges: their self-loops and those that need no draw, exactly, and those of drawn candidates."""
    loops = first[dst] - indptr[dst]
    if fast(dst):
        most = int(loops.sum()) + near.row.numel()
        out = [np.empty(most, t) for t in (np.int64, np.float32, np.float32)]
        start = np.empty(dst.numel() + 1, np.int64)
        given = [t.numpy() for t in (indptr, first, dst, near.row, near.place, near.local, prob, scale)]
        m = cpu_layer.keep(*given, start, *out)  # type: ignore[call-arg]
        return Drawn(*map(torch.from_numpy, (start, *(a[:m].copy() for a in out))))
    chance = near.local >= 0
    one = torch.ones(1, device=dst.device)
    at = torch.where(chance, near.local, near.nodes.numel())  # whoever needs no draw reads the 1 at the end
    prob, scale = torch.cat([prob, one])[at], torch.cat([scale, one])[at]
    kept = scale > 0
    row, place = reference.spans(indptr[dst], loops)
    row, place = torch.cat([row, near.row[kept]]), torch.cat([place, near.place[kept]])
    sure = torch.ones(int(loops.sum()), device=dst.device)
    order = torch.argsort(row, stable=True)
    ptr = torch.cat([loops.new_zeros(1), torch.bincount(row, minlength=dst.numel()).cumsum(0)])
    prob, scale = torch.cat([sure, prob[kept]]), torch.cat([sure, scale[kept]])
    return Drawn(ptr, place[order], prob[order], scale[order])


def rows_dot(x: Tensor, rows: Tensor, w: Tensor) -> Tensor:
    """<x[row], w> for some rows, without a copy of them on the CPU; no gradient."""
    if not (fast(x) and x.dtype == torch.float32 and x.is_contiguous()):
        return x[rows].to(w.dtype) @ w.detach()
    out, zero = torch.empty(rows.numel(), 1), torch.zeros(rows.numel(), dtype=torch.long)
    given = (x.unsqueeze(1), rows, w.detach().view(1, 1, -1), zero, out)
    over(cpu_block.edge_dot, rows.numel(), *(t.numpy() for t in given), work=max(x.shape[1] // 8, 1))
    return out[:, 0]
