"""planted: the graph is made as it says, and its bound is the best rule's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import adahop
from adahop.checks import InputError
from adahop.datasets.planted import Planting, _best, _signal, _sources, planted

SPEC = "planted:2000,30000,8,4"


def test_it_is_what_was_asked_for():
    data = adahop.load(SPEC)
    assert (data.num_nodes, data.num_edges, data.x.shape[1], data.classes) == (2000, 30000, 8, 4)
    assert int(data.train_mask.sum()) == 1200 and int(data.val_mask.sum()) == 200
    again = adahop.load(SPEC)
    assert torch.equal(data.graph.indices, again.graph.indices) and torch.equal(data.x, again.x)
    assert not torch.equal(data.graph.indices, adahop.load(SPEC + ",seed=1").graph.indices)
    loops = data.graph.indices.long() == torch.repeat_interleave(torch.arange(2000), data.graph.indptr.diff())
    assert int(loops.sum()) < 5


def made(n=3000, m=60000, c=4, **options):
    plan, rng = Planting(**options), np.random.default_rng(1)
    y = rng.integers(0, c, n)
    kind = np.where(rng.random(n) < plan.own, y, rng.integers(0, c, n))
    copies = rng.integers(1, 5, n)
    indptr = np.arange(n + 1) * (m // n)
    signal = _signal(indptr, plan)
    indices, counts = _sources(indptr, (y + plan.shift) % c, kind, copies, signal, c, rng)
    return plan, y, kind, copies, indptr, signal, indices, counts


@pytest.mark.parametrize("shift", [0, 1])
def test_neighbours_are_of_the_types_that_labels_ask_for(shift):
    """60,000 draws: the share of the type asked for within 5 standard errors of signal + (1 - signal) * its share."""
    _, y, kind, copies, indptr, _, indices, counts = made(signal=0.3, shift=shift)
    target = np.repeat(np.arange(len(y)), np.diff(indptr))
    assert (counts.sum(1) == np.diff(indptr)).all()
    assert (np.bincount(target * 4 + kind[indices], minlength=counts.size).reshape(counts.shape) == counts).all()
    share = np.bincount(kind, weights=copies, minlength=4) / copies.sum()
    asked = (y[target] + shift) % 4
    want = (0.3 + 0.7 * share[asked]).mean()
    assert abs((kind[indices] == asked).mean() - want) < 5 * (want * (1 - want) / len(target)) ** 0.5


@pytest.mark.parametrize("options", [{"signal": 0.1}, {"signal": 0.25, "shift": 2, "own": 0.0}, {"fade": 0.5}])
def test_the_bound_is_what_the_best_rule_scores(options):
    """The rule from the likelihoods of all edges, written out; 3,000 nodes: within 4 standard errors of the bound."""
    plan, y, kind, copies, indptr, signal, indices, counts = made(**options)
    bound = _best(counts, kind, y, copies, signal, plan, 4).mean()
    share = np.bincount(kind, weights=copies, minlength=4) / copies.sum()
    log = np.zeros((len(y), 4))
    for label in range(4):
        own = np.where(kind == label, plan.own, 0.0) + (1 - plan.own) / 4
        target = np.repeat(np.arange(len(y)), np.diff(indptr))
        s = signal[target]
        odds = (1 - s) * share[kind[indices]] + s * (kind[indices] == (label + plan.shift) % 4)
        log[:, label] = np.log(own) + np.bincount(target, weights=np.log(odds), minlength=len(y))
    right = (log.argmax(1) == y).mean()
    assert 0.3 < bound < 0.99
    assert abs(right - bound) < 4 * (bound * (1 - bound) / len(y)) ** 0.5


def test_its_knobs_turn_the_right_way():
    bound = [planted(f"{SPEC},signal={s}").bound for s in (0.0, 0.1, 0.3, 0.6)]
    assert bound == sorted(bound) and bound[-1] > 0.95
    plain, wrong = (planted(f"{SPEC},wrong={w}") for w in (0, 0.4))
    differs = plain.y != wrong.y
    assert not bool((differs & ~plain.train_mask).any())
    assert 0.3 < float(differs[plain.train_mask].float().mean()) < 0.5
    assert plain.bound == wrong.bound


def test_a_model_learns_it_and_stays_below_the_bound():
    """2,000 nodes, 600 of them for the test: within 4 standard errors of the bound at most."""
    data = adahop.load(SPEC + ",signal=0.3")
    test = adahop.fit(data, sizes=(10, 10), hidden=32, epochs=8, noise=0.0, dropout=0.0).test
    many = int(data.test_mask.sum())
    assert 0.5 < test < data.bound + 4 * (data.bound * (1 - data.bound) / many) ** 0.5


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("planted:10,20,3", "`dataset` must be planted:N,E,F,C, then name=value of signal"),
        ("planted:10,20,3,2,loud=1", "`dataset` must be planted:N,E,F,C, then name=value of signal"),
        ("planted:10,20,3,11", "2 <= C <= N"),
        ("planted:10,20,3,2,signal=1", r"`signal` of planted: must be in \[0, 0.95\], got 1.0"),
        ("planted:10,20,3,2,shift=2", r"`shift` of planted: must be in \[0, 1\], got 2"),
    ],
)
def test_what_it_refuses(spec, said):
    with pytest.raises(InputError, match=said):
        adahop.load(spec)
