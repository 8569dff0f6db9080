"""Sum trees: exact probabilities, no drift, odd shapes; and prefetching, which must change nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import numba as nb
import numpy as np
import pytest
import torch
from scipy import stats

from adahop import ops
from adahop.ops import Sight, large_pages, random
from adahop.ops.learning import tree
from adahop.ops.simd import prefetch, prefetch_write
from adahop.policies import Exp3, Tracked
from adahop.policies.arms import Arms
from adahop.samplers import NeighborSampler
from conftest import messy_graph, same_blocks, star

SIZES = [1, 2, 7, 16, 17, 127, 128, 129, 500, 3000, 40_000, 100_000]
K = torch.tensor([5])


def arms_of(g, spread: float, seed: int = 0) -> Arms:
    arms = Arms(g, 1)
    arms.put(0, torch.exp(spread * torch.randn(g.num_edges, generator=torch.Generator().manual_seed(seed))))
    return arms


def draw(g, odds, dst, k=K, seed=0, how="multinomial"):
    return ops.draw(g.edges, g.rows(dst), k, how, odds, random.key(seed))


@pytest.mark.parametrize("eta", [0.0, 0.1])
@pytest.mark.parametrize("n", SIZES)
def test_probabilities_and_frequencies(n, eta):
    # chi-square over at most 20 groups of equal chance at p > 1e-4, 24 cases: false alarm < 3e-3
    g, rounds = star(n, 3), 40
    arms = arms_of(g, 2.0)
    w = arms.weight[0].double().view(3, n)
    q = (1 - eta) * w / w.sum(1, keepdim=True) + eta / n
    count = torch.zeros(n, dtype=torch.double)
    for seed in range(rounds):
        d = draw(g, arms.odds(0, eta), torch.arange(3), torch.tensor([50]), seed)
        if n <= 50:
            assert (d.prob == 1).all() and len(d.pos) == 3 * n
            return
        assert torch.allclose(d.prob.double(), q.flatten()[d.pos], rtol=1e-5)
        assert torch.allclose(d.scale.double() * 50, 1 / q.flatten()[d.pos], rtol=1e-5)
        count += torch.bincount(d.pos[:50], minlength=n)
    order = q[0].argsort()
    ends = (q[0][order].cumsum(0) * 20).long().clamp(max=19)
    group = torch.empty(n, dtype=torch.long)
    group[order] = ends
    seen, want = (torch.zeros(20, dtype=torch.double).index_add_(0, group, x) for x in (count, q[0] * rounds * 50))
    seen, want = seen[want > 5], want[want > 5]
    assert stats.chisquare(seen, want * seen.sum() / want.sum()).pvalue > 1e-4


@pytest.mark.parametrize("n", [300, 5000])
def test_sums_do_not_drift(n):
    g = star(n)
    policy = Exp3(g, 1)
    rng = torch.Generator().manual_seed(0)
    dst, rows = torch.zeros(1000, dtype=torch.long), torch.arange(1001)
    for _ in range(100):  # 10^5 updates, one row after the other
        pos, gain = torch.randint(n, (1000,), generator=rng), torch.rand(1000, generator=rng) * 2 - 1
        policy.arms.grow(0, Sight(dst, rows, pos, gain, gain), gain)
    kept = policy.arms.sums.clone()
    policy.arms.sum_up()
    assert torch.equal(kept, policy.arms.sums) and bool((policy.arms.weight > 0).all())


@pytest.mark.parametrize("n", [3, 129, 4000])
def test_one_neighbour_that_outweighs_all_others(n):
    g = star(n)
    arms = Arms(g, 1)
    arms.put(0, torch.full((n,), 1e-10).index_fill_(0, torch.tensor([n - 1]), 1e10))
    d = draw(g, arms.odds(0, 0.1), torch.zeros(1, dtype=torch.long), torch.tensor([2]), 1)
    assert torch.isfinite(d.scale).all() and (d.prob > 0).all()
    heavy = sum(int((draw(g, arms.odds(0, 0.0), torch.tensor([0]), torch.tensor([2]), s).pos == n - 1).sum())
                for s in range(50))  # fmt: skip
    assert heavy == 100


def test_layout_holds_every_level():
    g = star(100_000)
    start, lines = tree.lay_out(g.first, g.indptr[1:])
    assert int(start[0]) == 0 and bool((start[1:] == -1).all())
    assert 100_000 / 16 <= lines * 16 <= 100_000 / 14
    state = Exp3(g, 1)
    own = sum(b.numel() * b.element_size() for b in state.buffers() if b.shape[-1] != g.num_nodes)
    assert own <= 4.5 * g.num_edges


def test_a_loaded_state_draws_the_same():
    g = messy_graph(60, 9000)
    one, two = (NeighborSampler(g, [4], Exp3(g, 1)) for _ in range(2))
    for _ in range(5):
        blocks = one.sample(torch.arange(55))
        one.update(blocks, [torch.rand(b.num_edges, generator=torch.Generator().manual_seed(1)) for b in blocks])
    two.load_state_dict(one.state_dict())
    assert torch.equal(one.policy.arms.sums, two.policy.arms.sums)
    assert same_blocks(one.sample(torch.arange(55)), two.sample(torch.arange(55)))
    assert not any("sums" in name for name in one.state_dict())


def test_thread_counts_do_not_matter_for_trees_and_prefix_sums(many_threads):
    g = messy_graph(80, 20_000)
    runs = []
    for threads in (1, 2, 8):
        with ops.threads(threads):
            for policy in (Exp3(g, 2), Tracked(g, 2)):
                sampler = NeighborSampler(g, [3, 4], policy)
                for _ in range(3):
                    blocks = sampler.sample(torch.arange(75))
                    gen = torch.Generator().manual_seed(2)
                    sampler.update(blocks, [torch.rand(b.num_edges, generator=gen) for b in blocks])
                runs.append(sampler.sample(torch.arange(75)))
    assert all(same_blocks(runs[i], runs[i % 2]) for i in range(2, 6))


def test_a_prefetch_changes_nothing():
    @nb.njit
    def touch(x):
        for i in range(x.shape[0]):
            prefetch(x, i)
            prefetch_write(x, np.int32(i))
        return x.sum()

    for kind in (np.float32, np.int64):
        x = np.arange(100, dtype=kind)
        assert touch(x) == 4950 and (x == np.arange(100)).all()
    t = torch.arange(3_000_000)
    assert torch.equal(large_pages(t), torch.arange(3_000_000)) and large_pages(t[:3]).tolist() == [0, 1, 2]


def test_compiling_is_announced_once(tmp_path):
    """Another process that compiles other kernels is silent too."""
    code = "import sys, adahop; g = adahop.Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]); " \
           "adahop.make(sys.argv[1], g, [2]).sample([0])"  # fmt: skip
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    said, kernels = [], []
    for method in ("graphsage", "labor"):
        command = [sys.executable, "-c", code, method]
        said.append(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stderr)
        kernels.append(len(list(tmp_path.rglob("*.nbc"))))
    assert said[0].count("adahop compiles its kernels once") == 1 and "compiles" not in said[1]
    assert kernels[1] > kernels[0] > 0
