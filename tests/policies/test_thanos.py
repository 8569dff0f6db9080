"""Thanos: the biased mean, the reward it learns from, and what it learns."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GCNConv

from adahop.features import Values
from adahop.messages import Messages, alignment
from adahop.methods import make
from adahop.policies import Thanos
from adahop.train import fit
from adahop.watcher import watch
from conftest import block_sum, full_sum, messy_graph, same_blocks, star, toy_data

METHODS = ["thanos", "thanos.m"]


def near_and_far(n=40, width=8, seed=0):
    """A star whose first five neighbours lie near the mean of all and the others far from it, on all sides of it."""
    g = torch.Generator().manual_seed(seed)
    h = torch.zeros(n + 1, width)
    h[1:] = torch.randn(n, width, generator=g) * 3
    h[1:] += 2.0 - h[1:].mean(0)
    h[1:6] = 2.0 + 0.1 * torch.randn(5, width, generator=g)
    return star(n), h


def alignments(h, block, coef):
    return alignment(Messages(block, coef, Values(h)))


def train(method, graph, h, visits, k=5, **options):
    sampler = make(method, graph, [k], seed=0, **options)
    for _ in range(visits):
        blocks = sampler.sample([0])
        sampler.update(blocks, [alignments(h[b.n_id], b, b.weight * b.scale) for b in blocks])
    return sampler


def test_alignment_is_the_formula():
    block = make("thanos", messy_graph(), [4]).sample(torch.arange(60))[0]
    h = torch.randn(block.num_src, 3, generator=torch.Generator().manual_seed(0))
    coef = block.weight * block.scale
    got = alignments(h, block, coef)
    m = coef[:, None] * h[block.src]
    own = block.is_self()
    for e in range(block.num_edges):
        rest = (block.dst == block.dst[e]) & ~own
        rest[e] = False
        want = 0.0 if own[e] or not rest.any() else 2 * (m[e] @ m[rest].mean(0)) - m[e] @ m[e]
        assert float(got[e]) == pytest.approx(float(want), rel=1e-4, abs=1e-4)
    heads = alignments(h.unsqueeze(1).repeat(1, 2, 1), block, coef.unsqueeze(1).repeat(1, 2))
    assert torch.allclose(heads, 2 * got, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_scale_is_n_over_k_whatever_q(method):
    g = messy_graph()
    sampler = make(method, g, [4])
    sampler.policy.arms.put(0, torch.exp(2 * torch.randn(g.num_edges, generator=torch.Generator().manual_seed(0))))
    block = sampler.sample(torch.arange(60))[0]
    n = (g.indptr[1:] - g.first)[block.n_id[block.dst]]
    true = ~block.is_self()
    assert torch.allclose(block.scale[true], (n[true] / 4).clamp(min=1.0))
    assert bool((block.scale[~true] == 1).all())


@pytest.mark.parametrize("method", METHODS)
def test_unbiased_until_it_learns_and_exact_for_few(method):
    g = messy_graph()
    h = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    sampler, want = make(method, g, [4]), full_sum(g, h)
    runs = torch.stack([block_sum(sampler.sample(torch.arange(60))[0], h) for _ in range(2000)])
    z = (runs.mean(0) - want) / (runs.std(0) / 2000**0.5).clamp(min=1e-6)
    assert float(z.abs().max()) < 4.5
    few = g.indptr[1:] - g.first <= 4
    assert torch.allclose(runs[0][few], want[few], atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_learns_to_favour_neighbours_near_the_mean(method):
    g, h = near_and_far()
    sampler = train(method, g, h, 1000)
    chance = torch.softmax(sampler.policy.log_weight[0], 0)
    assert float(chance[:5].sum()) > 0.6  # 0.125 at the start
    fresh, want = make(method, g, [5]), full_sum(g, h)[0]
    error = [
        sum(float((block_sum(s.sample([0])[0], h) - want).square().sum()) for _ in range(300)) for s in (sampler, fresh)
    ]
    assert error[0] < 0.5 * error[1]


def test_the_unit_of_the_features_does_not_matter():
    g, h = near_and_far()
    weights = [train("thanos", g, unit * h, 100).policy.log_weight for unit in (1.0, 2.0**10, 2.0**-10)]
    assert torch.allclose(weights[0], weights[1], atol=1e-3) and torch.allclose(weights[0], weights[2], atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_starts_anew_every_so_many_steps(method):
    g, h = near_and_far()
    assert float(train(method, g, h, 50, restart=50).policy.log_weight.abs().sum()) > 0
    one = train(method, g, h, 51, restart=50).policy
    assert int((one.log_weight != 0).sum()) <= 5 and int(one.visits[0, 0]) == 1


def test_one_draw_teaches_nothing_and_bad_numbers_do_no_harm():
    g, h = near_and_far()
    assert float(train("thanos", g, h, 50, k=1).policy.log_weight.abs().sum()) == 0.0
    sampler = make("thanos", g, [5])
    for bad in (float("nan"), float("inf"), -float("inf"), 1e38, -1e38):
        blocks = sampler.sample([0, 0])
        sampler.update(blocks, [torch.full((blocks[0].num_edges,), bad)])
    assert bool(torch.isfinite(sampler.policy.log_weight).all())
    assert bool(torch.isfinite(sampler.sample([0])[0].scale).all())


@pytest.mark.parametrize("method", METHODS)
def test_state_travels_and_runs_repeat(method):
    g, h = near_and_far()
    sampler = train(method, g, h, 30)
    other = make(method, g, [5], seed=0)
    other.load_state_dict(sampler.state_dict())
    assert same_blocks(sampler.sample([0]), other.sample([0]))
    assert same_blocks(train(method, g, h, 30).sample([0]), train(method, g, h, 30).sample([0]))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", ["gcn", "sage", "gat", "geniepath"])
def test_trains_with_every_model(method, model):
    result = fit(toy_data(), model=model, method=method, sizes=(3, 3), epochs=2, hidden=8, batch_size=64)
    assert float(result.sampler.policy.log_weight.abs().sum()) > 0


def test_only_our_layers_tell_the_alignment():
    conv = GCNConv(2, 2, add_self_loops=False)
    with pytest.raises(ValueError, match="`reads` must be `energy` for PyG's GCNConv"), watch(conv, alignment):
        pass
    with pytest.raises(TypeError, match="`reads` must be a function of Messages such as"), watch(conv, "alignment"):
        pass
    assert isinstance(make("thanos", star(4), [2]).policy, Thanos) and make("thanos", star(4), [2]).reads is alignment


@pytest.mark.parametrize("estimator", ["history", "snapshot", "scores", "exact+history"])
def test_attention_with_a_memory_tells_the_alignment(estimator):
    """What is left to chance is w h - w' H: its alignment is that of the messages themselves."""
    result = fit(toy_data(), model="gat", method="thanos", estimator=estimator, sizes=(3, 3), epochs=1, hidden=8)
    assert float(result.sampler.policy.log_weight.abs().sum()) > 0


def test_alignment_of_a_difference_is_that_of_the_difference():
    block = make("thanos", messy_graph(), [4]).sample(torch.arange(60))[0]
    gen = torch.Generator().manual_seed(0)
    h, old = torch.randn(2, block.num_src, 3, generator=gen)
    new, gone = torch.rand(2, block.num_edges, 2, generator=gen)
    got = alignment(Messages(block, new, Values(h), old=(gone, old)))
    m = (new[:, :, None] * h[block.src, None] - gone[:, :, None] * old[block.src, None]).flatten(1)
    own = block.is_self()
    for e in range(0, block.num_edges, 7):
        rest = (block.dst == block.dst[e]) & ~own
        rest[e] = False
        want = 0.0 if own[e] or not rest.any() else 2 * (m[e] @ m[rest].mean(0)) - m[e] @ m[e]
        assert float(got[e]) == pytest.approx(float(want), rel=1e-3, abs=1e-3)
