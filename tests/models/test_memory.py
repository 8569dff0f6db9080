"""What is remembered: histories, the exact first layer, control variates, tracked norms."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from adahop import draws, models, ops
from adahop.checks import IdError, InputError
from adahop.config import Config
from adahop.diagnostics.frozen import frozen, run
from adahop.features import Values
from adahop.graph import Graph
from adahop.history import History, LazyHistory
from adahop.methods import make
from adahop.policies import Tracked
from adahop.samplers import NeighborSampler
from adahop.sum import AttentionVariate, ControlVariate, ExactSum, full_sums
from adahop.watcher import watch
from conftest import full_sum, messy_graph, star

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))


def each_arch(*names: str) -> list[tuple[str, str]]:
    return [(name, arch) for name in names for arch in models.MODELS[name].arches]


def normed() -> Graph:
    return messy_graph().normalized("row")


def total(memory, h, block):
    """A memory's sum, h by global id."""
    return memory.total(models.GCNConv(6, 6), Values(h[block.n_id]), None, block)


# --- History -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_history_gives_back_what_it_was_given(dtype):
    history = History(5, 3, dtype)
    rows = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    history.push(torch.tensor([4, 1]), rows)
    assert torch.equal(
        history.pull(torch.tensor([1, 0, 4])), torch.stack([rows[1], rows[1] * 0, rows[0]]).to(dtype).float()
    )
    assert history.pull(torch.tensor([1])).dtype == torch.float32
    assert history.value.element_size() == (4 if dtype == torch.float32 else 2)


def test_history_cuts_the_graph_of_gradients():
    history, h = History(2, 1), torch.ones(1, 1, requires_grad=True)
    history.push(torch.tensor([0]), 2 * h)
    assert not history.value.requires_grad and not history.pull(torch.tensor([0])).requires_grad


def test_history_refuses():
    history = History(5, 3)
    for rows in (torch.ones(2, 3), torch.ones(1, 4), torch.ones(3)):
        with pytest.raises(InputError, match=r"`h` must have shape \(1, 3\), got"):
            history.push(torch.tensor([0]), rows)
    with pytest.raises(IdError, match=r"`n_id` must be in \[0, 5\)"):
        history.pull(torch.tensor([5]))
    with pytest.raises(InputError, match="`dtype` must be float32 or float16"):
        History(5, 3, torch.float64)


def test_history_is_no_part_of_a_checkpoint_and_keeps_its_kind():
    assert History(5, 3).state_dict() == {}
    assert History(5, 3, torch.float16).float().value.dtype == torch.float16
    assert History(5, 3).half().value.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_history_sums(dtype):
    g = normed()
    history = History(60, 6, dtype)
    history.push(torch.arange(60), X)
    nodes = torch.tensor([3, 0, 59])
    assert torch.allclose(history.sums(g, nodes).double(), full_sum(g, X.to(dtype).float())[nodes], atol=1e-5)


# --- the exact first layer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, 6])
def test_first_layer_is_the_full_sum(bias):
    g = normed()
    encoder = None if bias is None else torch.nn.Linear(6, 4)
    block = NeighborSampler(g, [1]).sample([5, 3, 58])[0]
    conv = models.GCNConv(6 if bias is None else 4, 4)
    got = ExactSum(g, X)(conv, Values(X[block.n_id], encoder), None, block)
    h = X if encoder is None else encoder(X).detach()
    want = full_sum(g, h)[[5, 3, 58]] @ conv.linear.weight.double().t() + conv.linear.bias
    assert torch.allclose(got.double(), want, atol=1e-5)


def test_full_sums_in_chunks():
    g = normed()
    assert torch.allclose(full_sums(g, X).double(), full_sum(g, X), atol=1e-5)
    assert torch.equal(full_sums(g, X, rows=7), full_sums(g, X))
    with pytest.raises(InputError, match="`x` must have a row for each of the 60 nodes, got 3"):
        full_sums(g, X[:3])


@pytest.mark.parametrize("name, arch", each_arch("gcn", "sage", "gat", "gatv2", "geniepath"))
def test_an_exact_first_layer_and_all_above_is_exact(name, arch):
    torch.manual_seed(0)
    model = models.make(name, 6, 8, 3, arch=arch).eval()
    g = messy_graph().normalized(*model.graph)
    want = model.inference(g, X)
    sampler = NeighborSampler(g, [1, -1])
    sampler.skip = model.remember("exact", g, X)
    assert sampler.skip == {0}
    blocks = sampler.sample(torch.arange(60))
    assert blocks[0].num_edges == 0
    assert torch.allclose(run(model, X, blocks), want, atol=1e-5)


# --- control variates ----------------------------------------------------------------------------------------------


