"""AS-GCN: layer-wise sampling with a learned score of the candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from adahop.block import Block
from adahop.checks import InputError, KindError, as_tensor, between
from adahop.graph import Graph
from adahop.ops import Near, rows_dot
from adahop.samplers.layer import LayerSampler

FLOOR = 0.1  # the lowest score, beside 1 + FLOOR at the start: bounds the scale of nodes with a low score


class ASGCN(LayerSampler):
    """q_j in proportion to (sum over the targets i of a_ij) g(x_j), g(x) = softplus(w.x + b) + 0.1, w, b per layer.

    From Huang et al., "Adaptive Sampling" (2018), Eq. 8, whose g is |w.x|; ours is positive and smooth everywhere, and
    starts as 1.1 for all. `penalty` trains the parameters to lower the variance sum_ij a_ij^2 |h_j|^2 / q_j(theta);
    with r_j = g_j(theta) / g_j(now), drawn edges e and drawn nodes j, its estimate from the draw is
    V(theta) = (sum_e energy_e / r_e) (mean_j r_j): the first factor reweights what was seen to theta, the second is the
    normaliser of q(theta) over today's. For s independent draws the gradient is unbiased but for a factor (s - 1) / s.
    It joins the loss as lambda V / V(now), so that its unit never matters: the gradient is that of lambda log V. Nodes
    sure to come (pi = 1) have no part in it. With a GAT this is AS-GAT. `features` [N, F] are read, never copied;
    without them, as in a typed graph, log(1 + in-degree) stands in. Memory: F + 1 numbers per layer.

    >>> sampler = ASGCN(Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), [2], features=torch.eye(4))
    >>> blocks = sampler.sample([0])
    >>> sampler.penalty(blocks, [torch.ones(2)]).requires_grad
    True
    """

    features: Tensor
    unit: Tensor

    def __init__(
        self,
        graph: Graph,
        sizes: Sequence[int],
        seed: int = 0,
        *,
        features: Any = None,
        penalty: float = 0.5,
        **options: Any,
    ):
        super().__init__(graph, sizes, seed, **options)
        x = graph.degree()[:, None].float().log1p() if features is None else as_tensor(features, "features")
        if not x.is_floating_point():
            raise KindError(f"`features` must hold floating-point numbers, got dtype {x.dtype}")
        if x.dim() != 2 or len(x) != graph.num_nodes:
            raise InputError(f"`features` must have shape [{graph.num_nodes}, F], got {tuple(x.shape)}")
        self.strength = between(penalty, 0.0, 1e6, "penalty")
        self.register_buffer("features", x, persistent=False)
        size = x.float().square().sum(1).mean().sqrt() if len(x) else torch.ones(())
        self.register_buffer("unit", 1.0 / size.clamp(min=1e-12), persistent=False)  # rows of length 1, on average
        layers = len(self.sizes)
        self.w = nn.Parameter(torch.zeros(layers, x.shape[1], device=graph.device))
        self.b = nn.Parameter(torch.full((layers,), 0.5413, device=graph.device))  # softplus(0.5413) = 1

    def odds(self, layer: int, dst: Tensor, near: Near) -> Tensor:
        dot = rows_dot(self.features, near.nodes, self.w[layer])
        return near.total(self.weight(near.place)) * self.score(layer, dot)

    def score(self, layer: int, dot: Tensor) -> Tensor:
        """g from w.x."""
        return softplus(dot * self.unit + self.b[layer]) + FLOOR

    def penalty(self, blocks: Sequence[Block], energy: Sequence[Tensor]) -> Tensor | float:
        total: Tensor | float = 0.0
        for layer, (block, e) in enumerate(zip(blocks, energy, strict=True)):
            left = block.drawn() & torch.isfinite(e)
            if self.strength > 0 and bool(left.any()):
                e = e.detach() / e[left].max().clamp(min=1e-38)  # so that no sum overflows
                value = self.variance(layer, block, left, e)
                total = total + self.strength * value / value.detach().clamp(min=1e-30)
        return total

    def variance(self, layer: int, block: Block, left: Tensor, energy: Tensor) -> Tensor:
        """V(theta) from the edges `left` to chance; its value is that of the current theta, its gradient counts."""
        nodes, at = block.src[left].unique(return_inverse=True)
        g = self.score(layer, self.features[block.n_id[nodes]].to(self.w.dtype) @ self.w[layer])
        ratio = g / g.detach()
        times = block.scale[left] * block.prob[left]  # 1, or a node's share of the draws where it can come twice
        share = torch.zeros_like(ratio).index_copy_(0, at, times)
        return (energy[left] / times / ratio[at]).sum() * (share * ratio).sum() / share.sum()
