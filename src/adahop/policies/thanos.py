"""Thanos: a bandit that prefers neighbours near the mean message; its estimator does not correct for the odds."""

from __future__ import annotations

import torch
from torch import Tensor

from adahop.block import Block
from adahop.checks import between, count
from adahop.graph import Graph
from adahop.messages import alignment
from adahop.ops import Drawn, Odds, Rows, segment_of, segment_sum
from adahop.policies.arms import Arms
from adahop.policies.base import Policy, sight
from adahop.storage import MEMORY, Storage


class Thanos(Policy):
    """EXP3 with reward r_j = 2 <m_j, mean m> - |m_j|^2, largest next to the mean, reset every `restart` steps.

    q = (1 - eta) w / sum w + eta / n, w <- w exp(gain), gain = step (r - mean r) / (mean |r|) / (k q n), clipped to
    [-1, 1], with running means per node. The estimate is (n/k) sum over S of a h, whatever q: biased once q has learnt,
    but bounded. The mean message is that of the others drawn beside j, so k = 1 learns nothing. Thanos (Zhang et al.
    2021). Memory: 4 bytes per edge and 12 per node, per layer.

    >>> policy = Thanos(Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), layers=1)
    >>> policy.odds(0).edge.tolist(), policy.reads.__name__
    ([1.0, 1.0, 1.0], 'alignment')
    """

    learns = True
    reads = staticmethod(alignment)
    rescales = syncs = True
    subset = False  # whether `prob` holds inclusion probabilities

    mean: Tensor
    size: Tensor
    visits: Tensor
    steps: Tensor

    def __init__(
        self,
        graph: Graph,
        layers: int,
        step: float = 0.3,
        eta: float = 0.1,
        restart: int = 1000,
        memory: float = 0.1,
        storage: Storage = MEMORY,
    ):
        super().__init__(graph, layers, storage)
        self.step, self.eta = between(step, 0.0, 100.0, "step"), between(eta, 0.0, 0.999, "eta")
        self.restart, self.memory = count(restart, 1, "restart"), between(memory, 0.0, 1.0, "memory")
        n, device = graph.num_rows, graph.device
        self.arms = Arms(graph, layers, storage)
        self.register_buffer("mean", storage.zeros(layers, n, device=device))
        self.register_buffer("size", storage.zeros(layers, n, device=device))
        self.register_buffer("visits", storage.zeros(layers, n, dtype=torch.int32, device=device))
        self.register_buffer("steps", torch.zeros(layers, dtype=torch.int64, device=device))

    def odds(self, layer: int) -> Odds:
        return self.arms.odds(layer, self.eta)

    @property
    def log_weight(self) -> Tensor:
        """[layers, E] the logarithms of the weights, for inspection."""
        return self.arms.weight.log()

    def scaled(self, rows: Rows, drawn: Drawn) -> Drawn:
        row, n, k, live = self._drawn(rows.row, drawn.ptr, drawn.pos)
        return drawn._replace(scale=torch.where(live, (n / k)[row], 1.0))

    @torch.no_grad()
    def update(self, layer: int, block: Block, energy: Tensor) -> None:
        if int(self.steps[layer]) and int(self.steps[layer]) % self.restart == 0:
            self.arms.put(layer, 1.0)
            for state in (self.mean, self.size, self.visits):
                state[layer] = 0
        self.steps[layer] += 1
        seen = sight(block)
        node = seen.row
        row, n, k, live = self._drawn(node, seen.ptr, seen.pos)
        reward = torch.where(live & torch.isfinite(energy), energy, 0.0)
        mean, size = self._means(layer, node, row, reward, k, segment_sum(live.float(), row, len(node)) > 0)
        often = block.prob if self.subset else block.prob * k[row]
        gain = self.step * (reward - mean[row]) / size[row].clamp(min=1e-38) / (often * n[row]).clamp(min=1e-30)
        gain = torch.where(live & torch.isfinite(gain), gain.clamp(-1.0, 1.0), 0.0)
        self.arms.grow(layer, seen, gain)

    def _drawn(self, rows: Tensor, ptr: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(row of each place, neighbours and drawn per row, whether the place was left to chance)."""
        first = self.graph.first[rows]
        row = segment_of(ptr, pos.numel())
        n = self.graph.last[rows] - first
        k = ptr.diff() - (first - self.graph.indptr[rows])
        live = (pos >= first[row]) & (k < n)[row]
        return row, n.float(), k.clamp(min=1).float(), live

    def _means(self, layer: int, node: Tensor, row: Tensor, reward: Tensor, k: Tensor, chance: Tensor):
        """Running means of a node's reward and of its size."""
        self.visits[layer, node] += chance.int()
        rate = (1.0 / self.visits[layer, node].clamp(min=1)).clamp(min=self.memory) * chance
        for state, value in ((self.mean, reward), (self.size, reward.abs())):
            old = state[layer, node]
            state[layer, node] = old + rate * (segment_sum(value, row, len(node)) / k - old)
        return self.mean[layer, node], self.size[layer, node]


class ThanosM(Thanos):
    """Thanos with one k-subset per visit, as in EXP3.M: inclusion probabilities that sum to k, none over 1."""

    subset = True
