"""Numbering the nodes of a block, and the weighted sum of its messages, on the CPU."""

from __future__ import annotations

import numba as nb
import numpy as np

from adahop.ops.prefetch import prefetch, prefetch_write

AHEAD = 48  # how many edges ahead a number's line is asked for
ROWS = 12  # and how many ahead a row of h
LINE = 16  # float32 a cache line


@nb.njit(nogil=True, cache=True)
def name_targets(dst, local_of, n_id):
    """Targets are numbered as they come; one that comes twice goes by its first number."""
    for i in range(dst.shape[0]):
        if i + AHEAD < dst.shape[0]:
            prefetch_write(local_of, dst[i + AHEAD])
        n_id[i] = dst[i]
        if local_of[dst[i]] < 0:
            local_of[dst[i]] = i


@nb.njit(nogil=True, cache=True)
def name_sources(a, b, src, local_of, n_id, n):
    """src[a:b] from global to local ids, new ones from n on as they first appear; how many there are then."""
    for e in range(a, b):
        prefetch_write(local_of, src[min(e + AHEAD, b - 1)])
        v = src[e]
        old = local_of[v]
        new = old < 0  # no branch: nobody can foresee which sources are new
        x = n if new else np.int64(old)
        n_id[n] = v
        local_of[v] = x
        src[e] = x
        n += new
    return n


@nb.njit(nogil=True, cache=True)
def forget(n_id, local_of):
    for i in range(n_id.shape[0]):
        if i + AHEAD < n_id.shape[0]:
            prefetch_write(local_of, n_id[i + AHEAD])
        local_of[n_id[i]] = -1


@nb.njit(inline="always")
def ask(array, a, n):
    """Prefetch the lines of array[a:a + n]."""
    for c in range(0, n, LINE):
        prefetch(array, a + c)


@nb.njit(nogil=True, cache=True)
def gather_sum(lo, hi, h, src, coef, ptr, out):
    """out[i] = sum of coef * h[src] over i's edges; four at a time, so that a row of `out` is read and written less."""
    flat, last = h.reshape(-1), ptr[hi] - 1
    for i in range(lo, hi):
        for a in range(h.shape[1]):
            row, e, end = out[i, a], ptr[i], ptr[i + 1]
            row[:] = 0.0
            while e + 4 <= end:
                for j in range(e + ROWS, e + ROWS + 4):
                    ask(flat, (src[min(j, last)] * h.shape[1] + a) * h.shape[2], h.shape[2])
                h0, h1, h2, h3 = h[src[e], a], h[src[e + 1], a], h[src[e + 2], a], h[src[e + 3], a]
                x0, x1, x2, x3 = coef[e, a], coef[e + 1, a], coef[e + 2, a], coef[e + 3, a]
                for c in range(row.shape[0]):
                    row[c] += (x0 * h0[c] + x1 * h1[c]) + (x2 * h2[c] + x3 * h3[c])
                e += 4
            while e < end:
                ask(flat, (src[min(e + ROWS, last)] * h.shape[1] + a) * h.shape[2], h.shape[2])
                h0, x0 = h[src[e], a], coef[e, a]
                for c in range(row.shape[0]):
                    row[c] += x0 * h0[c]
                e += 1


@nb.njit(nogil=True, cache=True)
def full_sum(lo, hi, h, indptr, indices, weight, nodes, out):
    """out[t] = sum over all in-edges of nodes[t] of weight * h[source]."""
    width = h.shape[1]
    for t in range(lo, hi):
        v = nodes[t]
        for c in range(width):
            out[t, c] = 0.0
        for e in range(indptr[v], indptr[v + 1]):
            s = indices[e]
            x = weight[e] if weight.shape[0] > 0 else np.float32(1.0)
            for c in range(width):
                out[t, c] += x * h[s, c]


@nb.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def edge_dot(lo, hi, h, src, grad, dst, out):
    """out[e] = <grad[dst], h[src]> a head."""
    heads, width = h.shape[1], h.shape[2]
    for e in range(lo, hi):
        s, d = src[e], dst[e]
        for a in range(heads):
            x = np.float32(0.0)
            for c in range(width):
                x += grad[d, a, c] * h[s, a, c]
            out[e, a] = x


@nb.njit(nogil=True, cache=True)
def transpose(src, dst, coef, ptr, out_dst, out_coef):
    """Group the edges by source (stable): ptr [S + 1], and each edge's target and coefficient in that order."""
    n = ptr.shape[0] - 1
    for i in range(n + 1):
        ptr[i] = 0
    for e in range(src.shape[0]):
        ptr[src[e] + 1] += 1
    for i in range(n):
        ptr[i + 1] += ptr[i]
    at = ptr[:-1].copy()
    for e in range(src.shape[0]):
        o = at[src[e]]
        at[src[e]] += 1
        out_dst[o] = dst[e]
        for a in range(coef.shape[1]):
            out_coef[o, a] = coef[e, a]


@nb.njit(nogil=True, cache=True)
def repeated(dst, mark):
    """Whether an id comes twice; `mark` is -1 everywhere before and after."""
    twice = False
    for i in range(dst.shape[0]):
        twice = twice or mark[dst[i]] >= 0
        mark[dst[i]] = i
    for i in range(dst.shape[0]):
        mark[dst[i]] = -1
    return twice
