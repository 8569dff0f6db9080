"""draw="shared": sources drawn once per batch. Statistical tests fix their seeds and ask |z| < 4.5: 7e-6 each."""

from __future__ import annotations

import pytest
import torch

import adahop
from adahop import ops
from adahop.checks import InputError
from adahop.config import Config
from adahop.graph import Graph
from adahop.ops import Odds, threads
from adahop.policies import Policy
from adahop.samplers import NeighborSampler
from adahop.samplers.loop import Merged

DRAWS = 2000


def random_graph(nodes: int = 60, edges: int = 900, seed: int = 0, parallel: bool = True) -> Graph:
    g = torch.Generator().manual_seed(seed)
    ends = torch.randint(nodes, (2, edges), generator=g)
    if not parallel:
        ends = ends.unique(dim=1)
    return Graph.from_edge_index(ends, num_nodes=nodes).normalized("sym", True)


def estimates(sampler, seeds, h):
    """[draws, targets, width] of the sums of the only layer."""
    out = []
    for _ in range(DRAWS):
        (block,) = sampler.sample(seeds)
        message = (block.weight * block.scale).unsqueeze(1) * h[block.n_id[block.src]]
        out.append(torch.zeros(block.num_dst, h.shape[1], dtype=h.dtype).index_add_(0, block.dst, message.to(h.dtype)))
    return torch.stack(out)


def full_sums(graph, seeds, h):
    (block,) = NeighborSampler(graph, [-1]).sample(seeds)
    message = block.weight.unsqueeze(1).to(h.dtype) * h[block.n_id[block.src]]
    return torch.zeros(block.num_dst, h.shape[1], dtype=h.dtype).index_add_(0, block.dst, message)


def z_scores(got, truth):
    return (got.mean(0) - truth).abs() / (got.std(0) / len(got) ** 0.5).clamp(min=1e-7)


@pytest.mark.parametrize("policy", ["uniform", "static", "tracked", "attended", "exp3", "exp3m"])
def test_the_sums_are_unbiased(policy):
    graph, seeds = random_graph(), torch.arange(0, 60, 4)
    h = torch.randn(60, 3, generator=torch.Generator().manual_seed(1), dtype=torch.double) + 1.0
    sampler = adahop.make("graphsage", graph, [2], seed=3, policy=policy, draw="shared")
    if policy in ("tracked", "attended"):
        sampler.policy.square.copy_(torch.linspace(0.1, 4.0, 60))
    got = estimates(sampler, seeds, h)
    assert float(z_scores(got, full_sums(graph, seeds, h)).max()) < 4.5
    assert float(got.std(0).max()) > 0.01  # something was left to chance


def test_targets_use_every_drawn_source_and_each_other_exactly():
    graph, seeds = random_graph(parallel=False), torch.arange(12)
    sampler = NeighborSampler(graph, [2], draw="shared", seed=5)
    (block,) = sampler.sample(seeds)
    (every,) = NeighborSampler(graph, [-1]).sample(seeds)
    known = torch.isin(every.n_id[every.src], block.n_id)
    assert set(zip(every.pos[known].tolist(), every.dst[known].tolist(), strict=True)) == set(
        zip(block.pos.tolist(), block.dst.tolist(), strict=True)
    )
    inner = block.src < block.num_dst
    assert bool((block.scale[inner] == 1).all()) and bool((block.prob[inner] == 1).all())
    drawn = block.n_id[block.num_dst :]
    assert drawn.numel() <= 2 * seeds.numel() and drawn.unique().numel() == drawn.numel()
    chance = block.drawn()
    assert bool(chance.any()) and torch.allclose(block.scale[chance], 1 / block.prob[chance])


def test_targets_use_more_neighbours_with_less_variance_from_no_more_nodes():
    graph, seeds = random_graph(200, 12_000, seed=2), torch.arange(0, 200, 4)
    h = torch.randn(200, 4, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    own, shared = (NeighborSampler(graph, [2], draw=draw, seed=1) for draw in ("systematic", "shared"))
    one, two = own.sample(seeds)[0], shared.sample(seeds)[0]
    assert two.num_src <= one.num_src * 1.1 and two.num_edges > 5 * one.num_edges
    spread = [float(estimates(s, seeds, h)[:400].var(0).mean()) for s in (own, shared)]
    assert spread[1] < 0.4 * spread[0]


def test_all_neighbours_are_exact():
    graph, seeds = random_graph(), torch.arange(0, 60, 4)
    (block,) = NeighborSampler(graph, [-1], draw="shared").sample(seeds)
    (every,) = NeighborSampler(graph, [-1]).sample(seeds)
    assert torch.equal(block.pos, every.pos) and bool((block.scale == 1).all())


def test_a_source_comes_where_less_than_one_is_expected():
    """Of 12 neighbours 10 are targets, which are exact: draws of its own would bring 1/6 of the others."""
    graph, seeds = Graph.from_edge_index([range(1, 13), [0] * 12]), torch.arange(11)
    h = torch.randn(13, 1, generator=torch.Generator().manual_seed(1), dtype=torch.double) + 3.0
    got = estimates(NeighborSampler(graph, [1], draw="shared", seed=3), seeds, h)
    assert float(z_scores(got, full_sums(graph, seeds, h)).max()) < 4.5 and float(got.std(0).max()) > 0.01


def test_an_edge_with_odds_of_zero_never_comes():
    graph = Graph.from_edge_index([[2, 3, 4, 5, 2, 3, 4, 5], [0, 0, 0, 0, 1, 1, 1, 1]])
    weight = torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 0.0])  # 2 -> 0 and 5 -> 1
    sampler = adahop.make("graphsage", graph, [2], policy="static", draw="shared", weight=weight)
    seen = {tuple(e) for _ in range(50) for b in sampler.sample([0, 1]) for e in b.e_id.unsqueeze(1).tolist()}
    assert seen == {(i,) for i in range(1, 7)}