def memory_of(kind: str, value: torch.Tensor, dtype=torch.float32) -> ControlVariate:
    memory = ControlVariate(normed(), 6, kind, dtype).eval()
    memory.refresh(value, None, snapshots_only=False)
    return memory


@pytest.mark.parametrize("draw", list(ops.DRAWS))
@pytest.mark.parametrize("kind", ["history", "snapshot"])
def test_control_variate_is_unbiased_for_any_draw(draw, kind):
    g = normed()
    memory = memory_of(kind, X.roll(1, 0), torch.float16)
    policy = Tracked(g, 1)
    policy.square[0] = (torch.rand(60, generator=torch.Generator().manual_seed(3)) + 0.1).square()
    sampler = NeighborSampler(g, [3], policy, draw)
    policy.prefix.renew(0, 3, policy.odds(0))
    seeds = torch.arange(20)
    every = torch.stack([total(memory, X, sampler.sample(seeds)[0]) for _ in range(1500)]).double()
    gap = (every.mean(0) - full_sum(g, X)[seeds]).abs()
    error = every.std(0) / 1500**0.5
    # snapshot sums are themselves rounded to half precision: a bias of that size is the price of it
    assert bool((gap <= 5 * error + (3e-3 if kind == "snapshot" else 1e-5)).all())


@pytest.mark.parametrize("draw", list(ops.DRAWS))
@pytest.mark.parametrize("kind", ["history", "snapshot"])
def test_control_variate_with_todays_h_is_the_full_sum(draw, kind):
    g, memory = normed(), memory_of(kind, X)
    block = NeighborSampler(g, [2], None, draw).sample(torch.arange(60))[0]
    assert torch.allclose(total(memory, X, block).double(), full_sum(g, X), atol=1e-5)


def test_an_empty_memory_is_the_plain_estimate():
    g = normed()
    memory = ControlVariate(g, 6)
    block = NeighborSampler(g, [2]).sample([3, 4])[0]
    plain = ops.gather_sum(X[block.n_id], block.src, block.dst, block.weight * block.scale, block.ptr)
    assert torch.allclose(total(memory.eval(), X, block), plain)


# --- the dial --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("kind", ["history", "snapshot"])
def test_the_sum_is_unbiased_for_every_noise(kind, noise):
    """The mean of 1,500 estimates within 5 standard errors at 120 places: 7e-5 to fail by chance, were they apart."""
    g, seeds = normed(), torch.arange(20)
    memory = ControlVariate(g, 6, kind, noise=noise).eval()
    memory.refresh(X.roll(1, 0), None, snapshots_only=False)
    sampler = NeighborSampler(g, [3], None, "systematic")
    every = torch.stack([total(memory, X, sampler.sample(seeds)[0]) for _ in range(1500)]).double()
    gap = (every.mean(0) - full_sum(g, X)[seeds]).abs()
    assert bool((gap <= 5 * every.std(0) / 1500**0.5 + 1e-5).all())


def test_noise_is_a_dial_between_the_memory_and_the_sample():
    """With today's h remembered, the error of a draw is noise times that of the plain estimate."""
    g = normed()
    block = NeighborSampler(g, [2]).sample(torch.arange(60))[0]
    memory = memory_of("snapshot", X)
    plain = ops.gather_sum(X[block.n_id], block.src, block.dst, block.weight * block.scale, block.ptr)
    exact = full_sum(g, X).float()
    for noise in (0.0, 0.25, 1.0):
        memory.noise.fill_(noise)  # a tensor: what was captured follows it
        assert torch.allclose(total(memory, X, block), exact + noise * (plain - exact), atol=1e-5)


@pytest.mark.parametrize("name", ["gat", "geniepath"])
@pytest.mark.parametrize("estimator", ["history", "snapshot", "scores"])
def test_attention_with_all_noise_is_the_sample_alone(name, estimator):
    torch.manual_seed(0)
    model = models.make(name, 6, 8, 3).eval()
    g = messy_graph().normalized(*model.graph)
    blocks = NeighborSampler(g, [2, 2]).sample(torch.arange(60))
    want = run(model, X, blocks)
    model.remember(estimator, g, X, noise=1.0)
    assert torch.allclose(run(model, X, blocks), want, atol=1e-5)
    model.remember(estimator, g, X, noise=(1.0, 0.0))
    assert not torch.allclose(run(model, X, blocks), want, atol=1e-5)


def test_the_dial_is_state_and_a_state_without_it_is_read():
    memory, other = memory_of("snapshot", X), ControlVariate(normed(), 6, "snapshot")
    memory.noise.fill_(0.5)
    state = {k: v.clone() for k, v in memory.state().items()}
    assert set(state) == {"history", "sums", "noise"}
    other.restore(state)
    assert float(other.noise) == 0.5 and torch.equal(other.history.value, memory.history.value)
    other.noise.fill_(0.25)
    other.restore({k: v for k, v in state.items() if k != "noise"})  # as version 0.1 wrote it
    assert float(other.noise) == 0.25


