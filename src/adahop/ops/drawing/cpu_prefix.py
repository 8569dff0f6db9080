"""Draws on the CPU from prefix sums of inclusion probabilities: k look-ups per target, nothing is scanned.

A row's inclusion probabilities, divided by k, are whole numbers that sum to 2^32, each at least 1 and at most
2^32 // k; `table` holds their prefix sums as uint32 (the last, 2^32, is 0 there and never read). The marks are
floor((U + s 2^32) / k), s = 0 .. k - 1, for one U of 32 random bits. Every whole number below 2^32 is a mark for
exactly k of all (U, s), so an edge of length l comes with probability exactly k l / 2^32; two marks are at least
2^32 // k apart, so that no edge comes twice. Draws with replacement have a mark of 32 random bits each, and
probability l / 2^32; their tables are made as for k = 1.

With `wide` the table holds the sums at the end of every `wide` edges alone. A block's length is then that of a
while ago, and its edges share it by the odds of now, read again: known as exactly, and so as unbiased.
"""

from __future__ import annotations

import numpy as np

from adahop.ops.drawing.cpu_scan import (
    FLOOR,
    MULTINOMIAL,
    inclusion,
    k_of,
    shift_of,
    shuffle,
    sure,
    systematic,
    uniform_row,
)
from adahop.ops.random import base, draw32
from adahop.ops.simd import bare, kernel, part, prefetch, prefetch_write, words_passed

ONE = 1 << 32  # a row's whole length
LINE = 16  # uint32 per cache line
LINES = 8  # of the next row that are asked for while one is renewed
LIGHT = 6  # edges whose sums are made in the time that one is drawn
FULL = 1e-3  # a block with so little room left is full: no cap is looked for
LONG = 512  # edges from which on a first guess is too far off
GROUP = 16  # targets whose lines are asked for before the first is read
AHEAD = 16  # targets whose state is asked for before it is read
LISTED = np.int32(-(2**31))  # in place of visits: a row is listed once, however often it comes


@part
def summary(w, n):
    """The sum, the largest and the smallest of w[:n]; four chains, as each addition waits for the one before."""
    t0, t1, t2, t3 = 0.0, 0.0, 0.0, 0.0
    best, least = 0.0, np.inf
    whole = n & ~3
    for j in range(0, whole, 4):
        w0, w1, w2, w3 = w[j], w[j + 1], w[j + 2], w[j + 3]
        t0, t1, t2, t3 = t0 + w0, t1 + w1, t2 + w2, t3 + w3
        best = max(best, max(max(w0, w1), max(w2, w3)))
        least = min(least, min(min(w0, w1), min(w2, w3)))
    for j in range(whole, n):
        t0 += w[j]
        best, least = max(best, w[j]), min(least, w[j])
    return (t0 + t1) + (t2 + t3), best, least


@part
def fill(a, n, indices, edge, node, far, root, w):
    """w[:n] = the odds of the edges from a on, the smallest within reach of the largest; their sum, and both."""
    if node.shape[0] > 0:
        for j in range(n):
            w[j] = np.float64(node[np.uint64(indices[np.uint64(a + j)] + far)])
        if root:
            for j in range(n):  # a loop of its own: several roots at a time
                w[j] = np.sqrt(w[j])
    else:
        for j in range(n):
            w[j] = 1.0
    if edge.shape[0] > 0:
        for j in range(n):
            w[j] *= np.float64(edge[np.uint64(a + j)])
    total, best, least = summary(w, n)
    low = best * FLOOR if best > 0.0 else 1.0
    if least < low:
        total = 0.0
        for j in range(n):
            w[j] = max(w[j], low)
            total += w[j]
    return total, max(best, low), max(least, low)


