"""Draws without replacement on the GPU: inclusion probabilities by scans, then systematic or pairwise rounding.

Neighbours are visited in a mixed order, drawn anew for every target and step: a bijection of the numbers below the next
power of two (odd multipliers and shifts), of which those below n count: joint probabilities do not follow the file.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adahop.ops.cuda_jit import kernel
from adahop.ops.cuda_random import base, draw32, draw_unit, key_of
from adahop.ops.drawing.cuda_slots import extent, put, put_loops, weigh

FLOOR = tl.constexpr(1e-12)
ORDER = tl.constexpr(1 << 32)  # counters for the order, away from those for drawing
NUDGE = tl.constexpr(1e-9)


@triton.jit
def largest(edge, node, indices, a, n, eta, BLK: tl.constexpr, EDGE: tl.constexpr, NODE: tl.constexpr):
    """(largest weight, how many can come at all) of a segment."""
    best, many = tl.zeros((BLK,), tl.float32), tl.zeros((BLK,), tl.int32)
    for b in range(0, n, BLK):
        o = b + tl.arange(0, BLK)
        w = weigh(edge, node, indices, a + o, o < n, EDGE, NODE)
        best = tl.maximum(best, w)
        many += ((o < n) & ((w > 0.0) | (eta > 0.0))).to(tl.int32)
    return tl.max(best, 0), tl.sum(many, 0)


@triton.jit
def lifted(edge, node, indices, at, ok, low, eta, EDGE: tl.constexpr, NODE: tl.constexpr):
    """Weights with the smallest kept within reach of the largest; 0 for those that cannot be drawn."""
    w = weigh(edge, node, indices, at, ok, EDGE, NODE)
    return tl.where(ok & ((w > 0.0) | (eta > 0.0)), tl.maximum(w, low), 0.0).to(tl.float64)


@triton.jit
def capped(edge, node, indices, a, n, low, best, many, k, eta,
           BLK: tl.constexpr, EDGE: tl.constexpr, NODE: tl.constexpr):  # fmt: skip
    """(cap, total): w' = min(w, cap) makes k((1 - eta) w'/total + eta/n) at most 1; see `inclusion` on the CPU."""
    share = (1.0 / k - eta / many) / (1.0 - eta)
    cap, had, going, total = best.to(tl.float64) * 4.0 + 1.0, 0, 1, best.to(tl.float64)
    none = cap
    while going > 0:
        rest, now = tl.zeros((BLK,), tl.float64), tl.zeros((BLK,), tl.int32)
        for b in range(0, n, BLK):
            o = b + tl.arange(0, BLK)
            w = lifted(edge, node, indices, a + o, o < n, low, eta, EDGE, NODE)
            rest += tl.where(w >= cap, 0.0, w)
            now += (w >= cap).to(tl.int32)
        left, over = tl.sum(rest, 0), tl.sum(now, 0)
        limit = share * left / (1.0 - over * share)
        total = left + tl.where(over > 0, over * cap, 0.0)
        settled = ((over == had) & (had > 0)) | ((over == 0) & (had == 0) & ((best < limit) | (cap < none)))
        going = tl.where(settled, 0, 1)
        had = tl.where(settled, had, over)
        cap = tl.where(settled, cap, tl.minimum(cap, limit))
    return cap, total


@triton.jit
def mixed(p, stream, bits):
    """Where this visit's order has the p-th of 2^bits places; past the last one, a place past all."""
    mask, half = (1 << bits) - 1, (bits + 1) // 2
    one, two = draw32(stream, ORDER) | 1, draw32(stream, ORDER + 1) | 1
    x = (p * one + draw32(stream, ORDER + 2)) & mask
    x = ((x ^ (x >> half)) * two) & mask
    x = ((x ^ (x >> half)) * one) & mask
    return tl.where(p <= mask, x ^ (x >> half), ORDER)


