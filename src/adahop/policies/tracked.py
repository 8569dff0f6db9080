"""Tracked norms: one running average a node, shared by all its parents."""

from __future__ import annotations

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.checks import between
from adahop.graph import Graph
from adahop.ops import Odds
from adahop.policies.base import Policy


class Tracked(Policy):
    """q_ij in proportion to a_ij sqrt(v_j), v_j an exponential average of |m_j|^2, mixed with `eta` uniform.

    |m_j|^2 = energy / (weight scale)^2 belongs to node j, not to the edge: what one parent sees serves all, and the
    state is 12 bytes a node and layer. The average of squares is what minimises the variance when h_j itself is noisy
    (sampled below, dropout); a node never seen counts as the mean of those seen.

    >>> policy = Tracked(Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), layers=1)
    >>> policy.odds(0).node.tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    learns = True
    square: Tensor
    root: Tensor
    visits: Tensor
    typical: Tensor
    given: Tensor

    def __init__(self, graph: Graph, layers: int, eta: float = 0.05, memory: float = 0.2):
        super().__init__(graph, layers)
        self.eta, self.memory = between(eta, 0.0, 0.999, "eta"), between(memory, 0.0, 1.0, "memory")
        n, device = graph.num_nodes, graph.device
        self.register_buffer("square", torch.zeros(layers, n, device=device))
        self.register_buffer("root", torch.ones(layers, n, device=device))
        self.register_buffer("visits", torch.zeros(layers, n, dtype=torch.int32, device=device))
        self.register_buffer("typical", torch.zeros(layers, device=device))
        self.register_buffer("given", torch.ones(layers, device=device))  # what the unseen were last set to

    def odds(self, layer: int) -> Odds:
        return Odds(edge=self.graph.weight, node=self.root[layer], eta=self.eta)

    @torch.no_grad()
    def update(self, layer: int, block: Block, energy: Tensor) -> None:
        factor = block.weight * block.scale
        true = ~block.is_self() & (factor > 0)  # an edge without weight says nothing of its source
        seen = energy[true] / factor[true].square().clamp(min=1e-30)
        src = block.src[true]
        seen, src = seen[torch.isfinite(seen)], src[torch.isfinite(seen)]
        times = ops.segment_sum(torch.ones_like(seen), src, block.num_src)
        mean = ops.segment_sum(seen, src, block.num_src) / times.clamp(min=1.0)
        here = times > 0
        node, mean = block.n_id[here], mean[here]
        visits = self.visits[layer, node] + 1
        rate = (1.0 / visits).clamp(min=self.memory)
        old = self.square[layer, node]
        new = old + rate * (mean - old)
        self.visits[layer, node], self.square[layer, node], self.root[layer, node] = visits, new, new.sqrt()
        self._settle(layer, mean)

    def _settle(self, layer: int, mean: Tensor) -> None:
        """Give those never seen the typical root, a running average, once it moved by a tenth: all nodes are read."""
        if mean.numel() == 0:
            return
        now, old = mean.mean().sqrt(), self.typical[layer]
        value = torch.where(old > 0, 0.9 * old + 0.1 * now, now)
        self.typical[layer] = value
        if value.is_cuda or bool((value - self.given[layer]).abs() > 0.1 * self.given[layer]):  # CUDA need not wait
            self.given[layer] = value
            self.root[layer] = torch.where(self.visits[layer] == 0, value, self.root[layer])