@part
def lay(w, n, times, even, whole, a, table):
    """The prefix sums of w * times + even, which sum to `whole`, cut to whole numbers; four at a time."""
    exact, most = 0.0, (n - 1) & ~3
    for j in range(0, most, 4):
        o = a + j
        x0, x2 = w[j] * times + even, w[j + 2] * times + even
        x1, x3 = x0 + (w[j + 1] * times + even), x2 + (w[j + 3] * times + even)
        table[o] = np.int64(exact + x0)
        table[o + 1] = np.int64(exact + x1)
        table[o + 2] = np.int64(exact + (x1 + x2))
        exact += x1 + x3
        table[o + 3] = np.int64(exact)
    for j in range(most, n - 1):
        exact += w[j] * times + even
        table[np.uint64(a + j)] = np.int64(exact)
    table[a + n - 1] = whole


@part
def fit(n, most, whole, a, table):
    """Move the prefix sums so that no step is less than 1 or more than `most`; the longest step."""
    before, longest = np.int64(0), np.int64(1)
    for j in range(a, a + n - 1):
        before += min(max(np.int64(table[j]) - before, 1), most)
        table[j] = before
    after = np.int64(whole)
    for j in range(a + n - 2, a - 1, -1):  # what the limits left over at the end
        now = min(max(np.int64(table[j]), after - most), after - 1)
        longest = max(longest, after - now)
        table[j] = now
        after = now
    return max(longest, after)


