"""Types of the operations: stored edges and rows of them, the odds of a policy, the drawn positions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adahop.ops.registry import OPS
from adahop.ops.segments import segment_of

DRAWS = {"multinomial": 0, "systematic": 1, "depround": 2, "poisson": 3}
LEAST_SUM = 1e-300  # a row's sum is taken for at least this
HIGH, LOW, SPAN = 16.0, -24.0, 16.0  # a weight outside e^[LOW, HIGH] has its segment divided, to e^[-SPAN, 0]
NO_PLACES, NO_WEIGHTS, NO_IDS = np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int32)


class Stored(NamedTuple):
    """The tensors of `Edges`."""

    begin: Tensor  # [R] where a row starts
    first: Tensor  # [R] the place of its first true neighbour
    last: Tensor  # [R] one past its last place
    indices: Tensor  # [P] the source at each place
    weight: Tensor | None = None  # [P] None: all ones
    eid: Tensor | None = None  # [P] the user's own edge number; None: the place, see `added`
    mean: bool = False  # whether a weight counts over its row's sum; `weight` is then what it was before
    total: Tensor | None = None  # [R] float64, that sum; None: the number of the row's edges
    added: Tensor | None = None  # [R] the place of each row's added loop: edges are numbered as if these came last


class Edges(Stored):
    """Edges as they are stored, row after row. Row r holds the places begin[r] up to last[r], its self-loops first.

    A row may have room to grow: the next one then starts after its last place.
    """

    @functools.cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The same as numpy arrays, for kernels on the CPU: those that are None are empty."""
        given = (self.begin, self.first, self.last, self.indices)
        weight = NO_WEIGHTS if self.weight is None else self.weight.numpy()
        return *(t.numpy() for t in given), weight, NO_IDS if self.eid is None else self.eid.numpy()

    def weights(self, row: Tensor, place: Tensor) -> Tensor:
        """The weights at some places, which lie in these rows."""
        weight = torch.ones(place.numel(), device=place.device) if self.weight is None else self.weight[place]
        return self.over_sum(row, weight) if self.mean else weight

    def over_sum(self, row: Tensor, weight: Tensor) -> Tensor:
        """Weights of these rows over the rows' sums."""
        total = (self.last[row] - self.begin[row]).double() if self.total is None else self.total[row]
        return (weight.double() / total.clamp_(min=LEAST_SUM)).float()

    def numbers(self, row: Tensor, place: Tensor) -> Tensor:
        """The user's own numbers of the edges at some places, which lie in these rows."""
        if self.eid is not None:
            return self.eid[place].long()
        if self.added is None:
            return place
        many = self.indices.numel() - self.added.numel()
        return torch.where(place == self.added[row], many + row, place - row - 1)

    @functools.cached_property
    def loops(self) -> int:
        """The most self-loops that a row has."""
        if self.begin.numel() == 0 or self.begin.data_ptr() == self.first.data_ptr():
            return 0
        return int((self.first - self.begin).max())

    def finished(self, rows: Rows, drawn: Drawn, found: Numbered) -> Numbered:
        """What was looked up for some rows, with weights and numbers that are not stored by edge but follow from it."""
        if not self.mean and self.added is None:
            return found
        row = rows.row[segment_of(drawn.ptr, drawn.pos.numel()) if rows.target is not None else found.edge_index[1]]
        weight = self.over_sum(row, found.weight) if self.mean else found.weight
        return found._replace(e_id=self.numbers(row, drawn.pos), weight=weight)

    def __getstate__(self) -> None:
        """What can be made again is not pickled."""


class Rows(NamedTuple):
    """The rows to be drawn from, one entry per row, those of a target side by side; a row may come more than once.

    In a graph without types a row is its target, and `dst`, `target`, `relation` and `ptr` are None. `since` and
    `until` shorten a row: only its places from `since` on and before `until` can be drawn (its self-loops always come).
    The order of places in a row is that of time where edges have one.
    """

    row: Tensor  # [T] which row of the graph; it names the random stream and the state. In padded rows -1: none
    dst: Tensor | None = None  # [D] the batch's targets; None: they are the rows
    target: Tensor | None = None  # [T] which of the targets the row belongs to; None: the t-th
    since: Tensor | None = None  # [T] a place
    until: Tensor | None = None  # [T] a place
    relation: Tensor | None = None  # [T] the relation of each row
    ptr: Tensor | None = None  # [D + 1] the batch's target i has the rows ptr[i]:ptr[i + 1] of these
    weigh: Tensor | None = None  # [D] how much a target's error counts in the sums above, where that decides its share

    @property
    def targets(self) -> Tensor:
        return self.row if self.dst is None else self.dst

    def at(self, mask: Tensor) -> Rows:
        """Some of the rows, of the same targets."""
        target, since, until, of = (
            None if t is None else t[mask] for t in (self.target, self.since, self.until, self.relation)
        )
        return Rows(self.row[mask], self.targets, target, since, until, of, weigh=self.weigh)

    @property
    def nodes(self) -> Tensor:
        """[T] the target of each row."""
        return self.row if self.dst is None or self.target is None else self.dst[self.target]


