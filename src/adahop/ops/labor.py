"""LABOR's draw: one random number a source node, shared by all targets, so that they tend to take the same ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from adahop.ops import Drawn, cpu_labor, cpu_rows, fast, over, random, reference
from adahop.ops.cpu_labor import ROUNDS, SURE


def labor(indptr: Tensor, first: Tensor, indices: Tensor, dst: Tensor, k: int, refine: int, key: int) -> Drawn:
    """For each target its self-loops, and its neighbour j where r_j < min(1, c_i pi_j); scale is the inverse of that.

    c_i solves sum_j 1 / min(1, c_i pi_j) = n^2 / k, the variance of k uniform draws; pi is 1 and, `refine` times over,
    multiplied by the largest c_i of a source's targets, which lowers the number of sources taken.
    """
    if not fast(dst):
        return _plain(indptr, first, indices, dst, k, refine, key)
    n, ids, of = dst.numel(), indices.numpy(), dst.numpy()
    where, ptr = tuple(np.empty((3, n), np.int64)), np.empty(n + 1, np.int64)
    cpu_rows.spans(indptr.numpy(), first.numpy(), of, np.array([k]), where, ptr)
    start, size, loops = where
    word, many = np.concatenate([[0], np.cumsum(-(-size // cpu_labor.MANY))]), np.empty(n, np.int64)
    bits, mark, odds = np.empty(int(word[-1]), np.uint64), cpu_labor.mark, (np.empty(0), np.empty(0))
    if refine:
        mark, odds = cpu_labor.mark_refined, _refined(ids, start, size, k, refine, indptr.numel() - 1)
    given = (ids, start, size, k, key, word, bits, many, *(odds if refine else ()))
    over(mark, n, *given, work=(word + np.arange(n + 1)) * 16)
    np.cumsum(many + loops, out=ptr[1:])
    out = tuple(np.empty(int(ptr[-1]), t) for t in (np.int64, np.float32, np.float32))
    over(cpu_labor.take, n, ids, where, k, word, bits, ptr, *odds, *out, work=ptr)
    return Drawn(*map(torch.from_numpy, (ptr, *out)))


def _refined(ids, start, size, k: int, refine: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """(pi, room for c). With pi = 1 the constant is k/n, and pi then the largest of them."""
    c = np.where((k < 0) | (size <= k), SURE, k / np.maximum(size, 1))
    pi = np.zeros(nodes)
    cpu_labor.spread(ids, start, size, c, pi)
    for _ in range(refine - 1):
        over(cpu_labor.solve, len(c), ids, start, size, k, pi, c, work=np.concatenate([[0], np.cumsum(size + 16)]))
        most = np.zeros(nodes)
        cpu_labor.spread(ids, start, size, c, most)
        pi *= np.where(most > 0, most, 1.0)
    return pi, c


def _plain(indptr, first, indices, dst, k, refine, key) -> Drawn:
    rows, loops = dst.numel(), first[dst] - indptr[dst]
    n = (indptr[dst + 1] - first[dst]).double()
    row, place = reference.spans(first[dst], indptr[dst + 1] - first[dst])
    src = indices[place].long()
    pi = torch.ones(indptr.numel() - 1, dtype=torch.double, device=dst.device)
    c = _constants(pi[src], row, rows, n, k)
    for _ in range(refine):
        most = torch.zeros_like(pi).scatter_reduce_(0, src, c[row], "amax")
        pi = torch.where(most > 0, pi * most, pi)
        c = _constants(pi[src], row, rows, n, k)
    p = (c[row] * pi[src]).clamp(max=1.0)
    taken = random.short(key, src).double() * 2.0**-32 < p
    lrow, lpos = reference.spans(indptr[dst], loops)
    row, pos = torch.cat([lrow, row[taken]]), torch.cat([lpos, place[taken]])
    p = torch.cat([p.new_ones(lrow.numel()), p[taken]])
    order = torch.argsort(row, stable=True)
    ptr = torch.cat([dst.new_zeros(1), torch.bincount(row, minlength=rows).cumsum(0)])
    return Drawn(ptr, pos[order], p[order].float(), (1.0 / p[order]).float())


def _constants(pi: Tensor, row: Tensor, rows: int, n: Tensor, k: int) -> Tensor:
    everyone = (n <= k) | (k < 0)
    c, before = torch.zeros_like(n), None
    for _ in range(ROUNDS):
        sure = c[row] * pi >= 1.0
        if before is not None and torch.equal(sure, before):
            break
        many = reference.segment_sum(sure.double(), row, rows)
        rest = reference.segment_sum((1.0 / pi).masked_fill(sure, 0.0), row, rows)
        c, before = torch.where(everyone, c, rest / (n * n / k - many)), sure
    least = -reference.segment_max(-pi, row, rows)
    return torch.where(everyone, SURE / least, c)