def memories(estimator, layers=2, **options):
    model = models.make("gcn", 6, 8, 3, layers=layers, arch="plain")
    model.remember(estimator, normed(), X, **options)
    return model.memories


def test_noise_is_checked():
    for bad in (-0.1, 1.1, "much"):
        with pytest.raises(InputError, match="`noise` must be"):
            memories("history", noise=bad)
    with pytest.raises(InputError, match="`noise` must be a number or one per layer, 2 in all, got 3"):
        memories("history", noise=(0.0, 0.0, 0.0))
    with pytest.raises(InputError, match="`noise` must be a number or one per layer, 2 in all, got 1"):
        Config(noise=(0.5,))
    made = memories("exact+history", noise=(0.0, 0.5))
    assert float(made["1"].noise) == 0.5 and Config(noise=[0.0, 0.5]).noise == (0.0, 0.5)


def test_a_history_is_written_in_training_only():
    g = normed()
    memory = ControlVariate(g, 6)
    block = NeighborSampler(g, [2]).sample([3, 4])[0]
    total(memory.eval(), X, block)
    assert not memory.history.value.any()
    total(memory.train(), X, block)
    assert torch.equal(memory.history.pull(block.n_id), X[block.n_id])
    rest = torch.ones(60, dtype=torch.bool)
    rest[block.n_id] = False
    assert not memory.history.value[rest].any()


def test_a_snapshot_is_not_written_by_steps():
    memory = ControlVariate(normed(), 6, "snapshot").train()
    total(memory, X, NeighborSampler(memory.graph, [2]).sample([3, 4])[0])
    assert not memory.history.value.any()


@pytest.mark.parametrize("kind", ["history", "snapshot"])
def test_what_a_pass_over_the_graph_renews(kind):
    torch.manual_seed(0)
    model, g = models.make("gcn", 6, 8, 3), normed()
    model.remember(f"exact+{kind}", g, X)
    memory = model.memories["1"]
    first = memory.history.value.clone()
    assert first.any(), "the first pass fills both"
    with torch.no_grad():
        model.encoder.weight.add_(1.0)
    model.inference(g, X)
    assert torch.equal(memory.history.value, first) == (kind == "history")
    now = memory.history.value.clone()
    other = star(3).normalized("row")
    model.inference(other, X[:4])
    assert torch.equal(memory.history.value, now), "another graph's pass leaves it alone"
    if kind == "snapshot":
        assert torch.allclose(memory.sums.value.double(), full_sum(g, now), atol=1e-5)


def test_names_of_estimators():
    with pytest.raises(InputError, match="`estimator`"):
        memories("nonsense")
    assert not memories("plain")
    both = memories("exact+history", layers=3, dtype=torch.float16)
    assert [type(m).__name__ for m in both.values()] == ["ExactSum", "ControlVariate", "ControlVariate"]
    assert both["1"].history.value.shape == (60, 8) and both["1"].history.value.dtype == torch.float16


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gatv2", "geniepath"])
@pytest.mark.parametrize("kind", ["history", "snapshot"])
def test_models_with_a_fresh_memory_are_exact(name, kind):
    """Right after the pass that fills it, H is today's h: any draw gives the full result, in every layer."""
    torch.manual_seed(0)
    model = models.make(name, 6, 8, 3, layers=3).eval()
    g = messy_graph().normalized(*model.graph)
    want = model.inference(g, X)
    sampler = NeighborSampler(g, [1, 1, 1])
    sampler.skip = model.remember(kind, g, X)
    assert sampler.skip == frozenset()
    assert torch.allclose(run(model, X, sampler.sample(torch.arange(60))), want, atol=1e-4)


def test_attention_memory_writes_after_the_step():
    """The rows are read by the backward pass, so what a step saw is written when the next begins."""
    torch.manual_seed(0)
    model = models.make("gat", 6, 8, 3)
    g = messy_graph().normalized(*model.graph)
    model.remember("history", g, X)
    memory = model.memories["0"]
    assert isinstance(memory, AttentionVariate)
    before = memory.history.value.clone()
    with torch.no_grad():
        model.encoder.weight.add_(0.5)
    sampler = NeighborSampler(g, [2, 2])
    run(model.train(), X, sampler.sample([3, 4])).sum().backward()
    assert torch.equal(memory.history.value, before)
    run(model.eval(), X, sampler.sample([3, 4]))
    assert not torch.equal(memory.history.value, before)


