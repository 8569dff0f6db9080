"""Draws in plain torch: the truth the kernels are tested against, and the fallback on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from adahop.ops import random
from adahop.ops.numbering import reference as numbering
from adahop.ops.registry import OPS
from adahop.ops.segments import pointer, segment_max, segment_sum, spans
from adahop.ops.types import Drawn, Edges, Near, Numbered, Odds, Plan, Rows, Slots, plain_odds

FLOOR = 1e-12  # smallest weight beside the largest: keeps sums and caps well defined
ROUNDS = 50  # a row's constant is settled when no more of its probabilities reach 1, mostly after a few rounds
SURE = 1.0 + 1e-9  # times 1/pi * pi, which may round to just below 1


def target_rows(ptr: Tensor, relation: Tensor, nodes: Tensor, only: Tensor | None = None, most: int = 0) -> Rows:
    """The rows of some targets, those of a target side by side: ptr[i]:ptr[i + 1] are node i's, and `relation` is what
    each row is of. `only`, a mask of the relations, leaves the others out. None has more than `most`; 0: not known.
    """
    start = ptr[nodes].long()
    target, row = spans(start, ptr[nodes + 1] - start)
    of = relation[row].long()
    if only is not None:
        kept = only[of]
        target, row, of = target[kept], row[kept], of[kept]
    return Rows(row, nodes, target, relation=of, ptr=pointer(torch.bincount(target, minlength=nodes.numel())))


def extents(edges: Edges, rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(begin, loops, start, size) per row: where its self-loops are, how many, and its true neighbours likewise.

    Nothing is in a row of -1.
    """
    at, none = rows.row, rows.row < 0
    begin, first, last = edges.begin[at], edges.first[at], edges.last[at]
    start = first if rows.since is None else torch.maximum(first, rows.since)
    end = last if rows.until is None else torch.minimum(last, rows.until)
    return begin, (first - begin).masked_fill(none, 0), start, (end - start).clamp(min=0).masked_fill(none, 0)


def inclusion(w: Tensor, row: Tensor, rows: int, k: Tensor, eta: float) -> Tensor:
    """k((1 - eta) w'/sum w' + eta/n) with w' capped so that none is over 1 (EXP3.M's cap; water-filling at eta = 0)."""
    n = segment_sum(torch.ones_like(w), row, rows)
    share = (1.0 / k - eta / n) / (1.0 - eta)
    cap = torch.full((rows,), torch.inf, dtype=w.dtype, device=w.device)
    many = torch.zeros_like(cap)
    for _ in range(int(k.max()) + 2 if k.numel() else 0):
        over = w >= cap[row]
        rest = segment_sum(w.masked_fill(over, 0.0), row, rows)
        now = segment_sum(over.to(w.dtype), row, rows)
        limit = share * rest / (1.0 - now * share)
        capped = (segment_max(w, row, rows) >= limit) | (now > 0)
        new = torch.where(capped & ~((now == many) & (many > 0)), torch.minimum(limit, cap), cap)
        if torch.equal(new, cap):
            break
        cap, many = new, now
    low = torch.minimum(w, cap[row])
    p = k[row] * ((1.0 - eta) * low / segment_sum(low, row, rows)[row] + (eta / n)[row])
    return torch.where(w >= cap[row], torch.ones_like(p), p.clamp(max=1.0))


def weigh(place: Tensor, row: Tensor, rows: Tensor, indices: Tensor, odds: Odds) -> Tensor:
    """The weights of the given places; `rows` are the graph's, `row` is the row of each place among them."""
    w = torch.ones(place.numel(), dtype=torch.double, device=place.device)
    if odds.edge is not None:
        w = odds.edge[place].double()
    if odds.node is not None:
        source = indices[place].long()
        w = w * odds.node[source if odds.shift is None else source + odds.shift[rows][row]].double()
    return w


def lifted(w: Tensor, row: Tensor, rows: int) -> Tensor:
    """Weights with the smallest of a row kept within reach of the largest."""
    top = segment_max(w, row, rows)
    return torch.maximum(w, torch.where(top > 0, top * FLOOR, torch.ones_like(top))[row])


