"""Draws on the CPU, a row at a time: odds and inclusion probabilities by a scan, and ways to pick k of n by them."""

from __future__ import annotations

import numba as nb
import numpy as np

from adahop.ops.random import base, draw_below, draw_unit
from adahop.ops.simd import bare, kernel, part, prefetch

MULTINOMIAL, SYSTEMATIC, DEPROUND, POISSON = 0, 1, 2, 3
AHEAD = 16  # how many rows ahead a line of theirs is asked for
SHUFFLE = 1 << 32  # counters for shuffling, away from those for drawing
FLOOR = 1e-12  # smallest weight beside the largest: keeps sums and caps well defined


@nb.njit(nogil=True, cache=True)
def fill_odds(w, idx, a, n, odds, shift, indices):
    """w[:m], idx[:m]: the odds and offsets of those that can come at all; their number m."""
    edge, node, eta, _, _ = odds
    m = 0
    best = 0.0
    for j in range(n):
        x = 1.0
        if edge.shape[0] > 0:
            x = np.float64(edge[a + j])
        if node.shape[0] > 0:
            x *= np.float64(node[indices[a + j] + shift])
        if x > 0.0 or eta > 0.0:
            w[m] = x
            idx[m] = j
            m += 1
            best = max(best, x)
    low = best * FLOOR if best > 0.0 else 1.0
    for j in range(m):
        w[j] = max(w[j], low)
    return m


@part
def inclusion(w, n, k, eta):
    """w becomes the inclusion probabilities k((1 - eta) w'/sum w' + eta/n), w' = min(w, cap) so that none is over 1.

    The cap solves cap = C * rest / (1 - |U| C), C = (1/k - eta/n)/(1 - eta); with eta = 0 this is water-filling.
    Nothing branches on a weight: which ones are above the cap cannot be foreseen.
    """
    share = (1.0 / k - eta / n) / (1.0 - eta)
    cap, many = np.inf, 0
    while True:
        rest, now = 0.0, 0
        for j in range(n):
            over = w[j] >= cap
            now += over
            rest += 0.0 if over else w[j]
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
        mixed = k * ((1.0 - eta) * w[j] / total + eta / n)
        w[j] = 1.0 if w[j] >= cap else mixed


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
    """A uniform k-subset of n, in k steps. No branch: in small neighbourhoods repeats cannot be foreseen."""
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


@nb.njit(nogil=True, cache=True)
def count_targets(ptr, nodes):
    """How many rows the targets have."""
    total = np.int64(0)
    for i in range(nodes.shape[0]):
        prefetch(ptr, nodes[min(i + AHEAD, nodes.shape[0] - 1)])
        total += ptr[nodes[i] + 1] - ptr[nodes[i]]
    return total


@kernel
def list_targets(ptr, relation, nodes, only, bounds, row, target, of):
    """The rows of each target, or only those of the relations in `only`; how many."""
    ptr, relation, nodes, bounds, row, target, of = bare((ptr, relation, nodes, bounds, row, target, of))
    many, o, some = nodes.shape[0], 0, only.shape[0] > 0
    bounds[0] = 0
    for i in range(min(2 * AHEAD, many)):
        prefetch(ptr, nodes[i])
    for i in range(many):
        if i + 2 * AHEAD < many:
            prefetch(ptr, nodes[i + 2 * AHEAD])
        if i + AHEAD < many:
            prefetch(relation, ptr[nodes[i + AHEAD]])
        v = nodes[i]
        for r in range(np.uint64(ptr[v]), np.uint64(ptr[v + 1])):
            kind = relation[r]
            row[o], target[o], of[o] = r, i, kind
            o += only[kind] if some else 1
        bounds[i + 1] = o
    return o


@nb.njit(inline="always")
def k_of(ks, t):
    """How many row t draws: one number for all rows, or one each."""
    return ks[t] if ks.shape[0] > 1 else ks[0]


@nb.njit(nogil=True, cache=True)
def extents(begin, first, last, rows, since, until, ks, where, ptr):
    """Where each row's true neighbours start and how many there are, and the same of its self-loops.

    With `ptr`, that of what is drawn: k of each row, and its self-loops.
    """
    many, counts = rows.shape[0], ptr.shape[0] > 0  # no rows have no `ks` either
    start, size, begins, loops = where
    if counts:
        ptr[0] = 0
    for t in range(many):
        if t + AHEAD < many:
            prefetch(begin, rows[t + AHEAD])
            prefetch(first, rows[t + AHEAD])
        v = rows[t]
        a, b = first[v], last[v]
        begins[t], loops[t] = begin[v], a - begin[v]
        if since.shape[0] > 0:
            a = max(a, since[t])
        if until.shape[0] > 0:
            b = min(b, until[t])
        start[t], size[t] = a, max(b - a, 0)
        if counts:
            k = k_of(ks, t)
            ptr[t + 1] = ptr[t] + loops[t] + (size[t] if k < 0 else min(size[t], k))