@pytest.mark.parametrize("name, arch", each_arch("gcn", "sage"))
def test_a_snapshot_that_waits_is_made_as_nodes_are_met(name, arch):
    """Fresh rows make any draw exact; rows stay when the weights move; their sums are those of the rows."""
    torch.manual_seed(0)
    model = models.make(name, 6, 8, 3, arch=arch).eval()
    g = messy_graph().normalized(*model.graph)
    sampler = NeighborSampler(g, [1, 1])
    sampler.skip = model.remember("exact+snapshot", g, X, on_demand=True)
    memory = model.memories["1"]
    assert not memory.history.value.any() and bool(memory.missing.rows.all()), "no pass is made"
    half, rest = torch.arange(30), torch.arange(30, 60)
    assert torch.allclose(run(model, X, sampler.sample(half)), model.inference(g, X)[:30], atol=1e-5)
    assert memory.missing is None, "a pass ends the waiting"

    sampler.skip = model.remember("exact+snapshot", g, X, on_demand=True)
    memory = model.memories["1"]
    run(model, X, sampler.sample(half))
    first, met = memory.history.value.clone(), ~memory.missing.rows
    assert not memory.missing.sums[half].any() and bool(memory.missing.sums[rest].all()) and met[half].any()
    with torch.no_grad():
        model.convs[0].kernel().add_(0.5)
    run(model, X, sampler.sample(torch.arange(60)))
    assert torch.equal(memory.history.value[met], first[met])
    assert torch.allclose(memory.sums.value.double(), full_sum(g, memory.history.value), atol=1e-5)


def test_a_snapshot_that_waits_is_taken_up_again():
    torch.manual_seed(0)
    model, other = models.make("gcn", 6, 8, 3).eval(), models.make("gcn", 6, 8, 3).eval()
    other.load_state_dict(model.state_dict())
    g, blocks = normed(), NeighborSampler(normed(), [1, 1])
    for m in (model, other):
        blocks.skip = m.remember("exact+snapshot", g, X, on_demand=True)
    run(model, X, blocks.sample([3, 4]))
    other.memories["1"].restore(model.memories["1"].state())
    assert torch.equal(other.memories["1"].missing.rows, model.memories["1"].missing.rows)
    assert not other.memories["1"].missing.rows.all()
    model.inference(g, X)
    other.memories["1"].restore(model.memories["1"].state())
    assert other.memories["1"].missing is None, "a state of after a pass waits for nothing"


@pytest.mark.parametrize(("estimator", "layers"), [("snapshot", 2), ("exact+history", 2), ("exact+snapshot", 3)])
def test_what_cannot_wait_makes_its_pass(estimator, layers):
    model = models.make("gcn", 6, 8, 3, layers=layers)
    model.remember(estimator, normed(), X, on_demand=True)
    assert all(m.history.value.any() for m in model.memories.values() if m.draws)


# --- h made anew from the sums below -------------------------------------------------------------------------------


def gat_with_sums(name: str, layers: int = 2, **options):
    """A model with its sums kept, and how it draws one neighbour per node."""
    torch.manual_seed(0)
    model = models.make(name, 6, 8, 3, layers=layers, **options).eval()
    g = messy_graph().normalized(*model.graph)
    sampler = NeighborSampler(g, [1] * layers, None, "systematic")
    sampler.skip = model.remember("exact+sums", g, X)
    return model, g, sampler


def gradients(model, blocks, plain: bool = False):
    """Of the encoder, the first layer's W and bias, and all of the second layer, for a loss over 60 targets."""
    with frozen(model, plain=plain):
        out = run(model, X, blocks)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


ATTENTION_MODELS = [("gat", {"heads": 1}), ("gat", {"heads": 4}), ("gat", {"heads": 2, "arch": "plain"}),
                    ("gatv2", {"heads": 2}), ("geniepath", {})]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), ATTENTION_MODELS)
def test_fresh_sums_are_exact_and_so_are_gradients_but_those_of_the_first_scores(name, options):
    model, g, sampler = gat_with_sums(name, **options)
    assert sampler.skip == {0}
    every = NeighborSampler(g, [-1, -1]).sample(torch.arange(60))
    blocks = sampler.sample(torch.arange(60))
    assert torch.allclose(run(model, X, blocks), run(model, X, every), atol=1e-4)
    got, want = gradients(model, blocks), gradients(model, every, plain=True)
    exact = [n for n in want if not n.startswith("encoder") and not re.fullmatch(r"convs\.0\.(dst|src|score).*", n)]
    if (name == "gat" and model.convs[0].narrow) or name == "gatv2":
        exact = [n for n in exact if n != "convs.0.linear.weight"]  # the scores are made of it
    assert len(exact) > 4
    for n in exact:
        assert torch.allclose(got[n], want[n], atol=1e-3 * float(want[n].abs().max()) + 1e-5), n


