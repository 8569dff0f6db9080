"""Sums without messages: the same numbers and gradients as with them, for the layers they are right for."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing

from adahop import ops
from adahop.pyg import AdaptiveNeighborLoader, batches, fused, inference, scale_messages
from adahop.pyg.wrap import propagate_of
from conftest import messy_edges

KINDS = {
    "gcn": lambda i, o: pyg.GCNConv(i, o),
    "gcn plain": lambda i, o: pyg.GCNConv(i, o, normalize=False, add_self_loops=False),
    "sage": lambda i, o: pyg.SAGEConv(i, o),
    "gin": lambda i, o: pyg.GINConv(nn.Linear(i, o)),
    "weighed graph": lambda i, o: pyg.GraphConv(i, o),
    "weighed gcn": lambda i, o: pyg.GCNConv(i, o),
    "graph mean": lambda i, o: pyg.GraphConv(i, o, aggr="mean"),
    "gat": lambda i, o: pyg.GATConv(i, o, heads=2, concat=False, dropout=0.3),
    "gatv2": lambda i, o: pyg.GATv2Conv(i, o),
    "transformer": lambda i, o: pyg.TransformerConv(i, o, dropout=0.3),
    "tag": lambda i, o: pyg.TAGConv(i, o, K=2),
}


def the_data() -> Data:
    g = torch.Generator().manual_seed(4)
    return Data(x=torch.randn(60, 4, generator=g), edge_index=messy_edges()[0], y=torch.arange(60) % 3)


class Two(nn.Module):
    """Two layers of a kind; a kind that is "weighed" takes edge weights that the model computes."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = KINDS[kind](4, 8), KINDS[kind](8, 3)
        self.weigh = nn.Linear(8, 1) if kind.startswith("weighed") else None

    def forward(self, x, edge_index):
        ends = x[edge_index].transpose(0, 1).flatten(1)
        more = () if self.weigh is None else (self.weigh(ends).sigmoid().squeeze(1),)
        return self.two(self.one(x, edge_index, *more).tanh(), edge_index, *more)


def trained(kind, estimator, by_messages, monkeypatch, disjoint=False):
    """Outputs, gradients and energies of six steps; the sums with messages where asked."""
    data, model, found = the_data(), Two(kind), []
    loader = AdaptiveNeighborLoader(
        data, [2, 2], batch_size=20, shuffle=True, seed=3, estimator=estimator, disjoint=disjoint
    )
    loader.learn(model)
    with monkeypatch.context() as patch:
        if by_messages:
            patch.setattr(fused, "source_rows", lambda call, kwargs: None)
        update = loader.sampler.update
        patch.setattr(loader.sampler, "update", lambda b, e: (found.append([t.clone() for t in e]), update(b, e)))
        for _ in range(2):
            for batch in loader:
                torch.manual_seed(5)
                out = model(batch.x, batch.edge_index)[: batch.batch_size]
                F.cross_entropy(out, batch.y[: batch.batch_size]).backward()
                found.append([out.detach(), *(p.grad.clone() for p in model.parameters())])
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad.clamp(-1, 1)
                        p.grad = None
    return found, model


@pytest.mark.filterwarnings("ignore:.* sums its neighbours")
@pytest.mark.parametrize("estimator", ["plain", "snapshot"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_with_messages(kind, estimator, monkeypatch):
    found, model = trained(kind, estimator, False, monkeypatch)
    plain, _ = trained(kind, estimator, True, monkeypatch)
    assert propagate_of(model.one).reading.row_argument == ("value" if kind == "transformer" else "x")
    assert len(found) == len(plain) >= 10
    for got, want in zip(found, plain, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_disjoint_trees(monkeypatch):
    found, plain = (trained("gat", "snapshot", way, monkeypatch, disjoint=True)[0] for way in (False, True))
    for got, want in zip(found, plain, strict=True):
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


class Own(MessagePassing):
    """A mean whose messages are what the subclass makes of x_j."""

    def __init__(self):
        super().__init__(aggr="mean")
        self.lin = nn.Linear(4, 3)

    def forward(self, x, edge_index):
        return self.lin(self.propagate(edge_index, x=x))


class Dropped(Own):
    def message(self, x_j):
        return F.dropout(x_j, 0.5, self.training)  # each entry by itself


class Bent(Own):
    def message(self, x_j):
        return x_j.relu()


class Both(Own):
    def message(self, x_i, x_j):
        return x_j - x_i


class Edged(Own):
    def message(self, x_j):
        return F.dropout(torch.ones_like(x_j[:, :1]), 0.5, self.training) * x_j  # one coefficient per edge


@pytest.mark.parametrize(("kind", "times"), [(Dropped, None), (Bent, None), (Both, None), (Own, "x"), (Edged, "x")])
def test_only_a_coefficient_times_x(kind, times):
    conv = kind()
    scale_messages(conv)
    batch = next(iter(AdaptiveNeighborLoader(the_data(), [2], batch_size=20)))
    conv(batch.x, batch.edge_index)
    assert propagate_of(conv).reading.row_argument == times


@pytest.mark.parametrize("kind", ["gcn", "gcn plain", "sage", "gat"])
def test_a_batch_is_let_go(kind):
    """What is found once for all layers of a batch holds none of its tensors."""
    gc.collect()
    before, model = batches.in_use(), Two(kind)
    loader = AdaptiveNeighborLoader(the_data(), [2, 2], batch_size=20)
    loader.learn(model)
    for batch in loader:
        model(batch.x, batch.edge_index).sum().backward()
    loader.learn(None)
    del batch
    gc.collect()
    assert batches.in_use() == before


def test_layers_that_use_other_edges_of_one_batch():
    """As many edges in another order: what is kept for one layer is not taken for the other."""
    conv = scale_messages(pyg.SAGEConv(4, 3))
    batch = next(iter(AdaptiveNeighborLoader(the_data(), [2, 2], batch_size=20)))
    conv(batch.x, batch.edge_index)
    first = conv(batch.x, batch.edge_index)
    torch.testing.assert_close(conv(batch.x, batch.edge_index.flip(1)), first)


def test_a_message_hook_sees_messages():
    conv, seen = pyg.SAGEConv(4, 3), []
    scale_messages(conv)
    batch = next(iter(AdaptiveNeighborLoader(the_data(), [2], batch_size=20)))
    conv(batch.x, batch.edge_index)
    conv.register_message_forward_hook(lambda conv, inputs, out: seen.append(out.shape))
    conv(batch.x, batch.edge_index)
    assert seen == [(batch.edge_index.shape[1], 4)]


def test_gradients_of_gradients():
    """As a gradient penalty asks for."""
    batch = next(iter(AdaptiveNeighborLoader(the_data(), [2], batch_size=20)))
    found = []
    for by_messages in (False, True):
        torch.manual_seed(0)
        conv = scale_messages(pyg.GATConv(4, 3))
        with pytest.MonkeyPatch.context() as patch:
            if by_messages:
                patch.setattr(fused, "source_rows", lambda call, kwargs: None)
            x = batch.x.clone().requires_grad_()
            out = conv(x, batch.edge_index)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), list(conv.parameters()), allow_unused=True))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("heads", [None, 3])
