"""LABOR's draw on the CPU where all sources have the same odds: one pass, many hashes at once."""

from __future__ import annotations

import numba as nb
import numpy as np

from adahop.ops.cpu_rows import sure
from adahop.ops.random import halves, short32

PIECE, STRIP = 256, 16  # neighbours whose random numbers are made together, and looked at together
MOST = np.uint32(0xFFFFFFFF)


@nb.njit(nogil=True, cache=True)
def scan(lo, hi, indices, start, size, loops, k, key, slot, found, many):
    """Neighbour j where r_j < k/n, into the target's slot; many[t] counts them all, also those the slot cannot hold."""
    bits = np.full(PIECE + STRIP, MOST, np.uint32)
    low, high = halves(key)
    for t in range(lo, hi):
        a, n, o = start[t], size[t], slot[t]
        for j in range(loops[t]):
            found[o + j] = a - loops[t] + j
        o += loops[t]
        room, m = slot[t + 1] - o - 1, 0
        if k < 0 or n <= k:
            for j in range(n):
                found[o + j] = a + j
            many[t] = loops[t] + n
            continue
        limit = np.uint32(np.ceil(np.float64(k) / n * 2.0**32))
        for piece in range(0, n, PIECE):
            w = min(PIECE, n - piece)
            for j in range(w):
                bits[j] = short32(low, high, indices[a + piece + j])
            for j in range(w, w + STRIP):
                bits[j] = MOST
            for strip in range(0, w, STRIP):
                least = MOST
                for j in range(STRIP):
                    least = min(least, bits[strip + j])
                if least < limit:
                    for j in range(strip, strip + STRIP):  # no branch: written always, kept where it counts
                        found[o + min(m, room)] = a + piece + j
                        m += bits[j] < limit
        many[t] = loops[t] + m


@nb.njit(nogil=True, cache=True)
def close_up(lo, hi, size, loops, k, slot, found, ptr, pos, prob, scale):
    """What was found, without the gaps, and its probability."""
    for t in range(lo, hi):
        o, m, n = ptr[t], ptr[t + 1] - ptr[t], np.float64(size[t])
        p = 1.0 if k < 0 or n <= k else k / n
        for j in range(m):
            pos[o + j] = found[slot[t] + j]
            prob[o + j] = p
            scale[o + j] = 1.0 / p
        sure(pos[o] if m > 0 else 0, o, loops[t], pos, prob, scale)
