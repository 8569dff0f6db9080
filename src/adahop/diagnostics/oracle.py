"""The oracle: the best odds for one layer, given how noisily the layers below are drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from adahop.diagnostics.frozen import recorded, run, twin
from adahop.diagnostics.measure import Measured, measure
from adahop.diagnostics.truth import Truth
from adahop.messages import energy
from adahop.models import GNN
from adahop.ops import Drawn, Odds, Rows, random
from adahop.policies import Policy
from adahop.samplers import NeighborSampler, Sampler


class Oracle(Policy):
    """q_ij in proportion to sqrt(E|m_ij|^2) in one layer, with m = a h; in the others the inner policy's odds.

    By Cauchy-Schwarz it minimises sum_j E|m_ij|^2 / q_ij, the part of the variance that q decides. For fixed weights
    it is a_ij sqrt(E|h_j|^2), and a_ij |x_j| in the first layer; with a control variate h is what changed.
    """

    def __init__(self, inner: Policy, layer: int, weight: Tensor | None):
        super().__init__(inner.graph, inner.layers)
        self.inner, self.layer, self.weight, self.asked = inner, layer, weight, -1

    def odds(self, layer: int) -> Odds:
        self.asked = layer
        return Odds(edge=self.weight) if layer == self.layer else self.inner.odds(layer)

    def odds_for(self, layer: int, how: str) -> Odds:
        self.asked = layer
        return self.odds(layer) if layer == self.layer else self.inner.odds_for(layer, how)

    def places(self, layer: int, rows: Rows, k: Tensor, how: str, key: int | random.Stream) -> Drawn | None:
        self.asked = layer
        return None if layer == self.layer else self.inner.places(layer, rows, k, how, key)

    def scaled(self, rows: Rows, drawn: Drawn) -> Drawn:
        return drawn if self.asked == self.layer else self.inner.scaled(rows, drawn)


@torch.no_grad()
def oracle_weights(model: GNN, sampler: NeighborSampler, x: Tensor, truth: Truth, layer: int, repeats: int) -> Tensor:
    """sqrt(E|m_ij|^2), [E], filled in for all edges of the truth's nodes, with the layers below drawn."""
    exact_below = set(range(layer)) <= sampler.skip
    everyone = at_layer(sampler, layer, None, sampler.seed + 1, sized=sampler.sized.all_of(layer))
    total = torch.zeros(truth.graph.num_edges, device=truth.graph.device)
    with recorded(model) as found:
        for _ in range(1 if exact_below else repeats):
            run(model, x, everyone.sample(truth.nodes), layer + 1)
            total[found[layer].block.pos] += found[layer].read(energy)
    return total.sqrt()


def at_layer(sampler: NeighborSampler, layer: int, weight: Tensor | None, seed: int, **changes) -> Sampler:
    """The sampler with the oracle in one layer, and nothing drawn above it."""
    skip = sampler.skip | frozenset(range(layer + 1, len(sampler.sizes)))
    return twin(sampler, seed, policy=Oracle(sampler.policy, layer, weight), skip=skip, **changes)


def oracle(model: GNN, sampler: Sampler, x: Tensor, truth: Truth, layer: int, repeats: int) -> list[Measured] | None:
    """What the layer's relations would have with the oracle's odds and the sampler's own draw and estimator.

    The layers below are drawn as ever. None for layer-wise samplers, whose targets share one draw. LABOR's draw is
    Poisson.
    """
    own = sampler.by_target()
    if own is None:
        return None
    if layer in own.skip:  # nothing is drawn: the oracle can do no better and no worse
        found = measure(model, twin(own, own.seed), x, truth, 1, layer + 1)
    else:
        weight = oracle_weights(model, own, x, truth, layer, repeats)
        found = measure(model, at_layer(own, layer, weight, own.seed + 2), x, truth, repeats, layer + 1)
    return [m for m in found if m.layer == layer]
