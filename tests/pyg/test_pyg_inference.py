"""Layer-wise inference equals the full forward, whatever the model is stacked of."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch_geometric.data import Data, HeteroData

import adahop
from adahop.checks import InputError
from adahop.pyg import AdaptiveNeighborLoader, scale_messages
from conftest import messy_edges


def messy_data(weight: bool = False) -> Data:
    edge_index, w = messy_edges()
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(4))
    data = Data(x=x, edge_index=edge_index, edge_attr=torch.rand(900, 3, generator=torch.Generator().manual_seed(5)))
    if weight:
        data.edge_weight = w
    return data


def mlp(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Linear(a, 8), nn.ReLU(), nn.Linear(8, b))


class Mixed(nn.Module):
    """Layers of many kinds, a skip connection, layers that share nothing but x and edge_index."""

    def __init__(self):
        super().__init__()
        self.one, self.two = pyg.TransformerConv(6, 4, heads=2), pyg.GATv2Conv(8, 4, heads=2)
        self.three, self.four = pyg.GINConv(mlp(8, 8)), pyg.EdgeConv(mlp(16, 8))
        self.five, self.norm = pyg.APPNP(3, 0.1), pyg.BatchNorm(8)
        self.six = pyg.SAGEConv(8, 5, aggr="max")

    def forward(self, x, edge_index):
        x = self.one(x, edge_index).relu()
        x = x + self.three(self.norm(self.two(x, edge_index)), edge_index)
        return self.six(self.five(self.four(x, edge_index), edge_index), edge_index)


class Insists(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = pyg.GraphConv(6, 5)

    def forward(self, x, edge_index, edge_weight):
        return self.conv(x, edge_index, edge_weight)


MODELS = {
    "sage": lambda: pyg.GraphSAGE(6, 8, 3, 5),
    "gcn": lambda: pyg.GCN(6, 8, 2, 5, norm="batch", dropout=0.5),
    "gat": lambda: pyg.GAT(6, 8, 2, 5, heads=2, dropout=0.5),
    "gat v2": lambda: pyg.GAT(6, 8, 2, 5, v2=True, edge_dim=3),
    "gin": lambda: pyg.GIN(6, 8, 3, 5, jk="cat"),
    "pna": lambda: pyg.PNA(6, 8, 2, 5, aggregators=["mean", "max"], scalers=["identity"], deg=torch.ones(9).long()),
    "edgecnn": lambda: pyg.EdgeCNN(6, 8, 2, 5),
    "mixed": Mixed,
    "sequential": lambda: pyg.Sequential("x, edge_index", [
        (pyg.GCNConv(6, 8), "x, edge_index -> x"), nn.ReLU(), (pyg.SAGEConv(8, 5), "x, edge_index -> x")]),
    "scaled": lambda: scale_messages(pyg.GAT(6, 8, 2, 5)),
    "one conv": lambda: pyg.GCNConv(6, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("weight", [False, True])
def test_equals_the_full_forward(name, weight):
    torch.manual_seed(0)
    model, data = MODELS[name](), messy_data(weight)
    model.train()
    more = {}
    if weight and name in ("gcn", "one conv", "scaled"):
        more["edge_weight"] = data.edge_weight
    if name == "gat v2":
        more["edge_attr"] = data.edge_attr
    for size in (7, 59, 60, 1000):
        got = adahop.inference(model, data, batch_size=size, **more)
        assert model.training and not got.requires_grad
        with torch.no_grad():
            want = model.eval()(data.x, data.edge_index, **more)
        model.train()
        assert torch.allclose(got, want, atol=1e-5)
    assert all("propagate" not in m.__dict__ for m in model.modules())


def test_messages_come_in_parts():
    model, data, seen = pyg.GraphSAGE(6, 8, 2, 5), messy_data(), []
    for conv in model.convs:
        conv.register_message_forward_hook(lambda m, a, out: seen.append(len(out)))
    adahop.inference(model, data, batch_size=10)
    assert len(seen) == 12 and sum(seen) == 1800 and max(seen) < 500


def test_a_mode_apart_is_kept():
    model = pyg.GCN(6, 8, 2, 5)
    model.train()
    model.convs[0].eval()
    adahop.inference(model, messy_data(), batch_size=10)
    assert model.training and model.convs[1].training and not model.convs[0].training


def test_weights_and_our_own_models():
    model, data = Insists(), messy_data()
    assert adahop.inference(model, data, batch_size=9).shape == (60, 5)
    gcn, weighted = pyg.GCN(6, 8, 2, 5).eval(), messy_data(weight=True)
    without = adahop.inference(gcn, weighted)  # the data has a weight, and nothing says that the model uses it
    assert torch.allclose(without, gcn(data.x, data.edge_index))
    assert not torch.equal(without, adahop.inference(gcn, weighted, edge_weight=weighted.edge_weight))
    ours = adahop.models.make("gcn", 6, 8, 5)
    graph = adahop.Graph.from_data(data).normalized(*ours.graph)
    assert torch.equal(adahop.inference(ours, data), ours.inference(graph, data.x))


def test_what_cannot_be_done():
    data = messy_data()
    with pytest.raises(InputError, match="must be stacked of PyG layers that pass messages, got Linear"):
        adahop.inference(nn.Linear(6, 2), data)
    with pytest.raises(InputError, match="`data` must have at least one relation with an `edge_index`, got none"):
        adahop.inference(pyg.GCN(6, 8, 2, 5), HeteroData())

    class Strange(pyg.GCN):
        def forward(self, batch):
            return super().forward(batch.x, batch.edge_index)

    with pytest.raises(InputError, match=r"must take x \(or n_id\) and edge_index.* got Strange with \(batch\)"):
        adahop.inference(Strange(6, 8, 2, 5), data)
    with pytest.raises(InputError, match="`data` must have `x`"):
        adahop.inference(pyg.GCN(6, 8, 2, 5), Data(edge_index=data.edge_index, num_nodes=60))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = adahop.nothing


class Embedded(torch.nn.Module):
    def __init__(self, nodes):
        super().__init__()
        self.rows, self.layers = torch.nn.Embedding(nodes, 6), pyg.GraphSAGE(6, 8, 2, 3)

    def forward(self, n_id, edge_index):
        return self.layers(self.rows(n_id), edge_index)


def test_a_model_of_learned_embeddings_takes_the_nodes_ids():
    """Such a script passes batch.n_id; the whole data has the ids 0, 1, ... and a snapshot without being told."""
    data = Data(edge_index=torch.randint(30, (2, 200), generator=torch.Generator().manual_seed(0)), num_nodes=30)
    model = Embedded(30)
    want = model.eval()(torch.arange(30), data.edge_index)
    assert torch.allclose(adahop.inference(model, data), want, atol=1e-6)
    loader = AdaptiveNeighborLoader(data, [2, 2], batch_size=10)
    loader.learn(model.train())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for batch in loader:
                model(batch.n_id, batch.edge_index)[:10].sum().backward()
    assert loader.memory_cost()["bytes"] > 0
    assert "n_id" not in data


def test_an_average_of_a_model():
    data = adahop.load("digits")
    model = pyg.GraphSAGE(data.num_features, 8, 2, 3)
    average = AveragedModel(model)
    want = model.eval()(data.x, data.edge_index)
    assert torch.allclose(adahop.inference(average, data), want, atol=1e-5)
