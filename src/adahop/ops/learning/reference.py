"""What policies learn from a step, in plain torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from adahop.ops.buffers import Scratch
from adahop.ops.learning import tree as trees
from adahop.ops.numbering.reference import in_order
from adahop.ops.segments import segment_max, segment_of, segment_sum, spans
from adahop.ops.types import HIGH, LOW, SPAN, Edges, Exp3Rule, TrackRule, Tree


class Sight(NamedTuple):
    """What an update is made from: the rows of a block, and which of their places were drawn with which chance."""

    row: Tensor  # [T] rows of the graph; in slots -1 where there is none
    ptr: Tensor  # [T + 1]
    pos: Tensor  # [M] places
    prob: Tensor  # [M]
    scale: Tensor  # [M]
    slots: int = 0  # places per row where all have as many


class Weights(NamedTuple):
    """A bandit's weights, one per place, and what spares the CPU a scan of them."""

    weight: Tensor  # [P]
    tree: Tree | None


def once(sight: Sight, value: Tensor) -> tuple[Sight, Tensor, Tensor]:
    """A sight in slots with each of its rows once and without those that are none; its part of `value`, its places."""
    row, order = sight.row.sort(stable=True)
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = row[1:] != row[:-1]
    kept = order[first & (row >= 0)].sort().values
    at = (kept[:, None] * sight.slots + torch.arange(sight.slots, device=row.device)).flatten()
    ptr = torch.arange(kept.numel() + 1, device=row.device) * sight.slots
    return Sight(sight.row[kept], ptr, sight.pos[at], sight.prob[at], sight.scale[at]), value[at], at


def grow(sight: Sight, gain: Tensor, edges: Edges, arms: Weights, scratch: Scratch) -> None:
    """weight[pos] *= exp(gain) in place, kept within float32's reach (only ratios within a row matter)."""
    if sight.slots:
        sight, gain, _ = once(sight, gain)
    weight, rows = arms.weight, sight.row
    weight.scatter_reduce_(0, sight.pos, gain.exp(), "prod")
    row, place = spans(edges.first[rows], edges.last[rows] - edges.first[rows])
    top = segment_max(weight[place], row, rows.numel())
    out = (top > math.exp(HIGH)) | (-segment_max(-weight[place], row, rows.numel()) < math.exp(LOW))
    centred = (weight[place] / top[row]).clamp(min=math.exp(-SPAN))
    weight[place[out[row]]] = centred[out[row]]
    if arms.tree is not None:
        trees.build(edges.first, edges.last, weight, arms.tree)


def exp3(
    sight: Sight, reward: Tensor, edges: Edges, arms: Weights, mean: Tensor, visits: Tensor, rule: Exp3Rule,
    scratch: Scratch,
) -> None:  # fmt: skip
    """One update of EXP3's weights, running means and visits; see `adahop.policies.exp3` for the rule."""
    if sight.slots:
        sight, reward, _ = once(sight, reward)
    rows, many = sight.row, sight.row.numel()
    row = segment_of(sight.ptr, sight.pos.numel())
    live = sight.prob < 1
    k = segment_sum(live.to(sight.scale.dtype), row, many)
    n = (edges.last[rows] - edges.first[rows]).to(sight.scale.dtype)
    q = 1.0 / (k[row] * sight.scale).clamp(min=1e-30)
    reward = (k[row] * reward if rule.times_k else reward).masked_fill(~live, 0.0)
    chance = k > 0
    seen = visits[rows] + chance.int()
    visits[rows] = seen
    times = seen.clamp(min=1).float()
    if rule.paper:
        horizon = torch.full_like(times, rule.horizon) if rule.horizon > 0 else times
        log = (n / k.clamp(min=1.0)).log().clamp(min=0.0)
        delta = ((1 - rule.eta) * rule.eta**4 * k**5 * log / (horizon * n.clamp(min=1.0) ** 4)).sqrt()
        gain = delta[row] * reward / (k[row] * q)
    else:
        old = mean[rows]
        got = segment_sum(reward, row, many) / k.clamp(min=1.0)
        new = torch.where(chance, old + (1.0 / times).clamp(min=rule.memory) * (got - old), old)
        mean[rows] = torch.where(torch.isfinite(new), new, old)
        new = torch.where(torch.isfinite(new), new, math.nan)  # and nothing is gained in such a row
        step = rule.step * k[row].sqrt() if rule.root else rule.step
        gain = step * (reward / new.clamp(min=1e-38)[row] - 1.0) / (k[row] * q * n[row])
    gain = torch.where(live & torch.isfinite(gain), gain.clamp(-1.0, 1.0), torch.zeros_like(gain))
    grow(sight, gain, edges, arms, scratch)


def track(
    sources: tuple[Tensor, Tensor, Tensor], sight: Sight, energy: Tensor, weight: Tensor,
    state: tuple[Tensor, Tensor, Tensor], rule: TrackRule, scratch: Scratch, rows: int,
) -> bool:  # fmt: skip
    """One update of the tracked norms (square, visits, level) of a block's sources; whether their copy has aged.

    `sources` is (n_id, src, dst) of the block: all its nodes, and the local ends of every edge. The graph has `rows`.
    """
    n_id, src, dst = sources
    if sight.slots:
        sight, energy, at = once(sight, energy)
        weight, own = weight[at], n_id[dst[at]]
        local, first = in_order(torch.cat([n_id[src[at]], own]))
        n_id, (src, dst) = torch.cat([n_id[src[at]], own])[first], local.view(2, -1)
    square, visits, level = state
    factor = weight * sight.scale
    true = (n_id[src] != n_id[dst]) & (factor > 0) & torch.isfinite(energy)  # an edge without weight says nothing
    seen = energy[true] / factor[true].square().clamp(min=1e-30)
    times = segment_sum(torch.ones_like(seen), src[true], n_id.numel())
    here = times > 0
    mean = (segment_sum(seen, src[true], n_id.numel()) / times.clamp(min=1.0))[here]
    if mean.numel() == 0:
        return False
    now, many = mean.mean(), mean.numel()
    level.copy_(torch.where(level > 0, level + many / (many + rule.few) * (now - level), now))
    node = n_id[here]
    count = (visits[node] + 1).clamp(max=rule.most)
    rate = (1.0 / (count + 1)).clamp(min=rule.memory)
    old = square[node]
    visits[node] = count
    square[node] = torch.where(level > 0, old + rate * (mean / level.clamp(min=1e-38) - old), old)
    return True


def push(value: Tensor, n_id: Tensor, h: Tensor, scratch: Scratch) -> None:
    """value[n_id] = h in the table's dtype; of a node that comes twice one row is kept."""
    value[n_id] = h.to(value.dtype)
