"""Prefix sums of inclusion probabilities: exact lengths, frequencies, the kernels against the reference, resuming."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from adahop import InputError, draws, ops
from adahop.methods import make
from adahop.ops import Odds, Prefix, random
from adahop.policies import Exp3, Static, Tracked
from adahop.policies.prefix import OFTEN, empty_prefix
from adahop.samplers import NeighborSampler
from adahop.storage import MEMORY
from conftest import messy_graph, same_blocks, star

ONE = 1 << 32


def sums_of(g, odds, k, rows=None, wide=1):
    made = empty_prefix(g, MEMORY, wide)
    rows = (g.indptr[1:] - g.first > k).nonzero().flatten() if rows is None else rows
    ops.renew(rows, torch.full_like(rows, k), g.edges, odds, made)
    return made


def lengths(table: torch.Tensor) -> torch.Tensor:
    """The steps of one row's table."""
    sums = (table.long() & (ONE - 1)).clone()
    sums[-1] = ONE
    return sums.diff(prepend=sums.new_zeros(1))


def draw(g, odds, dst, k, seed=0, how="systematic"):
    k = torch.tensor([k]) if isinstance(k, int) else k
    return ops.draw(g.edges, g.rows(dst), k, how, odds, random.key(seed))


def taught(g, policy, k, steps=6, seed=0, budget=False):
    """A sampler that has learned from random energies."""
    sampler = NeighborSampler(g, [k] * policy.layers, policy, "systematic", seed, budget)
    gen = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        learn(sampler, gen)
    return sampler


def learn(sampler, gen):
    blocks = sampler.sample(torch.arange(0, sampler.graph.num_nodes, 2))
    sampler.update(blocks, [-torch.rand(b.num_edges, generator=gen).log() for b in blocks])
    return blocks


@pytest.mark.parametrize("kernel", [True, False])
def test_lengths_are_the_inclusion_probabilities(kernel, monkeypatch):
    if not kernel:
        monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    rng = np.random.default_rng(0)
    for _ in range(300 if kernel else 60):
        n = int(rng.integers(2, 60))
        k = int(rng.integers(1, n))
        eta = float(rng.choice([0.0, 0.05, 0.5]))
        w = torch.exp(
            float(rng.choice([0.0, 0.5, 3.0, 20.0])) * torch.randn(n, generator=torch.Generator().manual_seed(n))
        )
        g = star(n)
        table, upto, _ = sums_of(g, Odds(edge=w, eta=eta), k, torch.tensor([0]))
        steps = lengths(table)
        assert int(steps.sum()) == ONE and int(steps.min()) >= 1 and int(steps.max()) <= ONE // k
        assert ONE // int(steps.max()) >= int(upto[0]) >= k
        pi = draws.inclusion(w, [0, n], k, eta)
        assert torch.allclose(steps.double() * k / ONE, pi, atol=2.0 * n * k / ONE)


def test_the_kernel_makes_the_references_sums(monkeypatch):
    g = messy_graph(60, 9000)
    gen = torch.Generator().manual_seed(0)
    square = torch.exp(2 * torch.randn(60, generator=gen))
    odds = Odds(edge=g.weight, node=square, eta=0.05, root=True)
    fast = sums_of(g, odds, 5)
    monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    plain = sums_of(g, odds, 5)
    far = (fast.table.long() - plain.table.long()).abs()
    assert int(torch.minimum(far, ONE - far).max()) <= 2  # sums of floating-point numbers end differently
    assert int((fast.upto > 0).sum()) == int((plain.upto > 0).sum()) > 30


@pytest.mark.parametrize("how", ["systematic", "multinomial"])
def test_draws_equal_the_reference_bit_for_bit(how, monkeypatch):
    """Rows with sums, without, and of no more than k neighbours; self-loops first."""
    g = messy_graph(80, 9000).normalized("row")
    square = torch.exp(2 * torch.randn(80, generator=torch.Generator().manual_seed(0)))
    odds = Odds(edge=g.weight, node=square, eta=0.05, root=True)
    rows = (g.indptr[1:] - g.first > 7).nonzero().flatten()[::2]
    odds = odds._replace(prefix=sums_of(g, odds, 7, rows))
    fast = [draw(g, odds, torch.arange(80), 7, seed, how) for seed in range(5)]
    everyone = draw(g, odds, torch.arange(80), -1)
    monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    for seed, one in enumerate(fast):
        assert all(map(torch.equal, one, draw(g, odds, torch.arange(80), 7, seed, how)))
    assert all(map(torch.equal, everyone, draw(g, odds, torch.arange(80), -1))) and len(everyone.pos) == g.num_edges


