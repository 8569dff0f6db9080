"""Feedback from unmodified PyG models, the scale inside layers that know none, checkpoints, and PyG's own loaders."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from adahop.checks import InputError
from adahop.pyg import AdaptiveNeighborLoader, AdaptiveSampler, batches, scale_messages, scaled
from adahop.pyg.align import align
from adahop.pyg.call import deviation
from adahop.pyg.feedback import energies
from conftest import messy_edges

CONVS = {
    "gcn": lambda a, b: pyg.GCNConv(a, b),
    "gcn plain": lambda a, b: pyg.GCNConv(a, b, normalize=False),
    "graph": lambda a, b: pyg.GraphConv(a, b),
    "sage": lambda a, b: pyg.SAGEConv(a, b),
    "gat": lambda a, b: pyg.GATConv(a, b // 2, heads=2),
    "gat bare": lambda a, b: pyg.GATConv(a, b // 2, heads=2, add_self_loops=False),
    "gatv2": lambda a, b: pyg.GATv2Conv(a, b // 2, heads=2),
    "gin": lambda a, b: pyg.GINConv(nn.Linear(a, b)),
    "transformer": lambda a, b: pyg.TransformerConv(a, b // 2, heads=2),
}
WEIGHTED = ("gcn", "gcn plain", "graph")
ATTENTION = ("gat", "gat bare", "gatv2", "transformer")


class Net(nn.Module):
    """Two layers as anyone writes them."""

    def __init__(self, kind: str, width: int = 4):
        super().__init__()
        self.conv1, self.conv2 = CONVS[kind](width, 8), CONVS[kind](8, 4)

    def forward(self, x, edge_index, edge_weight=None):
        more = () if edge_weight is None else (edge_weight,)
        return self.conv2(self.conv1(x, edge_index, *more).relu(), edge_index, *more)


def messy_data(nodes: int = 60) -> Data:
    edge_index, _ = messy_edges(nodes)
    x = torch.randn(nodes, 4, generator=torch.Generator().manual_seed(4))
    return Data(x=x, edge_index=edge_index, y=torch.arange(nodes) % 4)


def noted(model, batch, loader) -> list[torch.Tensor]:
    """The energies of a forward, one tensor per block."""
    drawn = batches.batch_of(batch)
    drawn.records_energies = True
    model(batch.x, batch.edge_index)
    return energies(drawn, drawn.energies, loader.sampler.graph.device)[1]


def by_hand(conv, x, batch) -> torch.Tensor:
    """|scale m|^2 of every edge of the batch, from a copy of the layer that passes messages without loops."""
    message = []
    plain = copy.deepcopy(conv)
    plain.__dict__.pop("forward", None)
    hook = plain.register_message_forward_hook(lambda m, a, out: message.append(out.detach()))
    plain(x, batch.edge_index)
    hook.remove()
    return batch.scale.square() * message[0].square().sum(1)


@pytest.mark.parametrize("kind", ["gcn plain", "graph", "sage", "gin"])
def test_energies_reach_their_edges(kind):
    torch.manual_seed(0)
    model, data = scale_messages(Net(kind)), messy_data()
    loader = AdaptiveNeighborLoader(data, [3, 2], batch_size=8, method="bs")
    batch = next(iter(loader))
    got = noted(model, batch, loader)
    h = model.conv1(batch.x, batch.edge_index).relu()
    want, first = [by_hand(model.conv1, batch.x, batch), by_hand(model.conv2, h, batch)], batch.num_sampled_edges[0]
    assert torch.allclose(got[0], want[0][first:], rtol=1e-4) and torch.allclose(got[1], want[1][:first], rtol=1e-4)


def test_align():
    given = torch.tensor([[1, 2, 1, 3, 0], [0, 0, 0, 1, 0]])
    value = torch.arange(5.0)
    assert align(given, given.flip(1)).take(value).tolist() == [1.0, 3.0, 0.0, 1.0, 2.0]  # a loop is worth 1
    assert align(given, given[:, :2], slice(0, 2)).take(value).tolist() == [0.0, 1.0]  # the first hops alone
    loops = torch.cat([given[:, :4], torch.tensor([[0, 1], [0, 1]])], 1)
    assert align(given, loops).take(value).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 1.0]
    fewer = align(given, given[:, [3, 1]])  # some were dropped
    assert fewer.take(value).tolist() == [3.0, 1.0] and fewer.share == 0.5
    assert fewer.put(torch.tensor([7.0, 8.0]), 5).tolist() == [0.0, 8.0, 0.0, 7.0, 0.0]
    assert align(given, torch.tensor([[0], [3]])) is None


# --- learning -------------------------------------------------------------------------------------------------------


def star_data(n: int = 40) -> Data:
    """A hub whose neighbours have features of very different size."""
    x = torch.zeros(n + 1, 4)
    size = torch.randn(n, generator=torch.Generator().manual_seed(1)).exp()
    x[1:] = size[:, None] * torch.nn.functional.normalize(
        torch.randn(n, 4, generator=torch.Generator().manual_seed(2)), dim=1
    )
    return Data(x=x, edge_index=torch.stack([torch.arange(1, n + 1), torch.zeros(n, dtype=torch.long)]))


def variance(loader, conv, rounds: int = 200) -> float:
    """Of the hub's output while a loader listens, without teaching it."""
    out = []
    with torch.no_grad():
        for _ in range(rounds):
            batch = loader([0])
            out.append(conv(batch.x, batch.edge_index, edge_weight=batch.edge_weight)[0])
    return float(torch.stack(out).var(0).sum())