def chances(edges: Edges, rows: Rows, near: Near, k: Tensor, odds: Odds) -> Tensor:
    """[M] the probability that k draws without replacement from its row take each of the edges; 0: it can never come.

    `near` holds all edges to true neighbours of the rows, and `k` one number for all rows or one per row.
    """
    many = rows.row.numel()
    w = weigh(near.place, near.row, rows.row, edges.indices, odds)
    possible = torch.ones_like(w, dtype=torch.bool) if odds.eta > 0 else w > 0
    w, row = w[possible], near.row[possible]
    k = k.expand(many) if k.numel() == 1 else k
    n = torch.bincount(row, minlength=many)
    busy = ((n > k) & (k > 0))[row]
    out = torch.where(k == 0, 0.0, 1.0)[row].to(w)
    out[busy] = inclusion(lifted(w, row, many)[busy], row[busy], many, k.double(), odds.eta)
    return torch.zeros(possible.numel(), dtype=w.dtype, device=w.device).masked_scatter_(possible, out)


def hop(
    edges: Edges, rows: Rows, k: Tensor, how: str, odds: Odds, key: int, scratch: Tensor, known: bool
) -> tuple[Drawn, Numbered]:
    """Draw from the rows, then number the nodes and look the edges up, as `number` does."""
    made: Drawn | Plan = OPS["plan"](edges, rows, k, how, odds, key)
    numbered: Numbered = OPS["number"](rows.targets, made, edges, rows.target, scratch, known)
    return made.drawn if isinstance(made, Plan) else made, numbered


def draw(edges: Edges, rows: Rows, k: Tensor, how: str, odds: Odds, key: int) -> Drawn:
    """For each row its self-loops and k of its true neighbours (all, exactly, where there are no more than k).

    `k` holds one number for all rows or one per row; -1 takes all neighbours. `how` is one of DRAWS.
    """
    if odds.prefix is not None:
        if how in ("systematic", "multinomial") and rows.since is None and rows.until is None:
            return OPS["draw_by_prefix"](edges, rows, k, how, odds, key)
        odds = plain_odds(odds)
    dst, many = rows.row, rows.row.numel()
    k = k.expand(many) if k.numel() == 1 else k
    begin, loops, start, size = extents(edges, rows)
    row, place = spans(start, size)
    w = weigh(place, row, dst, edges.indices, odds)
    if odds.eta == 0.0:
        row, place, w = (t[w > 0] for t in (row, place, w))
    w = lifted(w, row, many)
    n = torch.bincount(row, minlength=many)
    everyone = (n <= k) | (k < 0)
    keep = everyone[row]
    out_row, out_pos = row[keep], place[keep]
    prob, scale = (torch.ones(out_pos.numel(), dtype=torch.double, device=dst.device) for _ in range(2))
    chance = ~keep
    if bool(chance.any()):
        if odds.edge is None and odds.node is None and how != "poisson":
            picked = _pick_uniform(start, n, (~everyone).nonzero().flatten(), dst, k, how, key)
        else:
            picked = _pick(row[chance], place[chance], w[chance], many, dst, k, how, odds.eta, key)
        out_row, out_pos = torch.cat([out_row, picked[0]]), torch.cat([out_pos, picked[1]])
        prob, scale = torch.cat([prob, picked[2]]), torch.cat([scale, picked[3]])
    lrow, lpos = spans(begin, loops)
    one = torch.ones(lrow.numel(), dtype=torch.double, device=dst.device)
    return _grouped(
        many, torch.cat([lrow, out_row]), torch.cat([lpos, out_pos]), torch.cat([one, prob]), torch.cat([one, scale])
    )


def _grouped(rows: int, row: Tensor, pos: Tensor, prob: Tensor, scale: Tensor) -> Drawn:
    """Places in the order of their rows, those of a row as they are given."""
    order = torch.argsort(row, stable=True)
    ptr = pointer(torch.bincount(row, minlength=rows))
    return Drawn(ptr, pos[order], prob[order].float(), scale[order].float())


def _pick_uniform(start, n, busy, dst, k, how, key):
    """Equal odds: k whole numbers below n, or Floyd's k-subset, bit for bit what the kernels draw."""
    n, k, v = n[busy], k[busy], dst[busy]
    most = int(k.max())
    table = torch.full((busy.numel(), most), -1, dtype=torch.long, device=dst.device)
    for s in range(most):
        if how == "multinomial":
            table[:, s] = random.below(key, v, s, n)
            continue
        last = n - k + s
        r = random.below(key, v, s, last + 1)
        table[:, s] = torch.where((table[:, :s] == r[:, None]).any(1), last, r)
    keep = torch.arange(most, device=dst.device) < k[:, None]
    row = busy[:, None].expand_as(table)[keep]
    size, many = n[:, None].expand_as(table)[keep].double(), k[:, None].expand_as(table)[keep].double()
    prob = 1.0 / size if how == "multinomial" else many / size
    return row, (start[busy][:, None] + table)[keep], prob, size / many


