"""The first layer summed before anything is multiplied: the same outputs, gradients and energies as the long way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import adahop
from adahop import models, watch
from adahop.block import Ungathered
from adahop.features import Values
from adahop.messages import alignment
from adahop.sum import PLAIN
from conftest import messy_graph


def long_way(model, batch):
    """Encode every source, then layer by layer."""
    x, state = model.drop(batch.x), {}
    h = x if model.encoder is None else model.encoder(x)
    for layer, block in enumerate(batch.blocks):
        own = h[: block.num_dst]
        state = model.initial_state(own) if layer == 0 else {k: v[: block.num_dst] for k, v in state.items()}
        h, state = model.step(layer, Values(h if layer == 0 else model.drop(h)), own, state, block, PLAIN)
    return model.decode(h)


def batch_of(model, width: int, method: str = "bs"):
    graph = messy_graph().normalized(*model.graph)
    x = torch.randn(graph.num_nodes, width, generator=torch.Generator().manual_seed(1))
    blocks = adahop.make(method, graph, [3] * len(model.convs)).sample([0, 3, 7, 59])
    n_id = blocks[0].n_id
    return SimpleNamespace(x=x[n_id], blocks=blocks), SimpleNamespace(x=Ungathered(x, n_id), blocks=blocks)


@pytest.mark.parametrize(
    "name, arch", [(name, arch) for name in ("gcn", "sage") for arch in models.MODELS[name].arches]
)
@pytest.mark.parametrize("inputs, hidden", [(6, 8), (12, 5)])  # widens, narrows
def test_it_says_what_the_long_way_says(name, arch, inputs, hidden):
    torch.manual_seed(0)
    model = models.make(name, inputs, hidden, 4, arch=arch)
    plain, lean = batch_of(model, inputs)
    grads, said, outs = [], [], []
    for run, batch in ((long_way, plain), (lambda m, b: m(b), plain), (lambda m, b: m(b), lean)):
        model.zero_grad()
        with watch(model) as energy:
            out = run(model, batch)
        out.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        said.append(energy)
        outs.append(out.detach())
        assert torch.allclose(run(model, batch), out, atol=1e-6)  # unwatched
    for out, grad, energy in zip(outs[1:], grads[1:], said[1:], strict=True):
        assert torch.allclose(out, outs[0], rtol=1e-5, atol=1e-6)
        for a, b in zip(grad, grads[0], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
        for a, b in zip(energy, said[0], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_nobody_at_all():
    """An empty batch, as one of several processes may have."""
    model = models.make("gcn", 6, 8, 4)
    graph = messy_graph().normalized(*model.graph)
    blocks = adahop.make("bs", graph, [2, 2]).sample([])
    with watch(model) as energy:
        out = model(SimpleNamespace(x=Ungathered(torch.randn(graph.num_nodes, 6), blocks[0].n_id), blocks=blocks))
    out.sum().backward()
    assert out.shape == (0, 4) and [e.shape for e in energy] == [(0,), (0,)]


def test_dropout_is_one_for_both_ways():
    torch.manual_seed(0)
    model = models.make("gcn", 6, 8, 4, arch="residual", dropout=0.5, layers=1)
    plain, lean = batch_of(model, 6)
    torch.manual_seed(5)
    want = long_way(model, plain)
    for batch in (plain, lean):
        torch.manual_seed(5)
        assert torch.allclose(model(batch), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gat", "geniepath"])
def test_others_take_lean_batches_too(name):
    torch.manual_seed(0)
    model = models.make(name, 6, 8, 4)
    plain, lean = batch_of(model, 6)
    assert torch.equal(model(lean), model(plain))


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "geniepath"])
@pytest.mark.parametrize("arch", ["plain", "residual"])
def test_who_listens_closely_hears_the_long_way(name, arch):
    """Listeners may ask for the messages themselves, which a first layer that sums raw features never formed."""
    torch.manual_seed(0)
    model = models.make(name, 6, 8, 4, arch=arch)
    plain, lean = batch_of(model, 6)
    said = []
    for run, batch in ((long_way, plain), (lambda m, b: m(b), plain), (lambda m, b: m(b), lean)):
        with watch(model, alignment) as told:
            run(model, batch)
        said.append(told)
    for told in said[1:]:
        for a, b in zip(told, said[0], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert not any(conv.listeners for conv in model.convs)


def test_rows_that_move_are_gathered():
    rows = Ungathered(torch.arange(12.0).view(6, 2), torch.tensor([4, 1, 1]))
    assert rows.to("cpu").tolist() == rows.gathered().tolist() == [[8.0, 9.0], [2.0, 3.0], [2.0, 3.0]]
    assert rows[:1].gathered().tolist() == [[8.0, 9.0]]


def test_lean_batches_hold_what_our_models_read():
    data = adahop.load("digits")
    sampler = adahop.make("graphsage", data.graph, [3, 3])
    fat, lean = (adahop.Loader(data, sampler, data.train_mask, lean=lean) for lean in (False, True))
    blocks = sampler.sample([1, 2, 3])
    a, b = fat.batch(blocks), lean.batch(blocks)
    assert torch.equal(a.x, b.x.gathered()) and torch.equal(a.y, b.y) and b.edge_index is None and "e_id" not in b
    pinned = next(iter(adahop.Loader(data, sampler, data.train_mask, pin=True)))
    assert pinned.y.is_pinned() == torch.cuda.is_available()


def test_nobody_looks_for_energies_that_nobody_wants(monkeypatch):
    data = adahop.load("digits")
    graph = data.graph.normalized()
    assert not adahop.make("graphsage", graph, [2, 2]).listens and not adahop.make("labor", graph, [2, 2]).listens
    for method in ("bs", "bs.m", "thanos", "bliss"):
        assert adahop.make(method, graph, [2, 2]).listens
    assert adahop.make("as-gcn", graph, [20, 20], features=data.x).listens
    with watch(models.make("gcn", 64, 8, 10), None) as energy:
        pass
    assert energy == []
