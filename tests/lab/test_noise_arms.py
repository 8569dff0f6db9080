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
    """The best three of the first epochs decide; of three arms one leaves before the last epochs count."""
    monkeypatch.setattr(script, "GRAPHS", {"g": "texts:100,3000,5,2"})

    def row(arm, early, late, test):
        history = [0.5] * 2 + [early] * 5 + [late] * 33
        return {"graph": "g", "arm": arm, "lr": 0.01, "seed": 0, "test": test, "history": history}

    others = [row(arm, 0.1, 0.1, 0.6) for arm in ("uniform 5", "uniform, a fifth")]
    rows = [row("noise 0", 0.7, 0.7, 0.75), row("uniform", 0.6, 0.9, 0.8), row("uniform 10", 0.65, 0.72, 0.74), *others]
    (runs,) = script.cells(rows, "g")
    of_all = ("noise 0", "uniform", "uniform 10")
    assert script.regret(of_all, 7, 13, script.BEST_THREE, runs) == pytest.approx(0.06), "uniform has left too early"
    assert script.regret(of_all, 12, 13, script.BEST_THREE, runs) == pytest.approx(0.0)
    assert script.regret(("noise 0", "uniform 10"), 7, 6, script.BEST_THREE, runs) == pytest.approx(0.05)
    shown = script.partners(rows).splitlines()
    assert shown[2] == "| g | 0.0000 | 0.0500 | 0.0600 | 0.0500 | 0.0600 | 0.0600 |", "30 neighbours: three arms"
    assert shown[3].startswith("| all runs | 0.0000 |") and shown[4].startswith("| largest | 0.0000 |")
    monkeypatch.setattr(script, "GRAPHS", {"g": "texts:100,1900,5,2"})
    assert script.partners(rows).splitlines()[2].endswith("| 0.0600 | 0.0000 |"), "19: two"
    monkeypatch.setattr(script, "GRAPHS", {"g": "texts:100,3000,5,2"})
    table = script.choices(rows).splitlines()
    assert len(table) == 2 + len(script.RULES) * len(script.ENDS) and "0.0600 | 0.0600" in table[5]
    assert not script.cells(rows[1:], "g"), "where an arm is missing nothing is said"