def learnt(kind: str, method: str, wrap: bool, rounds: int = 150) -> float:
    """The variance after learning from a layer, as PyG has it or wrapped, over that of before."""
    torch.manual_seed(0)
    conv, data = CONVS[kind](4, 4), star_data()
    teacher = scaled(copy.deepcopy(conv)) if wrap else copy.deepcopy(conv)
    judge = scaled(conv)
    loader, fresh = (AdaptiveNeighborLoader(data, [6], [0], method=method) for _ in range(2))
    for _ in range(rounds):
        for batch in loader:
            with loader.feedback(teacher):
                weight = {"edge_weight": batch.edge_weight} if wrap or kind in WEIGHTED else {}
                teacher(batch.x, batch.edge_index, **weight)
    return variance(loader, judge) / variance(fresh, judge)


@pytest.mark.parametrize("kind", ["gcn", "gcn plain", "gat", "gatv2", "gin", "sage", "transformer"])
def test_the_variance_goes_down(kind):
    assert learnt(kind, "bs.m", wrap=False) < 0.7
    assert kind not in ("gat", "sage") or learnt(kind, "bs.m", wrap=True) < 0.7


@pytest.mark.parametrize(("kind", "limit"), [("gcn", 0.7), ("gin", 0.5), ("sage", 0.6)])
def test_the_variance_goes_down_with_replacement(kind, limit):
    assert learnt(kind, "bs", wrap=True) < limit


def test_attention_with_replacement_does_not_run_away():
    """Draws with replacement leave attention's normaliser noisy; learning must at least not make it worse and worse."""
    assert learnt("gat bare", "bs", wrap=True, rounds=400) < 1.6


def train(model, loader, epochs=1, learn=True, stop=None, log=None):
    """Feed every batch to the model; the batches' e_id and the odds afterwards."""
    seen = [] if log is None else log
    model.train()
    for _ in range(epochs):
        for batch in loader:
            if learn:
                with loader.feedback(model, batch):
                    model(batch.x, batch.edge_index, batch.edge_weight)
            else:
                model(batch.x, batch.edge_index, batch.edge_weight)
            seen.append(batch.e_id)
            if stop is not None and len(seen) == stop:
                return seen
    return seen


@pytest.mark.parametrize("prefetch", [0, 2])
def test_learning_repeats(prefetch):
    torch.manual_seed(0)
    model, data, runs = Net("gcn"), messy_data(), []
    for learn in (True, True, False):
        loader = AdaptiveNeighborLoader(data, [3, 2], batch_size=8, shuffle=True, method="bs", prefetch=prefetch)
        if not learn:
            loader.learn(model)  # once instead of each time
        runs.append((train(model, loader, 3, learn), loader.sampler.policy.log_weight))
        loader.learn(None)
    assert runs[0][1].any()
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0][0], other[0], strict=True))
        assert torch.equal(runs[0][1], other[1])