@nb.njit(inline="always")
def sure(a, o, n, pos, prob, scale):
    """The n places from a on, taken exactly."""
    for j in range(n):
        pos[o + j] = a + j
        prob[o + j] = np.float32(1.0)
        scale[o + j] = np.float32(1.0)


@nb.njit(nogil=True, cache=True)
def uniform_rows(lo, hi, rows, where, ptr, ks, how, key, drawn):
    """Fill rows lo..hi, all neighbours alike."""
    start, size, begin, loops = where
    pos, prob, scale = drawn
    out = np.empty(max(min(ks.max(), size[lo:hi].max()), 1) if hi > lo else 1, np.int64)
    for t in range(lo, hi):
        a, n, o = start[t], size[t], ptr[t] + loops[t]
        k = k_of(ks, t)
        sure(begin[t], ptr[t], loops[t], pos, prob, scale)
        if k < 0 or n <= k:
            sure(a, o, n, pos, prob, scale)
        else:
            uniform_row(a, n, k, o, base(key, rows[t]), how, out, pos, prob, scale)


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


@nb.njit(inline="always")
def shift_of(shift, row):
    """How far on the numbers of a row's sources lie; none where all rows read the same."""
    return np.int64(shift[row]) if shift.shape[0] > 0 else np.int64(0)


@nb.njit(nogil=True, cache=True)
def count_rows(lo, hi, rows, where, ptr, ks, how, key, odds, indices):
    """ptr[t + 1] = how many places row t takes, where its degree does not tell."""
    start, size, _, loops = where
    eta = odds[2]
    longest = max(size[lo:hi].max(), 1) if hi > lo else 1
    w, idx, out = np.empty(longest), np.empty(longest, np.int64), np.empty(longest, np.int64)
    for t in range(lo, hi):
        k = k_of(ks, t)
        m = fill_odds(w, idx, start[t], size[t], odds, shift_of(odds[3], rows[t]), indices)
        taken = m if k < 0 else min(m, k)
        if how == POISSON and taken < m:
            inclusion(w, m, k, eta)
            taken = poisson(w, m, base(key, rows[t]), out)
        ptr[t + 1] = loops[t] + taken


@nb.njit(nogil=True, cache=True)
def weighted_rows(lo, hi, rows, where, ptr, ks, how, key, odds, indices, drawn):
    """Fill rows lo..hi by their odds, found by a scan of the neighbourhood."""
    start, size, begin, loops = where
    pos, prob, scale = drawn
    longest = max(size[lo:hi].max(), 1) if hi > lo else 1
    w, idx, out = np.empty(longest), np.empty(longest, np.int64), np.empty(longest, np.int64)
    for t in range(lo, hi):
        a, o = start[t], ptr[t]
        k = k_of(ks, t)
        m = fill_odds(w, idx, a, size[t], odds, shift_of(odds[3], rows[t]), indices)
        sure(begin[t], o, loops[t], pos, prob, scale)
        o += loops[t]
        if k < 0 or m <= k:
            for j in range(m):
                pos[o + j], prob[o + j], scale[o + j] = a + idx[j], 1.0, 1.0
        else:
            put(a, w, idx, m, k, odds[2], how, base(key, rows[t]), out, o, drawn)


@nb.njit(nogil=True, cache=True)
def chance_rows(lo, hi, rows, where, ptr, ks, odds, indices, chance):
    """The probability that k draws without replacement from the rows lo..hi take each neighbour; 0: it never comes."""
    start, size, _, _ = where
    longest = max(size[lo:hi].max(), 1) if hi > lo else 1
    w, idx = np.empty(longest), np.empty(longest, np.int64)
    for t in range(lo, hi):
        k = k_of(ks, t)
        m = fill_odds(w, idx, start[t], size[t], odds, shift_of(odds[3], rows[t]), indices)
        if k <= 0 or m <= k:
            w[:m] = 0.0 if k == 0 else 1.0
        else:
            inclusion(w, m, k, odds[2])
        chance[ptr[t] : ptr[t + 1]] = 0.0
        for j in range(m):
            chance[ptr[t] + idx[j]] = min(w[j], 1.0)


@nb.njit(nogil=True, cache=True)
def places(lo, hi, where, ptr, row, place):
    """Row and place of every true neighbour of the rows lo..hi."""
    start, size, _, _ = where
    for t in range(lo, hi):
        for j in range(size[t]):
            row[ptr[t] + j], place[ptr[t] + j] = t, start[t] + j


@nb.njit(nogil=True, cache=True)
def total(value, local, out):
    for e in range(local.shape[0]):
        if local[e] >= 0:
            out[local[e]] += value[e]


@nb.njit(nogil=True, cache=True)
def keep(where, row, place, local, prob, scale, ptr, pos, out_prob, out_scale):
    """Fill pos, prob and scale of what is kept, self-loops first in each row, and ptr; how many."""
    _, size, begin, loops = where
    e, o = 0, 0
    for t in range(size.shape[0]):
        ptr[t] = o
        for p in range(begin[t], begin[t] + loops[t]):
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
    ptr[size.shape[0]] = o
    return o
