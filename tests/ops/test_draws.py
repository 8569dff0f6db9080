"""Draws: sizes, marginals, subsets, and the kernels against the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from adahop import draws, ops
from adahop.checks import InputError
from adahop.ops import Odds, random
from adahop.ops.drawing import cpu_scan
from conftest import messy_graph, star

HOW = ("multinomial", "systematic", "depround", "poisson")
ALL = torch.tensor([-1])


def run(graph, k, how, odds=None, seed=0, dst=None):
    dst = torch.arange(graph.num_nodes) if dst is None else dst
    k = torch.tensor([k]) if isinstance(k, int) else k
    return ops.draw(graph.edges, graph.rows(dst), k, how, odds or Odds(), random.key(seed))


def expected(how: str, w: torch.Tensor, k: int, eta: float) -> torch.Tensor:
    """What `prob` must be: q for draws with replacement, else the inclusion probability, solved by bisection."""
    w, n = w.double(), len(w)
    if n <= k:
        return torch.ones(n, dtype=torch.double)
    if how == "multinomial":
        return (1 - eta) * w / w.sum() + eta / n

    def pi(cap):
        low = w.clamp(max=cap)
        return k * ((1 - eta) * low / low.sum() + eta / n)

    lo, hi = 0.0, float(w.max())
    if float(pi(hi).max()) <= 1:
        return pi(hi)
    for _ in range(200):
        mid = (lo + hi) / 2
        lo, hi = (mid, hi) if float(pi(mid).max()) <= 1 else (lo, mid)
    return pi(lo)


# --- marginals and sizes -------------------------------------------------------------------------------------------

CASES = [(1, 1, 2000), (2, 1, 8000), (3, 2, 8000), (5, 3, 6000), (20, 6, 3000), (300, 40, 300)]
ODDS = {"uniform": (False, 0.0), "weighted": (True, 0.0), "mixed": (True, 0.3)}


@pytest.mark.parametrize("odds", ODDS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("n", "k", "trials"), CASES)
def test_marginals_and_sizes(n, k, trials, how, odds):
    # at most 25 cells a case, |z| < 5.5, 72 cases: false alarm < 1e-4
    weighted, eta = ODDS[odds]
    w = torch.exp(1.2 * torch.randn(n, generator=torch.Generator().manual_seed(n))) if weighted else torch.ones(n)
    g = star(n, trials)
    edge = torch.zeros(g.num_edges)
    edge[:] = w.repeat(trials)
    d = run(g, k, how, Odds(edge=edge if weighted else None, eta=eta), dst=torch.arange(trials))
    check(d, g.indices.long()[d.pos] - trials, how, expected(how, w, k, eta), n, k, trials)


@pytest.mark.parametrize("odds", ODDS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("n", [5_000, 100_000])
def test_marginals_of_hubs(n, how, odds):
    # 25 groups of neighbours a case, |z| < 5.5, 24 cases: false alarm < 1e-4
    weighted, eta = ODDS[odds]
    k, trials = 2000, 40 if n == 5000 else 12
    w = torch.exp(torch.randn(n, generator=torch.Generator().manual_seed(n))) if weighted else torch.ones(n)
    g = star(n)
    parts = [run(g, k, how, Odds(edge=w if weighted else None, eta=eta), s, torch.tensor([0])) for s in range(trials)]
    ptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.tensor([len(p.pos) for p in parts]).cumsum(0)])
    d = ops.Drawn(ptr, *(torch.cat([getattr(p, f) for p in parts]) for f in ("pos", "prob", "scale")))
    check(d, d.pos, how, expected(how, w, k, eta), n, k, trials)


def check(d, item, how, prob, n, k, trials):
    size, few = d.ptr.diff(), n <= k
    assert torch.allclose(d.prob.double(), prob[item], rtol=1e-5)
    draws_of_one = k if how == "multinomial" and not few else 1
    assert torch.allclose(d.scale.double(), 1 / (draws_of_one * prob[item]), rtol=1e-5)
    if few or how != "poisson":
        assert (size == min(n, k)).all()
    if few or how != "multinomial":
        row = torch.repeat_interleave(torch.arange(trials), size)
        assert len(torch.unique(row * n + item)) == len(item), "a neighbour came twice"
    if few:
        assert (d.prob == 1).all() and (d.scale == 1).all()
        return
    chance = prob * draws_of_one * trials  # mean count of every item
    spread = chance * (1 - prob)
    group = torch.randperm(n, generator=torch.Generator().manual_seed(0)) % 25
    count, mean, var = (torch.zeros(25, dtype=torch.double).index_add_(0, group, x.double()) for x in
                        (torch.bincount(item, minlength=n), chance, spread))  # fmt: skip
    live = var > 1e-6
    z = (count - mean)[live] / var[live].sqrt()
    assert float(z.abs().max()) < 5.5, (how, n, z)
    assert torch.equal(count[~live], mean[~live].round())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("n", [40_000, 100_000])
def test_no_block_of_a_hub_comes_more_often(n, how):
    # chi-square over 40 blocks at p > 1e-4, eight cases: false alarm < 8e-4. 16 random bits modulo n would fail
    # at once: the first 25,536 of 40,000 neighbours would come twice as often as the rest.
    g, k = star(n), 50
    trials = 400 if how != "poisson" else 60
    item = torch.cat([run(g, k, how, seed=s, dst=torch.tensor([0])).pos for s in range(trials)])
    counts = torch.bincount(item * 40 // n, minlength=40)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("equal_weights", [False, True])
@pytest.mark.parametrize("how", ["systematic", "depround"])
@pytest.mark.parametrize(("n", "k"), [(3, 2), (5, 2), (6, 3)])
def test_every_subset_is_as_likely(n, k, how, equal_weights):
    # chi-square over up to 20 subsets at p > 1e-4, twelve cases: false alarm < 2e-3
    trials = 6000
    g = star(n, trials)
    odds = Odds(edge=torch.ones(g.num_edges)) if equal_weights else Odds()
    d = run(g, k, how, odds, dst=torch.arange(trials))
    item = (g.indices.long()[d.pos] - trials).view(trials, k).sort(1).values
    name = (item * n ** torch.arange(k)).sum(1)
    subsets = [sum(j * n**i for i, j in enumerate(s)) for s in itertools.combinations(range(n), k)]
    counts = np.array([(name == s).sum() for s in subsets])
    assert counts.sum() == trials and stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("how", ["systematic", "depround"])
def test_every_pair_can_come_together(how):
    # with a fixed order systematic draws never take two small neighbours that lie side by side
    g, w = star(6, 4000), torch.tensor([0.5, 0.2, 0.3, 0.4, 0.25, 0.35])
    d = run(g, 2, how, Odds(edge=w.repeat(4000)), dst=torch.arange(4000))
    pairs = {tuple(sorted(p)) for p in (g.indices.long()[d.pos] - 4000).view(-1, 2).tolist()}
    assert pairs == set(itertools.combinations(range(6), 2))


# --- inclusion probabilities ---------------------------------------------------------------------------------------


def test_water_filling_by_hand():
    third = pytest.approx([1, 2 / 3, 1 / 3])
    assert draws.inclusion([0.7, 0.2, 0.1], [0, 3], 2).tolist() == third
    assert draws.inclusion([70.0, 20.0, 10.0], [0, 3], 2).tolist() == third
    assert draws.inclusion([100, 50, 1, 1, 1], [0, 5], 3).tolist() == pytest.approx([1, 1, 1 / 3, 1 / 3, 1 / 3])
    assert draws.inclusion([1, 1, 0, 0, 5, 5, 5], [0, 4, 4, 7], 2).tolist() == pytest.approx([1, 1, 0, 0] + [2 / 3] * 3)


def test_inclusion_solves_the_cap():
    g = torch.Generator().manual_seed(0)
    for _ in range(60):
        n = int(torch.randint(2, 40, (1,), generator=g))
        k = int(torch.randint(1, n, (1,), generator=g)) if n > 1 else 1
        eta = float(torch.rand(1, generator=g)) * 0.5 * float(torch.randint(2, (1,), generator=g))
        w = torch.exp(float(torch.rand(1, generator=g)) * 5 * torch.randn(n, generator=g)).float()
        want = expected("systematic", w, k, eta)
        ours = draws.inclusion(w, [0, n], k, eta)
        kernel = w.double().numpy().copy()
        cpu_scan.inclusion(kernel, n, k, eta)
        for p in (ours, torch.from_numpy(kernel)):
            assert float(p.sum()) == pytest.approx(k, rel=1e-6) and float(p.max()) <= 1 + 1e-9
            assert torch.allclose(p, want, rtol=1e-5, atol=1e-8), (n, k, eta)


@pytest.mark.parametrize("how", HOW)
def test_extreme_skew_stays_finite(how):
    w = torch.tensor([1e30, 1e-30, 1e-30, 1e20, 3.0, 1e-38])
    for eta in (0.0, 0.1):
        for seed in range(20):
            d = draws.draw(how, w, [0, 6], k=3, seed=seed, eta=eta)
            assert torch.isfinite(d.scale).all() and (d.scale > 0).all() and ((d.prob > 0) & (d.prob <= 1)).all()
            if how in ("systematic", "depround"):
                assert len(d.pos.unique()) == 3


@pytest.mark.parametrize("how", HOW)
def test_zero_weights_never_come(how):
    w = torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0, 4.0, 0.0, 0.0, 0.0, 1.0, 0.0])
    ptr = [0, 7, 9, 11]
    for seed in range(200):
        d = draws.draw(how, w, ptr, k=2, seed=seed)
        assert (w[d.pos] > 0).all()
        assert int(d.ptr[2] - d.ptr[1]) == 0  # nothing to draw from
        assert d.pos[d.ptr[2] :].tolist() == [9] and float(d.prob[-1]) == 1  # one candidate for two draws: exact
    floor = draws.draw(how, w, ptr, k=2, seed=0, eta=0.5)  # with eta > 0 everyone can come
    assert torch.isfinite(floor.scale).all()


# --- variance ------------------------------------------------------------------------------------------------------


def test_draws_without_replacement_have_less_variance():
    # one q (n = 20, k = 5), 6,000 estimates a draw: a variance is known to about 2 %
    gen, trials = torch.Generator().manual_seed(3), 6000
    value = torch.rand(20, generator=gen) + 0.5
    w = value * (0.5 + torch.rand(20, generator=gen))
    g, var = star(20, trials), {}
    for how in HOW:
        d = run(g, 5, how, Odds(edge=w.repeat(trials)), dst=torch.arange(trials))
        row = torch.repeat_interleave(torch.arange(trials), d.ptr.diff())
        est = torch.zeros(trials).index_add_(0, row, d.scale * value[g.indices.long()[d.pos] - trials])
        z = (est.mean() - value.sum()) / (est.std() / trials**0.5)
        assert abs(float(z)) < 5
        var[how] = float(est.var())
    assert var["systematic"] < var["multinomial"] / 1.2 and var["depround"] < var["multinomial"] / 1.2
    assert var["systematic"] < var["poisson"] and var["depround"] < var["poisson"]


# --- kernels, reference, threads -----------------------------------------------------------------------------------


def both(graph, k, how, odds, seed=0):
    dst = torch.arange(graph.num_nodes)
    ks = torch.full((graph.num_nodes,), k) if isinstance(k, int) else k
    plain = ops.draw.reference(graph.edges, graph.rows(dst), ks, how, odds, random.key(seed))
    return run(graph, k, how, odds, seed), plain


@pytest.mark.parametrize("k", [1, 7, -1, "mixed"])
@pytest.mark.parametrize("how", HOW)
def test_uniform_draws_equal_the_reference_bit_for_bit(how, k):
    g = messy_graph(200, 8000)
    k = torch.arange(200) % 9 - 1 if k == "mixed" else k
    if isinstance(k, torch.Tensor):
        k[k == 0] = 5
    for seed in range(3):
        for ours, plain in zip(*both(g, k, how, Odds(), seed), strict=True):
            assert torch.equal(ours, plain)


@pytest.mark.parametrize("form", ["edge", "edge-eta", "node", "both"])
@pytest.mark.parametrize("how", HOW)
def test_weighted_draws_have_the_references_probabilities(how, form):
    g = messy_graph(200, 8000)
    gen = torch.Generator().manual_seed(1)
    edge, node = torch.rand(g.num_edges, generator=gen) * 6 - 3, torch.rand(200, generator=gen)
    node[::7] = 0
    odds = {
        "edge": Odds(edge=edge.abs()), "edge-eta": Odds(edge=edge.abs(), eta=0.2),
        "node": Odds(node=node), "both": Odds(edge=edge.exp(), node=node, eta=0.1),
    }[form]  # fmt: skip
    prob = torch.full((2, g.num_edges), torch.nan)
    for seed in range(4 if how == "depround" else 12):  # the reference's DepRound is slow
        d = both(g, 5, how, odds, seed)
        if how != "poisson":
            assert torch.equal(d[0].ptr, d[1].ptr)
        for i, one in enumerate(d):
            prob[i, one.pos] = one.prob
        if how in ("multinomial", "poisson"):  # the same numbers meet the same sums: equal but for rounding
            same = [set(zip(torch.repeat_interleave(torch.arange(200), x.ptr.diff()).tolist(), x.pos.tolist(),
                            strict=True)) for x in d]  # fmt: skip
            assert len(same[0] ^ same[1]) <= 2
    seen = ~prob.isnan().any(0)
    assert int(seen.sum()) > 800
    assert torch.allclose(prob[0, seen], prob[1, seen], rtol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_thread_counts_do_not_matter(how, weighted, many_threads):
    g = messy_graph(300, 9000)
    odds = Odds(edge=g.weight, eta=0.1) if weighted else Odds()
    results = []
    for n in (1, 2, 8):
        with ops.threads(n):
            assert ops.get_threads() == n
            results.append(run(g, 4, how, odds, seed=5))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_self_loops_come_exactly_and_first():
    g = messy_graph().normalized("row")
    for how in HOW:
        d = run(g, 2, how, Odds(edge=g.weight))
        row = torch.repeat_interleave(torch.arange(60), d.ptr.diff())
        loop = g.indices.long()[d.pos] == row
        assert int(loop.sum()) == int((g.first - g.indptr[:-1]).sum())
        assert (d.prob[loop] == 1).all() and (d.scale[loop] == 1).all()
        assert loop[d.ptr[:-1]].all()  # every node has one, and it opens its row


@pytest.mark.parametrize("eta", [0.0, 0.1])
def test_items_right_at_the_cap_come_to_rest(eta):
    """Small whole odds put items exactly at the cap, where rounding once lifted and lowered it without end."""
    rng = np.random.default_rng(0)
    for w, k in [([4, 6, 5, 1, 1, 6, 3, 1], 5), ([1, 3, 4, 3, 2, 4], 5)] + [
        (rng.integers(1, 7, n), int(rng.integers(1, n))) for n in rng.integers(3, 9, 2000)
    ]:
        w = torch.as_tensor(np.asarray(w, float))
        p = w.numpy().copy()
        cpu_scan.inclusion(p, len(p), k, eta)
        assert abs(p.sum() - k) < 1e-9 and p.max() <= 1 + 1e-9 and p.min() > 0
        row = torch.zeros(len(w), dtype=torch.long)
        slow = ops.inclusion(w, row, 1, torch.tensor([float(k)], dtype=torch.double), eta)
        assert np.allclose(slow, p, atol=1e-9)


# --- the public door -----------------------------------------------------------------------------------------------


def test_seeds_name_draws():
    w, ptr = torch.rand(100, generator=torch.Generator().manual_seed(0)), [0, 50, 100]
    for how in HOW:
        a, b, c = (draws.draw(how, w, ptr, 5, seed=s) for s in (1, 1, 2))
        assert torch.equal(a.pos, b.pos) and not torch.equal(a.pos, c.pos)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: draws.draw("multinom", [1.0], [0, 1], 1), "did you mean 'multinomial'"),
        (lambda: draws.draw("poisson", [1.0], [0, 1], 0), "`k` must be a whole number of at least 1"),
        (lambda: draws.draw("poisson", [1.0], [1], 1), "`ptr` must start with 0"),
        (lambda: draws.draw("poisson", [1.0], [0, 2, 1], 1), "not decrease"),
        (lambda: draws.draw("poisson", [1.0], [0, 2], 1), "2 in all"),
        (lambda: draws.draw("poisson", [1.0, float("nan")], [0, 2], 1), r"weight\[1\] = nan"),
        (lambda: draws.draw("poisson", [1.0, -1.0], [0, 2], 1), r"weight\[1\] = -1"),
        (lambda: draws.draw("systematic", [1.0, 1.0], [0, 2], 1, eta=1.0), "`eta` must be"),
        (lambda: draws.inclusion([1.0, 1.0], [0, 2], 1, eta=-0.1), "`eta` must be"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(InputError, match=words):
        make()
