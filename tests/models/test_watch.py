"""watch: the energy of every message, from our layers and from PyG's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn

from adahop import models, watch
from adahop.samplers import NeighborSampler
from conftest import messy_graph


def small_batch(sizes=(3, 2), norm=("row", True), width: int = 6):
    g = messy_graph().normalized(*norm)
    blocks = NeighborSampler(g, list(sizes), seed=1).sample([3, 8, 9])
    x = torch.randn(60, width, generator=torch.Generator().manual_seed(0))
    return SimpleNamespace(x=x[blocks[0].n_id], blocks=blocks)


def messages(conv, h, own, block):
    """coef * h_src of every edge, by hand and head by head."""
    if isinstance(conv, models.GATConv):
        value = conv.linear(h).view(-1, conv.heads, conv.width)
        u, v = conv.directions()
        score = nn.functional.leaky_relu((own @ u.t())[block.dst] + (h @ v.t())[block.src], conv.slope)
        raw = score.exp() * block.scale[:, None]
    elif isinstance(conv, models.BreadthConv):
        value = h.unsqueeze(1)
        score = conv.score(torch.tanh(conv.dst(own)[block.dst] + conv.src(h)[block.src]))
        raw = score.exp() * block.scale[:, None]
    else:
        weight = (conv.linear if isinstance(conv, models.GCNConv) else conv.others).weight
        value = (h @ weight.t() if weight.shape[0] < weight.shape[1] else h).unsqueeze(1)
        return (block.weight * block.scale)[:, None, None] * value[block.src]
    total = torch.zeros(block.num_dst, raw.shape[1]).index_add_(0, block.dst, raw)
    return (raw / total[block.dst])[:, :, None] * value[block.src]


@pytest.mark.parametrize("arch", ["plain", "residual"])
@pytest.mark.parametrize(
    ("name", "options"), [("gcn", {}), ("sage", {}), ("gat", {"heads": 2}), ("geniepath", {})]
)  # fmt: skip
def test_energies_of_our_models(name, options, arch):
    torch.manual_seed(0)
    model = models.make(name, 6, 8, 4, arch=arch, **options)
    batch = small_batch(norm=model.graph)
    seen = []
    hooks = [c.register_forward_pre_hook(lambda m, args: seen.append((m, *args[:3]))) for c in model.convs]
    with watch(model) as energy:
        out = model(batch)
    for hook in hooks:
        hook.remove()
    assert out.requires_grad and len(energy) == 2
    for e, (conv, values, own, block) in zip(energy, seen, strict=True):
        h = values.rows().detach()
        want = messages(conv, h, own, block).flatten(1).square().sum(1)
        assert e.shape == (block.num_edges,) and not e.requires_grad
        assert torch.allclose(e, want, rtol=1e-4, atol=1e-7)
    assert torch.allclose(model(batch), out, rtol=1e-5, atol=1e-6)  # watching changes nothing; hooks, the order of sums


class Stack(nn.Module):
    """Two unmodified PyG layers over blocks."""

    def __init__(self, make):
        super().__init__()
        self.convs = nn.ModuleList([make(6, 8), make(8, 4)])

    def forward(self, batch):
        h = batch.x
        for conv, block in zip(self.convs, batch.blocks, strict=True):
            h = self.one(conv, h, block)
        return h

    def one(self, conv, h, block):
        return conv((h, h[: block.num_dst]), block.edge_index)


class GCNStack(Stack):
    def one(self, conv, h, block):
        return conv(h, block.edge_index, block.weight * block.scale)[: block.num_dst]


def test_energies_of_pygs_gcn():
    torch.manual_seed(0)
    model = GCNStack(lambda a, b: pyg.GCNConv(a, b, normalize=False))
    batch = small_batch()
    with watch(model) as energy:
        model(batch)
    h = batch.x
    for e, conv, block in zip(energy, model.convs, batch.blocks, strict=True):
        message = (block.weight * block.scale)[:, None] * conv.lin(h)[block.src]
        assert torch.allclose(e, message.square().sum(1), rtol=1e-4, atol=1e-8)
        h = model.one(conv, h, block)


def test_energies_of_pygs_sage():
    torch.manual_seed(0)
    model, batch = Stack(pyg.SAGEConv), small_batch(norm=("row", False))
    with watch(model) as energy:
        model(batch)
    block = batch.blocks[0]
    assert torch.allclose(energy[0], batch.x[block.src].square().sum(1), rtol=1e-5)
    assert [len(e) for e in energy] == [b.num_edges for b in batch.blocks]


def test_energies_of_pygs_gat():
    torch.manual_seed(0)
    model = Stack(lambda a, b: pyg.GATConv(a, b // 2, heads=2, add_self_loops=False)).eval()
    batch = small_batch()
    with watch(model) as energy:
        model(batch)
    block, conv = batch.blocks[0], model.convs[0]
    _, (_, alpha) = conv((batch.x, batch.x[: block.num_dst]), block.edge_index, return_attention_weights=True)
    value = conv.lin(batch.x).view(-1, 2, 4)
    assert torch.allclose(energy[0], (alpha[:, :, None] * value[block.src]).flatten(1).square().sum(1), rtol=1e-4)
    assert [len(e) for e in energy] == [b.num_edges for b in batch.blocks]


def test_a_pyg_model_can_teach_a_sampler():
    g = messy_graph().normalized("row", False)
    import adahop

    sampler = adahop.make("bs", g, [3, 2])
    blocks = sampler.sample([3, 8, 9])
    model = Stack(pyg.SAGEConv)
    with watch(model) as energy:
        model(SimpleNamespace(x=torch.randn(blocks[0].num_src, 6), blocks=blocks))
    sampler.update(blocks, energy)
    assert sampler.policy.log_weight.any()


# --- silence and failures ------------------------------------------------------------------------------------------


def is_clean(model) -> bool:
    return all(
        not getattr(m, "listeners", None) and not getattr(m, "_message_forward_hooks", None) for m in model.modules()
    )


def test_a_silent_layer_is_an_error():
    model = Stack(pyg.SAGEConv)
    model.extra = pyg.SAGEConv(2, 2)
    with pytest.raises(RuntimeError, match="layer 'extra' passed no messages"), watch(model):
        model(small_batch(norm=("row", False)))
    assert is_clean(model)
    ours = models.make("gcn", 6, 8, 4)
    with pytest.raises(RuntimeError, match=r"layer 'convs\.0'"), watch(ours):
        pass
    assert is_clean(ours)


def test_a_model_without_messages_is_an_error():
    with pytest.raises(ValueError, match="must have layers that pass messages, got Linear"), watch(nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize("make", [lambda: Stack(pyg.SAGEConv), lambda: models.make("gat", 6, 8, 4, heads=2)])
def test_hooks_go_when_the_model_fails(make):
    model = make()
    with pytest.raises(ZeroDivisionError), watch(model):
        assert not is_clean(model)
        raise ZeroDivisionError
    assert is_clean(model)


def test_nothing_is_heard_afterwards():
    model, batch = models.make("gcn", 6, 8, 4), small_batch()
    with watch(model) as energy:
        model(batch)
    model(batch)
    assert len(energy) == 2
