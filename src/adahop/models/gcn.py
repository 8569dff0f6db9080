"""GCN and GraphSAGE-mean: fixed weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from adahop.block import Block
from adahop.checks import one_of
from adahop.estimators import plain
from adahop.memory import FIXED
from adahop.models.base import GNN, Conv


class FixedConv(Conv):
    """W sum a_ij h_j + rest, summed on the narrower side of W; in a batch with few targets W may come last instead."""

    memories = FIXED

    def kernel(self) -> Tensor:
        """W."""
        raise NotImplementedError

    def rest(self, own: Tensor) -> Tensor:
        """What joins the sum."""
        raise NotImplementedError

    def narrows(self) -> bool:
        return self.kernel().shape[0] < self.kernel().shape[1]

    def maps_first(self, block: Block) -> bool:
        """Where W narrows: whole graphs have it done, listeners expect it, and else it must cost less."""
        if not self.narrows() or self.ready is not None or self.watcher is not None or self.tap is not None:
            return self.narrows()
        out, width = self.kernel().shape
        return (block.num_src - block.num_dst) * out * width < block.num_edges * (width - out)

    def prepare(self, h: Tensor) -> Tensor:
        return h @ self.kernel().t() if self.narrows() else h

    def forward(self, h: Tensor, own: Tensor, block: Block) -> Tensor:
        first = self.maps_first(block)
        h = self.prepared(h) if first else h
        out, coef = plain(h, block)
        self.speak(h, block, coef)
        return (out if first else out @ self.kernel().t()) + self.rest(own)

    def combine(self, total: Tensor, own: Tensor) -> Tensor:
        return linear(total, self.kernel()) + self.rest(own)


class GCNConv(FixedConv):
    """W sum a_ij h_j + b."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def kernel(self) -> Tensor:
        return self.linear.weight

    def rest(self, own: Tensor) -> Tensor:
        return self.linear.bias


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

    def kernel(self) -> Tensor:
        return self.others.weight

    def rest(self, own: Tensor) -> Tensor:
        return self.own(own)


class SAGE(GNN):
    """GraphSAGE with the mean aggregator (Hamilton et al. 2017); the node itself has a weight of its own."""

    graph = ("row", False)

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        return SAGEConv(inputs, outputs)
