"""The scripts of lab/benchmarks/pyg: three changed lines convert them, and what comes out trains."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "lab" / "benchmarks" / "pyg_half.py"
spec = importlib.util.spec_from_file_location("pyg_half", PATH)
half = importlib.util.module_from_spec(spec)
sys.modules["pyg_half"] = half
spec.loader.exec_module(half)


NODES = (PATH.parent / "pyg" / "nodes.py").read_text()


@pytest.mark.parametrize("way", half.WAYS)
def test_at_most_three_lines_change(way):
    before = NODES
    after = half.converted(before, way)
    changed = [d for d in difflib.ndiff(before.splitlines(), after.splitlines()) if d.startswith("+ ")]
    assert len(changed) == (2 if way == "pyg" else 3) and "scale_messages" not in before
    assert ("learn(" in after) == (way != "pyg")


@pytest.mark.parametrize("script", half.SCRIPTS)
@pytest.mark.filterwarnings("error:.*ignores the scale")
def test_a_converted_script_trains(script, monkeypatch, capsys):
    code = half.converted(NODES, "adahop")
    monkeypatch.setattr(
        sys, "argv", ["nodes", "--conv", script, "--epochs", "3", "--neighbors", "3", "--dropout", "0.1"]
    )
    with torch.random.fork_rng(devices=[]):
        exec(compile(code, script, "exec"), {"__name__": "__main__"})
    tests = re.findall(r"test ([\d.]+)", capsys.readouterr().out)
    assert len(tests) == 3 and float(tests[-1]) > 0.8


def test_the_table_pairs_the_seeds():
    def row(way, k, seed, test, val=0.5):
        return {"graph": "cora", "script": "sage", "way": way, "k": k, "seed": seed, "lr": 0.01, "dropout": 0.5,
                "val": val, "test": test}  # fmt: skip

    rows = [row("pyg", 4, -1, 0.1)]
    for seed, (a, b) in enumerate([(0.5, 0.6), (0.7, 0.8)]):
        rows += [row("pyg", 4, seed, a), row("adahop", 2, seed, b)]
    line = half.table(rows).splitlines()[-1]
    assert line == ("| Cora, 4 | SAGE | .6000 ± .1414 (2 seeds) | .7000 ± .1414 (2 seeds) | +.1000 ± .0000 (2 seeds) |")
    todo = half.tasks(rows, 3, False, 1)
    assert len(todo) == 6 and {t.k for t in todo} == {4, 2} and {t.lr for t in todo} == {0.01}