@pytest.mark.parametrize("eta", [0.0, 0.1])
def test_chances_on_the_cpu_are_those_of_the_reference(eta):
    graph = random_graph(40, 600, seed=4)
    g = torch.Generator().manual_seed(2)
    edge = torch.rand(graph.indices.numel(), generator=g) * (torch.rand(graph.indices.numel(), generator=g) > 0.2)
    rows, k = graph.rows(torch.arange(20)), torch.randint(1, 9, (20,), generator=g)
    k[3] = -1
    near = ops.near(graph.edges, rows, rows.targets, True, torch.full((40,), -1, dtype=torch.int32))
    for odds in (Odds(), Odds(edge=edge, eta=eta), Odds(edge=edge, node=torch.rand(40, generator=g), eta=eta)):
        one, two = (f(graph.edges, rows, near, k, odds) for f in (ops.chances.cpu, ops.chances.reference))
        assert torch.allclose(one, two, atol=1e-9)
        drawn = ops.draw(graph.edges, rows, k, "depround", odds, 7)
        of = dict(zip(near.place.tolist(), one.tolist(), strict=True))
        for place, prob in zip(drawn.pos.tolist(), drawn.prob.tolist(), strict=True):
            assert place not in of or of[place] == pytest.approx(prob, abs=1e-6)


def test_the_same_batch_for_any_number_of_threads():
    graph, seeds = random_graph(500, 40_000, seed=6), torch.arange(0, 500, 2)
    made = []
    for many in (1, 2, 8):
        with threads(many):
            made.append(NeighborSampler(graph, [3, 3], draw="shared", seed=9).sample(seeds))
    for blocks in made[1:]:
        for a, b in zip(made[0], blocks, strict=True):
            assert torch.equal(a.n_id, b.n_id) and torch.equal(a.pos, b.pos) and torch.equal(a.scale, b.scale)


def test_auto_shares_where_targets_have_neighbours_in_common():
    dense, sparse = random_graph(100, 4000), random_graph(4000, 8000)
    for graph, shares in ((dense, True), (sparse, False)):
        auto, own = (NeighborSampler(graph, [2], draw=draw, seed=2) for draw in ("auto", "systematic"))
        a, b = auto.sample(torch.arange(32))[0], own.sample(torch.arange(32))[0]
        assert (a.num_edges > b.num_edges) == shares
        if not shares:
            assert torch.equal(a.pos, b.pos) and torch.equal(a.scale, b.scale)


def test_tracked_norms_keep_their_tables_of_k():
    """A shared block has more than k edges per row; the sums that systematic draws go by are made for k."""
    graph, seeds = random_graph(100, 4000), torch.arange(40)
    sampler = adahop.make("adahop", graph, [2], draw="auto")
    for _ in range(40):
        blocks = sampler.sample(seeds)
        sampler.update(blocks, [torch.rand(b.num_edges) for b in blocks])
    made = sampler.policy.prefix.at(0).upto[::2][seeds]
    assert bool((made > 0).any()) and not bool((sampler.policy.root[0] == 1).all())
    before = sampler.state_dict()
    again = adahop.make("adahop", graph, [2], draw="auto")
    again.load_state_dict(before)
    assert torch.equal(sampler.sample(seeds)[0].pos, again.sample(seeds)[0].pos)


def test_the_preset_shares_for_fixed_weights_alone():
    data = adahop.load("synthetic:300,12000,8,3")
    for model, how in (("gcn", "auto"), ("sage", "auto"), ("gat", "systematic"), ("gatv2", "systematic")):
        result = adahop.fit(data, model=model, sizes=(2, 2), epochs=1, hidden=8)
        assert result.sampler.how == how
    assert adahop.make("adahop", data.graph, [2]).how == "systematic"