@pytest.mark.parametrize("draw", ["systematic", "multinomial"])
def test_sums_and_gradients_from_old_sums_are_unbiased(draw):
    """With equal scores the ratio is a sum. The mean of 400 draws is that of all neighbours within 5 standard errors
    at some 500 places: 3e-4 to fail by chance, were they apart."""
    model, g, sampler = gat_with_sums("gat", heads=2)
    memory, conv, nodes = model.memories["1"], model.convs[1], torch.arange(20)
    with torch.no_grad():
        model.memories["0"].kept.value.mul_(0.5)  # no longer what the first layer forms
        conv.dst.zero_()
        conv.src.zero_()
    toward = torch.randn(20, 2, 8, generator=torch.Generator().manual_seed(4))
    learnt = [*model.encoder.parameters(), *model.convs[0].parameters()]

    def found(low, high):
        h = model.hidden(SimpleNamespace(x=X[low.n_id], blocks=[low]), 1)
        total = memory.total(conv, model.set_recompute(1, Values(h)), h[:20], high)
        grads = torch.autograd.grad((total * toward).sum(), learnt)
        return torch.cat([part.detach().flatten() for part in (total, *grads)]).double()

    def drawn(k):
        draws = NeighborSampler(g, [1, k], None, draw)
        draws.skip = sampler.skip
        return draws

    want, some = found(*drawn(-1).sample(nodes)), drawn(2)
    every = torch.stack([found(*some.sample(nodes)) for _ in range(400)])
    assert bool((every.std(0) > 0).any())
    assert bool(((every.mean(0) - want).abs() <= 5 * every.std(0) / 400**0.5 + 1e-5).all())


@pytest.mark.parametrize("options", [{"heads": 2}, {"heads": 2, "dropout": 0.3}])
def test_the_first_layer_writes_its_sums_after_the_step(options):
    """The layer above reads the old rows in the same step; nothing dropped is written."""
    model, _, sampler = gat_with_sums("gat", **options)
    kept = model.memories["0"].kept.value
    true = kept.clone()
    kept.mul_(0.5)
    blocks = sampler.sample([3, 4])
    run(model.train(), X, blocks).sum().backward()
    assert torch.equal(kept, 0.5 * true)
    model.memories["0"].flush()
    seen = torch.zeros(60, dtype=torch.bool)
    seen[blocks[0].targets] = True
    assert torch.allclose(kept[seen], true[seen], atol=1e-5) and torch.equal(kept[~seen], 0.5 * true[~seen])


# --- tracked norms -------------------------------------------------------------------------------------------------

N, HUBS = 40, 6


def play(policy, draw, k, norm, visits, noise=0.0, seed=1):
    """All hubs of a star visited `visits` times; norms by global id, each sight off by exp(noise * normal)."""
    sampler, gen = NeighborSampler(policy.graph, [k], policy, draw, seed=seed), torch.Generator().manual_seed(seed)
    for _ in range(visits):
        block = sampler.sample(torch.arange(HUBS))[0]
        seen = norm[block.n_id][block.src] * torch.exp(noise * torch.randn(block.num_edges, generator=gen))
        sampler.update([block], [(block.weight * block.scale * seen).square()])
    return policy


def over_oracle(policy, draw, k, norm) -> float:
    """sum a^2 |h|^2 / q over the least that the draw allows, for hub 0."""
    cost = norm[HUBS : HUBS + N].double()
    w = policy.root[0, HUBS : HUBS + N].double()
    if draw == "multinomial":
        q = (1 - policy.eta) * w / w.sum() + policy.eta / N
        return float((cost.square() / q).sum() / cost.sum().square())
    q, best = (draws.inclusion(v.float(), [0, N], k, eta) for v, eta in ((w, policy.eta), (cost, 0.0)))
    return float((cost.square() / q).sum() / (cost.square() / best).sum())


