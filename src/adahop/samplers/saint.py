"""GraphSAINT: subgraphs by random walks, nodes or edges, with norms from counted covers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.checks import count, one_of
from adahop.graph import Graph
from adahop.ops import random, segment_sum
from adahop.samplers.base import EPOCH
from adahop.samplers.subgraph import SubgraphSampler
from adahop.storage import MEMORY, Storage

COVER = 1 << 41  # counters for the counting runs, away from those of steps and epochs


class GraphSAINT(SubgraphSampler):
    """The subgraph induced by what a draw visits; C counts how often a node or edge was in one of many such subgraphs.

    scale_ij = C_i / C_ij (an edge's share of its target's visits) and loss weight = subgraphs / (C_i * nodes), so that
    the mean of scale * [edge is in | target is in], and of loss weight * nodes * [node is in], is 1.
    GraphSAINT (Zeng et al. 2020).

    walk="rw": `roots` of the epoch's nodes walk `length` steps to random neighbours; an epoch has every node as a root
    once. "node": `roots` draws in proportion to sum_i a_ij^2. "edge": both ends of `roots` edges, drawn with odds
    1/deg + 1/deg. By default `roots` is the batch size, or a twentieth of the nodes where that is more. An epoch has
    nodes / roots batches. Counts come from `coverage` epochs drawn before the first; what was never visited counts as
    visited once. The subgraph may hold nodes that do not count in the loss: the original keeps to the training nodes.
    Memory: 4 bytes per edge and 4 per node, and for walk="node" or "edge" 8 more per node or edge.

    >>> sampler = GraphSAINT(Graph.from_edge_index([[0, 1, 1, 2], [1, 0, 2, 1]]), [-1, -1], length=1)
    >>> sampler.sample([0])[-1].n_id.tolist()
    [0, 1]
    """

    node_count: Tensor
    edge_count: Tensor
    odds: Tensor

    def __init__(
        self,
        graph: Graph,
        sizes: Sequence[int],
        seed: int = 0,
        walk: str = "rw",
        roots: int | None = None,
        length: int = 2,
        coverage: int = 50,
        storage: Storage = MEMORY,
    ):
        super().__init__(graph, sizes, seed, storage)
        self.walk = one_of(walk, ("rw", "node", "edge"), "walk")
        if walk == "edge" and bool((graph.first == graph.indptr[1:]).all()):
            self.walk = "rw"  # no edge to draw: roots alone
        self.roots = None if roots is None else count(roots, 1, "roots")
        self.length, self.coverage = count(length, 0, "length"), count(coverage, 1, "coverage")
        self.subgraphs = 0  # how many were counted; 0: none yet
        for name, size in (("node_count", graph.num_nodes), ("edge_count", graph.num_edges)):
            self.register_buffer(name, storage.zeros(size, dtype=torch.int32, device=graph.device), persistent=False)
        self.register_buffer("odds", None if self.walk == "rw" else odds_of(graph, walk).cumsum(0), persistent=False)

    def epoch(self, nodes: Any, batch_size: int, shuffle: bool = True) -> Iterator[Tensor]:
        """The roots of the walks, or the drawn nodes themselves, of each batch."""
        size, before = count(batch_size, 1, "batch_size"), self.counted
        nodes = self.count_in_loss(nodes).unique()
        parts = self.batches(nodes, size)
        if self.subgraphs != self.coverage * parts or not torch.equal(before, self.counted):
            self.cover(nodes, parts)
        key = random.key(self.seed, EPOCH, int(self.epochs))
        self.epochs += 1
        yield from self._seeds(nodes, parts, key, shuffle)

    def batches(self, nodes: Tensor, batch_size: int) -> int:
        n = nodes.unique().numel()
        return -(-n // (self.roots or max(batch_size, -(-n // 20)))) if n else 0

    def draw(self, seeds: Tensor) -> list[Block]:
        if not self.subgraphs:
            everyone = torch.arange(self.graph.num_nodes, device=seeds.device)
            self.cover(everyone, self.batches(everyone, max(seeds.numel(), 1)))
        block = self.induced(self.visit(seeds, self.key(0)))
        visits = self.node_count[block.n_id].clamp(min=1)[block.dst].float()
        scale = visits / self.edge_count[block.pos].clamp(min=1)
        scale = torch.where(block.is_self(), 1.0, scale)
        return [block._replace(prob=1.0 / scale.clamp(min=1.0), scale=scale)] * len(self.sizes)

    def loss_weight(self, blocks: Sequence[Block]) -> Tensor:
        """1 / (nodes * chance that the node is in a subgraph), 0 for nodes that do not count."""
        n_id = blocks[-1].n_id
        chance = self.node_count[n_id].clamp(min=1).float() / max(self.subgraphs, 1)
        return self.counted[n_id].float() / (chance * self.counted.sum().clamp(min=1))

    def visit(self, seeds: Tensor, key: int) -> Tensor:
        """The seeds and then the nodes on their walks."""
        if self.walk != "rw":
            return seeds
        pos = steps(self.graph, seeds, self.length, key)
        return ops.relabel(seeds, self.graph.indices[pos].long(), self._scratch)[0]

    def cover(self, nodes: Tensor, parts: int) -> None:
        """Count nodes and edges over `coverage` epochs, drawn as the real ones will be."""
        self.node_count.zero_()
        self.edge_count.zero_()
        self.subgraphs = self.coverage * parts
        for i in range(self.coverage):
            for j, seeds in enumerate(self._seeds(nodes, parts, random.key(self.seed, COVER, i))):
                block = self.induced(self.visit(seeds, random.key(self.seed, COVER, i, j)))
                self.node_count[block.n_id] += 1
                self.edge_count[block.pos] += 1

    def _seeds(self, nodes: Tensor, parts: int, key: int, shuffle: bool = True) -> Iterator[Tensor]:
        if self.walk == "rw":
            nodes = random.shuffled(nodes, key) if shuffle else nodes
            yield from nodes.tensor_split(parts) if parts else ()
            return
        draws = torch.arange(-(-nodes.numel() // max(parts, 1)), device=nodes.device)
        for i in range(parts):
            u = random.unit(random.key(key, i), draws, 0)
            place = torch.searchsorted(self.odds, u * self.odds[-1], right=True).clamp(max=self.odds.numel() - 1)
            if self.walk == "edge":
                dst = torch.searchsorted(self.graph.indptr, place, right=True) - 1
                place = torch.cat([self.graph.indices[place].long(), dst])
            yield place.unique()


def steps(graph: Graph, seeds: Tensor, length: int, key: int) -> Tensor:
    """The edges that walks from the seeds go along, as places in the CSR; a dead end stays where it is."""
    at, place, taken = seeds, torch.arange(seeds.numel(), device=seeds.device), [seeds[:0]]
    for i in range(length):
        degree = graph.indptr[at + 1] - graph.first[at]
        moves = degree > 0
        pos = (graph.first[at] + random.below(key, place, i, degree))[moves]
        taken.append(pos)
        at = at.masked_scatter(moves, graph.indices[pos].long())
    return torch.cat(taken)


def odds_of(graph: Graph, walk: str) -> Tensor:
    """How likely each node or edge is, up to a factor."""
    src, dst = graph.indices.long(), graph.dst()
    if walk == "node":
        odds = segment_sum(graph.edge_weight().double().square(), src, graph.num_nodes)
        return odds if bool((odds > 0).any()) else torch.ones_like(odds)
    share = 1.0 / graph.degree().clamp(min=1).double()
    return (share[src] + share[dst]).masked_fill(src == dst, 0.0)
