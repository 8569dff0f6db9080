"""The measurement of PyG models on a GPU, tried on a small graph and the CPU: every way runs and leaves its row."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "lab" / "benchmarks" / "pyg_gpu.py"
spec = importlib.util.spec_from_file_location("pyg_gpu", PATH)
bench = importlib.util.module_from_spec(spec)
sys.modules["pyg_gpu"] = bench
spec.loader.exec_module(bench)


def test_every_way_leaves_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.torch, "compile", lambda model, **_: model)  # a compiler takes longer than all of this
    small = {"nodes": 200, "edges": 2_000, "width": 8, "classes": 3, "train": 120}
    monkeypatch.setattr(bench, "SMALL", small)
    out = tmp_path / "rows.json"
    words = ["--small", "--device", "cpu", "--batch", "40", "--epochs", "1", "--hidden", "8", "--out", str(out)]
    bench.main(words)
    rows = {row["way"]: row for row in json.loads(out.read_text())}
    assert rows.keys() == bench.WAYS.keys() and not any("failed" in row for row in rows.values()), rows
    assert all(
        row["batches"] == 3 and row["epoch_s"] > 0 and row["command"].endswith(str(out)) for row in rows.values()
    )
    assert rows["device uniform"]["loss"] == pytest.approx(rows["cpu uniform"]["loss"])  # the same draws
    assert rows["device uniform, cache .2"]["loss"] == pytest.approx(rows["device uniform"]["loss"])
    assert rows["device uniform, cache 0"]["hit_rate"] == 0.0 < rows["device uniform, cache .2"]["hit_rate"] < 1.0
    assert rows["device uniform, padded"]["edges_per_batch"] % 1 == 0


def test_a_way_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "WAYS", {"broken": {"method": "none"}, "cpu uniform": bench.WAYS["cpu uniform"]})
    words = ["--small", "--device", "cpu", "--epochs", "1", "--hidden", "8", "--out", str(tmp_path / "rows.json")]
    broken, fine = bench.main(words)
    assert "`method` must be one of" in broken["failed"] and fine["epoch_s"] > 0