def test_evaluation_teaches_nothing():
    model, data = Net("gcn").eval(), messy_data()
    loader = AdaptiveNeighborLoader(data, [3, 2], batch_size=8, method="bs")
    loader.learn(model)
    for batch in loader:
        with loader.feedback(model):
            model(batch.x, batch.edge_index, batch.edge_weight)
        model(data.x, data.edge_index)
    assert not loader.sampler.policy.log_weight.any()
    loader.learn(None)
    assert not any(m._message_forward_hooks for m in model.modules() if isinstance(m, pyg.MessagePassing))


@pytest.mark.parametrize("kind", CONVS)
def test_half_precision_teaches_too(kind):
    torch.manual_seed(0)
    model = scale_messages(Net(kind))
    loader = AdaptiveNeighborLoader(messy_data(), [3, 2], batch_size=8)
    loader.learn(model)
    for batch in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch.x, batch.edge_index)[: batch.batch_size].float().square().mean()
        loss.backward()
    square = loader.sampler.policy.square
    assert bool(torch.isfinite(square).all()) and float(square.std()) > 0
    assert bool(torch.isfinite(model.conv1(messy_data().x, messy_data().edge_index)).all())


def test_trimmed_models_teach_too():
    torch.manual_seed(0)
    data, model = messy_data(), pyg.GCN(4, 8, 2, 4)
    whole, trimmed = (AdaptiveNeighborLoader(data, [3, 2], batch_size=8, method="bs") for _ in range(2))
    for one, other in zip(whole, trimmed, strict=True):
        with whole.feedback(model):
            a = model(one.x, one.edge_index, one.edge_weight)
        hops = {"num_sampled_nodes_per_hop": other.num_sampled_nodes,
                "num_sampled_edges_per_hop": other.num_sampled_edges}  # fmt: skip
        with trimmed.feedback(model):
            b = model(other.x, other.edge_index, other.edge_weight, **hops)
        break
    assert len(b) <= len(a) and trimmed.sampler.policy.log_weight.any()
    got, want = trimmed.sampler.policy.log_weight != 0, whole.sampler.policy.log_weight != 0
    assert torch.equal(got, want)


def test_what_feedback_cannot_do():
    data = messy_data()
    loader = AdaptiveNeighborLoader(data, [3, 2], batch_size=8, method="bs")
    with pytest.raises(InputError, match="before the loader has handed one out"), loader.feedback(Net("gcn")):
        pass
    batch = next(iter(loader))
    with pytest.raises(InputError, match="must have PyG layers"), loader.feedback(nn.Linear(2, 2)):
        pass
    conv = pyg.GCNConv(4, 4)
    with pytest.raises(InputError, match="a layer for each of the 2 hops, got 1"), loader.feedback(conv, batch):
        conv(batch.x, batch.edge_index, batch.edge_weight)
    model = Net("gcn")
    with loader.feedback(model, batch):
        model(data.x, data.edge_index)  # not the batch: nothing is learnt
    assert not loader.sampler.policy.log_weight.any()
    other = Data(x=data.x, edge_index=data.edge_index)
    with pytest.raises(InputError, match="must be one that this loader handed out"), loader.feedback(model, other):
        pass
    with pytest.raises(ZeroDivisionError), loader.feedback(model, batch):
        raise ZeroDivisionError
    assert not model.conv1._message_forward_hooks and not loader.sampler.policy.log_weight.any()
    loader = AdaptiveNeighborLoader(data, [3, 2], batch_size=8, subgraph_type="induced")
    batch = next(iter(loader))
    with pytest.raises(InputError, match="must be 'directional'"), loader.feedback(model):
        model(batch.x, batch.edge_index)


def test_a_step_cut_short_is_no_error():
    loader, model = AdaptiveNeighborLoader(messy_data(), [3, 2], batch_size=8, method="bs"), Net("gcn")
    loader.learn(model)
    for batch in loader:
        model.conv1(batch.x, batch.edge_index)
        break
    assert not loader.sampler.policy.log_weight.any()


# --- the scale inside layers ------------------------------------------------------------------------------------------


