"""What happens inside a PyG model that trains on our batches: the same function, or a sentence."""

from __future__ import annotations

import copy
import gc
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_self_loops, dropout_edge, scatter

import adahop
from adahop.checks import InputError
from adahop.pyg import AdaptiveNeighborLoader, AdaptiveSampler, batches, inference, scale_messages, scaled
from adahop.pyg.wrap import propagate_of
from adahop_lab import audit
from adahop_lab.audit import Bias, Mixed, OwnAggregate, OwnMean, OwnSoftmax, SharedLayer, TutorialGCN, TwoPropagates

NODES, EDGES, SEEDS = 80, 700, 10


def the_data(**more) -> Data:
    g = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES, (2, EDGES), generator=g)
    edges = edges[:, edges[0] != edges[1]]
    size = torch.randn(NODES, 1, generator=g).exp()
    data = Data(x=torch.randn(NODES, 6, generator=g) * size, edge_index=edges, y=torch.arange(NODES) % 3, **more)
    return data


def edge_values(data: Data, *shape: int) -> torch.Tensor:
    return torch.rand(data.edge_index.shape[1], *shape, generator=torch.Generator().manual_seed(1)) * 3 + 0.1


def loader_of(data: Data, k: int = -1, hops: int = 1, **more) -> AdaptiveNeighborLoader:
    words = {"batch_size": SEEDS, "seed": 1, "estimator": "plain", **more}
    return AdaptiveNeighborLoader(data, [k] * hops, torch.arange(SEEDS), **words)


def off(one: torch.Tensor, two: torch.Tensor) -> float:
    """Relative distance of what two gave for the seeds."""
    a, b = one.detach()[:SEEDS], two.detach()[:SEEDS]
    return float((a - b).norm() / b.norm())


OWN = {"softmax": OwnSoftmax, "mean": OwnMean, "tutorial": TutorialGCN, "two propagates": TwoPropagates}


def at_all_neighbours(make, call=lambda m, d: m(d.x, d.edge_index), data=None, hops=1):
    """How far the converted model, with every neighbour, and the plain one on the batch are from the whole graph."""
    torch.manual_seed(0)
    data, model = the_data() if data is None else data, make()
    whole = call(model, data)
    batch = next(iter(loader_of(data, hops=hops)))
    plain = call(copy.deepcopy(model), batch)
    ours = call(scale_messages(model), batch)
    return off(ours, whole), off(plain, whole)


def bias(make, call=lambda m, d: m(d.x, d.edge_index), ours=True, data=None, copies=1000) -> Bias:
    """|mean over batches of 3 neighbours - whole graph| / |whole graph|, within bounds that fail once in 10,000 times.

    The graph is there many times, and a batch of all copies is as good as a batch per copy. Ours are drawn with odds
    that follow the size of features, plain PyG's uniformly.
    """
    torch.manual_seed(0)
    one, model = the_data() if data is None else data, make()
    apart = NODES * torch.arange(copies).repeat_interleave(one.edge_index.shape[1])
    many = {k: v.repeat(copies, *[1] * (v.dim() - 1)) for k, v in one.to_dict().items() if k != "edge_index"}
    data = Data(edge_index=one.edge_index.repeat(1, copies) + apart, **many)
    data.odds = data.x[data.edge_index[0]].norm(dim=1).sqrt() + 0.2
    seeds = (NODES * torch.arange(copies)[:, None] + torch.arange(SEEDS)).flatten()
    words = {"weight_attr": "odds"} if ours else {"method": "graphsage", "replace": False}
    loader = AdaptiveNeighborLoader(data, [3], seeds, batch_size=len(seeds), seed=1, estimator="plain", **words)
    with torch.no_grad():
        whole = call(model, one)[:SEEDS]
        model = scale_messages(model) if ours else model
        outs = call(model, next(iter(loader)))[: len(seeds)].view(copies, -1)
    return audit.bias(outs, whole.flatten(), 1e-4)


# --- edge weights and attributes ------------------------------------------------------------------------------------


def weigh(model, data):
    return model(data.x, data.edge_index, data.edge_weight)


