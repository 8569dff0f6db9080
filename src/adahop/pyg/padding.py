"""Padded batches: as many nodes and edges in every batch, for models that are compiled or captured for one shape."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric import nn as pyg
from torch_geometric.data import Data

from adahop.checks import InputError, flag
from adahop.pyg.hops import Hops
from adahop.samplers import NeighborSampler

# what a row of these becomes depends on all rows of a batch
OVER_NODES = (_BatchNorm, pyg.BatchNorm, pyg.InstanceNorm, pyg.GraphNorm, pyg.GraphSizeNorm, pyg.PairNorm,
              pyg.MeanSubtractionNorm, pyg.DiffGroupNorm)  # fmt: skip


class Room(NamedTuple):
    """How many nodes and edges a padded batch has: at least as many as any batch needs, and two nodes more."""

    nodes: int
    edges: int


def pads(padded: object, sampler: NeighborSampler, subgraph: str, estimator: str, batch_sampler: object) -> bool:
    """Whether batches are padded; what has no bound on its size, or does not bear nodes that are added, is refused."""
    if not flag(padded, "padded"):
        return False
    if sampler.graph.types is not None:
        raise InputError("`padded` must be False where the data is a HeteroData, got True")
    if subgraph != "directional":
        raise InputError(f"`padded` must be False for {subgraph} subgraphs, got True")
    if estimator == "history":
        raise InputError("`padded` must be False with estimator='history', which keeps a row per node, got True")
    if sampler.budget or sampler.how == "poisson" or sampler.policy.own_draw:
        raise InputError("`padded` must be False where chance decides how many edges a node draws, got True")
    if batch_sampler is not None:
        raise InputError("`padded` must be False where a `batch_sampler` decides how many seeds a batch has, got True")
    return True


def room_of(sampler: NeighborSampler, batch_size: int, disjoint: bool, twice: bool) -> Room:
    """The room that batches need at most, found from fan-outs and degrees; `twice`: a seed may come more than once."""
    graph = sampler.graph
    loops, true = graph.first - graph.indptr[:-1], graph.last - graph.first
    new, nodes, edges = batch_size, batch_size, 0
    for layer in reversed(range(len(sampler.sizes))):
        if layer in sampler.skip:
            break
        k = sampler.sizes[layer]
        drawn = true if k < 0 else true.clamp(max=k)
        again = disjoint or (twice and edges == 0)
        edges, new = edges + _most(drawn + loops, new, again), _most(drawn, new, again)
        new = new if disjoint else min(new, graph.num_nodes)
        nodes += new
    return Room((nodes if disjoint else min(nodes, graph.num_nodes + batch_size)) + 2, edges)


def _most(each: Tensor, many: int, again: bool) -> int:
    """The largest sum over so many nodes; `again`: a node may come more than once."""
    if again:
        return many * int(each.max()) if each.numel() else 0
    return int(each.topk(min(many, each.numel())).values.sum())


def pad(hops: Hops, room: Room) -> Hops:
    """The same with nodes and edges added at the end. Added edges run between added nodes, with scale 0, so that what
    any aggregation gives the others is what it was. An added node has the id of the first seed."""
    nodes, edges = room.nodes - hops.n_id.numel(), room.edges - hops.e_id.numel()
    if nodes < 2 or edges < 0:
        raise InputError(
            f"a padded batch must need at most {room.nodes - 2} nodes and {room.edges} edges, got "
            f"{hops.n_id.numel()} and {hops.e_id.numel()}: more seeds than `batch_size`?"
        )
    start = hops.n_id.numel()
    at = torch.arange(edges, device=hops.e_id.device)
    ends = torch.stack([start + at % (nodes - 1) + 1, start + at % (nodes - 1)])  # over many nodes, and no self-loops
    first = hops.n_id[:1] if start else hops.n_id.new_zeros(1)
    return hops._replace(
        n_id=torch.cat([hops.n_id, first.expand(nodes)]),
        edge_index=torch.cat([hops.edge_index, ends], 1),
        e_id=torch.cat([hops.e_id, torch.zeros_like(at)]),
        scale=torch.cat([hops.scale, hops.scale.new_zeros(edges)]),
        tree=None if hops.tree is None else torch.cat([hops.tree, hops.tree.new_zeros(nodes)]),
    )


def mask(batch: Data, hops: Hops) -> Data:
    """Say which nodes and edges are the batch's own: `node_mask` and `edge_mask`."""
    device = batch.edge_index.device
    for name, ids, own in (("node_mask", hops.n_id, hops.num_nodes), ("edge_mask", hops.e_id, hops.num_edges)):
        assert own is not None
        batch[name] = torch.arange(ids.numel(), device=device) < sum(own)
    return batch


def by_itself(model: nn.Module) -> None:
    """Refuse a model in which nodes of a batch change each other outside of its edges."""
    for name, part in model.named_modules():
        if isinstance(part, OVER_NODES) or (isinstance(part, pyg.LayerNorm) and part.mode == "graph"):
            raise InputError(
                "`model` must treat nodes one by one apart from its edges where batches are `padded`, got "
                f"{type(part).__name__} as '{name}', which takes added nodes into account"
            )