def test_operations_are_their_references(heads):
    g = torch.Generator().manual_seed(0)
    middle = () if heads is None else (heads,)
    h, table = (torch.randn(n, *middle, 5, generator=g) for n in (7, 20))
    rows = torch.randperm(20, generator=g)[:9]
    ptr = torch.tensor([0, 3, 3, 8, 10])
    dst, src = ops.segment_of(ptr, 10), torch.randint(7, (10,), generator=g)
    coef, alpha = (torch.rand(10, *middle, generator=g) for _ in range(2))
    alpha[3] = 0.99
    for base in ((table, rows, 0.7), (table, None, 0.7)):
        both = [f(h, src, dst, coef, ptr, base) for f in (ops.gather_sum.cpu, ops.gather_sum.reference)]
        torch.testing.assert_close(*both)
    for a, b in zip(ops.change.cpu(h, table, rows, 0.7), ops.change.reference(h, table, rows, 0.7), strict=True):
        torch.testing.assert_close(a, b)
    total, less = (torch.randn(4, *middle, 5, generator=g) for _ in range(2))
    for base in (None, less):
        both = [f(h, src, dst, coef, alpha, total, base) for f in (ops.spread.cpu, ops.spread.reference)]
        torch.testing.assert_close(*both)
    times, less = torch.rand(10, generator=g), torch.tensor([0.5, 1.0, 2.0, 0.0])  # the last is raised above 0
    for some in (slice(0, 10), slice(2, 5), slice(0, 0)):
        for more in ((), (times[some],), (None, (less, dst[some])), (None, None, 2 * h.square().sum(-1))):
            both = [f(h, src[some], coef[some], *more) for f in (ops.energies.cpu, ops.energies.reference)]
            torch.testing.assert_close(*both)


@pytest.mark.parametrize("shape", [(20000, 64), (20000, 3, 7)])
def test_energies_are_equal_for_any_number_of_threads(shape):
    """To the bit: what a sampler learns must not depend on it. There is enough work for two parts of it."""
    g = torch.Generator().manual_seed(0)
    h, src = torch.randn(shape, generator=g), torch.randint(shape[0], (60000,), generator=g)
    coef = torch.rand(60000, *shape[1:-1], generator=g)
    found = []
    for many in (1, 2, 8):
        with ops.threads(many):
            found.append(ops.energies(h, src, coef))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_softmax_is_its_reference(heads, scaled):
    g = torch.Generator().manual_seed(0)
    score = (30 * torch.randn(12, *(() if heads is None else (heads,)), generator=g)).requires_grad_()
    row, scale = torch.randint(5, (12,), generator=g), torch.rand(12, generator=g) if scaled else None
    weight, found = torch.randn(score.shape, generator=g), []
    for form in (ops.softmax.cpu, ops.softmax.reference):
        out = form(score, row, 6, scale)
        (first,) = torch.autograd.grad((out * weight).sum(), score, retain_graph=True)
        (again,) = torch.autograd.grad((out * weight).sum(), score, create_graph=True)
        (second,) = torch.autograd.grad(again.square().sum(), score)
        found.append((out, first, again, second))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_the_pass_is_recorded_once_per_tensor():
    """Sources and targets are the same rows: one table."""
    data = the_data()
    model = Two("gat")
    loader = AdaptiveNeighborLoader(data, [2, 2], batch_size=20)
    loader.learn(model)
    inference(model, data)
    one, two = loader._memory.forwards[propagate_of(model.two)][0].passes[0].node["x"]
    assert one is two
