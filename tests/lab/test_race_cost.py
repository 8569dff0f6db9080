"""lab/benchmarks/race_cost.py: a run of each kind, and ratios of the runs of the same seed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "lab" / "benchmarks" / "race_cost.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("race_cost", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_race_has_more_evaluations_than_a_fixed_dial(script):
    auto, fixed = (script.run(("g", 2, noise, 0), {"g": "synthetic:120,600,4,2"}) for noise in script.DIALS)
    assert fixed["evaluations"] == 40 and auto["evaluations"] == 54 and min(auto["seconds"], fixed["seconds"]) > 0
    assert "1.35" in script.table([auto, fixed])


def test_ratios_are_of_the_same_seed(script):
    rows = [
        {"graph": "g", "k": 2, "noise": noise, "seed": seed, "seconds": s, "evaluations": e, "chose": "0.0"}
        for noise, seed, s, e in (("auto", 0, 6.0, 54), (0.0, 0, 4.0, 40), ("auto", 1, 3.0, 54))
    ]
    assert script.table(rows).splitlines()[-1] == "| g | 2 | 6.0 | 4.0 | 1.50 | 1.35 | 0.0 |"
