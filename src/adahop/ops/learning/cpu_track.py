"""The update of tracked norms on the CPU: what a block says of its sources, averaged into one number per node."""

from __future__ import annotations

import numpy as np

from adahop.ops.simd import bare, kernel, part, prefetch_write

AHEAD = 16  # nodes


@part
def see(n_id, targets, src, dst, weight, scale, energy, total, times):
    """|m|^2 = energy / (weight scale)^2 of every true edge added up per source, and how many there are."""
    total[:] = 0.0
    times[:] = 0.0
    for e in range(np.uint64(src.shape[0])):
        s, factor, x = np.uint64(src[e]), weight[e] * scale[e], energy[e]
        own = s < targets and n_id[s] == n_id[np.uint64(dst[e])]
        if not own and factor > 0 and np.isfinite(x):  # an edge without weight says nothing
            total[s] += x / max(factor * factor, np.float32(1e-30))
            times[s] += 1.0


@kernel
def track(ends, targets, edges, square, visits, level, rule, total, times):
    """One update of the nodes that were seen, and of the level of the day; how many they are.

    `ends` is (n_id, src, dst) of a block, `edges` (weight, scale, energy); `total` and `times` are room to work in.
    """
    n_id, src, dst = bare(ends)
    weight, scale, energy = bare(edges)
    square, visits, level, total, times = bare((square, visits, level, total, times))
    see(n_id, targets, src, dst, weight, scale, energy, total, times)
    memory, few, most = rule
    many, now = 0, 0.0
    for s in range(n_id.shape[0]):
        if times[s] > 0.0:
            total[s] /= times[s]
            many += 1
            now += total[s]
    if many == 0:
        return 0
    now /= many
    level[0] = level[0] + many / (many + few) * (now - level[0]) if level[0] > 0 else now
    for s in range(n_id.shape[0]):
        if s + AHEAD < n_id.shape[0]:
            prefetch_write(square, n_id[s + AHEAD])
            prefetch_write(visits, n_id[s + AHEAD])
        if times[s] > 0.0:
            v = n_id[s]
            visits[v] = min(np.int64(visits[v]) + 1, most)
            rate = max(1.0 / (visits[v] + 1.0), memory)
            if level[0] > 0:
                square[v] += rate * (total[s] / max(np.float64(level[0]), 1e-38) - square[v])
    return many
