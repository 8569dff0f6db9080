"""GCNConv's normalisation by the degrees of the whole graph, where a batch knows only its own edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv

from adahop.graph import Graph
from adahop.pyg.align import align


def gcn_degree(graph: Graph) -> Tensor:
    """[N] sum of a node's in-weights and of its self-loop, 1 where it has none: d of GCN's (d_i d_j)^(-1/2)."""
    if graph.weight is None:
        return (graph.indptr[1:] - graph.first).float() + 1.0
    dst = graph.dst()
    loop = graph.indices.long() == dst
    total = torch.zeros(graph.num_nodes, device=graph.device).index_add_(0, dst[~loop], graph.weight[~loop])
    return total + torch.ones_like(total).index_copy_(0, dst[loop], graph.weight[loop])


class Norm:
    """The hook of one GCNConv: while a loader listens, an edge weighs scale a_ij (d_i d_j)^(-1/2) with d of the graph.

    The layer by itself takes d from the batch: 1 for a node at the rim, whose neighbours were not drawn, and a guess
    elsewhere, so that training and the whole graph see different sizes of h. With d of the graph the sum is unbiased.
    """

    energy: Tensor | None = None  # of the last messages, without the target's share: what one parent sees serves all
    share: Tensor | None = None
    listens = True
    given: tuple[Tensor, Tensor] | None = None

    def __init__(self, conv: GCNConv):
        self.batch: Any = None
        conv.register_propagate_forward_pre_hook(self.edges)
        conv.register_message_forward_hook(self.message)

    def edges(self, conv: GCNConv, inputs: tuple) -> tuple | None:
        batch = self.batch
        if batch is None or not conv.training or "gcn_degree" not in batch:
            return None
        used, size, kwargs = inputs
        i, j = align(batch.edge_index, used, "GCNConv")
        own = batch.edge_index[0] == batch.edge_index[1]
        loop = batch.scale.new_ones(batch.num_nodes)
        loop[batch.edge_index[0, own]] = batch.edge_weight[own].to(loop.dtype)
        weight = loop[used[1]].index_copy(0, j, batch.edge_weight[i].to(loop.dtype))
        root = batch.gcn_degree.rsqrt().masked_fill(batch.gcn_degree <= 0, 0.0)
        weight = (weight * root[used[0]] * root[used[1]]).to(kwargs["edge_weight"].dtype)
        self.share = root[used[1]] if self.listens else None
        return used, size, {**kwargs, "edge_weight": weight}

    def message(self, conv: GCNConv, inputs: tuple, out: Tensor) -> None:
        if self.share is not None:
            self.energy = out.detach().float().square().sum(1) / self.share.square().clamp(min=1e-30)
            self.share = None

    def lined_up(self, used: Tensor, layer: str) -> None:
        return None


def normalises(conv: Any) -> bool:
    """Whether a layer takes degrees from the edges it is given, in the way that `Norm` can mend."""
    return type(conv) is GCNConv and conv.normalize and conv.add_self_loops and not (conv.improved or conv.cached)
