"""A pass over the whole graph: sums straight from the graph or from what is stored equal those over blocks of edges."""

from __future__ import annotations

import pytest
import torch

from adahop import models
from adahop.sum import FullSum, Sum
from conftest import messy_graph


def passes(model, graph, x, monkeypatch):
    """Outputs as they are, and summed over blocks of all edges."""
    found = model.inference(graph, x)
    with monkeypatch.context() as patch:
        patch.setattr(FullSum, "serves", staticmethod(lambda *given: False))
        for kind in {Sum, *map(type, model.memories.values())}:
            patch.setattr(kind, "over_graph", lambda *given: None)
        return found, model.inference(graph, x)


@pytest.mark.parametrize("width", [5, 40])
@pytest.mark.parametrize("arch", ["plain", "residual"])
@pytest.mark.parametrize("kind", ["gcn", "sage"])
@pytest.mark.parametrize("estimator", ["plain", "exact", "snapshot", "history", "exact+snapshot", "exact+history"])
def test_every_way_to_the_same_sums(kind, arch, width, estimator, monkeypatch):
    torch.manual_seed(0)
    model = models.make(kind, width, 16, 7, layers=3, arch=arch)
    graph, x = messy_graph().normalized(*model.graph), torch.randn(60, width)
    model.remember(estimator, graph, x)
    for _ in range(2):  # weights move, so that what was stored before is old
        ours, plain = passes(model, graph, x, monkeypatch)
        assert torch.allclose(ours, plain, atol=2e-5)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.3)
    other = messy_graph(seed=1).normalized(*model.graph)  # as many nodes, other edges
    ours, plain = passes(model, other, x, monkeypatch)
    assert torch.allclose(ours, plain, atol=2e-5)
    assert not torch.allclose(ours, model.inference(graph, x), atol=1e-3)


def test_no_blocks_are_made_where_weights_are_the_graph_s_own(monkeypatch):
    model = models.make("gcn", 5, 16, 7)
    graph, x = messy_graph().normalized(*model.graph), torch.randn(60, 5)
    want = model.inference(graph, x)
    monkeypatch.setattr(type(graph), "in_edges", lambda *given, **more: pytest.fail("a block of all edges was made"))
    assert torch.equal(model.inference(graph, x), want)


def test_a_listener_is_told_the_messages_of_all_edges():
    model = models.make("gcn", 5, 16, 7)
    graph, x = messy_graph().normalized(*model.graph), torch.randn(60, 5)
    want, told = model.inference(graph, x), []
    model.layers()[0].listeners.append(told.append)
    assert torch.allclose(model.inference(graph, x), want, atol=1e-5)
    assert told[0].block.num_edges == graph.num_edges
