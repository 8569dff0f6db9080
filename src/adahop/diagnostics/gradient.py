"""The gradient's variance: what the noise of all layers does to a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adahop.block import Block
from adahop.checks import count, node_ids
from adahop.diagnostics.frozen import frozen, run, twin
from adahop.metrics import criterion
from adahop.models import GNN
from adahop.samplers import NeighborSampler, Sampler
from adahop.seams import LabelledData


def gradient_variance(
    model: GNN, sampler: Sampler, data: LabelledData, nodes: Any, repeats: int = 20, seed: int = 0
) -> float:
    """E|g' - g|^2 / |g|^2: g' of one fixed batch over repeated draws, g from all its neighbours; dropout is off."""
    graph = sampler.graph
    nodes = node_ids(nodes, graph.num_nodes, "nodes").to(graph.device).unique()
    y = data.y[nodes]
    with frozen(model, plain=True):
        everyone = NeighborSampler(graph, [-1] * len(model.convs))
        exact = _gradient(model, data.x, everyone.sample(nodes), y)
    draws, total = twin(sampler, seed), 0.0
    with frozen(model):
        for _ in range(count(repeats, 1, "repeats")):
            total += float((_gradient(model, data.x, draws.sample(nodes), y) - exact).square().sum())
    return total / repeats / max(float(exact.square().sum()), 1e-30)


def _gradient(model: GNN, x: Tensor, blocks: list[Block], y: Tensor) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        loss = criterion(run(model, x, blocks)[: len(y)], y)
        parts = torch.autograd.grad(loss, parameters, allow_unused=True)
    dense = [torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(parts, parameters, strict=True)]
    return torch.cat([g.flatten() for g in dense]).double()
