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

# the output of these for a row depends on all rows of a batch
OVER_NODES = (_BatchNorm, pyg.BatchNorm, pyg.InstanceNorm, pyg.GraphNorm, pyg.GraphSizeNorm, pyg.PairNorm,
              pyg.MeanSubtractionNorm, pyg.DiffGroupNorm)  # fmt: skip


class PaddedShape(NamedTuple):
    """How many nodes and edges a padded batch has: at least as many as any batch needs, and two nodes more."""

    nodes: int
    edges: int


def is_padded(padded: object, sampler: NeighborSampler, subgraph: str, estimator: str, batch_sampler: object) -> bool:
    """Whether batches are padded; refused where batches have no largest size, or added nodes would change results."""
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


def padded_shape(sampler: NeighborSampler, batch_size: int, disjoint: bool, repeats: bool) -> PaddedShape:
    """What batches need at most, found from fan-outs and degrees; `repeats`: a seed may come more than once."""
    graph = sampler.graph
    loops, true = graph.first - graph.indptr[:-1], graph.last - graph.first
    new, nodes, edges = batch_size, batch_size, 0
    for layer in reversed(range(len(sampler.sizes))):
        if layer in sampler.skip:
            break
        k = sampler.sizes[layer]
        drawn = true if k < 0 else true.clamp(max=k)
        repeated = disjoint or (repeats and edges == 0)
        edges, new = edges + _largest_sum(drawn + loops, new, repeated), _largest_sum(drawn, new, repeated)
        new = new if disjoint else min(new, graph.num_nodes)
        nodes += new
    return PaddedShape((nodes if disjoint else min(nodes, graph.num_nodes + batch_size)) + 2, edges)


def _largest_sum(each: Tensor, many: int, repeated: bool) -> int:
    """The largest sum over so many nodes; `repeated`: a node may come more than once."""
    if repeated:
        return many * int(each.max()) if each.numel() else 0
    return int(each.topk(min(many, each.numel())).values.sum())


def pad(hops: Hops, shape: PaddedShape) -> Hops:
    """The same with nodes and edges added at the end. Added edges run between added nodes, with scale 0, so that no
    aggregation changes for the other nodes. An added node has the id of the first seed.
    """
    nodes, edges = shape.nodes - hops.n_id.numel(), shape.edges - hops.e_id.numel()
    if nodes < 2 or edges < 0:
        raise InputError(
            f"a padded batch must need at most {shape.nodes - 2} nodes and {shape.edges} edges, got "
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


def add_masks(batch: Data, hops: Hops) -> Data:
    """Add `node_mask` and `edge_mask`, which are False where nodes and edges were added."""
    device = batch.edge_index.device
    for name, ids, drawn in (("node_mask", hops.n_id, hops.num_nodes), ("edge_mask", hops.e_id, hops.num_edges)):
        assert drawn is not None
        batch[name] = torch.arange(ids.numel(), device=device) < sum(drawn)
    return batch


def check_no_batch_norm(model: nn.Module) -> None:
    """Refuse a model in which nodes of a batch change each other outside of its edges."""
    for name, part in model.named_modules():
        if isinstance(part, OVER_NODES) or (isinstance(part, pyg.LayerNorm) and part.mode == "graph"):
            raise InputError(
                "`model` must treat nodes one by one apart from its edges where batches are `padded`, got "
                f"{type(part).__name__} as '{name}', which takes added nodes into account"
            )
