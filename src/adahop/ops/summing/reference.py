"""Weighted sums of rows, softmax over neighbourhoods, norms of messages: in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from adahop.ops import random
from adahop.ops.buffers import pinned
from adahop.ops.segments import segment_max, segment_of, segment_sum, spans
from adahop.ops.types import Edges

LEAST = 1e-15  # a divisor that is smaller counts as this

Drop = tuple[Tensor, float] | None  # (seed, share kept): entries dropped while they are read
Copies = tuple[Tensor, Tensor] | None  # rows that lie nearer, and the place of each row among them, or -1
Base = tuple[Tensor, Tensor | None, float | Tensor] | None  # (table, rows, keep): what a sum is added to
_WORD = 0xFFFFFFFF


def gather_sum(h: Tensor, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor, base: Base = None) -> Tensor:
    """out[i] = sum over target i's edges of coef * h[src]. h [S, C] with coef [M], or h [S, H, C] with coef [M, H].

    base (table, rows, keep) adds keep * table[rows[i]], without a gradient; without rows, keep * table[i].
    """
    return onto(segment_sum(coef.to(h.dtype).unsqueeze(-1) * h[src], dst, ptr.numel() - 1), base)


def edge_dot(q: Tensor, h: Tensor, dst: Tensor, src: Tensor, ptr: Tensor) -> Tensor:
    """[M, H]: <q[dst], h[src]> per head of every edge; q [T, H, C] and h [S, H, C], edges grouped by target."""
    return (q[dst] * h[src]).sum(-1)


def onto(out: Tensor, base: Base) -> Tensor:
    if base is None:
        return out
    table, rows, keep = base
    more = table[: len(out)] if rows is None else table.index_select(0, rows[: len(out)])
    return plus(out, more.detach(), keep)


def plus(h: Tensor, other: Tensor, keep: float | Tensor) -> Tensor:
    """h + keep * other; a captured step follows a tensor."""
    other = other.to(h.dtype)
    return torch.addcmul(h, other, keep) if isinstance(keep, Tensor) else torch.add(h, other, alpha=keep)


def change(
    h: Tensor, table: Tensor, rows: Tensor, keep: float | Tensor, measured: bool = True
) -> tuple[Tensor, Tensor | None]:
    """h - keep * table[rows], and |h - keep * table[rows]|^2 per row and head, without a gradient.

    Where it is not to be `measured` the latter may be None; the CPU finds it on the way.
    """
    out = plus(h, table.index_select(0, rows[: len(h)]).detach(), -keep)
    return out, out.detach().square().sum(-1) if measured else None


def spread(
    h: Tensor, src: Tensor, dst: Tensor, coef: Tensor, alpha: Tensor, total: Tensor, base: Tensor | None = None
) -> Tensor:
    """[M]: what an edge's draw moves in an average that the sample normalises, |coef (h - mean of the others)|^2.

    The mean of a target's messages is `total` less `base`; alpha [M] or [M, H] is each one's share of it, and coef what
    dropout left of alpha. A message that is nearly all of its average is taken by itself.
    """
    mean = (total if base is None else total - base).detach()
    m, a = coef.detach().unsqueeze(-1) * h.detach()[src], alpha.detach()
    apart = torch.addcmul(m, a.unsqueeze(-1), mean[dst], value=-1.0).square().sum(-1)
    rest = 1.0 - a
    out = torch.where(rest > 0.05, apart / rest.clamp(min=0.05).square(), m.square().sum(-1))
    return out if out.dim() == 1 else out.sum(1)


def full_sum(h: Tensor, edges: Edges, rows: Tensor, squared: bool = False) -> Tensor:
    """out[t] = sum over all edges of rows[t] of weight * h[source], straight from the graph; no gradient.

    With `squared`, of (weight * h[source])^2.
    """
    row, place = spans(edges.begin[rows], edges.last[rows] - edges.begin[rows])
    message = h[edges.indices[place].long()].float()
    if edges.weight is None and not edges.mean:
        return segment_sum(message.square() if squared else message, row, rows.numel())
    message = edges.weights(rows[row], place).unsqueeze(1) * message
    return segment_sum(message.square() if squared else message, row, rows.numel())


def row_sums(h: Tensor, edges: Edges, rows: Tensor, squared: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """`full_sum`, the sums of the weights alone, and with `squared` those of the squares, else nothing of them."""
    one = torch.ones(1, 1, device=h.device).expand(len(h), 1)
    square = full_sum(h, edges, rows if squared else rows[:0], True)
    return full_sum(h, edges, rows), full_sum(one, edges, rows).squeeze(1), square


def rows_dot(x: Tensor, rows: Tensor, w: Tensor) -> Tensor:
    """<x[row], w> for some rows, without a copy of them on the CPU; no gradient."""
    return x[rows].to(w.dtype) @ w.detach()


def add_ends(s: Tensor, t: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """[M, C]: s[dst] + t[src], what the two ends of every edge add up to."""
    return s[dst] + t[src]


def softmax(score: Tensor, row: Tensor, rows: int, scale: Tensor | None = None) -> Tensor:
    """e^score scale / sum over the row of e^score scale; score [M] or [M, H], scale [M] (None: ones)."""
    raw = (score - segment_max(score.detach(), row, rows)[row]).exp()
    if scale is not None:
        raw = raw * scale.view(-1, *[1] * (raw.dim() - 1))
    return raw / segment_sum(raw, row, rows).clamp(min=1e-30)[row]


def attend(
    s: Tensor, t: Tensor, src: Tensor, dst: Tensor, ptr: Tensor, scale: Tensor, slope: float, slots: int, by_edge: bool
) -> Tensor:
    """[M, H]: the softmax, weighted by `scale`, of leaky(s[dst] + t[src]), or with `by_edge` of leaky(s[dst] + t)."""
    score = leaky_relu(s[dst] + (t if by_edge else t[src]), slope)
    return softmax(score, dst, ptr.numel() - 1, scale)


def energies(
    h: Tensor, src: Tensor, coef: Tensor, times: Tensor | None = None, divisor: tuple[Tensor, Tensor] | None = None,
    square: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[M]: |coef times h[source] / divisor|^2, heads summed; h [S, C] with coef [M], or [S, H, C] with [M, H].

    `times` [M] is a factor per edge, `divisor` a number per target and the target of each edge, `square` |h|^2 where it
    is known.
    """
    square = h.detach().square().sum(-1) if square is None else square
    out = coef.detach().square() * square[src]
    out = out if out.dim() == 1 else out.sum(-1)
    if times is not None:
        out = out * times.to(out.dtype).square()
    return out if divisor is None else out / divisor[0][divisor[1]].to(out.dtype).clamp(min=LEAST).square()


