"""Loader: what a batch holds, and a prefetch whose feedback is late by an exact number of batches."""

from __future__ import annotations

import time

import pytest
import torch
from torch_geometric.data import Data

import adahop
from adahop.checks import InputError
from adahop.loader import Loader
from adahop.samplers import NeighborSampler
from conftest import same_blocks, toy_data


class Diary(NeighborSampler):
    """Notes how many updates had been learned when each batch was drawn."""

    nap = 0.0

    def draw(self, seeds):
        time.sleep(self.nap)
        self.__dict__.setdefault("drawn", []).append(self.__dict__.get("learned", 0))
        return super().draw(seeds)

    def learn(self, blocks, energy):
        self.__dict__["learned"] = self.__dict__.get("learned", 0) + 1


def ones(batch):
    return [torch.ones(b.num_edges) for b in batch.blocks]


def run(method: str, prefetch: int, epochs: int = 2, learn: bool = True):
    data = toy_data()
    sampler = adahop.make(method, data.graph, [3, 3], seed=5)
    out = []
    for _ in range(epochs):
        for batch in Loader(data, sampler, data.train_mask, 16, prefetch=prefetch):
            out.append(batch)
            if learn:
                gen = torch.Generator().manual_seed(len(out))
                sampler.update(batch.blocks, [torch.rand(b.num_edges, generator=gen) for b in batch.blocks])
    return out, sampler


