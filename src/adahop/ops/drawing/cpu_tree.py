"""Draws from sum trees on the CPU: those of a few targets go down in lock-step, their lines asked for ahead."""

from __future__ import annotations

import numpy as np

from adahop.ops.drawing.cpu_scan import k_of, sure
from adahop.ops.learning.tree import TOP, WIDE, highest, level
from adahop.ops.random import base, draw64, mix
from adahop.ops.simd import bare, kernel, part, passed8, passed16, pick16, pick_part, prefetch, prefix16

BLOCKS = TOP // WIDE
AHEAD = 8  # targets whose lines are asked for before they are used
GROUP = 16  # targets whose draws go down together
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


@part
def upper(bits):
    return np.float64(bits >> _HALF) * 2.0**-32


@part
def lower(bits):
    return np.float64(bits & _LOW) * 2.0**-32


@part
def ask(t, hi, dst, start, size, w, line, sums):
    """Ask for the lines that the target AHEAD of t will read first, and for the pointer to them."""
    if t + 2 * AHEAD < hi:
        prefetch(line, dst[t + 2 * AHEAD])
    if t + AHEAD < hi:
        a, n, at = start[t + AHEAD], size[t + AHEAD], line[dst[t + AHEAD]]
        if at < 0:
            for p in range(a, a + n, WIDE):
                prefetch(w, p)
        else:
            _, o, many, _ = highest(a, a + n, at)
            for p in range(o, o + many, WIDE):
                prefetch(sums, p)


@part
def add_up(x, o, n, inner, outer):
    """Prefix sums of the n <= TOP numbers from x[o] on: within blocks of 16, and over these; their total.

    outer[0] is 0, and what is left of it is inf.
    """
    total, blocks = 0.0, (n + WIDE - 1) // WIDE
    for b in range(blocks):
        total += prefix16(x, o + b * WIDE, min(n - b * WIDE, WIDE), inner, b * WIDE)
        outer[b + 1] = total
    for b in range(blocks, BLOCKS):
        outer[b + 1] = np.inf
    return total


@part
def find(x, n, inner, outer):
    """Which of the n numbers added up the prefix sums pass x at."""
    b = passed8(outer, 1, x)
    return min(b * WIDE + passed16(inner, b * WIDE, x - outer[b]), n - 1)


@part
def toss(stream, k, d, bits):
    for s in range(k):
        bits[d + s] = draw64(stream, s)


@part
def flat_row(a, n, k, o, d, eta, inner, outer, bits, w, pos, prob, scale):
    """The draws of a node that keeps no sums."""
    total, times = add_up(w, a, n, inner, outer), np.float32(k)
    wide, share, even, far = total / (1.0 - eta), (1.0 - eta) / total, eta / n, n / max(eta, 1e-30)
    for s in range(k):
        u = upper(bits[d + s])
        i = find(max(u - eta, 0.0) * wide, n, inner, outer)
        p = a + (i if u >= eta else min(np.int64(u * far), n - 1))
        q = np.float32(share * np.float64(w[p]) + even)
        pos[o + s], prob[o + s], scale[o + s] = p, q, np.float32(1.0) / (times * q)


@part
def enter(a, n, k, o, d, eta, top, at, many, below, inner, outer, bits, w, sums, pos):
    """Choose an entry of the highest level for each draw, and ask for the line where it goes on, or ends: an even
    share may end anywhere."""
    total = add_up(sums, at, many, inner, outer)
    wide, far, first = total / (1.0 - eta), n / max(eta, 1e-30), a // WIDE
    for s in range(k):
        u = upper(bits[d + s])
        i = find(max(u - eta, 0.0) * wide, many, inner, outer)
        pos[o + s] = i
        if top > 1:
            prefetch(sums, below + i * WIDE)
        if top == 1 or u < eta:
            prefetch(w, max((first + i) * WIDE, a) if u >= eta else a + min(np.int64(u * far), n - 1))
    return total