def _pick(row, place, w, rows, dst, k, how, eta, key):
    """(row, place, prob, scale) of what is drawn from rows with more neighbours than k."""
    n = torch.bincount(row, minlength=rows)
    start = n.cumsum(0) - n
    if how == "multinomial":
        busy = n > 0
        total = segment_sum(w, row, rows)
        many = torch.where(busy, k, torch.zeros_like(k))
        r, s = spans(torch.zeros_like(many), many)
        u = random.unit(key, dst[r], s)
        c = w.cumsum(0)
        before = torch.cat([c.new_zeros(1), c])[start]
        at = torch.searchsorted(c, before[r] + (u - eta).clamp(min=0) / (1.0 - eta) * total[r], right=True)
        at = torch.where(u < eta, start[r] + (u / max(eta, 1e-300) * n[r]).long(), at)
        at = torch.minimum(torch.maximum(at, start[r]), start[r] + n[r] - 1)
        q = (1.0 - eta) * w[at] / total[r] + eta / n[r]
        return r, place[at], q, 1.0 / (k[r] * q)
    p = inclusion(w, row, rows, k.double(), eta)
    item = torch.arange(row.numel(), device=row.device) - start[row]
    if how == "poisson":
        take = random.unit(key, dst[row], item) < p
        return row[take], place[take], p[take], 1.0 / p[take]
    mixed = random.bits(key, dst[row], item + (1 << 32))
    order = torch.argsort(mixed, stable=True)
    order = order[torch.argsort(row[order], stable=True)]
    row, place, p = row[order], place[order], p[order]
    take = _systematic(p, row, dst, key, start) if how == "systematic" else _depround(p, rows, dst, key, n)
    return row[take], place[take], p[take], 1.0 / p[take]


def _systematic(p, row, dst, key, start):
    c = p.cumsum(0)
    inside = c - torch.cat([c.new_zeros(1), c])[start][row] + random.unit(key, dst, 0)[row]
    # the marks u, u + 1, ... fall where u' + c passes a whole number, u' = 1 - u: equally uniform
    return (inside + 1e-9).floor() > (inside - p + 1e-9).floor()


def _depround(p, rows, dst, key, n):
    """Pairwise rounding, all rows in step: the j-th item of every row meets the one still open."""
    take = p >= 1.0
    start = n.cumsum(0) - n
    held = torch.full((rows,), -1, dtype=torch.long, device=p.device)
    ph = torch.zeros(rows, dtype=p.dtype, device=p.device)
    for j in range(int(n.max())):
        live = (n > j).nonzero().flatten()
        item = start[live] + j
        live, item = live[~take[item]], item[~take[item]]
        new = held[live] < 0
        held[live[new]], ph[live[new]] = item[new], p[item[new]]
        live, item = live[~new], item[~new]
        u, q, hp, h = random.unit(key, dst[live], j), p[item], ph[live], held[live]
        both = hp + q
        small = both < 1.0
        stay = torch.where(small, u * both < hp, u * (2.0 - both) >= 1.0 - q)
        take[torch.where(stay, item, h)[~small]] = True
        held[live], ph[live] = torch.where(stay, h, item), torch.where(small, both, both - 1.0)
        held[live[(~small) & (both - 1.0 < 1e-9)]] = -1
    left = (held >= 0) & (ph > 0.5)
    take[held[left]] = True
    return take


def padded(
    edges: Edges,
    rows: Rows,
    target: Tensor,
    k: int | Tensor,
    loops: int,
    how: str,
    odds: Odds,
    key: int | random.Stream,
) -> Slots:
    """`draw` into slots of a fixed shape, `loops` + k per row (the largest of k where it is a tensor).

    `target` holds the node of each row, which stands in its empty slots; a row has `loops` self-loops at most.
    """
    many, most = rows.row.numel(), k if isinstance(k, int) else int(k.max()) if k.numel() else 0
    wide, device = loops + most, rows.row.device
    each = torch.tensor([k], device=device) if isinstance(k, int) else k
    drawn = draw(edges, rows, each, how, odds, key.now() if isinstance(key, random.Stream) else key)
    row, own = spans(torch.zeros_like(rows.row), drawn.ptr.diff())
    begin = own - (edges.first - edges.begin)[rows.row][row]  # negative for self-loops
    slot = row * wide + torch.where(begin < 0, own, begin + loops)
    pos = torch.zeros(many * wide, dtype=torch.long, device=device)
    prob, scale, weight = torch.zeros(3, many * wide, device=device)
    prob += 1.0
    pos[slot], prob[slot], scale[slot] = drawn.pos, drawn.prob, drawn.scale
    weight[slot] = 1.0 if edges.weight is None else edges.weight[drawn.pos]
    source = target.repeat_interleave(wide)
    source[slot] = edges.indices[drawn.pos].long()
    n_id = torch.cat([target, source.view(many, wide)[:, loops:].flatten()])
    return Slots(n_id, pos, prob, scale, weight, many, loops, most)


