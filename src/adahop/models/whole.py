"""What a pass over the whole graph makes per node, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block, Ungathered, nothing
from adahop.graph import Graph
from adahop.storage import MEMORY, Storage


class Filled:
    """A row per node, filled a piece at a time: no piece is held twice, and the whole may lie on disk."""

    all: Tensor

    def __init__(self, n: int, storage: Storage = MEMORY):
        self.n, self.storage = n, storage

    def put(self, a: int, part: Tensor) -> None:
        if not hasattr(self, "all"):
            self.all = self.storage.empty((self.n, *part.shape[1:]), part.dtype, part.device)
        self.all[a : a + len(part)] = part


def in_pieces(h: Tensor, f: Callable[[Tensor], Tensor], storage: Storage = MEMORY, rows: int = 1 << 14) -> Tensor:
    """f of some rows at a time."""
    out, far = Filled(len(h), storage), ops.in_file(h)
    for a in range(0, max(len(h), 1), rows):
        if far:
            here = torch.arange(a, min(a + rows, len(h)))
            ops.ask_for(h, here, here + 1)
        out.put(a, f(h[a : a + rows]))
    return out.all


class AllBatch(NamedTuple):
    """A batch of all neighbours."""

    blocks: list[Block]
    x: Ungathered
    y: None = None


def from_all(graph: Graph, x: Tensor, nodes: Tensor, layers: int, known: frozenset[int]) -> AllBatch:
    """Blocks of all neighbours for some nodes, nothing for layers whose sums are known."""
    blocks, dst = [], nodes
    for layer in reversed(range(layers)):
        if layer in known:
            blocks.append(nothing(dst))
            continue
        every = graph.in_edges(dst)
        local, first = ops.in_order(torch.cat([dst, every.src]))
        n_id = torch.cat([dst, every.src])[first]
        edge_index = torch.stack([local[dst.numel() :], every.dst])
        blocks.append(every._replace(n_id=n_id, edge_index=edge_index, target=None))
        dst = n_id
    if ops.in_file(x):
        ops.ask_for(x, dst, dst + 1)
    return AllBatch(blocks[::-1], Ungathered(x, dst))
