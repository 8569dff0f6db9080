"""Batches drawn side by side are the batches drawn one after the other."""

from __future__ import annotations

import pytest
import torch

import adahop
from adahop import loader, ops
from adahop.loader import Loader
from adahop.samplers import NeighborSampler


def batches(name: str, prefetch: int, threads: int, until: int = 10**9, state=None):
    data = adahop.load("digits")
    sampler = adahop.make(name, data.graph, [3, 3], seed=7)
    made = Loader(data, sampler, data.train_mask, batch_size=100, prefetch=prefetch)
    if state is not None:
        sampler.load_state_dict(state["sampler"])
        made.load_state_dict(state["loader"])
    out = []
    with ops.threads(threads):
        for batch in made:
            out.append((batch.n_id, batch.edge_index, batch.e_id))
            if len(out) == until:
                kept = {"loader": made.state_dict(), "sampler": {k: v.clone() for k, v in sampler.state_dict().items()}}
                return out, kept
    return out, int(sampler.step)


def equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("name", ["graphsage", "labor"])
def test_they_are_the_same(name, monkeypatch):
    used = []
    draws = loader.ParallelDraws
    monkeypatch.setattr(loader, "ParallelDraws", lambda *given: used.append(given[1]) or draws(*given))
    plain, steps = batches(name, 0, 1)
    for prefetch, threads, workers in ((2, 2, [2]), (3, 8, [3]), (1, 8, []), (3, 1, [])):
        used.clear()
        found, taken = batches(name, prefetch, threads)
        assert equal(found, plain) and taken == steps == len(plain) and used == workers


def test_they_go_on_from_a_state():
    plain, _ = batches("graphsage", 0, 1)
    head, state = batches("graphsage", 2, 2, until=4)
    rest, _ = batches("graphsage", 2, 2, state=state)
    assert equal(head + rest, plain)


def test_who_learns_or_draws_in_a_way_of_their_own_is_left_alone():
    class Own(NeighborSampler):
        def draw(self, seeds):
            return super().draw(seeds)

    graph = adahop.load("digits").graph
    assert (
        NeighborSampler(graph, [2]).parallel
        and not Own(graph, [2]).parallel
        and not adahop.make("bs", graph, [2]).parallel
    )