@part
def share_out(w, n, k, eta, whole, odds, a, table):
    """The prefix sums of n lengths that sum to `whole`, by the weights w and what `fill` says of them; the longest.

    None is less than 1 or more than 2^32 // k. The weights are overwritten where some would be.
    """
    total, best, least = odds
    many = np.float64(k) if whole == ONE else whole * (k / np.float64(ONE))  # how many marks fall there
    times, even = (1.0 - eta) * whole / total, eta * whole / n
    if best * times + even > ONE / k and many < n - FULL:
        inclusion(w, n, many, eta)
        times, even, best, least = ONE / k, 0.0, 1.0, 0.0
    lay(w, n, times, even, whole, a, table)
    longest = np.int64(best * times + even) + 2
    if least * times + even < 2.0 or longest > ONE // k:
        longest = fit(n, ONE // k, whole, a, table)
    return longest


@part
def sums_at(a, v, wide):
    """Where the sums of row v's blocks begin, whose edges begin at a: n edges have room for n / wide + 1 sums."""
    return a // wide + v


@part
def ask_row(a, b, indices, edge, node, table, written):
    """Ask for what renewing the edges a..b reads and writes, as far as the processor would not foresee it."""
    for j in range(a, min(b, a + LINE * LINES), LINE):
        if written:
            prefetch_write(table, j)
        if node.shape[0] > 0:
            prefetch(indices, j)
        if edge.shape[0] > 0:
            prefetch(edge, j)


@kernel
def renew(lo, hi, rows, ks, first, last, indices, odds, table, upto, wide):
    """The prefix sums of the rows lo..hi again from the current odds, for draws of ks.

    upto[2 v] is the largest k that v's table serves: no inclusion probability is then above 1. `wide` is None where
    every edge has a sum: what is not asked for is then not compiled.
    """
    edge, node, eta, shift, root = bare(odds)
    rows, ks, first, last, indices, table, upto = bare((rows, ks, first, last, indices, table, upto))
    longest = 1
    for i in range(lo, hi):
        longest = max(longest, last[rows[i]] - first[rows[i]])
    w = np.empty(longest)
    if wide is not None:
        line = np.empty(longest, np.int64)
    for i in range(lo, hi):
        if i + 2 < hi:
            ask_row(first[rows[i + 2]], last[rows[i + 2]], indices, edge, node, table, wide is None)
        v = rows[i]
        a, n, k = first[v], last[v] - first[v], ks[i]
        known = fill(a, n, indices, edge, node, shift_of(shift, v), root, w)
        if wide is None:
            step = share_out(w, n, k, eta, ONE, known, a, table)
        else:
            step = share_out(w, n, k, eta, ONE, known, 0, line)
            o = sums_at(a, v, wide)
            for b in range((n - 1) // wide):  # that of the last block is known
                table[o + b] = line[(b + 1) * wide - 1]
        upto[2 * v] = min(ONE // step, 0x7FFFFFFF)


@kernel
def visit(rows, ptr, begin, first, last, often, once, upto, due, ks, work):
    """Count a visit to each row that left anything to chance; list those due, n / (often k) visits after the last.

    upto[2 v + 1] is the number of visits since; `once`: tables serve draws without replacement. `work` gets the
    cumulative lengths of the rows that are due.
    """
    many, targets = 0, rows.shape[0]
    work[0] = 0
    for t in range(targets):
        if t + AHEAD < targets:
            prefetch(begin, rows[t + AHEAD])
            prefetch(first, rows[t + AHEAD])
            prefetch_write(upto, 2 * rows[t + AHEAD])
        v = rows[t]
        n, k = last[v] - first[v], ptr[t + 1] - ptr[t] - (first[v] - begin[v])
        seen = np.int64(upto[2 * v + 1]) + 1
        if n > k and k > 0 and seen > 0:
            now = seen * k * often >= n
            upto[2 * v + 1] = LISTED if now else seen
            if now:
                due[many], ks[many], work[many + 1] = v, k if once else 1, work[many] + n
                many += 1
    for i in range(many):
        upto[2 * due[i] + 1] = 0
    return many


@kernel
def visit_and_renew(rows, ptr, begin, first, last, often, once, indices, odds, table, upto, wide, due, ks, work):
    """Both in one call, for one thread."""
    many = visit(rows, ptr, begin, first, last, often, once, upto, due, ks, work)
    renew(0, many, due, ks, first, last, indices, odds, table, upto, wide)


@part
def set_marks(stream, k, d, how, mark):
    """mark[d + s] = floor((U + s 2^32) / k), or a U of its own for each draw with replacement."""
    if how == MULTINOMIAL:
        for s in range(k):
            mark[d + s] = np.int64(draw32(stream, s))
    else:
        bits = np.int64(draw32(stream, 0))
        whole, rest = ONE // k, ONE % k
        at, over = bits // k, bits % k
        for s in range(k):
            mark[d + s] = at
            over += rest
            at += whole + (1 if over >= k else 0)
            over -= k if over >= k else 0


@kernel
def seek(a, n, at, t, table):
    """The edge under the mark t, looked for from `at` on: in steps that double, then by bisection."""
    last, step, low, high = a + n - 1, LINE, at, at
    if at < last and np.int64(table[at]) <= t:
        low, high = at + 1, at + step
        while high < last and np.int64(table[high]) <= t:
            step *= 2
            low, high = high + 1, high + step
        high = min(high, last)
    else:
        low = at - step
        while low >= a and np.int64(table[low]) > t:
            step *= 2
            low, high = low - step, low
        low = max(low + 1, a)
    while low < high:
        middle = (low + high) >> 1
        right = np.int64(table[middle]) <= t
        low, high = (middle + 1 if right else low), (high if right else middle)
    return low


@part
def ask(table, at):
    """Ask for the sixteen sums around `at`, which mostly lie on two lines."""
    prefetch(table, max(at - LINE // 2, 0))
    prefetch(table, min(at + LINE // 2, table.shape[0]) - 1)


@part
def find(a, n, at, t, table):
    """The edge under the mark t, guessed to be near `at`: sixteen sums around it tell, or else a search does."""
    last, size = a + n - 1, table.shape[0]
    if size < LINE:
        return seek(a, n, at, t, table)
    begin = min(max(at - LINE // 2, 0), size - LINE)
    passed = words_passed(table, begin, max(a - begin, 0), min(last - begin, LINE), t)
    if (passed > 0 or begin <= a) and (passed < LINE or begin + LINE >= last):
        return min(begin + passed, last)
    return seek(a, n, at, t, table)


@part
def state(a, n, k, o, how, table, pos, prob, scale):
    """The probabilities of the edges found: of each draw with replacement, else of coming at all."""
    once = how != MULTINOMIAL
    unit, most, times = (k / np.float64(ONE) if once else 1.0 / ONE), ONE // k, np.float32(1.0 if once else k)
    last = a + n - 1
    for s in range(k):
        p = pos[o + s]
        end = np.int64(table[p]) if p < last else np.int64(ONE)
        length = end - (np.int64(table[p - 1]) if p > a else np.int64(0))
        q = np.float32(1.0) if once and length >= most else np.float32(length * unit)
        prob[o + s], scale[o + s] = q, np.float32(1.0) / (times * q)


@kernel
def scan(a, n, k, o, stream, indices, edge, node, far, root, eta, pos, prob, scale):
    """k of n by the current odds."""
    w, idx, out = np.empty(n), np.arange(n), np.empty(n, np.int64)
    fill(a, n, indices, edge, node, far, root, w)
    inclusion(w, n, k, eta)
    shuffle(idx, w, n, stream)
    taken = systematic(w, n, k, stream, out)
    for s in range(taken):
        j = out[s]
        pos[o + s], prob[o + s], scale[o + s] = a + idx[j], w[j], 1.0 / w[j]


@part
def by_table(k, n, how, serves):
    """Whether k draws of n are made by look-ups."""
    return 0 <= k < n and serves > 0 and (how == MULTINOMIAL or serves >= k)


@part
def find_blocks(a, n, v, k, d, o, wide, mark, table, indices, edge, pos):
    """pos[o + s] = the block under each mark, whose edges are asked for."""
    at, many = sums_at(a, v, wide), (n + wide - 1) // wide
    for s in range(k):
        b = seek(at, many, at + ((mark[d + s] * many) >> 32), mark[d + s], table) - at if many > 1 else 0
        pos[o + s] = b
        for j in range(a + b * wide, min(a + (b + 1) * wide, a + n), LINE):
            prefetch(indices, j)
            if edge.shape[0] > 0:
                prefetch(edge, j)


@part
def within_blocks(a, n, v, k, d, o, how, wide, far, odds, indices, mark, table, w, line, drawn):
    """From blocks to edges: a block's length is shared out among its edges by the odds of now."""
    edge, node, eta, _, root = odds
    pos, prob, scale = drawn
    once, at, held, end = how != MULTINOMIAL, sums_at(a, v, wide), -1, np.int64(0)
    unit, most, times = (k / np.float64(ONE) if once else 1.0 / ONE), ONE // k, np.float32(1.0 if once else k)
    begin, low, m = np.int64(0), np.int64(0), 0
    for s in range(k):
        b = pos[o + s]
        if b != held:
            held, low = b, b * wide
            m = min(wide, n - low)
            begin = np.int64(table[at + b - 1]) if b > 0 else np.int64(0)
            end = np.int64(table[at + b]) if low + m < n else np.int64(ONE)
            known = fill(a + low, m, indices, edge, node, far, root, w)
            even = min(eta * m * (np.float64(ONE) / n) / (end - begin), 0.999)
            share_out(w, m, k if once else 1, even, end - begin, known, 0, line)
        x, j = mark[d + s] - begin, 0
        for i in range(m - 1):
            j += line[i] <= x
        length = line[j] - (line[j - 1] if j > 0 else np.int64(0))
        q = np.float32(1.0) if once and length >= most else np.float32(length * unit)
        pos[o + s], prob[o + s], scale[o + s] = a + low + j, q, np.float32(1.0) / (times * q)


@part
def prefix_group(begin, end, hi, dst, where, ptr, ks, how, key, odds, indices, prefix, mark, out, drawn):
    """Fill the targets begin..end: all that will be read is asked for before the first is read."""
    start, size, self_loops, loops = where
    edge, node, eta, shift, root = odds
    table, upto = prefix
    pos, prob, scale = drawn
    most = mark.shape[0] // GROUP
    for t in range(begin, end):
        if t + AHEAD < hi:
            prefetch(upto, 2 * dst[t + AHEAD])
        a, n, v, d = start[t], size[t], dst[t], (t - begin) * most
        o, k = ptr[t] + loops[t], k_of(ks, t)
        sure(self_loops[t], ptr[t], loops[t], pos, prob, scale)
        if k < 0 or n <= k:
            sure(a, o, n, pos, prob, scale)
            continue
        stream, serves = base(key, v), upto[2 * v]
        if by_table(k, n, how, serves):
            set_marks(stream, k, d, how, mark)
            for s in range(k):
                pos[o + s] = a + ((mark[d + s] * n) >> 32)
                ask(table, pos[o + s])
        elif serves == 0:
            uniform_row(a, n, k, o, stream, how, out, pos, prob, scale)
        else:
            scan(a, n, k, o, stream, indices, edge, node, shift_of(shift, v), root, eta, pos, prob, scale)
    for t in range(begin, end):
        a, n, d = start[t], size[t], (t - begin) * most
        o, k = ptr[t] + loops[t], k_of(ks, t)
        if n > LONG and by_table(k, n, how, upto[2 * dst[t]]):
            for s in range(k):  # a second guess, by how far the first one is off
                p = pos[o + s]
                p = min(max(p + (((mark[d + s] - np.int64(table[p])) * n) >> 32), a), a + n - 2)
                pos[o + s] = p
                ask(table, p)
    for t in range(begin, end):
        a, n, d = start[t], size[t], (t - begin) * most
        o, k = ptr[t] + loops[t], k_of(ks, t)
        if by_table(k, n, how, upto[2 * dst[t]]):
            for s in range(k):
                pos[o + s] = find(a, n, pos[o + s], mark[d + s], table)
            state(a, n, k, o, how, table, pos, prob, scale)


@part
def block_group(begin, end, hi, dst, where, ptr, ks, how, key, odds, indices, prefix, wide, mark, out, room, drawn):
    """The same by sums of blocks."""
    start, size, self_loops, loops = where
    edge, node, eta, shift, root = odds
    table, upto = prefix
    pos, prob, scale = drawn
    w, line = room
    most = mark.shape[0] // GROUP
    for t in range(begin, end):
        if t + AHEAD < hi:
            prefetch(upto, 2 * dst[t + AHEAD])
        a, n, v, d = start[t], size[t], dst[t], (t - begin) * most
        o, k = ptr[t] + loops[t], k_of(ks, t)
        sure(self_loops[t], ptr[t], loops[t], pos, prob, scale)
        if k < 0 or n <= k:
            sure(a, o, n, pos, prob, scale)
            continue
        stream, serves = base(key, v), upto[2 * v]
        if by_table(k, n, how, serves):
            set_marks(stream, k, d, how, mark)
            find_blocks(a, n, v, k, d, o, wide, mark, table, indices, edge, pos)
        elif serves == 0:
            uniform_row(a, n, k, o, stream, how, out, pos, prob, scale)
        else:
            scan(a, n, k, o, stream, indices, edge, node, shift_of(shift, v), root, eta, pos, prob, scale)
    for t in range(begin, end):
        a, n, v, d = start[t], size[t], dst[t], (t - begin) * most
        o, k = ptr[t] + loops[t], k_of(ks, t)
        if by_table(k, n, how, upto[2 * v]):
            far = shift_of(shift, v)
            within_blocks(a, n, v, k, d, o, how, wide, far, odds, indices, mark, table, w, line, drawn)


@kernel
def prefix_rows(lo, hi, dst, where, ptr, ks, how, key, odds, indices, prefix, wide, drawn):
    """Fill targets lo..hi, k draws of n by the rows' tables, of edges where `wide` is None.

    A row without a table is drawn from evenly; one whose table does not serve k without replacement is scanned.
    """
    where, odds, prefix, drawn = bare(where), bare(odds), bare(prefix), bare(drawn)
    indices, dst, ptr, ks = bare((indices, dst, ptr, ks))
    most = 1
    for t in range(lo, hi):
        most = max(most, ptr[t + 1] - ptr[t])
    mark, out = np.empty(GROUP * most, np.int64), np.empty(most, np.int64)
    if wide is not None:
        room = np.empty(wide), np.empty(wide, np.int64)
    for begin in range(lo, hi, GROUP):
        end = min(begin + GROUP, hi)
        if wide is None:
            prefix_group(begin, end, hi, dst, where, ptr, ks, how, key, odds, indices, prefix, mark, out, drawn)
        else:
            block_group(begin, end, hi, dst, where, ptr, ks, how, key, odds, indices, prefix, wide, mark, out, room,
                        drawn)  # fmt: skip
