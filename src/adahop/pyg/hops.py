"""Hops: one merged subgraph around the seeds, each node expanded once, as PyG's models want it."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import SamplerOutput

from adahop.block import Block, expand
from adahop.graph import Graph
from adahop.ops import induced, segment_sum
from adahop.samplers import NeighborSampler


class Hops(NamedTuple):
    """A drawn subgraph in local ids, seeds first; nodes and edges in the order of the hops that found them."""

    n_id: Tensor  # [S] global node ids
    edge_index: Tensor  # [2, M] local ids
    e_id: Tensor  # [M] the edge in the user's own order
    scale: Tensor  # [M] the factor that makes each target's sum unbiased
    tree: Tensor | None  # [S] the seed a node belongs to, where the subgraphs are disjoint
    num_nodes: list[int] | None  # found in each hop, the seeds first; None where edges have no hop
    num_edges: list[int] | None
    blocks: list[Block] | None  # one a hop, input layer first: the last hop's edges are the first block

    def plain(self) -> tuple:
        """Tuples and tensors alone, for a checkpoint."""
        blocks: Any = None if self.blocks is None else [tuple(b) for b in self.blocks]
        return (*self[:-1], blocks)

    def output(self, input_id: Tensor | None, time: Tensor | None = None) -> SamplerOutput:
        """The same as PyG's samplers give it."""
        row, col = self.edge_index
        return SamplerOutput(
            node=self.n_id, row=row, col=col, edge=self.e_id, batch=self.tree, num_sampled_nodes=self.num_nodes,
            num_sampled_edges=self.num_edges, metadata=(input_id, time),
        )  # fmt: skip

    @classmethod
    def of(cls, parts: Any) -> Hops:
        *rest, blocks = parts
        return cls._make([*rest, None if blocks is None else [Block(*b) for b in blocks]])


class _Names:
    """Local ids of the nodes seen so far, one for each node of the graph."""

    def __init__(self, seeds: Tensor, num_nodes: int, place: Tensor | None):
        self.n_id, self.tree, self.none = seeds, None, num_nodes  # type: Tensor, Tensor | None, int
        fits = place is not None and place.device == seeds.device
        self.place = place if place is not None and fits else unplaced(num_nodes, seeds.device)
        self.place.scatter_reduce_(0, seeds, torch.arange(seeds.numel(), device=seeds.device), "amin")

    def close(self) -> None:
        self.place[self.n_id] = self.none

    def join(self, block: Block, start: int) -> Tensor:
        """The local source of each edge; nodes not seen before are added at the end."""
        found = block.n_id[block.num_dst :]
        local = self.place[found]
        fresh = found[local == self.none]
        new = self.n_id.numel() + torch.arange(fresh.numel(), device=fresh.device)
        self.place[fresh] = new
        local[local == self.none] = new
        self.n_id = torch.cat([self.n_id, fresh])
        own = start + torch.arange(block.num_dst, device=local.device)
        return torch.cat([own, local])[block.src]


class _Trees:
    """Local ids where every seed has a subgraph of its own: a node is known by its seed and its id."""

    def __init__(self, seeds: Tensor, num_nodes: int, place: Tensor | None):
        self.n, self.n_id = num_nodes, seeds
        self.tree: Tensor = torch.arange(seeds.numel(), device=seeds.device)

    def join(self, block: Block, start: int) -> Tensor:
        old = self.tree * self.n + self.n_id
        key = torch.cat([old, self.tree[start + block.dst] * self.n + block.n_id[block.src]])
        local, first = in_order(key)
        names = key[first]
        self.n_id, self.tree = names % max(self.n, 1), names // max(self.n, 1)
        return local[old.numel() :]

    def close(self) -> None:
        pass


def unplaced(num_nodes: int, device: Any = "cpu") -> Tensor:
    """Scratch for `draw_hops`: the local id of every node, `num_nodes` where it has none."""
    return torch.full((num_nodes,), num_nodes, device=device)


def in_order(key: Tensor) -> tuple[Tensor, Tensor]:
    """(number of each key, place where each number first stood), numbered as they first appear."""
    unique, which = key.unique(return_inverse=True)
    first = torch.full_like(unique, key.numel())
    first.scatter_reduce_(0, which, torch.arange(key.numel(), device=key.device), "amin")
    order = first.argsort()
    return order.argsort()[which], first[order]


