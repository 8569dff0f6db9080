"""Small graphs and the few helpers that several test files share."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from adahop.cli import plugins
from adahop.graph import Graph

plugins()  # methods of a user's own, in $ADAHOP_PLUGINS, are tested like those of the list


def drop_stale_kernels() -> None:
    """Numba's cache does not notice a change in a file that a kernel's own file imports: drop what is older."""
    ops = Path(importlib.import_module("adahop.ops").__file__).parent
    newest = max(f.stat().st_mtime for f in ops.rglob("*.py"))
    for kept in ops.rglob("__pycache__/*.nb[ci]"):
        if kept.stat().st_mtime < newest:
            kept.unlink(missing_ok=True)


drop_stale_kernels()
torch.set_num_threads(1)  # kernels follow torch; tests that need more threads ask for them


def messy_edges(nodes: int = 60, edges: int = 900, seed: int = 0):
    """(edge_index, weight): unsorted, with parallel edges, self-loops, one hub, and the last five nodes isolated."""
    g = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(nodes - 5, (2, edges), generator=g)
    edge_index[1, : edges // 8] = 3
    edge_index[:, -4:] = torch.tensor([[7, 7, 11, 12], [7, 7, 2, 2]])
    edge_index[:, -6:-4] = torch.tensor([[11, 12], [2, 2]])
    weight = torch.rand(edges, generator=g) * 2 + 0.05
    return edge_index, weight


def messy_graph(nodes: int = 60, edges: int = 900, seed: int = 0) -> Graph:
    edge_index, weight = messy_edges(nodes, edges, seed)
    return Graph.from_edge_index(edge_index, weight, num_nodes=nodes)


def star(n: int, copies: int = 1) -> Graph:
    """`copies` hubs 0, 1, ... of n neighbours each, the same nodes copies .. copies + n for all."""
    hub = torch.arange(copies).repeat_interleave(n)
    return Graph.from_edge_index(torch.stack([copies + torch.arange(n).repeat(copies), hub]), num_nodes=copies + n)


def full_sum(graph: Graph, h: torch.Tensor) -> torch.Tensor:
    """sum over all in-edges of weight * h[src], float64."""
    out = torch.zeros(graph.num_nodes, *h.shape[1:], dtype=torch.double)
    message = graph.edge_weight().double().view(-1, *[1] * (h.dim() - 1)) * h.double()[graph.indices.long()]
    return out.index_add_(0, graph.dst(), message)


def block_sum(block, h: torch.Tensor) -> torch.Tensor:
    """sum over the block's edges of weight * scale * h[src], h by global id, float64."""
    coef = (block.weight.double() * block.scale.double()).view(-1, *[1] * (h.dim() - 1))
    out = torch.zeros(block.num_dst, *h.shape[1:], dtype=torch.double)
    return out.index_add_(0, block.dst, coef * h.double()[block.n_id[block.src]])


def same_blocks(one, other) -> bool:
    return len(one) == len(other) and all(
        a.num_dst == b.num_dst and all(torch.equal(s, t) for s, t in zip(a, b, strict=True) if torch.is_tensor(s))
        for a, b in zip(one, other, strict=True)
    )


def toy_data(nodes: int = 240, classes: int = 3, seed: int = 0, labels: str = "classes", metric: str = "accuracy"):
    """Classes joined mostly among themselves, noisy features; the fields that `fit` asks of a dataset."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (nodes,), generator=g)
    src = torch.randint(nodes, (nodes * 12,), generator=g)
    dst = torch.randint(nodes, (nodes * 12,), generator=g)
    keep = (y[src] == y[dst]) | (torch.rand(len(src), generator=g) < 0.2)
    graph = Graph.from_edge_index(torch.stack([src[keep], dst[keep]]), num_nodes=nodes)
    x = torch.nn.functional.one_hot(y, classes).float() + 1.5 * torch.randn(nodes, classes, generator=g)
    x = torch.cat([x, torch.randn(nodes, 5, generator=g)], 1)
    if labels == "labels":
        y = torch.nn.functional.one_hot(y, classes).float()
        y[:, 0] = (torch.rand(nodes, generator=g) < 0.5).float()
    part = torch.rand(nodes, generator=g)
    data = SimpleNamespace(
        graph=graph, x=x, y=y, classes=classes, metric=metric, name="toy",
        train_mask=part < 0.6, val_mask=(part >= 0.6) & (part < 0.8), test_mask=part >= 0.8,
    )  # fmt: skip
    data.to = lambda device: data
    return data


@pytest.fixture(autouse=True)
def seeded():
    """PyG's loaders draw by torch's seed where none is given: it is the same before every test."""
    torch.manual_seed(0)


@pytest.fixture
def graph() -> Graph:
    return messy_graph()


@pytest.fixture
def many_threads(monkeypatch):
    """Let even tiny work be split, so that thread counts matter on small graphs."""
    threads = importlib.import_module("adahop.ops.threads")
    monkeypatch.setattr(threads, "SMALL", 1)
    monkeypatch.setattr(threads, "LATE", 0)
