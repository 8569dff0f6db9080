"""A bandit's update on the CPU: from the rewards of a visit to the weights and their sums."""

from __future__ import annotations

import numba as nb
import numpy as np

from adahop.ops.cpu_tree import HEIGHT, WIDE, build_one, levels, renew
from adahop.ops.kinds import HIGH, LOW, SPAN
from adahop.ops.prefetch import prefetch, prefetch_write

AHEAD = 4  # targets whose lines are asked for before they are used
HIGHEST, LOWEST, LEAST = np.float32(np.exp(HIGH)), np.float32(np.exp(LOW)), np.float32(np.exp(-SPAN))


@nb.njit(inline="always")
def ask(t, rows, dst, ptr, pos, first, w, line, sums):
    """Ask for the lines that the target AHEAD of t will write, and for those that say where they are."""
    if t + 2 * AHEAD < rows:
        prefetch(first, dst[t + 2 * AHEAD])
        prefetch(line, dst[t + 2 * AHEAD])
    if t + AHEAD < rows:
        v = dst[t + AHEAD]
        o = np.int64(line[v]) * WIDE - first[v] // WIDE
        for e in range(ptr[t + AHEAD], ptr[t + AHEAD + 1]):
            prefetch_write(w, pos[e])
            if line[v] >= 0:
                prefetch_write(sums, o + pos[e] // WIDE)


@nb.njit(inline="always")
def exp(x):
    """e^x; the gains of bandits are in [-1, 1], where a few terms of x/4 are as good as float32 can tell."""
    if abs(x) > 1.0:
        return np.exp(x)
    y = 0.25 * x
    z = 1.0 + y * (1 + y / 2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5 * (1 + y / 6 * (1 + y / 7))))))
    z *= z
    return z * z


@nb.njit(nogil=True, cache=True)
def grow_one(a, b, lo, hi, pos, gain, w, line, sums, at, size):
    """w[pos] *= exp(gain) for the edges lo..hi of one target; a segment that left its reach is brought back."""
    out, moved = False, False
    for e in range(lo, hi):
        if gain[e] != 0.0:
            x = np.float32(np.float64(w[pos[e]]) * exp(np.float64(gain[e])))
            w[pos[e]] = x
            out = out or bool(x > HIGHEST) or bool(x < LOWEST)
            moved = True
    if out:
        centre(a, b, w)
    if line < 0 or not moved:
        return
    if out:
        build_one(a, b, line, w, sums, at, size)
        return
    top = levels(a, b, line, at, 0, size)
    for e in range(lo, hi):
        if gain[e] != 0.0:
            renew(a, b, pos[e], w, sums, at, size, top)


@nb.njit(nogil=True, cache=True)
def grow(lo, hi, dst, ptr, pos, gain, first, indptr, w, line, sums):
    """w[pos] *= exp(gain) for the edges of the targets lo..hi."""
    at, size = np.empty(HEIGHT, np.int64), np.empty(HEIGHT, np.int64)
    for t in range(lo, hi):
        ask(t, hi, dst, ptr, pos, first, w, line, sums)
        v = dst[t]
        grow_one(first[v], indptr[v + 1], ptr[t], ptr[t + 1], pos, gain, w, line[v], sums, at, size)


@nb.njit(nogil=True, cache=True)
def centre(a, b, w):
    top = np.float32(0.0)
    for j in range(a, b):
        top = max(top, w[j])
    for j in range(a, b):
        w[j] = max(w[j] / top, LEAST)


@nb.njit(nogil=True, cache=True)
def gains(lo, hi, k, n, v, prob, scale, reward, mean, visits, rule, gain):
    """The exponents of EXP3 for the edges lo..hi of node v, k of them drawn from n; its mean and visits move on."""
    times_k, paper, step, eta, horizon, memory = rule
    unit, shift = k if times_k else 1.0, 0.0
    visits[v] += 1
    if paper:
        often = horizon if horizon > 0.0 else np.float64(visits[v])
        x = np.sqrt((1.0 - eta) * eta**4 * k**5 * max(np.log(n / k), 0.0) / (often * n**4)) * unit
    else:
        got = 0.0
        for e in range(lo, hi):
            got += np.float64(reward[e]) if prob[e] < 1.0 else 0.0
        m = np.float64(mean[v])
        m += max(1.0 / visits[v], memory) * (got * unit / k - m)
        if not np.isfinite(np.float32(m)):
            return False
        mean[v] = m
        shift = (step if step >= 0.0 else -step * np.sqrt(k)) / n
        x = shift * unit / max(np.float64(np.float32(m)), 1e-38)
    for e in range(lo, hi):
        y = (x * np.float64(reward[e]) - shift) * np.float64(scale[e])  # 1 / (k q) is the scale
        gain[e] = min(max(y, -1.0), 1.0) if prob[e] < 1.0 and np.isfinite(y) else 0.0
    return True


@nb.njit(nogil=True, cache=True)
def exp3(lo, hi, dst, ptr, pos, prob, scale, reward, first, indptr, mean, visits, rule, gain, w, line, sums):
    """EXP3's update, see `adahop.policies.exp3`, for the targets lo..hi."""
    at, size = np.empty(HEIGHT, np.int64), np.empty(HEIGHT, np.int64)
    for t in range(lo, hi):
        ask(t, hi, dst, ptr, pos, first, w, line, sums)
        if t + AHEAD < hi:
            prefetch_write(mean, dst[t + AHEAD])
            prefetch_write(visits, dst[t + AHEAD])
        k, v = 0, dst[t]
        for e in range(ptr[t], ptr[t + 1]):
            k += prob[e] < 1.0
        if k == 0:
            continue
        a, b = first[v], indptr[v + 1]
        if gains(ptr[t], ptr[t + 1], np.float64(k), np.float64(b - a), v, prob, scale, reward, mean, visits, rule,
                 gain):  # fmt: skip
            grow_one(a, b, ptr[t], ptr[t + 1], pos, gain, w, line[v], sums, at, size)
