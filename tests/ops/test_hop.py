"""A hop in one pass: what is drawn, looked up and numbered is what the three steps one after the other give."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from adahop import ops
from adahop.graph import Graph
from adahop.ops import Edges, Odds, random
from adahop.ops.drawing import cpu_hop
from adahop.policies import Exp3, Tracked
from adahop.samplers import NeighborSampler

from conftest import messy_graph  # isort: skip


def typed() -> Graph:
    g = torch.Generator().manual_seed(0)
    edges = {
        ("a", "likes", "b"): torch.stack(
            [torch.randint(20, (150,), generator=g), torch.randint(9, (150,), generator=g)]
        ),
        ("b", "knows", "b"): torch.randint(9, (2, 90), generator=g),
    }
    return Graph._typed({"a": 20, "b": 9}, edges)


GRAPHS = {
    "weights, loops, ids": lambda: messy_graph().normalized("row"),
    "plain": lambda: Graph.from_edge_index(torch.randint(200, (2, 4000), generator=torch.Generator().manual_seed(1))),
    "typed": typed,
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("how", ["multinomial", "systematic"])
@pytest.mark.parametrize("k", [0, 3, 40])
def test_one_pass_equals_three(name, how, k, monkeypatch):
    graph = GRAPHS[name]()
    scratch = torch.full((graph.num_nodes,), -1, dtype=torch.int32)
    calls: list[int] = []
    kernel = cpu_hop.uniform_hop
    monkeypatch.setattr(cpu_hop, "uniform_hop", lambda *a: calls.append(1) or kernel(*a))
    targets, known = torch.tensor([5, 3, 5, 21, 8]), False  # one of them twice
    named = []
    for hop in range(3):
        rows, key = graph.rows(targets), random.key(3, hop)
        with ops.threads(1):
            drawn, numbered = ops.hop(graph.edges, rows, torch.tensor([k]), how, Odds(), key, scratch, known)
        want = ops.draw.reference(graph.edges, rows, torch.tensor([k]), how, Odds(), key)
        nodes = ops.number.reference(targets, want, graph.edges, rows.target, scratch, None)
        for ours, theirs in zip((*drawn, *numbered), (*want, *nodes), strict=True):
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype
        assert numbered.edge_index.is_contiguous()
        targets, known, named = numbered.n_id, True, numbered.n_id
    assert len(calls) == 3
    ops.forget(named, scratch)
    assert bool((scratch == -1).all())


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("draw", ["systematic", "multinomial"])
@pytest.mark.parametrize("kind", [Tracked, Exp3])
def test_one_pass_by_learned_odds_equals_three(name, draw, kind, monkeypatch):
    graph = GRAPHS[name]()
    sampler = NeighborSampler(graph, [3, 3], kind(graph, 2), draw)
    calls: list[int] = []
    kernel = cpu_hop.learned_rows
    monkeypatch.setattr(cpu_hop, "learned_rows", lambda *a: calls.append(1) or kernel(*a))
    scratch, gen = torch.full((graph.num_nodes,), -1, dtype=torch.int32), torch.Generator().manual_seed(0)
    for step in range(4):
        targets, key = torch.tensor([5, 3, 21, 8]), random.key(step)
        rows, odds, k = graph.rows(targets), sampler.policy.odds_for(1, draw), torch.tensor([3])
        with ops.threads(1):
            drawn, numbered = ops.hop(graph.edges, rows, k, draw, odds, key, scratch, False)
        ops.forget(numbered.n_id, scratch)
        want = ops.draw(graph.edges, rows, k, draw, odds, key)
        nodes = ops.number.reference(targets, want, graph.edges, rows.target, scratch, None)
        assert all(torch.equal(a, b) for a, b in zip((*drawn, *numbered), (*want, *nodes), strict=True))
        blocks = sampler.sample(torch.arange(graph.num_nodes))
        sampler.update(blocks, [torch.rand(b.num_edges, generator=gen) for b in blocks])
    assert len(calls) >= 4


def test_no_rows_at_all():
    graph = messy_graph()
    scratch, none = torch.full((60,), -1, dtype=torch.int32), torch.zeros(0, dtype=torch.long)
    drawn, numbered = ops.hop(
        graph.edges, graph.rows(none), torch.tensor([3]), "multinomial", Odds(), 1, scratch, False
    )
    assert drawn.ptr.tolist() == [0] and numbered.n_id.numel() == 0 and numbered.edge_index.shape == (2, 0)


def alike(a: Tensor | bool | None, b: Tensor | bool | None) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b


def test_stored_edges_know_their_arrays_and_pickle_without_them():
    edges = messy_graph().normalized("row").edges
    assert edges.loops == int((edges.first - edges.begin).max()) > 0
    assert edges.arrays[3].ctypes.data == edges.indices.data_ptr() and edges.arrays is edges.arrays
    size = len(pickle.dumps(Edges(*edges)))
    again = pickle.loads(pickle.dumps(edges))
    assert len(pickle.dumps(edges)) == size and all(alike(a, b) for a, b in zip(again, edges, strict=True))
