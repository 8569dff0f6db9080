"""ClusterGCN: batches of METIS clusters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from adahop.block import Block
from adahop.checks import between, count, flag
from adahop.graph import Graph
from adahop.ops import random, spans
from adahop.samplers.base import EPOCH
from adahop.samplers.partition import partition
from adahop.samplers.subgraph import Renormalised


class ClusterGCN(Renormalised):
    """A few METIS clusters per batch, with the edges between them; weights re-normalised within the batch.

    scale_ij = sum over N(i) of a / sum over N(i) in the batch of a, so that a row keeps its sum; a self-loop's is
    (1 + diagonal) times that. ClusterGCN (Chiang et al. 2019; `diagonal` is the lambda of its Eq. 11); evaluation does
    not use `diagonal`. By default clusters of about 250 nodes, four per batch, but at least five batches per epoch.
    `batch_size` has no effect. Clusters without a node that counts are left out of an epoch. Biased: edges to other
    batches are lost. Memory: 20 bytes per node.

    >>> sampler = ClusterGCN(Graph.from_edge_index([[0, 1, 2, 3], [1, 0, 3, 2]]), [-1], parts=2)
    >>> [sorted(seeds.tolist()) for seeds in sampler.epoch([0, 1], 1)]
    [[0, 1]]
    """

    part: Tensor
    members: Tensor
    start: Tensor

    def __init__(
        self,
        graph: Graph,
        sizes: Sequence[int],
        seed: int = 0,
        *,
        parts: int | None = None,
        clusters: int | None = None,
        diagonal: float = 0.0,
        **options: Any,
    ):
        super().__init__(graph, sizes, seed, **options)
        parts = max(1, graph.num_nodes // 250) if parts is None else count(parts, 1, "parts")
        part = partition(graph, parts).to(graph.device)
        self.parts = int(part.max()) + 1 if part.numel() else 0
        self.clusters = max(1, min(4, self.parts // 5)) if clusters is None else count(clusters, 1, "clusters")
        self.diagonal = between(diagonal, 0.0, 1e6, "diagonal")
        self.register_buffer("part", part, persistent=False)
        self.register_buffer("members", torch.argsort(part, stable=True), persistent=False)
        size = torch.bincount(part, minlength=self.parts)
        self.register_buffer("start", torch.cat([size.new_zeros(1), size.cumsum(0)]), persistent=False)

    def epoch(self, nodes: Any, batch_size: int, shuffle: bool = True) -> Iterator[Tensor]:
        """All nodes of `clusters` clusters per batch."""
        count(batch_size, 1, "batch_size")
        used = self.part[self.count_in_loss(nodes)].unique()
        if flag(shuffle, "shuffle"):
            used = random.shuffled(used, random.key(self.seed, EPOCH, int(self.epochs)))
        self.epochs += 1
        for some in used.split(self.clusters) if used.numel() else ():
            yield self.members[spans(self.start[some], self.start[some + 1] - self.start[some])[1]]

    def batches(self, nodes: Tensor, batch_size: int) -> int:
        return -(-self.part[nodes.to(self.part.device)].unique().numel() // self.clusters)

    def draw(self, seeds: Tensor) -> list[Block]:
        block = self.induced(seeds)
        scale = self.renormalised(block)
        if self.diagonal:
            scale = torch.where(block.is_self(), (1.0 + self.diagonal) * scale, scale)
        return [block._replace(scale=torch.where(block.weight > 0, scale, 1.0))] * len(self.sizes)