@pytest.mark.parametrize("spread", [0.0, 0.7, 2.5])
@pytest.mark.parametrize(("n", "k"), [(2, 1), (11, 10), (16, 3), (40, 10), (128, 7), (129, 7), (700, 10), (5000, 25)])
def test_edges_come_as_often_as_stated(n, k, spread):
    # chi-square of counts over at most 20 groups at p > 1e-4, 24 cases: false alarm < 3e-3
    copies, eta = 400, 0.05
    g = star(n, copies)
    w = torch.exp(spread * torch.randn(n, generator=torch.Generator().manual_seed(n)))
    odds = Odds(edge=w.repeat(copies), eta=eta)
    odds = odds._replace(prefix=sums_of(g, odds, k))
    pi = draws.inclusion(w, [0, n], k, eta)
    count, value, sums = torch.zeros(n), torch.rand(n, generator=torch.Generator().manual_seed(1)), []
    for seed in range(5):
        d = draw(g, odds, torch.arange(copies), k, seed)
        item = g.indices.long()[d.pos] - copies
        assert (d.ptr.diff() == k).all() and torch.allclose(d.prob.double(), pi[item], rtol=1e-5)
        assert torch.allclose(d.scale * d.prob, torch.ones(()))
        assert len(torch.unique(item + n * torch.arange(copies).repeat_interleave(k))) == len(item), "an edge twice"
        count += torch.bincount(item, minlength=n)
        sums.append((d.scale * value[item]).view(copies, k).sum(1))
    estimate = torch.cat(sums).double()  # |z| < 5, 24 cases: false alarm < 2e-5
    assert abs(float(estimate.mean() - value.sum())) <= 5 * float(estimate.std()) / 2000**0.5 + 1e-4 * float(
        value.sum()
    )
    assert (count[pi >= 1] == 2000).all()
    free = pi < 1
    group = (pi[free].cumsum(0) / pi[free].sum() * 20).long().clamp(max=19)
    seen, want = (
        torch.zeros(20, dtype=torch.double).index_add_(0, group, x.double()) for x in (count[free], 2000 * pi[free])
    )
    # systematic counts of a group vary less than independent ones: the test is on the safe side
    assert stats.chisquare(seen[want > 0], want[want > 0] * seen.sum() / want.sum()).pvalue > 1e-4


