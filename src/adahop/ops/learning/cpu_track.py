"""The update of tracked norms on the CPU: what a block says of its sources, averaged into one number per node."""

from __future__ import annotations

import numpy as np

from adahop.ops.simd import bare, kernel, prefetch_write

AHEAD = 16  # nodes
LIGHT = 4  # edges whose energy is added up in the time that one is drawn
SHARE = 1 << 14  # edges from which on their sums are formed in two shares, for any number of threads alike


@kernel
def see(lo, hi, cuts, ends, edges, seen):
    """|m|^2 = energy / (weight scale)^2 of every true edge added up per source, and how many there are.

    `ends` is (n_id, src, dst) of a block, `edges` (weight, scale, energy). The shares lo..hi of the edges each have
    rows of their own in `seen`: sum and number side by side, source after source.
    """
    n_id, src, dst = bare(ends)
    weight, scale, energy = bare(edges)
    cuts, seen = bare((cuts, seen))
    wide = 2 * n_id.shape[0]
    for share in range(lo, hi):
        at = share * wide
        seen[at : at + wide] = 0.0
        for e in range(np.uint64(cuts[share]), np.uint64(cuts[share + 1])):
            s, factor, x = np.uint64(src[e]), weight[e] * scale[e], energy[e]
            own = n_id[s] == n_id[np.uint64(dst[e])]
            if not own and factor > 0 and np.isfinite(x):  # an edge without weight says nothing
                o = np.uint64(at) + np.uint64(2) * s
                seen[o] += x / max(factor * factor, np.float32(1e-30))
                seen[o + np.uint64(1)] += 1.0


@kernel
def average(seen, shares, level, few):
    """The mean of every source, in place of its first sum, and the level of the day moved on; how many were seen."""
    seen, level = bare((seen, level))
    wide = seen.shape[0] // shares
    many, now = 0, 0.0
    for o in range(0, wide, 2):
        for share in range(1, shares):
            seen[o] += seen[share * wide + o]
            seen[o + 1] += seen[share * wide + o + 1]
        mean = seen[o] / max(seen[o + 1], 1.0)
        seen[o] = mean
        many += seen[o + 1] > 0.0
        now += mean
    if many > 0:
        now /= many
        level[0] = level[0] + many / (many + few) * (now - level[0]) if level[0] > 0 else now
    return many


@kernel
def move(lo, hi, n_id, seen, square, visits, level, memory, most):
    """One update of those of the nodes lo..hi that were seen."""
    n_id, seen, square, visits, level = bare((n_id, seen, square, visits, level))
    today = max(np.float64(level[0]), 1e-38)
    for s in range(lo, hi):
        if s + AHEAD < hi:
            prefetch_write(square, n_id[s + AHEAD])
            prefetch_write(visits, n_id[s + AHEAD])
        if seen[2 * s + 1] > 0.0:
            v = n_id[s]
            visits[v] = min(np.int64(visits[v]) + 1, most)
            rate = max(1.0 / (visits[v] + 1.0), memory)
            if level[0] > 0:
                square[v] += rate * (seen[2 * s] / today - square[v])


@kernel
def track(cuts, ends, edges, seen, shares, square, visits, level, few, memory, most):
    """All of it in one call, for one thread."""
    see(0, shares, cuts, ends, edges, seen)
    many = average(seen, shares, level, few)
    if many > 0:
        move(0, ends[0].shape[0], ends[0], seen, square, visits, level, memory, most)
    return many
