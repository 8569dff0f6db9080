"""The machine's limit: random cache lines read a second, with as many on their way at once as it can hold."""

from __future__ import annotations

import numba as nb
import numpy as np
import torch

from adahop.ops import large_pages, over
from adahop.ops.random import base
from adahop.ops.simd import prefetch
from adahop_lab.bench.clock import CLOCKS, quartiles

AHEAD = 32  # lines asked for before the first is read; a power of two
LINE = 16  # float32 a cache line


@nb.njit(nogil=True, cache=True)
def read_lines(lo, hi, lines, ahead, seed, out):
    """The sum of one number from each of many random lines; `ahead` of them are on their way while one is read."""
    n, total = np.uint64(lines.shape[0] // LINE), np.float32(0.0)
    at, last = np.empty(max(ahead, 1), np.int64), max(ahead, 1) - 1
    for i in range(lo, hi + ahead):
        slot = i & last
        if ahead > 0 and i >= lo + ahead:
            total += lines[at[slot]]
        if i < hi:
            at[slot] = np.int64(((base(seed, i) >> np.uint64(32)) * n) >> np.uint64(32)) * LINE
            if ahead > 0:
                prefetch(lines, at[slot])
            else:
                total += lines[at[slot]]
    out[lo] = total


def lines_per_s(megabytes: int = 512, reads: int = 1 << 21, rounds: int = 5, clock: str = "wall") -> dict[str, float]:
    """Random lines a second out of an array that no cache holds: plain, and with prefetch. Threads as they are set."""
    lines, now = large_pages(torch.ones(megabytes << 18)).numpy(), CLOCKS[clock]
    out, seed = np.zeros(reads, np.float32), 0
    found: dict[str, list[float]] = {"plain": [], "prefetch": []}
    over(read_lines, reads, lines, 0, seed, out)  # compiles
    for _ in range(rounds):
        for name, ahead in (("plain", 0), ("prefetch", AHEAD)):
            seed += 1
            began = now()
            over(read_lines, reads, lines, ahead, seed, out)
            found[name].append(reads / (now() - began))
    return {name: quartiles(rates)[1] for name, rates in found.items()}
