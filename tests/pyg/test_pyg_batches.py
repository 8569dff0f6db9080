"""The registry of batches: found by the memory of their tensors, forgotten with them."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch_geometric.data import Data

from adahop import Graph
from adahop.pyg import batches
from adahop.pyg.batches import DrawnBatch
from adahop.pyg.whole_graph import WholeGraph
from conftest import messy_edges


@pytest.fixture
def whole_graph() -> WholeGraph:
    data = Data(x=torch.zeros(60, 2), edge_index=messy_edges()[0], w=torch.rand(900))
    return WholeGraph(data, Graph.from_data(data))


def handed(whole_graph: WholeGraph, edges: int = 5) -> tuple[Data, DrawnBatch]:
    data = Data(x=torch.randn(4, 2), edge_index=torch.randint(4, (2, edges)))
    known = DrawnBatch(torch.arange(4), torch.arange(edges), torch.ones(edges), whole_graph)
    return batches.register(data, known), known


def test_found_by_its_edges_and_by_a_part_of_them(whole_graph):
    one, other = handed(whole_graph), handed(whole_graph)
    for data, known in (one, other):
        found = batches.find([data.x, data.edge_index])
        assert found.batch is known and found.columns == slice(0, 5)
        part = batches.find([None, data.edge_index[:, 1:3]])
        assert part.batch is known and part.columns == slice(1, 3)
        assert torch.equal(part.edge_index, data.edge_index)


def test_found_by_its_features_where_edges_are_others(whole_graph):
    data, known = handed(whole_graph)
    fewer = data.edge_index[:, torch.tensor([0, 2])]
    found = batches.find([(data.x, data.x), fewer])
    assert found.batch is known and found.columns is None and torch.equal(found.edge_index, data.edge_index)
    hidden = torch.randn(4, 2)
    assert batches.find([hidden, fewer]) is None
    batches.alias(fewer, found)
    assert batches.find([hidden, fewer]).batch is known


def test_found_after_its_tensors_were_replaced(whole_graph):
    data, known = handed(whole_graph)
    data.apply(lambda t: t.clone())  # as `batch.to(device)` does
    assert batches.find([data.edge_index]).batch is known
    copied = data.edge_index.clone()  # as `batch.edge_index.to(device)`
    assert batches.find([copied]).batch is known


def test_a_stranger_is_not_found(whole_graph):
    handed(whole_graph)
    assert batches.find([torch.randn(4, 2), torch.randint(4, (2, 7))]) is None
    assert batches.find([]) is None and batches.find([None, 3]) is None


def test_forgotten_with_its_tensors(whole_graph):
    gc.collect()
    before = batches.in_use()
    data, known = handed(whole_graph)
    edge_index = data.edge_index
    assert batches.in_use() == before + 1
    del data
    gc.collect()
    batches.forget_dead()
    assert batches.find([edge_index]) is None or batches.find([edge_index]).batch is known
    del edge_index, known
    gc.collect()
    assert batches.in_use() == before


def test_many_batches_do_not_pile_up(whole_graph):
    gc.collect()
    before = batches.in_use()
    for _ in range(50):
        handed(whole_graph)
    gc.collect()
    assert batches.in_use() <= before + 1


def test_memory_used_again_is_no_batch(whole_graph):
    """A new tensor at the address of an old one names nothing."""
    for _ in range(20):
        data, known = handed(whole_graph)
        del data, known
        fresh = torch.randint(4, (2, 5))
        assert batches.find([fresh]) is None


def test_a_copy_of_the_data_has_the_same_tensors(whole_graph):
    data, known = handed(whole_graph)
    assert batches.find([copy.copy(data).edge_index]).batch is known


def test_sums_over_the_whole_graph(whole_graph):
    src, dst = whole_graph.data.edge_index
    inward, loops = whole_graph.sums("w")
    for node in (0, 7, 59):
        here = dst == node
        assert inward[node] == pytest.approx(float(whole_graph.data.w[here & (src != dst)].sum()), abs=1e-4)
        assert loops[node] == pytest.approx(float(whole_graph.data.w[here & (src == dst)].sum()), abs=1e-5)
    assert int(sum(whole_graph.sums()).sum()) == 900