@pytest.mark.parametrize("make", [lambda: pyg.GCNConv(6, 4), lambda: pyg.GraphConv(6, 4)])
def test_a_layer_uses_the_edge_weight_that_it_is_given(make):
    data = the_data()
    data.edge_weight = edge_values(data)
    assert at_all_neighbours(make, weigh, data)[0] < 1e-5
    ours, plain = (bias(make, weigh, ours=which, data=data) for which in (True, False))
    assert ours.value < 0.05 and ours.high < 0.15 < plain.low


def test_learned_edge_weights_get_their_gradient_and_estimated_degrees():
    data = the_data()
    data.edge_attr = edge_values(data, 2)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.conv = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()), pyg.GCNConv(6, 4)

        def forward(self, x, edge_index, edge_attr):
            return self.conv(x, edge_index, self.weight(edge_attr).view(-1))

    ours, plain = at_all_neighbours(Net, lambda m, d: m(d.x, d.edge_index, d.edge_attr), data)
    assert ours < 0.1 < plain  # at the rim degrees are a guess, and the batch's own are a worse one
    model = scale_messages(Net())
    batch = next(iter(loader_of(data, 3)))
    model(batch.x, batch.edge_index, batch.edge_attr).sum().backward()
    assert float(model.weight[0].weight.grad.abs().sum()) > 0


def test_an_attribute_that_the_model_never_uses_changes_nothing():
    data = the_data()
    data.edge_weight = edge_values(data)
    for make in (lambda: pyg.GraphConv(6, 4), lambda: pyg.GCNConv(6, 4), lambda: pyg.GCN(6, 8, 1, 4)):
        assert at_all_neighbours(make, data=data)[0] < 1e-5
        torch.manual_seed(0)
        model = make().eval()
        assert torch.allclose(inference(model, data), model(data.x, data.edge_index), atol=1e-5)
        loader = loader_of(data, estimator="snapshot")
        loader.learn(model.train())
        for _ in range(2):
            for batch in loader:
                out = model(batch.x, batch.edge_index)
        assert off(out, model.eval()(data.x, data.edge_index)) < 1e-5


def test_an_edge_attr_that_the_model_uses_is_passed_by_inference_and_the_snapshot():
    data = the_data()
    data.edge_attr = edge_values(data, 3)
    torch.manual_seed(0)
    model = pyg.GAT(6, 8, 1, 4, edge_dim=3).eval()
    want = model(data.x, data.edge_index, edge_attr=data.edge_attr)
    assert torch.allclose(inference(model, data), want, atol=1e-5)
    loader = loader_of(data, estimator="snapshot")
    loader.learn(model.train())
    for _ in range(2):
        for batch in loader:
            out = model(batch.x, batch.edge_index, edge_attr=batch.edge_attr)
    assert off(out, want) < 1e-5


def test_inference_calls_a_model_as_training_did():
    """By other names, with the edge weight or without, or with the batch itself."""
    data = the_data()
    data.edge_weight = edge_values(data)

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = pyg.GCNConv(6, 4)

        def forward(self, features, edges, w=None):
            return self.conv(features, edges, w)

    class Whole(Named):
        def forward(self, batch):
            return self.conv(batch.x, batch.edge_index, batch.edge_weight)

    for model, call in ((Named(), lambda m, d: m(d.x, d.edge_index, d.edge_weight)), (Whole(), lambda m, d: m(d))):
        loader = loader_of(data, estimator="snapshot")
        loader.learn(model)
        for batch in loader:
            call(model, batch)
        model.eval()
        assert torch.allclose(inference(model, data), call(model, data), atol=1e-5)


# --- normalisers of their own ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_layers_with_a_normaliser_of_their_own(name):
    assert at_all_neighbours(OWN[name])[0] < 1e-5
    ours, plain = (bias(OWN[name], ours=which) for which in (True, False))
    assert ours.low <= plain.high and ours.value <= plain.value + 0.03


def test_an_overridden_aggregate_is_no_sum():
    torch.manual_seed(0)
    model, data = OwnAggregate(), the_data()
    batch = next(iter(loader_of(data, 3)))
    plain = model(batch.x, batch.edge_index)
    said = pytest.warns(UserWarning, match=r"\(OwnAggregate\) stays as PyG has it: its normaliser is its own")
    with said, loader_of(data, 3).feedback(model, batch):
        assert torch.equal(model(batch.x, batch.edge_index), plain)


