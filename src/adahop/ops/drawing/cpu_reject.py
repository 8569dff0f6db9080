"""Draws by rejection on the CPU: a neighbour at random, kept in proportion to its number; nothing is scanned."""

from __future__ import annotations

import numpy as np

from adahop.ops.drawing.cpu_scan import MULTINOMIAL, fill_odds, put, shift_of, sure
from adahop.ops.random import base, draw_unit, mix
from adahop.ops.simd import bare, kernel, part, prefetch

UNIT = 16.0  # a target's reach, n max x / sum x, is kept in sixteenths, rounded up
FAR = 32 * 16  # a reach from which on a scan costs no more
MOST = np.int16(32767)
GROUP = 64  # targets whose tries go together
AHEAD = 8  # targets whose bounds are asked for before they are used
TRIES = 1 << 16  # never needed; after them the last one is taken
NEXT = 1 << 24  # counters from one try to the next
_GOLD, _HALF, _LOW = np.uint64(0x9E3779B97F4A7C15), np.uint64(32), np.uint64(0xFFFFFFFF)


@kernel
def sum_up(lo, hi, first, last, indices, weight, node, shift, total, reach):
    """The sum of x = weight * node[source] over each row's neighbours, and how far the largest is above the mean."""
    for v in range(lo, hi):
        a, b = first[v], last[v]
        c, best, far = 0.0, 0.0, shift_of(shift, v)
        for j in range(a, b):
            x = np.float64(node[indices[j] + far])
            if weight.shape[0] > 0:
                x *= np.float64(weight[j])
            c += x
            best = max(best, x)
        total[v] = c
        out = np.ceil(UNIT * (b - a) * best / c * (1.0 + 1e-6)) if c > 0.0 else 0.0
        reach[v] = MOST if not out < MOST else np.int16(out)


@part
def try_all(m, r, at, key_of, row, start, size, pos, out):
    """A place at random for each of the m draws that are still open, and what decides whether it is kept."""
    for d in range(m):
        t = at + row[d]
        bits = mix(key_of[d] + np.uint64(r * NEXT) * _GOLD)
        pos[d] = start[t] + np.int64(((bits >> _HALF) * np.uint64(size[t])) >> _HALF)
        out[d] = np.float64(bits & _LOW) * 2.0**-32


@part
def settle(m, last, pos, keep, value, bound, row, stream, slot, chosen):
    """Keep those whose number is above their bar; the others move together. How many are left."""
    left = 0
    for d in range(m):
        g = row[d]
        chosen[slot[d]] = pos[d]
        kept = keep[d] * bound[g] < value[d] or last
        row[left], stream[left], slot[left] = g, stream[d], slot[d]
        left += 0 if kept else 1
    return left


@part
def values(m, at, row, dst, pos, indices, weight, node, shift, value):
    if shift.shape[0] > 0:
        for d in range(m):
            value[d] = np.float64(node[indices[pos[d]] + shift[dst[at + row[d]]]])
    else:
        for d in range(m):
            value[d] = np.float64(node[indices[pos[d]]])
    if weight.shape[0] > 0:
        for d in range(m):
            value[d] *= np.float64(weight[pos[d]])


@part
def open_group(lo, hi, dst, start, size, begin, loops, ptr, ks, key, eta, weight, node, shift, indices, total, reach,
               bound, row, stream, slot, chosen, w, idx, out, pos, prob, scale):  # fmt: skip
    """Fill what needs no tries or is better scanned; list the other draws, and those of the even share as chosen."""
    m = 0
    for t in range(lo, hi):
        if t + AHEAD < hi:
            prefetch(total, dst[t + AHEAD])
            prefetch(reach, dst[t + AHEAD])
        a, n, v, o = start[t], size[t], dst[t], ptr[t] + loops[t]
        k = ks[t] if ks.shape[0] > 1 else ks[0]
        sure(begin[t], ptr[t], loops[t], pos, prob, scale)
        if k < 0 or n <= k:
            sure(a, o, n, pos, prob, scale)
            continue
        bound[t - lo] = 0.0
        if reach[v] == 0 or reach[v] > FAR:
            many = fill_odds(w, idx, a, n, (weight, node, eta, shift), shift_of(shift, v), indices)
            put(a, w, idx, many, k, eta, MULTINOMIAL, base(key, v), out, o, (pos, prob, scale))
            continue
        bound[t - lo] = reach[v] / UNIT * total[v] / n
        of = base(key, v)
        for s in range(k):
            u = draw_unit(of, s)
            chosen[o + s - ptr[lo]] = a + min(np.int64(u / eta * n), n - 1) if u < eta else -1
            if u >= eta:
                row[m], slot[m], stream[m] = t - lo, o + s - ptr[lo], of + np.uint64(s + 1 + NEXT) * _GOLD
                m += 1
    return m


@kernel
def reject_rows(lo, hi, dst, where, ptr, ks, key, odds, indices, bounds, drawn):
    """Fill targets lo..hi, k draws with replacement in proportion (1 - eta) x / sum x + eta / n."""
    start, size, begin, loops = bare(where)
    weight, node, eta, shift = odds
    weight, node, shift, indices, dst, ptr, ks = bare((weight, node, shift, indices, dst, ptr, ks))
    total, reach = bare(bounds)
    pos, prob, scale = bare(drawn)
    most, longest = 1, 1
    for at in range(lo, hi, GROUP):
        most = max(most, ptr[min(at + GROUP, hi)] - ptr[at])
    for t in range(lo, hi):
        longest = max(longest, size[t])
    w, idx, out = np.empty(longest), np.empty(longest, np.int64), np.empty(longest, np.int64)
    row, slot, place, chosen = (
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most, np.int64),
    )
    stream, keep, value = np.empty(most, np.uint64), np.empty(most), np.empty(most)
    bound = np.empty(GROUP)
    for at in range(lo, hi, GROUP):
        end = min(at + GROUP, hi)
        m = open_group(at, end, dst, start, size, begin, loops, ptr, ks, key, eta, weight, node, shift, indices, total,
                       reach, bound, row, stream, slot, chosen, w, idx, out, pos, prob, scale)  # fmt: skip
        r = 0
        while m > 0:
            try_all(m, r, at, stream, row, start, size, place, keep)
            values(m, at, row, dst, place, indices, weight, node, shift, value)
            m = settle(m, r > TRIES, place, keep, value, bound, row, stream, slot, chosen)
            r += 1
        state(at, end, dst, start, size, loops, ptr, ks, eta, indices, weight, node, shift, total, bound, chosen, pos,
              prob, scale)  # fmt: skip


@part
def state(lo, hi, dst, start, size, loops, ptr, ks, eta, indices, weight, node, shift, total, bound, chosen, pos,
          prob, scale):  # fmt: skip
    """Write the places chosen by tries, each with its probability."""
    for t in range(lo, hi):
        k, n = ks[t] if ks.shape[0] > 1 else ks[0], size[t]
        if k < 0 or n <= k or bound[t - lo] <= 0.0:
            continue
        share, even, far = (1.0 - eta) / np.float64(total[dst[t]]), eta / n, shift_of(shift, dst[t])
        for o in range(ptr[t] + loops[t], ptr[t + 1]):
            p = chosen[o - ptr[lo]]
            x = np.float64(node[indices[p] + far])
            if weight.shape[0] > 0:
                x *= np.float64(weight[p])
            q = share * x + even
            pos[o], prob[o], scale[o] = p, q, 1.0 / (k * q)
