"""What policies learn from a step, on the CPU: numba kernels over ranges of rows in threads."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from adahop.ops.buffers import Scratch, empty
from adahop.ops.learning import cpu_bandit, cpu_track
from adahop.ops.learning.reference import Sight, Weights
from adahop.ops.numbering.cpu import repeated
from adahop.ops.threads import over, parts
from adahop.ops.types import Edges, Exp3Rule, TrackRule


def grow(sight: Sight, gain: Tensor, edges: Edges, arms: Weights, scratch: Scratch) -> None:
    if sight.slots:  # rows that are none, and rows that come twice
        return NotImplemented
    times = gain.double().exp()
    given = [t.numpy() for t in (sight.pos, times, edges.first, edges.last, arms.weight)]
    _spread(cpu_bandit.grow, scratch, sight, edges, *given, *_sums(arms, edges))


def exp3(
    sight: Sight, reward: Tensor, edges: Edges, arms: Weights, mean: Tensor, visits: Tensor, rule: Exp3Rule,
    scratch: Scratch,
) -> None:  # fmt: skip
    if sight.slots:
        return NotImplemented
    reward = reward.float().contiguous()
    given = [t.numpy() for t in (sight.pos, sight.prob, sight.scale, reward, edges.first, edges.last, mean, visits)]
    times = empty((reward.numel(),), np.float64)
    state = (arms.weight.numpy(), *_sums(arms, edges))
    _spread(cpu_bandit.exp3, scratch, sight, edges, *given, tuple(rule), times, *state)


def track(
    sources: tuple[Tensor, Tensor, Tensor], sight: Sight, energy: Tensor, weight: Tensor,
    state: tuple[Tensor, Tensor, Tensor], rule: TrackRule, scratch: Scratch, rows: int,
) -> bool:  # fmt: skip
    if sight.slots:
        return NotImplemented
    ends = tuple(t.numpy() for t in sources)
    edges = tuple(t.numpy() for t in (weight, sight.scale, energy.float().contiguous()))
    (square, visits, level), n_id, m = (t.numpy() for t in state), ends[0], len(ends[1])
    shares = 1 if m < cpu_track.SHARE else 2
    cuts, seen = np.arange(shares + 1) * m // shares, empty((2 * shares * len(n_id),), np.float64)
    if parts(m, m, cpu_track.LIGHT) == 1:
        by = rule.few, rule.memory, rule.most
        return bool(cpu_track.track(cuts, ends, edges, seen, shares, square, visits, level, *by))
    over(cpu_track.see, shares, cuts, ends, edges, seen, work=m // shares, light=cpu_track.LIGHT)
    many = cpu_track.average(seen, shares, level, rule.few)
    if many:
        over(cpu_track.move, len(n_id), n_id, seen, square, visits, level, rule.memory, rule.most)
    return bool(many)


def _sums(arms: Weights, edges: Edges) -> tuple[np.ndarray, np.ndarray]:
    if arms.tree is None:
        return np.full(edges.first.numel(), -1, np.int32), np.empty(0, np.float32)
    return arms.tree.start.numpy(), arms.tree.sums.numpy()


def _spread(kernel, scratch: Scratch, sight: Sight, edges: Edges, *given) -> None:
    rows, ptr = sight.row.numpy(), sight.ptr.numpy()
    marks = scratch.marks(edges.first.numel(), sight.row.device)
    if repeated(rows, marks.numpy()):  # two entries of one row: one writer, entry after entry
        kernel(0, len(rows), rows, ptr, 1, *given)
    else:
        over(kernel, len(rows), rows, ptr, cpu_bandit.GROUP, *given, work=ptr)
