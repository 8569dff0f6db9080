"""GCN and GraphSAGE-mean: fixed weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adahop.block import Block
from adahop.checks import one_of
from adahop.estimators import plain
from adahop.features import mapped
from adahop.memory import FIXED
from adahop.models.base import GNN, Conv
from adahop.ops import widened


class FixedConv(Conv):
    """W sum a_ij h_j + rest, summed on the narrower side of W; in a batch with few targets W may come last instead.

    What listeners hear of is always the narrower side.
    """

    memories = FIXED
    raw = True

    def raw_total(self, features: Any, own: Tensor, block: Block, encoder: nn.Linear | None, drop: Any) -> Tensor:
        coef = block.weight * block.scale
        total = features.sum(block, coef.unsqueeze(1), drop).squeeze(1)
        if self.watcher is not None:
            self.tell(features.energies(block, coef))
        if encoder is None:
            return total
        return mapped(total, encoder.weight) + features.per_target(block, coef).unsqueeze(1) * encoder.bias

    def kernel(self) -> Tensor:
        """W."""
        raise NotImplementedError

    def rest(self, own: Tensor) -> Tensor:
        """What joins the sum."""
        raise NotImplementedError

    def narrows(self) -> bool:
        return self.kernel().shape[0] < self.kernel().shape[1]

    def maps_first(self, block: Block) -> bool:
        """Whether W h of every source, if not at hand, costs less than W of the sums and wider sums."""
        out, width = self.kernel().shape
        dear = (block.num_src - block.num_dst) * out * width > block.num_edges * (width - out)
        return self.narrows() and (self.ready is not None or not dear)

    def prepare(self, h: Tensor) -> Tensor:
        return h @ self.kernel().t() if self.narrows() else h

    def forward(self, h: Tensor, own: Tensor, block: Block) -> Tensor:
        if self.maps_first(block):
            h = self.prepared(h)
            total, coef = plain(h, block)
            self.speak(h, block, coef)
            return total + self.rest(own)
        total, coef = plain(h, block)
        if self.watcher is not None or self.tap is not None:
            self.speak(self.prepare(h.detach()), block, coef)
        return self.combine(total, own)

    def combine(self, total: Tensor, own: Tensor) -> Tensor:
        return torch.addmm(self.rest(own), total, widened(self.kernel(), total).t())


class GCNConv(FixedConv):
    """W sum a_ij h_j + b."""

    asks_own = False

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
