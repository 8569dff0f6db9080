"""LABOR's draw on the CPU where all sources have the same odds: one pass, many hashes at once."""

from __future__ import annotations

import numpy as np

from adahop.ops.compiled import kernel
from adahop.ops.cpu_rows import sure
from adahop.ops.lanes import below64, lowest
from adahop.ops.prefetch import prefetch
from adahop.ops.random import halves, short32

PIECE = 64  # neighbours whose random numbers are made and looked at together
LINES = 8  # of the next target's neighbours that are asked for; those after them come by themselves
ALL, ONE = np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(1)


@kernel
def scan(lo, hi, indices, start, size, loops, k, key, slot, found, many):
    """The j where r_j < k/n, into the target's slot; many[t] counts them all, also those the slot cannot hold."""
    low, high = halves(key)
    for t in range(lo, hi):
        if t + 1 < hi:
            for j in range(0, min(size[t + 1], LINES * 16), 16):
                prefetch(indices, start[t + 1] + j)
        a, n, o = start[t], size[t], slot[t]
        for j in range(loops[t]):
            found[o + j] = j - loops[t]
        o += loops[t]
        room, m = slot[t + 1] - o - 1, 0
        if k < 0 or n <= k:
            for j in range(n):
                found[o + j] = j
            m = n
        else:
            limit, whole = np.uint32(np.ceil(np.float64(k) / n * 2.0**32)), min(n, indices.shape[0] - PIECE + 1 - a)
            for j in range(0, whole, PIECE):
                bits = below64(indices, a + j, low, high, limit)
                if n - j < PIECE:  # the others are not its own
                    bits &= ALL >> np.uint64(PIECE - (n - j))
                while bits != 0:
                    found[o + min(m, room)] = j + lowest(bits)
                    bits &= bits - ONE
                    m += 1
            for j in range((max(whole, 0) + PIECE - 1) // PIECE * PIECE, n):  # at the end of the ids
                found[o + min(m, room)] = j
                m += short32(low, high, indices[a + j]) < limit
        many[t] = loops[t] + m


@kernel
def close_up(lo, hi, start, size, loops, k, slot, found, ptr, pos, prob, scale):
    """What was found, without the gaps, and its probability."""
    for t in range(lo, hi):
        o, m, n = ptr[t], ptr[t + 1] - ptr[t], np.float64(size[t])
        p = 1.0 if k < 0 or n <= k else k / n
        for j in range(m):
            pos[o + j] = start[t] + found[slot[t] + j]
            prob[o + j] = p
            scale[o + j] = 1.0 / p
        sure(pos[o] if m > 0 else 0, o, loops[t], pos, prob, scale)
