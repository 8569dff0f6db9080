"""How often a batch reads each node, by the sampler's odds: which rows a cache on the device should hold."""

from __future__ import annotations

import torch
from torch import Tensor

from adahop import ops
from adahop.graph import Graph
from adahop.ops import Odds, Rows
from adahop.samplers.neighbor import NeighborSampler

PIECE = 1 << 22  # edges looked at once


@torch.no_grad()
def expected_reads(sampler: NeighborSampler, nodes: Tensor, batch_size: int) -> Tensor:
    """[N] the approximate probability that a batch of `batch_size` of these nodes contains each node of the graph.

    Hop by hop, c_j = sum over j's targets of c_i min(1, k q_ij), q the present odds and c = batch_size / len(nodes) at
    the seeds; a node that is expected c times in all hops is there with 1 - e^-c. Where a budget is spread, k is 1.
    """
    graph = sampler.graph
    some = torch.zeros(graph.num_nodes, device=graph.device)
    some.index_add_(
        0, nodes.to(graph.device), torch.full_like(nodes, batch_size / max(nodes.numel(), 1), dtype=some.dtype)
    )
    total = some
    for layer in reversed(range(len(sampler.sizes))):
        if layer in sampler.skip:
            break
        some = _drawn_from(sampler, layer, some)
        total = total + some
    return -torch.expm1(-total)


def _drawn_from(sampler: NeighborSampler, layer: int, times: Tensor) -> Tensor:
    """[N] how often each node is drawn where each target occurs `times` often."""
    graph, odds, out = sampler.graph, sampler.policy.odds(layer), torch.zeros_like(times)
    types = graph.types
    target = None if types is None else ops.segment_of(types.ptr, graph.num_rows)
    for low, high in ops.ranges(graph.indptr, PIECE):
        at = torch.arange(low, high, device=graph.device)
        rows = Rows(
            at, target=None if target is None else target[at], relation=None if types is None else types.relation[at]
        )
        k = torch.ones_like(at) if sampler.budget else sampler.sized.of(layer, rows).expand(at.numel())
        often = times[at if rows.target is None else rows.target]
        first = graph.first[at]
        row, place = ops.spans(first, graph.last[at] - first)
        share = _share(graph, odds, at, row, place)
        taken = torch.where(k[row] < 0, torch.ones_like(share), (k[row] * share).clamp(max=1.0))
        out.index_add_(0, graph.indices[place].long(), taken * often[row])
    return out


def _share(graph: Graph, odds: Odds, at: Tensor, row: Tensor, place: Tensor) -> Tensor:
    """q of the edges at some places, which lie in the rows at[row]."""
    one = torch.ones(place.numel(), device=place.device)
    weight = one if odds.edge is None else odds.edge[place]
    if odds.node is not None:
        source = graph.indices[place].long()
        weight = weight * odds.node[source if odds.shift is None else source + odds.shift[at][row]]
    many, total = (ops.segment_sum(t, row, at.numel())[row] for t in (one, weight))
    return (1.0 - odds.eta) * weight / total.clamp(min=1e-30) + odds.eta / many
