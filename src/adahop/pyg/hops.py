"""Hops: one merged subgraph around the seeds, each node expanded once, as PyG's models want it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.utils import filter_data, filter_hetero_data
from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput

from adahop.block import Block, Seeds, expand
from adahop.ops import in_order, induced
from adahop.samplers import NeighborSampler
from adahop.samplers.loop import Merged, sample
from adahop.typed import TypedBatch, Types

AnyData = TypeVar("AnyData", Data, HeteroData)


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
    typed: TypedBatch | None = None  # of typed data, the same by type and relation

    def plain(self) -> tuple:
        """Tuples and tensors alone, for a checkpoint; what follows from them is left out."""
        blocks: Any = None if self.blocks is None else [tuple(b) for b in self.blocks]
        return (*self[:-2], blocks)

    def by_type(self, types: Types | None) -> Hops:
        """With `typed`, where there are types."""
        if types is None:
            return self
        assert self.blocks is not None and self.num_edges is not None and self.num_nodes is not None
        edges = list(self.edge_index.split(self.num_edges, 1))
        return self._replace(typed=types.batch(self.blocks, (self.n_id, edges, self.num_nodes)))

    def output(self, input_id: Tensor | None, time: Tensor | None = None) -> SamplerOutput | HeteroSamplerOutput:
        """The same as PyG's samplers give it."""
        if self.typed is not None:
            b, tree = self.typed, self.tree
            return HeteroSamplerOutput(
                node=dict(b.n_id), row={r: e[0] for r, e in b.edge_index.items()},
                col={r: e[1] for r, e in b.edge_index.items()}, edge=dict(b.e_id),
                batch=None if tree is None else {t: tree[at] for t, at in b.node.items()},
                num_sampled_nodes=b.num_nodes, num_sampled_edges=b.num_edges, metadata=(input_id, time),
            )  # fmt: skip
        row, col = self.edge_index
        return SamplerOutput(
            node=self.n_id, row=row, col=col, edge=self.e_id, batch=self.tree, num_sampled_nodes=self.num_nodes,
            num_sampled_edges=self.num_edges, metadata=(input_id, time),
        )  # fmt: skip

    @classmethod
    def of(cls, parts: Any) -> Hops:
        *rest, blocks = parts
        return cls._make([*rest, None if blocks is None else [Block(*b) for b in blocks], None])


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
    return hops.by_type(sampler.graph.types) if subgraph == "directional" else _closed(hops, sampler, subgraph)


def _closed(hops: Hops, sampler: NeighborSampler, subgraph: str) -> Hops:
    """The same nodes with edges both ways, or with all edges among them; no sum is estimated, so every scale is 1."""
    g = sampler.graph
    if subgraph == "induced":
        ptr, pos, src = induced(g.edges, hops.n_id, hops.n_id, sampler._scratch)
        edge_index = torch.stack([src, expand(ptr, pos.numel())])
        e_id = g.edges.numbers(hops.n_id[edge_index[1]], pos)
    else:
        both = torch.cat([hops.edge_index, hops.edge_index.flip(0)], 1)
        first = in_order(both[1] * hops.n_id.numel() + both[0])[1]  # the drawn way comes first
        edge_index, e_id = both[:, first], hops.e_id.repeat(2)[first]
    ones = torch.ones(e_id.numel(), device=e_id.device)
    return hops._replace(
        edge_index=edge_index, e_id=e_id, scale=ones, num_nodes=None, num_edges=None, blocks=None
    )  # fmt: skip


def cut(data: Data | HeteroData, out: Any, input_type: str | None = None) -> Data | HeteroData:
    """The attributes of what was drawn, as PyG's loaders give them; `out` is a sampler's output for the data."""
    if isinstance(data, HeteroData):
        return _cut_typed(data, out, str(input_type))
    batch = filter_data(data, out.node, out.row, out.col, out.edge)
    for name, ids in (("n_id", out.node), ("e_id", out.edge)):
        if name not in batch:  # as in PyG, the data's own ids stay
            batch[name] = ids
    batch.input_id, batch.batch_size = out.metadata[0], out.metadata[0].numel()
    batch.num_nodes = out.node.numel()
    batch.num_sampled_nodes, batch.num_sampled_edges = out.num_sampled_nodes, out.num_sampled_edges
    if out.batch is not None:
        batch.batch = out.batch
    return batch


def _cut_typed(data: HeteroData, out: HeteroSamplerOutput, input_type: str) -> HeteroData:
    batch = filter_hetero_data(data, out.node, out.row, out.col, out.edge)
    for name, each in (("n_id", out.node), ("e_id", out.edge)):
        for key, ids in each.items():
            if name not in batch[key]:
                batch[key][name] = ids
    batch.set_value_dict("num_sampled_nodes", out.num_sampled_nodes)
    batch.set_value_dict("num_sampled_edges", out.num_sampled_edges)
    if out.batch is not None:
        batch.set_value_dict("batch", out.batch)
    batch[input_type].input_id, batch[input_type].batch_size = out.metadata[0], out.metadata[0].numel()
    return batch


def add_scale(batch: AnyData, hops: Hops) -> AnyData:
    """Add the scale, to every relation of typed data, and the blocks to learn from. Where the data has no edge weight
    and no types, the scale is the edge weight too.
    """
    if isinstance(batch, HeteroData):
        assert hops.typed is not None and hops.blocks is not None
        for relation, scale in hops.typed.by_relation([b.scale for b in hops.blocks]).items():
            batch[relation].scale = scale.to(batch[relation].edge_index.device)
    else:
        batch.scale = hops.scale.to(batch.edge_index.device)
        if "edge_weight" not in batch:
            batch.edge_weight = batch.scale
    if hops.blocks is not None:
        batch.blocks = hops.blocks
    return batch
