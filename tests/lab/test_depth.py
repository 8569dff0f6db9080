"""lab/benchmarks/depth.py: its table, and a run of every way at more than two layers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

import adahop
from adahop_lab import candidates

FILE = Path(__file__).parents[2] / "lab" / "benchmarks" / "depth.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("depth", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("arch", ["residual", "gcnii"])
def test_every_way_at_three_layers(script, tmp_path, monkeypatch, capsys, arch):
    monkeypatch.setattr(candidates, "load", lambda path: adahop.load("planted:150,900,8,3,signal=0.6"))
    candidates._loaded.cache_clear()
    monkeypatch.setattr(candidates, "GRID", candidates.GRID[-1:])
    said = SimpleNamespace(data=Path(), graphs="planted", depths="3", batches="64", epochs=1, runs=1, device="cpu")
    lines, said.arch = script.Lines(tmp_path / "depth.jsonl", script.NAMES), arch
    assert script.run_entries(lines, script.entries(said), range(1), candidates.TUNING[:1])
    rows = list(lines.rows.values())
    assert capsys.readouterr().out.count("planted ") == len(rows) == 2 * len(script.WAYS)
    assert script.run_entries(lines, script.entries(said), range(1), candidates.TUNING[:1])
    assert len(lines.rows) == len(rows)
    (line,) = script.table(rows)[2:]
    assert line.startswith("| planted | 3 | 64 |") and line.count(" ms)") == len(script.WAYS)
    assert "–" in script.table([row for row in rows if row["candidate"] != "GAS"])[2]