def test_what_cannot_share_says_so():
    class Own(Policy):
        def places(self, layer, rows, k, how, key):
            return ops.draw(self.graph.edges, rows, k, how, Odds(), key)

    graph = random_graph()
    with pytest.raises(InputError, match=r"`draw` must be one of .* for policy Own, which draws by itself, got shared"):
        NeighborSampler(graph, [2], Own(graph, 1), "shared")
    with pytest.raises(InputError, match="`draw` must be one of"):
        Config(method="ladies", method_options={"draw": "shared"})
    sampler = NeighborSampler(random_graph(), [2], draw="shared")
    with pytest.raises(InputError, match="`disjoint` must be False"):
        sampler.sample([0, 1], Merged(disjoint=True))
    assert sampler.by_target() is None and not sampler.fixed_size and not sampler.by_owner


# --- typed graphs ----------------------------------------------------------------------------------------------------

COUNTS = {"a": 30, "b": 20, "c": 300}
RELATIONS = {("b", "dense", "a"): 400, ("b", "too", "a"): 300, ("c", "sparse", "a"): 90, ("a", "own", "a"): 200}


def typed_graph(seed: int = 0) -> Graph:
    """Into `a`: two dense relations between the same types, a sparse one, one from the type to itself; multi-edges."""
    g = torch.Generator().manual_seed(seed)
    edges = {
        r: torch.stack([torch.randint(COUNTS[end], (many,), generator=g) for end in (r[0], r[2])])
        for r, many in RELATIONS.items()
    }
    return Graph.from_relations(COUNTS, edges).normalized("row", False)


def relation_sums(block, h):
    """[relations, targets, width] sums of the messages of each relation."""
    out = torch.zeros(len(RELATIONS), block.num_dst, h.shape[1], dtype=h.dtype)
    message = (block.weight * block.scale).unsqueeze(1).to(h.dtype) * h[block.n_id[block.src]]
    return out.index_put_((block.edge_relation(), block.dst), message, accumulate=True)


@pytest.mark.parametrize("policy", ["uniform", "tracked", "exp3"])
@pytest.mark.parametrize("draw", ["shared", "auto"])
def test_the_sums_of_each_relation_are_unbiased(policy, draw):
    graph, seeds = typed_graph(), torch.arange(0, 30, 2)
    h = torch.randn(350, 3, generator=torch.Generator().manual_seed(1), dtype=torch.double) + 1.0
    sampler = adahop.make("graphsage", graph, [2], seed=3, policy=policy, draw=draw)
    if policy == "tracked":
        sampler.policy.square.copy_(torch.linspace(0.1, 4.0, graph.num_sources))
    got = torch.stack([relation_sums(sampler.sample(seeds)[0], h) for _ in range(DRAWS)])
    want = relation_sums(NeighborSampler(graph, [-1]).sample(seeds)[0], h)
    assert float(z_scores(got, want).max()) < 4.5
    assert all(float(each.std(0).max()) > 0.01 for each in got.unbind(1))  # something was left to chance in each


def test_auto_decides_for_each_relation():
    """15 targets have 350 neighbours among 20 by the dense relations, 45 among 300 by the sparse one."""
    graph, seeds = typed_graph(), torch.arange(0, 30, 2)
    auto, own = (NeighborSampler(graph, [2], draw=draw, seed=2) for draw in ("auto", "systematic"))
    a, b = auto.sample(seeds)[0], own.sample(seeds)[0]
    drawn = [[x.pos[x.edge_relation() == r] for x in (a, b)] for r in range(len(RELATIONS))]
    assert [one.numel() > other.numel() for one, other in drawn] == [True, True, False, True]
    assert torch.equal(*drawn[2])
    assert torch.equal(graph.indices[a.pos].long(), a.n_id[a.src]) and bool((a.row_ptr.diff() >= 0).all())
    for t, row in enumerate(a.row.tolist()):  # a row's edges lie in it
        pos = a.pos[a.row_ptr[t] : a.row_ptr[t + 1]]
        assert bool(((pos >= graph.indptr[row]) & (pos < graph.indptr[row + 1])).all())


@pytest.mark.parametrize("draw", ["shared", "auto"])
def test_typed_batches_are_the_same_for_any_number_of_threads(draw):
    graph, made = typed_graph(), []
    for many in (1, 2, 8):
        with threads(many):
            made.append(adahop.make("adahop", graph, [2, 2], draw=draw, seed=9).sample(torch.arange(20)))
    for blocks in made[1:]:
        for a, b in zip(made[0], blocks, strict=True):
            assert torch.equal(a.n_id, b.n_id) and torch.equal(a.pos, b.pos) and torch.equal(a.scale, b.scale)


def test_one_type_and_relation_draw_as_a_graph_without_types():
    ends = torch.randint(40, (2, 900), generator=torch.Generator().manual_seed(0))
    graphs = Graph.from_edge_index(ends, num_nodes=40), Graph.from_relations({"n": 40}, {("n", "to", "n"): ends})
    for draw in ("shared", "auto"):
        a, b = (NeighborSampler(g, [2], draw=draw, seed=2).sample(torch.arange(20))[0] for g in graphs)
        assert torch.equal(a.n_id, b.n_id) and torch.equal(a.pos, b.pos) and torch.equal(a.scale, b.scale)