def test_no_warning_where_all_is_well():
    data = messy_data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("gcn", "sage", "gat"):
            for method in ("adahop", "graphsage"):
                train(
                    Net(kind), loader_without_weight(AdaptiveNeighborLoader(data, [3, 2], batch_size=8, method=method))
                )


def loader_without_weight(loader):
    loader.transform = lambda batch: batch.update({"edge_weight": None})
    return loader


@pytest.mark.parametrize("kind", [k for k in CONVS if k not in WEIGHTED])
def test_scaled_layers(kind):
    """With every neighbour and scale 1 nothing changes; a scale of 2 is as good as a parallel edge."""
    torch.manual_seed(0)
    conv, data = CONVS[kind](4, 8).eval(), messy_data()
    want = conv(data.x, data.edge_index)
    wrapped = scaled(copy.deepcopy(conv))
    assert scaled(wrapped) is wrapped
    ones = torch.ones(900)
    assert torch.allclose(wrapped(data.x, data.edge_index), want)
    assert torch.allclose(wrapped(data.x, data.edge_index, edge_weight=ones), want, atol=1e-5)
    loop = data.edge_index[0] == data.edge_index[1]
    twice = torch.cat([data.edge_index, data.edge_index[:, ~loop][:, :50]], 1)
    two = ones.clone()
    two[(~loop).nonzero().flatten()[:50]] = 2.0
    once = wrapped(data.x, data.edge_index, edge_weight=two)
    assert torch.allclose(once, conv(data.x, twice), atol=1e-4) and not torch.allclose(once, want, atol=1e-3)


@pytest.mark.parametrize("kind", ["gcn plain", "graph"])
def test_layers_that_take_a_weight_are_scaled_once(kind):
    """By themselves, or by the scale that they are passed as a weight: not twice."""
    torch.manual_seed(0)
    model, data = Net(kind), messy_data()
    loader = AdaptiveNeighborLoader(data, [3, 2], batch_size=8, method="bs")
    batch = next(iter(loader))
    want, plain = model(batch.x, batch.edge_index, batch.edge_weight), model(batch.x, batch.edge_index)
    scale_messages(model)
    for mode in (True, False):
        model.train(mode)
        assert torch.allclose(model(batch.x, batch.edge_index), want, atol=1e-4) and not torch.allclose(want, plain)
        assert torch.allclose(model(batch.x, batch.edge_index, batch.edge_weight), want, atol=1e-4)
    copied = batch.edge_index.clone()
    del batch, loader
    assert torch.allclose(
        model(data.x[:0].new_ones(60, 4), copied), Net.forward(unwrapped(model), torch.ones(60, 4), copied)
    )


def unwrapped(model):
    model = copy.deepcopy(model)
    for conv in (model.conv1, model.conv2):
        del conv.__dict__["forward"]
    return model


@pytest.mark.parametrize("make", [pyg.GraphSAGE, pyg.GIN, pyg.GAT])
def test_pygs_models_heed_their_weight(make):
    torch.manual_seed(0)
    model, data = make(4, 8, 2, 4).eval(), messy_data()
    weight = torch.rand(900) + 0.5
    plain = model(data.x, data.edge_index, edge_weight=weight)
    assert torch.equal(plain, model(data.x, data.edge_index))
    assert scale_messages(model) is model
    assert torch.equal(plain, model(data.x, data.edge_index))
    assert not torch.allclose(plain, model(data.x, data.edge_index, edge_weight=weight), atol=1e-3)


def test_a_mean_is_unbiased():
    """While a loader listens, SAGE's mean over learned draws has the full mean as its mean."""
    torch.manual_seed(0)
    conv, data = scaled(pyg.SAGEConv(4, 4)), star_data()
    loader = AdaptiveNeighborLoader(data, [6], [0], method="bs.m")
    loader.sampler.policy.arms.put(slice(None), data.x[1:].norm(dim=1))
    runs = []
    for _ in range(1000):
        batch = loader([0])
        runs.append(conv(batch.x, batch.edge_index)[0].detach())
    full = conv.eval()(data.x, data.edge_index)[0].detach()
    z = (torch.stack(runs).mean(0) - full) / (torch.stack(runs).std(0) / 1000**0.5)
    assert float(z.abs().max()) < 4.5


