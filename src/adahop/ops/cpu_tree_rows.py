"""Draws from sum trees on the CPU: those of a few targets go down in lock-step, their lines asked for ahead."""

from __future__ import annotations

import numba as nb
import numpy as np

from adahop.ops.cpu_rows import sure
from adahop.ops.cpu_tree import HEIGHT, TOP, WIDE, highest, levels
from adahop.ops.prefetch import prefetch
from adahop.ops.random import base, draw_unit

BLOCKS, STEP = TOP // WIDE, WIDE + 1
LAST = 1.0 - 1e-12
GROUP = 8  # targets whose draws go down together


@nb.njit(nogil=True, cache=True)
def add_up(x, o, n, inner, outer):
    """Prefix sums of the n <= TOP numbers from x[o] on: within blocks of 16, and over these.

    Each block of `inner` opens with a 0, as does `outer`, and what is left of both is inf.
    """
    total, blocks = 0.0, (n + WIDE - 1) // WIDE
    outer[0] = 0.0
    for b in range(blocks):
        c, i, end = 0.0, b * STEP, min(n - b * WIDE, WIDE)
        inner[i] = 0.0
        for j in range(end):
            c += np.float64(x[o + b * WIDE + j])
            inner[i + 1 + j] = c
        for j in range(end, WIDE):
            inner[i + 1 + j] = np.inf
        total += c
        outer[b + 1] = total
    for b in range(blocks, BLOCKS):
        outer[b + 1] = np.inf
    return total


@nb.njit(nogil=True, cache=True)
def ask(lo, hi, dst, start, size, w, line, sums):
    """Ask for the lines that `enter` will read for the targets lo..hi."""
    for t in range(lo, hi):
        a, b, at = start[t], start[t] + size[t], line[dst[t]]
        if at < 0:
            for p in range(a, b, WIDE):
                prefetch(w, p)
        else:
            o, n = highest(a, b, at)
            for p in range(o, o + n, WIDE):
                prefetch(sums, p)


@nb.njit(inline="always")
def find16(prefix, o, x):
    """How many of prefix[o + 1 : o + 16] are not above x: halving without a branch that could be foreseen wrongly."""
    i = 8 * (prefix[o + 8] <= x)
    i += 4 * (prefix[o + i + 4] <= x)
    i += 2 * (prefix[o + i + 2] <= x)
    return i + 1 * (prefix[o + i + 1] <= x)


@nb.njit(inline="always")
def find8(prefix, x):
    i = 4 * (prefix[4] <= x)
    i += 2 * (prefix[i + 2] <= x)
    return i + 1 * (prefix[i + 1] <= x)


@nb.njit(nogil=True, cache=True)
def flat_row(a, n, k, o, eta, stream, w, inner, outer, pos, prob, scale):
    """k draws of a node that keeps no sums."""
    total = add_up(w, a, n, inner, outer)
    wide, share, even, last = total / (1.0 - eta), (1.0 - eta) / total, eta / n, (n - 1) // WIDE
    for s in range(k):
        u = draw_unit(stream, s)
        x = max(u - eta, 0.0) * wide
        b = min(find8(outer, x), last)
        i = b * WIDE + find16(inner, b * STEP, x - outer[b])
        if u < eta:
            i = np.int64(u / eta * n)
        p = a + min(i, n - 1)
        q = share * np.float64(w[p]) + even
        pos[o + s], prob[o + s], scale[o + s] = p, q, 1.0 / (k * q)


