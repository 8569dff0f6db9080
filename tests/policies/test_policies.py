"""Policies: the counts, caps and units of the bandits, and that they really learn."""

from __future__ import annotations

import math

import pytest
import torch

from adahop import draws, ops
from adahop.block import Block
from adahop.checks import InputError
from adahop.graph import Graph
from adahop.ops.learning import cpu_track
from adahop.policies import Exp3, Exp3M, Static, Tracked, Uniform
from adahop.samplers import NeighborSampler
from conftest import messy_graph, star


def stars(n: int, copies: int, spread: float, seed: int = 0) -> tuple[Graph, torch.Tensor]:
    """`copies` hubs of n own neighbours each, row-normalised; log-normal norms of the given spread."""
    hub = torch.arange(copies).repeat_interleave(n)
    g = Graph.from_edge_index(torch.stack([copies + torch.arange(copies * n), hub]), num_nodes=copies * (n + 1))
    norm = torch.exp(spread * torch.randn(copies * (n + 1), generator=torch.Generator().manual_seed(seed)))
    return g.normalized("row", self_loops=False), norm


def prob_table(policy: Exp3, n: int, k: int, copies: int) -> torch.Tensor:
    """[copies, n]: q that sums to k, of each neighbour of each hub."""
    w = policy.log_weight[0].view(copies, n).double()
    w = (w - w.max(1, keepdim=True).values).exp()
    if isinstance(policy, Exp3M):
        ptr = torch.arange(copies + 1) * n
        return draws.inclusion(w.float().flatten(), ptr, k, policy.eta).view(copies, n)
    return k * ((1 - policy.eta) * w / w.sum(1, keepdim=True) + policy.eta / n)


