"""Models that change the edges of a batch, or weigh them, before or within a layer, with every estimator."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import add_self_loops, degree, dropout_edge, softmax

from adahop import InputError
from adahop.pyg import AdaptiveNeighborLoader, inference
from conftest import messy_edges

ESTIMATORS = ("plain", "snapshot", "history")
SEEDS = 12

pytestmark = pytest.mark.filterwarnings("ignore:.*(without a history|not renewed|no snapshot)")


def the_data() -> Data:
    edge_index = messy_edges()[0]
    g = torch.Generator().manual_seed(4)
    x, values = torch.randn(60, 4, generator=g), torch.rand(edge_index.shape[1], 4, generator=g) + 0.2
    attr, one, weight = values.split([2, 1, 1], 1)
    return Data(
        x=x, edge_index=edge_index, edge_attr=attr.clone(), one=one.clone(), edge_weight=weight.flatten().clone()
    )


def loader_of(data: Data, estimator: str, model: nn.Module, k: int = -1) -> AdaptiveNeighborLoader:
    loader = AdaptiveNeighborLoader(data, [k], torch.arange(SEEDS), batch_size=SEEDS, estimator=estimator, seed=1)
    loader.learn(model)
    return loader


def move(model: nn.Module) -> None:
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)), alpha=0.2)


def outs(data: Data, model: nn.Module, estimator: str, call, k: int = -1) -> list[torch.Tensor]:
    """What a model that is evaluated once, and changes since, gives for the seeds of four batches."""
    loader, found = loader_of(data, estimator, model, k), []
    with torch.no_grad():
        call(model.eval(), data)
        model.train()
        for i in range(4):
            torch.manual_seed(i)
            found += [call(model, b)[:SEEDS] for b in loader]
            move(model)
    return found


def each(data: Data, model: nn.Module, call) -> list[torch.Tensor]:
    """The same of the model on the whole graph."""
    found = []
    with torch.no_grad():
        for _ in range(4):
            found.append(call(model, data)[:SEEDS])
            move(model)
    return found


class Own(pyg.MessagePassing):
    """A sum that leaves out edges within the layer."""

    def __init__(self):
        super().__init__(aggr="sum")
        self.lin = nn.Linear(4, 3)

    def forward(self, x, edge_index):
        kept = dropout_edge(edge_index, training=self.training)[0]
        return self.propagate(kept, x=self.lin(x))

    def message(self, x_j):
        return x_j


class Before(nn.Module):
    """A layer that is given other edges than the model."""

    def __init__(self, change):
        super().__init__()
        self.conv, self.change = pyg.SAGEConv(4, 3, aggr="sum"), change

    def forward(self, x, edge_index):
        return self.conv(x, self.change(self, x, edge_index))


CHANGES = {
    "self-loops": lambda m, x, e: add_self_loops(e, num_nodes=len(x))[0],
    "some": lambda m, x, e: e[:, x[e[0], 0] > 0],
    "in another order": lambda m, x, e: e[:, e[0].argsort(stable=True)],
}
DROPPED = {
    "before": lambda: Before(lambda m, x, e: dropout_edge(e, training=m.training)[0]),
    "within": Own,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_other_edges_are_summed_as_they_are(estimator, change):
    """Sums over all neighbours of the data are no control variate for those over other edges."""
    torch.manual_seed(0)
    data, model = the_data(), Before(CHANGES[change])
    plain = Before(CHANGES[change])
    plain.load_state_dict(model.state_dict())
    call = lambda m, d: m(d.x, d.edge_index)  # noqa: E731
    for got, want in zip(outs(data, model, estimator, call), each(data, plain, call), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_layer_of_two_lists_of_edges(estimator):
    torch.manual_seed(0)
    data, model = the_data(), pyg.SignedConv(4, 3, first_aggr=True)
    plain = pyg.SignedConv(4, 3, first_aggr=True)
    plain.load_state_dict(model.state_dict())

    def call(m, d):
        first = d.edge_attr[:, 0] < 0.7
        return m(d.x, d.edge_index[:, first], d.edge_index[:, ~first])

    for got, want in zip(outs(data, model, estimator, call), each(data, plain, call), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("where", DROPPED)
@pytest.mark.parametrize("estimator", ["snapshot", "history"])
def test_dropped_edges_are_missing_from_the_sum(estimator, where):
    """As in PyG: a control variate would put them back."""
    data, found = the_data(), []
    for which in ("plain", estimator):
        torch.manual_seed(0)
        found.append(outs(data, DROPPED[where](), which, lambda m, d: m(d.x, d.edge_index), k=3))
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_layer_that_sums_part_by_part(estimator):
    torch.manual_seed(0)
    data, model = the_data(), pyg.GCNConv(4, 6, decomposed_layers=2)
    plain = pyg.GCNConv(4, 6)
    plain.load_state_dict(model.state_dict())
    call = lambda m, d: m(d.x, d.edge_index)  # noqa: E731
    for got, want in zip(outs(data, model, estimator, call), each(data, plain, call), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_inference_keeps_the_parts():
    class Both(pyg.MessagePassing):
        def __init__(self):
            super().__init__(aggr="sum", decomposed_layers=2)

        def forward(self, x, edge_index):
            return self.propagate(edge_index, x=x)

        def message(self, x_i, x_j):
            return x_i * x_j

    data, conv = the_data(), Both()
    want, own = conv(data.x, data.edge_index), conv.__dict__["propagate"]
    torch.testing.assert_close(inference(conv, data, batch_size=7), want)
    assert conv.__dict__["propagate"] is own


# --- edge weights -----------------------------------------------------------------------------------------------------

WEIGHTED = {
    "gcn": lambda: pyg.GCNConv(4, 3),
    "cheb": lambda: pyg.ChebConv(4, 3, 2),
    "graph": lambda: pyg.GraphConv(4, 3),
    "sg": lambda: pyg.SGConv(4, 3),
}


def check_weights(kind: str, estimator: str, weight) -> None:
    torch.manual_seed(0)
    data, model, plain = the_data(), WEIGHTED[kind](), WEIGHTED[kind]()
    plain.load_state_dict(model.state_dict())
    call = lambda m, d: m(d.x, d.edge_index, weight(d))  # noqa: E731
    for got, want in zip(outs(data, model, estimator, call), each(data, plain, call), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", WEIGHTED)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_weights_of_the_data(estimator, kind):
    """Those of self-loops too, which some layers take out before they form degrees."""
    check_weights(kind, estimator, lambda d: d.edge_weight)


@pytest.mark.parametrize("kind", ["gcn", "graph", "sg"])
@pytest.mark.parametrize("form", ["column", "flat"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_weights_in_a_column(estimator, form, kind):
    check_weights(kind, estimator, lambda d: d.one if form == "column" else d.one.squeeze(1))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("made", ["doubled", "one of several"])
def test_weights_that_are_made_for_the_batch(made, estimator):
    """They are no attribute of the data, so that no sum over the data has them."""
    check_weights("graph", estimator, lambda d: 2 * d.edge_weight if made == "doubled" else d.edge_attr[:, 1])


def test_degrees_by_one_of_several_attributes_are_estimated():
    torch.manual_seed(0)
    data, model = the_data(), pyg.GCNConv(4, 3)
    whole = model(data.x, data.edge_index, data.edge_attr[:, 0])[:SEEDS].detach()
    for b in loader_of(data, "plain", model):
        out = model(b.x, b.edge_index, b.edge_attr[:, 0])[:SEEDS].detach()
    assert float((out - whole).norm() / whole.norm()) < 0.2


def test_inference_does_not_leave_out_what_training_computed():
    data, model = the_data(), pyg.GraphConv(4, 3)
    for b in loader_of(data, "plain", model):
        model(b.x, b.edge_index, 2 * b.edge_weight)
    with pytest.raises(InputError, match="`edge_weight` must be given by name, as training computed it"):
        inference(model, data)
    want = model(data.x, data.edge_index, 2 * data.edge_weight)
    torch.testing.assert_close(inference(model, data, edge_weight=2 * data.edge_weight), want)


def test_a_layer_that_cannot_run_on_all_neighbours_goes_without_a_history():
    """It changes its sums in place."""
    torch.manual_seed(0)
    data, model, plain = the_data(), pyg.LabelPropagation(2, 0.5), pyg.LabelPropagation(2, 0.5)
    call = lambda m, d: m(d.x.softmax(1), d.edge_index, edge_weight=d.edge_weight)  # noqa: E731
    loader = AdaptiveNeighborLoader(
        data, [-1, -1], torch.arange(SEEDS), batch_size=SEEDS, estimator="history", seed=1, history_refresh=0
    )
    loader.learn(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            for b in loader:
                torch.testing.assert_close(call(model, b)[:SEEDS], call(plain, data)[:SEEDS])
    assert any("goes without a history: it cannot run on all neighbours" in str(w.message) for w in said)


# --- layers that make, or read, more than `message` is passed ---------------------------------------------------------


class Update(pyg.MessagePassing):
    """`update` reads nodes beside the sums, as tutorials write it."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.lin, self.up = nn.Linear(4, 3), nn.Linear(6, 2)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j):
        return x_j

    def update(self, aggr_out, x):
        return self.up(torch.cat([aggr_out, x], 1))


