"""Node-wise sampling: each target draws its own neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.checks import one_of
from adahop.graph import Graph
from adahop.policies import Policy, Uniform
from adahop.samplers.base import Sampler, as_block


class NeighborSampler(Sampler):
    """Each target takes itself exactly and k of its neighbours, drawn by `draw` with the odds of `policy`.

    scale = 1/(k q) with replacement and 1/pi without, so that sum weight * scale * h[src] has the full sum as its mean.

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
    ):
        super().__init__(graph, sizes, seed)
        self.how = one_of(draw, ops.DRAWS, "draw")
        self.policy = Uniform(graph, len(self.sizes)) if policy is None else policy

    @property
    def feedback(self) -> str:  # type: ignore[override]
        return self.policy.feedback

    def draw(self, seeds: Tensor) -> list[Block]:
        dst, blocks, known = seeds, [], False
        for layer in reversed(range(len(self.sizes))):
            if layer in self.skip:
                blocks.append(self.nothing(dst))
                continue
            blocks.append(self.hop(layer, dst, known))
            dst, known = blocks[-1].n_id, True
        if known:
            ops.forget(dst, self._scratch)
        return blocks[::-1]

    def hop(self, layer: int, dst: Tensor, known: bool) -> Block:
        """The block of one layer; `known` where the targets are the nodes of the layer above, numbered already."""
        g, k = self.graph, torch.tensor([self.sizes[layer]], device=self.graph.device)
        hop = ops.hop(g.indptr, g.first, g.indices, g.eid, g.weight, dst, k, self.how, self.policy.odds(layer),
                      self.key(layer), self._scratch, known)  # fmt: skip
        return as_block(dst, hop._replace(drawn=self.policy.scaled(dst, hop.drawn)))

    @torch.no_grad()
    def learn(self, blocks: list[Block], energy: list[Tensor]) -> None:
        for layer, (block, e) in enumerate(zip(blocks, energy, strict=True)):
            self.policy.update(layer, block, e)
