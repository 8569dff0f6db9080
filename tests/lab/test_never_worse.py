"""The table of lab/benchmarks/never_worse.py: paired by seed, tuning left out, bounds as stated."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from adahop_lab.experiments.stats import paired

FILE = Path(__file__).parents[2] / "lab" / "benchmarks" / "never_worse.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("never_worse", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name: str, *tests: float, graph: str = "g") -> list[dict]:
    return [{"dataset": graph, "candidate": name, "seed": i, "test": t} for i, t in enumerate(tests)]


def test_a_loss_a_gain_and_an_open_case(script):
    found = [
        *rows("adahop, k = 5", 0.800, 0.802, 0.801),
        *rows("uniform, k = 2", 0.700, 0.701, 0.702),
        *rows("full batch", 0.820, 0.821, 0.822),
        *rows("RNS", 0.790, 0.812, 0.801),
        {"dataset": "g", "candidate": "RNS", "seed": 1000, "test": 0.0},
    ]
    said = script.table(found)
    cells = {line.split(" | ")[3]: line for line in said[4:]}
    assert said[0].startswith("3 differences") and "up to 15%" in said[0]
    assert cells["uniform, k = 2"].endswith("| yes |") and "+0.1000" in cells["uniform, k = 2"]
    assert cells["full batch"].endswith("| **no** |") and cells["RNS"].endswith("| open |")


def test_intervals_that_hold_together_are_wider():
    one, two = {0: 0.5, 1: 0.6, 2: 0.55}, {0: 0.4, 1: 0.53, 2: 0.44}
    alone, together = paired(one, two), paired(one, two, 1 - 0.05 / 8)
    assert together.low < alone.low < alone.difference < alone.high < together.high
    assert together.difference == alone.difference


def test_typed_files_and_others_are_left_out(script, tmp_path):
    (tmp_path / "broken.npz").write_bytes(b"no data")
    assert script.graphs(tmp_path, None) == []
