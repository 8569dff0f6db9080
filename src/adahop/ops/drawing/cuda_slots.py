"""Draws on the GPU into slots of a fixed shape: uniform ones, and with replacement by the odds of a scan.

A row has `room` slots for its self-loops and K for its neighbours; a slot that stays empty has weight and scale 0,
prob 1 and the row's target for its source, so that sums, scores and updates pass over it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adahop.ops.cuda_jit import kernel
from adahop.ops.cuda_random import base, draw_below, draw_unit, key_of

SUB = tl.constexpr(32)  # places that a mark is first located among


@triton.jit
def extent(begin, first, end, since, until, v, t, ok, CLIP: tl.constexpr):
    """(start of the self-loops, how many; start of the true neighbours, how many) of the rows v, the batch's t-th.

    A row of -1 is none: nothing is in it.
    """
    there = ok & (v >= 0)
    own, a = tl.load(begin + v, mask=there, other=0), tl.load(first + v, mask=there, other=0)
    b = tl.load(end + v, mask=there, other=0)
    loops = a - own
    if CLIP:
        a = tl.maximum(a, tl.load(since + t, mask=ok, other=0))
        b = tl.maximum(tl.minimum(b, tl.load(until + t, mask=ok, other=0)), a)
    return own, loops, a, b - a


@triton.jit
def put(t, slot, v, at, prob, scale, use, ok, indices, weight, n_id, pos, p_out, s_out, w_out, rows, room, K,
        WEIGHTED: tl.constexpr):  # fmt: skip
    """Write drawn slots of targets t, after the room for self-loops: where `use`, the place `at`; else empty ones."""
    at = tl.where(use, at, 0)
    o = t * (room + K) + room + slot
    tl.store(pos + o, at, mask=ok)
    tl.store(p_out + o, tl.where(use, prob, 1.0).to(tl.float32), mask=ok)
    tl.store(s_out + o, tl.where(use, scale, 0.0).to(tl.float32), mask=ok)
    tl.store(n_id + rows + t * K + slot, tl.where(use, tl.load(indices + at, mask=use & ok, other=0), v), mask=ok)
    w = tl.where(use, 1.0, 0.0)
    if WEIGHTED:
        w = tl.load(weight + at, mask=use & ok, other=0.0)
    tl.store(w_out + o, w, mask=ok)


@triton.jit
def put_loops(t, i, v, begin, many, ok, weight, n_id, pos, p_out, s_out, w_out, room, K,
              WEIGHTED: tl.constexpr):  # fmt: skip
    """The target itself among the nodes, and its self-loops in those of the slots `i` that there is room for."""
    tl.store(n_id + t, v, mask=ok)
    use, fits, o = i < tl.where(ok, many, 0), i < tl.where(ok, room, 0), t * (room + K) + i
    tl.store(pos + o, tl.where(use, begin + i, 0), mask=fits)
    tl.store(p_out + o, tl.where(use, 1.0, 1.0), mask=fits)
    tl.store(s_out + o, tl.where(use, 1.0, 0.0), mask=fits)
    w = tl.where(use, 1.0, 0.0)
    if WEIGHTED:
        w = tl.load(weight + begin + i, mask=use, other=0.0)
    tl.store(w_out + o, w, mask=fits)


@kernel()
def uniform(begin, first, end, since, until, indices, weight, row, target, ks, n_id, pos, p_out, s_out, w_out, head,
            step, layer, rows, room, K: tl.constexpr, KP: tl.constexpr, LP: tl.constexpr, TB: tl.constexpr,
            EACH: tl.constexpr, STEPS: tl.constexpr, SUBSET: tl.constexpr, WEIGHTED: tl.constexpr,
            CLIP: tl.constexpr):  # fmt: skip
    """Equal odds: k whole numbers below n, or Floyd's k-subset; TB rows per program."""
    t = tl.program_id(0).to(tl.int64) * TB + tl.arange(0, TB)
    ok = t < rows
    v, node = tl.load(row + t, mask=ok, other=0), tl.load(target + t, mask=ok, other=0)
    own, loops, a, n = extent(begin, first, end, since, until, v, t, ok, CLIP)
    k = tl.load(ks + t, mask=ok, other=0) if EACH else tl.full((TB,), K, tl.int64)
    put_loops(t[:, None], tl.arange(0, LP)[None, :], node[:, None], own[:, None], loops[:, None], ok[:, None], weight,
              n_id, pos, p_out, s_out, w_out, room, K, WEIGHTED)  # fmt: skip
    stream = base(key_of(head, step, layer, STEPS), v)
    slot = tl.arange(0, KP)[None, :].to(tl.int64)
    if SUBSET:
        pick = tl.full((TB, KP), -1, tl.int64)
        for s in range(K):
            last = n - k + s
            r = draw_below(stream, s, last + 1)
            seen = tl.max((pick == r[:, None]).to(tl.int32), 1) > 0
            pick = tl.where(slot == s, tl.where(seen, last, r)[:, None], pick)
    else:
        pick = draw_below(stream[:, None], slot, n[:, None])
    sure = (n <= k)[:, None]
    use = ok[:, None] & (slot < tl.minimum(n, k)[:, None])
    size, many = n[:, None].to(tl.float64), k[:, None].to(tl.float64)
    prob = tl.where(sure, 1.0, many / size if SUBSET else 1.0 / size)
    scale = tl.where(sure, 1.0, size / many)
    put(t[:, None], slot, node[:, None], a[:, None] + tl.where(sure, slot, pick), prob, scale, use,
        ok[:, None] & (slot < K), indices, weight, n_id, pos, p_out, s_out, w_out, rows, room,
        K, WEIGHTED)  # fmt: skip


