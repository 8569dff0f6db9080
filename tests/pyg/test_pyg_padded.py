"""Padded batches: one shape, and for the batch's own nodes nothing that a batch without padding has not."""

from __future__ import annotations

import pytest
import torch
import torch_geometric.nn as pyg
from test_pyg_device import Net, some_data, step
from torch import nn
from torch._dynamo.testing import CompileCounter

from adahop.checks import InputError
from adahop.pyg import AdaptiveNeighborLoader

AGGREGATIONS = ["sum", "mean", "max", "min", "mul", "std", "var", "median", "softmax"]


def loader_of(padded: bool = True, **words) -> AdaptiveNeighborLoader:
    data = some_data()
    words = {"batch_size": 7, "seed": 3, "shuffle": True, "padded": padded, **words}
    return AdaptiveNeighborLoader(data, words.pop("num_neighbors", [4, 3]), data.train_mask, **words)


SHAPES = [
    {},
    {"method": "graphsage"},
    {"num_neighbors": [-1, 2]},
    {"num_neighbors": [2, -1, 2]},
    {"num_neighbors": [3, 0]},
    {"disjoint": True},
    {"replace": True},
    {"device": "cpu", "cache": 0.5},
    {"sampler": [0, 0, 0, 1, 1, 5, 5, 5], "shuffle": False, "num_neighbors": [-1, -1]},
    {"batch_size": 30, "num_neighbors": [-1, -1]},
]


@pytest.mark.parametrize("words", SHAPES, ids=str)
def test_a_padded_batch_is_the_batch_and_more(words):
    """All have one shape. What was added comes last, points to nothing of the batch, and weighs nothing."""
    shapes = set()
    for ours, plain in zip(loader_of(**words), loader_of(False, **words), strict=True):
        n, m = plain.num_nodes, plain.num_edges
        shapes.add((ours.num_nodes, ours.num_edges, tuple(ours.x.shape), tuple(ours.edge_attr.shape)))
        assert ours.num_nodes >= n + 2 and ours.num_edges >= m and ours.batch_size == plain.batch_size
        for name, value in plain.to_dict().items():
            if torch.is_tensor(value):
                cut = ours[name][:, :m] if name == "edge_index" else ours[name][: len(value)]
                assert torch.equal(cut, value), name
        assert torch.equal(ours.node_mask, torch.arange(ours.num_nodes) < n)
        assert torch.equal(ours.edge_mask, torch.arange(ours.num_edges) < m)
        added = ours.edge_index[:, m:]
        assert bool((added >= n).all() and (added[0] != added[1]).all()) and not bool(ours.scale[m:].any())
        assert ours.validate()
    assert len(shapes) == 1


def test_the_room_is_not_wasted():
    """With all neighbours of all nodes at once nothing is added but two nodes."""
    data = some_data()
    batch = next(iter(AdaptiveNeighborLoader(data, [-1], batch_size=60, padded=True)))
    assert batch.num_edges == data.num_edges and batch.num_nodes <= 2 * 60 + 2


class Aggregated(nn.Module):
    def __init__(self, aggr: str):
        super().__init__()
        self.one, self.two = (pyg.SimpleConv(aggr=aggr) for _ in range(2))

    def forward(self, x, edge_index):
        return self.two(self.one(x, edge_index).tanh(), edge_index)


@pytest.mark.parametrize("aggr", AGGREGATIONS)
def test_any_aggregation_of_its_own_nodes_is_what_it_was(aggr):
    model = Aggregated(aggr)
    for ours, plain in zip(loader_of(method="graphsage"), loader_of(False, method="graphsage"), strict=True):
        want = model(plain.x, plain.edge_index)
        assert torch.allclose(model(ours.x, ours.edge_index)[: plain.num_nodes], want, equal_nan=True)


@pytest.mark.parametrize("estimator", ["plain", "snapshot"])
@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
def test_training_and_learning_are_what_they_were(kind, estimator):
    """Scaled layers, their gradients, what the sampler learns, and with a snapshot what is remembered."""
    found = []
    for padded in (True, False):
        torch.manual_seed(0)
        model, loader, losses = Net(kind), loader_of(padded, estimator=estimator), []
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader.learn(model)
        for _ in range(3):
            losses += [step(model, optimizer, batch) for batch in loader]
        found.append((torch.stack(losses), loader.sampler.policy.square, *(p.detach() for p in model.parameters())))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*found, strict=True))


def compiled_frames(padded: bool) -> int:
    """How often a model that applies the scale itself is compiled in two epochs."""
    torch._dynamo.reset()
    counter = CompileCounter()
    conv = pyg.GraphConv(3, 4)
    model = torch.compile(conv, backend=counter, dynamic=False, fullgraph=True)
    loader = loader_of(padded, method="graphsage", drop_last=True)
    for _ in range(2):
        for batch in loader:
            model(batch.x, batch.edge_index, batch.edge_weight).sum().backward()
    return counter.frame_count


def test_a_compiled_model_is_compiled_once():
    assert compiled_frames(padded=True) == 1 < compiled_frames(padded=False)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_state(prefetch):
    want, first, again = list(loader_of(prefetch=prefetch)), loader_of(prefetch=prefetch), loader_of(prefetch=prefetch)
    batches = iter(first)
    for _ in range(2):
        next(batches)
    again.load_state_dict(first.state_dict())
    rest = list(again)
    assert len(rest) > 1 and [b.e_id.tolist() for b in rest] == [b.e_id.tolist() for b in want[2:]]
    assert all(torch.equal(a.node_mask, b.node_mask) for a, b in zip(rest, want[2:], strict=True))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"subgraph_type": "induced"}, "for induced subgraphs"),
        ({"estimator": "history"}, "with estimator='history'"),
        ({"budget": True, "method": "graphsage"}, "where chance decides"),
        ({"draw": "poisson", "method": "graphsage"}, "where chance decides"),
        ({"batch_sampler": [[1]], "batch_size": 1, "shuffle": False}, "where a `batch_sampler` decides"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_padded(words, told):
    with pytest.raises(InputError, match=f"`padded` must be False {told}.*, got True"):
        loader_of(**words)


def test_typed_data_is_not_padded():
    from test_pyg_hetero import typed_data

    with pytest.raises(InputError, match="`padded` must be False where the data is a HeteroData, got True"):
        AdaptiveNeighborLoader(typed_data(), [2], "paper", padded=True)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), pyg.BatchNorm(8), pyg.PairNorm(), pyg.LayerNorm(8)])
def test_a_model_that_looks_at_all_nodes_is_refused(norm):
    model = pyg.Sequential("x, edge_index", [(pyg.SAGEConv(3, 8), "x, edge_index -> x"), (norm, "x -> x")])
    with pytest.raises(InputError, match=r"`model` must treat nodes one by one .* got .*Norm.* as 'module_1'"):
        loader_of().learn(model)
    loader_of(False).learn(model)


def test_a_batch_norm_over_the_features_of_a_node_is_none_of_them():
    model = pyg.Sequential("x, edge_index", [(pyg.SAGEConv(3, 8), "x, edge_index -> x"), (nn.LayerNorm(8), "x -> x")])
    loader_of().learn(model)


def test_more_seeds_than_a_batch_has():
    loader = loader_of(num_neighbors=[4, 3], batch_size=1)
    with pytest.raises(InputError, match=r"a padded batch must need at most .* more seeds than `batch_size`"):
        loader(torch.arange(30))
