"""Node-wise sampling: each target draws its own neighbours."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.checks import InputError, flag, of_kind, one_of
from adahop.graph import Graph
from adahop.messages import Reading
from adahop.ops import Drawn, Odds, Rows, random
from adahop.policies import Policy, Uniform
from adahop.policies.base import check_odds
from adahop.samplers.base import Sampler
from adahop.samplers.budget import spread
from adahop.samplers.loop import Draw
from adahop.samplers.sizes import one_size
from adahop.storage import MEMORY, Storage

BUDGET = 7  # the counter of the budget's rounding, a stream of its own


class NeighborSampler(Sampler):
    """Each target takes itself exactly and k of its neighbours, drawn by `draw` with the odds of `policy`.

    scale = 1/(k q) with replacement and 1/pi without, so that sum weight * scale * h[src] has the full sum as its mean.
    With `budget`, sizes are totals per layer, spread over a batch's targets (see `spread`) by the variance of each and
    its weight in the sums above: the size of a batch is then known beforehand, whatever the degrees are.
    In a typed graph each (relation, target) draws k; sizes may be a dict by relation, and budgets also by the node type
    of the sources.

    >>> sampler = NeighborSampler(Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), [2])
    >>> sampler.sample([0])[0].scale.tolist()
    [1.5, 1.5]
    """

    per_node = True
    sized_by = ("relation", "type")

    def __init__(
        self,
        graph: Graph,
        sizes: Sequence[int] | Mapping[Any, Sequence[int]],
        policy: Policy | None = None,
        draw: str = "multinomial",
        seed: int = 0,
        budget: bool = False,
        storage: Storage = MEMORY,
    ):
        super().__init__(graph, sizes, seed, storage)
        self.budget = flag(budget, "budget")
        if self.sized.source is not None and not budget:
            raise InputError("`sizes` must go by relation where they are not a budget, got node types")
        self.how = one_of(draw, ops.DRAWS, "draw")
        self.policy = Uniform(graph, len(self.sizes)) if policy is None else of_kind(policy, Policy, "policy")
        if policy is not None:
            if policy.layers != len(self.sizes):
                raise InputError(
                    f"`policy` must have as many layers as `sizes`, {len(self.sizes)}, got {policy.layers}"
                )
            check_odds(policy)
        self.policy.prepare(self.how, self.fan_out)

    @property
    def fan_out(self) -> list[int]:
        """Draws per row of each layer; 1 where it varies."""
        return [1] * len(self.sizes) if self.budget else self.sizes

    @property
    def reads(self) -> Reading:  # type: ignore[override]
        return self.policy.reads

    @property
    def by_owner(self) -> bool:  # type: ignore[override]
        return not self.budget

    @property
    def syncs(self) -> bool:  # type: ignore[override]
        return self.policy.syncs

    @property
    def learns(self) -> bool:  # type: ignore[override]
        return self.policy.learns

    @property
    def rescales(self) -> bool:  # type: ignore[override]
        return self.policy.rescales

    @property
    def fixed_size(self) -> bool:  # type: ignore[override]
        drawn = [layer for layer in range(len(self.sizes)) if layer not in self.skip]
        fixed = all(self.sizes[layer] >= 0 and self.sized.same_for_all(layer) for layer in drawn)
        slots = self.policy.has_slots or not self.policy.own_draw
        return fixed and slots and not (self.budget or self.how == "poisson")

    @property
    def draw_syncs(self) -> bool:  # type: ignore[override]
        return self.policy.own_draw

    def by_target(self) -> NeighborSampler:
        return self

    def expand(self, layer: int, rows: Rows, key: int | random.Stream) -> Drawn | Draw:
        k = self.many(layer, rows, key)
        if self.policy.own_draw and isinstance(key, random.Stream):  # a padded block
            size = self.sizes[layer]
            slots = functools.partial(self.policy.slots, layer, rows, size, self.how, key)
            return Draw(k, self.how, Odds(), key, size, slots)
        drawn = self.policy.places(layer, rows, k, self.how, key) if self.policy.own_draw else None
        if drawn is not None:
            return drawn
        return Draw(k, self.how, self.policy.odds_for(layer, self.how), key, self.sizes[layer])

    def scaled(self, rows: Rows, drawn: Drawn) -> Drawn:
        return self.policy.scaled(rows, drawn)

    def many(self, layer: int, rows: Rows, key: int | random.Stream) -> Tensor:
        """How many each row draws: one number for all, one per relation, or a share of the layer's budget each."""
        size, row, relation = self.sizes[layer], rows.row, self.sized.relation
        if not self.budget:
            return self.sized.of(layer, rows)
        if size < 0 and relation is None and self.sized.source is None:
            return one_size(size, row.device)
        assert rows.weigh is not None and isinstance(key, int), "a budget is spread on the host"
        most = self.graph.last[row] - self.graph.first[row]
        weigh = rows.weigh if rows.target is None else rows.weigh[rows.target]
        strength, key = weigh * self.policy.strength(layer, rows), random.key(key, BUDGET)
        if relation is None and self.sized.source is None:
            return spread(size, strength, most, key)
        return self._shares(layer, rows, strength, most, key)

    def _shares(self, layer: int, rows: Rows, strength: Tensor, most: Tensor, key: int) -> Tensor:
        """A budget per relation, or per type of the sources, spread over its own rows."""
        types = self.graph.types
        assert types is not None
        each, group = self.sized.relation, torch.arange(len(types.relations))
        if each is None:
            each, group = self.sized.source, torch.tensor([source for source, _ in types.ends])
        assert each is not None
        of, many = group.to(most.device)[rows.relation], torch.full_like(most, -1)
        for g, total in enumerate(each[layer].tolist()):
            own = of == g
            if total >= 0:
                many[own] = spread(total, strength[own], most[own], random.key(key, g))
        return many

    @torch.no_grad()
    def learn(self, blocks: list[Block], energy: list[Tensor]) -> None:
        for layer, (block, e) in enumerate(zip(blocks, energy, strict=True)):
            if block.num_edges:  # skipped layers have none
                self.policy.update(layer, block, e)
