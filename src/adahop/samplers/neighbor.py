"""Node-wise sampling: each target draws its own neighbours."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.checks import flag, one_of
from adahop.graph import Graph
from adahop.ops import random
from adahop.policies import Policy, Uniform
from adahop.samplers.base import Sampler, as_block
from adahop.samplers.budget import passed_down, spread
from adahop.samplers.flat import Slots
from adahop.storage import MEMORY, Storage

BUDGET = 7  # the counter of the budget's rounding, a stream of its own


class NeighborSampler(Sampler):
    """Each target takes itself exactly and k of its neighbours, drawn by `draw` with the odds of `policy`.

    scale = 1/(k q) with replacement and 1/pi without, so that sum weight * scale * h[src] has the full sum as its mean.
    With `budget`, sizes are totals a layer, spread over a batch's targets (see `spread`) by the variance each would
    have and by what it counts for in the sums above: a batch's size is known beforehand, whatever the degrees are.

    >>> sampler = NeighborSampler(Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), [2])
    >>> sampler.sample([0])[0].scale.tolist()
    [1.5, 1.5]
    """

    def __init__(
        self,
        graph: Graph,
        sizes: Sequence[int],
        policy: Policy | None = None,
        draw: str = "multinomial",
        seed: int = 0,
        budget: bool = False,
        storage: Storage = MEMORY,
    ):
        super().__init__(graph, sizes, seed, storage)
        self.budget = flag(budget, "budget")
        self.how = one_of(draw, ops.DRAWS, "draw")
        self.policy = Uniform(graph, len(self.sizes)) if policy is None else policy
        self.policy.prepare(self.how, self.fan_out)
        self.slots: Slots | None = None  # on a GPU: blocks of a fixed shape, see `flatten`

    @property
    def fan_out(self) -> list[int]:
        """How many edges a target of each layer draws; 1 where that varies."""
        return [1] * len(self.sizes) if self.budget else self.sizes

    def flatten(self) -> bool:
        """Draw blocks of a fixed shape from now on, where that can be; whether it can."""
        self.slots = Slots.of(self)
        return self.slots is not None

    @property
    def feedback(self) -> str:  # type: ignore[override]
        return self.policy.feedback

    @property
    def learns(self) -> bool:  # type: ignore[override]
        return self.policy.learns

    @property
    def apart(self) -> bool:
        own = type(self).draw is not NeighborSampler.draw or self.exchange is not None  # who knows in what order
        return not (own or self.listens or self.slots is not None) and self.graph.device.type == "cpu"

    def draw(self, seeds: Tensor) -> list[Block]:
        if self.slots is not None:
            return self.slots.draw(self, seeds)
        dst, blocks, known = seeds, [], False
        # with a budget: how much a target's error counts in the end
        weighs = torch.ones(seeds.numel(), device=seeds.device) if self.budget else None
        for layer in reversed(range(len(self.sizes))):
            if layer in self.skip:
                blocks.append(self.nothing(dst))
                continue
            block = self.hop(layer, dst, self.many(layer, dst, weighs), known)
            blocks.append(block)
            weighs = None if weighs is None else passed_down(block, weighs, self.graph)
            dst, known = block.n_id, True
        if known:
            ops.forget(dst, self._scratch)
        return blocks[::-1]

    def hop(self, layer: int, dst: Tensor, k: Tensor, known: bool) -> Block:
        """The block of one layer; `known` where the targets are the nodes of the layer above, numbered already."""
        g, policy, key = self.graph, self.policy, self.key(layer)
        drawn = policy.places(layer, dst, k, self.how, key)
        if drawn is None:
            drawn = ops.plan(g.edges, g.rows(dst), k, self.how, policy.odds_for(layer, self.how), key)
        found = ops.number(dst, drawn, g.edges, None, self._scratch, known)
        return as_block(dst, found, policy.scaled(dst, drawn.drawn if isinstance(drawn, ops.Plan) else drawn))

    def many(self, layer: int, dst: Tensor, weighs: Tensor | None) -> Tensor:
        """How many each target draws: one number for all, or a share of the layer's budget each."""
        size = self.sizes[layer]
        if weighs is None or size < 0:
            return alike(size, dst.device)
        most = self.graph.indptr[dst + 1] - self.graph.first[dst]
        return spread(size, weighs * self.policy.strength(layer, dst), most, random.key(self.key(layer), BUDGET))

    @torch.no_grad()
    def learn(self, blocks: list[Block], energy: list[Tensor]) -> None:
        for layer, (block, e) in enumerate(zip(blocks, energy, strict=True)):
            self.policy.update(layer, block, e)


@functools.cache
def alike(size: int, device: torch.device) -> Tensor:
    """One number for all targets; nobody writes into it."""
    return torch.tensor([size], device=device)