@triton.jit
def weigh(edge, node, indices, at, ok, EDGE: tl.constexpr, NODE: tl.constexpr):
    """The odds of the places `at`: an edge's number, or 1, times its source's."""
    w = tl.where(ok, 1.0, 0.0)
    if EDGE:
        w = tl.load(edge + at, mask=ok, other=0.0)
    if NODE:
        w = w * tl.load(node + tl.load(indices + at, mask=ok, other=0), mask=ok, other=0.0)
    return w


@triton.jit
def sums(edge, node, indices, a, n, eta, BLK: tl.constexpr, EDGE: tl.constexpr, NODE: tl.constexpr):
    """(odds of the first block, sum of all, how many can come at all) of a segment."""
    o = tl.arange(0, BLK)
    head = weigh(edge, node, indices, a + o, o < n, EDGE, NODE)
    total, many = head, ((o < n) & ((head > 0.0) | (eta > 0.0))).to(tl.int32)
    for b in range(BLK, n, BLK):
        o = b + tl.arange(0, BLK)
        w = weigh(edge, node, indices, a + o, o < n, EDGE, NODE)
        total += w
        many += ((o < n) & ((w > 0.0) | (eta > 0.0))).to(tl.int32)
    return head, tl.sum(total, 0), tl.sum(many, 0)


@triton.jit
def counted(w, o, n, alike, eta):
    """The odds, or 1 for every possible neighbour where there are none."""
    return tl.where(alike, ((o < n) & ((w > 0.0) | (eta > 0.0))).to(tl.float32), w)