def labor(edges: Edges, rows: Rows, k: Tensor, refine: int, nodes: int, key: int) -> Drawn:
    """For each row its self-loops, and its neighbour j where r_j < min(1, c_i pi_j); scale is the inverse of that.

    c_i solves sum_j 1 / min(1, c_i pi_j) = n^2 / k, the variance of k uniform draws; pi is 1 and, `refine` times over,
    multiplied by the largest c_i of a source's targets, which lowers the number of sources taken. k is one number, or
    one per row; `nodes`: how many sources there are.
    """
    many = rows.row.numel()
    begin, loops, start, size = extents(edges, rows)
    n = size.double()
    row, place = spans(start, size)
    src = edges.indices[place].long()
    pi = torch.ones(nodes, dtype=torch.double, device=src.device)
    c = _constants(pi[src], row, many, n, k)
    for _ in range(refine):
        most = torch.zeros_like(pi).scatter_reduce_(0, src, c[row], "amax")
        pi = torch.where(most > 0, pi * most, pi)
        c = _constants(pi[src], row, many, n, k)
    p = (c[row] * pi[src]).clamp(max=1.0)
    taken = random.short(key, src).double() * 2.0**-32 < p
    lrow, lpos = spans(begin, loops)
    row, pos = torch.cat([lrow, row[taken]]), torch.cat([lpos, place[taken]])
    p = torch.cat([p.new_ones(lrow.numel()), p[taken]])
    return _grouped(many, row, pos, p, 1.0 / p)


def _constants(pi: Tensor, row: Tensor, rows: int, n: Tensor, k: Tensor) -> Tensor:
    everyone = (n <= k) | (k < 0)
    c, before = torch.zeros_like(n), None
    for _ in range(ROUNDS):
        sure = c[row] * pi >= 1.0
        if before is not None and torch.equal(sure, before):
            break
        many = segment_sum(sure.double(), row, rows)
        rest = segment_sum((1.0 / pi).masked_fill(sure, 0.0), row, rows)
        c, before = torch.where(everyone, c, rest / (n * n / k - many)), sure
    least = -segment_max(-pi, row, rows)
    return torch.where(everyone, SURE / least, c)


def near(edges: Edges, rows: Rows, targets: Tensor, inner: bool, scratch: Tensor) -> Near:
    """The rows' edges to true neighbours. With `inner`, sources that are targets themselves are no candidates.

    `scratch` [N] int32 holds -1 throughout.
    """
    _, _, start, size = extents(edges, rows)
    row, place = spans(start, size)
    head = targets if inner else targets[:0]
    n_id, local = numbering.relabel(head, edges.indices[place].long(), scratch)
    return Near(row, place, (local - head.numel()).clamp(min=-1), n_id[head.numel() :])


def total(value: Tensor, local: Tensor, candidates: int) -> Tensor:
    """[candidates] the sum of an edge's value over the edges of each candidate."""
    left = local >= 0
    return segment_sum(value[left], local[left], candidates)


def keep(edges: Edges, rows: Rows, near: Near, prob: Tensor, scale: Tensor) -> Drawn:
    """Of the rows' edges: their self-loops and those that need no draw, exactly, and those of drawn candidates."""
    begin, loops, _, _ = extents(edges, rows)
    one = torch.ones(1, device=prob.device)
    at = torch.where(near.local >= 0, near.local, near.nodes.numel())  # what needs no draw reads the 1 at the end
    prob, scale = torch.cat([prob, one])[at], torch.cat([scale, one])[at]
    kept = scale > 0
    row, place = spans(begin, loops)
    sure = torch.ones(row.numel(), device=prob.device)
    return _grouped(
        rows.row.numel(), torch.cat([row, near.row[kept]]), torch.cat([place, near.place[kept]]),
        torch.cat([sure, prob[kept]]), torch.cat([sure, scale[kept]]),
    )  # fmt: skip
