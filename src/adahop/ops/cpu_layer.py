"""Layer-wise draws on the CPU: the scan of the targets' neighbourhoods, and what is kept of it."""

from __future__ import annotations

import numba as nb


@nb.njit(nogil=True, cache=True)
def scan(indptr, first, indices, dst, inner, local_of, row, place, local, nodes):
    """Number the sources as they first appear, -1 for targets where `inner`; how many. `local_of` is -1 throughout."""
    if inner:
        for i in range(dst.shape[0]):
            local_of[dst[i]] = -2
    m, e = 0, 0
    for i in range(dst.shape[0]):
        for p in range(first[dst[i]], indptr[dst[i] + 1]):
            v = indices[p]
            at = local_of[v]
            if at == -1:
                at = m
                local_of[v] = m
                nodes[m] = v
                m += 1
            row[e], place[e], local[e] = i, p, max(at, -1)
            e += 1
    for i in range(m):
        local_of[nodes[i]] = -1
    for i in range(dst.shape[0]):
        local_of[dst[i]] = -1
    return m


@nb.njit(nogil=True, cache=True)
def total(value, local, out):
    for e in range(local.shape[0]):
        if local[e] >= 0:
            out[local[e]] += value[e]


@nb.njit(nogil=True, cache=True)
def keep(indptr, first, dst, row, place, local, prob, scale, ptr, pos, out_prob, out_scale):
    """Fill pos, prob and scale of what is kept, self-loops first in each row, and ptr; how many."""
    e, o = 0, 0
    for t in range(dst.shape[0]):
        ptr[t] = o
        for p in range(indptr[dst[t]], first[dst[t]]):
            pos[o], out_prob[o], out_scale[o] = p, 1.0, 1.0
            o += 1
        while e < row.shape[0] and row[e] == t:
            at = local[e]
            if at < 0:
                pos[o], out_prob[o], out_scale[o] = place[e], 1.0, 1.0
                o += 1
            elif scale[at] > 0.0:
                pos[o], out_prob[o], out_scale[o] = place[e], prob[at], scale[at]
                o += 1
            e += 1
    ptr[dst.shape[0]] = o
    return o
