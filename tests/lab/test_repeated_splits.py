"""lab/benchmarks/repeated_splits.py: test nodes take no part in the choice."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import adahop

FILE = Path(__file__).parents[2] / "lab" / "benchmarks" / "repeated_splits.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("repeated_splits", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_new_split_has_no_test_nodes_and_differs_by_seed(script):
    data = adahop.load("planted:200,900,8,3,signal=0.6")
    one, again, other = (script.split_anew(data, seed) for seed in (7, 7, 8))
    both = data.train_mask | data.val_mask
    assert torch.equal(one.train_mask | one.val_mask, both) and not (one.train_mask & one.val_mask).any()
    assert int(one.val_mask.sum()) == int(both.sum()) // 5 and not (one.test_mask & data.test_mask).any()
    assert torch.equal(one.val_mask, again.val_mask) and not torch.equal(one.val_mask, other.val_mask)
    assert adahop.fit(one, epochs=1, hidden=4, noise=0.0).steps > 0


def test_only_splits_decide_and_only_the_chosen_is_tested(script):
    def row(model, seed, val, **more):
        return {"graph": "g", "model": model, "hidden": 64, "dropout": 0.2, "seed": seed, "val": val, **more}

    rows = [row("a", 1000, 0.8), row("a", 1001, 0.9), row("b", 1000, 0.84), row("b", 1001, 0.84)]
    rows += [row("a", 0, 0.1, test=0.7), row("a", 1, 0.1, test=0.72), row("b", 0, 0.99, test=0.9)]
    assert script.best(rows, "g") == ("a", 64, 0.2)
    a, b = script.table(rows).splitlines()[2:]
    assert a.endswith("| 0.8500 | 0.7100 ± 0.0141 |") and b.endswith("| 0.8400 |  |")
