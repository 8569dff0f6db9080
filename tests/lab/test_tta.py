"""Time to accuracy: marks, equal trials, and runs that are not repeated."""

from __future__ import annotations

import json

import pytest

import adahop
from adahop.config import Config
from adahop_lab import candidates, tta
from adahop_lab.candidates import CANDIDATES, GRID, NAMES, Lines, chosen, train, tuned


@pytest.fixture(scope="module")
def data():
    return adahop.load("planted:200,1200,8,3,signal=0.6")


def small(**changes) -> Config:
    return Config(**{"hidden": 8, "epochs": 1, "batch_size": 64, **changes})


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_candidate_trains_and_says_what_it_read(name, data, tmp_path):
    lines = Lines(tmp_path / "runs.jsonl", NAMES)
    row = train(lines, "planted", data, CANDIDATES[name], small(), GRID[1], 0)
    assert 0 < row["val"] <= 1 and row["megabytes"] > 0 and row["seconds"] > 0
    assert len(row["history"]) == (2 if CANDIDATES[name].one_step else 1)
    kept = json.loads((tmp_path / "runs.jsonl").read_text())
    assert kept == row and {"lr", "dropout", "seed", "noise"} <= kept.keys()


def test_runs_are_not_repeated_and_a_cut_line_is(data, tmp_path, monkeypatch):
    path, made = tmp_path / "runs.jsonl", []
    monkeypatch.setitem(candidates.TRAINERS, "fit", lambda *a: made.append(a[2]) or candidates._fit(*a))
    way = CANDIDATES["uniform, k = 2"]

    def go() -> None:
        lines = Lines(path, NAMES)
        for seed in (0, 1):
            train(lines, "planted", data, way, small(), GRID[0], seed)

    go()
    text = path.read_text()
    go()
    assert made == [0, 1] and path.read_text() == text
    path.write_text(text[:-20])
    go()
    assert made == [0, 1, 1] and len(path.read_text().splitlines()) == 2


def test_tuning_tries_the_whole_grid_and_takes_the_best_on_validation(data, tmp_path, monkeypatch):
    tried = []

    def fake(lines, dataset, data, way, base, point, seed):
        tried.append((point["lr"], point["dropout"], seed))
        return {"val": 0.5 + (point == GRID[3]) * 0.1 + (point == GRID[2] and seed == 1000) * 0.15, "test": 1 - seed}

    monkeypatch.setattr(candidates, "train", fake)
    point = tuned(Lines(tmp_path / "x.jsonl", NAMES), "planted", data, CANDIDATES["RNS"], small())
    assert point == GRID[3] and len(set(tried)) == len(tried) == 2 * len(GRID)


def run(*scores: float, step: float = 1.0) -> dict:
    history = [{"epoch": i + 1, "val": v, "seconds": step * (i + 1)} for i, v in enumerate(scores)]
    return {"val": max(scores), "test": 0.0, "seconds": 9.0, "megabytes": 1.0, "lr": 0.01, "dropout": 0.0,
            "history": history}  # fmt: skip


def test_marks_are_medians_of_what_most_runs_reached():
    found = {
        "fast": [run(0.90, 0.96, 0.96), run(0.95, 0.96, 0.90), run(0.96, 0.90, 0.90)],
        "best": [run(0.5, 0.6, 1.0, step=2), run(0.5, 1.0, 1.0, step=2), run(0.96, 0.6, 1.0, step=2)],
    }
    best, fast = tta.table(found)
    assert best["candidate"] == "best" and best["to 100%"] == best["to 99%"] == 6.0 and best["to 95%"] == 4.0
    assert fast["to 95%"] == 1.0 and fast["to 99%"] is None and fast["to 100%"] is None


def test_start_writes_lines_table_and_plot(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tta, "fetch", lambda name, roots: data)
    monkeypatch.setattr(candidates, "GRID", GRID[:1])
    tta.start("planted", "uniform, k = 2; GAS", 2, str(tmp_path), None, "cpu", 2, 1)
    assert (tmp_path / "tta-planted.png").exists() and "uniform, k = 2" in capsys.readouterr().out
    rows = json.loads((tmp_path / "tta-planted.json").read_text())["rows"]
    assert {row["candidate"] for row in rows} == {"uniform, k = 2", "GAS"} and rows[0]["runs"] == 2


def test_bad_input():
    with pytest.raises(adahop.InputError, match="`candidates` must be some of"):
        chosen("uniform")


def test_entries_in_processes_go_on_where_they_stopped(tmp_path, monkeypatch):
    """A run that fails is told of and left out; one more call runs what is missing, and nothing twice."""
    monkeypatch.setattr(candidates, "GRID", GRID[:2])
    made, broken = [], {0}

    def fake(entry, point, seed):
        made.append((point["lr"], point["dropout"], seed))
        if seed in broken:
            raise RuntimeError("out of memory")
        named = candidates.name_of(entry.dataset, entry.candidate, entry.base, point, seed)
        return {**named, "val": 1.0 - point["dropout"], "seconds": 0.0}

    monkeypatch.setattr(candidates, "_run", fake)
    entry = candidates.Entry("folder/toy.npz", CANDIDATES["RNS"], Config())
    lines = Lines(tmp_path / "rows.jsonl", NAMES)
    assert not candidates.run_entries(lines, [entry], range(2), (1000,))
    assert made == [(0.001, 0.0, 1000), (0.001, 0.5, 1000), (0.001, 0.0, 0), (0.001, 0.0, 1)]
    broken.clear()
    assert candidates.run_entries(Lines(tmp_path / "rows.jsonl", NAMES), [entry], range(2), (1000,))
    assert made[4:] == [(0.001, 0.0, 0)]
    assert not candidates.run_entries(Lines(tmp_path / "none.jsonl", NAMES), [entry], range(2), (1000,), seconds=-1)