def known_energies(square: Tensor, rows: Tensor, src: Tensor, coef: Tensor) -> Tensor:
    """[M]: |coef|^2 square[rows[source]], heads summed."""
    total = coef.detach().square()
    return (total if total.dim() == 1 else total.sum(-1)) * square[rows[src]]


def table(x: Tensor, reader: Tensor) -> Tensor:
    """The rows, where they lie, as the operations on tables like to read them on the device of `reader`."""
    return x.contiguous()


def widened(weight: Tensor, h: Tensor) -> Tensor:
    """W with as many columns as h, where rows of a table end in zeros."""
    return weight


def _kept(drop: tuple[Tensor, float], row: Tensor, width: int) -> Tensor:
    """Whether each entry of some rows stays when entries are dropped; the same in every read of one step."""
    r = random._mix(drop[0].to(row.device) + row) & _WORD
    x = (r[:, None] + torch.arange(width, device=row.device) * 0x9E3779B1) & _WORD
    x = ((x ^ (x >> 15)) * 0x85EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _WORD
    return ((x ^ (x >> 16)) >> 8).float() < drop[1] * 16777216.0


def fetch(ids: Tensor, table: Tensor, near: Tensor, place: Tensor) -> Tensor:
    """table[ids] where `ids` lie. The table may lie on the host; place[i] says where `near` has a copy of row i, or
    -1."""
    if len(near) == 0:
        return pinned(table[ids.to(table.device)]).to(ids.device, non_blocking=True)
    at = place[ids].long()
    out, far = near[at.clamp(min=0)], (at < 0).nonzero().flatten()
    out[far] = pinned(table[ids[far].to(table.device)]).to(ids.device, non_blocking=True)
    return out


def table_rows(h: Tensor, n_id: Tensor, drop: Drop = None, near: Copies = None) -> Tensor:
    """h[n_id] of a table, float32, its padding too."""
    x = h[n_id.to(h.device)].to(n_id.device).float()
    return x if drop is None else torch.where(_kept(drop, n_id, x.shape[1]), x / drop[1], 0.0)


def table_sum(
    h: Tensor, src: Tensor, coef: Tensor, ptr: Tensor, rows: Tensor, drop: Drop = None, near: Copies = None
) -> Tensor:
    """[targets, H, C]: sum over a target's edges of coef[:, head] * h[rows[source]], the table's padding too.

    `rows` maps a source's local id to its row, `drop` = (seed, share kept), `near` = (copies, place of each).
    """
    x = table_rows(h, rows[src], drop, near)
    row = segment_of(ptr, src.numel())
    return segment_sum(coef.unsqueeze(-1).float() * x.unsqueeze(1), row, ptr.numel() - 1)


def table_dot(
    h: Tensor, src: Tensor, v: Tensor, ptr: Tensor, rows: Tensor, drop: Drop = None, near: Copies = None
) -> Tensor:
    """[M, H]: <h[rows[source]], v[head]>; a gradient for v."""
    return table_rows(h, rows[src], drop, near)[:, : v.shape[1]] @ v.t()
