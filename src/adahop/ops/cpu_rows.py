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
from adahop.ops.prefetch import prefetch
from adahop.ops.random import base, draw_below

AHEAD = 16  # how many targets ahead a line of theirs is asked for
EDGES = 64  # and how many edges ahead


@nb.njit(nogil=True, cache=True)
def spans(indptr, first, dst, ks, where, ptr):
    """Where each target's true neighbours start, how many, how many loops before them, and ptr if k are taken."""
    rows = dst.shape[0]
    start, size, loops = where
    ptr[0] = 0
    for t in range(rows):
        if t + AHEAD < rows:
            prefetch(indptr, dst[t + AHEAD])
            prefetch(first, dst[t + AHEAD])
        v = dst[t]
        k = ks[t] if ks.shape[0] > 1 else ks[0]
        start[t], size[t], loops[t] = first[v], indptr[v + 1] - first[v], first[v] - indptr[v]
        ptr[t + 1] = ptr[t] + loops[t] + (size[t] if k < 0 else min(size[t], k))


@nb.njit(nogil=True, cache=True)
def look_up(lo, hi, ptr, pos, csr, ends):
    """Source, target, edge id and weight of the edges of targets lo..hi; an empty `eid` or `weight` is left out."""
    indices, eid, weight = csr
    src, row, e_id, w = ends
    a, b = ptr[lo], ptr[hi]
    for e in range(a, b):
        prefetch(indices, pos[min(e + EDGES, b - 1)])
        src[e] = indices[pos[e]]
    if eid.shape[0] > 0:
        for e in range(a, b):
            prefetch(eid, pos[min(e + EDGES, b - 1)])
            e_id[e] = eid[pos[e]]
    if weight.shape[0] > 0:
        for e in range(a, b):
            prefetch(weight, pos[min(e + EDGES, b - 1)])
            w[e] = weight[pos[e]]
    for t in range(lo, hi):
        for e in range(ptr[t], ptr[t + 1]):
            row[e] = t


@nb.njit(inline="always")
def sure(a, o, n, pos, prob, scale):
    """The n places from a on, taken exactly."""
    for j in range(n):
        pos[o + j] = a + j
        prob[o + j] = np.float32(1.0)
        scale[o + j] = np.float32(1.0)


@nb.njit(nogil=True, cache=True)
def uniform_rows(lo, hi, dst, where, ptr, ks, how, key, drawn):
    """Fill targets lo..hi, all neighbours alike."""
    start, size, loops = where
    pos, prob, scale = drawn
    out = np.empty(max(min(ks.max(), size[lo:hi].max()), 1) if hi > lo else 1, np.int64)
    for t in range(lo, hi):
        a, n, o = start[t], size[t], ptr[t]
        k = ks[t] if ks.shape[0] > 1 else ks[0]
        if k < 0 or n <= k:
            sure(a - loops[t], o, loops[t] + n, pos, prob, scale)
        else:
            sure(a - loops[t], o, loops[t], pos, prob, scale)
            uniform_row(a, n, k, o + loops[t], base(key, dst[t]), how, out, pos, prob, scale)


@nb.njit(inline="always")
def uniform_row(a, n, k, o, stream, how, out, pos, prob, scale):
    """k of n neighbours from a on, all alike."""
    times = np.float32(np.float64(n) / k)
    if how == MULTINOMIAL:
        q = np.float32(1.0 / n)
        for s in range(k):
            pos[o + s], prob[o + s], scale[o + s] = a + draw_below(stream, s, n), q, times
    else:
        q = np.float32(np.float64(k) / n)
        floyd(n, k, stream, out)
        for s in range(k):
            pos[o + s], prob[o + s], scale[o + s] = a + out[s], q, times


@nb.njit(nogil=True, cache=True)
def put(a, w, idx, m, k, eta, how, stream, out, o, drawn):
    """Draw k of the m neighbours a + idx with the odds w and write them from o on."""
    pos, prob, scale = drawn
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
def count_rows(lo, hi, dst, where, ptr, ks, how, key, odds, indices):
    """ptr[t + 1] = how many places target t takes, where its degree does not tell."""
    start, size, loops = where
    eta = odds[3]
    longest = max(size[lo:hi].max(), 1) if hi > lo else 1
    w, idx, out = np.empty(longest), np.empty(longest, np.int64), np.empty(longest, np.int64)
    for t in range(lo, hi):
        k = ks[t] if ks.shape[0] > 1 else ks[0]
        m = fill_odds(w, idx, start[t], size[t], odds, indices)
        taken = m if k < 0 else min(m, k)
        if how == POISSON and taken < m:
            inclusion(w, m, k, eta)
            taken = poisson(w, m, base(key, dst[t]), out)
        ptr[t + 1] = loops[t] + taken


@nb.njit(nogil=True, cache=True)
def weighted_rows(lo, hi, dst, where, ptr, ks, how, key, odds, indices, drawn):
    """Fill targets lo..hi by their odds, found by a scan of the neighbourhood."""
    start, size, loops = where
    pos, prob, scale = drawn
    longest = max(size[lo:hi].max(), 1) if hi > lo else 1
    w, idx, out = np.empty(longest), np.empty(longest, np.int64), np.empty(longest, np.int64)
    for t in range(lo, hi):
        a, o = start[t], ptr[t]
        k = ks[t] if ks.shape[0] > 1 else ks[0]
        m = fill_odds(w, idx, a, size[t], odds, indices)
        sure(a - loops[t], o, loops[t], pos, prob, scale)
        o += loops[t]
        if k < 0 or m <= k:
            for j in range(m):
                pos[o + j], prob[o + j], scale[o + j] = a + idx[j], 1.0, 1.0
        else:
            put(a, w, idx, m, k, odds[3], how, base(key, dst[t]), out, o, drawn)
