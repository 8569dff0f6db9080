"""GCN, plain, residual or as GCNII, and GraphSAGE-mean: fixed weights."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from adahop.checks import InputError, between, one_of
from adahop.features import mapped
from adahop.models.base import GNN, State
from adahop.sum import Conv, edge_map


class GCNConv(Conv):
    """W sum a_ij h_j + b; with features of edges, sum a_ij (W h_j + U e_ij) + b."""

    reads_own = False
    is_linear = True

    def __init__(self, inputs: int, outputs: int, edges: int = 0):
        super().__init__()
        self.linear, self.edge = nn.Linear(inputs, outputs), edge_map(edges, outputs)

    def kernel(self) -> Tensor:
        return self.linear.weight

    def rest(self, own: Tensor | None) -> Tensor:
        return self.linear.bias


class GCNIIConv(GCNConv):
    """M (1 - alpha) sum a_ij h_j + b, M = (1 - beta) I + beta W; `initial` is M alpha z, z the first layer's input."""

    alpha, beta = 0.1, 1.0

    def __init__(self, inputs: int, outputs: int, edges: int = 0):
        super().__init__(inputs, outputs, edges)
        self.register_buffer("identity", torch.eye(inputs), persistent=False)

    def mix(self) -> Tensor:
        return torch.lerp(cast(Tensor, self.identity), self.linear.weight, self.beta)

    def kernel(self) -> Tensor:
        return (1.0 - self.alpha) * self.mix()

    def initial(self, z: Tensor) -> Tensor:
        return mapped(z, self.alpha * self.mix())


class GCN(GNN):
    """Graph convolutional network (Kipf and Welling 2017), row- or symmetric-normalised A + I.

    arch="gcnii" (Chen et al. 2020), for depth: z = linear(x), h <- relu(M ((1 - alpha) sum a_ij h_j + alpha z) + b)
    with M = (1 - beta) I + beta W and beta = log(theta / layer + 1), outputs linear(h).
    """

    arches = (*GNN.arches, "gcnii")

    def __init__(self, *args: Any, norm: str = "row", alpha: float = 0.1, theta: float = 0.5, **options: Any):
        super().__init__(*args, **options)
        if self.arch != "gcnii" and (alpha, theta) != (0.1, 0.5):
            raise InputError(f"`arch` must be gcnii for `alpha` and `theta`, got {self.arch}")
        self.graph = (one_of(norm, ("row", "sym"), "norm"), True)
        between(alpha, 0.0, 0.999, "alpha"), between(theta, 0.0, 1e6, "theta")
        for layer, conv in enumerate(self.convs, 1):
            if isinstance(conv, GCNIIConv):
                conv.alpha, conv.beta = alpha, math.log(theta / layer + 1.0)

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        return (GCNIIConv if self.arch == "gcnii" else GCNConv)(inputs, outputs, self.edges)

    def act(self, layer: int, out: Tensor, state: State) -> Tensor:
        if self.arch == "gcnii":
            return self.activate(out + cast(GCNIIConv, self.convs[layer]).initial(state["z"]))
        return super().act(layer, out, state)


class SAGEConv(Conv):
    """W1 h_i + W2 mean of h_j + b; with features of edges, W1 h_i + mean of (W2 h_j + U e_ij) + b."""

    is_linear = True

    def __init__(self, inputs: int, outputs: int, edges: int = 0):
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)
        self.edge = edge_map(edges, outputs)

    def kernel(self) -> Tensor:
        return self.others.weight

    def rest(self, own: Tensor | None) -> Tensor:
        assert own is not None
        return mapped(own, self.own.weight, self.own.bias)


class SAGE(GNN):
    """GraphSAGE with the mean aggregator (Hamilton et al. 2017); the node itself has a weight of its own."""

    graph = ("row", False)

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        return SAGEConv(inputs, outputs, self.edges)
