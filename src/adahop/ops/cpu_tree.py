"""Sum trees on the CPU: how they lie in memory, how they are built and summed again along a path."""

from __future__ import annotations

import numpy as np

from adahop.ops.compiled import kernel, part
from adahop.ops.lanes import sum16, sum_part

WIDE = 16  # children an entry: a cache line of float32
TOP = 128  # entries that the highest level may have, and leaves up to which a node keeps no sums at all


@part
def blocks(a, b):
    """How many blocks of leaves the segment a..b touches."""
    return (b - 1) // WIDE - a // WIDE + 1


@part
def highest(a, b, line):
    """(number, place, size) of the highest level of a segment's tree, and the place of the one below it."""
    top, o, n, below = 1, np.int64(line) * WIDE, blocks(a, b), 0
    while n > TOP:
        lines = (n + WIDE - 1) // WIDE
        top, o, n, below = top + 1, o + lines * WIDE, lines, o
    return top, o, n, below


@part
def level(number, a, b, line):
    """(place, size) of a level of a segment's tree, and the place of the one below it; the sums' lowest is 1."""
    o, n, below = np.int64(line) * WIDE, blocks(a, b), 0
    for _ in range(number - 1):
        lines = (n + WIDE - 1) // WIDE
        o, n, below = o + lines * WIDE, lines, o
    return o, n, below


@part
def block_sum(w, a, b, i):
    """The sum of what the segment a..b has of the i-th line of leaves."""
    o = i * WIDE
    return sum_part(w, o, a - o, b - o)


@part
def build_one(a, b, line, w, sums):
    first, top = a // WIDE, highest(a, b, line)[0]
    o, n, _ = level(1, a, b, line)
    for i in range(n):
        sums[o + i] = block_sum(w, a, b, first + i)
    for l in range(2, top + 1):
        o, n, below = level(l, a, b, line)
        for i in range(n):
            sums[o + i] = sum16(sums, below + i * WIDE)


@kernel
def build(lo, hi, indptr, first, w, start, sums):
    for v in range(lo, hi):
        if start[v] >= 0:
            build_one(first[v], indptr[v + 1], start[v], w, sums)
