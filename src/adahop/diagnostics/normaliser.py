"""The normaliser of sampled attention: how far the sum that the shares are divided by is from that over everyone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from adahop.checks import InputError, count, node_ids
from adahop.diagnostics.frozen import frozen, twin
from adahop.memory.attended import Everyone
from adahop.models import GAT
from adahop.ops import segment_max, segment_sum
from adahop.samplers import Sampler


@torch.no_grad()
def normaliser_error(model: Any, sampler: Sampler, x: Tensor, nodes: Any, repeats: int = 20, seed: int = 0):
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


def _inputs(model: GAT, graph: Any, x: Tensor) -> list[Tensor]:
    """What every layer is given, of everyone and exact."""
    given: dict[int, Tensor] = {}
    hooks = [
        conv.register_forward_pre_hook(lambda conv, args, layer=layer: given.update({layer: args[0]}))
        for layer, conv in enumerate(model.convs)
    ]
    try:
        with frozen(model, plain=True):
            model.inference(graph, x)
    finally:
        for hook in hooks:
            hook.remove()
    return [given[layer] for layer in range(len(model.convs))]


@contextlib.contextmanager
def _shares(conv: Any) -> Iterator[list[Tensor]]:
    """What a layer says of its sample while the context is open: the coefficients, scale included."""
    said: list[Tensor] = []
    was = conv.watcher, conv.feedback
    conv.watcher, conv.feedback = said.append, "scores"
    conv.tell = lambda energy, coef, scores: said.append(coef)
    try:
        yield said
    finally:
        del conv.tell
        conv.watcher, conv.feedback = was


def _square(model: GAT, layer: int, h: Tensor, block: Any, graph: Any) -> float:
    """Mean (D' / D - 1)^2 of one draw, read from the strongest edge of every target."""
    conv: Any = model.convs[layer]
    memory, n = model.memory(layer), block.num_dst
    mine, own = h[block.n_id], h[block.n_id[:n]]
    with _shares(conv) as said:
        if memory is None:
            conv(mine, own, block)
        else:
            memory.total(conv, mine, own, block, None)
    u, v = conv.directions()
    s, t = own @ u.t(), h @ v.t()
    edges = Everyone(graph, block.n_id[:n])
    every = leaky_relu(s[edges.row] + t[edges.src], conv.slope)
    top = segment_max(every, edges.row, n)
    true = segment_sum((every - top[edges.row]).exp(), edges.row, n).log() + top
    score = leaky_relu(s[block.dst] + t[block.n_id[block.src]], conv.slope)
    scale = torch.zeros_like(block.scale) if memory is None and conv.form == "softmax" else block.scale.log()
    made = torch.where(said[0] > 0, score + scale.unsqueeze(1) - said[0].log(), -torch.inf)
    made = segment_max(made, block.dst, n)
    seen = made.isfinite() & true.isfinite()
    return float(((made - true)[seen].exp() - 1).square().mean()) if seen.any() else 0.0