@pytest.mark.parametrize("weight", [False, True])
def test_gcn_takes_the_degrees_of_the_whole_graph(weight):
    """With every neighbour of the seeds, their output is that of the whole graph, though the rim was not expanded."""
    torch.manual_seed(0)
    conv, data = pyg.GCNConv(4, 4), messy_data()
    if weight:
        data.edge_weight = torch.rand(900) + 0.1
    want = conv(data.x, data.edge_index, data.edge_weight)[:5]
    loader = AdaptiveNeighborLoader(data, [-1], torch.arange(5), batch_size=5)
    batch = next(iter(loader))
    given = batch.edge_weight
    assert not torch.allclose(conv(batch.x, batch.edge_index, given)[:5], want, atol=1e-3)
    scaled(conv)
    with loader.feedback(conv):
        assert torch.allclose(conv(batch.x, batch.edge_index, given)[:5], want, atol=1e-5)
    conv.eval()  # evaluation is left alone
    with loader.feedback(conv):
        assert torch.allclose(conv(data.x, data.edge_index, data.edge_weight)[:5], want, atol=1e-5)


@pytest.mark.parametrize("kind", ["gat bare", "transformer"])
def test_uniform_draws_leave_attention_as_it_is(kind):
    """Alike in scale, the drawn keep the shares that the layer gives them, where it adds no self-loops."""
    torch.manual_seed(0)
    model, data = Net(kind), messy_data()
    data.edge_index = data.edge_index[:, data.edge_index[0] != data.edge_index[1]]
    loader = AdaptiveNeighborLoader(data, [3, 2], batch_size=8, method="graphsage", replace=False)
    for batch in loader:
        want = model(batch.x, batch.edge_index)
        wrapped = scale_messages(copy.deepcopy(model))
        for weight in ({}, {"edge_weight": batch.edge_weight}):
            h = wrapped.conv1(batch.x, batch.edge_index, **weight).relu()
            assert torch.allclose(wrapped.conv2(h, batch.edge_index, **weight), want, atol=1e-5)


def test_attention_learns_what_a_draw_moves():
    """Messages all alike leave nothing to chance, however large they are; one that differs counts as it differs."""
    alpha, s, row = torch.full((4, 1), 0.25), torch.full((4,), 3.0), torch.zeros(4, dtype=torch.long)
    x = torch.full((4, 1, 2), 100.0)
    assert float(deviation(alpha[..., None] * x, alpha, s, row).max()) < 1e-6 * 100**2
    x[0] += 8.0
    energy = deviation(alpha[..., None] * x, alpha, s, row)
    assert energy[0] == pytest.approx(9 * 2 * 8.0**2, rel=1e-3)  # |scale (x_0 - mean of the others)|^2
    assert energy[1:].tolist() == pytest.approx([9 * 2 * (8.0 / 3) ** 2] * 3, rel=1e-2)
    flat = deviation((alpha[..., None] * x)[:, 0], alpha[:, 0], s, row)  # a layer with one head may leave it out
    assert torch.allclose(flat, energy)


def test_gcn_speaks_of_the_source_alone():
    """What one parent hears of a source is what another hears, though their degrees differ."""
    torch.manual_seed(0)
    edges = torch.tensor([[9, 9, 1, 2, 3, 4], [0, 5, 5, 5, 5, 5]])
    data = Data(x=torch.randn(10, 4), edge_index=edges)
    loader, conv = AdaptiveNeighborLoader(data, [-1], [0, 5], batch_size=2), scaled(pyg.GCNConv(4, 4))
    batch = next(iter(loader))
    energy = noted(conv, batch, loader)[0]
    same = energy[batch.n_id[batch.edge_index[0]] == 9]
    assert same.numel() == 2 and same[0] == pytest.approx(float(same[1]), rel=1e-5)


def test_attention_keeps_its_dropout():
    torch.manual_seed(0)
    conv = scaled(pyg.GATConv(4, 8, dropout=0.5, add_self_loops=False))
    data = star_data()
    ones = torch.ones(40)
    runs = torch.stack([conv(data.x, data.edge_index, edge_weight=ones)[0] for _ in range(2000)])
    assert conv.dropout == 0.5
    full = conv.eval()(data.x, data.edge_index)[0]
    z = (runs.mean(0) - full) / (runs.std(0) / 2000**0.5)
    assert float(z.detach().abs().max()) < 4.5 and float(runs.detach().std(0).min()) > 0
    with pytest.raises(AssertionError):
        conv(data.x[None], data.edge_index, edge_weight=ones)
    assert conv.dropout == 0.5


