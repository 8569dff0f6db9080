"""A bandit's update on the CPU: from the rewards of a visit to the weights and their sums."""

from __future__ import annotations

import numba as nb
import numpy as np

from adahop.ops.cpu_tree import HEIGHT, build_one, levels, renew
from adahop.ops.kinds import HIGH, LOW, SPAN
from adahop.ops.prefetch import prefetch_write

AHEAD = 48  # edges
HIGHEST, LOWEST, LEAST = np.float32(np.exp(HIGH)), np.float32(np.exp(LOW)), np.float32(np.exp(-SPAN))


@nb.njit(nogil=True, cache=True)
def grow(lo, hi, dst, ptr, pos, gain, first, indptr, w, line, sums):
    """w[pos] *= exp(gain), a target at a time; a segment that left its reach is brought back, its largest to 1."""
    at, size = np.empty(HEIGHT, np.int64), np.empty(HEIGHT, np.int64)
    end = ptr[hi]
    for t in range(lo, hi):
        v, out, moved = dst[t], False, False
        for e in range(ptr[t], ptr[t + 1]):
            if e + AHEAD < end:
                prefetch_write(w, pos[e + AHEAD])
            if gain[e] != 0.0:
                x = np.float32(np.float64(w[pos[e]]) * np.exp(np.float64(gain[e])))
                w[pos[e]] = x
                out = out or x > HIGHEST or x < LOWEST
                moved = True
        if not moved:
            continue
        a, b = first[v], indptr[v + 1]
        if out:
            centre(a, b, w)
        if line.shape[0] > 0 and line[v] >= 0:
            if out:
                build_one(a, b, line[v], w, sums, at, size)
                continue
            top = levels(a, b, line[v], at, 0, size)
            for e in range(ptr[t], ptr[t + 1]):
                if gain[e] != 0.0:
                    renew(a, b, pos[e], w, sums, at, size, top)


@nb.njit(nogil=True, cache=True)
def centre(a, b, w):
    top = np.float32(0.0)
    for j in range(a, b):
        top = max(top, w[j])
    for j in range(a, b):
        w[j] = max(w[j] / top, LEAST)


@nb.njit(nogil=True, cache=True)
def gains(lo, hi, dst, ptr, prob, scale, reward, first, indptr, mean, visits, rule, gain):
    """The exponents of EXP3 for the targets lo..hi, see `adahop.policies.exp3`; means and visits move on."""
    times_k, paper, step, eta, horizon, memory = rule
    for t in range(lo, hi):
        k, got = 0, 0.0
        for e in range(ptr[t], ptr[t + 1]):
            gain[e] = 0.0
            if prob[e] < 1.0:
                k += 1
                got += np.float64(reward[e])
        if k == 0:
            continue
        v = dst[t]
        n, unit = np.float64(indptr[v + 1] - first[v]), np.float64(k) if times_k else 1.0
        visits[v] += 1
        if paper:
            often = horizon if horizon > 0.0 else np.float64(visits[v])
            log = max(np.log(n / k), 0.0)
            x = np.sqrt((1.0 - eta) * eta**4 * np.float64(k) ** 5 * log / (often * n**4)) * unit
            shift = 0.0
        else:
            m = np.float64(mean[v])
            m += max(1.0 / visits[v], memory) * (got * unit / k - m)
            if not np.isfinite(np.float32(m)):
                continue
            mean[v] = m
            rate = step if step >= 0.0 else -step * np.sqrt(np.float64(k))
            x, shift = rate * unit / max(np.float64(np.float32(m)), 1e-38) / n, rate / n
        for e in range(ptr[t], ptr[t + 1]):
            if prob[e] < 1.0:
                y = (x * np.float64(reward[e]) - shift) * np.float64(scale[e])  # 1 / (k q) is the scale
                gain[e] = min(max(y, -1.0), 1.0) if np.isfinite(y) else 0.0
