"""Vector instructions of the kernels against plain numpy, and the memory they may read."""

from __future__ import annotations

import numba as nb
import numpy as np
import pytest
import torch

from adahop.graph import Graph
from adahop.ops import labor, random
from adahop.ops import simd as lanes
from adahop.ops.learning import tree
from adahop.ops.simd import bare
from adahop.policies.arms import Arms
from conftest import messy_graph, star


@nb.njit
def all_lanes(x, i, lo, hi, u, out):
    return (lanes.sum16(x, i), lanes.sum_part(x, i, lo, hi), lanes.pick16(x, i, u), lanes.pick_part(x, i, lo, hi, u),
            lanes.prefix16(x, i, hi, out, 0), lanes.passed8(out, 0, u), lanes.passed16(out, 0, u))  # fmt: skip


def test_lanes_do_what_numpy_does():
    rng, out = np.random.default_rng(0), np.empty(16)
    for _ in range(200):
        x = np.exp(3 * rng.standard_normal(64)).astype(np.float32)
        i, lo, hi, u = rng.integers(0, 48), rng.integers(0, 8), rng.integers(9, 17), rng.random()
        whole = x[i : i + 16].astype(np.float64)
        some = np.where((np.arange(16) >= lo) & (np.arange(16) < hi), whole, 0.0)
        got = all_lanes(x, i, lo, hi, u, out)
        assert np.allclose(got[:2], [whole.sum(), some.sum()], rtol=1e-6)
        assert got[2] == (whole.cumsum() <= u * whole.sum()).sum()
        assert got[3] == (some.cumsum() <= u * some.sum()).sum() and lo <= got[3] < hi
        part = np.where(np.arange(16) < hi, whole, 0.0).cumsum()
        assert np.allclose(out, part, rtol=1e-12) and got[4] == out[-1]
        assert got[5] == (out[:8] <= u).sum() and got[6] == (out <= u).sum()


@nb.njit
def marks(ids, p, low, high, limit, times):
    a, b = lanes.below64(ids, 0, low, high, limit), lanes.under64(ids, p, 0, low, high, times)
    return a, b, lanes.ones(a), lanes.lowest(a)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_sixty_four_random_numbers_are_those_of_the_reference(kind):
    rng, key = np.random.default_rng(1), random.key(3, 4)
    for _ in range(20):
        ids, p, times = rng.integers(0, 2**31, 64).astype(kind), rng.random(64), 0.3
        r = random.short(key, torch.from_numpy(ids)).numpy()
        low, high = random.halves(np.int64(key))
        a, b, many, first = marks(ids, p, low, high, np.uint32(2**30), times)
        small, under = r < 2**30, r * 2.0**-32 < times * p
        assert [(int(a) >> j) & 1 for j in range(64)] == small.astype(int).tolist()
        assert [(int(b) >> j) & 1 for j in range(64)] == under.astype(int).tolist()
        assert many == small.sum() and first == small.argmax()


def test_bare_arrays_are_the_same_memory():
    @nb.njit
    def add(x, y):
        a, b = bare((x, y))
        for i in range(3):
            a[i] += b[i]
        return a.sum()

    x, y = np.arange(3.0), np.arange(3)
    assert add(x, y) == 6.0 and x.tolist() == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_labor_at_the_end_of_the_ids(kind):
    # the last targets have no 64 ids left to read
    row = torch.randint(0, 90, (300,), generator=torch.Generator().manual_seed(0))
    col = torch.arange(300) // 100
    g = Graph.from_edge_index(torch.stack([row, col]), num_nodes=90)
    for refine in (0, 2):
        edges = g.edges._replace(indices=g.indices.to(kind))
        args = (edges, g.rows(torch.arange(4)), torch.tensor([7]), refine, g.num_nodes, 99)
        got, want = labor(*args), labor.reference(*args)
        assert torch.equal(got.ptr, want.ptr) and torch.equal(got.pos, want.pos)


@pytest.mark.parametrize("g", [star(3), star(200, 2), messy_graph(60, 3000)])
def test_weights_are_followed_by_a_line_also_after_a_move(g):
    arms = Arms(g, 2)
    weight = torch.rand(2, g.num_edges) + 0.1
    arms.put(slice(None), weight)
    arms._apply(lambda t: t.clone(memory_format=torch.contiguous_format))
    room = arms.weight.untyped_storage().nbytes() // 4 - arms.weight.storage_offset()
    assert room >= arms.weight.stride(0) + g.num_edges + tree.WIDE and arms.weight.stride(0) % tree.WIDE == 0
    assert torch.equal(arms.weight, weight)
