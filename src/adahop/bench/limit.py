"""The machine's limit: random cache lines read a second, with as many on their way at once as it can hold."""

from __future__ import annotations

import time

import numba as nb
import numpy as np

from adahop.bench.clock import quartiles
from adahop.ops import over
from adahop.ops.prefetch import prefetch
from adahop.ops.random import base

AHEAD = 32  # lines asked for before the first is read
LINE = 16  # float32 a cache line


@nb.njit(nogil=True, cache=True)
def read_lines(lo, hi, lines, ahead, seed, out):
    """The sum of one number from each of many random lines; `ahead` of them are on their way while one is read."""
    n, total = np.uint64(lines.shape[0] // LINE), np.float32(0.0)
    at = np.empty(max(ahead, 1), np.int64)
    for i in range(lo, hi + ahead):
        slot = i % max(ahead, 1)
        if ahead > 0 and i >= lo + ahead:
            total += lines[at[slot]]
        if i < hi:
            at[slot] = np.int64(((base(seed, i) >> np.uint64(32)) * n) >> np.uint64(32)) * LINE
            if ahead > 0:
                prefetch(lines, at[slot])
            else:
                total += lines[at[slot]]
    out[lo] = total


def lines_per_s(megabytes: int = 512, reads: int = 1 << 21, rounds: int = 5) -> dict[str, float]:
    """Random lines a second out of an array that no cache holds: plain, and with prefetch. Threads as they are set."""
    lines = np.ones(megabytes << 18, np.float32)
    out, seed = np.zeros(reads, np.float32), 0
    found: dict[str, list[float]] = {"plain": [], "prefetch": []}
    over(read_lines, reads, lines, 0, seed, out)  # compiles
    for _ in range(rounds):
        for name, ahead in (("plain", 0), ("prefetch", AHEAD)):
            seed += 1
            began = time.perf_counter()
            over(read_lines, reads, lines, ahead, seed, out)
            found[name].append(reads / (time.perf_counter() - began))
    return {name: quartiles(rates)[1] for name, rates in found.items()}
