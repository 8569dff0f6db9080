"""The update of tracked norms on the CPU: what a block says of its sources, averaged into one number per node."""

from __future__ import annotations

import numpy as np

from adahop.ops.simd import kernel, prefetch_write

AHEAD = 16  # nodes


@kernel
def see(n_id, targets, src, dst, weight, scale, energy, total, times):
    """Add |m|^2 = energy / (weight scale)^2 of every true edge to its source, and count."""
    for e in range(src.shape[0]):
        s, factor, x = src[e], weight[e] * scale[e], energy[e]
        own = s < targets and n_id[s] == n_id[dst[e]]
        if not own and factor > 0 and np.isfinite(x):  # an edge without weight says nothing
            total[s] += x / max(factor * factor, np.float32(1e-30))
            times[s] += 1.0


@kernel
def track(n_id, total, times, square, visits, level, rule):
    """One update of the nodes that were seen, and of the level of the day; how many they are."""
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
