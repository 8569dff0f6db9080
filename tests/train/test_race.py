"""noise="auto": the race between settings of the dial, its cost, its rule, its state."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import adahop
from adahop import metrics
from adahop.checkpoint import Checkpoints
from adahop.checks import InputError
from adahop.config import Config
from adahop.distributed import Alone
from adahop.race import ARMS, GROUPS, SHARED, Arm, Race, group_of, rounds
from adahop.train import Judged

DATA = "synthetic:300,3000,6,3"
HOW = {"sizes": (2, 2), "hidden": 8, "batch_size": 64, "dropout": 0.2, "lr": 0.01}


@pytest.fixture(scope="module")
def data():
    return adahop.load(DATA)


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience", [0, 1, 9, 12, 100])
def test_all_arms_cost_at_most_two_fifths_more_than_the_shortest_run(patience):
    for epochs in range(1, 200):
        first, second = rounds(epochs, patience)
        surely = min(epochs, patience + 1) if patience else epochs
        assert 2 * first + second <= 0.4 * surely
        assert SHARED + first + second <= surely or first == second == 0
    assert rounds(40) == (4, 6)


def test_a_run_has_the_evaluations_that_were_said(data):
    rows = []
    result = adahop.fit(data, epochs=20, on_epoch=rows.append, **HOW)
    first, second = rounds(20)
    assert len(rows) == result.race["evaluations"] == 20 + 2 * first + second
    assert [r["evaluation"] for r in rows] == list(range(1, len(rows) + 1))
    assert [r["epoch"] for r in result.history] == list(range(1, 21)), "the winner's own epochs"
    noises = [r["noise"] for r in rows]
    assert noises[: SHARED + 3 * first] == [0.0] * SHARED + [n for n in ARMS for _ in range(first)]
    arms = result.race["arms"]
    assert [a["noise"] for a in arms if a["round"] == 1] == list(ARMS) and sum(a["round"] == 2 for a in arms) == 2
    assert {a["epochs"] for a in arms if a["round"] == 1} == {SHARED + first}
    assert result.history[-1]["noise"] == result.noise and f"noise {result.noise:g}" in result.race["why"]
    assert rows[-1]["seconds"] >= max(r["seconds"] for r in rows), "seconds of all arms count"
    assert json.loads(json.dumps(result.summary()))["noise"] == result.noise


# --- what it decides -------------------------------------------------------------------------------------------------


def arm(noise, val, spread=0.0):
    """An arm whose groups differ from others' by `spread` alone."""
    swing = torch.tensor([1.0, -1.0]).repeat(GROUPS // 2) * spread
    return Arm(noise, val, 6, (val + swing).tolist())


def test_noise_is_left_in_only_where_that_is_clearly_better():
    base = arm(0.0, 0.80)
    error = 0.001 * (GROUPS - 1) ** 0.5
    assert not arm(1.0, 0.80 + 0.9 * error, 0.001).beats(base)
    assert arm(1.0, 0.80 + 1.1 * error, 0.001).beats(base)
    assert not base.beats(base), "equal is not ahead"


@pytest.mark.parametrize(
    ("vals", "left"),
    [((0.8, 0.7, 0.6), [0, 1]), ((0.8, 0.7, 0.75), [0, 2]), ((0.8, 0.9, 0.7), [0, 1]), ((0.8, 0.9, 0.95), [1, 2])],
)
def test_who_runs_in_the_second_round(vals, left):
    race = Race(4, 6)
    race.arms = [arm(n, v) for n, v in zip(ARMS, vals, strict=True)]
    assert race._best_two() == left


def test_the_error_is_that_of_paired_nodes():
    """Accuracy of two models on 4,000 nodes: the standard error of the difference, by groups and in closed form."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(3, (4000,), generator=g)
    outs = [torch.nn.functional.one_hot(y, 3) * 1.0 + torch.randn(4000, 3, generator=g) * s for s in (0.6, 0.8)]
    arms = []
    for out in outs:
        judged = Judged.__new__(Judged)
        every = torch.ones(4000, dtype=torch.bool)
        judged.data, judged.metric, judged.team = SimpleNamespace(val_mask=every, y=y), "accuracy", Alone()
        judged.out, judged.rows = out, slice(0, 4000)
        arms.append(Arm(0.0, metrics.score("accuracy", out, y), 1, judged.without_groups()))
    gap, error = arms[0].ahead_of(arms[1])
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


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_where_the_first_arm_wins_the_run_is_that_of_noise_0(data, model, monkeypatch):
    monkeypatch.setattr(Arm, "beats", lambda self, other: False)
    auto, fixed = (adahop.fit(data, epochs=10, model=model, noise=noise, **HOW) for noise in ("auto", 0.0))
    assert auto.noise == 0.0 and kept(auto) == kept(fixed)
    for a, b in zip(auto.model.parameters(), fixed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert fixed.race is None and fixed.noise == 0.0


def test_where_another_wins_its_line_goes_on(data, monkeypatch):
    monkeypatch.setattr(Arm, "beats", lambda self, other: True)
    result = adahop.fit(data, epochs=10, **HOW)
    assert result.noise in ARMS[1:]
    assert [r["noise"] for r in result.history] == [0.0] * SHARED + [result.noise] * (10 - SHARED)


@pytest.mark.parametrize("stop", [7, 23, 31, 40])
def test_a_stopped_race_ends_as_if_it_had_not_been(data, tmp_path, stop, monkeypatch):
    """198 training nodes: 4 steps an epoch, 10 epochs and 3 more; stopped in and between the rounds."""
    monkeypatch.setattr(Arm, "beats", lambda self, other: self.noise == 0.5)
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
