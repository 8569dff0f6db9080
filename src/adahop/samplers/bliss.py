"""BLISS: layer-wise sampling with a bandit per target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adahop.block import Block
from adahop.graph import Graph
from adahop.ops import Near, segment_of, segment_sum, spans
from adahop.policies import Exp3M
from adahop.policies.base import sight
from adahop.samplers.layer import LayerSampler
from adahop.storage import MEMORY, Storage


class Bliss(LayerSampler):
    """pi_j in proportion to sqrt(sum over the targets i of q_ij^2), q_ij = (1 - eta) w_ij / sum_j w_ij + eta / n_i.

    From Alsaqa, Hoang, Balin, "BLISS" (2025). Each target's q_i is an EXP3 bandit over its neighbours. The reward of an
    edge is r_ij = a_ij^2 |h_j|^2 / q_ij^2 = energy / (scale q_ij)^2, weighted by 1 / pi_j, with the scale-free step of
    `Exp3`. It rests at q_ij = a_ij |h_j| / sum, whatever the other targets of a batch want, so that what is learnt in
    one batch holds in the next; pi_j is then near the optimum |h_j| sqrt(sum_i a_ij^2), each target's own sum aside.
    Edges that were taken without a draw are learnt from, too. `step`, `eta` and `memory` are those of
    `Exp3`. Memory: 4 bytes per edge and 8 per node, per layer.

    >>> sampler = Bliss(Graph.from_edge_index([[1, 2, 3, 4], [0, 0, 0, 0]]), [2])
    >>> block = sampler.sample([0])[0]
    >>> sampler.update([block], [torch.ones(2)]); block.scale.tolist()
    [2.0, 2.0]
    """

    def __init__(
        self,
        graph: Graph,
        sizes: Sequence[int],
        seed: int = 0,
        *,
        step: str | float = "scale-free",
        eta: float | None = None,
        memory: float = 0.1,
        storage: Storage = MEMORY,
        **options: Any,
    ):
        super().__init__(graph, sizes, seed, storage=storage, **options)
        self.policy = Exp3M(graph, len(self.sizes), step=step, eta=eta, memory=memory, storage=storage)

    def odds(self, layer: int, dst: Tensor, near: Near) -> Tensor:
        rows = int(near.row[-1]) + 1 if near.row.numel() else 0
        return near.total(self.votes(layer, near.row, near.place, rows).square()).sqrt()

    def votes(self, layer: int, row: Tensor, place: Tensor, rows: int) -> Tensor:
        """q_ij of all the true neighbours of some targets."""
        edge, eta = self.policy.odds(layer).edge, self.policy.eta
        assert edge is not None
        w = edge[place].double()
        n = segment_sum(torch.ones_like(w), row, rows)
        return (1.0 - eta) * w / segment_sum(w, row, rows)[row] + eta / n[row]

    @torch.no_grad()
    def learn(self, blocks: list[Block], energy: list[Tensor]) -> None:
        g = self.graph
        for layer, (block, e) in enumerate(zip(blocks, energy, strict=True)):
            seen, others = sight(block), ~block.is_self()
            first = g.first[seen.row]
            size = g.last[seen.row] - first
            row, place = spans(first, size)
            mine = segment_of(seen.ptr, block.num_edges)
            at = (size.cumsum(0) - size)[mine] + block.pos - first[mine]
            q = torch.ones_like(block.scale)
            q[others] = self.votes(layer, row, place, seen.row.numel())[at[others]].to(q.dtype)
            taught = block._replace(prob=(~others).to(q.dtype))  # learn from all edges but self-loops
            self.policy.update(layer, taught, e / (block.scale * q).square().clamp(min=1e-30))