@part
def go_down(now, top, a, k, o, d, at, below, bits, w, sums, pos):
    """The draws of a target go from the level `now` > 1 down by one, each with random bits of its own."""
    first = a // WIDE
    for s in range(k):
        r = bits[d + s]
        u = lower(r) if now == top else upper(mix(r + np.uint64(now)))
        i = pos[o + s] * WIDE
        i += pick16(sums, at + i, u)
        pos[o + s] = i
        if now > 2:
            prefetch(sums, below + i * WIDE)
        else:
            prefetch(w, max(a, (first + i) * WIDE))


@part
def finish(top, a, n, k, o, d, eta, total, bits, w, pos, prob, scale):
    """The leaf of each draw, and its probability."""
    share, even, far, first = (1.0 - eta) / total, eta / n, n / max(eta, 1e-30), a // WIDE
    times = np.float32(k)
    for s in range(k):
        r = bits[d + s]
        i = (first + pos[o + s]) * WIDE
        i += pick_part(w, i, a - i, a + n - i, lower(r) if top == 1 else upper(mix(r + np.uint64(1))))
        u = upper(r)
        p = min(i, a + n - 1) if u >= eta else a + min(np.int64(u * far), n - 1)
        q = np.float32(share * np.float64(w[p]) + even)
        pos[o + s], prob[o + s], scale[o + s] = p, q, np.float32(1.0) / (times * q)


@part
def tree_group(begin, end, hi, dst, where, ptr, ks, key, eta, tree, bits, inner, outer, total, tops, drawn):
    """Fill the targets begin..end, whose draws go down together; `bits` to `tops` are room to work in."""
    start, size, begins, loops = where
    w, line, sums = tree
    pos, prob, scale = drawn
    most, tall = bits.shape[0] // GROUP, 0
    for t in range(begin, end):
        ask(t, hi, dst, start, size, w, line, sums)
        a, n, g, v = start[t], size[t], t - begin, dst[t]
        o, k = ptr[t] + loops[t], k_of(ks, t)
        sure(begins[t], ptr[t], loops[t], pos, prob, scale)
        tops[g] = 0
        if k < 0 or n <= k:
            sure(a, o, n, pos, prob, scale)
            continue
        toss(base(key, v), k, g * most, bits)
        if line[v] < 0:
            flat_row(a, n, k, o, g * most, eta, inner, outer, bits, w, pos, prob, scale)
            continue
        top, at, many, below = highest(a, a + n, line[v])
        total[g] = enter(a, n, k, o, g * most, eta, top, at, many, below, inner, outer, bits, w, sums, pos)
        tops[g], tall = top, max(tall, top)
    for now in range(tall, 1, -1):
        for t in range(begin, end):
            g, o = t - begin, ptr[t] + loops[t]
            if tops[g] >= now:
                at, _, below = level(now - 1, start[t], start[t] + size[t], line[dst[t]])
                go_down(now, tops[g], start[t], ptr[t + 1] - o, o, g * most, at, below, bits, w, sums, pos)
    for t in range(begin, end):
        g, o = t - begin, ptr[t] + loops[t]
        if tops[g] > 0:
            finish(tops[g], start[t], size[t], ptr[t + 1] - o, o, g * most, eta, total[g], bits, w, pos, prob, scale)


@kernel
def tree_rows(lo, hi, dst, where, ptr, ks, key, eta, tree, drawn):
    """Fill targets lo..hi, k draws with replacement by the weights in a tree: one cache line per level and draw."""
    where, tree, drawn = bare(where), bare(tree), bare(drawn)
    dst, ptr, ks = bare((dst, ptr, ks))
    most = 1
    for t in range(lo, hi):
        most = max(most, ptr[t + 1] - ptr[t])
    bits, inner, outer = np.empty(GROUP * most, np.uint64), np.empty(TOP + WIDE), np.zeros(BLOCKS + 1)
    total, tops = np.empty(GROUP), np.empty(GROUP, np.int64)
    for begin in range(lo, hi, GROUP):
        end = min(begin + GROUP, hi)
        tree_group(begin, end, hi, dst, where, ptr, ks, key, eta, tree, bits, inner, outer, total, tops, drawn)
