"""Counter-based randomness: one stream a name, the same in torch and in the kernels."""

from __future__ import annotations

import numba as nb
import numpy as np
import torch
from scipy import stats

from adahop.ops import random


@nb.njit
def kernel_draws(key, nodes, places, n):
    bits, unit, below = np.empty(len(nodes), np.uint64), np.empty(len(nodes)), np.empty(len(nodes), np.int64)
    for j in range(len(nodes)):
        stream = random.base(key, nodes[j])
        bits[j] = random.draw32(stream, places[j])
        unit[j] = random.draw_unit(stream, places[j])
        below[j] = random.draw_below(stream, places[j], n)
    return bits, unit, below


def test_kernels_and_torch_agree_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    nodes = torch.cat([torch.randint(2**40, (500,), generator=g), torch.tensor([0, 1, 2**31, 2**62])])
    places = torch.cat([torch.randint(2**33, (500,), generator=g), torch.tensor([0, 1, 1 << 32, 5])])
    for key in (random.key(0), random.key(1, 2, 3), -1, 0, 2**63 - 1):
        bits, unit, below = kernel_draws(key, nodes.numpy(), places.numpy(), 40_000)
        ours = random.bits(key, nodes, places)
        assert torch.equal((ours >> 32) & 0xFFFFFFFF, torch.from_numpy(bits.astype(np.int64)))
        assert torch.equal(random.unit(key, nodes, places), torch.from_numpy(unit))
        assert torch.equal(random.below(key, nodes, places, torch.tensor(40_000)), torch.from_numpy(below))


def test_a_python_int_counts_like_a_tensor():
    nodes = torch.arange(50)
    assert torch.equal(random.bits(7, nodes, 3), random.bits(7, nodes, torch.full((50,), 3)))


def test_keys_differ_by_every_counter_and_their_order():
    keys = {random.key(*c) for c in [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]}
    assert len(keys) == 9
    assert random.key(3, 1) == random.key(3, 1) and -(2**63) <= random.key(-5, 2**63) < 2**63
    assert random.key(0) == -2152535657050944081  # 0xE220A8397B1DCDAF, the first output of splitmix64 for seed 0


def test_units_are_uniform_along_nodes_places_and_keys():
    # five KS tests at p > 1e-4: false alarm < 5e-4 (and the seeds are fixed)
    many = torch.arange(20_000)
    streams = [
        random.unit(random.key(0), many, 0),
        random.unit(random.key(0), torch.tensor([5]), many),
        torch.stack([random.unit(random.key(0, s), torch.tensor([5]), 0)[0] for s in range(3000)]),
        random.unit(random.key(1), many * 2**20, 1),
        random.unit(random.key(2), many, many),
    ]
    for u in streams:
        assert float(u.min()) >= 0 and float(u.max()) < 1
        assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4


def test_neighbouring_draws_are_unrelated():
    # six correlations of 20,000 pairs, |r| sqrt(n) < 5: false alarm < 4e-6
    node, key = torch.arange(20_000), random.key(3)
    here = random.unit(key, node, 0)
    for other in (
        random.unit(key, node + 1, 0), random.unit(key, node, 1), random.unit(random.key(4), node, 0),
        random.unit(key + 1, node, 0), random.unit(key, node, 1 << 32), random.unit(random.key(3, 1), node, 0),
    ):  # fmt: skip
        r = torch.corrcoef(torch.stack([here, other]))[0, 1]
        assert abs(float(r)) * 20_000**0.5 < 5


def test_whole_numbers_below_n():
    # chi-square over 7 cells at p > 1e-4
    x = random.below(random.key(0), torch.arange(14_000), 2, torch.tensor(7))
    assert stats.chisquare(torch.bincount(x, minlength=7).numpy()).pvalue > 1e-4
    assert set(random.below(0, torch.arange(100), 0, torch.tensor(1)).tolist()) == {0}


def test_shuffled_is_a_permutation_named_by_its_key():
    ids = torch.arange(1000) * 3
    a, b = random.shuffled(ids, random.key(1)), random.shuffled(ids, random.key(2))
    assert torch.equal(a.sort().values, ids) and not torch.equal(a, ids)
    assert not torch.equal(a, b) and torch.equal(a, random.shuffled(ids, random.key(1)))
    # every place alike: chi-square over 24 orders of four at p > 1e-4
    orders = [tuple(random.shuffled(torch.arange(4), random.key(s)).tolist()) for s in range(2400)]
    counts = np.unique([o[0] * 64 + o[1] * 16 + o[2] * 4 + o[3] for o in orders], return_counts=True)[1]
    assert len(counts) == 24 and stats.chisquare(counts).pvalue > 1e-4
