"""Sum trees on the CPU: how they lie in memory, how they are built and summed again along a path."""

from __future__ import annotations

import numba as nb
import numpy as np

WIDE = 16  # children an entry: a cache line of float32
TOP = 128  # entries that the highest level may have, and leaves up to which a node keeps no sums at all
HEIGHT = 12  # levels that any int64 degree stays below


@nb.njit(inline="always")
def line_sum(x, o):
    """x[o] + ... + x[o + 15], always in the same order."""
    return (((x[o] + x[o + 8]) + (x[o + 4] + x[o + 12])) + ((x[o + 2] + x[o + 10]) + (x[o + 6] + x[o + 14]))) + (
        ((x[o + 1] + x[o + 9]) + (x[o + 5] + x[o + 13])) + ((x[o + 3] + x[o + 11]) + (x[o + 7] + x[o + 15]))
    )


@nb.njit(nogil=True, cache=True)
def block_sum(w, a, b, i):
    """The sum of the i-th block of leaves of the segment a..b."""
    lo = (a // WIDE + i) * WIDE
    if lo >= a and lo + WIDE <= b:
        return line_sum(w, lo)
    x = np.float32(0.0)
    for j in range(max(lo, a), min(lo + WIDE, b)):
        x += w[j]
    return x


@nb.njit(nogil=True, cache=True)
def levels(a, b, line, at, o, size):
    """Fill at[o + l], size[l] of the levels of a segment's tree, l >= 1; the number of the highest."""
    at[o + 1], size[1] = np.int64(line) * WIDE, (b - 1) // WIDE - a // WIDE + 1
    top = 1
    while size[top] > TOP:
        lines = (size[top] + WIDE - 1) // WIDE
        at[o + top + 1], size[top + 1] = at[o + top] + lines * WIDE, lines
        top += 1
    return top


@nb.njit(inline="always")
def highest(a, b, line):
    """(where, size) of the highest level of a segment's tree."""
    o, n = np.int64(line) * WIDE, (b - 1) // WIDE - a // WIDE + 1
    while n > TOP:
        lines = (n + WIDE - 1) // WIDE
        o, n = o + lines * WIDE, lines
    return o, n


@nb.njit(nogil=True, cache=True)
def build_one(a, b, line, w, sums, at, size):
    top = levels(a, b, line, at, 0, size)
    for i in range(size[1]):
        sums[at[1] + i] = block_sum(w, a, b, i)
    for l in range(2, top + 1):
        for i in range(size[l]):
            sums[at[l] + i] = line_sum(sums, at[l - 1] + i * WIDE)


@nb.njit(nogil=True, cache=True)
def build(lo, hi, indptr, first, w, start, sums):
    at, size = np.empty(HEIGHT, np.int64), np.empty(HEIGHT, np.int64)
    for v in range(lo, hi):
        if start[v] >= 0:
            build_one(first[v], indptr[v + 1], start[v], w, sums, at, size)


@nb.njit(nogil=True, cache=True)
def renew(a, b, p, w, sums, at, size, top):
    """The sums above leaf p again from their children, so that no error ever adds up."""
    i = p // WIDE - a // WIDE
    sums[at[1] + i] = block_sum(w, a, b, i)
    for l in range(2, top + 1):
        i //= WIDE
        sums[at[l] + i] = line_sum(sums, at[l - 1] + i * WIDE)
