"""The same GCN trained with DGL: its uniform sampler, its blocks, its sums; torch for all the rest."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from adahop.datasets.base import Dataset
from adahop.metrics import criterion
from adahop_lab.bench.peers import DGLBlock, import_dgl

FORMS = ("graphconv", "sum-first")  # DGL's own layer; and its sum by hand, W after it, which costs less in a batch


class DGLTraining:
    """Row-normalised A + I as DGL's users have it: loops in the graph, uniform draws, the mean of a block's edges."""

    def __init__(self, data: Dataset, plan: Any, form: str):
        self.dgl, self.form, self.batch_size = import_dgl(), form, plan.batch_size
        self.x, self.y = data.x, data.y
        g = data.graph.normalized(None, True)
        places = (g.indptr.int(), g.indices.int(), torch.empty(0, dtype=torch.int32))
        self.graph = self.dgl.graph(("csc", places), num_nodes=g.num_nodes)
        self.sampler = self.dgl.dataloading.NeighborSampler(list(plan.sizes), replace=True)
        widths = data.x.shape[1], plan.hidden, data.classes
        self.net = DGLNet(self._conv, plan.arch, *widths, len(plan.sizes), plan.dropout)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01, fused=True)
        self.chance = torch.Generator().manual_seed(0)

    def set_threads(self, n: int) -> None:
        self.dgl.utils.set_num_threads(n)

    def _conv(self, inputs: int, outputs: int) -> nn.Module:
        if self.form == "graphconv":
            return self.dgl.nn.GraphConv(inputs, outputs, norm="right", allow_zero_in_degree=True)
        return SumFirst(self.dgl.ops.copy_u_mean, inputs, outputs)

    def epoch(self, nodes: Tensor) -> int:
        """One step a batch; the edges that were drawn."""
        edges = 0
        for seeds in nodes[torch.randperm(nodes.numel(), generator=self.chance)].split(self.batch_size):
            n_id, _, blocks = self.sampler.sample_blocks(self.graph, seeds.int())
            loss = criterion(self.net(blocks, self.x.index_select(0, n_id.long())), self.y.index_select(0, seeds))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            edges += sum(block.num_edges() for block in blocks)
        return edges


class SumFirst(nn.Module):
    """W mean h_j + b."""

    def __init__(self, mean: Any, inputs: int, outputs: int):
        super().__init__()
        self.mean, self.linear = mean, nn.Linear(inputs, outputs)

    def forward(self, block: DGLBlock, h: Tensor) -> Tensor:
        return self.linear(self.mean(block, h))


MakeConv: TypeAlias = Callable[[int, int], nn.Module]


class DGLNet(nn.Module):
    """The plain or the residual skeleton of `adahop.models.GNN`, over DGL's blocks."""

    def __init__(self, conv: MakeConv, arch: str, inputs: int, hidden: int, outputs: int, layers: int, dropout: float):
        super().__init__()
        self.residual, self.dropout = arch == "residual", dropout
        widths = [hidden] * (layers + 1) if self.residual else [inputs, *[hidden] * (layers - 1), outputs]
        self.convs = nn.ModuleList(conv(a, b) for a, b in pairwise(widths))
        if self.residual:
            self.encoder, self.decoder = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, blocks: list[DGLBlock], x: Tensor) -> Tensor:
        x = self.drop(x)
        h = z = self.encoder(x) if self.residual else x
        for i, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            h = conv(block, self.drop(h) if i else h)
            if self.residual:
                z = z[: len(h)]
                h = torch.tanh(h + z)
            elif i < len(self.convs) - 1:
                h = torch.relu(h)
        return self.decoder(self.drop(h)) if self.residual else h

    def drop(self, h: Tensor) -> Tensor:
        return dropout(h, self.dropout, self.training) if self.dropout else h
