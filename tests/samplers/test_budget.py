"""Budgets: totals a layer, spread over the targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from adahop import make
from adahop.block import Seeds
from adahop.checks import InputError
from adahop.graph import Graph
from adahop.ops.drawing import cpu
from adahop.samplers.budget import passed_down, spread
from adahop.samplers.loop import Merged, sample


def stars(degrees: list[int]) -> Graph:
    """Node i < len(degrees) has so many neighbours of its own."""
    src, dst, at = [], [], len(degrees)
    for i, n in enumerate(degrees):
        src += range(at, at + n)
        dst += [i] * n
        at += n
    return Graph.from_edge_index([src, dst], num_nodes=at)


@pytest.mark.parametrize("total", [5, 6, 11, 40, 63, 64, 1000])
def test_spread_is_exact_and_within_bounds(total):
    strength = torch.tensor([1.0, 2.0, 8.0, 0.0, float("nan")])
    most = torch.tensor([20, 20, 4, 10, 10])
    for key in range(20):
        k = spread(total, strength, most, key)
        assert int(k.sum()) == min(total, 64) and (k >= 1).all() and (k <= most).all()


def test_spread_follows_the_strength():
    strength = torch.tensor([1.0, 2.0, 3.0, 4.0])
    mean = torch.stack([spread(25, strength, torch.full((4,), 99), key) for key in range(400)]).double().mean(0)
    assert (mean - torch.tensor([2.5, 5.0, 7.5, 10.0])).abs().max() < 0.12  # five standard errors of a rounding


def test_spread_of_too_little_still_draws_one():
    assert spread(2, torch.ones(4), torch.tensor([3, 3, 0, 3]), 0).tolist() == [1, 1, 0, 1]
    assert spread(5, torch.ones(0), torch.zeros(0, dtype=torch.long), 0).numel() == 0


def test_spread_minimises_the_variance():
    """Against every other split of 12 draws over three targets, with V_i / k_i as the variance."""
    strength = torch.tensor([1.0, 2.0, 3.0], dtype=torch.double)

    def noise(k: list[int]) -> float:
        return float((strength.square() / torch.tensor(k)).sum())

    best = min(noise([a, b, 12 - a - b]) for a in range(1, 11) for b in range(1, 12 - a))
    assert noise(spread(12, strength, torch.full((3,), 99), 0).tolist()) <= best + 1e-12


def test_a_budgeted_sampler_keeps_to_its_totals():
    graph = stars([50, 10, 3, 1, 0]).normalized("sym", True)
    sampler = make("graphsage", graph, [30], draw="systematic", budget=True)
    for _ in range(5):
        (block,) = sampler.sample(range(5))
        assert int(block.drawn().sum() + (~block.is_self() & ~block.drawn()).sum()) == 30


@pytest.mark.parametrize("draw", ["multinomial", "systematic", "depround"])
def test_budgets_leave_the_sum_unbiased(draw):
    """The mean of 4,000 estimates, each within 5 standard errors: 1e-5 in all to fail by chance."""
    graph = stars([30, 12, 6]).normalized("row", True)
    sampler = make("graphsage", graph, [9], policy="static", draw=draw, budget=True)
    value = torch.rand(graph.num_nodes, generator=torch.Generator().manual_seed(0))
    rows = []
    for _ in range(4000):
        (b,) = sampler.sample(range(3))
        rows.append(torch.zeros(3).index_add_(0, b.dst, b.weight * b.scale * value[b.n_id[b.src]]))
    found = torch.stack(rows).double()
    row = torch.repeat_interleave(torch.arange(graph.num_nodes), torch.diff(graph.indptr))
    exact = torch.zeros(graph.num_nodes).index_add_(0, row, graph.weight * value[graph.indices.long()])[:3]
    error = found.std(0) / len(rows) ** 0.5
    assert ((found.mean(0) - exact).abs() <= 5 * error + 1e-6).all()


@pytest.mark.parametrize("draw", ["multinomial", "systematic", "poisson"])
def test_a_layer_without_targets_draws_nothing(draw, monkeypatch):
    """Memory is filled beforehand, as what is read of it without being written differs from run to run."""
    monkeypatch.setattr(cpu, "empty", lambda shape, dtype: np.full(shape, 7, dtype))
    sampler = make("graphsage", stars([3]), [4, 4], draw=draw, budget=True)
    for seeds in ([], [1]):  # node 1 has no neighbours, so that the second hop has no new nodes
        merged = Merged()
        blocks = sample(sampler, Seeds(torch.tensor(seeds, dtype=torch.long)), merged)
        assert [b.num_edges for b in blocks] == [0, 0] and merged.counts == [len(seeds), 0, 0]


def test_what_an_error_counts_for():
    """Two targets that draw the same source: its error enters both sums."""
    graph = Graph.from_edge_index([[2, 2, 3], [0, 1, 1]]).normalized("row", True)
    (block,) = make("graphsage", graph, [-1]).sample([0, 1])
    weighs = passed_down(block, torch.ones(2))
    shared = float(weighs[int((block.n_id == 2).nonzero())])
    assert shared == pytest.approx((1 / 4 + 1 / 9) ** 0.5) and float(weighs[0]) == pytest.approx(1 / 2)
    bare = Graph.from_edge_index([[2, 2, 3], [0, 1, 1]])
    (block,) = make("graphsage", bare, [-1]).sample([0, 1])
    assert passed_down(block, torch.ones(2))[:2].tolist() == [1.0, 1.0]


def test_budget_is_a_switch():
    with pytest.raises(InputError, match="`budget` must be true or false, got 3"):
        make("graphsage", stars([2]), [2], budget=3)
