"""Draws from prefix sums of inclusion probabilities, in plain torch; see `cpu_prefix` for the numbers.

A row's sums are made from the odds of one moment and serve until they are made again. Draws in between go by odds that
are a little old and exactly known: prob and scale are those of the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adahop.ops import random
from adahop.ops.drawing import reference
from adahop.ops.segments import pointer, spans
from adahop.ops.types import Drawn, Edges, Odds, Prefix, Rows, plain_odds

ONE = 1 << 32  # a row's whole length
FULL = 1e-3  # as in `cpu_prefix`


def visit(row: Tensor, ptr: Tensor, edges: Edges, often: int, once: bool, odds: Odds, prefix: Prefix) -> None:
    """Count a visit to each row, and make the sums of those again that are due, n / (often k) visits after the last
    time: for k draws `once` each, or for draws with replacement.
    """
    n, k = edges.last[row] - edges.first[row], ptr.diff() - (edges.first[row] - edges.begin[row])
    due: dict[int, int] = {}
    for v, size, many in torch.stack([row, n, k])[:, (n > k) & (k > 0)].T.tolist():
        seen = int(prefix.upto[2 * v + 1]) + 1
        if v not in due:
            prefix.upto[2 * v + 1] = seen
            if seen * many * often >= size:
                due[v] = many
    for v in due:
        prefix.upto[2 * v + 1] = 0
    if due:
        ks = torch.tensor(list(due.values()) if once else [1] * len(due))
        renew(torch.tensor(list(due)), ks, edges, odds, prefix)


def renew(rows: Tensor, k: Tensor, edges: Edges, odds: Odds, prefix: Prefix) -> None:
    """The sums of different rows again, from the current odds, for draws of k."""
    for v, many in zip(rows.tolist(), k.tolist(), strict=True):
        a, n = int(edges.first[v]), int(edges.last[v] - edges.first[v])
        sums = _shared_out(v, a, n, many, odds.eta, ONE, edges, odds)
        prefix.upto[2 * v] = min(ONE // int(sums.diff(prepend=sums.new_zeros(1)).max()), 2**31 - 1)
        if prefix.wide == 1:
            prefix.table[a : a + n] = _words(sums)
        else:
            ends, o = sums[prefix.wide - 1 : n - 1 : prefix.wide], a // prefix.wide + v
            prefix.table[o : o + len(ends)] = _words(ends)


def _words(sums: Tensor) -> Tensor:
    """The bits of uint32 as int32."""
    return torch.where(sums < ONE // 2, sums, sums - ONE).int()


def _shared_out(v: int, a: int, n: int, k: int, eta: float, whole: int, edges: Edges, odds: Odds) -> Tensor:
    """The prefix sums of the lengths of n edges from a on, of row v, that sum to `whole`."""
    place, row = torch.arange(a, a + n), torch.zeros(n, dtype=torch.long)
    w = reference.lifted(reference.weigh(place, row, torch.tensor([v]), edges.indices, plain_odds(odds)), row, 1)
    many = torch.tensor([k * (whole / ONE)], dtype=torch.double)
    if float(many) >= n - FULL:
        length = whole * ((1.0 - eta) * w / w.sum() + eta / n)
    else:
        length = reference.inclusion(w, row, 1, many, eta) / k * ONE
    return _whole(length, ONE // k, whole)


def _whole(length: Tensor, most: int, whole: int) -> Tensor:
    """Prefix sums in whole numbers that end with `whole`, no step less than 1 or more than `most`."""
    sums = length.cumsum(0).floor().long()
    sums[-1] = whole
    steps = sums.diff(prepend=sums.new_zeros(1))
    if int(steps.min()) < 1 or int(steps.max()) > most:
        wanted, last = sums.tolist(), 0
        for j, x in enumerate(wanted):
            last += min(max(x - last, 1), most)
            wanted[j] = last
        wanted[-1] = whole
        for j in range(len(wanted) - 2, -1, -1):
            wanted[j] = min(max(wanted[j], wanted[j + 1] - most), wanted[j + 1] - 1)
        sums = torch.tensor(wanted)
    return sums


def _written_out(rows: list[int], k: list[int], edges: Edges, odds: Odds, prefix: Prefix) -> Tensor:
    """The sums of every edge of the rows, from those of their blocks: each shares its length by the odds of now."""
    table, wide = torch.zeros(edges.indices.numel(), dtype=torch.int32), prefix.wide
    for v, many in zip(rows, k, strict=True):
        a, n, begin = int(edges.first[v]), int(edges.last[v] - edges.first[v]), 0
        for b in range(-(-n // wide)):
            low, m = a + b * wide, min(wide, n - b * wide)
            end = ONE if b * wide + m == n else int(prefix.table[a // wide + v + b]) & (ONE - 1)
            eta = min(odds.eta * m * (ONE / n) / (end - begin), 0.999)
            table[low : low + m] = _words(begin + _shared_out(v, low, m, many, eta, end - begin, edges, odds))
            begin = end
    return table


def draw(edges: Edges, rows: Rows, k: Tensor, how: str, odds: Odds, key: int) -> Drawn:
    """By the sums of a row, evenly where it has none; a systematic draw that they do not serve is made by a scan."""
    assert odds.prefix is not None
    many, upto = rows.row.numel(), odds.prefix.upto[2 * rows.row]
    ks = k.expand(many) if k.numel() == 1 else k
    size = edges.last[rows.row] - edges.first[rows.row]
    bare = (ks < 0) | (size <= ks) | (upto == 0)
    kept = ~bare if how == "multinomial" else ~bare & (ks <= upto)
    table, by_table = odds.prefix.table, kept.nonzero().flatten()
    if odds.prefix.wide > 1:
        each = ks[by_table] if how == "systematic" else torch.ones_like(by_table)
        table = _written_out(rows.row[by_table].tolist(), each.tolist(), edges, odds, odds.prefix)
    parts = [_look_up(edges, rows.row, ks, how, table, by_table, key)]
    for some, by in ((bare, Odds()), (~bare & ~kept, plain_odds(odds))):
        at = some.nonzero().flatten()
        ptr, *drawn = reference.draw(edges, Rows(rows.row[at]), ks[at], how, by, key)
        parts.append((torch.repeat_interleave(at, ptr.diff()), *drawn))
    row, pos, prob, scale = (torch.cat(part) for part in zip(*parts, strict=True))
    order = torch.argsort(row, stable=True)
    return Drawn(pointer(torch.bincount(row, minlength=many)), pos[order], prob[order], scale[order])


def _look_up(
    edges: Edges, row: Tensor, ks: Tensor, how: str, table: Tensor, at: Tensor, key: int
) -> tuple[Tensor, ...]:
    """Self-loops, then the edges under the marks, found by bisection."""
    of, s = spans(torch.zeros_like(at), ks[at])
    v, k = row[at][of], ks[at][of]
    start, end = edges.first[v], edges.last[v]
    once = how == "systematic"
    bits = (random.unit(key, v, 0 if once else s) * 2.0**32).long()
    mark = (bits + s * ONE) // k if once else bits
    low, left = start.clone(), end - start
    while bool((left > 1).any()):
        half = left // 2
        passed = (table[(low + half - 1).clamp(min=0)].long() & (ONE - 1)) <= mark
        low += torch.where(passed & (left > 1), half, 0)
        left -= half
    high = torch.where(low < end - 1, table[low].long() & (ONE - 1), ONE)
    length = high - torch.where(low > start, table[low - 1].long() & (ONE - 1), 0)
    prob = (length.double() * ((k if once else 1) / 2.0**32)).float()
    if once:
        prob = prob.masked_fill(length >= ONE // k, 1.0)
    scale = 1.0 / (prob if once else k * prob)
    lrow, lpos = spans(edges.begin[row[at]], (edges.first - edges.begin)[row[at]])
    ones = torch.ones(lrow.numel())
    return at[torch.cat([lrow, of])], torch.cat([lpos, low]), torch.cat([ones, prob]), torch.cat([ones, scale])
