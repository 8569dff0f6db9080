"""Histories behind the PyG loader: rows renewed by batches, sums over all neighbours read from them, no pass."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data
from torch_geometric.utils import degree, trim_to_layer

from adahop import InputError
from adahop.pyg import AdaptiveNeighborLoader, AdaptiveSampler, inference, scale_messages
from adahop.pyg.rows import NodeRows
from adahop.pyg.wrap import propagate_of
from adahop.storage import Files
from conftest import messy_edges


class ByDegree(pyg.MessagePassing):
    """A mean by degree, as tutorials write it."""

    def __init__(self, i, o):
        super().__init__(aggr="add")
        self.lin = nn.Linear(i, o)

    def forward(self, x, edge_index):
        norm = degree(edge_index[1], x.size(0)).clamp(min=1).reciprocal()[edge_index[1]]
        return self.propagate(edge_index, x=self.lin(x), norm=norm)

    def message(self, x_j, norm):
        return norm.view(-1, 1) * x_j


LAYERS = {
    "gcn": pyg.GCNConv,
    "sage": pyg.SAGEConv,
    "gin": lambda i, o: pyg.GINConv(nn.Sequential(nn.Linear(i, o), nn.Tanh())),
    "graph": pyg.GraphConv,
    "gat": lambda i, o: pyg.GATConv(i, o, dropout=0.4),
    "gatv2": lambda i, o: pyg.GATv2Conv(i, o, edge_dim=2),
    "transformer": lambda i, o: pyg.TransformerConv(i, o, edge_dim=2),
    "tag": lambda i, o: pyg.TAGConv(i, o, K=2),
    "tutorial": ByDegree,
}
EDGES = ("gatv2", "transformer")  # take the data's edge_attr
FOUR = ("gcn", "sage", "gin", "gat")


class Net(nn.Module):
    def __init__(self, kind: str, dropout: float = 0.0, norm: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = LAYERS[kind](4, 8), LAYERS[kind](8, 3)
        self.kind, self.dropout = kind, dropout
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x, edge_index, edge_attr):
        more = {"edge_attr": edge_attr} if self.kind in EDGES else {}
        x = F.dropout(torch.relu(self.norm(self.one(x, edge_index, **more))), self.dropout, self.training)
        return self.two(x, edge_index, **more)


def the_data() -> Data:
    edge_index = messy_edges()[0]
    g = torch.Generator().manual_seed(4)
    attr, x = torch.randn(edge_index.shape[1], 2, generator=g), torch.randn(60, 4, generator=g)
    weight = torch.rand(edge_index.shape[1], generator=g) + 0.5
    return Data(x=x, edge_index=edge_index, edge_attr=attr, own=weight, y=torch.arange(60) % 3)


def loader_of(data: Data, k: int, model: nn.Module, hops: int = 2, **more) -> AdaptiveNeighborLoader:
    more = {"batch_size": 20, "shuffle": True, "seed": 3, "history_refresh": 0, **more}
    loader = AdaptiveNeighborLoader(data, [k] * hops, estimator="history", **more)
    loader.learn(scale_messages(model))
    return loader


def passes_of(loader):
    return [p for forwards in loader._memory.forwards.values() for f in forwards for p in f.passes]


def shaken(loader, seed: int = 5, weight: float = 0.8) -> None:
    """Any state of the memory: rows of noise, trusted all the same."""
    memory, g = loader._memory, torch.Generator().manual_seed(seed)
    memory.write_pending()
    for forwards in memory.forwards.values():
        for history in (p for f in forwards for p in (*f.passes, *f.updates)):
            for rows in history.rows.values():
                rows.write(torch.arange(60), torch.randn(60, *rows.shape, generator=g))
            history.dots = [weight, 1.0]


def seen(loader, model, data) -> None:
    """Layers are known after a batch."""
    steps = iter(loader)
    batch = next(steps)
    model(batch.x, batch.edge_index, batch.edge_attr)
    next(steps)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8], ids=["single", "half", "8-bit"])
def test_with_every_neighbour_it_is_the_whole_graph(kind, dtype):
    """Whatever the memory holds, in whatever precision: F and f are of the same rows, so they differ by nothing."""
    if dtype != torch.float32 and kind not in FOUR:
        pytest.skip("precision is tried on four")
    data, model = the_data(), Net(kind).eval()
    loader = loader_of(data, -1, model, history_dtype=dtype, hops=4 if kind == "tag" else 2)
    seen(loader, model, data)
    exact, used = inference(model, data), 0
    for i, batch in enumerate(loader):
        shaken(loader, i)
        out = model(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
        torch.testing.assert_close(out, exact[batch.n_id[: batch.batch_size]], atol=1e-5, rtol=1e-5)
        used += loader._memory.spent["read"] > 0
    assert used == 3 and not any(f.why for fs in loader._memory.forwards.values() for f in fs)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("gcn", torch.int8), *((kind, torch.float32) for kind in ("gcn", "sage", "gin", "tutorial"))]
)
def test_right_on_average_whatever_is_remembered(kind, dtype):
    """One layer, two of many neighbours, rows of noise. 5 standard errors in each of 180 numbers: by chance once in
    10,000 such tests; the seed is fixed.
    """
    data = the_data()
    torch.manual_seed(0)
    conv = pyg.GINConv(nn.Linear(4, 3)) if kind == "gin" else LAYERS[kind](4, 3)  # nothing but a sum
    model = pyg.Sequential("x, edge_index", [(nn.Linear(4, 4), "x -> x"), (conv, "x, edge_index -> x")])
    loader = loader_of(data, 2, model, 1, history_dtype=dtype, batch_size=60, shuffle=False)
    for batch in loader:
        model(batch.x, batch.edge_index)
    shaken(loader)
    state = loader._memory.state()
    exact, outs = inference(model, data), []
    assert passes_of(loader)[0].rows
    kept = copy.deepcopy(state)
    with torch.no_grad():
        for _ in range(100):
            loader._memory.restore(kept)  # the same state, another draw
            outs += [model(b.x, b.edge_index) for b in loader]
            loader._memory._pending.clear()
    got = torch.stack(outs)
    plain = got.var(0).mean()
    assert plain > 1e-4  # noise was left to chance
    assert bool(((got.mean(0) - exact).abs() <= 5 * got.std(0) / 10 + 1e-5).all())


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat"])
def test_rows_that_are_up_to_date_leave_nothing_to_chance(kind):
    data, model = the_data(), Net(kind).eval()
    loader = loader_of(data, 2, model)
    seen(loader, model, data)
    exact = inference(model, data)  # heard: all rows are taken
    assert all(p.cv_weight == 1.0 for p in passes_of(loader))
    for batch in loader:
        out = model(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
        torch.testing.assert_close(out, exact[batch.n_id[: batch.batch_size]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", FOUR)
def test_the_oldest_are_renewed_in_turn(kind):
    """Parameters stand still: after three rounds over all nodes every row is what a pass would give."""
    data, model = the_data(), Net(kind)
    loader = loader_of(data, 2, model, history_refresh=25, input_nodes=torch.arange(5), batch_size=5)
    for _ in range(12):
        for batch in loader:
            model(batch.x, batch.edge_index, batch.edge_attr)
            loader._memory._pending.clear() if loader._memory.steps else None  # the renewal alone writes
    model.eval()
    exact = inference(model, data)
    again = loader_of(data, 2, copy.deepcopy(model))
    seen(again, model2 := again._memory.model, data)
    inference(model2.eval(), data)
    for a, b in zip(passes_of(loader), passes_of(again), strict=True):
        for name in a.rows:
            every = torch.arange(60)
            torch.testing.assert_close(a.rows[name].read(every), b.rows[name].read(every), atol=1e-4, rtol=1e-4)
    assert torch.isfinite(exact).all() and model.one.training is False


def test_variance_falls_as_rows_are_learnt():
    """A model in training, beside plain draws of the same number."""
    spread = {}
    for estimator in ("plain", "history"):
        data, model = the_data(), scale_messages(Net("gcn"))
        loader = AdaptiveNeighborLoader(data, [2, 2], batch_size=20, seed=1, estimator=estimator)
        loader.learn(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        errors = []
        for epoch in range(12):
            for batch in loader:
                out = model(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
                with torch.no_grad():
                    exact = copy.deepcopy(model).eval()(data.x, data.edge_index, data.edge_attr)
                if epoch > 3:
                    errors.append(float((out.detach() - exact[batch.n_id[: batch.batch_size]]).square().mean()))
                F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
                optimizer.step()
                optimizer.zero_grad()
        spread[estimator] = sum(errors) / len(errors)
    assert spread["history"] < 0.1 * spread["plain"]


def test_another_graph_of_the_same_size_renews_no_rows():
    """An evaluation counts as one of the whole graph by its edges, not by how many there are."""
    data, model = the_data(), Net("sage")
    loader = loader_of(data, 2, model)
    seen(loader, model, data)
    rows = [r for p in passes_of(loader) for r in p.rows.values()]
    before = [r.value.clone() for r in rows]
    model.eval()
    with torch.no_grad():
        model(torch.randn(60, 4), data.edge_index.flip(0), data.edge_attr)
        assert rows and all(torch.equal(r.value, old) for r, old in zip(rows, before, strict=True))
        model(data.x, data.edge_index, data.edge_attr)
    assert not any(torch.equal(r.value, old) for r, old in zip(rows, before, strict=True))


def test_dropout_is_found_and_averaged():
    data = the_data()
    for dropout, refresh in ((0.0, 10), (0.5, 10), (0.5, 0)):
        model = Net("gcn", dropout, norm=True)
        loader = loader_of(data, 2, model, history_refresh=refresh)
        torch.manual_seed(1)
        for _ in range(2):
            for batch in loader:
                model(batch.x, batch.edge_index, batch.edge_attr)
        assert [p.random for p in passes_of(loader)] == [False, dropout > 0]
        assert int(model.norm.num_batches_tracked) == 6 and model.training
    rows = NodeRows(2, (1,))
    for value in (1.0, 2.0):
        rows.write(torch.tensor([1]), torch.tensor([[value]]), 0.3)
    assert rows.value.flatten().tolist() == [0.0, pytest.approx(1.3)]


def test_layers_side_by_side_are_of_one_level():
    data = the_data()

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c, self.d = (LAYERS["gcn"](4, 4) for _ in range(4))

        def forward(self, x, edge_index):
            x = self.a(x, edge_index) + self.b(x, edge_index)
            return self.c(x.relu(), edge_index) + self.d(x, edge_index)

    model = Two()
    loader = loader_of(data, -1, model)
    for batch in loader:
        model(batch.x, batch.edge_index)
    assert [p.level for p in passes_of(loader)] == [0, 0, 1, 1]
    exact = inference(model, data)
    for batch in loader:
        shaken(loader)
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        torch.testing.assert_close(out, exact[batch.n_id[: batch.batch_size]], atol=1e-5, rtol=1e-5)


def test_a_layer_used_twice_has_two():
    data = the_data()

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv = pyg.GCNConv(4, 4)

        def forward(self, x, edge_index):
            return self.conv(self.conv(x, edge_index).relu(), edge_index)

    model = Shared()
    loader = loader_of(data, -1, model)
    for batch in loader:
        model(batch.x, batch.edge_index)
    assert [p.level for p in passes_of(loader)] == [0, 1] and len(
        loader._memory.forwards[propagate_of(model.conv)]
    ) == 2
    exact = inference(model, data)
    for batch in loader:
        shaken(loader)
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        torch.testing.assert_close(out, exact[batch.n_id[: batch.batch_size]], atol=1e-5, rtol=1e-5)


def test_edge_weights_of_the_data_and_of_a_layer_that_takes_none():
    data = the_data()

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two, self.three = pyg.GCNConv(4, 4), pyg.GraphConv(4, 4), pyg.SAGEConv(4, 3, aggr="sum")

        def forward(self, x, edge_index, own):
            x = self.two(self.one(x, edge_index, own).relu(), edge_index, own)
            return self.three(x.relu(), edge_index, edge_weight=own)

    model = Weighted()
    loader = loader_of(data, -1, model, 3)
    for batch in loader:
        model(batch.x, batch.edge_index, batch.own)
    with torch.no_grad():
        h = model.two(model.one(data.x, data.edge_index, data.own).relu(), data.edge_index, data.own).relu()
        src, dst = data.edge_index
        total = torch.zeros(60, 4).index_add_(0, dst, data.own.unsqueeze(1) * h[src])
        exact = model.three.lin_l(total) + model.three.lin_r(h)
    for batch in loader:
        shaken(loader)
        out = model(batch.x, batch.edge_index, batch.own)[: batch.batch_size]
        torch.testing.assert_close(out, exact[batch.n_id[: batch.batch_size]], atol=1e-4, rtol=1e-4)


def test_trimmed_layers_and_disjoint_trees():
    data = the_data()

    class Trim(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = pyg.GCNConv(4, 8), pyg.GCNConv(8, 3)

        def forward(self, x, edge_index, nodes=None, edges=None):
            for layer, conv in enumerate((self.one, self.two)):
                if nodes is not None:
                    x, edge_index, _ = trim_to_layer(layer, nodes, edges, x, edge_index, None)
                x = conv(x if layer == 0 else x.relu(), edge_index)
            return x

    for disjoint in (False, True):
        model = Trim()
        loader = loader_of(data, -1, model, disjoint=disjoint, history_refresh=10)
        exact = inference(model, data)
        for i, b in enumerate(x for _ in range(2) for x in loader):
            if i:
                shaken(loader)
            out = model(b.x, b.edge_index, b.num_sampled_nodes, b.num_sampled_edges)[: b.batch_size]
            torch.testing.assert_close(out, exact[b.n_id[: b.batch_size]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("why", ["edge values", "left alone", "weights", "drawn"])
def test_where_it_cannot_it_says_so_and_the_draws_stay_right(why):
    data = the_data()

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.edge = nn.Linear(2, 2)
            self.one = pyg.TransformerConv(4, 3, edge_dim=2) if why == "edge values" else pyg.GCNConv(4, 3)
            self.one = pyg.SAGEConv(4, 3, aggr="max") if why == "left alone" else self.one
            self.one = pyg.GraphConv(4, 3) if why == "drawn" else self.one

        def forward(self, x, edge_index, edge_attr):
            if why == "edge values":
                return self.one(x, edge_index, self.edge(edge_attr))
            if why == "weights":
                return self.one(x, edge_index, self.edge(edge_attr)[:, 0].exp())
            return self.one(x, edge_index)

    model = scale_messages(Odd(), sums="drawn" if why == "drawn" else "whole")
    loader = loader_of(data, -1, model, 1, history_refresh=10)
    exact = None if why in ("weights", "drawn") else inference(model, data)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            for b in loader:
                out = model(b.x, b.edge_index, b.edge_attr)[: b.batch_size]
                if exact is not None:
                    torch.testing.assert_close(out, exact[b.n_id[: b.batch_size]], atol=1e-5, rtol=1e-5)
    told = [str(w.message) for w in said if "history" in str(w.message)]
    assert len(told) == (0 if why == "left alone" else 1), told
    if told:
        assert "layer 'one'" in told[0] and "goes without a history" in told[0]
    assert loader._memory.refresh == 0


@pytest.mark.parametrize("kind", FOUR)
def test_gradients_are_those_of_plain_sums(kind):
    """With every neighbour: what is remembered has no part in the gradient."""
    data, grads = the_data(), []
    for estimator in ("history", "plain"):
        model = Net(kind)
        model.one.dropout = model.two.dropout = 0.0
        more = {"history_refresh": 0} if estimator == "history" else {}
        loader = AdaptiveNeighborLoader(data, [-1, -1], batch_size=60, estimator=estimator, seed=0, **more)
        loader.learn(scale_messages(model))
        for i, batch in enumerate(x for _ in range(2) for x in loader):
            if i and estimator == "history":
                shaken(loader)
            model.zero_grad()
            out = model(batch.x, batch.edge_index, batch.edge_attr)
            F.cross_entropy(out, batch.y).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def trained(loader, model, epochs, steps=None):
    optimizer, outs = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(epochs):
        for batch in loader:
            out = model(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
            optimizer.zero_grad()
            outs.append(out.detach().clone())
            if steps is not None and len(outs) == steps:
                return outs
    return outs


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["single", "8-bit"])
def test_a_run_goes_on_from_its_state(dtype):
    data, more = the_data(), {"history_refresh": 7, "history_dtype": dtype}
    model = Net("gcn")
    loader = loader_of(data, 2, model, **more)
    trained(loader, model, 2, 4)
    state, weights = copy.deepcopy(loader.state_dict()), copy.deepcopy(model.state_dict())
    rest = trained(loader, model, 1)
    assert len(rest) == 3  # another epoch: the generator of the cut one is gone
    again, other = Net("gcn"), loader_of(data, 2, Net("gcn"), **more)
    other.learn(None)
    again.load_state_dict(weights)
    other.load_state_dict(state)
    other.learn(scale_messages(again))
    assert other._memory.steps == 3 and other._memory.bytes == loader._memory.bytes
    torch.testing.assert_close(trained(other, again, 1), trained(*restored(data, state, weights, more), 1))
    wrong = loader_of(data, 2, pyg.GraphSAGE(4, 3, 1))
    wrong.learn(None)
    wrong.load_state_dict(state)
    wrong.learn(scale_messages(pyg.GraphSAGE(4, 3, 1)))  # of another model: nothing of it fits
    assert not wrong._memory.forwards


def restored(data, state, weights, more):
    """In files, and taken up twice."""
    model = Net("gcn")
    model.load_state_dict(weights)
    loader = loader_of(data, 2, model, **more)
    loader.load_state_dict(state)
    return loader, model


def test_a_run_cut_within_an_epoch_is_the_same_run():
    data, ways = the_data(), []
    for cut in (False, True):
        model = Net("sage")
        loader = loader_of(data, 2, model, history_refresh=7)
        optimizer, outs, steps = torch.optim.SGD(model.parameters(), 0.1), [], iter(loader)
        for i in range(3):
            if cut and i == 2:
                state = copy.deepcopy(loader.state_dict())
                loader = loader_of(data, 2, model, history_refresh=7)
                loader.load_state_dict(state)
                steps = iter(loader)
            batch = next(steps)
            out = model(batch.x, batch.edge_index, batch.edge_attr)[: batch.batch_size]
            F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
            optimizer.step()
            optimizer.zero_grad()
            outs.append(out.detach())
        ways.append(outs)
    torch.testing.assert_close(*ways, atol=0, rtol=0)


def test_a_checkpointed_part_sees_the_same_rows_twice():
    from torch.utils.checkpoint import checkpoint

    data, grads = the_data(), []
    for twice in (False, True):
        model = Net("gcn")
        loader = loader_of(data, 2, model)
        for batch in (x for _ in range(2) for x in loader):
            model.zero_grad()
            if twice:
                out = checkpoint(model, batch.x, batch.edge_index, batch.edge_attr, use_reentrant=False)
            else:
                out = model(batch.x, batch.edge_index, batch.edge_attr)
            out[: batch.batch_size].square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*grads)


def test_in_files(tmp_path):
    data, outs = the_data(), []
    for storage in (None, Files(tmp_path, least=1)):
        model = Net("gcn")
        loader = loader_of(data, 2, model, history_refresh=5, history_dtype=torch.float16)
        if storage is not None:
            loader._memory.storage = storage
        outs.append(trained(loader, model, 2))
    torch.testing.assert_close(*outs, atol=0, rtol=0)
    loader = loader_of(data, 2, Net("gcn"), history_dir=tmp_path / "rows")
    assert isinstance(loader._memory.storage, Files) and (tmp_path / "rows").is_dir()


def test_rows_in_8_bits_are_within_half_a_step():
    g = torch.Generator().manual_seed(0)
    value, every = torch.randn(50, 3, 4, generator=g), torch.arange(50)
    for dtype, far in ((torch.float32, 0.0), (torch.float16, 1e-3), (torch.int8, 0.5 / 127 + 1e-6)):
        rows = NodeRows(50, (3, 4), dtype)
        rows.write(every, value)
        largest = value.flatten(1).abs().amax(1).view(-1, 1, 1)
        assert bool(((rows.read(every) - value).abs() <= far * largest).all())
        assert rows.bytes == {torch.float32: 2400, torch.float16: 1200, torch.int8: 800}[dtype]
        src, dst, coef = torch.randint(50, (200,), generator=g), torch.arange(200) // 10, torch.rand(200, generator=g)
        want = torch.zeros(20, 12).index_add_(0, dst, rows.flat(src) * coef.unsqueeze(1))
        torch.testing.assert_close(rows.sums(src, dst, coef, torch.arange(21) * 10), want)


def test_the_log_says_which_one_runs_and_what_it_costs(caplog):
    data, model = the_data(), Net("sage")
    loader = loader_of(data, 2, model, history_refresh=5, history_dtype=torch.int8)
    with caplog.at_level(logging.INFO, "adahop"):
        trained(loader, model, 2)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2 and all("history, without a pass over the graph" in line for line in lines)
    assert "MiB of int8 rows in memory" in lines[1] and "ms to read" in lines[1] and "ms to renew the 5" in lines[1]
    cost = loader.memory_cost()
    assert cost["bytes"] == 60 * (8 + 4) + 60 * 4 * 4 and cost["read_ms"] > 0 and cost["renew_ms"] > 0
    caplog.clear()
    snapshot = AdaptiveNeighborLoader(data, [2, 2], batch_size=20)
    snapshot.learn(model)
    with caplog.at_level(logging.INFO, "adahop"):
        trained(snapshot, model, 1)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "snapshot, a pass over the graph per epoch" in line and "MiB" in line
    assert snapshot.memory_cost()["bytes"] > 0 and snapshot.memory_cost()["pass_ms"] > 0
    plain = AdaptiveNeighborLoader(data, [2, 2], estimator="plain")
    assert plain.memory_cost() == {"bytes": 0.0}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"estimator": "memory"}, "`estimator` must be one of plain, snapshot, history, got 'memory'"),
        ({"history_dtype": torch.int16}, "`history_dtype` must be one of"),
        ({"history_dtype": "half"}, "`history_dtype` must be one of"),
        ({"history_refresh": -1}, "`history_refresh` must be"),
        ({"history_refresh": 2.5}, "`history_refresh` must be"),
        ({"history_dir": 3}, "`history_dir` must be a folder, got int"),
        ({"estimator": "plain", "history_refresh": 5}, "`history_refresh` must be left out unless estimator='history'"),
        ({"estimator": "snapshot", "history_dtype": torch.int8}, "`history_dtype` must be left out unless"),
    ],
)
def test_bad_input(more, said):
    with pytest.raises(InputError, match=said.replace("(", r"\(")):
        AdaptiveNeighborLoader(the_data(), [2, 2], **{"estimator": "history", **more})


def test_behind_pyg_s_node_loader():
    from torch_geometric.loader import NodeLoader

    data, model = the_data(), Net("gcn")
    sampler = AdaptiveSampler(data, [2, 2], estimator="history", history_refresh=5)
    sampler.learn(scale_messages(model))
    for _ in range(2):
        for batch in NodeLoader(data, sampler, transform=sampler.attach, batch_size=20):
            model(batch.x, batch.edge_index, batch.edge_attr).sum().backward()
    assert sampler._memory.steps == 5 and all(p.cv_weight > 0 for p in passes_of(sampler))
