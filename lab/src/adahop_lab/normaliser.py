"""The normaliser of sampled attention: how far the sampled sum of weights is from that over all neighbours."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from adahop.block import Block
from adahop.checks import InputError, count, node_ids
from adahop.diagnostics.frozen import frozen, listening, twin
from adahop.features import Values
from adahop.graph import Graph
from adahop.messages import Ends, Messages
from adahop.models import GAT, GATConv
from adahop.ops import segment_max, segment_sum
from adahop.samplers import Sampler
from adahop.watcher import listen


@torch.no_grad()
def normaliser_error(model: GAT, sampler: Sampler, x: Tensor, nodes: Any, repeats: int = 20, seed: int = 0):
    """For every layer of a GAT sqrt(E(D' / D - 1)^2), mean over nodes and heads.

    D sums e^score over all neighbours, D' is what the layer divides its sample by (softmax over the sample alone: the
    sample's sum). Layers are measured on the exact h below, so that all that is left is this layer's own draw and its
    memory's age; 0 where a layer is exact.

    >>> import adahop
    >>> result = adahop.fit(adahop.load("digits"), model="gat", method="bs", sizes=(2, 2), epochs=1, hidden=8)
    >>> errors = normaliser_error(result.model, result.sampler, adahop.load("digits").x, range(32), repeats=2)
    >>> [0 < e < 2 for e in errors]
    [True, True]
    """
    if not isinstance(model, GAT):
        raise InputError(f"`model` must be a GAT, got {type(model).__name__}")
    count(repeats, 1, "repeats")
    graph = sampler.graph
    nodes = node_ids(nodes, graph.num_nodes, "nodes").to(graph.device).unique()
    inputs = _inputs(model, graph, x)
    draws, errors = twin(sampler, seed), torch.zeros(len(model.convs), dtype=torch.double)
    with frozen(model):
        for _ in range(repeats):
            for layer, block in enumerate(draws.sample(nodes)):
                memory = model.memory(layer)
                if memory is None or memory.draws:
                    errors[layer] += _square(model, layer, inputs[layer], block, graph)
    return (errors / repeats).sqrt().tolist()


def _inputs(model: GAT, graph: Graph, x: Tensor) -> list[Tensor]:
    """The exact input of every layer, for all nodes."""
    given: dict[int, Tensor] = {}
    with frozen(model, plain=True), listening(model, lambda layer, m: given.update({layer: m.values.rows()})):
        model.inference(graph, x)
    return [given[layer] for layer in range(len(model.convs))]


def _square(model: GAT, layer: int, h: Tensor, block: Block, graph: Graph) -> float:
    """Mean (D' / D - 1)^2 of one draw, read from the strongest edge of every target."""
    conv = cast(GATConv, model.convs[layer])
    memory, n = model.memory(layer), block.num_dst
    said: list[Messages] = []
    own = h[block.n_id[:n]]
    with listen(conv, said.append):
        model.sums(layer)(conv, model.set_recompute(layer, Values(h[block.n_id])), own, block)
    coef = said[0].coef
    u, v = conv.directions()
    s, t = own @ u.t(), h @ v.t()
    edges = graph.in_edges(block.n_id[:n])
    every = conv.scored(Ends(s, t), edges)
    top = segment_max(every, edges.dst, n)
    true = segment_sum((every - top[edges.dst]).exp(), edges.dst, n).log() + top
    score = conv.scored(Ends(s, t[block.n_id]), block)
    scale = torch.zeros_like(block.scale) if memory is None and conv.form == "softmax" else block.scale.log()
    made = torch.where(coef > 0, score + scale.unsqueeze(1) - coef.log(), -torch.inf)
    made = segment_max(made, block.dst, n)
    seen = made.isfinite() & true.isfinite()
    return float(((made - true)[seen].exp() - 1).square().mean()) if seen.any() else 0.0
