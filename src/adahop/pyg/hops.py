"""Hops: one merged subgraph around the seeds, each node expanded once, as PyG's models want it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import SamplerOutput

from adahop.block import Block, Seeds, expand
from adahop.ops import in_order, induced
from adahop.samplers import NeighborSampler
from adahop.samplers.loop import Merged, sample


class Hops(NamedTuple):
    """A drawn subgraph in local ids, seeds first; nodes and edges in the order of the hops that found them."""

    n_id: Tensor  # [S] global node ids
    edge_index: Tensor  # [2, M] local ids
    e_id: Tensor  # [M] the edge in the user's own order
    scale: Tensor  # [M] the factor that makes each target's sum unbiased
    tree: Tensor | None  # [S] the seed a node belongs to, where the subgraphs are disjoint
    num_nodes: list[int] | None  # found in each hop, the seeds first; None where edges have no hop
    num_edges: list[int] | None
    blocks: list[Block] | None  # one per hop, input layer first: the last hop's edges are the first block

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


@torch.no_grad()
def draw_hops(sampler: NeighborSampler, seeds: Tensor, disjoint: bool = False, subgraph: str = "directional") -> Hops:
    """Neighbours of the seeds, then of the nodes that were new, and so on: a node draws once, where it first appears.

    Hop h draws with the policy's state of layer L - 1 - h, the layer of a model that needs it last. With a budget, a
    hop's total is spread over the nodes that were new by what an error in each counts for in the sums before it.
    """
    merged = Merged(disjoint)
    blocks = sample(sampler, Seeds(seeds.to(sampler.graph.device)), merged)
    sampler.step += 1
    drawn = blocks[::-1]
    edge_index, many = torch.cat(merged.edges, 1), [b.num_edges for b in drawn]
    e_id, scale = torch.cat([b.e_id for b in drawn]), torch.cat([b.scale for b in drawn])
    hops = Hops(merged.n_id, edge_index, e_id, scale, merged.tree, merged.counts, many, blocks)
    return hops if subgraph == "directional" else _closed(hops, sampler, subgraph)


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


def weigh(batch: Data, hops: Hops) -> Data:
    """Add the scale and the blocks to learn from; the scale is the edge weight too, where the data has none."""
    batch.scale = hops.scale.to(batch.edge_index.device)
    if "edge_weight" not in batch:
        batch.edge_weight = batch.scale
    if hops.blocks is not None:
        batch.blocks = hops.blocks
    return batch
