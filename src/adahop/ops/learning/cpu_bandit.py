"""A bandit's update on the CPU: from the rewards of a visit to the weights and their sums."""

from __future__ import annotations

import numpy as np

from adahop.ops.learning.tree import TOP, WIDE, block_sum, blocks, build_one, highest, level
from adahop.ops.simd import bare, kernel, part, prefetch, prefetch_write, sum16
from adahop.ops.types import HIGH, LOW, SPAN

AHEAD = 8  # targets whose lines are asked for before they are used
GROUP = 16  # targets whose weights are written before their sums are formed, which would wait for them
HIGHEST, LOWEST, LEAST = np.float32(np.exp(HIGH)), np.float32(np.exp(LOW)), np.float32(np.exp(-SPAN))


@part
def exp(x):
    """e^x for x in [-1, 1], where a bandit's gains are: a few terms of x/4, as good as float32 can tell."""
    y = 0.25 * x
    z = 1 / 24 + y * (1 / 120 + y * (1 / 720 + y / 5040))
    z = 1.0 + y * (1.0 + y * (1 / 2 + y * (1 / 6 + y * z)))
    z *= z
    return z * z


@kernel
def steps(lo, hi, dst, ptr, prob, scale, reward, first, last, mean, visits, rule, times):
    """times = e^gain of EXP3 for the edges of the targets lo..hi, whose means and visits move on."""
    times_k, paper, step, root, eta, horizon, memory = rule
    dst, ptr, prob, scale, reward = bare((dst, ptr, prob, scale, reward))
    first, last, mean, visits, times = bare((first, last, mean, visits, times))
    for t in range(lo, hi):
        if t + AHEAD < hi:
            prefetch_write(mean, dst[t + AHEAD])
            prefetch_write(visits, dst[t + AHEAD])
            prefetch(first, dst[t + AHEAD])
            prefetch(last, dst[t + AHEAD])
        k, got, v = 0.0, 0.0, dst[t]
        for e in range(np.uint64(ptr[t]), np.uint64(ptr[t + 1])):
            drawn = prob[e] < 1.0
            k += 1.0 if drawn else 0.0
            got += np.float64(reward[e]) if drawn else 0.0
        n, unit, sound, shift = np.float64(last[v] - first[v]), k if times_k else 1.0, k > 0.0, 0.0
        visits[v] += sound
        if paper:
            often = horizon if horizon > 0.0 else np.float64(visits[v])
            x = np.sqrt((1.0 - eta) * eta**4 * k**5 * max(np.log(n / k), 0.0) / (often * n**4)) * unit
        else:
            m = np.float64(mean[v])
            m += max(1.0 / visits[v], memory) * (got * unit / k - m)
            sound = sound and np.isfinite(np.float32(m))
            mean[v] = m if sound else mean[v]
            shift = (step * np.sqrt(k) if root else step) / n
            x = shift * unit / max(np.float64(np.float32(m)), 1e-38)
        x, shift = (x, shift) if sound else (0.0, 0.0)
        for e in range(np.uint64(ptr[t]), np.uint64(ptr[t + 1])):
            y = (x * np.float64(reward[e]) - shift) * np.float64(scale[e])  # 1 / (k q) is the scale
            times[e] = y if prob[e] < 1.0 and abs(y) < np.inf else 0.0
    for e in range(np.uint64(ptr[lo]), np.uint64(ptr[hi])):
        times[e] = exp(min(max(times[e], -1.0), 1.0))


@part
def multiply(lo, hi, rows, dst, ptr, pos, times, first, w, line, sums):
    """w[pos] *= times for the edges of the targets lo..hi; whether a weight left its reach."""
    out = False
    for t in range(lo, hi):
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
        for e in range(ptr[t], ptr[t + 1]):
            x = np.float32(np.float64(w[pos[e]]) * times[e])
            w[pos[e]] = x
            out |= bool((x > HIGHEST) | (x < LOWEST))
    return out


@kernel
def bring_back(lo, hi, dst, ptr, pos, times, first, last, w, line, sums):
    """Divide the segments of the targets lo..hi that left their reach, so that their largest weight is 1."""
    for t in range(lo, hi):
        out, a, b = False, first[dst[t]], last[dst[t]]
        for e in range(ptr[t], ptr[t + 1]):
            x = w[pos[e]]
            out = out or (times[e] != 1.0 and bool(x > HIGHEST or x < LOWEST))
        if out:
            top = np.float32(0.0)
            for j in range(a, b):
                top = max(top, w[j])
            for j in range(a, b):
                w[j] = max(w[j] / top, LEAST)
            if line[dst[t]] >= 0:
                build_one(a, b, line[dst[t]], w, sums)


@part
def sum_up(lo, hi, dst, ptr, pos, times, first, last, w, line, sums):
    """The sums above the changed leaves of the targets lo..hi again from their children: no error ever adds up."""
    tall = 0
    for t in range(lo, hi):
        v = dst[t]
        if line[v] >= 0:
            a, b, o = first[v], last[v], np.int64(line[v]) * WIDE - first[v] // WIDE
            for e in range(ptr[t], ptr[t + 1]):
                if times[e] != 1.0:
                    sums[o + pos[e] // WIDE] = block_sum(w, a, b, pos[e] // WIDE)
            if blocks(a, b) > TOP:
                tall = max(tall, highest(a, b, line[v])[0])
    for l in range(2, tall + 1):
        for t in range(lo, hi):
            v = dst[t]
            a, b = first[v], last[v]
            if line[v] >= 0 and highest(a, b, line[v])[0] >= l:
                o, _, below = level(l, a, b, line[v])
                for e in range(ptr[t], ptr[t + 1]):
                    if times[e] != 1.0:
                        i = (pos[e] // WIDE - a // WIDE) // WIDE ** (l - 1)
                        sums[o + i] = sum16(sums, below + i * WIDE)


@kernel
def grow(lo, hi, dst, ptr, group, pos, times, first, last, w, line, sums):
    """w[pos] *= times for the edges of the targets lo..hi, and the sums above them, a group at a time."""
    dst, ptr, pos, times, first = bare((dst, ptr, pos, times, first))
    last, w, line, sums = bare((last, w, line, sums))
    for begin in range(lo, hi, group):
        end = min(begin + group, hi)
        if multiply(begin, end, hi, dst, ptr, pos, times, first, w, line, sums):
            bring_back(begin, end, dst, ptr, pos, times, first, last, w, line, sums)
        sum_up(begin, end, dst, ptr, pos, times, first, last, w, line, sums)


@kernel
def exp3(lo, hi, dst, ptr, group, pos, prob, scale, reward, first, last, mean, visits, rule, times, w, line, sums):
    """EXP3's update, see `adahop.policies.exp3`, for the targets lo..hi."""
    steps(lo, hi, dst, ptr, prob, scale, reward, first, last, mean, visits, rule, times)
    grow(lo, hi, dst, ptr, group, pos, times, first, last, w, line, sums)