def norms(spread=0.7, seed=0) -> torch.Tensor:
    return torch.exp(spread * torch.randn(HUBS + N, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("draw", ["multinomial", "systematic", "depround"])
@pytest.mark.parametrize("k", [2, 5])
def test_tracked_is_near_the_oracle_on_stationary_stars(draw, k):
    norm = norms()
    policy = Tracked(star(N, HUBS), 1)
    before = over_oracle(policy, draw, k, norm)
    assert before > 1.3
    assert over_oracle(play(policy, draw, k, norm, 60), draw, k, norm) < 1.10


@pytest.mark.parametrize("k", [1, 2, 5])
def test_tracked_stands_noise(k):
    norm = norms()
    policy = play(Tracked(star(N, HUBS), 1), "systematic", k, norm, 400, noise=0.5)
    assert over_oracle(policy, "systematic", k, norm) < 1.15
    even = norms(spread=0.0)  # nothing to learn: noise must not make it worse than uniform by much
    policy = play(Tracked(star(N, HUBS), 1), "systematic", k, even, 400, noise=0.5)
    assert over_oracle(policy, "systematic", k, even) < 1.15


def test_tracked_follows_drift():
    old, new = norms(seed=0), norms(seed=5)
    policy = play(Tracked(star(N, HUBS), 1), "systematic", 5, old, 100)
    assert over_oracle(policy, "systematic", 5, new) > 1.3
    assert over_oracle(play(policy, "systematic", 5, new, 60, seed=2), "systematic", 5, new) < 1.10


def test_tracked_shares_what_one_parent_saw():
    norm = norms()
    policy = Tracked(star(N, HUBS), 1)
    sampler = NeighborSampler(policy.graph, [5], policy, "systematic")
    for _ in range(200):
        block = sampler.sample([0])[0]
        sampler.update([block], [(block.weight * block.scale * norm[block.n_id][block.src]).square()])
    often = policy.visits[0, HUBS:] > 20  # of the others the start is not forgotten yet
    share = (policy.root[0, HUBS:] / norm[HUBS:])[often]
    assert int(often.sum()) > 15 and float(share.std() / share.mean()) < 0.05, "hub 1 knows what hub 0 met"


@pytest.mark.parametrize("unit", [1e-8, 1e-3, 1e8])
def test_the_unit_of_the_norms_does_not_matter_and_the_unseen_are_typical(unit):
    one, other = (play(Tracked(star(N, HUBS), 1), "systematic", 2, u * norms(), 3) for u in (1.0, unit))
    assert torch.allclose(one.root, other.root, rtol=1e-3)
    rest = other.visits[0] == 0
    assert bool(rest.any()) and bool((other.root[0, rest] == 1).all())
    assert 0.3 < float(other.square[0, ~rest].mean()) < 3


def test_tracked_stands_norms_that_grow_together():
    """As a model learns all norms grow; who was seen long ago must not look small for it."""
    hubs, n = 100, 400
    norm = torch.exp(0.3 * torch.randn(hubs + n, generator=torch.Generator().manual_seed(0)))
    policy = Tracked(star(n, hubs), 1)
    sampler, cost = NeighborSampler(policy.graph, [2], policy), norm[hubs:].double()
    for step in range(30):
        block = sampler.sample(torch.arange(hubs))[0]
        seen = 1.3**step * norm[block.n_id][block.src]
        sampler.update([block], [(block.weight * block.scale * seen).square()])
        w = policy.root[0, hubs:].double()
        now = float((cost.square() / (0.95 * w / w.sum() + 0.05 / n)).sum()) / float(n * cost.square().sum())
        assert now < 1.02, "never above uniform's"


def test_edges_without_weight_or_sense_teach_nothing():
    g = Graph.from_edge_index([[1, 2, 1, 2], [0, 0, 3, 3]], [0.0, 1.0, 1.0, 1.0])
    policy = Tracked(g, 1)
    sampler = NeighborSampler(g, [-1], policy)
    block = sampler.sample([0, 3])[0]
    sampler.update([block], [(block.weight * 2).square()])
    assert policy.level.tolist() == [4.0] and policy.root[0, 1:3].tolist() == [1.0, 1.0]
    for bad in (torch.nan, torch.inf, 0.0):
        sampler.update([block], [torch.full((block.num_edges,), bad)])
        assert bool(torch.isfinite(policy.root).all())
    policy = Tracked(g, 1)
    policy.update(0, block, torch.zeros(block.num_edges))
    assert policy.root[0].tolist() == [1.0] * 4, "nothing over nothing"


@pytest.mark.parametrize(("draw", "node", "edge"), [("depround", 6, 0), ("multinomial", 14, 4), ("systematic", 14, 4)])
def test_tracked_state_per_node_and_per_edge(draw, node, edge):
    g = star(N, HUBS)
    policy = NeighborSampler(g, [2, 2, 2], Tracked(g, 3), draw).policy
    held = sum(b.numel() * b.element_size() for b in policy.buffers())
    known = 3 * (node * g.num_nodes + edge * g.num_edges)
    assert known <= held <= known + 12 * 3  # and two numbers per layer


def test_tracked_is_deterministic_and_resumes():
    one, two = (play(Tracked(star(N, HUBS), 1), "systematic", 3, norms(), 20) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), two.buffers(), strict=True))
    again = Tracked(star(N, HUBS), 1)
    again.load_state_dict(one.state_dict())
    play(again, "systematic", 3, norms(), 5, seed=9)
    play(one, "systematic", 3, norms(), 5, seed=9)
    assert torch.equal(again.root, one.root)


