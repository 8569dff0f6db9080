"""noise="auto": the race between settings of the dial, its cost, its rule, its state."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

import adahop
from adahop import metrics
from adahop.checkpoint import Checkpoints
from adahop.checks import InputError
from adahop.config import Config
from adahop.distributed import Strategy
from adahop.race import GROUPS, LEAST, SHARED, UNIFORM, Arm, group_of, length
from adahop.samplers import NeighborSampler
from adahop.train import Judged

ARMS = [0.0, *UNIFORM]
DATA = "synthetic:300,7500,6,3"  # 25 neighbours: three arms
HOW = {"sizes": (2, 2), "hidden": 8, "batch_size": 64, "dropout": 0.2, "lr": 0.01}


@pytest.fixture(scope="module")
def data():
    return adahop.load(DATA)


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience", [0, 1, 9, 12, 100])
@pytest.mark.parametrize("many", [2, 3])
def test_all_arms_cost_at_most_two_fifths_more_than_the_shortest_run(patience, many):
    for epochs in range(1, 200):
        first, second = length(epochs, patience, many)
        surely = min(epochs, patience + 1) if patience else epochs
        assert (many - 1) * first + second <= 0.4 * surely
        assert SHARED + first + second <= surely if second else first == 0
        assert surely < LEAST or second >= 1 <= first + 3 - many
    assert length(40) == (5, 6)


def test_with_few_neighbours_two_arms_run_longer():
    """Ten of eight neighbours are all of them: no other noise than none."""
    result = adahop.fit(adahop.load("synthetic:300,2400,6,3"), epochs=20, **HOW)
    assert [(a["noise"], a["epochs"]) for a in result.race["arms"]] == [(0.0, 7), ("uniform 2", 7)]
    assert result.race["evaluations"] == 27


def test_a_run_has_the_evaluations_that_were_said(data):
    rows = []
    result = adahop.fit(data, epochs=20, on_epoch=rows.append, **HOW)
    first, second = length(20)
    assert len(rows) == result.race["evaluations"] == 20 + 2 * first + second
    assert [r["evaluation"] for r in rows] == list(range(1, len(rows) + 1))
    assert [r["epoch"] for r in result.history] == list(range(1, 21)), "the winner's own epochs"
    noises = [r["noise"] for r in rows]
    at = SHARED + 3 * first
    assert noises[:at] == [0.0] * SHARED + [noise for noise in ARMS for _ in range(first)]
    two = list(dict.fromkeys(noises[at : at + 2 * second]))
    assert noises[at : at + 2 * second] == [noise for noise in two for _ in range(second)] and len(two) == 2
    arms = result.race["arms"]
    assert [a["noise"] for a in arms] == list(ARMS)
    assert {a["noise"]: a["epochs"] for a in arms} == {n: first + second * (n in two) for n in ARMS}
    chosen = result.noise if isinstance(result.noise, str) else f"{result.noise:g}"
    assert result.history[-1]["noise"] == result.noise and result.race["why"].startswith(f"noise {chosen}")
    assert rows[-1]["seconds"] >= max(r["seconds"] for r in rows), "seconds of both arms count"
    assert json.loads(json.dumps(result.summary()))["noise"] == result.noise


# --- what it decides -------------------------------------------------------------------------------------------------


def arm(noise, val, spread=0.0):
    """An arm whose groups differ from others' by `spread` alone."""
    swing = torch.tensor([1.0, -1.0]).repeat(GROUPS // 2) * spread
    return Arm(noise, [val], (val + swing).tolist())


def test_ahead_by_more_than_the_error():
    base = arm(0.0, 0.80)
    error = arm("uniform 2", 0.9, 0.001).error(base)
    assert error == pytest.approx(0.001 * (GROUPS - 1) ** 0.5, rel=1e-4)
    assert not arm("uniform 2", 0.80 + 0.9 * error, 0.001).beats(base)
    assert arm("uniform 2", 0.80 + 1.1 * error, 0.001).beats(base)
    assert not base.beats(base), "equal is not ahead"


def test_ten_draws_must_be_ahead_by_a_margin():
    ten, none = Arm("uniform 10", [0.81]), Arm(0.0, [0.805])
    assert ten.val() > none.val() and ten.rank < none.rank
    assert Arm("uniform 10", [0.82]).rank > none.rank and Arm("uniform 2", [0.806]).rank > none.rank


def test_the_mean_of_the_best_epochs_counts():
    assert Arm(0.0, [0.1, 0.9, 0.2, 0.6, 0.3]).val() == pytest.approx(0.6)
    assert Arm(0.0, [0.1, 0.9, 0.2, 0.6, 0.3]).val(2) == pytest.approx(0.5)
    assert Arm(0.0, [0.4]).val() == pytest.approx(0.4)
    later = Arm("uniform 2", [0.1, 0.2, 0.9, 0.9, 0.9])
    assert later.ahead_of(Arm(0.0, [0.3, 0.2])) == pytest.approx(-0.1), "after as many epochs as both have"


def test_noise_is_taken_away_where_it_hurts_and_left_in_where_it_regularises():
    """A label that many neighbours must be averaged for, and one that every word of a text and neighbour repeats."""
    many = adahop.load("planted:1500,45000,16,2,signal=0.2,own=0.2,strength=2,train=0.5,seed=3")
    how = {"sizes": (2, 2), "hidden": 32, "lr": 0.01, "dropout": 0.0, "epochs": 30}
    hurt = adahop.fit(many, **how)
    assert hurt.noise == 0.0 and all(a["ahead"] < -0.02 for a in hurt.race["arms"][1:])
    texts = adahop.load("texts:1500,9000,600,5,seed=1")
    helped = adahop.fit(texts, **how)
    assert helped.noise == "uniform 2" and helped.race["arms"][1]["ahead"] > 0


def test_the_error_is_that_of_paired_nodes():
    """Accuracy of two models on 4,000 nodes: the standard error of the difference, by groups and in closed form."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(3, (4000,), generator=g)
    outs = [torch.nn.functional.one_hot(y, 3) * 1.0 + torch.randn(4000, 3, generator=g) * s for s in (0.6, 0.8)]
    arms = []
    for out in outs:
        judged = Judged.__new__(Judged)
        every = torch.ones(4000, dtype=torch.bool)
        judged.data, judged.metric, judged.strategy = SimpleNamespace(val_mask=every, y=y), "accuracy", Strategy()
        judged.out, judged.rows = out, slice(0, 4000)
        arms.append(Arm(0.0, [metrics.score("accuracy", out, y)], judged.without_groups()))
    gap, error = arms[0].ahead_of(arms[1]), arms[0].error(arms[1])
    d = (outs[0].argmax(1) == y).double() - (outs[1].argmax(1) == y).double()
    assert gap == pytest.approx(float(d.mean()), abs=1e-6)
    assert error == pytest.approx(float(d.std()) / 4000**0.5, rel=0.4)  # 20 groups: off by a sixth, typically


def test_groups_are_even():
    for step in (1, 2, 7, 64):
        many = torch.bincount(group_of(torch.arange(0, 20000 * step, step)), minlength=GROUPS)
        assert int(many.min()) > 800 and int(many.max()) < 1200


# --- what it leaves --------------------------------------------------------------------------------------------------


def kept(result):
    rows = [{k: v for k, v in r.items() if k not in ("seconds", "noise", "evaluation")} for r in result.history]
    return rows, result.test, result.val, result.best_epoch, result.steps


def won_by(noise):
    """A score that makes an arm win, whatever it was, and the second uniform one the next."""
    return lambda self, epochs=None: 1.0 if self.noise == noise else 0.5 if self.noise == "uniform 10" else 0.1


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_where_the_first_arm_wins_the_run_is_that_of_noise_0(data, model, monkeypatch):
    monkeypatch.setattr(Arm, "val", won_by(0.0))
    auto, fixed = (adahop.fit(data, epochs=10, model=model, noise=noise, **HOW) for noise in ("auto", 0.0))
    assert auto.noise == 0.0 and kept(auto) == kept(fixed)
    for a, b in zip(auto.model.parameters(), fixed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert fixed.race is None and fixed.noise == 0.0


@pytest.mark.parametrize("noise", UNIFORM)
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_where_uniform_draws_win_their_line_goes_on(data, model, noise, monkeypatch):
    """With plain sums over a few drawn neighbours: no memory is read or renewed."""
    monkeypatch.setattr(Arm, "val", won_by(noise))
    result = adahop.fit(data, epochs=10, model=model, **{**HOW, "sizes": (4, 4)})
    k = UNIFORM[noise]
    assert result.noise == noise and result.race["why"].startswith(f"noise {noise}: sampling regularises here")
    assert [r["noise"] for r in result.history] == [0.0] * SHARED + [noise] * (10 - SHARED)
    assert result.sampler.sizes == [k, k] and not result.sampler.listens and not result.sampler.skip
    assert result.model.known == frozenset() and all(result.model.memory(layer) is None for layer in (0, 1))
    blocks = result.sampler.sample(torch.arange(20))
    drawn = torch.bincount(blocks[0].dst[blocks[0].scale > 1.0], minlength=1)
    assert int(drawn.max()) == k


def test_the_other_arms_begin_where_the_first_did_and_see_the_same_seeds(data, monkeypatch):
    seen = []
    sample = NeighborSampler.sample

    def noted(self, seeds, *args):
        seen.append((self.sizes, seeds.clone(), int(self.step)))
        return sample(self, seeds, *args)

    monkeypatch.setattr(NeighborSampler, "sample", noted)
    adahop.fit(data, epochs=10, **{**HOW, "sizes": (4, 4)})
    steps, (each, more) = -(-int(data.train_mask.sum()) // 64), length(10)
    cuts = [SHARED + i * each for i in range(4)] + [SHARED + 3 * each + i * more for i in (1, 2)]
    parts = [seen[a * steps : b * steps] for a, b in itertools.pairwise(cuts)]
    assert [{tuple(sizes) for sizes, _, _ in part} for part in parts[:3]] == [{(4, 4)}, {(2, 2)}, {(10, 10)}]
    for first, *others in (parts[:3], parts[3:]):  # from the shared epochs, and each from where it stood
        for part in others:
            for (_, one, at), (_, other, then) in zip(first, part, strict=True):
                assert torch.equal(one, other) and at == then


@pytest.mark.parametrize("winner", ARMS)
@pytest.mark.parametrize("stop", [7, 11, 15, 19, 23, 31, 40, 47])
def test_a_stopped_race_ends_as_if_it_had_not_been(data, tmp_path, stop, winner, monkeypatch):
    """198 training nodes: 4 steps an epoch, 10 epochs and 4 more; stopped before, in and after the arms."""
    monkeypatch.setattr(Arm, "val", won_by(winner))
    want = adahop.fit(data, epochs=10, **HOW)
    taken = 0

    def on_step(step):
        nonlocal taken
        taken += 1
        if taken == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adahop.fit(data, epochs=10, on_step=on_step, checkpoint=Checkpoints(tmp_path, 3), **HOW)
    again = adahop.fit(data, epochs=10, checkpoint=Checkpoints(tmp_path, 3), **HOW)
    assert kept(again) == kept(want) and again.noise == want.noise
    assert again.race == want.race


# --- where there is none ---------------------------------------------------------------------------------------------


def test_without_time_or_a_dial_there_is_no_race(data):
    short = adahop.fit(data, epochs=2, **HOW)
    assert short.noise == 0.0 and short.race is None and "noise" not in short.history[0]
    plain = adahop.fit(data, epochs=10, method="graphsage", **HOW)
    assert plain.noise is None and plain.race is None


def test_noise_is_auto_or_numbers():
    assert Config().noise == "auto" and Config().dial == 0.0
    with pytest.raises(InputError, match="`noise` must be one of auto, got 'much'"):
        Config(noise="much")
    with pytest.raises(InputError, match="`noise` must be auto or 0 for estimator plain, which has no control variate"):
        Config(method="bs", noise=0.5)
    assert Config(method="bs", noise=0.0).noise == 0.0