@triton.jit
def chances(odds, law, indices, a, j, n, k, sure, EDGE: tl.constexpr, NODE: tl.constexpr):
    """Inclusion probabilities of the neighbours j, float64; 1 for all that can be drawn where all are taken."""
    w = lifted(odds[0], odds[1], indices, a + j, j < n, odds[2], odds[3], EDGE, NODE)
    p = k * ((1.0 - odds[3]) * w / law[1] + odds[3] / law[2])
    p = tl.where((w >= law[0]) | sure, 1.0, tl.minimum(p, 1.0))
    return tl.where(w > 0.0, p, 0.0)


@triton.jit
def take(t, slot, v, at, p, use, sure, g, out, rows, room, K, WEIGHTED: tl.constexpr):
    """Write the places taken, with inclusion probability p."""
    put(t, slot, v, at, p, tl.where(sure, 1.0, 1.0 / tl.maximum(p, 1e-30)), use, use & (slot < K), g[0], g[1],
        out[0], out[1], out[2], out[3], out[4], rows, room, K, WEIGHTED)  # fmt: skip


@triton.jit
def by_marks(t, v, a, n, bits, k, sure, stream, odds, law, g, out, rows, room, K,
             BLK: tl.constexpr, EDGE: tl.constexpr, NODE: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    """Systematic: the probabilities laid end to end, the items under the marks u, u + 1, ... are taken."""
    shift = tl.where(sure, 0.0, draw_unit(stream, 0)) + NUDGE
    start = tl.floor(shift)
    before = start * 0.0
    for b in range(0, 1 << bits, BLK):
        j = mixed(b + tl.arange(0, BLK).to(tl.int64), stream, bits)
        p = chances(odds, law, g[0], a, j, n, k, sure, EDGE, NODE)
        c = before + tl.cumsum(p, 0)
        slot = tl.floor(c - p + shift) - start
        use = (tl.floor(c + shift) - start > slot) & (p > 0.0)
        take(t, slot.to(tl.int64), v, a + j, p, use, sure, g, out, rows, room, K, WEIGHTED)
        before += tl.sum(p, 0)


@triton.jit
def settle(p, j, mine, q, i, other, u):
    """Two open items become one: (p, item, its own chance) of the open one, whether the other is taken, (who, chance).

    p and q are what they have gathered so far, `mine` and `other` the inclusion probabilities they came with.
    """
    both = p + q
    small = both < 1.0
    first = tl.where(small, u * both < p, u * (2.0 - both) >= 1.0 - q)  # the first stays open
    open_p, taken_p = tl.where(first, mine, other), tl.where(first, other, mine)
    left = tl.where(small, both, both - 1.0)
    return left, tl.where(first, j, i), open_p, small == 0, tl.where(first, i, j), taken_p


@triton.jit
def by_pairs(t, v, a, n, bits, k, sure, stream, odds, law, g, out, rows, room, K,
             BLK: tl.constexpr, LEVELS: tl.constexpr, EDGE: tl.constexpr, NODE: tl.constexpr,
             WEIGHTED: tl.constexpr):  # fmt: skip
    """DepRound: open items meet in pairs, level by level and block by block, until none is open."""
    many = tl.zeros((1,), tl.int64)
    held, hj, hm = tl.zeros((1,), tl.float64), tl.zeros((1,), tl.int64), tl.zeros((1,), tl.float64)
    for b in range(0, 1 << bits, BLK):
        place = b + tl.arange(0, BLK).to(tl.int64)
        j = mixed(place, stream, bits)
        mine = chances(odds, law, g[0], a, j, n, k, sure, EDGE, NODE)
        use = mine >= 1.0
        take(t, many + tl.cumsum(use.to(tl.int64), 0) - 1, v, a + j, mine, use, sure, g, out, rows, room, K, WEIGHTED)
        many += tl.sum(use.to(tl.int64), 0)
        p = tl.where(use, 0.0, mine)
        for level in tl.static_range(LEVELS):
            p, q = tl.split(tl.reshape(p, (BLK >> (level + 1), 2)))
            j, i = tl.split(tl.reshape(j, (BLK >> (level + 1), 2)))
            mine, other = tl.split(tl.reshape(mine, (BLK >> (level + 1), 2)))
            place, _ = tl.split(tl.reshape(place, (BLK >> (level + 1), 2)))
            u = draw_unit(stream, place * 64 + level)
            p, j, mine, use, who, chance = settle(p, j, mine, q, i, other, u)
            slot = many + tl.cumsum(use.to(tl.int64), 0) - 1
            take(t, slot, v, a + who, chance, use, sure, g, out, rows, room, K, WEIGHTED)
            many += tl.sum(use.to(tl.int64), 0)
        u = draw_unit(stream, place * 64 + LEVELS)
        held, hj, hm, use, who, chance = settle(held, hj, hm, p, j, mine, u)
        take(t, many, v, a + who, chance, use, sure, g, out, rows, room, K, WEIGHTED)
        many += use.to(tl.int64)
    take(t, many, v, a + hj, hm, held > 0.5, sure, g, out, rows, room, K, WEIGHTED)


@kernel()
def subset(begin, first, end, since, until, indices, weight, row, target, ks, n_id, pos, p_out, s_out, w_out, head,
           step, layer, rows, room, edge, node, eta, shift, K, KP: tl.constexpr, LP: tl.constexpr,
           BLK: tl.constexpr, LEVELS: tl.constexpr, EACH: tl.constexpr, STEPS: tl.constexpr, EDGE: tl.constexpr,
           NODE: tl.constexpr, WEIGHTED: tl.constexpr,
           PAIRS: tl.constexpr, CLIP: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """k of n without replacement by the odds of a row's neighbours; a program per row."""
    t = tl.program_id(0).to(tl.int64)
    v, dst = tl.load(row + t), tl.load(target + t)
    own, loops, a, n = extent(begin, first, end, since, until, v, t, t < rows, CLIP)
    n = n.to(tl.int32)
    if SHIFT:
        node = node + tl.load(shift + v, mask=v >= 0, other=0)
    k = tl.load(ks + t).to(tl.int32) if EACH else K
    put_loops(t, tl.arange(0, LP), dst, own, loops, t < rows, weight, n_id, pos, p_out, s_out, w_out, room, K,
              WEIGHTED)  # fmt: skip
    slot = tl.arange(0, KP).to(tl.int64)
    put(t, slot, dst, slot, 1.0, 0.0, slot < 0, slot < K, indices, weight, n_id, pos, p_out, s_out, w_out, rows, room,
        K, WEIGHTED)  # fmt: skip
    tl.debug_barrier()  # the empty slots are written before the taken ones
    best, many = largest(edge, node, indices, a, n, eta, BLK, EDGE, NODE)
    low = tl.where(best > 0.0, best * FLOOR, 1.0)
    best = tl.maximum(best, low)
    sure = many <= k
    cap, total = best.to(tl.float64) * 4.0 + 1.0, best.to(tl.float64) + 1.0
    if many > k:
        cap, total = capped(edge, node, indices, a, n, low, best, many, k, eta, BLK, EDGE, NODE)
    bits = 1
    while (1 << bits) < n:
        bits += 1
    stream = base(key_of(head, step, layer, STEPS), v)
    odds, law = (edge, node, low, eta), (cap, total, many)
    g, out = (indices, weight), (n_id, pos, p_out, s_out, w_out)
    if PAIRS:
        by_pairs(
            t, dst, a, n, bits, k, sure, stream, odds, law, g, out, rows, room, K, BLK, LEVELS, EDGE, NODE, WEIGHTED
        )
    else:
        by_marks(t, dst, a, n, bits, k, sure, stream, odds, law, g, out, rows, room, K, BLK, EDGE, NODE, WEIGHTED)
