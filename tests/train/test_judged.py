"""Training without a pass over the whole graph: some nodes are judged, memories begin empty."""

from __future__ import annotations

import pytest

import adahop
from adahop import InputError
from adahop.checkpoint import Checkpoints
from adahop.config import Config
from adahop.models.base import GNN
from adahop.sum import ControlVariate, ExactSum
from adahop.train import evaluate
from conftest import toy_data

HOW = {"sizes": (3, 3), "hidden": 8, "batch_size": 32, "judged": 40}


@pytest.mark.parametrize("method", ["adahop", "s-gcn", "bs", "graphsage"])
def test_no_pass_is_made(monkeypatch, method):
    def refuse(*args, **options):
        raise AssertionError("a pass over the whole graph")

    data = toy_data()
    monkeypatch.setattr(GNN, "inference", refuse)
    result = adahop.fit(data, method=method, epochs=3, **HOW)
    again = adahop.fit(data, method=method, epochs=3, **HOW)
    assert [r["loss"] for r in result.history] == [r["loss"] for r in again.history]
    assert result.val == again.val and result.history[-1]["loss"] < result.history[0]["loss"]
    assert all(abs(row["val"] * 40 - round(row["val"] * 40)) < 1e-4 for row in result.history)  # of 40 nodes


def test_all_nodes_judged_have_the_scores_of_a_pass():
    data = toy_data()
    result = adahop.fit(data, **{**HOW, "judged": 10**6}, epochs=2)
    scores = evaluate(result.model, data)
    assert scores["val"] == pytest.approx(result.val) and scores["test"] == pytest.approx(result.test)


def test_the_preset_keeps_a_history_of_what_it_saw():
    model = adahop.fit(toy_data(nodes=2000), **{**HOW, "judged": 5}, epochs=1).model
    first, second = model.active_memories()
    assert isinstance(first, ExactSum) and isinstance(second, ControlVariate) and second.sums is None
    assert 0 < second.history.nodes.used <= 2001 and bool(second.history.value.any())


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    data, how = toy_data(), {**HOW, "epochs": 4}

    def stop(row):
        if row["epoch"] == 2:
            raise KeyboardInterrupt

    whole = adahop.fit(data, **how)
    with pytest.raises(KeyboardInterrupt):
        adahop.fit(data, **how, on_epoch=stop, checkpoint=Checkpoints(tmp_path, every=1))
    rest = adahop.fit(data, **how, checkpoint=tmp_path)
    assert [r["loss"] for r in whole.history] == [r["loss"] for r in rest.history]


@pytest.mark.parametrize(
    "given", [{"judged": 0}, {"judged": 5, "estimator": "exact+snapshot"}, {"judged": 5, "model": "rgcn"}]
)
def test_what_needs_a_pass_is_refused(given):
    with pytest.raises(InputError, match="must"):
        Config(**given)
