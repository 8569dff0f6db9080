"""The first layer summed before anything is multiplied: the same outputs, gradients and energies as the long way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import adahop
from adahop import models, watch
from adahop.block import Ungathered
from adahop.models.first import can_sum_first
from conftest import messy_graph


def long_way(model, batch):
    """Encode every source, then layer by layer."""
    h, state = model.encode(batch.x)
    for layer, block in enumerate(batch.blocks):
        n = block.num_dst
        h, state = model.step(layer, h, h[:n], {k: v[:n] for k, v in state.items()}, block)
    return model.decode(h)


def batch_of(model, width: int, method: str = "bs"):
    graph = messy_graph().normalized(*model.graph)
    x = torch.randn(graph.num_nodes, width, generator=torch.Generator().manual_seed(1))
    blocks = adahop.make(method, graph, [3] * len(model.convs)).sample([0, 3, 7, 59])
    n_id = blocks[0].n_id
    return SimpleNamespace(x=x[n_id], blocks=blocks), SimpleNamespace(x=Ungathered(x, n_id), blocks=blocks)


@pytest.mark.parametrize("arch", ["plain", "residual"])
@pytest.mark.parametrize("name", ["gcn", "sage"])
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
    assert not can_sum_first(model) and torch.equal(model(lean), model(plain))


def test_who_listens_closely_gets_the_long_way():
    model = models.make("gcn", 6, 8, 4)
    assert can_sum_first(model)
    hook = model.convs[0].register_forward_pre_hook(lambda conv, args: None)
    assert not can_sum_first(model)
    hook.remove()
    with watch(model, "alignment"):
        assert not can_sum_first(model)
        model(batch_of(model, 6)[0])
    model.convs[0].tap = lambda *said: None
    assert not can_sum_first(model)


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
    assert not adahop.Loader(data, sampler, pin=True).pin or torch.cuda.is_available()


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
