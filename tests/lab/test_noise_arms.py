"""lab/benchmarks/noise_arms.py: a run of every arm, and what a rule would have lost."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "lab" / "benchmarks" / "noise_arms.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("noise_arms", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_arm_runs(script, monkeypatch):
    monkeypatch.setattr(script, "GRAPHS", {"small": "texts:150,900,40,3"})
    monkeypatch.setattr(script, "EPOCHS", 1)
    rows = [script.train(("small", arm, 0.01, 0)) for arm in script.ARMS]
    assert all(0 < row["test"] <= 1 and len(row["history"]) == 1 for row in rows)
    table = script.scores(rows).splitlines()
    assert len(table) == 3 and table[2].count("|") == len(script.ARMS) + 2 and "–" not in table[2]


def test_regret_is_what_the_best_scored_above_the_chosen(script, monkeypatch):
    monkeypatch.setattr(script, "GRAPHS", {"g": ""})
    mine = script.UNIFORM[-1]

    def row(arm, ahead, test):
        history = [0.5] * 2 + [0.6 + ahead] * 38
        return {"graph": "g", "arm": arm, "lr": 0.01, "seed": 0, "test": test, "history": history}

    right = script.choices([row("noise 0", 0.0, 0.7), row(mine, 0.005, 0.72)]).splitlines()
    assert all(("0.0000" if "| 0 |" in line else "0.0200") in line for line in right[2:])
    wrong = script.choices([row("noise 0", 0.0, 0.75), row(mine, 0.02, 0.72)]).splitlines()
    assert len(wrong) == 2 + 18 and all("0.0300 | 0.0300" in line for line in wrong[2:])
    other = [row("noise 0", 0.0, 0.75), row(mine, 0.02, 0.72), row("uniform", 0.1, 0.8)]
    assert script.partners(other).splitlines()[-1].split("|")[1:-1] == [" g ", " 0.0000 ", " – ", " – ", " 0.0800 "]
    assert "0.0800" in script.choices(other), "against all arms, not those of the race alone"
