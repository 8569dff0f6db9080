"""NeighborSampler: unbiased, exact where it can be, nested blocks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import adahop
from adahop import ops
from adahop.checks import InputError
from adahop.graph import Graph
from adahop.methods import METHODS
from adahop.policies import Exp3, Exp3M, Static
from adahop.samplers import NeighborSampler
from conftest import block_sum, full_sum, messy_graph, same_blocks

DRAWS = ("multinomial", "systematic", "depround", "poisson")


def z_scores(sampler, graph, h, repeats: int, layer: int = 0) -> torch.Tensor:
    """(mean of the estimate - full sum) / its standard error, a target; rows without any spread must agree."""
    nodes, exact = torch.arange(graph.num_nodes), full_sum(graph, h)
    total, square = torch.zeros(graph.num_nodes).double(), torch.zeros(graph.num_nodes).double()
    for _ in range(repeats):
        out = block_sum(sampler.sample(nodes)[layer], h)
        total += out - exact
        square += (out - exact).square()
    mean = total / repeats
    spread = ((square / repeats - mean.square()).clamp(min=0) / (repeats - 1)).sqrt()
    sure = spread < 1e-6 * exact.abs().clamp(min=1)
    assert float(mean[sure].abs().max() if sure.any() else 0) < 1e-4
    assert int((~sure).sum()) > 20
    return mean[~sure] / spread[~sure]


def learned(kind, graph: Graph):
    """A policy that is far from uniform."""
    policy = kind(graph, 1) if kind is not Static else Static(graph, 1, eta=0.1)
    if kind is not Static:
        policy.arms.put(0, torch.exp(torch.randn(graph.num_edges, generator=torch.Generator().manual_seed(5))))
    return policy


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind", [None, Static, Exp3, Exp3M])
def test_unbiased_for_every_policy_and_draw(kind, draw):
    # 60 targets, 400 repeats, |z| < 5.5, 16 cases: false alarm < 1e-4 (a little more for the skew of weighted draws)
    g = messy_graph().normalized("row")
    h = torch.randn(60, generator=torch.Generator().manual_seed(2)) + 1
    policy = None if kind is None else learned(kind, g)
    z = z_scores(NeighborSampler(g, [3], policy, draw, seed=7), g, h, 400)
    assert float(z.abs().max()) < 5.5
    assert 0.5 < float(z.square().mean()) < 2  # as wide as chance makes it, not narrower


NODE_WISE = [name for name, m in METHODS.items() if m.family == "node-wise" and m.unbiased and not m.needs]


@pytest.mark.parametrize("name", NODE_WISE)
def test_unbiased_for_every_node_wise_method(name):
    # after some learning from random energies; 60 targets, 400 repeats, |z| < 5.5: false alarm < 3e-6 a method
    g = messy_graph().normalized("row")
    sampler = adahop.make(name, g, sizes=[3], seed=3)
    gen = torch.Generator().manual_seed(0)
    for _ in range(20):
        blocks = sampler.sample(torch.arange(60))
        sampler.update(blocks, [torch.rand(b.num_edges, generator=gen) * b.scale**2 for b in blocks])
    h = torch.randn(60, generator=gen) + 1
    z = z_scores(sampler, g, h, 400)
    assert float(z.abs().max()) < 5.5


def test_a_wrong_scale_would_be_seen():
    g = messy_graph().normalized("row")
    sampler = NeighborSampler(g, [3], seed=7)
    honest = sampler.sample
    sampler.sample = lambda seeds: [b._replace(scale=b.scale * 1.1) for b in honest(seeds)]
    h = torch.ones(60)
    with pytest.raises(AssertionError):
        assert float(z_scores(sampler, g, h, 400).abs().max()) < 5.5


@pytest.mark.parametrize("draw", DRAWS)
def test_everyone_is_the_full_sum_exactly(draw):
    g = messy_graph().normalized("sym")
    h = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    block = NeighborSampler(g, [-1], learned(Exp3, g), draw).sample(torch.arange(60))[0]
    assert block.num_edges == g.num_edges and (block.scale == 1).all() and (block.prob == 1).all()
    assert not block.drawn().any()
    assert torch.allclose(block_sum(block, h), full_sum(g, h), atol=1e-12)
    assert torch.equal(block.e_id.sort().values, torch.arange(g.num_edges))


@pytest.mark.parametrize("draw", DRAWS)
def test_the_node_itself_is_exact(draw):
    g = messy_graph().normalized("row")
    block = NeighborSampler(g, [1], learned(Exp3, g), draw).sample(torch.arange(60))[0]
    own = block.is_self()
    loops = g.indices.long() == g.dst()
    assert int(own.sum()) == int(loops.sum()) and (block.scale[own] == 1).all() and (block.prob[own] == 1).all()
    assert torch.equal(block.weight[own], g.weight[loops])


def test_parallel_edges_are_arms_of_their_own():
    # node 2 has 11 and 12 twice as sources: over many draws every one of the parallel edges comes
    g = messy_graph()
    seen = set()
    sampler = NeighborSampler(g, [2], seed=0)
    for _ in range(300):
        seen |= set(sampler.sample([2])[0].e_id.tolist())
    assert seen == set((g.edge_index()[1] == 2).nonzero().flatten().tolist())


@pytest.mark.parametrize("sizes", [[3], [2, 4], [1, 2, 3], [-1, 2], [2, -1]])
def test_blocks_nest(sizes):
    g = messy_graph().normalized("row")
    seeds = torch.tensor([9, 3, 57, 0])
    blocks = NeighborSampler(g, sizes).sample(seeds)
    assert len(blocks) == len(sizes)
    assert torch.equal(blocks[-1].n_id[:4], seeds) and blocks[-1].num_dst == 4
    for low, high in itertools.pairwise(blocks):
        assert low.num_dst == high.num_src and torch.equal(low.n_id[: low.num_dst], high.n_id)
    for block, k in zip(blocks, sizes, strict=True):
        assert len(block.n_id.unique()) == block.num_src
        if k > 0:
            assert int(((~block.is_self()).long().new_zeros(block.num_dst)
                        .index_add_(0, block.dst, (~block.is_self()).long())).max()) <= k  # fmt: skip


def test_layers_and_steps_draw_apart():
    g = messy_graph(60, 3000)
    sampler = NeighborSampler(g, [3, 3], seed=0)
    nodes = torch.arange(55)
    one, two = sampler.sample(nodes), sampler.sample(nodes)
    assert not same_blocks(one, two)
    assert not torch.equal(one[0].e_id[: one[0].ptr[55]], one[1].e_id)  # the same targets in another layer
    again = NeighborSampler(g, [3, 3], seed=0)
    assert same_blocks(again.sample(nodes), one) and same_blocks(again.sample(nodes), two)


def test_a_nodes_draw_does_not_depend_on_its_company():
    g = messy_graph()
    alone, together = (NeighborSampler(g, [3], seed=4).sample(s)[0] for s in ([3], [8, 3, 1]))
    a, b = together.ptr[1:3].tolist()
    assert alone.e_id.tolist() == together.e_id[a:b].tolist()


def test_the_reference_gives_the_same_blocks(monkeypatch):
    g = messy_graph().normalized("row")
    fast = NeighborSampler(g, [3, 2], draw="systematic", seed=1).sample([5, 3, 3, 59])
    monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    assert ops.draw.form(g.indptr) == "reference"
    assert same_blocks(fast, NeighborSampler(g, [3, 2], draw="systematic", seed=1).sample([5, 3, 3, 59]))


@pytest.mark.parametrize("sizes", [5, "5", [], [0], [5, 0], [-2], [2.0], [True], None])
def test_bad_sizes(sizes):
    with pytest.raises(InputError, match="`sizes` must be"):
        NeighborSampler(messy_graph(), sizes)


def test_bad_draw_and_graph():
    with pytest.raises(InputError, match="did you mean 'systematic'"):
        NeighborSampler(messy_graph(), [2], draw="systematik")
    with pytest.raises(TypeError, match=r"adahop\.Graph, got Tensor"):
        NeighborSampler(torch.zeros(2, 2), [2])


@pytest.mark.parametrize("size", [1, 7, 55, 100])
def test_epochs_cover_every_node_once(size):
    sampler = NeighborSampler(messy_graph(), [2], seed=1)
    nodes = torch.arange(0, 60, 2)
    first, second = list(sampler.epoch(nodes, size)), list(sampler.epoch(nodes, size))
    for parts in (first, second):
        assert torch.equal(torch.cat(parts).sort().values, nodes) and all(len(p) <= size for p in parts)
    assert not torch.equal(torch.cat(first), torch.cat(second))
    assert torch.equal(torch.cat(list(sampler.epoch(nodes, size, shuffle=False))), nodes)
    assert list(sampler.epoch([], size)) == []
    fresh = NeighborSampler(messy_graph(), [2], seed=1)
    assert torch.equal(torch.cat(list(fresh.epoch(nodes, size))), torch.cat(first))


def test_sizes_and_seed_as_users_have_them():
    g = messy_graph()
    for sizes in ((3, 2), np.array([3, 2]), torch.tensor([3, 2]), [np.int64(3), np.int32(2)]):
        assert NeighborSampler(g, sizes).sizes == [3, 2]
    for bad in ([2.5], [True], "3,2", 3, [], None):
        with pytest.raises(ValueError, match="`sizes` must be"):
            NeighborSampler(g, bad)
    with pytest.raises(ValueError, match="`seed` must be a whole number"):
        NeighborSampler(g, [2], seed=1.5)


@pytest.mark.parametrize(
    "method", ["graphsage", "bs", "bs.m", "adahop", "thanos", "labor", "ladies", "fastgcn", "s-gcn"]
)
def test_a_size_without_end_takes_all_neighbours(method):
    """`[10**9, ...]` means all of them, as -1 does; no room is reserved for neighbours that there are not."""
    graph = adahop.load("synthetic:200,3000,4,2").graph
    many, every = (adahop.make(method, graph, [size, size]).sample(range(20)) for size in (2**40, -1))
    for a, b in zip(many, every, strict=True):
        assert torch.equal(a.n_id, b.n_id) and torch.equal(a.edge_index, b.edge_index) and torch.equal(a.scale, b.scale)
    with pytest.raises(InputError, match="`sizes` must be below 2\\^63"):
        adahop.make(method, graph, [2**63, 1])
