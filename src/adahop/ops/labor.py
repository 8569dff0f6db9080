"""LABOR's draw: one random number a source node, shared by all targets, so that they tend to take the same ones."""

from __future__ import annotations

import numba as nb
import numpy as np
import torch
from torch import Tensor

from adahop.ops import Drawn, cpu_labor, cpu_rows, fast, over, random, reference
from adahop.ops.random import halves, short32

ROUNDS = 50  # a row's constant is settled when no more of its probabilities reach 1, mostly after a few rounds
SURE = 1.0 + 1e-9  # times 1/pi * pi, which may round to just below 1


def labor(indptr: Tensor, first: Tensor, indices: Tensor, dst: Tensor, k: int, refine: int, key: int) -> Drawn:
    """For each target its self-loops, and its neighbour j where r_j < min(1, c_i pi_j); scale is the inverse of that.

    c_i solves sum_j 1 / min(1, c_i pi_j) = n^2 / k, the variance of k uniform draws; pi is 1 and, `refine` times over,
    multiplied by the largest c_i of a source's targets, which lowers the number of sources taken.
    """
    if not fast(dst):
        return _plain(indptr, first, indices, dst, k, refine, key)
    if refine == 0:
        return _alike(indptr, first, indices, dst, k, key)
    n, none = dst.numel(), np.empty(0, np.float32)
    start, true, ids, of = indptr.numpy(), first.numpy(), indices.numpy(), dst.numpy()
    work = np.concatenate([[0], np.cumsum(start[of + 1] - start[of] + 1)])
    c, pi = np.empty(n), np.ones(len(start) - 1)
    most = np.zeros(len(pi))
    over(_solve, n, start, true, ids, of, k, pi, c, work=work)
    for _ in range(refine):
        _refine(start, true, ids, of, pi, most, c)
        over(_solve, n, start, true, ids, of, k, pi, c, work=work)
    ptr = np.zeros(n + 1, np.int64)
    args = (start, true, ids, of, pi, c, key, ptr)
    over(_take, n, True, *args, np.empty(0, np.int64), none, none, work=work)
    np.cumsum(ptr, out=ptr)
    pos, prob, scale = (np.empty(int(ptr[-1]), t) for t in (np.int64, np.float32, np.float32))
    over(_take, n, False, *args, pos, prob, scale, work=work)
    return Drawn(*map(torch.from_numpy, (ptr, pos, prob, scale)))


def _alike(indptr: Tensor, first: Tensor, indices: Tensor, dst: Tensor, k: int, key: int) -> Drawn:
    """Nothing refined: pi is 1 for all. A target's slot holds more than chance will ever ask for; if not, once more."""
    n, ids, of = dst.numel(), indices.numpy(), dst.numpy()
    where, ptr = tuple(np.empty((3, n), np.int64)), np.empty(n + 1, np.int64)
    cpu_rows.spans(indptr.numpy(), first.numpy(), of, np.array([k]), where, ptr)
    start, size, loops = where
    work = np.concatenate([[0], np.cumsum(size + 16)])
    room, many = size if k < 0 else np.minimum(size, k + int(6 * k**0.5) + 16), np.empty(n, np.int64)
    while True:
        slot = np.concatenate([[0], np.cumsum(loops + room + 1)])
        found = np.empty(int(slot[-1]), np.int32)
        over(cpu_labor.scan, n, ids, start, size, loops, k, key, slot, found, many, work=work)
        if not (many > loops + room).any():
            break
        room = many - loops
    np.cumsum(many, out=ptr[1:])
    pos, prob, scale = (np.empty(int(ptr[-1]), t) for t in (np.int64, np.float32, np.float32))
    over(cpu_labor.close_up, n, start, size, loops, k, slot, found, ptr, pos, prob, scale, work=ptr)
    return Drawn(*map(torch.from_numpy, (ptr, pos, prob, scale)))


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


@nb.njit(nogil=True, cache=True)
def _solve(lo, hi, indptr, first, indices, dst, k, pi, c):
    for t in range(lo, hi):
        a, b = first[dst[t]], indptr[dst[t] + 1]
        n = b - a
        if k < 0 or n <= k:
            least = np.inf
            for j in range(a, b):
                least = min(least, pi[indices[j]])
            c[t] = SURE / least
            continue
        x = 0.0
        for _ in range(ROUNDS):
            many, rest = 0, 0.0
            for j in range(a, b):
                p = pi[indices[j]]
                if x * p >= 1.0:
                    many += 1
                else:
                    rest += 1.0 / p
            new = rest / (n * np.float64(n) / k - many)
            if new == x:
                break
            x = new
        c[t] = x


@nb.njit(nogil=True, cache=True)
def _refine(indptr, first, indices, dst, pi, most, c):
    """pi <- pi * largest c of the source's targets; `most` is 0 everywhere before and after."""
    for t in range(dst.shape[0]):
        for j in range(first[dst[t]], indptr[dst[t] + 1]):
            most[indices[j]] = max(most[indices[j]], c[t])
    for t in range(dst.shape[0]):
        for j in range(first[dst[t]], indptr[dst[t] + 1]):
            v = indices[j]
            if most[v] > 0.0:
                pi[v] *= most[v]
                most[v] = 0.0


@nb.njit(nogil=True, cache=True)
def _take(lo, hi, count, indptr, first, indices, dst, pi, c, key, ptr, pos, prob, scale):
    """Fill targets lo..hi. With `count`, only ptr[t + 1] = how many places target t takes."""
    low, high = halves(key)
    for t in range(lo, hi):
        v = dst[t]
        o = 0 if count else ptr[t]
        for j in range(indptr[v], indptr[v + 1]):
            p = 1.0
            if j >= first[v]:
                s = indices[j]
                p = min(1.0, c[t] * pi[s])
                if np.float64(short32(low, high, s)) * 2.0**-32 >= p:
                    continue
            if not count:
                pos[o], prob[o], scale[o] = j, p, 1.0 / p
            o += 1
        if count:
            ptr[t + 1] = o
