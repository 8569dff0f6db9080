"""LABOR: unbiased, exact where it can be, and thriftier than independent draws at equal variance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from adahop.checks import InputError
from adahop.graph import Graph
from adahop.methods import make
from adahop.ops import labor, threads
from adahop.ops.drawing import reference
from adahop.samplers import Labor
from conftest import block_sum, full_sum, messy_graph, same_blocks

PPI = Path(__file__).parents[3] / "shared" / "data" / "ppi_rebuilt_labels.npz"


@pytest.mark.parametrize("refine", [0, 1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_unbiased_on_weighted_graphs_with_loops_and_parallel_edges(refine, seed):
    g = messy_graph(seed=seed)
    h = torch.randn(g.num_nodes, 3, generator=torch.Generator().manual_seed(seed))
    want, seeds = full_sum(g, h), torch.arange(g.num_nodes)
    sampler = Labor(g, [4], seed=seed, refine=refine)
    runs = torch.stack([block_sum(sampler.sample(seeds)[0], h) for _ in range(2000)])
    error = runs.std(0) / len(runs) ** 0.5
    z = ((runs.mean(0) - want) / error.clamp(min=1e-6)).abs()
    assert float(z.max()) < 4.5
    few = g.indptr[1:] - g.first <= 4
    assert torch.allclose(runs[0][few], want[few], atol=1e-4)


@pytest.mark.parametrize("refine", [0, 2])
def test_reported_probabilities_are_the_true_ones(refine):
    g = messy_graph(seed=2)
    seen, prob = torch.zeros(g.num_edges), torch.zeros(g.num_edges)
    sampler = Labor(g, [3], refine=refine)
    for _ in range(3000):
        block = sampler.sample(torch.arange(30))[0]
        seen[block.pos] += 1
        prob[block.pos] = block.prob
        assert torch.allclose(block.scale * block.prob, torch.ones(block.num_edges))
    met = seen > 0
    error = (prob * (1 - prob) / 3000).sqrt() * 4.5 + 1e-6
    assert bool(((seen / 3000 - prob).abs() <= error)[met].all())


@pytest.mark.parametrize("refine", [0, 1, 4])
def test_refined_rows_keep_the_variance_of_k_draws(refine):
    g = messy_graph(seed=3)
    dst = torch.arange(g.num_nodes)
    n = (g.indptr[1:] - g.first).double()
    pi, c = torch.ones(g.num_nodes, dtype=torch.double), None
    row = torch.repeat_interleave(dst, n.long())
    src = torch.cat([g.indices[g.first[i] : g.indptr[i + 1]].long() for i in dst])
    for _ in range(refine + 1):
        pi = pi if c is None else pi * torch.zeros_like(pi).scatter_reduce_(0, src, c[row], "amax").clamp(min=1e-9)
        c = reference._constants(pi[src], row, len(dst), n, 5)
    p = (c[row] * pi[src]).clamp(max=1)
    total = torch.zeros(len(dst), dtype=torch.double).index_add_(0, row, 1 / p)
    many = n > 5
    assert torch.allclose(total[many], n[many] ** 2 / 5)
    assert bool((p[~many[row]] == 1).all())


@pytest.mark.parametrize("refine", [0, 1, 3])
@pytest.mark.parametrize("k", [1, 5, -1])
def test_kernel_equals_reference_and_thread_counts_do_not_matter(refine, k, many_threads):
    g = messy_graph()
    for dst in (torch.arange(60), torch.tensor([3, 3, 59, 7]), torch.tensor([], dtype=torch.long)):
        args = (g.edges, g.rows(dst), torch.tensor([k]), refine, g.num_nodes, 12345)
        want = labor.reference(*args)
        for t in (1, 2, 8):
            with threads(t):
                got = labor(*args)
            assert torch.equal(got.ptr, want.ptr) and torch.equal(got.pos, want.pos)
            assert torch.allclose(got.prob, want.prob) and torch.allclose(got.scale, want.scale)


def test_targets_share_their_random_numbers():
    hubs = torch.arange(20).repeat_interleave(50)
    g = Graph.from_edge_index(torch.stack([20 + torch.arange(50).repeat(20), hubs]), num_nodes=70)
    shared = make("labor", g, [10]).sample(torch.arange(20))[0]
    alone = make("graphsage", g, [10], draw="systematic").sample(torch.arange(20))[0]
    assert shared.num_src - 20 == shared.num_edges // 20 and alone.num_src > 60


def test_determinism_and_odd_seeds():
    g = messy_graph()
    one, other = make("labor", g, [3, 3], seed=5), make("labor", g, [3, 3], seed=5)
    for seeds in ([], [59], [4, 4, 4], torch.arange(60)):
        a, b = one.sample(seeds), other.sample(seeds)
        assert same_blocks(a, b)
        assert a[-1].n_id[: a[-1].num_dst].tolist() == list(seeds)
    assert not same_blocks(one.sample(torch.arange(60)), one.sample(torch.arange(60)))
    with pytest.raises(InputError, match="`refine` must be"):
        make("labor", g, [3], refine=-1)


def test_alone_or_without_edges():
    for n in (1, 4):
        g = Graph.from_edge_index(np.zeros((2, 0), np.int64), num_nodes=n)
        for refine in (0, 2):
            block = Labor(g.normalized(), [2], refine=refine).sample(torch.arange(n))[0]
            assert block.num_edges == n and bool((block.scale == 1).all())


@pytest.mark.skipif(not PPI.exists(), reason="the PPI file is not here")
@pytest.mark.parametrize("refine,one_layer", [(0, 0.95), (1, 0.9), (2, 0.9)])
def test_fewer_sources_at_no_more_variance_on_ppi(refine, one_layer):
    g = Graph.load(PPI).normalized()
    h = torch.randn(g.num_nodes, 16, generator=torch.Generator().manual_seed(0))
    seeds = torch.randperm(g.num_nodes, generator=torch.Generator().manual_seed(1))[:1024]
    want = full_sum(g, h)
    sources, error = {}, {}
    for name, sampler in (
        ("labor", make("labor", g, [10, 10], refine=refine)),
        ("uniform", make("graphsage", g, [10, 10], draw="systematic")),
    ):
        runs = [sampler.sample(seeds) for _ in range(20)]
        sources[name] = [np.mean([blocks[i].num_src for blocks in runs]) for i in (1, 0)]
        error[name] = np.mean([float((block_sum(b[1], h) - want[seeds]).square().sum()) for b in runs])
    assert sources["labor"][0] < one_layer * sources["uniform"][0]
    assert sources["labor"][1] < 0.75 * sources["uniform"][1]
    assert error["labor"] < 1.02 * error["uniform"]  # equal, up to the noise of 20 runs


def test_dependent_steps_share_their_random_numbers():
    g = messy_graph()
    sampler, alone = Labor(g, [2], dependent=3), Labor(g, [2])
    drawn = [sampler.sample(torch.arange(30))[0].pos for _ in range(6)]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[3], drawn[5])
    assert not torch.equal(drawn[2], drawn[3])
    assert not torch.equal(alone.sample(torch.arange(30))[0].pos, alone.sample(torch.arange(30))[0].pos)
