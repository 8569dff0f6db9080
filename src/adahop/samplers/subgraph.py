"""Subgraph sampling: all layers run on one induced subgraph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adahop.block import Block, expand
from adahop.checks import InputError, node_ids
from adahop.graph import Graph
from adahop.ops import induced, segment_sum
from adahop.samplers.base import Sampler
from adahop.storage import MEMORY, Storage


class SubgraphSampler(Sampler):
    """Every layer's block is the subgraph induced by some nodes, seeds first; all its nodes are targets in every layer.

    Only the nodes last passed to `epoch` (all, before that) count in the loss. Of `sizes` only the length matters.
    """

    by_subgraph = True
    counted: Tensor

    def __init__(self, graph: Graph, sizes: Sequence[int], seed: int = 0, storage: Storage = MEMORY):
        super().__init__(graph, sizes, seed, storage)
        if graph.types is not None:
            kinds = len(graph.types.relations)
            raise InputError(f"`graph` must have one relation for a subgraph method, got {kinds}")
        everyone = storage.ones(graph.num_nodes, dtype=torch.bool, device=graph.device)
        self.register_buffer("counted", everyone, persistent=False)

    def count_in_loss(self, nodes: Any) -> Tensor:
        """Let only these nodes count in the loss from now on; returns their checked ids."""
        ids = node_ids(nodes, self.graph.num_nodes, "nodes").to(self.graph.device)
        self.counted = torch.zeros_like(self.counted)
        self.counted[ids] = True
        return ids

    def induced(self, nodes: Tensor) -> Block:
        """The induced subgraph with the graph's own weights."""
        g = self.graph
        ptr, pos, src = induced(g.edges, nodes, nodes, self._scratch)
        one, (_, e_id, weight) = torch.ones(pos.numel(), device=g.device), g.at(pos)
        edge_index = torch.stack([src, expand(ptr, pos.numel())])
        return g.with_edge_features(Block(nodes, nodes.numel(), edge_index, e_id, weight, one, one, ptr, pos))

    def loss_weight(self, blocks: Sequence[Block]) -> Tensor:
        """The mean over the counted nodes of the batch."""
        last = blocks[-1]
        counted = self.counted[last.n_id[: last.num_dst]].float()
        return counted / counted.sum().clamp(min=1.0)


class Renormalised(SubgraphSampler):
    """scale_ij = sum over N(i) of a / sum over N(i) in the batch of a, so that a row keeps its sum."""

    total: Tensor

    def __init__(self, graph: Graph, sizes: Sequence[int], seed: int = 0, storage: Storage = MEMORY):
        super().__init__(graph, sizes, seed, storage)
        total = segment_sum(graph.edge_weight().double(), graph.dst(), graph.num_nodes)
        self.register_buffer("total", total.float(), persistent=False)

    def renormalised(self, block: Block) -> Tensor:
        """The scale of every edge."""
        inside = segment_sum(block.weight, block.dst, block.num_dst)
        return (self.total[block.n_id] / inside.clamp(min=1e-30))[block.dst]
