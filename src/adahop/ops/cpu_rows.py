"""Draws on the CPU, a target at a time: which places of its segment, with which probability and scale."""

from __future__ import annotations

import numba as nb
import numpy as np

from adahop.ops.cpu_draw import (
    MULTINOMIAL,
    POISSON,
    SYSTEMATIC,
    depround,
    fill_odds,
    floyd,
    inclusion,
    multinomial,
    poisson,
    shuffle,
    systematic,
)
from adahop.ops.random import base, draw_below


@nb.njit(nogil=True, cache=True)
def uniform_rows(lo, hi, count, indptr, first, dst, ks, how, key, ptr, pos, prob, scale):
    """Fill targets lo..hi, all neighbours alike. With `count`, only ptr[t + 1] = how many places target t takes."""
    out = np.empty(max(min(ks.max(), indptr[-1]), 1) if ks.shape[0] > 0 else 1, np.int64)
    for t in range(lo, hi):
        v = dst[t]
        a, n = first[v], indptr[v + 1] - first[v]
        k = ks[t] if ks.shape[0] > 1 else ks[0]
        loops = a - indptr[v]
        if count:
            ptr[t + 1] = loops + (n if k < 0 else min(n, k))
            continue
        o = ptr[t]
        for j in range(loops):
            pos[o + j], prob[o + j], scale[o + j] = indptr[v] + j, 1.0, 1.0
        o += loops
        stream = base(key, v)
        if k < 0 or n <= k:
            for j in range(n):
                pos[o + j], prob[o + j], scale[o + j] = a + j, 1.0, 1.0
        elif how == MULTINOMIAL:
            for s in range(k):
                pos[o + s] = a + draw_below(stream, s, n)
                prob[o + s], scale[o + s] = 1.0 / n, np.float64(n) / k
        else:
            floyd(n, k, stream, out)
            for s in range(k):
                pos[o + s] = a + out[s]
                prob[o + s], scale[o + s] = np.float64(k) / n, np.float64(n) / k


@nb.njit(nogil=True, cache=True)
def put(a, w, idx, m, k, eta, how, stream, out, o, pos, prob, scale):
    """Draw k of the m neighbours a + idx with the odds w and write them from o on."""
    if how == MULTINOMIAL:
        total = multinomial(w, m, k, eta, stream, out)
        for s in range(k):
            j = out[s]
            q = (1.0 - eta) * (w[j] - (w[j - 1] if j > 0 else 0.0)) / total + eta / m
            pos[o + s], prob[o + s], scale[o + s] = a + idx[j], q, 1.0 / (k * q)
        return
    inclusion(w, m, k, eta)
    if how == POISSON:
        taken = poisson(w, m, stream, out)
    else:
        shuffle(idx, w, m, stream)
        taken = systematic(w, m, k, stream, out) if how == SYSTEMATIC else depround(w, m, k, stream, out)
    for s in range(taken):
        j = out[s]
        pos[o + s], prob[o + s], scale[o + s] = a + idx[j], w[j], 1.0 / w[j]


@nb.njit(nogil=True, cache=True)
def weighted_rows(
    lo, hi, count, indptr, first, dst, ks, how, key, indices, form, edge, node, eta, ptr, pos, prob, scale
):
    """Fill targets lo..hi by their odds. With `count`, only ptr[t + 1] = how many places target t takes."""
    longest = 1
    for t in range(lo, hi):
        longest = max(longest, indptr[dst[t] + 1] - first[dst[t]])
    w, idx, out = np.empty(longest), np.empty(longest, np.int64), np.empty(longest, np.int64)
    for t in range(lo, hi):
        v = dst[t]
        a, n = first[v], indptr[v + 1] - first[v]
        k = ks[t] if ks.shape[0] > 1 else ks[0]
        loops = a - indptr[v]
        m = fill_odds(w, idx, a, n, form, edge, node, indices, eta)
        sure = k < 0 or m <= k
        if count:
            taken = m if sure else k
            if how == POISSON and not sure:
                inclusion(w, m, k, eta)
                taken = poisson(w, m, base(key, v), out)
            ptr[t + 1] = loops + taken
            continue
        o = ptr[t]
        for j in range(loops):
            pos[o + j], prob[o + j], scale[o + j] = indptr[v] + j, 1.0, 1.0
        o += loops
        if sure:
            for j in range(m):
                pos[o + j], prob[o + j], scale[o + j] = a + idx[j], 1.0, 1.0
        else:
            put(a, w, idx, m, k, eta, how, base(key, v), out, o, pos, prob, scale)
