"""LABOR's draw on the CPU: one bit per neighbour marks those taken, 64 at once; then the places of those bits."""

from __future__ import annotations

import numba as nb
import numpy as np

from adahop.ops.drawing.cpu_scan import k_of, sure
from adahop.ops.drawing.reference import ROUNDS, SURE
from adahop.ops.random import halves, short32
from adahop.ops.simd import MANY, below64, kernel, lowest, ones, prefetch, under64

LINES = 8  # of the next target's neighbours that are asked for; those after them come by themselves
ALL, ONE = np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(1)


@kernel
def mark(lo, hi, indices, start, size, ks, key, word, bits, many):
    """Bit j of target t's words, from word[t] on: whether r_j < min(1, k/n). many[t] counts them."""
    low, high = halves(key)
    for t in range(lo, hi):
        if t + 1 < hi:
            for j in range(0, min(size[t + 1], LINES * 16), 16):
                prefetch(indices, start[t + 1] + j)
        a, n, m, o = start[t], size[t], 0, word[t]
        k = k_of(ks, t)
        all_of_it = k < 0 or n <= k
        limit = np.uint32(0 if all_of_it else np.ceil(np.float64(k) / n * 2.0**32))
        for j in range(0, n, MANY):
            x = ALL
            if not all_of_it and a + j + MANY <= indices.shape[0]:
                x = below64(indices, a + j, low, high, limit)
            elif not all_of_it:  # at the end of the ids
                for i in range(min(n - j, MANY)):
                    x ^= np.uint64(short32(low, high, indices[a + j + i]) >= limit) << np.uint64(i)
            x &= ALL >> np.uint64(max(MANY - (n - j), 0))  # the others are not its own
            bits[o] = x
            m, o = m + ones(x), o + 1
        many[t] = m


@kernel
def spread(indices, start, size, c, most):
    """most[v] = the largest c of the targets of v, where that is above what it was."""
    for t in range(start.shape[0]):
        x = c[t]
        for j in range(start[t], start[t] + size[t]):
            most[indices[j]] = max(most[indices[j]], x)


@nb.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "nsz"})
def settle(n, k, p, inverse):
    """The constant c of a target with the odds p: sum_j 1 / min(1, c p_j) = n^2 / k."""
    least, top, rest = np.inf, 0.0, 0.0
    for j in range(n):
        inverse[j] = 1.0 / p[j]
        least, top, rest = min(least, p[j]), max(top, p[j]), rest + inverse[j]
    if k < 0 or n <= k:
        return SURE / least
    target = n * np.float64(n) / k
    x = rest / target
    for _ in range(ROUNDS if x * top >= 1.0 else 0):
        many, rest = 0.0, 0.0
        for j in range(n):
            taken = x * p[j] >= 1.0
            many += 1.0 if taken else 0.0
            rest += 0.0 if taken else inverse[j]
        new = rest / (target - many)
        if new == x:
            break
        x = new
    return x


@kernel
def solve(lo, hi, indices, start, size, ks, pi, c):
    longest = max(size[lo:hi].max(), 1) if hi > lo else 1
    p, inverse = np.empty(longest), np.empty(longest)
    for t in range(lo, hi):
        for j in range(size[t]):
            p[j] = pi[indices[start[t] + j]]
        c[t] = settle(size[t], k_of(ks, t), p, inverse)


@kernel
def mark_refined(lo, hi, indices, start, size, ks, key, word, bits, many, pi, c):
    """As `mark` for r_j < c pi_j, where c[t] is found first."""
    longest = (max(size[lo:hi].max(), 1) if hi > lo else 1) + MANY
    ids, p, inverse = np.empty(longest, indices.dtype), np.empty(longest), np.empty(longest)
    low, high = halves(key)
    for t in range(lo, hi):
        a, n, m, o = start[t], size[t], 0, word[t]
        for j in range(n):
            ids[j] = indices[a + j]
            p[j] = pi[ids[j]]
        c[t] = settle(n, k_of(ks, t), p, inverse)
        p[n : n + MANY] = 0.0  # never taken
        for j in range(0, n, MANY):
            x = under64(ids, p, j, low, high, c[t])
            bits[o] = x
            m, o = m + ones(x), o + 1
        many[t] = m


@kernel
def take(lo, hi, indices, where, ks, word, bits, ptr, pi, c, pos, prob, scale):
    """The places of the bits that are set, and their probabilities; pi is empty where nothing was refined."""
    start, size, begin, loops = where
    for t in range(lo, hi):
        a, n, o = start[t], size[t], ptr[t] + loops[t]
        sure(begin[t], ptr[t], loops[t], pos, prob, scale)
        k = k_of(ks, t)
        p = 1.0 if k < 0 or n <= k else np.float64(k) / n
        for i in range(word[t], word[t + 1]):
            x, at = bits[i], a + (i - word[t]) * MANY
            while x != 0:
                e = at + lowest(x)
                x &= x - ONE
                if pi.shape[0] > 0:
                    p = min(1.0, c[t] * pi[indices[e]])
                pos[o], prob[o], scale[o] = e, p, 1.0 / p
                o += 1