@triton.jit
def locate(w, b, mark, part, base, last, before, BLK: tl.constexpr):
    """Go on along a segment, 32 places at a time: how many such parts end left of each mark, and the sum up to there.

    `last` is the last part that holds a neighbour.
    """
    sub = tl.sum(tl.reshape(w, (BLK // SUB, SUB)), 1)
    c = before + tl.cumsum(sub, 0)
    left = c[None, :] <= mark[:, None]
    part += tl.sum(left.to(tl.int32), 1)
    base = tl.maximum(base, tl.max(tl.where(left, c[None, :], 0.0), 1))
    some = tl.where(sub > 0.0, b // SUB + tl.arange(0, BLK // SUB), -1)
    return part, base, tl.maximum(last, tl.max(some, 0)), before + tl.sum(sub, 0)


@kernel()
def multinomial(begin, first, end, since, until, indices, weight, row, target, ks, n_id, pos, p_out, s_out, w_out, head,
                step, layer, rows, room, edge, node, eta, shift, K: tl.constexpr, KP: tl.constexpr,
                LP: tl.constexpr, BLK: tl.constexpr, EACH: tl.constexpr, STEPS: tl.constexpr, EDGE: tl.constexpr,
                NODE: tl.constexpr, WEIGHTED: tl.constexpr, CLIP: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """k draws with replacement by the odds of a row's neighbours; a program scans one neighbourhood twice."""
    t = tl.program_id(0).to(tl.int64)
    v, dst = tl.load(row + t), tl.load(target + t)
    own, loops, a, n = extent(begin, first, end, since, until, v, t, t < rows, CLIP)
    n = n.to(tl.int32)
    if SHIFT:
        node = node + tl.load(shift + v, mask=v >= 0, other=0)
    k = tl.load(ks + t).to(tl.int32) if EACH else K
    put_loops(t, tl.arange(0, LP), dst, own, loops, t < rows, weight, n_id, pos, p_out, s_out, w_out, room, K,
              WEIGHTED)  # fmt: skip
    head_w, total, many = sums(edge, node, indices, a, n, eta, BLK, EDGE, NODE)
    sure, blank = many <= k, (total <= 0.0) & (eta > 0.0)  # blank: no neighbour has odds, so all are alike
    total = tl.where(blank, n.to(tl.float32), total)
    slot = tl.arange(0, KP)
    u = draw_unit(base(key_of(head, step, layer, STEPS), v), slot.to(tl.int64)).to(tl.float32)
    # an edge that is surely taken is found like a draw: the s-th of those that count 1 each
    mark = tl.where(sure, slot.to(tl.float32), tl.maximum(u - eta, 0.0) / (1.0 - eta) * total)
    o, alike = tl.arange(0, BLK), sure | blank
    part, base_sum = tl.zeros((KP,), tl.int32), tl.zeros((KP,), tl.float32)
    part, base_sum, last, before = locate(counted(head_w, o, n, alike, eta), 0, mark, part, base_sum, -1, 0.0, BLK)
    for b in range(BLK, n, BLK):
        w = counted(weigh(edge, node, indices, a + b + o, b + o < n, EDGE, NODE), b + o, n, alike, eta)
        part, base_sum, last, before = locate(w, b, mark, part, base_sum, last, before, BLK)
    j = tl.minimum(part, last)[:, None] * SUB + tl.arange(0, SUB)[None, :]  # the 32 places that hold each mark
    w = counted(weigh(edge, node, indices, a + j, (j >= 0) & (j < n), EDGE, NODE), j, n, alike, eta)
    inner = tl.sum((base_sum[:, None] + tl.cumsum(w, 1) <= mark[:, None]).to(tl.int32), 1)
    inner = tl.minimum(inner, tl.max(tl.where(w > 0.0, tl.arange(0, SUB)[None, :], -1), 1))  # past the end by rounding
    pick = tl.where(inner >= 0, tl.minimum(part, last) * SUB + inner, -1)
    flat = tl.minimum((u / tl.maximum(eta, 1e-30) * n.to(tl.float32)).to(tl.int32), n - 1)
    pick = tl.where((u < eta) & (sure == 0), flat, pick)
    use = (slot < K) & (slot < tl.minimum(many, k)) & (pick >= 0)
    w = tl.where(blank, 1.0, weigh(edge, node, indices, a + pick, use, EDGE, NODE))
    q = (1.0 - eta) * w / tl.maximum(total, 1e-38) + eta / n.to(tl.float32)
    q = tl.where(sure, 1.0, q)
    put(t, slot.to(tl.int64), dst, a + pick, q, tl.where(sure, 1.0, 1.0 / (k * tl.maximum(q, 1e-38))), use, slot < K,
        indices, weight, n_id, pos, p_out, s_out, w_out, rows, room, K, WEIGHTED)  # fmt: skip
