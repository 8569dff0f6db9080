"""GCN and GraphSAGE-mean: fixed weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from adahop.checks import one_of
from adahop.features import mapped
from adahop.models.base import GNN
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


class GCN(GNN):
    """Graph convolutional network (Kipf and Welling 2017), row- or symmetric-normalised A + I."""

    def __init__(self, *args: Any, norm: str = "row", **options: Any):
        super().__init__(*args, **options)
        self.graph = (one_of(norm, ("row", "sym"), "norm"), True)

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        return GCNConv(inputs, outputs, self.edges)


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