GCN_LIKE = {
    "gcn2": (lambda: pyg.GCN2Conv(6, 0.1), lambda m, d: m(d.x, d.x, d.edge_index), 1),
    "sg": (lambda: pyg.SGConv(6, 4, K=2), lambda m, d: m(d.x, d.edge_index), 2),
    "appnp": (lambda: pyg.APPNP(2, 0.1), lambda m, d: m(d.x, d.edge_index), 2),
    "ssg": (lambda: pyg.SSGConv(6, 4, 0.1, K=2), lambda m, d: m(d.x, d.edge_index), 2),
    "mixhop": (lambda: pyg.MixHopConv(6, 4), lambda m, d: m(d.x, d.edge_index), 2),
    "tag": (lambda: pyg.TAGConv(6, 4, K=2), lambda m, d: m(d.x, d.edge_index), 2),
    "cheb": (lambda: pyg.ChebConv(6, 4, K=2), lambda m, d: m(d.x, d.edge_index), 1),
    "lg": (lambda: pyg.LGConv(), lambda m, d: m(d.x, d.edge_index), 1),
    "gcn improved": (lambda: pyg.GCNConv(6, 4, improved=True), lambda m, d: m(d.x, d.edge_index), 1),
    "gcn bare": (lambda: pyg.GCNConv(6, 4, add_self_loops=False), lambda m, d: m(d.x, d.edge_index), 1),
}


@pytest.mark.parametrize("name", GCN_LIKE)
def test_every_layer_that_normalises_by_degrees_gets_those_of_the_whole_graph(name):
    make, call, hops = GCN_LIKE[name]
    ours, plain = at_all_neighbours(make, call, hops=hops)
    assert ours < 1e-5 < 1e-2 < plain


@pytest.mark.parametrize("name", ["sg", "appnp", "gcn improved"])
def test_degrees_have_the_precision_of_the_model(name):
    """Their roots were taken in single precision, which the test of a reading in double sometimes failed for."""
    make, call, hops = GCN_LIKE[name]
    torch.manual_seed(0)
    data, model = the_data(), make().double()
    data.x = data.x.double()
    whole = call(model, data)
    batch = next(iter(loader_of(data, hops=hops)))
    assert off(call(scale_messages(model), batch), whole) < 1e-12


