"""Batches and data that a script changes: what layers give is that of the changed values, whatever is remembered."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCN, GIN, GATConv, GCNConv, GraphConv, GraphSAGE, HeteroConv, SAGEConv

from adahop.pyg import AdaptiveNeighborLoader

NODES, SEEDS = 50, 15
ESTIMATORS = ("plain", "snapshot", "history")


def the_data() -> Data:
    g = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, 350), generator=g)
    return Data(
        x=torch.randn(NODES, 6, generator=g),
        edge_index=edges[:, edges[0] != edges[1]],
        edge_weight=torch.rand(int((edges[0] != edges[1]).sum()), generator=g) + 0.2,
        y=torch.randint(3, (NODES,), generator=g),
    )


class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = GraphConv(6, 8), GraphConv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        return self.last(self.first(x, edge_index, weight).relu(), edge_index, weight)


MODELS = {
    "sage": lambda: GraphSAGE(6, 8, 2, 3),
    "gin": lambda: GIN(6, 8, 2, 3, norm=None),
    "gcn": lambda: GCN(6, 8, 2, 3),
    "weighted": Weighted,
}


def call(model, batch, weight="edge_weight"):
    more = [batch[weight]] if isinstance(model, Weighted | GCN) else []
    return model(batch.x, batch.edge_index, *more)


def largest_error(kind, estimator, change, of_data=None, where="loop", weight="edge_weight") -> float:
    """With all neighbours, of a batch's outputs against the whole graph, both with the change, while the model trains.

    `of_data` changes the data in the middle of every epoch.
    """
    torch.manual_seed(0)
    data, model, same = the_data(), MODELS[kind](), MODELS[kind]()
    words = {"transform": change} if where == "transform" else {}
    loader = AdaptiveNeighborLoader(data, [-1, -1], batch_size=SEEDS, seed=1, estimator=estimator, **words)
    loader.learn(model)
    worst = 0.0
    for _ in range(3):
        for step, batch in enumerate(loader):
            batch = change(batch) if where == "loop" else batch
            whole = data.clone()
            whole.n_id, whole.e_id = torch.arange(NODES), torch.arange(data.num_edges)
            same.load_state_dict(model.state_dict())
            with torch.no_grad():
                want = call(same, change(whole), weight)[batch.n_id[: batch.batch_size]]
            out = call(model, batch, weight)[: batch.batch_size]
            worst = max(worst, float((out - want).norm() / want.norm()))
            out.logsumexp(1).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
                    p.grad = None
            if of_data is not None and step == 1:
                of_data(data)
    return worst


def halved(batch):
    batch.x = batch.x / 2
    return batch


def masked(batch):
    batch.x[batch.n_id % 3 == 0] = 0.0
    return batch


def capped(batch):
    batch.edge_weight.clamp_(max=0.6)
    return batch


def other_weight(batch):
    batch.strength = 1 / (1 + batch.e_id % 5)
    return batch


def unchanged(batch):
    return batch


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("kind", "change", "where", "weight"),
    [
        ("sage", halved, "transform", ""),
        ("gin", masked, "loop", ""),
        ("sage", masked, "transform", ""),
        ("weighted", capped, "loop", "edge_weight"),
        ("weighted", other_weight, "transform", "strength"),
    ],
)
def test_what_a_script_changes_in_a_batch_is_what_its_layers_sum(estimator, kind, change, where, weight):
    assert largest_error(kind, estimator, change, where=where, weight=weight) < 1e-5


@pytest.mark.parametrize("estimator", ESTIMATORS[1:])
def test_a_change_that_begins_later_is_seen_too(estimator):
    many = iter(range(10**6))

    def change(batch):  # twice per step: on the batch and on the whole graph
        return batch if next(many) < 12 else masked(batch)

    assert largest_error("sage", estimator, change) < 1e-5


def shrink(data):
    data.x.mul_(0.7)


def replace_features(data):
    data.x = data.x + 1


def turn_weights(data):
    data.edge_weight.mul_(torch.linspace(0.5, 1.5, data.num_edges))


def replace_weights(data):
    data.edge_weight = data.edge_weight.flip(0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("kind", "change"),
    [("sage", shrink), ("gin", replace_features), ("gcn", turn_weights), ("gcn", replace_weights)],
)
def test_data_that_a_script_changes_while_it_trains(estimator, kind, change):
    assert largest_error(kind, estimator, unchanged, change) < 1e-5


def test_typed_features_that_a_script_changes():
    torch.manual_seed(0)
    data = HeteroData()
    data["a"].x, data["b"].x = torch.randn(30, 4), torch.randn(20, 5)
    data["b", "of", "a"].edge_index = torch.stack([torch.randint(20, (150,)), torch.randint(30, (150,))])
    conv = HeteroConv({("b", "of", "a"): SAGEConv((5, 4), 3)})
    loader = AdaptiveNeighborLoader(data, [-1], "a", batch_size=10, estimator="snapshot")
    loader.learn(conv)
    for _ in range(2):
        for batch in loader:
            batch["b"].x[batch["b"].n_id % 2 == 0] = 0.0
            x = {"a": data["a"].x, "b": data["b"].x * (torch.arange(20) % 2).unsqueeze(1)}
            with torch.no_grad():
                conv.train()
                want = conv(x, data.edge_index_dict)["a"][batch["a"].n_id[: batch["a"].batch_size]]
            out = conv(batch.x_dict, batch.edge_index_dict)["a"][: batch["a"].batch_size]
            assert torch.allclose(out, want, atol=1e-5)
            out.sum().backward()


def test_the_scale_of_edges_that_were_dropped_is_not_applied_twice():
    data = the_data()
    del data.edge_weight
    loader = AdaptiveNeighborLoader(data, [2], batch_size=SEEDS, method="graphsage", seed=0)
    conv = GraphConv(6, 3)
    loader.learn(conv)
    for batch in loader:
        kept = torch.arange(batch.num_edges) % 3 > 0
        by_layer = conv(batch.x, batch.edge_index[:, kept])
        by_hand = conv(batch.x, batch.edge_index[:, kept], batch.scale[kept])
        assert torch.allclose(by_layer, by_hand, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", [SAGEConv, GCNConv, GATConv])
def test_batches_are_let_go_without_a_search_for_cycles(kind, estimator):
    data, conv = the_data(), kind(6, 4)
    loader = AdaptiveNeighborLoader(data, [2], batch_size=SEEDS, estimator=estimator)
    loader.learn(conv)

    def tensors() -> int:
        return sum(issubclass(type(t), Tensor) for t in gc.get_objects())

    after: list[int] = []
    for _ in range(3):  # what is found once is there from the second epoch on
        for batch in loader:
            conv(batch.x, batch.edge_index).sum().backward()
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            for batch in loader:
                conv(batch.x, batch.edge_index).sum().backward()
            after.append(tensors())
    finally:
        gc.enable()
    assert after[-1] < after[0] + 40