class Tree(NamedTuple):
    """Sums over a row's weights, see `adahop.ops.learning.tree`; they spare the CPU the scan of a neighbourhood."""

    start: Tensor  # [R] int32, the line where a row's sums start, or -1
    sums: Tensor  # [lines * 16]


class Prefix(NamedTuple):
    """Prefix sums of inclusion probabilities, see `adahop.ops.drawing.cpu_prefix`: draws by look-ups."""

    table: Tensor  # [P] int32, the bits of uint32
    upto: Tensor  # [2 R] int32: the largest k that a row's sums serve (0: none were made), visits since they were made
    wide: int = 1  # edges per sum; with more than one, row r has those of its blocks from first[r] // wide + r on


class Odds(NamedTuple):
    """The odds of a policy: edge j of a row is drawn in proportion (1 - eta) w_j / sum w + eta / n.

    w = edge times node[source] (its root where `root`); what is None counts as 1, so `Odds()` is uniform.
    """

    edge: Tensor | None = None
    node: Tensor | None = None
    eta: float = 0.0
    tree: Tree | None = None  # the sums of `edge`, where they are kept; the weights are then positive
    shift: Tensor | None = None  # [R] a row reads node[source + shift]: one number per relation and source
    prefix: Prefix | None = None  # draws of whole rows go by these, where they are kept
    root: bool = False  # `node` holds squares: draws that read a few of them need no roots of all; only with `prefix`


def plain_odds(odds: Odds) -> Odds:
    """The current odds without their sums, for draws that scan."""
    node = odds.node.double().sqrt() if odds.root and odds.node is not None else odds.node
    return odds._replace(node=node, root=False, prefix=None)


class Drawn(NamedTuple):
    """Places in the graph's edges, grouped by row, each with its probability and scale."""

    ptr: Tensor
    pos: Tensor
    prob: Tensor
    scale: Tensor


class Plan(NamedTuple):
    """A draw made ready: the sizes are known, and `fill(lo, hi)` writes the places of the rows lo..hi of `drawn`.

    Numbering can then run beside drawing, in parts.
    """

    drawn: Drawn
    fill: Callable[[int, int], None]
    work: np.ndarray  # [T + 1] cumulative cost of the rows


class Slots(NamedTuple):
    """Drawn edges in slots, `loops` + `most` per row: a shape that chance does not change.

    n_id is the targets, then the source of every drawn slot; the other tensors hold one number per slot. An empty slot
    has scale and weight 0, prob 1 and the target itself for its source.
    """

    n_id: Tensor
    pos: Tensor
    prob: Tensor
    scale: Tensor
    weight: Tensor
    rows: int
    loops: int
    most: int


class Numbered(NamedTuple):
    """The nodes of drawn edges numbered, targets first, then sources as they first appear; and the edges looked up."""

    n_id: Tensor
    edge_index: Tensor
    e_id: Tensor
    weight: Tensor


class Near(NamedTuple):
    """The edges to true neighbours of some rows, in the order of the rows, and the candidates among their sources."""

    row: Tensor  # [M] the row of each edge
    place: Tensor  # [M] its place in the graph's edges
    local: Tensor  # [M] its source among the candidates; -1 where the source needs no draw
    nodes: Tensor  # [C] global ids of the candidates, as they first appear

    def total(self, value: Tensor) -> Tensor:
        """[C] the sum of an edge's value over the edges of each candidate."""
        return OPS["total"](value, self.local, self.nodes.numel())


class Exp3Rule(NamedTuple):
    """The numbers of EXP3's update, see `adahop.policies.exp3`."""

    times_k: bool  # the reward is k times the energy
    paper: bool  # the printed step; else the scale-free one
    step: float
    root: bool  # the step grows with the root of k
    eta: float
    horizon: float  # T of the printed step; 0: the visits of the node
    memory: float


class TrackRule(NamedTuple):
    """The numbers of the tracked norms' update, see `adahop.policies.tracked`."""

    memory: float
    few: int  # nodes whose mean is trusted as the level of the step
    most: int  # visits that are counted