class WeightedMean(MessagePassing):
    """Divides its sums by those of the weights, after `propagate`."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(6, 4)

    def forward(self, x, edge_index, edge_weight):
        out = self.propagate(edge_index, x=self.lin(x), edge_weight=edge_weight)
        return out / self.count(edge_index[1], edge_weight, len(x)).clamp(min=0.01)[:, None]

    def message(self, x_j, edge_weight):
        return edge_weight[:, None] * x_j

    def count(self, index, edge_weight, nodes):
        return scatter(edge_weight, index, dim_size=nodes)


class CountedMean(WeightedMean):
    """Divides its sums by a count of its own."""

    def count(self, index, edge_weight, nodes):
        return torch.bincount(index, minlength=nodes)


@pytest.mark.parametrize("make", [WeightedMean, CountedMean])
def test_sums_that_are_divided_afterwards(make):
    """A sum of weights is a degree, and the whole graph's is known. What is counted by hand is the batch's: there a
    snapshot of the whole graph's sums was divided by the batch's count, and off by 1.1.
    """
    data = the_data()
    data.edge_weight = edge_values(data)
    assert at_all_neighbours(make, weigh, data)[0] < 1e-5
    assert (ours := bias(make, weigh, data=data)).value < 0.05 and ours.high < 0.15
    outs = []
    for estimator in ("snapshot", "plain"):
        torch.manual_seed(0)
        model = make()
        whole = weigh(model, data)
        loader = loader_of(data, 3, estimator=estimator)
        loader.learn(model)
        outs.append(torch.stack([weigh(model, batch)[:SEEDS] for _ in range(2) for batch in loader]))
    known, plain = off(outs[0][1], whole), off(outs[1][1], whole)
    assert plain > 0.1 and (known < 1e-5 if make is WeightedMean else torch.allclose(outs[0][0], outs[1][0]))


# --- crashes and refusals -------------------------------------------------------------------------------------------


def typed(model, data):
    return model(data.x, data.edge_index, data.kind)


STRANGE = {
    "arma": (lambda: pyg.ARMAConv(6, 4), lambda m, d: m(d.x, d.edge_index)),
    "fa": (lambda: pyg.FAConv(6), lambda m, d: m(d.x, d.x, d.edge_index)),
    "rgcn": (lambda: pyg.RGCNConv(6, 4, 2), typed),
}


@pytest.mark.parametrize("name", STRANGE)
def test_layers_that_used_to_fail(name):
    make, call = STRANGE[name]
    data = the_data()
    data.kind = torch.arange(data.edge_index.shape[1]) % 2
    assert at_all_neighbours(make, call, data)[0] < 1e-5
    loader = loader_of(data, 3, method="bs")
    model = make()
    loader.learn(model)
    for batch in loader:
        call(model, batch).sum().backward()
    loader.state_dict()
    assert loader.sampler.policy.log_weight.any()


def test_a_layer_against_the_edges_is_left_alone():
    data, model = the_data(), pyg.DirGNNConv(pyg.SAGEConv(6, 4))
    loader = loader_of(data, 3)
    with pytest.warns(UserWarning, match="passes messages over other edges than those drawn"):
        loader.learn(model)
        for batch in loader:
            assert torch.isfinite(model(batch.x, batch.edge_index)).all()


@pytest.mark.parametrize("each", [False, True])
def test_edges_may_be_dropped_before_the_model_or_before_each_layer(each):
    """Found by the features, or by the edges that the first layer was found with."""
    torch.manual_seed(0)
    data, model = the_data(), scale_messages(pyg.GraphSAGE(6, 8, 2, 4))
    loader = loader_of(data, 3, hops=2, method="bs")
    loader.learn(model)
    for batch in loader:
        fewer = dropout_edge(batch.edge_index, p=0.3)[0]
        h = model.convs[0](batch.x, fewer)
        model.convs[1](h.relu(), dropout_edge(batch.edge_index, p=0.3)[0] if each else fewer).sum().backward()
    loader.state_dict()
    assert loader.sampler.policy.log_weight.any()


def test_self_loops_as_a_transform():
    def loops(batch):
        batch.edge_index = add_self_loops(batch.edge_index, num_nodes=batch.num_nodes)[0]
        return batch

    torch.manual_seed(0)
    data, model = the_data(), pyg.GCNConv(6, 4)
    whole = model(data.x, data.edge_index)
    batch = next(iter(loader_of(data, transform=loops)))
    assert off(scaled(model)(batch.x, batch.edge_index), whole) < 1e-5


@pytest.mark.parametrize("aggr", ["max", "median", "std"])
def test_what_can_be_scaled_is_and_the_rest_is_named(aggr):
    torch.manual_seed(0)
    model, data = scale_messages(Mixed(aggr)), the_data()
    loader = loader_of(data, 3, hops=2, method="bs", shuffle=True)
    with pytest.warns(UserWarning, match=r"layer 'two' \(SAGEConv\) stays as PyG has it.*aggr='mean'") as said:
        loader.learn(model)
        for _ in range(3):
            for batch in loader:
                model(batch.x, batch.edge_index).sum().backward()
        loader.state_dict()
    assert len(said) == 1
    assert not propagate_of(model.one).reading.left_alone and propagate_of(model.two).reading.left_alone
    learnt = loader.sampler.policy.log_weight
    assert learnt[0].any() and not learnt[1].any()  # draws of the hop that is left alone stay uniform


def test_a_weighted_mean_is_right_without_advice():
    data = the_data()
    data.edge_weight = edge_values(data)
    make = lambda: pyg.GraphConv(6, 4, aggr="mean")  # noqa: E731
    assert at_all_neighbours(make, weigh, data)[0] < 1e-5
    assert (ours := bias(make, weigh, data=data)).value < 0.05 and ours.high < 0.15


# --- which batch ------------------------------------------------------------------------------------------------------


def test_batches_are_found_by_their_tensors_and_not_by_their_turn():
    torch.manual_seed(0)
    data, model = the_data(), pyg.GCNConv(6, 4)
    whole = model(data.x, data.edge_index)
    one, two = loader_of(data, shuffle=True), loader_of(data, batch_size=4, shuffle=True)
    for loader in (one, two):
        loader.learn(model)
    kept = [*list(one), *list(two), next(iter(one))]
    for batch in reversed(kept):
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        assert torch.allclose(out, whole[batch.n_id[: batch.batch_size]], atol=1e-5)
    for a, b in zip(one, two, strict=False):
        for batch in (b, a):
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            assert torch.allclose(out, whole[batch.n_id[: batch.batch_size]], atol=1e-5)


def test_batches_of_a_list_teach_too():
    data, model = the_data(), pyg.SAGEConv(6, 4)
    loader = loader_of(data, 3, method="bs", batch_size=5)
    loader.learn(model)
    for batch in list(loader):
        model(batch.x, batch.edge_index)
    loader.state_dict()
    assert loader.sampler.policy.log_weight.any()


def test_a_model_in_evaluation_mode_is_scaled_and_teaches_if_it_trains():
    torch.manual_seed(0)
    data, model = the_data(), pyg.GCNConv(6, 4).eval()
    whole = model(data.x, data.edge_index)
    loader = loader_of(data, method="bs")
    loader.learn(model)
    with torch.no_grad():
        for batch in loader:
            assert off(model(batch.x, batch.edge_index), whole) < 1e-5
    loader = loader_of(data, 3, method="bs")
    loader.learn(model)
    for batch in loader:
        model(batch.x, batch.edge_index)
    loader.state_dict()
    assert not loader.sampler.policy.log_weight.any()
    for batch in loader:
        model(batch.x, batch.edge_index).sum().backward()
    loader.state_dict()
    assert loader.sampler.policy.log_weight.any()


def test_a_sparse_matrix_is_read_as_edges():
    torch.manual_seed(0)
    data = the_data()
    data.edge_index = torch.unique(data.edge_index, dim=1)  # a matrix has no parallel edges
    for make in (lambda: pyg.GCNConv(6, 4), lambda: pyg.SAGEConv(6, 4), lambda: pyg.GINConv(nn.Linear(6, 4))):
        model = make()
        batch = next(iter(loader_of(data, 3)))
        row, col = batch.edge_index
        n = batch.num_nodes
        adj = torch.sparse_coo_tensor(torch.stack([col, row]), torch.ones(len(row)), (n, n)).coalesce()
        want = scaled(model)(batch.x, batch.edge_index)
        assert torch.allclose(model(batch.x, adj.to_sparse_csr()), want, atol=1e-5)


# --- torch.compile (scripts of all kinds: pyg/test_pyg_scripts.py) ---------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    return pyg.GraphSAGE(6, 8, 2, 3)


def test_a_model_compiled_in_one_piece_is_told_how():
    model = scale_messages(net())
    batch = next(iter(loader_of(the_data(), 3, hops=2)))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(batch.x, batch.edge_index)


# --- what stays behind ----------------------------------------------------------------------------------------------


def test_copies_and_saved_models_carry_no_data():
    data = the_data()
    data.x = torch.randn(NODES, 6).repeat(1, 1)
    model = net()
    plain = io.BytesIO()
    torch.save(model, plain)
    loader = loader_of(data, 3, hops=2, estimator="snapshot")
    loader.learn(model)
    for batch in loader:
        model(batch.x, batch.edge_index).sum().backward()
    model.zero_grad()
    saved = io.BytesIO()
    torch.save(model, saved)
    assert saved.tell() < plain.tell() + 3000
    saved.seek(0)
    for other in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        assert torch.equal(other(batch.x, batch.edge_index)[:1].isfinite(), torch.ones(1, 3, dtype=torch.bool))
        ours = propagate_of(other.convs[0])
        assert ours.conv is other.convs[0] and ours.memory is None and ours.call is None
        assert torch.equal(other.eval()(data.x, data.edge_index), model.eval()(data.x, data.edge_index))


def test_a_loader_per_epoch_leaves_nothing_behind():
    data, model = the_data(), net()
    hooks = []
    for _ in range(4):
        loader = loader_of(data, 3, hops=2, estimator="snapshot")
        loader.learn(model)
        for batch in loader:
            model(batch.x, batch.edge_index).sum().backward()
        modules = list(model.modules())
        hooks.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules))
    assert len(set(hooks)) == 1
    watched = [__import__("weakref").ref(loader._memory), __import__("weakref").ref(loader)]
    del loader, batch
    gc.collect()
    assert [w() for w in watched] == [None, None] and batches.in_use() <= 1


def test_an_interrupted_step_leaves_the_model_as_it_was():
    data, model = the_data(), net()
    loader = loader_of(data, 3, hops=2, estimator="snapshot")
    loader.learn(model)

    class Stop(KeyboardInterrupt):
        pass

    def stop(*args):
        raise Stop

    handle = model.convs[1].register_message_forward_hook(stop)
    with pytest.raises(Stop):
        for batch in loader:
            model(batch.x, batch.edge_index)
    handle.remove()
    assert all(not {"propagate", "aggregate", "edge_updater"} & m.__dict__.keys() for m in model.convs)
    whole = model.eval()(data.x, data.edge_index)
    assert torch.allclose(inference(model, data), whole, atol=1e-5)


# --- sentences --------------------------------------------------------------------------------------------------------


def test_a_model_that_sums_by_hand_is_told_so():
    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.lin = pyg.SAGEConv(6, 4), nn.Linear(6, 4)

        def forward(self, x, edge_index):
            return torch.zeros(len(x), 4).index_add(0, edge_index[1], self.lin(x)[edge_index[0]])

    model, data = ByHand(), the_data()
    loader = loader_of(data, 3, batch_size=5)
    loader.learn(model)
    with pytest.warns(UserWarning, match="no layer of ByHand took the edges of the batch") as said:
        for batch in loader:
            model(batch.x, batch.edge_index)
    assert len(said) == 1


def test_a_plain_sum_that_blows_up_is_told_so_and_has_a_way_out():
    """A hub with 400 neighbours, 4 drawn: the sum of the whole graph is a hundred times that of the sample."""
    edges = torch.stack([torch.arange(1, 401), torch.zeros(400, dtype=torch.long)])
    data = Data(x=torch.rand(401, 6), edge_index=edges)

    def run(sums, method="graphsage"):
        model = pyg.GINConv(nn.Identity())
        loader = AdaptiveNeighborLoader(data, [4], [0], method=method, estimator="plain", replace=False)
        batch = next(iter(loader))
        plain = model(batch.x, batch.edge_index)
        return plain[0], scale_messages(model, sums=sums)(batch.x, batch.edge_index)[0]

    with pytest.warns(UserWarning, match="GINConv sums its neighbours.*sums='whole'") as said:
        plain, auto = run("auto")
    assert [w.filename for w in said] == [__file__]  # at the line of the script
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sums, size in (("drawn", 1.0), ("whole", 100.0)):
            plain, out = run(sums)
            assert float(out.sum() - data.x[0].sum()) == pytest.approx(size * float(plain.sum() - data.x[0].sum()))
    assert torch.allclose(auto, run("drawn")[1], atol=1e-4)  # uniform draws: as the script had it


@pytest.mark.parametrize("estimator", ["plain", "snapshot", "history"])
def test_sums_at_the_size_of_the_drawn(estimator):
    """k / n of what the sum over the whole graph is estimated to be. A pass, with sums of another size, is not used."""
    torch.manual_seed(0)
    data, model = the_data(), scale_messages(pyg.GIN(6, 8, 2, 4), sums="drawn")
    loader = loader_of(data, 2, hops=2, estimator=estimator)
    loader.learn(model)
    many = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
    sent = {conv: [] for conv in model.convs}
    for conv in model.convs:
        conv.register_forward_pre_hook(lambda conv, args: sent[conv].append(args[0]))
        conv.nn.register_forward_pre_hook(lambda nn, args, conv=conv: sent[conv].append(args[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a history is of no use here
        for _ in range(2):
            for batch in loader:
                model(batch.x, batch.edge_index)
    here = torch.bincount(batch.edge_index[1], minlength=batch.num_nodes)
    share = (here / many[batch.n_id].clamp(min=1)).unsqueeze(1)
    for conv in model.convs:
        x, own = sent[conv][-2:]
        messages = x[batch.edge_index[0]] * batch.scale.unsqueeze(1)
        want = x + share * torch.zeros_like(x).index_add(0, batch.edge_index[1], messages)
        assert off(own, want) < 1e-5


def test_normalised_weights_are_no_large_sums():
    """A hub with 400 neighbours of weight 1/400."""
    edges = torch.stack([torch.arange(1, 401), torch.zeros(400, dtype=torch.long)])
    data = Data(x=torch.rand(401, 6), edge_index=edges, edge_weight=torch.full((400,), 1 / 400))
    model = scale_messages(pyg.GraphConv(6, 4))
    for batch in AdaptiveNeighborLoader(data, [4], [0], method="graphsage", estimator="plain", replace=False):
        model(batch.x, batch.edge_index, batch.edge_weight)
    assert propagate_of(model).sums_as_drawn is False


def test_a_model_of_many_sums_says_it_once():
    hub = torch.stack([torch.arange(1, 401), torch.zeros(400, dtype=torch.long)])
    data = Data(x=torch.rand(401, 6), edge_index=torch.cat([hub, hub.flip(0)], 1))
    loader = AdaptiveNeighborLoader(data, [4, 4], [0], method="graphsage", estimator="plain")
    model = scale_messages(pyg.GIN(6, 8, 2, 3))
    with pytest.warns(UserWarning, match="sums its neighbours") as said:
        for _ in range(2):
            for batch in loader:
                model(batch.x, batch.edge_index)
    assert len(said) == 1


def test_a_batch_norm_inside_a_layer_and_a_layer_used_twice_with_a_snapshot():
    """Tables are of what is sent and summed, so that what comes after the sum sees whole-graph sums."""
    torch.manual_seed(0)
    data = the_data()
    data.x = data.x * 20
    losses = {}
    for estimator in ("plain", "snapshot"):
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        model = pyg.GINConv(mlp)
        loader = AdaptiveNeighborLoader(data, [3], batch_size=20, estimator=estimator, shuffle=True)
        loader.learn(scale_messages(model, sums="drawn") if estimator == "plain" else model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        total = []
        for _ in range(2):
            for batch in loader:
                loss = F.cross_entropy(
                    model(batch.x, batch.edge_index)[: batch.batch_size], batch.y[: batch.batch_size]
                )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total.append(float(loss.detach()))
        losses[estimator] = sum(total) / len(total)
    assert losses["snapshot"] < 1.5 * losses["plain"] < 5
    model = SharedLayer()
    loader = loader_of(data, 2, hops=2, estimator="snapshot")
    loader.learn(model)
    whole = inference(model, data)
    assert len(loader._memory.forwards[propagate_of(model.conv)]) == 2
    for batch in loader:
        assert off(model(batch.x, batch.edge_index), whole) < 1e-5


def test_the_noise_dial():
    """f(x) + (1 - noise)(F' - f(x')): 0 is the snapshot, 1 the plain estimate, and between is between."""
    torch.manual_seed(0)
    data, model = the_data(), pyg.GCN(6, 8, 1, 4)
    outs = {}
    for noise in (0.0, 0.5, 1.0):
        loader = loader_of(data, 2, estimator="snapshot", noise=noise)
        loader.learn(model)
        whole = inference(model, data)
        for batch in loader:
            outs[noise] = model(batch.x, batch.edge_index)[:SEEDS].detach()
        loader.learn(None)
    for batch in loader_of(data, 2):
        plain = model(batch.x, batch.edge_index)[:SEEDS].detach()
    assert torch.allclose(outs[0.0], whole[:SEEDS], atol=1e-4) and torch.allclose(outs[1.0], plain, atol=1e-4)
    assert torch.allclose(outs[0.5], (outs[0.0] + outs[1.0]) / 2, atol=1e-4) and off(plain, whole) > 0.05


def test_the_noise_dial_is_an_option_and_may_be_turned():
    data, model = the_data(), pyg.GCN(6, 8, 1, 4)
    for bad in (-0.1, 1.5, "half", None, float("nan"), True):
        with pytest.raises(InputError, match=r"`noise` must be a number in \[0, 1\], got"):
            loader_of(data, noise=bad, estimator="snapshot")
    for kind in (loader_of, lambda d, **more: AdaptiveSampler(d, [3], estimator="plain", **more)):
        with pytest.raises(InputError, match=r"`noise` must be 0 where nothing is remembered .*, got 0\.5"):
            kind(data, noise=0.5)
    assert AdaptiveSampler(data, [3], noise=0.25).noise == 0.25
    loader = loader_of(data, 2, estimator="snapshot", noise=1)
    loader.learn(model)
    whole = inference(model, data)
    batch = next(iter(loader))
    assert off(model(batch.x, batch.edge_index), whole) > 0.05
    loader.noise = 0.0
    assert off(model(batch.x, batch.edge_index), whole) < 1e-5
    with pytest.raises(InputError, match="`noise` must be"):
        loader.noise = 2.0
    assert loader.noise == 0.0


def test_the_package_and_the_loader_agree_on_names():
    assert adahop.inference is inference