@pytest.mark.parametrize("n", [10, 100, 1000, 10_000, 100_000, 1_000_000])
@pytest.mark.parametrize("order", ["mixed", "sorted"])
def test_any_degree(n, order):
    """The place under each mark, by a search in the whole table; also where a guess by interpolation is far off."""
    g, k = star(n), 9
    w = torch.exp(1.5 * torch.randn(n, generator=torch.Generator().manual_seed(0)))
    odds = Odds(edge=w.sort().values if order == "sorted" else w, eta=0.05)
    table, upto, _ = sums_of(g, odds, k)
    odds = odds._replace(prefix=Prefix(table, upto))
    steps = lengths(table)
    ends = steps.cumsum(0)
    for seed in range(20):
        d = draw(g, odds, torch.tensor([0]), k, seed)
        u = int(random.unit(random.key(seed), torch.tensor([0]), 0) * 2.0**32)
        marks = torch.tensor([(u + s * ONE) // k for s in range(k)])
        assert torch.equal(d.pos, torch.searchsorted(ends, marks, right=True))
        assert torch.allclose(d.prob.double(), (steps[d.pos].double() * k / ONE).clamp(max=1.0), rtol=1e-6)


def test_other_sizes_are_rescaled_or_scanned():
    """Sums made for k = 5 serve every k that leaves no inclusion probability above 1; beyond, the odds of today do."""
    # chi-square over 30 edges at p > 1e-4, six cases: false alarm < 6e-4
    n, copies, eta = 30, 3000, 0.1
    g = star(n, copies)
    w = torch.exp(0.5 * torch.randn(n, generator=torch.Generator().manual_seed(3)))
    odds = Odds(edge=w.repeat(copies), eta=eta)
    made = sums_of(g, odds, 5)
    limit = int(made.upto[0])
    assert 5 <= limit < 20
    for k in (1, 4, limit, limit + 1, 20, 29):
        d = draw(g, odds._replace(prefix=made), torch.arange(copies), torch.full((copies,), k))
        item = g.indices.long()[d.pos] - copies
        pi = lengths(made.table[:n]).double() * k / ONE if k <= limit else draws.inclusion(w, [0, n], k, eta)
        assert (d.ptr.diff() == k).all() and torch.allclose(d.prob.double(), pi[item], rtol=1e-5)
        free = pi < 1
        seen = torch.bincount(item, minlength=n).double()
        assert (seen[~free] == copies).all()
        assert stats.chisquare(seen[free], pi[free] * seen[free].sum() / pi[free].sum()).pvalue > 1e-4


def test_a_row_is_renewed_after_its_visits():
    n, k = 8 * OFTEN * 5, 5
    g = star(n, 2)
    sampler = NeighborSampler(g, [k], Tracked(g, 1), "systematic")
    upto = sampler.policy.prefix.upto0
    for visit in range(1, 20):
        blocks = sampler.sample([0])
        sampler.update(blocks, [torch.rand(k)])
        assert int(upto[1]) == visit % 8 and (int(upto[0]) > 0) == (visit >= 8)
    assert upto[2:4].tolist() == [0, 0]
    blocks = sampler.sample([0] * 7)  # one target often; it is renewed once, and what comes after does not count
    sampler.update(blocks, [torch.rand(blocks[0].num_edges)])
    assert int(upto[1]) == 0


@pytest.mark.parametrize("sums", ["edges", "blocks"])
@pytest.mark.parametrize("policy", [Tracked, Exp3])
@pytest.mark.parametrize("budget", [False, True])
def test_learned_draws_are_unbiased(policy, budget, sums):
    # 60 targets, one sum each, |z| < 5.5: false alarm < 1e-5 per case
    g = messy_graph(60, 9000)
    sampler = taught(g, policy(g, 1, sums=sums), 400 if budget else 6, 24, budget=budget)
    state = sampler.policy.prefix if policy is Tracked else sampler.policy.arms.prefix
    assert int((state.upto0[::2] > 0).sum()) > 20  # half of the nodes were targets
    value, rounds = torch.rand(60, generator=torch.Generator().manual_seed(5)), 600
    found = torch.zeros(rounds, 60, dtype=torch.double)
    for i in range(rounds):
        (block,) = sampler.sample(torch.arange(60))
        message = (block.weight * block.scale * value[block.n_id[block.src]]).double()
        found[i].index_add_(0, block.dst, message)
    want = torch.zeros(60, dtype=torch.double).index_add_(0, g.dst(), (g.weight * value[g.indices.long()]).double())
    z = (found.mean(0) - want) / (found.std(0) / rounds**0.5 + 1e-6 * want + 1e-9)
    assert float(z.abs().max()) < 5.5


KINDS = {
    "tracked": Tracked,
    "tracked, blocks": partial(Tracked, sums="blocks"),
    "exp3": Exp3,
    "exp3, blocks": partial(Exp3, sums="blocks"),
    "static": Static,
}


@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_matter(kind, many_threads):
    g, ends = messy_graph(80, 20_000), []
    for n in (1, 2, 8):
        with ops.threads(n):
            policy = KINDS[kind](g, 2)
            ends.append(learn(taught(g, policy, 4), torch.Generator().manual_seed(9)))
    assert same_blocks(ends[0], ends[1]) and same_blocks(ends[0], ends[2])


@pytest.mark.parametrize("sums", ["edges", "blocks"])
@pytest.mark.parametrize("method", ["adahop", "bs"])
def test_a_loaded_state_goes_on_to_the_bit(method, sums):
    g = messy_graph(60, 9000)
    one, two = (make(method, g, [4, 4], draw="systematic", sums=sums) for _ in range(2))
    one.skip = two.skip = frozenset({0})
    gens = [torch.Generator().manual_seed(0) for _ in range(2)]
    for _ in range(5):
        learn(one, gens[0])
    state = {name: t.clone() for name, t in one.state_dict().items()}
    assert [name for name in state if "table" in name] == [name for name in state if name.endswith("table1")], (
        "a layer that was never drawn leaves no sums"
    )
    two.load_state_dict(state)
    gens[1].set_state(gens[0].get_state())
    for _ in range(5):
        assert same_blocks(learn(one, gens[0]), learn(two, gens[1]))
    old = {name: t for name, t in state.items() if "prefix" not in name}  # of a version without sums
    two.load_state_dict(old)
    assert not bool(getattr(two.policy, "arms", two.policy).prefix.upto1.any())


def test_static_weights_need_no_scan_and_zero_weights_never_come():
    g = messy_graph(60, 9000)
    odds = NeighborSampler(g, [5, 7], Static(g, 2), "systematic").policy.odds_for(1, "systematic")
    assert odds.prefix is not None and int(odds.prefix.upto.max()) >= 7
    weight = torch.rand(g.num_edges) + 0.1
    weight[::3] = 0
    sampler = NeighborSampler(g, [5], Static(g, 1, weight), "systematic")
    assert sampler.policy.odds_for(0, "systematic").prefix is None
    for _ in range(20):
        (block,) = sampler.sample(torch.arange(55))
        drawn = block.e_id[~block.is_self()]
        assert (weight[drawn] > 0).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_with_replacement_edges_come_as_often_as_stated(spread, weighted):
    # chi-square over 300 neighbours at p > 1e-4 and |z| < 5 of the estimate, six cases: false alarm < 1e-3
    n, copies, eta, k = 300, 400, 0.05, 40
    g, gen = star(n, copies), torch.Generator().manual_seed(0)
    node = torch.exp(spread * torch.randn(g.num_nodes, generator=gen))
    edge = (torch.rand(n, generator=gen) + 0.1).repeat(copies) if weighted else None
    odds = Odds(edge=edge, node=node, eta=eta)
    odds = odds._replace(prefix=sums_of(g, odds, 1, torch.arange(copies)))
    d = draw(g, odds, torch.arange(copies), k, how="multinomial")
    x = node[copies:].double() * (1.0 if edge is None else edge[:n].double())
    q = (1 - eta) * x / x.sum() + eta / n
    item, value = g.indices.long()[d.pos] - copies, torch.rand(n, generator=gen)
    assert torch.allclose(d.prob.double(), q[item], rtol=1e-4) and torch.allclose(d.scale * d.prob * k, torch.ones(()))
    assert stats.chisquare(torch.bincount(item, minlength=n), q * len(item)).pvalue > 1e-4
    estimate = (d.scale * value[item]).view(copies, k).sum(1).double()
    assert abs(float(estimate.mean() - value.sum())) <= 5 * float(estimate.std()) / copies**0.5


def test_which_draws_keep_sums():
    g = messy_graph()
    kept = {("adahop", "multinomial"), ("adahop", "systematic"), ("bs", "systematic")}
    for draw_ in ops.DRAWS:
        for method in ("adahop", "bs"):
            policy = make(method, g, [3], draw=draw_).policy
            assert (getattr(policy, "arms", policy).prefix.at(0) is not None) == ((method, draw_) in kept)


# --- sums of blocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["systematic", "multinomial"])
def test_draws_by_blocks_are_the_references(how, monkeypatch):
    """Odds have moved on since the sums were made, some far; sums of floating-point numbers end differently."""
    g, gen = messy_graph(80, 9000).normalized("row"), torch.Generator().manual_seed(0)
    then, now = (torch.exp(2 * torch.randn(80, generator=gen)) for _ in range(2))
    odds, k = Odds(edge=g.weight, node=then, eta=0.05, root=True), 7 if how == "systematic" else 1
    rows = (g.indptr[1:] - g.first > 7).nonzero().flatten()[::2]
    made = sums_of(g, odds, k, rows, wide=32)
    odds = odds._replace(node=now, prefix=made)
    fast = [draw(g, odds, torch.arange(80), 7, seed, how) for seed in range(5)]
    assert int(g.degree().max()) > 128 and int((made.table != 0).sum()) > 100
    monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    plain = sums_of(g, odds._replace(node=then, prefix=None), k, rows, wide=32)
    far = (made.table.long() - plain.table.long()).abs()
    assert int(torch.minimum(far, ONE - far).max()) <= 2
    for seed, one in enumerate(fast):
        other = draw(g, odds, torch.arange(80), 7, seed, how)
        assert torch.equal(one.ptr, other.ptr) and torch.equal(one.pos, other.pos)
        assert torch.allclose(one.prob, other.prob, rtol=1e-6) and torch.allclose(one.scale, other.scale, rtol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 0.7, 2.5])
@pytest.mark.parametrize(("n", "k"), [(11, 10), (32, 5), (33, 10), (65, 60), (700, 10), (5000, 25)])
def test_by_blocks_edges_come_as_often_as_stated(n, k, spread):
    """Frequencies equal the stated probabilities though the odds have changed since the blocks were summed."""
    # |z| < 5 of the estimate and chi-square over at most 20 groups at p > 1e-4, 18 cases: false alarm < 2e-3
    copies, gen = 400, torch.Generator().manual_seed(n)
    g = star(n, copies)
    then, now = (torch.exp(spread * torch.randn(n, generator=gen)).repeat(copies) for _ in range(2))
    made = sums_of(g, Odds(edge=then, eta=0.05), k, wide=32)
    odds = Odds(edge=now, eta=0.05, prefix=made)
    count, stated, value, sums = torch.zeros(n), torch.zeros(n), torch.rand(n, generator=gen), []
    for seed in range(5):
        d = draw(g, odds, torch.arange(copies), k, seed)
        item = g.indices.long()[d.pos] - copies
        assert (d.ptr.diff() == k).all() and torch.allclose(d.scale * d.prob, torch.ones(()))
        assert len(torch.unique(item + n * torch.arange(copies).repeat_interleave(k))) == len(item), "an edge twice"
        count += torch.bincount(item, minlength=n)
        stated[item] = d.prob
        sums.append((d.scale * value[item]).view(copies, k).sum(1))
    estimate, total = torch.cat(sums).double(), float(value.sum())
    assert abs(float(estimate.mean()) - total) <= 5 * float(estimate.std()) / 2000**0.5 + 1e-4 * total
    free = (stated < 1) & (count > 0)
    assert (count[stated >= 1] == 2000).all()
    if int(free.sum()) > 40 and bool((count > 0).all()):  # all probabilities are known
        group = (stated[free].cumsum(0) / stated[free].sum() * 20).long().clamp(max=19)
        seen, want = (
            torch.zeros(20, dtype=torch.double).index_add_(0, group, x.double())
            for x in (count[free], 2000 * stated[free])
        )
        assert float(stated.sum()) == pytest.approx(k, rel=1e-4)
        assert stats.chisquare(seen[want > 0], want[want > 0] * seen.sum() / want.sum()).pvalue > 1e-4


def test_blocks_follow_the_odds_of_now():
    """Within a block an edge comes by today's odds: one that has become light is drawn seldom without new sums."""
    n, copies, k = 64, 300, 4
    g = star(n, copies)
    made = sums_of(g, Odds(edge=torch.ones(n * copies), eta=0.05), k, wide=32)
    now = torch.ones(n)
    now[:16] = 0.01
    d = draw(g, Odds(edge=now.repeat(copies), eta=0.05, prefix=made), torch.arange(copies), k)
    item = g.indices.long()[d.pos] - copies
    assert float((item < 16).double().mean()) < 0.05 < float((item < 32).double().mean()) - 0.4


def test_blocks_take_an_eighth_of_a_byte_per_edge():
    g = messy_graph(60, 9000)
    small, large = (make("adahop", g, [4], sums=sums).policy.prefix for sums in ("blocks", "edges"))
    assert large.table0.nbytes == 4 * g.num_edges
    assert small.table0.nbytes <= g.num_edges / 8 + 4 * (g.num_nodes + 1)
    with pytest.raises(InputError, match="`sums` must be one of edges, blocks, got 'rows'"):
        make("adahop", g, [4], sums="rows")