def variance(cost: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The effective variance sum a^2 |h|^2 / q of each hub."""
    return (cost.square() / q).sum(1)


def best(cost: torch.Tensor, k: int, capped: bool) -> torch.Tensor:
    """q* in proportion to a |h|, none over 1 for subsets."""
    copies, n = cost.shape
    if not capped:
        return k * cost / cost.sum(1, keepdim=True)
    return draws.inclusion(cost.float().flatten(), torch.arange(copies + 1) * n, k).view(copies, n)


def play(policy, draw, graph, norm, copies, k, visits, seed=1, noise=0.0, look=None):
    """Visit every hub `visits` times; `look(t)` before each. `noise` is the log-spread of a norm at each sight."""
    sampler = NeighborSampler(graph, [k], policy, draw, seed=seed)
    gen, hubs = torch.Generator().manual_seed(seed), torch.arange(copies)
    for t in range(visits):
        if look is not None:
            look(t)
        block = sampler.sample(hubs)[0]
        seen = norm[block.n_id][block.src]
        if noise:
            seen = seen * torch.exp(noise * torch.randn(len(seen), generator=gen))
        sampler.update([block], [(block.weight * block.scale * seen).square()])
    if look is not None:
        look(visits)


def cost_of(graph: Graph, norm: torch.Tensor, copies: int) -> torch.Tensor:
    return (graph.weight.double() * norm.double()[graph.indices.long()]).view(copies, -1)


# --- one update, by hand -------------------------------------------------------------------------------------------


def hand_block(pos: list[int], prob: list[float], scale: list[float], n: int) -> Block:
    """A block of hub 0 of a star with n neighbours that drew the places `pos`."""
    at = torch.tensor(pos)
    n_id = torch.cat([torch.zeros(1, dtype=torch.long), at + 1])
    edge_index = torch.stack([torch.arange(len(pos)) + 1, torch.zeros(len(pos), dtype=torch.long)])
    weight = torch.ones(len(pos))
    return Block(
        n_id, 1, edge_index, at, weight, torch.tensor(prob), torch.tensor(scale), torch.tensor([0, len(pos)]), at
    )


def test_a_neighbour_drawn_twice_gains_twice():
    g, k, n = star(5), 3, 5
    q = 1 / n
    block = hand_block([2, 2, 4], [q] * 3, [1 / (k * q)] * 3, n)
    policy = Exp3(g, 1, step=0.5)
    energy = torch.tensor([4.0, 4.0, 1.0])
    policy.update(0, block, energy)
    reward = k * energy
    mean = float(reward.mean())  # the first visit: the running mean is this visit's
    gain = [0.5 * (float(r) / mean - 1) / (k * q * n) for r in reward]
    assert policy.log_weight[0].tolist() == pytest.approx([0, 0, 2 * gain[0], 0, gain[2]], rel=1e-5)
    assert policy.visits[0, 0] == 1 and float(policy.mean[0, 0]) == pytest.approx(mean)
    block = hand_block([0, 1, 3], [q] * 3, [1 / (k * q)] * 3, n)
    policy.update(0, block, torch.ones(3))
    assert float(policy.mean[0, 0]) == pytest.approx(mean + 0.5 * (3.0 - mean))  # the second visit counts 1/2


def test_the_papers_step_by_hand():
    n, k, horizon, eta = 6, 2, 100.0, 0.4
    for kind, q in ((Exp3, [0.2, 0.1]), (Exp3M, [0.4, 0.2])):
        g = star(n)
        scale = [1 / (k * p) for p in q] if kind is Exp3 else [1 / p for p in q]
        block = hand_block([1, 3], q, scale, n)
        energy = torch.tensor([0.01, 0.04])
        policy = kind(g, 1, step="paper", horizon=horizon)
        policy.update(0, block, energy)
        delta = math.sqrt((1 - eta) * eta**4 * k**5 * math.log(n / k) / (horizon * n**4))
        # r = a^2 |h|^2 / (k q^2) with replacement, a^2 |h|^2 / q^2 without; the estimate is (count / k) r / q or r / q
        reward = [k * e for e in energy.tolist()] if kind is Exp3 else energy.tolist()
        gain = [delta * r / (k * p if kind is Exp3 else p) for r, p in zip(reward, q, strict=True)]
        assert policy.log_weight[0].tolist() == pytest.approx([0, gain[0], 0, gain[1], 0, 0], rel=1e-4, abs=1e-7)


def test_without_a_horizon_the_papers_step_counts_the_nodes_own_visits():
    g = star(6)
    policy = Exp3(g, 1, step="paper")
    gains = []
    for _ in range(4):
        before = policy.log_weight[0].clone()
        policy.update(0, hand_block([1, 3], [0.2, 0.2], [2.5, 2.5], 6), torch.tensor([0.01, 0.01]))
        gains.append(float((policy.log_weight[0] - before)[1]))
    assert gains == pytest.approx([gains[0] / math.sqrt(t) for t in (1, 2, 3, 4)], rel=1e-3)
    assert policy.visits[0].tolist() == [4] + [0] * 6


def test_rewards():
    g = star(6).normalized(None, self_loops=False)
    block = hand_block([0, 1, 2], [0.5] * 3, [2.0] * 3, 6)._replace(weight=torch.tensor([0.5, 0.25, 1.0]))
    energy = torch.tensor([1.0, 1.0, 1.0])
    gain = {}
    for name in ("energy", "paper"):
        policy = Exp3M(g, 1, step=0.01, reward=name)
        policy.update(0, block, energy)
        gain[name] = policy.log_weight[0, :3]
    assert torch.equal(gain["energy"], torch.zeros(3))  # all alike
    reward = 1 / block.weight  # the printed a |h|^2 / q^2 is the energy over a
    assert torch.allclose(gain["paper"], 0.01 * (reward / reward.mean() - 1) / (0.5 * 6), atol=1e-7)
    with pytest.raises(InputError, match="reward"):
        Exp3M(g, 1, reward=lambda block, energy: energy)


def test_few_neighbours_are_exact_and_teach_nothing():
    for kind, draw in ((Exp3, "multinomial"), (Exp3M, "depround")):
        for n in (1, 3, 4):
            g = star(n)
            policy = kind(g, 1)
            sampler = NeighborSampler(g, [4], policy, draw)
            block = sampler.sample([0])[0]
            assert block.e_id.tolist() == list(range(n)) and (block.scale == 1).all() and (block.prob == 1).all()
            sampler.update([block], [torch.rand(n) * 1e6])
            assert not policy.log_weight.any() and not policy.visits.any() and not policy.mean.any()


def test_shared_layers_learn_from_the_first_alone():
    g = star(20, 3)
    policy = Exp3(g, 2, share_layers=True)
    sampler = NeighborSampler(g, [4, 4], policy)
    blocks = sampler.sample([0, 1, 2])
    assert policy.log_weight.shape[0] == 1
    energies = [torch.ones(b.num_edges) for b in blocks]
    energies[1] = torch.rand(blocks[1].num_edges)
    sampler.update(blocks, energies)
    assert not policy.log_weight.any()  # the first layer's energies were all alike
    energies[0] = torch.rand(blocks[0].num_edges)
    sampler.update(blocks, energies)
    assert policy.log_weight.any()
    assert torch.equal(policy.odds(0).edge, policy.odds(1).edge)
    apart = Exp3(g, 2)
    apart.update(1, blocks[1], energies[1])
    assert apart.log_weight[1].any() and not apart.log_weight[0].any()


def test_repeated_targets_and_odd_energies_do_no_harm():
    g = star(20, 3)
    for bad in (torch.nan, torch.inf, 0.0, 1e38):
        policy = Exp3(g, 1)
        sampler = NeighborSampler(g, [4], policy)
        for _ in range(5):
            blocks = sampler.sample([0, 0, 2])
            energy = torch.rand(blocks[0].num_edges)
            energy[::3] = bad
            sampler.update(blocks, [energy])
        assert torch.isfinite(policy.log_weight).all() and torch.isfinite(policy.mean).all()
        assert torch.isfinite(sampler.sample([0])[0].scale).all()


# --- caps ----------------------------------------------------------------------------------------------------------


def test_the_cap_of_bsm():
    g, n, k = star(10), 10, 3
    policy = Exp3M(g, 1)
    policy.arms.put(0, torch.tensor([9.0, 7.0, 0, 0, 0, 0, 0, 0, 0, 0]).exp())
    q = prob_table(policy, n, k, 1)[0]
    assert float(q.sum()) == pytest.approx(k) and float(q.max()) <= 1 + 1e-9
    sure = q > 1 - 1e-9
    assert sure.tolist()[:3] == [True, True, False]
    sampler = NeighborSampler(g, [k], policy, "depround")
    counts = torch.zeros(n)
    for _ in range(60):
        block = sampler.sample([0])[0]
        assert block.num_edges == k and float(block.prob.max()) <= 1
        assert torch.allclose(block.prob.double(), q[block.pos], rtol=1e-5)
        counts[block.pos] += 1
    assert counts[:2].tolist() == [60, 60]  # U is always taken
    before = policy.log_weight[0].clone()
    sampler.update([block], [torch.rand(k) + 1])
    moved = policy.log_weight[0] != before
    assert not moved[sure].any() and moved.sum() <= k - 2  # and is not updated
    assert not moved[[j for j in range(n) if j not in block.pos.tolist()]].any()


# --- far out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", [False, True])
def test_a_million_updates_of_the_largest_reward(reference, monkeypatch):
    if reference:
        monkeypatch.setenv("ADAHOP_REFERENCE", "1")
    # one call a visit; 1,000 rows of one node in a call count as 1,000 visits in order, so 1,000 calls make 10^6
    g = star(8)
    weight, scratch = torch.ones(8), ops.Scratch()
    rows = 1 if reference else 1000
    dst, ptr = torch.zeros(rows, dtype=torch.long), torch.arange(rows + 1)
    pos = torch.full((rows,), 3)
    gain = torch.ones(rows)  # the largest: gains are clipped to [-1, 1]
    for _ in range(1000):
        ops.grow(ops.Sight(dst, ptr, pos, gain, gain), gain, g.edges, ops.Weights(weight, None), scratch)
    assert torch.isfinite(weight).all() and (weight > 0).all()
    policy = Exp3M(g, 1)
    policy.arms.put(0, weight)
    for kind in (Exp3, Exp3M):
        policy.__class__ = kind
        q = prob_table(policy, 8, 2, 1)
        assert float(q.sum()) == pytest.approx(2) and torch.isfinite(q).all() and float(q.min()) >= 2 * 0.1 / 8 - 1e-9
    assert int(weight.argmax()) == 3
    for _ in range(60):  # and it is not deaf afterwards: losses bring it down again
        one = ops.Sight(dst[:1], ptr[:2], pos[:1], gain[:1], gain[:1])
        ops.grow(one, -gain[:1], g.edges, ops.Weights(weight, None), scratch)
    assert float(weight.max() / weight.min()) <= math.exp(40) and int(weight.argmin()) == 3


def test_kernel_and_reference_update_alike(monkeypatch):
    g, copies = star(12, 40), 40
    gen = torch.Generator().manual_seed(0)
    weights = [(torch.randn(g.num_edges, generator=gen) * 6).clamp(-16, 15).exp()]
    weights.append(weights[0].clone())
    scratch = ops.Scratch()
    for reference in (False, True):
        if reference:
            monkeypatch.setenv("ADAHOP_REFERENCE", "1")
        gen = torch.Generator().manual_seed(1)
        for _ in range(100):
            arm = torch.rand(copies, 12, generator=gen).argsort(1)[:, :3]
            place = arm + 12 * torch.arange(copies)[:, None]
            gain = torch.rand(copies * 3, generator=gen) * 2 - 0.5
            sight = ops.Sight(torch.arange(copies), torch.arange(copies + 1) * 3, place.flatten(), gain, gain)
            ops.grow(sight, gain, g.edges, ops.Weights(weights[reference], None), scratch)
    w = [x.view(copies, 12).double() for x in weights]
    w = [x / x.sum(1, keepdim=True) for x in w]
    assert torch.allclose(w[0], w[1], rtol=1e-3, atol=1e-6)
    grown = weights[0].log().view(copies, 12).max(1).values
    assert (grown <= 16).all() and (grown < 5).any()  # some segments were centred again


@pytest.mark.parametrize("kind", [Exp3, Tracked])
def test_the_fused_update_is_the_references(kind, monkeypatch):
    g = messy_graph(60, 3000).normalized("row")
    policies, sampler = [kind(g, 2), kind(g, 2)], NeighborSampler(g, [4, 5])
    gen = torch.Generator().manual_seed(0)
    for _ in range(20):
        blocks = sampler.sample(torch.randperm(55, generator=gen)[:30])
        energy = [torch.rand(b.num_edges, generator=gen) * 3 for b in blocks]
        energy[0][::17] = math.inf
        for policy in policies:
            with monkeypatch.context() as patch:
                if policy is policies[1]:
                    patch.setenv("ADAHOP_REFERENCE", "1")
                for layer in (0, 1):
                    policy.update(layer, blocks[layer], energy[layer])
    one, two = (dict(policy.named_buffers()) for policy in policies)
    for name, value in one.items():
        assert torch.allclose(value.double(), two[name].double(), rtol=2e-4, atol=1e-6), name
    assert int(one["visits"].max()) > 5


def test_norms_tracked_in_shares_are_the_same_for_any_number_of_threads(many_threads, monkeypatch):
    g, found = messy_graph(60, 3000).normalized("row"), {}
    for share, threads in ((1 << 14, 1), (1, 1), (1, 2), (1, 8)):
        monkeypatch.setattr(cpu_track, "SHARE", share)
        policy, sampler, gen = Tracked(g, 1), NeighborSampler(g, [6], seed=1), torch.Generator().manual_seed(0)
        with ops.threads(threads):
            for _ in range(8):
                (block,) = sampler.sample(torch.randperm(55, generator=gen)[:30])
                policy.update(0, block, torch.rand(block.num_edges, generator=gen) * 3)
        found[share, threads] = [policy.square, policy.level, policy.visits]
    for threads in (2, 8):
        assert all(map(torch.equal, found[1, 1], found[1, threads]))
    assert all(map(torch.allclose, found[1 << 14, 1], found[1, 1])) and int(policy.visits.max()) > 5


def test_systematic_draws_learn_the_same_weights_without_trees():
    g = messy_graph(60, 30_000)  # rows long enough for sums
    trees, without, gen = Exp3(g, 1), Exp3(g, 1), torch.Generator().manual_seed(0)
    sampler = NeighborSampler(g, [4], without, "systematic")
    assert trees.arms.sums.numel() > 0 and without.arms.sums.numel() == 0
    for _ in range(5):
        (block,) = sampler.sample(torch.arange(55))
        energy = torch.rand(block.num_edges, generator=gen)
        for policy in (trees, without):
            policy.update(0, block, energy)
    assert torch.equal(trees.arms.weight, without.arms.weight) and bool((trees.arms.weight != 1).any())
    other = NeighborSampler(g, [4], without)  # draws with replacement from these: by a scan
    (block,) = other.sample(torch.arange(55))
    assert bool(torch.isfinite(block.scale).all()) and block.num_edges > 100


# --- learning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(("kind", "draw"), [(Exp3, "multinomial"), (Exp3M, "depround")])
def test_learns_within_300_visits_in_any_unit(kind, draw, unit):
    # mean over 60 stars; uniform is at 3.26 (BS) and 2.85 (BS.M) times the optimum, 300 visits reach 1.02 and 1.01
    n, k, copies = 50, 10, 60
    g, norm = stars(n, copies, 1.0)
    norm, policy = norm * unit, kind(g, 1)
    cost, ratio = cost_of(g, norm, copies), {}
    optimum = variance(cost, best(cost, k, kind is Exp3M)).mean()

    def look(t):
        if t in (0, 300):
            ratio[t] = float(variance(cost, prob_table(policy, n, k, copies)).mean() / optimum)

    play(policy, draw, g, norm, copies, k, 300, look=look)
    assert ratio[0] > 1.5, "nothing to learn here"
    assert ratio[300] < 1.15


@pytest.mark.parametrize("noise", [0.0, 0.7])
def test_one_draw_a_visit_is_never_much_worse_than_uniform(noise):
    # k = 1: a mean over the batch would be the reward itself, and the rule pure noise. 40 stars,
    # 3,000 visits; measured: 0.84 of uniform's variance after 10 visits, 0.27 (0.31 with noise) in the end.
    n, copies = 50, 40
    g, norm = stars(n, copies, 1.0)
    policy = Exp3(g, 1)
    cost, ratio = cost_of(g, norm, copies), {}
    uniform = variance(cost, torch.full((copies, n), 1 / n, dtype=torch.double)).mean()

    def look(t):
        if t in (10, 30, 100, 300, 600, 1000, 1500, 2000, 2500, 3000):
            ratio[t] = float(variance(cost, prob_table(policy, n, 1, copies)).mean() / uniform)

    play(policy, "multinomial", g, norm, copies, 1, 3000, noise=noise, look=look)
    assert max(ratio.values()) < 1.1
    assert ratio[3000] < 0.9, "nothing learned"


def test_the_papers_step_keeps_the_theorems_bound():
    # eta = 0.4, a = 1, |h| <= 1, T visits: sum V(Q_t) <= 3 sum V(Q*) + 48.4 sqrt(T n^4 ln(n/k) / k^3) (the printed 10
    # dropped a factor). The bound is loose, so the second half asks that something was learned
    # (measured: 1.53 times the optimum at first, 1.04 in the end, 1.26 with the printed step).
    n, k, copies, visits = 8, 4, 30, 1500
    g, norm = stars(n, copies, 1.0)
    g.weight.fill_(1.0)
    leaf = norm[copies:].view(copies, n)
    leaf /= leaf.max(1, keepdim=True).values
    cost = cost_of(g, norm, copies)
    optimum = variance(cost, best(cost, k, True))
    assert visits >= math.log(n / k) * n**2 * 0.6 / (k * 0.16)  # the theorem's own condition
    bound = 3 * visits * optimum + 48.4 * math.sqrt(visits * n**4 * math.log(n / k) / k**3)
    final = {}

    class Printed(Exp3M):
        def _reward(self, block, energy):
            return energy / n

    for name, kind in (("mended", Exp3M), ("printed", Printed)):
        policy = kind(g, 1, step="paper", horizon=float(visits))
        total, path = torch.zeros(copies, dtype=torch.double), []

        def look(t, policy=policy, total=total, path=path):
            now = variance(cost, prob_table(policy, n, k, copies))
            total += now if t < visits else 0
            path.append(float((now / optimum).mean()))

        play(policy, "depround", g, norm, copies, k, visits, look=look)
        assert (total <= bound).all()
        final[name] = path
    start, end = final["mended"][0], sum(final["mended"][-200:]) / 200
    assert end - 1 < 0.3 * (start - 1)
    assert end < sum(final["printed"][-200:]) / 200  # the printed step exp(delta r / n) learns less


def test_the_printed_step_would_learn_nothing():
    # n = 50, k = 10, row-normalised weights, 300 visits: the weights gain about 0.01 in all
    n, k, copies = 50, 10, 20
    g, norm = stars(n, copies, 0.7)
    norm = norm / norm.max()

    class Printed(Exp3):
        def _reward(self, block, energy):
            return energy / n

    printed = Printed(g, 1, step="paper", horizon=300.0)
    play(printed, "multinomial", g, norm, copies, k, 300)
    assert 0 < float(printed.log_weight.abs().max()) < 0.05


# --- static, uniform, options --------------------------------------------------------------------------------------


def test_static_weights_follow_the_users_order():
    g = Graph.from_edge_index([[1, 2, 3, 1], [3, 0, 0, 0]], weight=[1.0, 2.0, 3.0, 4.0])
    assert g.eid is not None
    own = Static(g, 1, weight=[10.0, 20.0, 30.0, 40.0])
    assert torch.equal(own.odds(0).edge, 10 * g.weight)
    assert torch.equal(Static(g, 1).odds(0).edge, g.weight)
    assert Uniform(g, 1).odds(0).edge is None
    with pytest.raises(InputError, match="`eta` must be"):
        Static(g, 1, eta=1.0)
    with pytest.raises(InputError, match=r"weight\[1\] = -1"):
        Static(g, 1, weight=[1.0, -1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step": "fast"}, "`step` must be one of"), ({"step": -1.0}, "`step` must be"), ({"eta": 1.0}, "below 1"),
        ({"eta": 1.5}, "`eta` must be"), ({"reward": "enery"}, "did you mean 'energy'"), ({"memory": 2.0}, "`memory`"),
        ({"horizon": 0.0}, "`horizon` must be"),
    ],
)  # fmt: skip
def test_refusals(options, words):
    with pytest.raises(InputError, match=words):
        Exp3(star(3), 1, **options)
