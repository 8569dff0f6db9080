"""Policy updates on the GPU. A row that comes twice in a block learns once: its first entry owns it, see `claim`.

A row of -1 is none: nothing owns it.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from adahop.ops import types
from adahop.ops.cuda_jit import kernel

FREE = tl.constexpr(2147483647)  # of a row that nothing owns
HIGH, LOW = tl.constexpr(math.exp(types.HIGH)), tl.constexpr(math.exp(types.LOW))
LEAST = tl.constexpr(math.exp(-types.SPAN))


@kernel()
def claim(owner, node, rows, TB: tl.constexpr):
    """The first entry of a row owns it."""
    t = tl.program_id(0) * TB + tl.arange(0, TB)
    v = tl.load(node + t, mask=t < rows, other=0)
    tl.atomic_min(owner + v, t, mask=(t < rows) & (v >= 0))


@triton.jit
def bump(w, pos, gain, live, a, n, S: tl.constexpr, BLK: tl.constexpr, TWICE: tl.constexpr):
    """Multiply the weight of each place by e^gain (TWICE: also where it was drawn twice); bring a far segment back."""
    gain = tl.where(live, gain, 0.0)
    if TWICE:  # S x S: not for layer-wise draws, where a row may have thousands
        mine = tl.where(live, pos, -1 - tl.arange(0, S))
        gain = tl.sum(tl.where(mine[:, None] == mine[None, :], gain[None, :], 0.0), 1)
    old = tl.load(w + pos, mask=live, other=0.0)
    new = old * tl.exp(gain)
    tl.debug_barrier()  # all threads have read before any writes
    tl.store(w + pos, new, mask=live)
    if tl.max(tl.where(live & ((new > HIGH) | (new < LOW)), 1, 0), 0) > 0:
        tl.debug_barrier()
        best = tl.full((BLK,), -float("inf"), tl.float32)
        for b in range(0, n, BLK):
            o = b + tl.arange(0, BLK)
            best = tl.maximum(best, tl.load(w + a + o, mask=o < n, other=-float("inf")))
        top = tl.max(best, 0)
        for b in range(0, n, BLK):
            o = b + tl.arange(0, BLK)
            x = tl.load(w + a + o, mask=o < n, other=0.0)
            tl.store(w + a + o, tl.maximum(x / top, LEAST), mask=o < n)


@kernel()
def grow(owner, node, ptr, pos, gain, first, last, w, S: tl.constexpr, BLK: tl.constexpr, TWICE: tl.constexpr):
    """A row's gains, given by edge, onto the weights of its places."""
    t = tl.program_id(0)
    v = tl.load(node + t)
    if tl.load(owner + v, mask=v >= 0, other=FREE) == t:
        lo, hi = tl.load(ptr + t), tl.load(ptr + t + 1)
        e = lo + tl.arange(0, S)
        x = tl.load(gain + e, mask=e < hi, other=0.0)
        a = tl.load(first + v)
        n = (tl.load(last + v) - a).to(tl.int32)
        bump(w, tl.load(pos + e, mask=e < hi, other=0), x, (e < hi) & (x != 0.0), a, n, S, BLK, TWICE)
        tl.store(owner + v, FREE)


@kernel("h", "value", "width", "stride")
def push(owner, node, h, value, width, stride, BF: tl.constexpr):
    """value[node[t]] = h[t] where row t owns its node."""
    t = tl.program_id(0).to(tl.int64)
    v = tl.load(node + t)
    if tl.load(owner + v) == t:
        c = tl.arange(0, BF)
        x = tl.load(h + t * width + c, mask=c < width, other=0.0)
        tl.store(value + v * stride + c, x.to(value.dtype.element_ty), mask=c < width)
        tl.store(owner + v, FREE)


@triton.jit
def finite(x):
    return (x == x) & (tl.abs(x) < float("inf"))


