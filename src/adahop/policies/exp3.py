"""EXP3 and EXP3.M: bandits whose arms are a node's neighbours and whose reward is the energy of a message."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.checks import InputError, between, flag, one_of
from adahop.graph import Graph
from adahop.ops import Odds
from adahop.policies.arms import Arms
from adahop.policies.base import Policy, Rows
from adahop.storage import MEMORY, Storage

Reward = str | Callable[[Block, Tensor], Tensor]


class Exp3(Policy):
    """q = (1 - eta) w / sum w + eta / n, and w <- w exp(gain) for the drawn (Alg. 2 of the paper, mended).

    step = a number, or "scale-free" for 0.3 sqrt(k) (k draws average the noise out, so a larger step is safe):
    gain = step (1/k) (r / mean r - 1) / (q n), clipped to [-1, 1], with a running mean of each node's reward, so that
    the reward's unit does not matter. step = "paper": gain = delta r / (k q),
    delta = sqrt((1 - eta) eta^4 k^5 ln(n/k) / (T n^4)) with T the node's visits (or `horizon`).
    A neighbour drawn twice gains twice. Memory: 4.3 bytes an edge and 8 a node, a layer (once with `share_layers`).

    >>> policy = Exp3(Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), layers=1)
    >>> policy.odds(0).edge.tolist()
    [1.0, 1.0, 1.0]
    """

    learns = True
    STEP, ETA = 0.3, 0.1
    whole = True  # the reward is k times the energy
    mean: Tensor
    visits: Tensor

    def __init__(
        self,
        graph: Graph,
        layers: int,
        step: str | float = "scale-free",
        eta: float | None = None,
        reward: Reward = "energy",
        share_layers: bool = False,
        horizon: float | None = None,
        memory: float = 0.1,
        storage: Storage = MEMORY,
    ):
        super().__init__(graph, layers, storage)
        if isinstance(step, str):
            one_of(step, ("scale-free", "paper"), "step")
        else:
            between(step, 0.0, 100.0, "step")
        if not callable(reward):
            one_of(reward, ("energy", "paper"), "reward")
        eta = (0.4 if step == "paper" else self.ETA) if eta is None else between(eta, 0.0, 1.0, "eta")
        if eta == 1.0:
            raise InputError("`eta` must be below 1, got 1.0 (for uniform draws choose the uniform policy)")
        self.step, self.eta, self.reward = step, eta, reward
        if horizon is not None:
            between(horizon, 1.0, 1e18, "horizon")
        self.share_layers, self.horizon, self.memory = (
            flag(share_layers, "share_layers"),
            horizon,
            between(memory, 0.0, 1.0, "memory"),
        )
        states = 1 if share_layers else layers
        n = graph.num_nodes
        self.arms = Arms(graph, states, storage)
        self.register_buffer("mean", storage.zeros(states, n, device=graph.device))
        self.register_buffer("visits", storage.zeros(states, n, dtype=torch.int32, device=graph.device))

    def odds(self, layer: int) -> Odds:
        return self.arms.odds(0 if self.share_layers else layer, self.eta)

    @property
    def log_weight(self) -> Tensor:
        """[states, E] the logarithms of the weights, to look at."""
        return self.arms.weight.log()

    @torch.no_grad()
    def update(self, layer: int, block: Block, energy: Tensor) -> None:
        if self.share_layers and layer > 0:
            return
        if ops.fast(energy):
            self._update_fast(layer, block, energy)
            return
        if self._fused(layer, block, energy):
            return
        rows = Rows(block, self.graph)
        reward = self._reward(block, energy)
        if self.whole and not callable(self.reward):
            reward = rows.k[rows.row] * reward
        gain = self._gain(layer, rows, reward.masked_fill(~rows.live, 0.0))
        gain = torch.where(rows.live & torch.isfinite(gain), gain.clamp(-1.0, 1.0), torch.zeros_like(gain))
        self.arms.grow(layer, rows.node, block.ptr, block.pos, gain)

    def _update_fast(self, layer: int, block: Block, energy: Tensor) -> None:
        """The same in one kernel."""
        step = -self.STEP if self.step == "scale-free" else 0.0 if isinstance(self.step, str) else float(self.step)
        whole = self.whole and not callable(self.reward)
        rule = (whole, self.step == "paper", step, self.eta, self.horizon or 0.0, self.memory)
        reward, g, arms = self._reward(block, energy).float().contiguous(), self.graph, self.arms
        ops.exp3(
            block.n_id[: block.num_dst], block.ptr, block.pos, block.prob, block.scale, reward, g.first, g.indptr,
            self.mean[layer], self.visits[layer], rule, arms.weight[layer], arms.tree(layer), arms._scratch,
        )  # fmt: skip

    def _fused(self, layer: int, block: Block, energy: Tensor) -> bool:
        """On a GPU, and with the rule's own step and reward, the update is one kernel."""
        kernels = ops.on_gpu(block.pos)
        if kernels is None or self.step == "paper" or self.reward != "energy" or block.num_edges == 0:
            return False
        root = self.step == "scale-free"
        kernels.exp3(
            block.n_id[: block.num_dst], block.ptr, block.pos, block.prob, block.scale, energy.contiguous(),
            self.graph.first, self.graph.indptr, self.arms.weight[layer], self.mean[layer], self.visits[layer],
            self.STEP if root else float(self.step), root, self.memory, not self.whole,
            block.slots or int(block.ptr.diff().max()),
        )  # fmt: skip
        return True

    def _reward(self, block: Block, energy: Tensor) -> Tensor:
        """(a / q)^2 |h|^2 / k: the energy of a message, times k (where `whole`) as `scale` is 1 / (k q)."""
        return self.reward(block, energy) if callable(self.reward) else energy

    def _gain(self, layer: int, rows: Rows, reward: Tensor) -> Tensor:
        node, chance = rows.node, rows.k > 0
        visits = self.visits[layer, node] + chance.int()
        self.visits[layer, node] = visits
        times = visits.clamp(min=1).float()
        k, n = rows.k[rows.row], rows.n[rows.row]
        if self.step == "paper":
            horizon = times if self.horizon is None else torch.full_like(times, self.horizon)
            log = (rows.n / rows.k.clamp(min=1.0)).log().clamp(min=0.0)
            delta = ((1 - self.eta) * self.eta**4 * rows.k**5 * log / (horizon * rows.n.clamp(min=1.0) ** 4)).sqrt()
            return delta[rows.row] * self._estimate(reward, rows)
        rate = (1.0 / times).clamp(min=self.memory)
        old = self.mean[layer, node]
        mean = torch.where(chance, old + rate * (rows.mean(reward) - old), old)
        self.mean[layer, node] = torch.where(torch.isfinite(mean), mean, old)
        mean = torch.where(torch.isfinite(mean), mean, math.nan)  # and nothing is gained in such a row
        step = self.STEP * k.sqrt() if self.step == "scale-free" else float(self.step)
        return step * (reward / mean.clamp(min=1e-38)[rows.row] - 1.0) / (k * rows.q * n)

    def _estimate(self, reward: Tensor, rows: Rows) -> Tensor:
        """The unbiased estimate of an arm's reward: r / q for each of the k draws, averaged."""
        return reward / (rows.k[rows.row] * rows.q)


class Exp3M(Exp3):
    """EXP3.M: one k-subset a visit, inclusion probabilities that sum to k, capped at 1 (Alg. 3 of the paper, mended).

    Arms whose probability is 1 (the set U) are not updated; the cap itself is part of the draw. reward="paper" is the
    printed a |h|^2 / q^2, the default a^2 |h|^2 / q^2, whose optimum is a |h|.
    """

    whole = False

    def _reward(self, block: Block, energy: Tensor) -> Tensor:
        if self.reward == "paper":
            return energy / block.weight.clamp(min=1e-12)
        return super()._reward(block, energy)
