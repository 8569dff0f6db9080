"""Memory used again: never while anything of it is alive."""

from __future__ import annotations

import multiprocessing
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from adahop import Graph
from adahop.ops.buffers import MOST, SMALL, Pool
from adahop.ops.threads import LATE, cuts, over, relay, threads
from adahop.ops.threads import SMALL as WORTH
from adahop.samplers import NeighborSampler


def test_a_buffer_is_used_again_only_when_nothing_of_it_is_alive():
    pool = Pool()
    first = pool.empty((1 << 17,), np.int64)
    place, part = first.ctypes.data, torch.from_numpy(first)[5:9]
    del first
    other = pool.empty((1 << 17,), np.int64)
    assert other.ctypes.data != place  # a view of a tensor of it is alive
    del part
    assert pool.empty((2, 1 << 16), np.int64).ctypes.data == place and len(pool.buffers) == 2
    assert pool.empty((10,), np.int64).base is None and len(pool.buffers) == 2  # small ones are malloc's


def test_a_pool_forgets_its_oldest_and_is_a_threads_own():
    pool = Pool()
    kept = [pool.empty((SMALL,), np.uint8) for _ in range(MOST + 3)]
    assert len(pool.buffers) == MOST and len({a.ctypes.data for a in kept}) == MOST + 3
    with ThreadPoolExecutor(1) as another:
        assert another.submit(lambda: len(pool.buffers)).result() == 0


def test_blocks_that_are_kept_stay_as_they_are():
    chance = torch.Generator().manual_seed(0)
    graph = Graph.from_edge_index(torch.randint(0, 20_000, (2, 200_000), generator=chance), num_nodes=20_000)
    sampler = NeighborSampler(graph, [10, 10])
    kept = [block for _ in range(4) for block in sampler.sample(torch.arange(8000))]
    before = [[torch.as_tensor(t).clone() for t in block if t is not None] for block in kept]
    for _ in range(6):
        sampler.sample(torch.arange(8000, 16_000))
    for block, was in zip(kept, before, strict=True):
        now = [torch.as_tensor(t) for t in block if t is not None]
        assert all(torch.equal(t, a) for t, a in zip(now, was, strict=True))


def test_a_relay_takes_in_order_and_tells_of_a_failure():
    here, made, taken = [], [], []
    relay(*(lambda *part, to=to: to.append(part) for to in (here, made, taken)), [0, 3, 5, 9])
    assert here == [(0, 3)] and sorted(made) == taken == [(3, 5), (5, 9)]

    def fails(lo: int, hi: int) -> None:
        raise RuntimeError("part two")

    with pytest.raises(RuntimeError, match="part two"):
        relay(lambda *part: None, fails, lambda *part: None, [0, 3, 5])


def test_an_error_in_a_thread_comes_out_after_all_have_ended(many_threads):
    ended = []

    def some(lo: int, hi: int) -> None:
        if lo == 0:
            raise RuntimeError("part one")
        time.sleep(0.01)
        ended.append(lo)

    with threads(3):
        with pytest.raises(RuntimeError, match="part one"):
            over(some, 9)
        assert sorted(ended) == [3, 6]
        over(lambda lo, hi: ended.append(hi), 9)
    assert sorted(ended) == [3, 3, 6, 6, 9]


def test_the_first_part_is_longer_by_what_is_done_before_others_begin():
    big = 10 * WORTH
    with threads(2):
        assert cuts(big, 1) == [0, (big + LATE) // 2, big]
        assert cuts(big, np.arange(big + 1)) == [0, (big + LATE) // 2, big]
        assert cuts(big, 1, light=20) == [0, big] and cuts(10, 1) == [0, 10]
        assert cuts(0, np.zeros(1)) == [0, 0]
    with threads(1):
        assert cuts(big, 1) == [0, big]


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_fork_has_threads_of_its_own(many_threads):
    with threads(2):
        found = np.zeros(8)
        over(lambda lo, hi: found[lo:hi].fill(1.0), 8)
        child = multiprocessing.get_context("fork").Process(target=over, args=(lambda lo, hi: None, 8))
        child.start()
        child.join(20)
        assert child.exitcode == 0 and found.all()
