"""EXP3 and EXP3.M: bandits whose arms are a node's neighbours and whose reward is the energy of a message."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.checks import InputError, between, flag, one_of
from adahop.graph import Graph
from adahop.ops import Exp3Rule, Odds
from adahop.policies.arms import Arms
from adahop.policies.base import Policy, sight
from adahop.storage import MEMORY, Storage


class Exp3(Policy):
    """q = (1 - eta) w / sum w + eta / n, and w <- w exp(gain) for the drawn (Alg. 2 of the paper, corrected).

    step = a number, or "scale-free" for 0.3 sqrt(k) (k draws average the noise out, so a larger step is safe):
    gain = step (1/k) (r / mean r - 1) / (q n), clipped to [-1, 1], with a running mean of each node's reward, so that
    the reward's unit does not matter. step = "paper": gain = delta r / (k q),
    delta = sqrt((1 - eta) eta^4 k^5 ln(n/k) / (T n^4)) with T the node's visits (or `horizon`).
    A neighbour drawn twice gains twice. Memory: 4.3 bytes per edge and 8 per node, per layer (or once: `share_layers`);
    in a typed graph 8 per (relation, target) that has edges. `sums` is what systematic draws keep, see `PrefixSums`.

    >>> policy = Exp3(Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), layers=1)
    >>> policy.odds(0).edge.tolist()
    [1.0, 1.0, 1.0]
    """

    learns = True
    STEP, ETA = 0.3, 0.1
    times_k = True  # whether the reward is k times the energy
    mean: Tensor
    visits: Tensor

    def __init__(
        self,
        graph: Graph,
        layers: int,
        step: str | float = "scale-free",
        eta: float | None = None,
        reward: str = "energy",
        share_layers: bool = False,
        horizon: float | None = None,
        memory: float = 0.1,
        sums: str = "edges",
        storage: Storage = MEMORY,
    ):
        super().__init__(graph, layers, storage)
        if isinstance(step, str):
            one_of(step, ("scale-free", "paper"), "step")
        else:
            between(step, 0.0, 100.0, "step")
        one_of(reward, ("energy", "paper"), "reward")
        eta = (0.4 if step == "paper" else self.ETA) if eta is None else between(eta, 0.0, 1.0, "eta")
        if eta == 1.0:
            raise InputError("`eta` must be below 1, got 1.0 (for uniform draws choose the uniform policy)")
        self.step, self.eta, self.reward = step, eta, reward
        if horizon is not None:
            between(horizon, 1.0, 1e18, "horizon")
        self.share_layers, self.horizon = flag(share_layers, "share_layers"), horizon
        self.memory = between(memory, 0.0, 1.0, "memory")
        states = 1 if share_layers else layers
        n = graph.num_rows
        self.arms = Arms(graph, states, storage, sums)
        self.register_buffer("mean", storage.zeros(states, n, device=graph.device))
        self.register_buffer("visits", storage.zeros(states, n, dtype=torch.int32, device=graph.device))

    def odds(self, layer: int) -> Odds:
        return self.arms.odds(0 if self.share_layers else layer, self.eta)

    def prepare(self, how: str, sizes: Sequence[int]) -> None:
        if how == "systematic":
            self.arms.use_prefix_sums(how)

    def odds_for(self, layer: int, how: str) -> Odds:
        return self.arms.odds_for(0 if self.share_layers else layer, self.eta, how)

    @property
    def log_weight(self) -> Tensor:
        """[states, E] the logarithms of the weights, for inspection."""
        return self.arms.weight.log()

    @torch.no_grad()
    def update(self, layer: int, block: Block, energy: Tensor) -> None:
        if self.share_layers and layer > 0:
            return
        paper, root = self.step == "paper", self.step == "scale-free"
        step = self.STEP if root else 0.0 if isinstance(self.step, str) else float(self.step)
        horizon = float(self.horizon or 0.0)
        rule = Exp3Rule(self.times_k, paper, step, root, float(self.eta), horizon, float(self.memory))
        seen = sight(block)
        ops.exp3(
            seen, self._reward(block, energy), self.graph.edges, self.arms.weights(layer), self.mean[layer],
            self.visits[layer], rule, self.arms.scratch,
        )  # fmt: skip
        self.arms.visited(layer, seen.row, seen.ptr, self.eta)

    def _reward(self, block: Block, energy: Tensor) -> Tensor:
        """(a / q)^2 |h|^2 / k: the energy of a message, times k (where `times_k`) as `scale` is 1 / (k q)."""
        return energy


class Exp3M(Exp3):
    """EXP3.M: one k-subset per visit, inclusion probabilities that sum to k, capped at 1 (Alg. 3, corrected).

    Arms whose probability is 1 (the set U) are not updated; the cap itself is part of the draw. reward="paper" is the
    printed a |h|^2 / q^2, the default a^2 |h|^2 / q^2, whose optimum is a |h|.
    """

    times_k = False

    def _reward(self, block: Block, energy: Tensor) -> Tensor:
        if self.reward == "paper":
            return energy / block.weight.clamp(min=1e-12)
        return super()._reward(block, energy)