@nb.njit(nogil=True, cache=True)
def enter(a, n, k, eta, stream, top, at, many, below, w, sums, inner, outer, entry, rest, level, m):
    """Choose an entry of the highest level for each of k draws, or a leaf for those of the even share."""
    total = add_up(sums, at, many, inner, outer)
    wide, last = total / (1.0 - eta), (many - 1) // WIDE
    for d in range(m, m + k):
        u = draw_unit(stream, d - m)
        x = max(u - eta, 0.0) * wide
        b = min(find8(outer, x), last)
        x -= outer[b]
        o = b * STEP
        i = find16(inner, o, x)
        i = min(b * WIDE + i, many - 1) - b * WIDE
        entry[d], level[d] = b * WIDE + i, top
        rest[d] = (x - inner[o + i]) / (inner[o + i + 1] - inner[o + i])
        if u < eta:
            entry[d], level[d] = a + min(np.int64(u / eta * n), n - 1), 0
            prefetch(w, entry[d])
        elif top > 1:
            prefetch(sums, below + entry[d] * WIDE)
        else:
            prefetch(w, max(a, (a // WIDE + entry[d]) * WIDE))
    return total


@nb.njit(nogil=True, cache=True)
def descend(now, m, lo, start, size, w, sums, ats, entry, rest, level, row, prefix):
    """All draws of the group that stand at the level `now` go down by one."""
    for d in range(m):
        if level[d] != now:
            continue
        g = row[d]
        a, c, n = start[lo + g], 0.0, WIDE
        if now > 1:
            o = ats[g * HEIGHT + now - 1] + entry[d] * WIDE
            for j in range(WIDE):
                c += np.float64(sums[o + j])
                prefix[j + 1] = c
        else:
            o = (a // WIDE + entry[d]) * WIDE
            o, n = max(o, a), min(o + WIDE, a + size[lo + g]) - max(o, a)
            for j in range(n):
                c += np.float64(w[o + j])
                prefix[j + 1] = c
            for j in range(n, WIDE):
                prefix[j + 1] = np.inf
        x = min(rest[d], LAST) * c
        i = min(find16(prefix, 0, x), n - 1)
        entry[d], level[d] = (entry[d] * WIDE if now > 1 else o) + i, now - 1
        if now > 1:
            rest[d] = (x - prefix[i]) / (prefix[i + 1] - prefix[i])
            if now > 2:
                prefetch(sums, ats[g * HEIGHT + now - 2] + entry[d] * WIDE)
            else:
                prefetch(w, max(a, (a // WIDE + entry[d]) * WIDE))


@nb.njit(nogil=True, cache=True)
def tree_group(lo, hi, dst, start, size, loops, ptr, ks, key, eta, w, line, sums, ats, total, entry, rest, level, row,
               out, inner, outer, sizes, pos, prob, scale):  # fmt: skip
    """Fill what needs no descent, and enter the trees of the other targets; how many draws these have."""
    m = 0
    for t in range(lo, hi):
        a, n, v, g, o = start[t], size[t], dst[t], t - lo, ptr[t] + loops[t]
        k = ks[t] if ks.shape[0] > 1 else ks[0]
        sure(a - loops[t], ptr[t], loops[t] + (n if k < 0 or n <= k else 0), pos, prob, scale)
        if k < 0 or n <= k:
            continue
        stream = base(key, v)
        if line[v] < 0:
            flat_row(a, n, k, o, eta, stream, w, inner, outer, pos, prob, scale)
            continue
        top = levels(a, a + n, line[v], ats, g * HEIGHT, sizes)
        at = g * HEIGHT + top
        total[g] = enter(a, n, k, eta, stream, top, ats[at], sizes[top], ats[at - 1], w, sums, inner, outer, entry,
                         rest, level, m)  # fmt: skip
        for s in range(k):
            row[m + s], out[m + s] = g, o + s
        m += k
    return m


@nb.njit(nogil=True, cache=True)
def tree_rows(lo, hi, dst, where, ptr, ks, key, eta, tree, drawn):
    """Fill targets lo..hi, k draws with replacement by the weights in a tree: a line a level and draw."""
    start, size, loops = where
    w, line, sums = tree
    pos, prob, scale = drawn
    most = 0
    for at in range(lo, hi, GROUP):
        most = max(most, ptr[min(at + GROUP, hi)] - ptr[at])
    entry, out, rest = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most)
    level, row, prefix = np.empty(most, np.int64), np.empty(most, np.int64), np.zeros(STEP)
    ats, total = np.empty(GROUP * HEIGHT, np.int64), np.empty(GROUP)
    inner, outer, sizes = np.zeros(BLOCKS * STEP), np.zeros(BLOCKS + 1), np.empty(HEIGHT, np.int64)
    for at in range(lo, hi, GROUP):
        end = min(at + GROUP, hi)
        ask(end, min(end + GROUP, hi), dst, start, size, w, line, sums)
        for t in range(end + GROUP, min(end + 2 * GROUP, hi)):
            prefetch(line, dst[t])
        m = tree_group(at, end, dst, start, size, loops, ptr, ks, key, eta, w, line, sums, ats, total, entry, rest,
                       level, row, out, inner, outer, sizes, pos, prob, scale)  # fmt: skip
        for now in range(level[:m].max() if m > 0 else 0, 0, -1):
            descend(now, m, at, start, size, w, sums, ats, entry, rest, level, row, prefix)
        for d in range(m):
            t, p, o = at + row[d], entry[d], out[d]
            k = ks[t] if ks.shape[0] > 1 else ks[0]
            q = (1.0 - eta) * np.float64(w[p]) / total[row[d]] + eta / size[t]
            pos[o], prob[o], scale[o] = p, q, 1.0 / (k * q)
