"""GCN and GraphSAGE-mean: fixed weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from adahop.block import Block
from adahop.checks import one_of
from adahop.estimators import plain
from adahop.features import mapped
from adahop.memory import FIXED
from adahop.models.base import GNN, Conv


def narrows(weight: Tensor) -> bool:
    return weight.shape[0] < weight.shape[1]


def narrowed(weight: Tensor, h: Tensor) -> Tensor:
    """h on the narrower side of W: there the sum costs least."""
    return h @ weight.t() if narrows(weight) else h


class FixedConv(Conv):
    """A layer whose weights are the graph's."""

    memories = FIXED
    raw = True

    def raw_total(self, features: Any, own: Tensor, block: Block, encoder: nn.Linear | None, drop: Any) -> Tensor:
        coef = block.weight * block.scale
        total = features.sum(block, coef.unsqueeze(1), drop).squeeze(1)
        self.tell(features.energies(block, coef))
        if encoder is None:
            return total
        return mapped(total, encoder.weight) + features.per_target(block, coef).unsqueeze(1) * encoder.bias


class GCNConv(FixedConv):
    """W sum a_ij h_j + b, summed on the narrower side of W."""

    asks_own = False

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def prepare(self, h: Tensor) -> Tensor:
        return narrowed(self.linear.weight, h)

    def forward(self, h: Tensor, own: Tensor, block: Block) -> Tensor:
        weight = self.linear.weight
        h = self.prepared(h)
        out, coef = plain(h, block)
        self.speak(h, block, coef)
        return (out if narrows(weight) else out @ weight.t()) + self.linear.bias

    def combine(self, total: Tensor, own: Tensor) -> Tensor:
        return mapped(total, self.linear.weight, self.linear.bias)


class GCN(GNN):
    """Graph convolutional network (Kipf and Welling 2017), row- or symmetric-normalised A + I."""

    def __init__(self, *args: Any, norm: str = "row", **options: Any):
        super().__init__(*args, **options)
        self.graph = (one_of(norm, ("row", "sym"), "norm"), True)

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        return GCNConv(inputs, outputs)


class SAGEConv(FixedConv):
    """W1 h_i + W2 mean of h_j + b."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def prepare(self, h: Tensor) -> Tensor:
        return narrowed(self.others.weight, h)

    def forward(self, h: Tensor, own: Tensor, block: Block) -> Tensor:
        weight = self.others.weight
        h = self.prepared(h)
        out, coef = plain(h, block)
        self.speak(h, block, coef)
        return self.own(own) + (out if narrows(weight) else out @ weight.t())

    def combine(self, total: Tensor, own: Tensor) -> Tensor:
        return self.own(own) + mapped(total, self.others.weight)


class SAGE(GNN):
    """GraphSAGE with the mean aggregator (Hamilton et al. 2017); the node itself has a weight of its own."""

    graph = ("row", False)

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        return SAGEConv(inputs, outputs)
