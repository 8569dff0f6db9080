"""GeniePath: attention in breadth, a gated memory in depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adahop.block import Block
from adahop.features import Values
from adahop.messages import Ends
from adahop.models.base import GNN, State
from adahop.sum import Attention, Conv, Sum, edge_map


class BreadthConv(Attention):
    """W sum a_ij h_j with a = softmax_j v.tanh(Ws h_i + Wd h_j)."""

    def __init__(self, inputs: int, outputs: int, form: str = "self-normalised", edges: int = 0):
        super().__init__(form)
        self.dst, self.src = nn.Linear(inputs, inputs, bias=False), nn.Linear(inputs, inputs, bias=False)
        self.score = nn.Linear(inputs, 1, bias=False)
        self.linear = nn.Linear(inputs, outputs)
        self.ends_width, self.edge = inputs, edge_map(edges, inputs)

    def kernel(self) -> Tensor:
        return self.linear.weight

    def target(self, own: Tensor) -> Tensor:
        return self.dst(own)

    def source(self, values: Values, block: Block | None = None) -> tuple[Tensor, bool]:
        return values.once("t", lambda: self.src(values.rows())), False

    def scores(self, added: Tensor) -> Tensor:
        return self.score(torch.tanh(added))

    def coef(self, ends: Ends | None, block: Block) -> Tensor:
        return super().coef(ends, block).squeeze(-1)

    def update(self, total: Tensor, own: Tensor | None) -> Tensor:
        return total.flatten(1) + self.linear.bias


class GeniePath(GNN):
    """GeniePath (Liu et al. 2019): each layer widens by attention, then gates what it saw into a memory c.

    i, f, o = sigmoid(linear(h)), c <- f c + i tanh(linear(h)), h <- o tanh(c). arch="residual" adds the input
    embedding before the breadth layer's tanh.
    """

    activation = "tanh"
    weights = "pairs"

    def __init__(self, *args: Any, attention: str = "self-normalised", **options: Any):
        super().__init__(*args, form=attention, **options)
        hidden = self.widths[0]
        self.gates = nn.ModuleList(nn.Linear(hidden, 4 * hidden) for _ in self.convs)

    def wraps(self) -> bool:
        return True

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        return BreadthConv(inputs, outputs, edges=self.edges, **options)

    def initial_state(self, own: Tensor | None) -> State:
        assert own is not None
        return {**super().initial_state(own), "c": torch.zeros_like(own)}

    def step(
        self, layer: int, values: Values, own: Tensor | None, state: State, block: Block, estimator: Sum
    ) -> tuple[Tensor, State]:
        wide, state = super().step(layer, values, own, state, block, estimator)
        i, f, o, c = self.gates[layer](wide).chunk(4, dim=-1)
        c = torch.sigmoid(f) * state["c"] + torch.sigmoid(i) * torch.tanh(c)
        return torch.sigmoid(o) * torch.tanh(c), {**state, "c": c}

    def act(self, layer: int, out: Tensor, state: State) -> Tensor:
        return self.activate(out + state["z"] if "z" in state else out)
