"""Passes over the whole graph, chunk by chunk, and batches of all neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block, Ungathered, nothing
from adahop.features import SparseFeatures
from adahop.graph import Graph
from adahop.storage import MEMORY, Storage


class ChunkedRows:
    """A row per node, written chunk by chunk: no chunk is held twice, and the table may lie on disk."""

    all: Tensor

    def __init__(self, n: int, storage: Storage = MEMORY):
        self.n, self.storage = n, storage

    def put(self, a: int, part: Tensor) -> None:
        if not hasattr(self, "all"):
            self.all = self.storage.empty((self.n, *part.shape[1:]), part.dtype, part.device)
        self.all[a : a + len(part)] = part


def in_chunks(
    h: Tensor | SparseFeatures, f: Callable[[Any], Tensor], storage: Storage = MEMORY, rows: int = 1 << 14
) -> Tensor:
    """f(h), computed for some rows at a time."""
    out, on_disk = ChunkedRows(len(h), storage), isinstance(h, Tensor) and ops.in_file(h)
    for a in range(0, max(len(h), 1), rows):
        if on_disk and isinstance(h, Tensor):
            here = torch.arange(a, min(a + rows, len(h)))
            ops.ask_for(h, here, here + 1)
        out.put(a, f(h[a : a + rows]))
    return out.all


class FullBatch(NamedTuple):
    """A batch with all neighbours of every target."""

    blocks: list[Block]
    x: Ungathered | SparseFeatures
    y: None = None


def full_batch(
    graph: Graph, x: Tensor | SparseFeatures, nodes: Tensor, layers: int, known: frozenset[int]
) -> FullBatch:
    """Blocks of all neighbours for some nodes; empty ones for layers whose sums are known."""
    blocks, dst = [], nodes
    for layer in reversed(range(layers)):
        if layer in known:
            blocks.append(nothing(dst))
            continue
        full = graph.in_edges(dst)
        ids = torch.cat([dst, full.src])
        local, first = ops.in_order(ids)
        n_id = ids[first]
        edge_index = torch.stack([local[dst.numel() :], full.dst])
        blocks.append(full._replace(n_id=n_id, edge_index=edge_index, target=None))
        dst = n_id
    if isinstance(x, SparseFeatures):
        return FullBatch(blocks[::-1], x[dst])
    if ops.in_file(x):
        ops.ask_for(x, dst, dst + 1)
    return FullBatch(blocks[::-1], Ungathered(x, dst))
