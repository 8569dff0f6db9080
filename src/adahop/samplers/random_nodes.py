"""Random node subgraphs (RNS), full-batch training, and DropEdge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from adahop.block import Block
from adahop.checks import between, count, flag
from adahop.graph import Graph
from adahop.ops import pointer, random
from adahop.samplers.base import EPOCH
from adahop.samplers.subgraph import Renormalised


class RandomNodes(Renormalised):
    """All nodes, split at random into `parts` batches per epoch; a batch is the subgraph that its nodes induce.

    PyG's RandomNodeLoader, with weights re-normalised within the batch. By default as many parts as batches of
    `batch_size` counted nodes; parts=1 is full-batch training. `drop`: this share of the edges is left out of every
    batch, self-loops never (DropEdge, Rong et al. 2020). Biased: edges to other batches are lost. Memory: 5 bytes per
    node.

    >>> sampler = RandomNodes(Graph.from_edge_index([[0, 1, 2, 3], [1, 0, 3, 2]]), [-1], parts=1)
    >>> [sorted(seeds.tolist()) for seeds in sampler.epoch([0, 1], 1)]
    [[0, 1, 2, 3]]
    """

    def __init__(
        self,
        graph: Graph,
        sizes: Sequence[int],
        seed: int = 0,
        *,
        parts: int | None = None,
        drop: float = 0.0,
        **options: Any,
    ):
        super().__init__(graph, sizes, seed, **options)
        self.parts = None if parts is None else count(parts, 1, "parts")
        self.drop = between(drop, 0.0, 0.999, "drop")

    def epoch(self, nodes: Any, batch_size: int, shuffle: bool = True) -> Iterator[Tensor]:
        """Every node of the graph once."""
        nodes = self.count_in_loss(nodes)
        everyone = torch.arange(self.graph.num_nodes, device=nodes.device)
        parts = self.batches(nodes, count(batch_size, 1, "batch_size"))
        if flag(shuffle, "shuffle"):
            everyone = random.shuffled(everyone, random.key(self.seed, EPOCH, int(self.epochs)))
        self.epochs += 1
        yield from everyone.tensor_split(parts) if parts else ()

    def batches(self, nodes: Tensor, batch_size: int) -> int:
        parts = self.parts or -(-nodes.numel() // batch_size)
        return min(parts, self.graph.num_nodes) if nodes.numel() else 0

    def draw(self, seeds: Tensor) -> list[Block]:
        block = self.induced(seeds)
        block = self.thinned(block, self.key(0)) if self.drop else block
        scale = torch.where(block.weight > 0, self.renormalised(block), 1.0)
        return [block._replace(scale=scale)] * len(self.sizes)

    def thinned(self, block: Block, key: int) -> Block:
        """Without the edges that are dropped."""
        left = block.is_self() | (random.unit(key, block.pos, 0) >= self.drop)
        fields = {name: getattr(block, name)[left] for name in ("e_id", "weight", "prob", "scale", "pos")}
        ptr = pointer(torch.bincount(block.dst[left], minlength=block.num_dst))
        attr = None if block.attr is None else tuple(table[left] for table in block.attr)
        return block._replace(edge_index=block.edge_index[:, left], ptr=ptr, attr=attr, **fields)
