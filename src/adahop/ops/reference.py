"""The ops in plain torch: the truth the kernels are tested against, and the fallback on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adahop.ops import random
from adahop.ops.kinds import HIGH, LOW, SPAN

FLOOR = 1e-12


def segment_sum(x: Tensor, row: Tensor, n: int) -> Tensor:
    return torch.zeros((n, *x.shape[1:]), dtype=x.dtype, device=x.device).index_add_(0, row, x)


def segment_max(x: Tensor, row: Tensor, n: int) -> Tensor:
    low = torch.full((n, *x.shape[1:]), -torch.inf, dtype=x.dtype, device=x.device)
    index = row.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    return low.scatter_reduce_(0, index, x, "amax")


def spans(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """(row, place) of every item of the spans start[i] .. start[i] + length[i]."""
    row = torch.repeat_interleave(torch.arange(len(start), device=start.device), length)
    before = length.cumsum(0) - length
    return row, torch.arange(row.numel(), device=start.device) - before[row] + start[row]


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


def odds(place: Tensor, row: Tensor, rows: int, indices: Tensor, edge: Tensor | None, log: bool, node: Tensor | None):
    """Weights of the given places, largest of each row kept within reach of the rest."""
    w = torch.ones(place.numel(), dtype=torch.double, device=place.device)
    if edge is not None:
        w = edge[place].double()
        if log:
            w = (w - segment_max(w, row, rows)[row]).exp()
    if node is not None:
        w = w * node[indices[place].long()].double()
    top = segment_max(w, row, rows)
    top = torch.where(top > 0, top * FLOOR, torch.ones_like(top))
    return w, top[row]


def draw(indptr, first, indices, dst, k, how, edge, log, node, eta, key):
    """(ptr, pos, prob, scale): see `adahop.ops.draw`."""
    loops = first[dst] - indptr[dst]
    row, place = spans(first[dst], indptr[dst + 1] - first[dst])
    rows = dst.numel()
    w, low = odds(place, row, rows, indices, edge, log, node)
    if eta == 0.0:
        row, place, low, w = (t[w > 0] for t in (row, place, low, w))
    w = torch.maximum(w, low)
    n = torch.bincount(row, minlength=rows)
    everyone = (n <= k) | (k < 0)
    keep = everyone[row]
    out_row, out_pos = row[keep], place[keep]
    prob, scale = (torch.ones(out_pos.numel(), dtype=torch.double, device=dst.device) for _ in range(2))
    chance = ~keep
    if bool(chance.any()):
        if edge is None and node is None and how != "poisson":
            picked = _pick_uniform(first, n, (~everyone).nonzero().flatten(), dst, k, how, key)
        else:
            picked = _pick(row[chance], place[chance], w[chance], rows, dst, k, how, eta, key)
        out_row, out_pos = torch.cat([out_row, picked[0]]), torch.cat([out_pos, picked[1]])
        prob, scale = torch.cat([prob, picked[2]]), torch.cat([scale, picked[3]])
    lrow, lpos = spans(indptr[dst], loops)
    one = torch.ones(lrow.numel(), dtype=torch.double, device=dst.device)
    out_row, out_pos = torch.cat([lrow, out_row]), torch.cat([lpos, out_pos])
    prob, scale = torch.cat([one, prob]), torch.cat([one, scale])
    order = torch.argsort(out_row, stable=True)
    ptr = torch.cat([dst.new_zeros(1), torch.bincount(out_row, minlength=rows).cumsum(0)])
    return ptr, out_pos[order], prob[order].float(), scale[order].float()


def _pick_uniform(first, n, busy, dst, k, how, key):
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
    return row, (first[v][:, None] + table)[keep], prob, size / many


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
    take = _systematic(p, row, rows, dst, key, start) if how == "systematic" else _depround(p, row, rows, dst, key, n)
    return row[take], place[take], p[take], 1.0 / p[take]


def _systematic(p, row, rows, dst, key, start):
    c = p.cumsum(0)
    inside = c - torch.cat([c.new_zeros(1), c])[start][row] + random.unit(key, dst, 0)[row]
    # the marks u, u + 1, ... fall where u' + c passes a whole number, u' = 1 - u: equally uniform
    return (inside + 1e-9).floor() > (inside - p + 1e-9).floor()


def _depround(p, row, rows, dst, key, n):
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


def relabel(dst: Tensor, src: Tensor) -> tuple[Tensor, Tensor]:
    """n_id with the targets first and the others as they first appear, and the local id of every source."""
    everyone = torch.cat([dst, src])
    ids, inverse = torch.unique(everyone, return_inverse=True)
    place = torch.arange(everyone.numel(), device=dst.device)
    seen = torch.full((ids.numel(),), everyone.numel(), device=dst.device).scatter_reduce_(0, inverse, place, "amin")
    fresh = seen >= dst.numel()
    order = torch.argsort(seen[fresh])
    local = seen.clone()
    local[fresh.nonzero().flatten()[order]] = dst.numel() + torch.arange(order.numel(), device=dst.device)
    return torch.cat([dst, ids[fresh][order]]), local[inverse[dst.numel() :]]


def gather_sum(h: Tensor, src: Tensor, coef: Tensor, ptr: Tensor) -> Tensor:
    """out[i] = sum over i's edges of coef * h[src]; h [S, H, C], coef [M, H]."""
    rows = ptr.numel() - 1
    row = torch.repeat_interleave(torch.arange(rows, device=ptr.device), ptr.diff(), output_size=src.numel())
    return segment_sum(coef.unsqueeze(-1) * h[src], row, rows)


def full_sum(h: Tensor, indptr: Tensor, indices: Tensor, weight: Tensor | None, nodes: Tensor) -> Tensor:
    """Sum over all in-edges of each node of weight * h[source]."""
    row, place = spans(indptr[nodes], indptr[nodes + 1] - indptr[nodes])
    message = h[indices[place].long()].float()
    return segment_sum(message if weight is None else weight[place].unsqueeze(1) * message, row, nodes.numel())


def grow(dst, pos, gain, first, indptr, weight) -> None:
    """Multiply, then bring the segments back that left float32's comfortable reach."""
    weight.scatter_reduce_(0, pos, gain.exp(), "prod")
    row, place = spans(first[dst], indptr[dst + 1] - first[dst])
    top = segment_max(weight[place], row, dst.numel())
    out = (top > math.exp(HIGH)) | (-segment_max(-weight[place], row, dst.numel()) < math.exp(LOW))
    centred = (weight[place] / top[row]).clamp(min=math.exp(-SPAN))
    weight[place[out[row]]] = centred[out[row]]