class UpdateByDegree(pyg.MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(4, 3)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x), many=degree(edge_index[1], len(x)))

    def message(self, x_j):
        return x_j

    def update(self, aggr_out, many):
        return aggr_out / many.clamp(min=1).view(-1, 1)


class ReadsNodes(pyg.MessagePassing):
    """`message` looks up rows of nodes by itself."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(4, 3)

    def forward(self, x, edge_index):
        share = 1 / degree(edge_index[1], len(x)).clamp(min=1)
        return self.propagate(edge_index, x=self.lin(x), share=share)

    def message(self, x_j, share, index):
        return x_j * share[index].view(-1, 1)


class Vector(pyg.MessagePassing):
    """One parameter for all messages."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.lin, self.by = nn.Linear(4, 3), nn.Parameter(torch.rand(3))

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.lin(x), by=self.by)

    def message(self, x_j, by):
        return x_j * by


class HalfGate(pyg.MessagePassing):
    """What an edge update gives is changed before messages are passed."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin = nn.Linear(4, 3)

    def forward(self, x, edge_index):
        h = self.lin(x)
        return self.propagate(edge_index, x=h, gate=0.5 * self.edge_updater(edge_index, h=h))

    def edge_update(self, h_i, h_j):
        return torch.sigmoid((h_i * h_j).sum(-1))

    def message(self, x_j, gate):
        return gate.view(-1, 1) * x_j


@pytest.mark.parametrize("kind", [Update, UpdateByDegree, ReadsNodes, Vector, HalfGate])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_layers_that_read_more_than_the_ends_of_edges(estimator, kind):
    torch.manual_seed(0)
    data, model, plain = the_data(), kind(), kind()
    plain.load_state_dict(model.state_dict())
    call = lambda m, d: m(d.x, d.edge_index)  # noqa: E731
    for got, want in zip(outs(data, model, estimator, call), each(data, plain, call), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


class Learned(nn.Module):
    """Edge weights by a layer of the model."""

    def __init__(self, conv):
        super().__init__()
        self.conv, self.edge = conv, nn.Linear(2, 1)

    def forward(self, x, edge_index, edge_attr):
        return self.conv(x, edge_index, self.edge(edge_attr).sigmoid().view(-1))


class Attention(pyg.MessagePassing):
    """A softmax before messages are passed."""

    def __init__(self, dropout=0.0):
        super().__init__(aggr="add")
        self.lin, self.score, self.dropout = nn.Linear(4, 3), nn.Linear(3, 1), dropout

    def forward(self, x, edge_index, edge_attr):
        h, (src, dst) = self.lin(x), edge_index
        alpha = softmax(self.score(h[src]).view(-1) + self.score(h[dst]).view(-1), dst, num_nodes=len(x))
        return self.propagate(edge_index, x=h, alpha=F.dropout(alpha, self.dropout, self.training))

    def message(self, x_j, alpha):
        return alpha.view(-1, 1) * x_j


MADE = {
    "gcn": lambda: Learned(pyg.GCNConv(4, 3)),
    "sg": lambda: Learned(pyg.SGConv(4, 3)),
    "attention": Attention,
    "attention, dropout": lambda: Attention(0.4),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_snapshot_of_edge_values_with_the_scale_in_them(kind):
    """Right after the pass, what is left of the error is that of normalisers."""
    data = the_data()

    def error(estimator: str) -> float:
        torch.manual_seed(0)
        model = MADE[kind]()
        loader, found = loader_of(data, estimator, model, k=3), []
        with torch.no_grad():
            whole = model.eval()(data.x, data.edge_index, data.edge_attr)[:SEEDS]
            model.train()
            for _ in range(150):
                found += [model(b.x, b.edge_index, b.edge_attr)[:SEEDS] for b in loader]
                if estimator == "snapshot":
                    loader._memory.fresh = True  # no pass of its own
        return float((torch.stack(found) - whole).norm(dim=(1, 2)).square().mean().sqrt() / whole.norm())

    remembered, plain = error("snapshot"), error("plain")
    assert remembered < (1.01 if kind == "attention, dropout" else 0.6) * plain


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["gcn", "graph"])
def test_evaluated_with_other_weights_than_trained(kind, weighted):
    """What the pass summed is then another sum."""
    torch.manual_seed(0)
    data, model, plain = the_data(), WEIGHTED[kind](), WEIGHTED[kind]()
    plain.load_state_dict(model.state_dict())
    loader = loader_of(data, "snapshot", model)
    weight = lambda d, yes: d.edge_weight if yes else None  # noqa: E731
    with torch.no_grad():
        for b in loader:
            model.eval()(data.x, data.edge_index, weight(data, weighted))
            model.train()
            out = model(b.x, b.edge_index, weight(b, not weighted))[:SEEDS]
        want = plain(data.x, data.edge_index, weight(data, not weighted))[:SEEDS]
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_another_graph_of_the_same_size_is_no_pass():
    torch.manual_seed(0)
    data, model, plain = the_data(), pyg.SAGEConv(4, 3), pyg.SAGEConv(4, 3)
    plain.load_state_dict(model.state_dict())
    loader = loader_of(data, "snapshot", model)
    with torch.no_grad():
        for b in loader:
            model.eval()(data.x, data.edge_index.flip(0))
            out = model.train()(b.x, b.edge_index)[:SEEDS]
        torch.testing.assert_close(out, plain(data.x, data.edge_index)[:SEEDS], atol=1e-5, rtol=1e-5)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_layer_that_keeps_its_first_edges_is_refused():
    """It would use those of the pass, or of the first batch, for all batches."""
    data = the_data()
    with pytest.raises(
        InputError, match="`cached` must be False in a layer that is given batches, got True in GCNConv"
    ):
        loader_of(data, "snapshot", pyg.GCNConv(4, 3, cached=True))


@pytest.mark.parametrize("both", [False, True])
def test_a_matrix_in_place_of_edges_is_refused(both):
    data = ToSparseTensor(remove_edge_index=not both)(Data(x=the_data().x, edge_index=the_data().edge_index))
    with pytest.raises(InputError, match="`data` must have its edges in `edge_index` alone, got an `adj_t`"):
        AdaptiveNeighborLoader(data, [3])