def test_tracked_by_name():
    sampler = make("graphsage", star(N, HUBS), [2], policy="tracked", draw="systematic", eta=0.2)
    assert isinstance(sampler.policy, Tracked) and sampler.policy.eta == 0.2


# --- dropout with a memory -------------------------------------------------------------------------------------------


def simple(copies: int = 1) -> Graph:
    """60 nodes, no edge twice: two of the same would share what is dropped; any number of times side by side."""
    a = torch.rand(60, 60, generator=torch.Generator().manual_seed(4)) < 0.2
    weight = torch.rand(int(a.sum()), generator=torch.Generator().manual_seed(5)).repeat(copies)
    edges = torch.cat([a.nonzero().t() + 60 * i for i in range(copies)], 1)
    return Graph.from_edge_index(edges, weight, num_nodes=60 * copies)


def moments(every: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return every.mean(0), every.var(0)


@pytest.mark.parametrize("kind", ["history", "snapshot"])
def test_dropout_leaves_a_sampled_sum_unbiased_with_the_noise_of_the_full_sum(kind):
    """z-tests over 4,000 draws at 120 places: means within 5 standard errors (7e-5 to fail by chance, were they
    apart); the variances, with today's h remembered dropout's alone, add up to the full sum's within 4 %."""
    copies, p, many = 100, 0.3, 4000
    g, x = simple(copies), X.repeat(copies, 1)
    seeds = (torch.arange(20) + 60 * torch.arange(copies)[:, None]).flatten()
    torch.manual_seed(0)
    sampler, conv = NeighborSampler(g, [2], None, "systematic"), models.GCNConv(6, 6)

    def estimates(remembered):
        memory = ControlVariate(g, 6, kind).eval()
        memory.refresh(remembered, None, snapshots_only=False)
        found = []
        for _ in range(many // copies):
            block = sampler.sample(seeds)[0]
            h = x[block.n_id]
            found.append(memory.total(conv, Values(h, share=p, mean=Values(h)), None, block).view(copies, 20, 6))
        return torch.cat(found).double()

    mean, variance = moments(estimates(x.roll(1, 0)))
    assert bool(((mean - full_sum(g, x)[:20]).abs() <= 5 * (variance / many).sqrt()).all())
    _, variance = moments(estimates(x))
    want = p / (1 - p) * full_sums(g, x, squared=True)[:20].double()
    assert abs(float(variance.sum() / want.sum()) - 1) < 0.04
    assert float((variance / want).min()) > 0.6 and float((variance / want).max()) < 1.5


def test_dropout_of_an_exact_first_layer_is_that_of_all_inputs():
    """4,000 times: as above; the full sum of dropped inputs is measured beside it."""
    g, p, many = simple(), 0.4, 4000
    torch.manual_seed(0)
    memory, conv = ExactSum(g, X, drops=True), models.GCNConv(6, 6)
    with torch.no_grad():
        conv.linear.weight.copy_(torch.eye(6))
        conv.linear.bias.zero_()
    block = NeighborSampler(g, [1]).sample(torch.arange(20))[0]
    every = torch.stack([memory(conv, Values(X, share=p), None, block).detach() for _ in range(many)]).double()
    a = torch.zeros(60, 60, dtype=torch.float64)
    a[torch.repeat_interleave(torch.arange(60), g.indptr.diff()), g.indices.long()] = g.weight.double()
    dropped = torch.nn.functional.dropout(X.expand(many, -1, -1), p).double()
    (mean, variance), (same, wanted) = moments(every), moments(a[:20] @ dropped)
    assert bool(((mean - same).abs() <= 5 * ((variance + wanted) / many).sqrt()).all())
    assert float((variance / wanted).min()) > 0.8 and float((variance / wanted).max()) < 1.25
    with pytest.raises(InputError, match="`dropout` must be set before `remember`"):
        ExactSum(g, X)(conv, Values(X, share=p), None, block)


@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gatv2"])
@pytest.mark.parametrize("estimator", ["exact+history", "exact+snapshot", "history"])
def test_dropout_over_all_neighbours_is_as_strong_with_a_memory_as_without(name, estimator):
    """The outputs' spread over 200 forward passes of one model, every neighbour taken: within 20 % of each other."""
    torch.manual_seed(0)
    heads = {"heads": 2} if name.startswith("gat") else {}
    model = models.make(name, 6, 8, 3, dropout=0.2, **heads).train()
    g = messy_graph().normalized(*model.graph)

    def spread():
        with torch.no_grad():
            outs = torch.stack([run(model, X, blocks) for _ in range(200)])
        return float(outs.var(0).sum())

    sampler = NeighborSampler(g, [-1, -1])
    blocks = sampler.sample(torch.arange(60))
    plain = spread()
    sampler.skip = model.remember(estimator, g, X)
    blocks = sampler.sample(torch.arange(60))
    assert 0.8 < spread() / plain < 1.25


@pytest.mark.parametrize("name", ["gcn", "sage", "gat"])
def test_a_memory_sees_nothing_of_dropout_in_the_layers_below(name):
    """Right after the pass that fills the memory, what is left to chance is 0, though h below is dropped; and the
    outputs of 150 passes spread by at most a third more with one neighbour than with all."""
    torch.manual_seed(0)
    model = models.make(name, 6, 8, 3, layers=3, dropout=0.3).train()
    g = messy_graph().normalized(*model.graph)
    skip = model.remember("exact+snapshot", g, X)

    def outputs(k):
        sampler = NeighborSampler(g, [k] * 3, None, "systematic")
        sampler.skip = skip
        with torch.no_grad(), watch(model) as energy:
            outs = torch.stack([run(model, X, sampler.sample(torch.arange(60))) for _ in range(150)])
        assert all(float(e.max()) < 1e-5 for e in energy if e.numel())
        return float(outs.var(0).sum())

    assert 0.75 < outputs(1) / outputs(-1) < 1.33


def test_exact_sums_are_formed_when_they_are_asked_for():
    g = messy_graph().normalized("row")
    how, conv = ExactSum(g, X, drops=True), models.GCNConv(X.shape[1], 3)
    assert how.left == g.num_nodes and not bool(how.lazy.row.any())
    blocks = [NeighborSampler(g, [2]).sample(nodes)[0] for nodes in ([3, 5, 3], [5, 8])]
    for block, left in zip(blocks, (g.num_nodes - 2, g.num_nodes - 3), strict=True):
        how(conv, Values(X[block.n_id], None), None, block)
        assert how.left == left
    known = how.lazy.row.nonzero().flatten()
    assert known.tolist() == [3, 5, 8]
    how.form(torch.arange(g.num_nodes))
    row = how.lazy.row.long()
    assert how.left == 0 and torch.equal(how.sums[row], full_sums(g, X))
    assert torch.equal(how.spread[row], full_sums(g, X, squared=True).sqrt())
    assert torch.equal(how.weights[row], full_sums(g, torch.ones(len(X), 1)))


# --- without a pass over the graph ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_history_of_what_was_seen_is_one_that_began_with_zeros(dtype):
    g = messy_graph().normalized("row")
    whole, seen = History(60, 3, dtype), LazyHistory(60, 3, dtype)
    for i in range(4):
        nodes = torch.randperm(60, generator=torch.Generator().manual_seed(i))[:9]
        for history in (whole, seen):
            history.push(nodes, X[nodes, :3] + i)
        everyone = torch.arange(60)
        assert torch.equal(whole.pull(everyone), seen.pull(everyone))
        assert torch.allclose(whole.sums(g, everyone), seen.sums(g, everyone), atol=1e-6)
    assert seen.nodes.used < 40 and not bool(seen.value[seen.nodes.used :].any())  # as many rows as nodes were seen
    with pytest.raises(InputError, match="`n_id`"):
        seen.pull(torch.tensor([60]))


@pytest.mark.parametrize("estimator", ["plain", "exact", "exact+history", "history"])
@pytest.mark.parametrize("arch", models.MODELS["gcn"].arches)
def test_outputs_of_some_nodes_are_those_of_a_pass(estimator, arch):
    g, nodes = messy_graph().normalized("row"), torch.tensor([7, 3, 3, 59, 20])
    model = models.make("gcn", X.shape[1], 8, 4, layers=3, arch=arch)
    model.remember(estimator, g, X, passes=False)
    for memory in model.active_memories():
        if memory.written_history is not None:
            memory.written_history.push(torch.arange(30), torch.rand(30, memory.written_history.value.shape[1]))
    assert torch.allclose(model.outputs(g, X, nodes, rows=2), model.inference(g, X)[nodes], atol=1e-5)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_row_sums_in_one_pass(dtype, squared):
    g, x, rows = messy_graph().normalized("row"), X.to(dtype), torch.tensor([3, 0, 3, 41])
    for edges in (
        g.edges,
        g.edges._replace(mean=True, total=torch.rand(60).double() + 1),
        g.edges._replace(weight=None),
    ):
        ours, plain = ops.row_sums(x, edges, rows, squared), ops.row_sums.reference(x, edges, rows, squared)
        for a, b in zip(ours, plain, strict=True):
            assert a.shape == b.shape and a.dtype == torch.float32 and torch.allclose(a, b, atol=1e-5)
