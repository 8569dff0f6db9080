"""An epoch on a GPU: the captured step, the same step by step, and PyG's model with a loader of ours or full-batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from adahop.capture import products, steps
from adahop.config import Config
from adahop.datasets.base import Dataset
from adahop.loader import Loader
from adahop.methods import make
from adahop.run import Run
from adahop_lab.bench.clock import Runner


def ours(name: str, data: Dataset, config: Config, captured: bool) -> Runner:
    """One epoch of our loop, as `fit` runs it on the device; the first two turns warm it up."""
    run = Run(data, config, 0)
    step = steps(run)

    def work(nodes: Tensor) -> int:
        with products(config.tf32):
            for _ in step:
                pass
        step.finish()
        return nodes.numel() * (1 + sum(config.sizes))

    for _ in range(2):
        work(run.loader.nodes)
    return Runner(name if captured else f"{name} (eager)", work)


def pyg(data: Dataset, hidden: int, sizes: tuple[int, ...], batch_size: int, device: str) -> list[Runner]:
    """PyG's GraphSAGE on the device: batches that our uniform sampler draws on the CPU, and the whole graph at once."""
    from torch_geometric.nn import GraphSAGE

    def training() -> tuple[Any, Any]:
        model = GraphSAGE(data.x.shape[1], hidden, num_layers=len(sizes), out_channels=data.classes).to(device)
        return model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

    host = SimpleNamespace(x=data.x.cpu(), y=data.y.cpu())
    loader = Loader(host, make("graphsage", data.graph.to("cpu"), sizes), data.train_mask.cpu(), batch_size, prefetch=4)
    (model, optimizer), (wide, all_at_once) = training(), training()

    def step(out: Tensor, y: Tensor, by: Any) -> None:
        loss = binary_cross_entropy_with_logits if y.is_floating_point() else cross_entropy
        loss(out, y).backward()
        by.step()
        by.zero_grad()

    def sampled(nodes: Tensor) -> int:
        edges = 0
        for batch in loader:
            here = batch.to(device)
            step(model(here.x, here.edge_index)[: batch.batch_size], here.y, optimizer)
            edges += batch.edge_index.shape[1]
        return edges

    there = data.to(device)
    g = there.graph
    one = torch.ones(g.num_edges, device=device)
    adjacency = torch.sparse_csr_tensor(g.indptr, g.indices.long(), one, (g.num_nodes, g.num_nodes))

    def whole(nodes: Tensor) -> int:
        step(wide(there.x, adjacency)[there.train_mask], there.y[there.train_mask], all_at_once)
        return g.num_edges * len(sizes)

    return [Runner("pyg, our loader on the CPU", sampled, peer=True), Runner("pyg, full batch", whole, peer=True)]
