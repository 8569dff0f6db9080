"""Snapshots behind the PyG loader: a batch draws what changed since the last pass, for layers of any kind."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data
from torch_geometric.utils import trim_to_layer

from adahop import InputError
from adahop.pyg import AdaptiveNeighborLoader, inference, scale_messages
from adahop.pyg import snapshot as room
from adahop.pyg.wrap import propagate_of
from conftest import messy_edges

LAYERS = {
    "gcn": pyg.GCNConv,
    "sage": pyg.SAGEConv,
    "max": lambda i, o: pyg.SAGEConv(i, o, aggr="max"),
    "gin": lambda i, o: pyg.GINConv(nn.Sequential(nn.Linear(i, o), nn.Tanh())),
    "graph": pyg.GraphConv,
    "gat": lambda i, o: pyg.GATConv(i, o, dropout=0.4),
    "gatv2": pyg.GATv2Conv,
    "transformer": lambda i, o: pyg.TransformerConv(i, o, edge_dim=2),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*(as PyG has it|sums its neighbours)")  # has tests of its own


class Net(nn.Module):
    """Two layers of a kind; the edge's attributes go through a layer of their own, where they are used."""

    def __init__(self, kind: str, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.edge = LAYERS[kind](4, 8), LAYERS[kind](8, 3), nn.Linear(2, 2)
        self.kind, self.dropout = kind, dropout

    def forward(self, x, edge_index, edge_attr):
        more = {"edge_attr": self.edge(edge_attr)} if self.kind == "transformer" else {}
        x = F.dropout(torch.relu(self.one(x, edge_index, **more)), self.dropout, self.training)
        return self.two(x, edge_index, **more)


def the_data(weights: bool = False) -> Data:
    edge_index = messy_edges()[0]
    g = torch.Generator().manual_seed(4)
    more = {"edge_weight": torch.rand(edge_index.shape[1], generator=g) + 0.5} if weights else {}
    attr, x = torch.randn(edge_index.shape[1], 2, generator=g), torch.randn(60, 4, generator=g)
    return Data(x=x, edge_index=edge_index, edge_attr=attr, y=torch.arange(60) % 3, **more)


def loader_of(data: Data, k: int, **more) -> AdaptiveNeighborLoader:
    return AdaptiveNeighborLoader(data, [k, k], batch_size=20, shuffle=True, seed=3, **more)


def wrapped(kind: str, dropout: float = 0.0) -> Net:
    model = Net(kind, dropout)
    return model if kind == "max" else scale_messages(model)  # a maximum cannot be scaled


def moved(model: nn.Module) -> nn.Module:
    """Every parameter a good step away."""
    g = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=g)
    return model


