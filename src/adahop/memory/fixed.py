"""Memories for layers with fixed weights: an exact first layer, control variates on hidden ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from adahop import ops
from adahop.block import Block
from adahop.checks import InputError, one_of
from adahop.estimators import gather
from adahop.features import mapped
from adahop.graph import Graph
from adahop.history import History

_summed: dict[tuple[str, str, str], Tensor] = {}  # A x of the last graph and features, by content


Drop = Callable[[Tensor], Tensor]


def same(h: Tensor) -> Tensor:
    """Nothing is dropped."""
    return h


class Memory(nn.Module):
    """Gives a layer its sum of a_ij h_j with fewer samples, or none."""

    draws = True  # whether the layer's block still needs to be drawn
    shaped = True  # whether its work has the same shape at every step, so that a CUDA graph can hold it

    def total(
        self, conv: Any, h: Tensor, own: Tensor, block: Block, encoder: nn.Linear | None, drop: Drop = same
    ) -> Tensor:
        """The sum for the block's targets; `conv` hears of the messages left to chance.

        `drop` is for raw sums, which drop entries as raw features do; others are dropped when they are whole.
        """
        raise NotImplementedError

    def refresh(self, h: Tensor, conv: Any, passed: bool) -> None:
        """Every node's h is at hand: `passed` after a pass over the graph during training, else at the start."""

    def settle(self) -> None:
        """What the last step saw is written, where that had to wait."""

    def state(self) -> dict[str, Tensor]:
        """What later steps depend on and nothing else can tell: the rows of its histories, by name."""
        self.settle()
        return {name: m.value for name, m in self.named_modules() if isinstance(m, History)}

    def restore(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            self.get_submodule(name).value.copy_(value)  # type: ignore[union-attr,operator]


class FirstLayer(Memory):
    """The first layer's sum of raw features, A x, known once and for all: zero variance, nothing to draw."""

    draws = False
    sums: Tensor
    weights: Tensor

    def __init__(self, graph: Graph, x: Tensor):
        super().__init__()
        self.register_buffer("sums", ops.table(pre_aggregate(graph, x), x), persistent=False)
        ones = torch.ones(graph.num_nodes, 1, device=x.device)
        self.register_buffer("weights", pre_aggregate(graph, ones, keep=False), persistent=False)

    def total(
        self, conv: Any, h: Tensor, own: Tensor, block: Block, encoder: nn.Linear | None, drop: Drop = same
    ) -> Tensor:
        nodes = block.n_id[: block.num_dst]
        conv.speak(h, block, torch.zeros_like(block.scale))
        total = drop(ops.table_rows(self.sums, nodes))
        if encoder is None:
            return total
        return mapped(total, encoder.weight) + self.weights[nodes] * encoder.bias


class ControlVariate(Memory):
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

    def total(
        self, conv: Any, h: Tensor, own: Tensor, block: Block, encoder: nn.Linear | None, drop: Drop = same
    ) -> Tensor:
        nodes = block.n_id[: block.num_dst]
        base = self.history.sums(self.graph, nodes) if self.sums is None else self.sums.pull(nodes)
        change = h - self.history.pull(block.n_id)
        coef = block.weight * block.scale
        total = gather(change, block, coef) + base
        conv.speak(change, block, coef)
        if self.training and self.sums is None:
            self.history.push(block.n_id, h)
        return total

    @torch.no_grad()
    def refresh(self, h: Tensor, conv: Any, passed: bool) -> None:
        """Take h of every node, and for a snapshot its sums."""
        if passed and self.sums is None:
            return  # a history has newer rows than a pass at an epoch's end would leave behind
        if len(h) != self.graph.num_nodes:
            return  # a pass over another graph
        self.history.value.copy_(h)
        if self.sums is not None:
            for nodes in torch.arange(len(h), device=h.device).split(1 << 14):
                self.sums.push(nodes, self.history.sums(self.graph, nodes))

    def _apply(self, fn: Any, recurse: bool = True) -> ControlVariate:
        super()._apply(fn, recurse)
        self.graph = self.graph.to(fn(torch.zeros(0)).device)
        return self


@torch.no_grad()
def pre_aggregate(graph: Graph, x: Tensor, keep: bool = True, rows: int = 1 << 14) -> Tensor:
    """A x for every node, in chunks; kept for the next model on the same graph and features."""
    if len(x) != graph.num_nodes:
        raise InputError(f"`x` must have a row for each of the {graph.num_nodes} nodes, got {len(x)}")
    name = (graph.hash(), _content(x), str(x.device))
    if keep and name in _summed:
        return _summed[name]
    out = torch.empty_like(x)
    for nodes in torch.arange(len(x), device=x.device).split(rows):
        out[nodes] = ops.full_sum(x, graph.edges, nodes)
    if keep:
        _summed.clear()
        _summed[name] = out
    return out


def _content(x: Tensor) -> str:
    """A name for what a tensor holds: rows in another order are other features."""
    whole = hashlib.blake2b(f"{x.dtype}:{tuple(x.shape)}".encode(), digest_size=16)
    whole.update(x.detach().cpu().contiguous().numpy().data)
    return whole.hexdigest()