@kernel()
def exp3(owner, node, ptr, pos, prob, scale, energy, first, last, w, mean, visits, step, memory, eta, horizon,
         S: tl.constexpr, BLK: tl.constexpr, ROOT: tl.constexpr, ONCE: tl.constexpr, TWICE: tl.constexpr,
         PAPER: tl.constexpr):  # fmt: skip
    """A row of EXP3 (ONCE: of EXP3.M): running mean of the reward, gains, weights; see `adahop.policies.exp3`."""
    t = tl.program_id(0)
    v = tl.load(node + t)
    if tl.load(owner + v, mask=v >= 0, other=FREE) == t:
        lo, hi = tl.load(ptr + t), tl.load(ptr + t + 1)
        e = lo + tl.arange(0, S)
        live = (e < hi) & (tl.load(prob + e, mask=e < hi, other=1.0) < 1.0)
        k = tl.sum(live.to(tl.float32), 0)
        a = tl.load(first + v)
        n = (tl.load(last + v) - a).to(tl.int32)
        reward = tl.where(live, tl.load(energy + e, mask=live, other=0.0), 0.0)
        if not ONCE:
            reward = reward * k
        times = tl.load(visits + v) + (k > 0).to(tl.int32)
        tl.store(visits + v, times)
        often = 1.0 / tl.maximum(k * tl.load(scale + e, mask=live, other=1.0), 1e-30)
        if PAPER:
            late = tl.where(horizon > 0.0, horizon, tl.maximum(times, 1).to(tl.float32))
            size = tl.maximum(n.to(tl.float32), 1.0)
            log = tl.maximum(tl.log(size / tl.maximum(k, 1.0)), 0.0)
            share = eta * k / size  # before the powers: k^5 and n^4 leave float32 in a large row
            gain = (
                tl.sqrt((1.0 - eta) * share * share * share * share * k * log / late)
                * reward
                / tl.maximum(k * often, 1e-30)
            )
        else:
            old = tl.load(mean + v)
            rate = tl.maximum(1.0 / tl.maximum(times, 1).to(tl.float32), memory)
            new = tl.where(k > 0, old + rate * (tl.sum(reward, 0) / tl.maximum(k, 1.0) - old), old)
            tl.store(mean + v, tl.where(finite(new), new, old))
            by = step * tl.sqrt(k) if ROOT else step
            gain = by * (reward / tl.maximum(new, 1e-38) - 1.0) / tl.maximum(k * often * n, 1e-30)
        gain = tl.where(finite(gain), tl.minimum(tl.maximum(gain, -1.0), 1.0), 0.0)
        bump(w, tl.load(pos + e, mask=live, other=0), gain, live, a, n, S, BLK, TWICE)
        tl.store(owner + v, FREE)


@kernel()
def track_sum(owner, row, n_id, ptr, src, dst, weight, scale, energy, total, times, S: tl.constexpr):
    """Add |m_j|^2 of each true neighbour's message to its node's sum."""
    t = tl.program_id(0)
    v = tl.load(row + t)
    if tl.load(owner + v, mask=v >= 0, other=FREE) == t:
        lo, hi = tl.load(ptr + t), tl.load(ptr + t + 1)
        e = lo + tl.arange(0, S)
        ok = e < hi
        own = tl.load(n_id + tl.load(dst + e, mask=ok, other=0), mask=ok, other=0)
        j = tl.load(n_id + tl.load(src + e, mask=ok, other=0), mask=ok, other=0)
        factor = tl.load(weight + e, mask=ok, other=0.0) * tl.load(scale + e, mask=ok, other=0.0)
        x = tl.load(energy + e, mask=ok, other=0.0)
        ok = ok & (j != own) & (factor > 0.0) & finite(x)
        tl.atomic_add(total + j, x / tl.maximum(factor * factor, 1e-30), mask=ok)
        tl.atomic_add(times + j, 1, mask=ok)
        tl.store(owner + v, FREE)


@kernel()
def track_mean(n_id, src, total, times, mean, seen, edges, TB: tl.constexpr):
    """mean[e] for the one edge that represents its node, -1 for the others; sums and counts are 0 again."""
    e = tl.program_id(0) * TB + tl.arange(0, TB)
    ok = e < edges
    j = tl.load(n_id + tl.load(src + e, mask=ok, other=0), mask=ok, other=0)
    many = tl.atomic_xchg(times + j, tl.zeros((TB,), tl.int32), mask=ok)
    speaks = ok & (many > 0)
    x = tl.load(total + j, mask=speaks, other=0.0) / tl.maximum(many, 1).to(tl.float32)
    tl.store(total + j, tl.zeros((TB,), tl.float32), mask=speaks)
    tl.store(mean + e, tl.where(speaks, x, -1.0), mask=ok)
    tl.atomic_add(seen, tl.sum(tl.where(speaks, x, 0.0), 0))
    tl.atomic_add(seen + 1, tl.sum(speaks.to(tl.float32), 0))


@kernel()
def track_level(level, seen, few):
    """The mean |m|^2 of the nodes of this step, averaged with earlier steps where they are few."""
    many, old = tl.load(seen + 1), tl.load(level)
    now = tl.load(seen) / tl.maximum(many, 1.0)
    new = tl.where(old > 0.0, old + many / (many + few) * (now - old), now)
    tl.store(level, tl.where(many > 0.0, new, old))
    tl.store(seen, 0.0)
    tl.store(seen + 1, 0.0)


@kernel()
def track_put(n_id, src, mean, level, square, visits, memory, most, edges, TB: tl.constexpr):
    """The running average of each node seen."""
    e = tl.program_id(0) * TB + tl.arange(0, TB)
    x = tl.load(mean + e, mask=e < edges, other=-1.0)
    ok, today = x >= 0.0, tl.load(level)
    j = tl.load(n_id + tl.load(src + e, mask=ok, other=0), mask=ok, other=0)
    times = tl.minimum(tl.load(visits + j, mask=ok, other=0).to(tl.int32) + 1, most)
    old = tl.load(square + j, mask=ok, other=1.0)
    rate = tl.maximum(1.0 / (times + 1).to(tl.float32), memory)
    new = tl.where(today > 0.0, old + rate * (x / tl.maximum(today, 1e-38) - old), old)
    tl.store(visits + j, times.to(tl.int16), mask=ok)
    tl.store(square + j, new, mask=ok)