@pytest.mark.parametrize("kind", LAYERS)
def test_right_after_a_pass_nothing_is_left_to_chance(kind):
    """Two drawn neighbours of many, and the output is the whole graph's."""
    data, model = the_data(), wrapped(kind)
    loader = loader_of(data, 2)
    loader.learn(model)
    exact, seen, off = inference(model, data), 0, 0.0
    for conv in (model.one, model.two):
        conv.dropout = 0.0
    for batch in loader:
        out = model(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
        torch.testing.assert_close(out, exact[batch.n_id[: batch.batch_size]], atol=1e-4, rtol=1e-4)
        seen += batch.batch_size
        loader.learn(None)
        plain = model(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
        off = max(off, float((plain - out).detach().abs().max()))
        loader.learn(model)
        inference(model, data)
    assert seen == 60 and off > 0.01  # without the snapshot it would not be


@pytest.mark.filterwarnings("ignore:layer .* ignores the scale")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_with_every_neighbour_it_changes_nothing(kind, dropout):
    """Whatever changed since the pass, parameters, dropout, an edge's own layer: the two sums differ by nothing."""
    data, model, ways = the_data(), wrapped(kind, dropout), []
    for estimator in ("snapshot", "plain"):
        loader = loader_of(data, -1, estimator=estimator)
        loader.learn(model)
        inference(model, data)
        kept = {k: v.clone() for k, v in model.state_dict().items()}
        moved(model)
        outs = []
        for batch in loader:
            torch.manual_seed(1)
            outs.append(model(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size])
        ways.append(torch.cat(outs))
        loader.learn(None)
        model.load_state_dict(kept)
    torch.testing.assert_close(*ways, atol=2e-4, rtol=2e-4)
    if kind == "gat":
        assert model.one.dropout == 0.4


def test_an_edge_weight_and_a_second_input_are_of_the_pass_too():
    """GCN2Conv takes the first layer's output again, which has changed as well; the data has weights of its own."""
    data = the_data(weights=True)

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.one = nn.Linear(4, 8), pyg.GCN2Conv(8, alpha=0.5, normalize=False)
            self.two = pyg.GraphConv(8, 3)

        def forward(self, x, edge_index, edge_weight):
            first = self.up(x).relu()
            return self.two(self.one(first, first, edge_index, edge_weight).relu(), edge_index, edge_weight)

    model, outs = Deep(), []
    for estimator in ("snapshot", "plain"):
        loader = loader_of(data, -1, estimator=estimator)
        loader.learn(model)
        inference(model, data)
        kept = {k: v.clone() for k, v in model.state_dict().items()}
        moved(model)
        outs.append(torch.cat([model(b.x, b.edge_index, b.edge_weight)[: b.batch_size] for b in loader]))
        loader.learn(None)
        model.load_state_dict(kept)
    torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gcn", "sage", "graph"])
def test_right_on_average_and_closer(kind):
    """One layer after a step: the mean of 400 epochs of draws is the whole graph's sum. 5 standard errors in each of
    180 numbers: by chance once in 10,000 such tests; the seed is fixed.
    """
    data = the_data()
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": pyg.Sequential("x, edge_index", [(LAYERS[kind](4, 3), "x, edge_index -> x")])})["net"]
    scale_messages(model)
    spread = {}
    for estimator in ("snapshot", "plain"):
        loader = AdaptiveNeighborLoader(data, [2], batch_size=60, seed=1, estimator=estimator)
        loader.learn(model)
        inference(model, data)
        moved(model)
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(room.Snapshots, "begin_epoch", lambda self: None)
            outs = torch.stack([model(b.x, b.edge_index) for _ in range(400) for b in loader])  # all nodes, in order
        loader.learn(None)
        error = (outs.mean(0) - inference(model, data)).abs()
        assert bool((error <= 5 * outs.std(0) / 20 + 1e-4).all())
        spread[estimator] = float(outs.var(0).mean())
    assert spread["snapshot"] < 0.5 * spread["plain"]


@pytest.mark.parametrize("estimator", ["snapshot", "plain"])
def test_a_batch_norm_inside_a_layer_sees_the_sums_as_they_are(estimator):
    """Its statistics are those of the sums that the layer passes on: with a snapshot the whole graph's, without one
    those of the drawn edges, scaled. Each batch counts once.
    """
    torch.manual_seed(0)
    data = the_data()
    whole = torch.zeros_like(data.x).index_add(0, data.edge_index[1], data.x[data.edge_index[0]])
    conv = scale_messages(pyg.GINConv(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))))
    own = copy.deepcopy(conv.nn)
    loader = AdaptiveNeighborLoader(data, [2], batch_size=20, estimator=estimator)
    loader.learn(conv)
    for _ in range(2):
        for batch in loader:
            assert conv(batch.x, batch.edge_index).requires_grad and conv.nn[1].training
            src, dst = batch.edge_index
            drawn = torch.zeros_like(batch.x).index_add(0, dst, batch.x[src] * batch.scale[:, None])
            own(batch.x + (whole[batch.n_id] if estimator == "snapshot" else drawn))
    seen, want = (dict(m[1].named_buffers()) for m in (conv.nn, own))
    assert int(seen["num_batches_tracked"]) == 6
    assert all(torch.allclose(seen[name], want[name], rtol=1e-4, atol=1e-4) for name in want)


def test_a_pass_that_was_heard_is_not_made_again(monkeypatch):
    data, model, made = the_data(), scale_messages(Net("sage")), []
    monkeypatch.setattr(room, "inference", lambda m, d: made.append(inference(m, d)))
    loader = loader_of(data, 2)
    loader.learn(model)
    for epoch in range(3):
        for batch in loader:
            model(batch.x, batch.edge_index, batch.edge_attr)
        if epoch == 0:
            model.eval()
            model(data.x, data.edge_index, data.edge_attr)  # a user's own evaluation
            model.train()
    assert len(made) == 2  # before the first epoch, and before the third


def test_a_pass_in_inference_mode_serves_training():
    """As Lightning evaluates."""
    data, model = the_data(), wrapped("gat")
    loader = loader_of(data, 2)
    loader.learn(model)
    for _ in range(2):
        for batch in loader:
            model(batch.x, batch.edge_index, batch.edge_attr).sum().backward()
        with torch.inference_mode():
            inference(model, data)
    assert model.one.lin.weight.grad.abs().sum() > 0
    assert loader._memory.forwards[propagate_of(model.two)][0].passes[0].total.is_inference()