class Subgraphs:
    """Draws merged subgraphs of one kind; its scratch is one per sampler, so that twins can draw in threads."""

    def __init__(self, disjoint: bool, kind: str):
        self.disjoint, self.kind = disjoint, kind
        self._places: weakref.WeakKeyDictionary[NeighborSampler, Tensor] = weakref.WeakKeyDictionary()

    def draw(self, sampler: NeighborSampler, seeds: Tensor) -> Hops:
        place = self._places.get(sampler)
        if place is None:
            place = self._places[sampler] = unplaced(sampler.graph.num_nodes)
        return draw_hops(sampler, seeds, self.disjoint, self.kind, place)


@torch.no_grad()
def draw_hops(
    sampler: NeighborSampler,
    seeds: Tensor,
    disjoint: bool = False,
    subgraph: str = "directional",
    place: Tensor | None = None,
) -> Hops:
    """Neighbours of the seeds, then of the nodes that were new, and so on: a node draws once, where it first appears.

    Hop h draws with the policy's state of layer L - 1 - h, the layer of a model that needs it last. With a budget, a
    hop's total is spread over the nodes that were new by what an error in each counts for in the sums before it.
    """
    g, layers = sampler.graph, len(sampler.sizes)
    seeds = seeds.to(g.device)
    names: _Names | _Trees = (_Trees if disjoint else _Names)(seeds, g.num_nodes, place)
    start, blocks, edges, counts = 0, [], [], [seeds.numel()]
    weighs = torch.ones(seeds.numel(), device=g.device) if sampler.budget else None
    for layer in reversed(range(layers)):
        new = names.n_id[start:]
        block = _hop(sampler, layer, new, weighs)
        src = names.join(block, start)
        edges.append(torch.stack([src, block.dst + start]))
        blocks.append(block)
        start += new.numel()
        counts.append(names.n_id.numel() - start)
        if weighs is not None:
            square = (block.weight * block.scale * weighs[block.dst]).square()
            weighs = segment_sum(square, src, names.n_id.numel())[start:].sqrt()
    names.close()
    sampler.step += 1
    hops = Hops(
        names.n_id, torch.cat(edges, 1), torch.cat([b.e_id for b in blocks]), torch.cat([b.scale for b in blocks]),
        names.tree, counts, [b.num_edges for b in blocks], blocks[::-1],
    )  # fmt: skip
    return hops if subgraph == "directional" else _closed(hops, sampler, subgraph)


def _hop(sampler: NeighborSampler, layer: int, dst: Tensor, weighs: Tensor | None) -> Block:
    """What the new nodes of a hop draw; nothing where its fan-out is 0."""
    if layer in sampler.skip:
        return sampler.nothing(dst)
    k = sampler.many(layer, dst, weighs)
    return sampler.block(dst, sampler.policy.draw(layer, dst, k, sampler.how, sampler.key(layer)))


def _closed(hops: Hops, sampler: NeighborSampler, subgraph: str) -> Hops:
    """The same nodes with edges both ways, or with all edges among them; no sum is estimated, so every scale is 1."""
    g = sampler.graph
    if subgraph == "induced":
        ptr, pos, src = induced(g.edges, hops.n_id, hops.n_id, sampler._scratch)
        edge_index = torch.stack([src, expand(ptr, pos.numel())])
        e_id = pos if g.eid is None else g.eid[pos].long()
    else:
        both = torch.cat([hops.edge_index, hops.edge_index.flip(0)], 1)
        first = in_order(both[1] * hops.n_id.numel() + both[0])[1]  # the drawn way comes first
        edge_index, e_id = both[:, first], hops.e_id.repeat(2)[first]
    ones = torch.ones(e_id.numel(), device=e_id.device)
    return hops._replace(
        edge_index=edge_index, e_id=e_id, scale=ones, num_nodes=None, num_edges=None, blocks=None
    )  # fmt: skip


def weigh(batch: Data, hops: Hops, graph: Graph, degree: Tensor) -> Data:
    """Add the scale, the weight with the scale in it, the blocks to learn from and the degrees in the whole graph."""
    device = batch.edge_index.device
    batch.scale = hops.scale.to(device)
    own = batch.edge_weight if "edge_weight" in batch else None
    batch.edge_weight = batch.scale if own is None else own * batch.scale.to(own.dtype).view(-1, *[1] * (own.dim() - 1))
    if hops.blocks is not None:
        batch.blocks = hops.blocks
        batch.gcn_degree = degree[hops.n_id.to(degree.device)].to(device)
        if own is None:  # with weights, a mean is over their sum, which the batch does not know
            batch.full_degree = (graph.indptr[hops.n_id + 1] - graph.indptr[hops.n_id]).to(device)
    return batch