def test_layers_that_cannot_be_scaled():
    with pytest.raises(InputError, match="`conv` must be a PyG layer"):
        scaled(nn.Linear(2, 2))
    with pytest.raises(InputError, match="must have PyG layers"):
        scale_messages(nn.Linear(2, 2))


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("stop", [1, 5, 8, 10, 15])
@pytest.mark.parametrize("learn", [True, False])
def test_resume(tmp_path, prefetch, stop, learn):
    """Batches after a checkpoint are the same, within an epoch (of 8 batches) as at its end."""
    torch.manual_seed(0)
    model, data = Net("gcn"), messy_data()

    def make():
        loader = AdaptiveNeighborLoader(
            data, [3, 2], batch_size=8, shuffle=True, seed=3, method="bs", prefetch=prefetch
        )
        if not learn:
            loader.learn(model)
        return loader

    loader, seen = make(), []
    for _ in range(3):
        for batch in loader:
            if learn:
                with loader.feedback(model):
                    model(batch.x, batch.edge_index, batch.edge_weight)
            else:
                model(batch.x, batch.edge_index, batch.edge_weight)
            seen.append(batch.e_id)
            if len(seen) == stop:
                torch.save(loader.state_dict(), tmp_path / "state.pt")
    resumed = make()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    rest = train(model, resumed, 3 - stop // 8, learn)
    left = seen[stop:]
    if stop % 8 == 0:
        rest = rest[-len(left) :]
    assert len(rest) == len(left) and all(torch.equal(a, b) for a, b in zip(left, rest, strict=True))
    assert torch.equal(loader.sampler.policy.log_weight, resumed.sampler.policy.log_weight)


# --- PyG's own loaders ------------------------------------------------------------------------------------------------


def test_node_loader():
    data = messy_data()
    sampler = AdaptiveSampler(data, [3, 2], method="bs")
    loader = NodeLoader(
        data, node_sampler=sampler, input_nodes=torch.arange(40), transform=sampler.attach, batch_size=9
    )
    ours = AdaptiveNeighborLoader(data, [3, 2], torch.arange(40), batch_size=9, method="bs")
    model = Net("gcn")
    for a, b in zip(loader, ours, strict=True):
        for name in ("x", "y", "n_id", "e_id", "edge_index", "edge_weight", "scale", "input_id", "batch_size",
                     "num_sampled_nodes", "num_sampled_edges"):  # fmt: skip
            x, y = a[name], b[name]
            assert torch.equal(x, y) if torch.is_tensor(x) else x == y
        with sampler.feedback(model, a):
            model(a.x, a.edge_index, a.edge_weight)
        with ours.feedback(model, b):
            model(b.x, b.edge_index, b.edge_weight)
    assert sampler.sampler.policy.log_weight.any()
    assert torch.equal(sampler.sampler.policy.log_weight, ours.sampler.policy.log_weight)
    state = sampler.state_dict()
    other = AdaptiveSampler(data, [3, 2], method="bs")
    other.load_state_dict(state)
    assert torch.equal(other.sampler.policy.log_weight, sampler.sampler.policy.log_weight)


def test_the_sampler_learns_by_itself():
    data, model = messy_data(), Net("gcn")
    sampler = AdaptiveSampler(data, [3, 2], method="bs", disjoint=True)
    sampler.learn(model)
    for batch in NodeLoader(data, sampler, transform=sampler.attach, batch_size=9):
        assert batch.batch.max() < 9
        model(batch.x, batch.edge_index, batch.edge_weight)
    assert sampler.sampler.policy.log_weight.any()


def test_what_the_sampler_refuses():
    sampler = AdaptiveSampler(messy_data(), [3, 2])
    with pytest.raises(InputError, match="link-level sampling is not supported yet"):
        sampler.sample_from_edges(None)
    with pytest.raises(InputError, match="must be the one drawn last"):
        sampler.attach(Data(edge_index=torch.zeros(2, 3)))