def test_feedback_remembers_from_its_second_epoch():
    data, model = the_data(), scale_messages(Net("gcn"))
    loader = loader_of(data, 2)
    for _ in range(2):
        outs = []
        for batch in loader:
            with loader.feedback(model, batch):
                out = model(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
            outs.append((out - inference(Net("gcn"), data)[batch.n_id[: batch.batch_size]]).abs().max())
    assert max(outs) < 1e-4


def test_wrapped_after_learning_began():
    """The hooks of `scale_messages` come after the snapshot's then; a call later all is in order, dropout too."""
    data, model = the_data(), Net("gat")
    loader = loader_of(data, 2)
    loader.learn(model)
    scale_messages(model)
    exact = inference(model, data)
    for batch in loader:
        model(batch.x, batch.edge_index, batch.edge_attr)
        assert model.one.dropout == model.two.dropout == 0.4
    model.one.dropout = model.two.dropout = 0.0
    for batch in loader:
        out = model(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
        torch.testing.assert_close(out, exact[batch.n_id[: batch.batch_size]], atol=1e-4, rtol=1e-4)


def test_trimmed_layers_and_disjoint_trees():
    data = the_data()

    class Trim(Net):
        def forward(self, x, edge_index, edge_attr, nodes=None, edges=None):
            for layer, conv in enumerate((self.one, self.two)):
                if nodes is not None:
                    x, edge_index, _ = trim_to_layer(layer, nodes, edges, x, edge_index, None)
                x = conv(x if layer == 0 else x.relu(), edge_index)
            return x

    for disjoint in (False, True):
        model = scale_messages(Trim("sage"))
        loader = loader_of(data, 2, disjoint=disjoint)
        loader.learn(model)
        exact = inference(model, data)
        for b in loader:
            out = model(b.x, b.edge_index, b.edge_attr, b.num_sampled_nodes, b.num_sampled_edges)[: b.batch_size]
            torch.testing.assert_close(out, exact[b.n_id[: b.batch_size]], atol=1e-4, rtol=1e-4)


def test_a_model_that_cannot_pass_is_told_once_and_trains():
    data = the_data()

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pyg.SAGEConv(4, 3)

        def forward(self, batch, temperature):
            return self.conv(batch.x, batch.edge_index) / temperature

    model = scale_messages(Odd())
    loader = AdaptiveNeighborLoader(data, [2], batch_size=20)
    loader.learn(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert len([model(batch, 1.0) for batch in loader]) == 3
    assert len(said) == 1 and "estimator='plain'" in str(said[0].message) and "Odd" in str(said[0].message)
    model.eval()
    exact = model(data, 1.0)  # heard, for all that
    model.train()
    for batch in loader:
        torch.testing.assert_close(model(batch, 1.0)[:20], exact[batch.n_id[:20]], atol=1e-5, rtol=1e-5)


def test_a_checkpoint_names_the_data_s_own_tensors():
    data, model = the_data(), scale_messages(Net("sage"))
    loader = loader_of(data, 2)
    loader.learn(model)
    next(iter(loader))
    state = loader.state_dict()["snapshots"]
    one, two = (state["layers"][name][0]["passes"][0] for name in ("one", "two"))
    assert one["node"] == {"x": ("x", "x")} and two["node"]["x"][0].shape == (60, 8) and two["total"].shape == (60, 8)
    again = loader_of(data, 2)
    again.load_state_dict(loader.state_dict())
    assert again.state_dict()["snapshots"] is not None  # kept until a model comes
    again.learn(model)
    kept, own = (s._memory.forwards[propagate_of(model.one)][0].passes[0] for s in (again, loader))
    assert kept.node["x"][0] is data.x and torch.equal(kept.total, own.total)


def test_a_checkpoint_of_a_part_of_the_features_and_of_another_model():
    data = the_data()

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pyg.SAGEConv(2, 3)

        def forward(self, x, edge_index):
            return self.conv(x[:, :2], edge_index)  # begins where the features begin

    model = scale_messages(Part())
    loader = AdaptiveNeighborLoader(data, [2], batch_size=20)
    loader.learn(model)
    steps = iter(loader)
    next(steps)
    state = loader.state_dict()
    assert state["snapshots"]["layers"]["conv"][0]["passes"][0]["node"]["x"][0].shape == (60, 2)
    again = AdaptiveNeighborLoader(data, [2], batch_size=20)
    again.load_state_dict(state)
    again.learn(model)
    assert sum(torch.isfinite(model(batch.x, batch.edge_index)).all() for batch in again) == 2
    other = AdaptiveNeighborLoader(data, [2], batch_size=20)
    other.load_state_dict(state)
    other.learn(scale_messages(pyg.GraphSAGE(4, 3, 1)))  # nothing of it fits, so the next pass decides
    assert not other._memory.fresh


def test_which_estimator():
    data = the_data()
    assert loader_of(data, 2).estimator == "snapshot"
    assert loader_of(data, 2, method="bs").estimator == "plain"
    assert loader_of(data, 2, method="bs", estimator="snapshot").estimator == "snapshot"
    with pytest.raises(InputError, match="`estimator` must be one of plain, snapshot, history, got 'memory'"):
        loader_of(data, 2, estimator="memory")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["gcn", "sage", "gatv2", "transformer"])
def test_model_and_batches_on_a_gpu_and_data_in_memory(kind):
    data, model = the_data(), wrapped(kind).cuda()
    loader = loader_of(data, 2)
    loader.learn(model)
    for _ in range(2):
        for batch in loader:
            batch = batch.to("cuda")
            out = model(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
            exact = model.eval()(data.x.cuda(), data.edge_index.cuda(), data.edge_attr.cuda())
            model.train()
            torch.testing.assert_close(out, exact[batch.n_id[: batch.batch_size]], atol=1e-3, rtol=1e-3)