def test_what_a_batch_holds():
    data = toy_data()
    sampler = adahop.make("graphsage", data.graph, [3, 4])
    loader = Loader(data, sampler, data.train_mask, batch_size=32)
    seen = []
    for batch in loader:
        assert isinstance(batch, Data)
        last = batch.blocks[-1]
        seeds = last.n_id[: last.num_dst]
        seen.append(seeds)
        assert batch.batch_size == last.num_dst == len(batch.y) and len(batch.blocks) == 2
        assert torch.equal(batch.n_id, batch.blocks[0].n_id) and torch.equal(batch.n_id[: len(seeds)], seeds)
        assert torch.equal(batch.x, data.x[batch.n_id]) and torch.equal(batch.y, data.y[seeds])
        assert batch.num_nodes == len(batch.n_id)
        assert torch.equal(data.graph.edge_index()[:, batch.e_id], batch.n_id[batch.edge_index])
        assert batch.edge_index.shape[1] == sum(b.num_edges for b in batch.blocks)
        moved = batch.to("cpu")  # blocks survive a move
        assert same_blocks(moved.blocks, batch.blocks) and type(moved.blocks[0]) is adahop.Block
    assert len(seen) == len(loader) == -(-int(data.train_mask.sum()) // 32)
    assert torch.equal(torch.cat(seen).sort().values, data.train_mask.nonzero().flatten())


def test_nodes_as_mask_ids_or_everyone():
    data = toy_data()
    sampler = adahop.make("graphsage", data.graph, [2])
    mask = Loader(data, sampler, data.val_mask, 1000, shuffle=False)
    ids = Loader(data, sampler, data.val_mask.nonzero().flatten().tolist(), 1000, shuffle=False)
    assert torch.equal(next(iter(mask)).y, next(iter(ids)).y)
    assert next(iter(Loader(data, sampler, batch_size=1000))).batch_size == 240
    empty = Loader(data, sampler, [], 10)
    assert len(empty) == 0 and list(empty) == []
    assert list(Loader(data, sampler, [], 10, prefetch=2)) == []
    assert next(iter(Loader(Data(), sampler, [1], 10))).n_id[0] == 1  # neither x nor y


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_a_method_that_does_not_learn_gives_the_same_batches(prefetch):
    exact, ahead = run("graphsage", 0)[0], run("graphsage", prefetch)[0]
    assert len(exact) == len(ahead)
    for a, b in zip(exact, ahead, strict=True):
        assert same_blocks(a.blocks, b.blocks) and torch.equal(a.x, b.x) and torch.equal(a.y, b.y)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("method", ["bs", "bs.m"])
def test_two_runs_of_a_learning_method_are_equal(method, prefetch):
    (a, one), (b, two) = run(method, prefetch), run(method, prefetch)
    assert all(same_blocks(x.blocks, y.blocks) for x, y in zip(a, b, strict=True))
    assert one.policy.log_weight.any() and torch.equal(one.policy.log_weight, two.policy.log_weight)


def test_feedback_matters():
    taught, untaught = run("bs", 0)[0], run("bs", 0, learn=False)[0]
    assert same_blocks(taught[0].blocks, untaught[0].blocks)
    assert not all(same_blocks(x.blocks, y.blocks) for x, y in zip(taught, untaught, strict=True))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_delay_is_exact(prefetch):
    data = toy_data()
    sampler = Diary(data.graph, [2, 2])
    for epoch in (1, 2):
        for batch in Loader(data, sampler, torch.arange(100), 10, prefetch=prefetch):
            sampler.update(batch.blocks, ones(batch))
        assert sampler.learned == 10 * epoch, "an update was lost at the end of an epoch"
    once = [max(0, t - prefetch) for t in range(10)]
    assert sampler.drawn == once + [10 + t for t in once]


def test_updates_before_a_break_are_not_lost():
    data = toy_data()
    sampler = Diary(data.graph, [2, 2])
    sampler.nap = 0.02
    for i, batch in enumerate(Loader(data, sampler, torch.arange(100), 10, prefetch=3)):
        sampler.update(batch.blocks, ones(batch))
        if i == 3:
            break
    assert sampler.learned == 4
    assert int(sampler.step) == 7  # those handed out were drawn: the same number in every run
    sampler.update(batch.blocks, ones(batch))
    assert sampler.learned == 5  # and feedback is direct again


def test_a_failure_in_the_thread_reaches_the_caller():
    data = toy_data()
    sampler = NeighborSampler(data.graph, [2])

    def fail(seeds):
        raise ZeroDivisionError

    sampler.draw = fail
    with pytest.raises(ZeroDivisionError):
        list(Loader(data, sampler, [1, 2], 1, prefetch=2))


def test_a_sampler_with_parameters_is_never_read_ahead():
    data = toy_data()
    sampler = NeighborSampler(data.graph, [2])
    sampler.w = torch.nn.Parameter(torch.zeros(1))
    assert Loader(data, sampler, prefetch=4).prefetch == 0


def test_refusals():
    data = toy_data()
    sampler = NeighborSampler(data.graph, [2])
    for options, words in (
        ({"nodes": [0, 999]}, r"got nodes\[1\] = 999"),
        ({"nodes": torch.ones(3, dtype=torch.bool)}, "a mask for `nodes` must have 240 entries"),
        ({"batch_size": 0}, "`batch_size` must be"),
        ({"prefetch": -1}, "`prefetch` must be"),
    ):
        with pytest.raises(InputError, match=words):
            Loader(data, sampler, **options)
    with pytest.raises(InputError, match=r"`data\.x` must have a row for each of the 240 nodes, got 3"):
        Loader(Data(x=torch.zeros(3, 1)), sampler)


def test_a_state_of_another_batch_size():
    data = toy_data()
    loader = Loader(data, adahop.make("graphsage", data.graph, [2]), batch_size=50)
    next(iter(loader))
    state = loader.state_dict()
    other = Loader(data, adahop.make("graphsage", data.graph, [2]), batch_size=60)
    with pytest.raises(InputError, match="`batch_size` must be 50 to go on within the epoch of this state, got 60"):
        other.load_state_dict(state)
    other.load_state_dict({k: v for k, v in state.items() if k != "batch_size"})  # as 0.1 kept it
    with pytest.raises(InputError, match="`state` must be the `state_dict` of a Loader"):
        other.load_state_dict({"taken": 1})
