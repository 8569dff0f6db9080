"""Draws on the CPU: odds, inclusion probabilities, and the ways to pick k of n by them."""

from __future__ import annotations

import numba as nb
import numpy as np

from adahop.ops.random import draw_below, draw_unit

MULTINOMIAL, SYSTEMATIC, DEPROUND, POISSON = 0, 1, 2, 3
UNIFORM, EDGE, EDGE_LOG = 0, 1, 2  # how the odds of an edge are given
SHUFFLE = 1 << 32  # counters for shuffling, away from those for drawing
FLOOR = 1e-12  # smallest weight beside the largest: keeps sums and caps well defined


@nb.njit(nogil=True, cache=True)
def fill_odds(w, idx, a, n, odds, indices):
    """w[:m], idx[:m]: the odds and offsets of those that can come at all; their number m."""
    form, edge, node, eta = odds
    top = 0.0
    if form == EDGE_LOG:
        top = -np.inf
        for j in range(n):
            top = max(top, np.float64(edge[a + j]))
    m = 0
    best = 0.0
    for j in range(n):
        x = 1.0
        if form == EDGE_LOG:
            x = np.exp(np.float64(edge[a + j]) - top)
        elif form == EDGE:
            x = np.float64(edge[a + j])
        if node.shape[0] > 0:
            x *= np.float64(node[indices[a + j]])
        if x > 0.0 or eta > 0.0:
            w[m] = x
            idx[m] = j
            m += 1
            best = max(best, x)
    low = best * FLOOR if best > 0.0 else 1.0
    for j in range(m):
        w[j] = max(w[j], low)
    return m


@nb.njit(nogil=True, cache=True)
def inclusion(w, n, k, eta):
    """w becomes the inclusion probabilities k((1 - eta) w'/sum w' + eta/n), w' = min(w, cap) so that none is over 1.

    The cap solves cap = C * rest / (1 - |U| C), C = (1/k - eta/n)/(1 - eta); with eta = 0 this is water-filling.
    """
    share = (1.0 / k - eta / n) / (1.0 - eta)
    cap, many = np.inf, 0
    while True:
        rest, now = 0.0, 0
        for j in range(n):
            if w[j] >= cap:
                now += 1
            else:
                rest += w[j]
        if now == many and many > 0:
            break
        limit = share * rest / (1.0 - now * share)
        if many == 0 and now == 0:
            largest = 0.0
            for j in range(n):
                largest = max(largest, w[j])
            if largest < limit:
                break
        many, cap = now, min(cap, limit)  # rounding must not lift it again: an item at the cap would swing forever
    total = rest + many * cap if many > 0 else rest
    for j in range(n):
        if w[j] >= cap:
            w[j] = 1.0
        else:
            w[j] = k * ((1.0 - eta) * w[j] / total + eta / n)


@nb.njit(nogil=True, cache=True)
def shuffle(idx, w, n, stream):
    for j in range(n - 1, 0, -1):
        r = draw_below(stream, SHUFFLE + j, j + 1)
        idx[j], idx[r] = idx[r], idx[j]
        w[j], w[r] = w[r], w[j]


@nb.njit(nogil=True, cache=True)
def systematic(p, n, k, stream, out):
    """Lay p end to end, take the items under u, u + 1, ...; out[:k] are their places."""
    mark, c, m = draw_unit(stream, 0), 0.0, 0
    for j in range(n):
        c += p[j]
        if c > mark and m < k:
            out[m] = j
            m += 1
            mark += 1.0
    if m < k:  # rounding left the last mark just past the end
        out[m] = n - 1
        m += 1
    return m


@nb.njit(nogil=True, cache=True)
def depround(p, n, k, stream, out):
    """One pass over the items, each settled against the one still open (pairwise dependent rounding)."""
    held, ph, m = -1, 0.0, 0
    for j in range(n):
        q = p[j]
        if q >= 1.0:
            out[m] = j
            m += 1
            continue
        if held < 0:
            held, ph = j, q
            continue
        u, both = draw_unit(stream, j), ph + q
        if both < 1.0:
            if u * both >= ph:
                held = j
            ph = both
        else:
            taken = held if u * (2.0 - both) < 1.0 - q else j
            out[m] = taken
            m += 1
            held, ph = (j if taken == held else held), both - 1.0
            if ph < 1e-9:
                held = -1
    if held >= 0 and m < k:
        out[m] = held
        m += 1
    return m


@nb.njit(nogil=True, cache=True)
def floyd(n, k, stream, out):
    """A uniform k-subset of n, in k steps. No branch: in small neighbourhoods nobody can foresee who comes twice."""
    for s in range(k):
        out[s] = draw_below(stream, s, n - k + s + 1)
    for s in range(1, k):
        r, again = out[s], 0
        for b in range(s):
            again |= out[b] == r
        out[s] = n - k + s if again else r


@nb.njit(nogil=True, cache=True)
def multinomial(w, n, k, eta, stream, out):
    """k draws with replacement; w becomes its prefix sums, the caller's copy keeps the odds."""
    for j in range(1, n):
        w[j] += w[j - 1]
    total = w[n - 1]
    for s in range(k):
        u = draw_unit(stream, s)
        if u < eta:
            out[s] = min(np.int64(u / eta * n), n - 1)
        else:
            out[s] = min(np.searchsorted(w[:n], (u - eta) / (1.0 - eta) * total, side="right"), n - 1)
    return total


@nb.njit(nogil=True, cache=True)
def poisson(p, n, stream, out):
    m = 0
    for j in range(n):
        if draw_unit(stream, j) < p[j]:
            out[m] = j
            m += 1
    return m
