"""Policy: the odds of each neighbour, `odds(layer)`, and how they are learned, `update(layer, block, energy)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adahop.block import Block
from adahop.checks import InputError, between, edge_weights, implied, of_kind
from adahop.graph import Graph, OnGraph
from adahop.messages import Reading, energy
from adahop.ops import (
    Drawn,
    Near,
    Odds,
    Prefix,
    Rows,
    Sight,
    Slots,
    chances,
    goes_by_sums,
    random,
    segment_sum,
    spans,
)
from adahop.policies.prefix import empty_prefix, renew_all
from adahop.storage import MEMORY, Storage


class Policy(OnGraph):
    """The odds of each neighbour, with one state per layer. This class is uniform and learns nothing."""

    learns = False  # whether `update` changes its state; set for a class that defines `update`
    reads: Reading = staticmethod(energy)  # the function of a layer's messages that it learns from
    own_draw = False  # whether `places` draws; set for a class that defines `places`
    own_inclusion = False  # whether `inclusion` is its own too, so that draws can be shared; set like `own_draw`
    has_slots = False  # whether `slots` makes such a draw for padded blocks
    needs: tuple[str, ...] = ()  # options that come with the model, see `GNN.facts`
    rescales = False  # whether `scaled` changes anything
    syncs = False  # whether an update reads from the device, so that it cannot be part of a CUDA graph

    def __init__(self, graph: Graph, layers: int, storage: Storage = MEMORY):
        super().__init__()
        self.graph, self.layers, self.storage = graph, layers, of_kind(storage, Storage, "storage")

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        implied(cls, "learns", by="update")
        implied(cls, "own_draw", by="places")
        implied(cls, "own_inclusion", by="inclusion")

    def odds(self, layer: int) -> Odds:
        return Odds()

    def odds_for(self, layer: int, how: str) -> Odds:
        """The odds for one kind of draw, with what makes that draw faster."""
        return self.odds(layer)

    def prepare(self, how: str, sizes: Sequence[int]) -> None:
        """Called by a sampler that will draw `how`, `sizes` edges per target of each layer (1 where this varies)."""

    def places(self, layer: int, rows: Rows, k: Tensor, how: str, key: int | random.Stream) -> Drawn | None:
        """A draw of the policy's own, for odds that are not stored per edge or node; None: draw by `odds`."""
        return None

    def slots(self, layer: int, rows: Rows, k: int, how: str, key: random.Stream, loops: int) -> Slots:
        """The same draw for a padded block: per row `loops` slots for self-loops and k for draws."""
        raise NotImplementedError

    def inclusion(self, layer: int, rows: Rows, near: Near, k: Tensor) -> Tensor:
        """[M] the probability that k draws without replacement from its row take each of the rows' edges `near`."""
        return chances(self.graph.edges, rows, near, k, self.odds(layer))

    def scaled(self, rows: Rows, drawn: Drawn) -> Drawn:
        """The drawn places with the scale of this policy's estimator; that of the draw, the default, is unbiased."""
        return drawn

    def strength(self, layer: int, rows: Rows) -> Tensor:
        """The root of each row's variance at one draw, up to a factor: its share of a budget.

        Here the sum of a_ij over the neighbours, as if all |h| were equal. (Tracked norms gave worse results on the
        graphs tried: where neighbours agree, norms are large and the variance is small.)
        """
        g = self.graph
        first = g.first[rows.row]
        row, place = spans(first, g.last[rows.row] - first)
        return segment_sum(g.edges.weights(rows.row[row], place), row, rows.row.numel())

    def update(self, layer: int, block: Block, energy: Tensor) -> None:
        """Learn from the squared norm of each message of the block."""


class Uniform(Policy):
    """Equal odds for all neighbours, as in GraphSAGE."""


class Static(Policy):
    """In proportion to fixed weights: the graph's own, or one number per edge in the user's order."""

    weight: Tensor | None

    def __init__(self, graph: Graph, layers: int, weight: Any = None, eta: float = 0.0, storage: Storage = MEMORY):
        super().__init__(graph, layers, storage)
        self.eta = between(eta, 0.0, 0.999, "eta")
        if weight is not None:
            weight = edge_weights(weight, graph.num_edges)
            weight = weight if graph.eid is None else weight[graph.eid.long()]
        self.register_buffer("weight", weight, persistent=False)
        self.fan_out: list[int] = []  # of each layer, for systematic draws
        self.sums: dict[int, Prefix] = {}  # their prefix sums by fan-out, made on first use

    def odds(self, layer: int) -> Odds:
        return Odds(edge=self.graph.relative if self.weight is None else self.weight, eta=self.eta)

    def prepare(self, how: str, sizes: Sequence[int]) -> None:
        self.fan_out = list(sizes) if how in ("systematic", "auto") else []

    def odds_for(self, layer: int, how: str) -> Odds:
        """On the CPU, systematic draws use prefix sums: 4 bytes per edge and 8 per node for each fan-out."""
        odds = self.odds(layer)
        if how != "systematic" or not self.fan_out:
            return odds
        return odds._replace(prefix=self._prefix(self.fan_out[layer], odds))

    def _prefix(self, k: int, odds: Odds) -> Prefix | None:
        """None where draws scan the row: no weights, or edges that must never be drawn."""
        g = self.graph
        if k < 0 or odds.edge is None or not goes_by_sums(g.indptr):
            return None
        if k not in self.sums:
            if self.eta == 0 and bool((odds.edge <= 0).any()):
                return None
            made = empty_prefix(g, self.storage)
            renew_all(g, k, odds, made)
            self.sums[k] = made
        return self.sums[k]

    def moved(self) -> None:
        self.sums.clear()


def check_odds(policy: Policy) -> None:
    """Check the odds of a user's own policy: kernels read them without bounds checks."""
    sizes = {"edge": policy.graph.indices.numel(), "node": policy.graph.num_nodes}
    whose = f"{type(policy).__name__}.odds"
    for layer in range(policy.layers):
        odds = of_kind(policy.odds(layer), Odds, whose)
        between(odds.eta, 0.0, 1.0, f"eta of {whose}")
        for name, size in sizes.items():
            value = getattr(odds, name)
            if value is None or odds.shift is not None:
                continue
            if of_kind(value, Tensor, f"{name} of {whose}").shape != (size,):
                raise InputError(f"`{name} of {whose}` must have shape ({size},), got {tuple(value.shape)}")
            bad = ~(torch.isfinite(value) & (value >= 0))
            if bool(bad.any()):
                at = int(bad.nonzero()[0])
                raise InputError(f"`{name} of {whose}` must be finite and not negative, got {float(value[at])} at {at}")


def sight(block: Block) -> Sight:
    """The inputs of an update: a block's rows, the places drawn for them, their probabilities and scales."""
    if block.row is None or block.row_ptr is None:
        return Sight(block.n_id[: block.num_dst], block.ptr, block.pos, block.prob, block.scale, block.slots)
    return Sight(block.row, block.row_ptr, block.pos, block.prob, block.scale, block.slots)
