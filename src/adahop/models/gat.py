"""GAT: attention over the neighbours, from scores that need only the two ends of an edge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, leaky_relu

from adahop.block import Block
from adahop.checks import InputError, count, one_of
from adahop.estimators import ATTENTION, attention, gather
from adahop.models.base import GNN, Conv


class GATConv(Conv):
    """sum a_ij W h_j, a = softmax_j act(s_i + t_j), s_i = a1.W h_i, t_j = a2.W h_j, one such a head."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        heads: int = 1,
        mean: bool = False,
        score: str = "leaky_relu",
        form: str = "self-normalised",
    ):
        super().__init__()
        if not mean and outputs % heads:
            raise InputError(f"`hidden` must be divisible by the {heads} heads, got {outputs}")
        width = outputs if mean else outputs // heads
        self.heads, self.width, self.mean = heads, width, mean
        self.slope = {"leaky_relu": 0.2, "relu": 0.0}[one_of(score, ("leaky_relu", "relu"), "score")]
        self.form = one_of(form, ATTENTION, "attention")
        self.linear = nn.Linear(inputs, heads * width, bias=False)
        self.dst, self.src = (nn.Parameter(torch.empty(heads, width)) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.xavier_uniform_(self.linear.weight)
        for a in (self.dst, self.src):
            nn.init.xavier_uniform_(a)

    def forward(self, h: Tensor, own: Tensor, block: Block) -> Tensor:
        value = self.linear(h).view(-1, self.heads, self.width)
        fold = (self.linear.weight.view(self.heads, self.width, -1) * self.dst.unsqueeze(-1)).sum(1)
        s, t = own @ fold.t(), (value * self.src).sum(-1)
        score = leaky_relu(s[block.dst] + t[block.src], self.slope)
        coef = attention(score, block, self.form)
        self.speak(value, block, coef)
        out = gather(value, block, coef)
        return (out.mean(1) if self.mean else out.flatten(1)) + self.bias


class GAT(GNN):
    """Graph attention network (Velickovic et al. 2018), any number of heads; a last layer's heads are averaged.

    `attention` is the estimator's form ("self-normalised", "paper", "softmax"), `score` relu or leaky_relu.
    """

    activation = staticmethod(elu)

    def __init__(
        self,
        *args: Any,
        heads: int = 1,
        score: str = "leaky_relu",
        attention: str = "self-normalised",
        **options: Any,
    ):
        super().__init__(*args, heads=count(heads, 1, "heads"), score=score, form=attention, **options)

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        return GATConv(inputs, outputs, mean=last, **options)
