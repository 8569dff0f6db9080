"""GeniePath: attention in breadth, a gated memory in depth."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adahop.block import Block
from adahop.checks import one_of
from adahop.estimators import ATTENTION, attention, gather
from adahop.models.base import GNN, Conv, State


class BreadthConv(Conv):
    """W sum a_ij h_j with a = softmax_j v.tanh(Ws h_i + Wd h_j)."""

    def __init__(self, inputs: int, outputs: int, form: str = "self-normalised"):
        super().__init__()
        self.form = one_of(form, ATTENTION, "attention")
        self.dst, self.src = nn.Linear(inputs, inputs, bias=False), nn.Linear(inputs, inputs, bias=False)
        self.score = nn.Linear(inputs, 1, bias=False)
        self.linear = nn.Linear(inputs, outputs)

    def prepare(self, h: Tensor) -> Tensor:
        return self.src(h)

    def forward(self, h: Tensor, own: Tensor, block: Block) -> Tensor:
        score = self.score(torch.tanh(self.dst(own)[block.dst] + self.prepared(h)[block.src]))
        coef = attention(score, block, self.form).squeeze(-1)
        self.speak(h, block, coef)
        return self.linear(gather(h, block, coef))


class GeniePath(GNN):
    """GeniePath (Liu et al. 2019): each layer widens by attention, then gates what it saw into a memory c.

    i, f, o = sigmoid(linear(h)), c <- f c + i tanh(linear(h)), h <- o tanh(c). arch="residual" adds the input
    embedding before the breadth layer's tanh.
    """

    activation = "tanh"

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        layers: int = 2,
        arch: str = "residual",
        dropout: float = 0.0,
        activation: str | None = None,
        attention: str = "self-normalised",
    ):
        super().__init__(inputs, hidden, outputs, layers, arch, dropout, activation, form=attention)
        self.edge_width = hidden
        self.gates = nn.ModuleList(nn.Linear(hidden, 4 * hidden) for _ in range(layers))

    def wraps(self) -> bool:
        return True

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        return BreadthConv(inputs, outputs, **options)

    def encode(self, x: Tensor) -> tuple[Tensor, State]:
        h, state = super().encode(x)
        return h, {**state, "c": torch.zeros_like(h)}

    def step(self, layer: int, h: Tensor, own: Tensor, state: State, block: Block) -> tuple[Tensor, State]:
        wide, state = super().step(layer, h, own, state, block)
        i, f, o, c = self.gates[layer](wide).chunk(4, dim=-1)
        c = torch.sigmoid(f) * state["c"] + torch.sigmoid(i) * torch.tanh(c)
        return torch.sigmoid(o) * torch.tanh(c), {**state, "c": c}

    def act(self, layer: int, out: Tensor, state: State) -> Tensor:
        return self.bend(out + state["z"] if "z" in state else out)
