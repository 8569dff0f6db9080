"""What a model remembers to spend fewer samples: an exact first layer, and control variates on hidden ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adahop import ops
from adahop.block import Block
from adahop.checks import InputError, one_of
from adahop.estimators import gather
from adahop.graph import Graph
from adahop.history import History

ESTIMATORS = ("plain", "history", "snapshot", "exact", "exact+history", "exact+snapshot")
_summed: dict[tuple[str, int, int], Tensor] = {}  # A x of the last graph and features, by content


class FirstLayer(nn.Module):
    """The first layer's sum of raw features, A x, known once and for all: zero variance, nothing to draw."""

    def __init__(self, graph: Graph, x: Tensor):
        super().__init__()
        self.register_buffer("sums", pre_aggregate(graph, x), persistent=False)
        ones = torch.ones(graph.num_nodes, 1, device=x.device)
        self.register_buffer("weights", pre_aggregate(graph, ones, keep=False), persistent=False)

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """(sum of a x, sum of a) for the block's targets."""
        nodes = block.n_id[: block.num_dst]
        return self.sums[nodes], self.weights[nodes]


class ControlVariate(nn.Module):
    """sum over S of a scale (h - H) + sum over all of a H, with H an old h of every node (VR-GCN, Chen et al. 2018).

    Unbiased for any draw, and the messages left to chance are only what changed since H. kind="history": H is the
    latest h seen, the second sum reads all n neighbours' rows. kind="snapshot": H and its sums date from the last pass
    over the whole graph, and the second sum is one row.
    """

    def __init__(self, graph: Graph, width: int, kind: str = "history", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.kind, self.graph = one_of(kind, ("history", "snapshot"), "kind"), graph
        self.history = History(graph.num_nodes, width, dtype)
        self.sums = History(graph.num_nodes, width, dtype) if kind == "snapshot" else None

    def forward(self, h: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        """(the sum, the messages left to chance, their coefficients)."""
        nodes = block.n_id[: block.num_dst]
        base = self.history.sums(self.graph, nodes) if self.sums is None else self.sums.pull(nodes)
        change = h - self.history.pull(block.n_id)
        coef = block.weight * block.scale
        total = gather(change, block, coef) + base
        if self.training and self.sums is None:
            self.history.push(block.n_id, h)
        return total, change, coef

    @torch.no_grad()
    def refresh(self, h: Tensor) -> None:
        """Take h of every node, and for a snapshot its sums."""
        self.history.value.copy_(h)
        if self.sums is not None:
            for nodes in torch.arange(len(h), device=h.device).split(1 << 14):
                self.sums.push(nodes, self.history.sums(self.graph, nodes))

    def _apply(self, fn: Any, recurse: bool = True) -> ControlVariate:
        super()._apply(fn, recurse)
        self.graph = self.graph.to(fn(torch.zeros(0)).device)
        return self


def build(estimator: str, graph: Graph, x: Tensor, widths: list[int], dtype: torch.dtype) -> nn.ModuleDict:
    """The memories of an estimator's name, by layer; `widths` are those of the layers' inputs."""
    parts = one_of(estimator, ESTIMATORS, "estimator").split("+")
    memories = nn.ModuleDict()
    if "exact" in parts:
        memories["0"] = FirstLayer(graph, x)
    for layer, width in enumerate(widths):
        if parts[-1] in ("history", "snapshot") and str(layer) not in memories:
            memories[str(layer)] = ControlVariate(graph, width, parts[-1], dtype)
    return memories.to(x.device)


@torch.no_grad()
def pre_aggregate(graph: Graph, x: Tensor, keep: bool = True, rows: int = 1 << 14) -> Tensor:
    """A x for every node, in chunks; kept for the next model on the same graph and features."""
    if len(x) != graph.num_nodes:
        raise InputError(f"`x` must have a row for each of the {graph.num_nodes} nodes, got {len(x)}")
    name = (graph.hash(), hash((tuple(x.shape), float(x.double().sum()), float(x.double().square().sum()))), id(x))
    if keep and name in _summed:
        return _summed[name]
    out = torch.empty_like(x)
    for nodes in torch.arange(len(x), device=x.device).split(rows):
        out[nodes] = ops.full_sum(x, graph.indptr, graph.indices, graph.weight, nodes)
    if keep:
        _summed.clear()
        _summed[name] = out
    return out
