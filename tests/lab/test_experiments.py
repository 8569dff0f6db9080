"""Experiments: cells from files, runs that go on after a kill, and never a number that was not measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from adahop import cli
from adahop.checks import InputError
from adahop.datasets import load
from adahop_lab.experiments import made
from adahop_lab.experiments.catalogue import EXPERIMENTS, PAPER, cells_of, printed
from adahop_lab.experiments.cells import Cell, parse, read_cells
from adahop_lab.experiments.find import find, roots
from adahop_lab.experiments.grid import best, points
from adahop_lab.experiments.measure import MEASURES
from adahop_lab.experiments.outcome import outcomes
from adahop_lab.experiments.plan import Job
from adahop_lab.experiments.regret import CONSTANT, regret
from adahop_lab.experiments.schedule import Progress
from adahop_lab.experiments.store import Store
from adahop_lab.experiments.work import Piece

RUNS = Path(__file__).parents[2] / "lab" / "runs"
FILES = sorted(RUNS.glob("*/*.json"))


def write(path: Path, rows: dict[str, dict], common: dict | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"common": common or {}, "rows": rows}))
    return path


@pytest.fixture
def cells(tmp_path):
    """A folder of cells: two methods on the digits, one on data that is not here."""

    def make(epochs: int = 1, **more: object) -> Path:
        common = {"sizes": [2, 2], "hidden": 8, "epochs": epochs, **more}
        for dataset, methods in {"digits": ("bs", "graphsage"), "reddit": ("bs",)}.items():
            names = {method: {"bs": "gcn-bs"}.get(method, method) for method in methods}
            rows = {row: {"name": row, "method": method} for method, row in names.items()}
            write(tmp_path / "cells" / "table2" / f"{dataset}.json", rows, common)
        return tmp_path / "cells"

    return make


@pytest.fixture
def run(capsys):
    def command(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main([str(a) for a in args])
        return (left.value.code or 0, *capsys.readouterr())

    return command


def row_of(path: Path, row: str) -> dict:
    return next(found for found in json.loads(path.read_text())["rows"] if found["row"] == row)


def facts(out: Path) -> dict[str, str]:
    """Every file that must be the same on every run."""
    kept = [p for p in out.rglob("*") if p.is_file() and not p.name.endswith(".times.json")]
    return {str(p.relative_to(out)): p.read_text() for p in kept}


# --- files of cells ------------------------------------------------------------------------------------------------


def test_a_row_has_what_is_common_and_its_own(tmp_path):
    rows = {"a": {"name": "A", "epochs": 7}, "b": {"name": "B", "ks": [1, 3]}}
    path = write(tmp_path / "table2" / "digits.json", rows, {"method": "bs", "epochs": 2, "note": "Said once."})
    found = parse(path)
    assert [(c.experiment, c.dataset, c.row, c.line) for c in found] == [
        ("table2", "digits", row, line) for row, line in (("a", "a"), ("b-k1", "b"), ("b-k3", "b"))
    ]
    assert [c.settings["epochs"] for c in found] == [7, 2, 2] and {c.note for c in found} == {"Said once."}
    assert found[2].settings["sizes"] == [3, 3]


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"rows": []}', '{"rows": {"a": {}}}', '{"rows": {"a": 3}}'])
def test_a_file_of_something_else_is_one_sentence(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match="x\\.json must"):
        parse(path)


def test_every_cell_can_be_configured():
    found = [cell for path in FILES for cell in parse(path)]
    for cell in found:
        if cell.experiment != "regret" and not cell.why_not():
            config = cell.config()
            assert config.patience == 0 or cell.experiment != "sample-size", "its probe needs the last step"
    assert {cell.experiment for cell in found} == {"table2", "table3", "sample-size", "ogb", "regret"}


def test_every_row_of_the_paper_has_a_cell():
    places = {(c.experiment, c.row, c.dataset) for name in ("table2", "table3", "ogb") for c in cells_of(name, RUNS)}
    for table, rows in PAPER["scores"].items():
        for row, scores in rows.items():
            assert {(table, row, dataset) for dataset in scores} <= places
    beside = {"gcn-bs-m", "thanos", "bliss", "labor", "adahop"}
    assert beside <= {row for table, row, dataset in places if (table, dataset) == ("table2", "cora")}
    assert "adahop-gat" in {row for table, row, dataset in places if (table, dataset) == ("table3", "cora")}


def test_sample_sizes_are_all_there():
    found = read_cells(RUNS, "sample-size")
    for arch in ("plain", "residual"):
        assert {c.k for c in found if c.row.startswith(f"{arch}-gcn-bs-k")} == {1, 2, 5, 10, 20}
    (ladies,) = [c for c in found if c.row == "plain-ladies-k10"]
    assert ladies.settings["sizes"] == [3800, 1900]  # the paper's budget


def test_the_paper_is_quoted_right():
    (cell,) = [c for c in cells_of("table2", RUNS) if (c.dataset, c.row) == ("cora", "gcn-bs")]
    assert printed(cell) == (0.855, 0.005) and "NeurIPS 2020" in PAPER["source"]
    assert all(printed(c) is None for c in cells_of("table2", RUNS) if c.dataset == "ppi_rebuilt_labels")


@pytest.mark.parametrize("bad", [{"speed": 3}, {"runs": 0}, {"ks": [0]}], ids=str)
def test_a_bad_cell_is_one_sentence(cells, run, bad, tmp_path):
    folder = cells(**bad)
    code, _, err = run("reproduce", "table2", "--cells", folder, "--out", tmp_path / "out")
    assert code == 2 and "must" in err and err.count("\n") == 1


# --- running -------------------------------------------------------------------------------------------------------


def test_a_table_from_nothing(cells, run, tmp_path):
    out = tmp_path / "out"
    code, said, err = run("reproduce", "table2", "--cells", cells(), "--out", out, "--runs", 2, "--jobs", 1)
    assert code == 0 and "2 cells done, 0 running, 0 left" in err
    assert "GCN on Digits, test accuracy" in said and ("cannot be told apart" in said or "is ahead of" in said)
    found = row_of(out / "table2/digits.json", "gcn-bs")
    assert found["seeds"] == [0, 1] and found["config"]["method"] == "bs" and found["metric"] == "accuracy"
    assert found["made"][0]["with"]["versions"]["adahop"] and "commit" in found["made"][0]["with"]
    assert "test" not in found["runs"][0]["history"] and len(found["runs"][0]["history"]["val"]) == 1
    times = row_of(out / "table2/digits.times.json", "gcn-bs")
    assert all(row["seconds"] > 0 and row["machine"]["jobs"] == 1 for row in times["runs"])
    assert not any("seconds" in text for text in facts(out).values())


def test_absent_data_is_never_a_number(cells, run, tmp_path, monkeypatch):
    monkeypatch.setattr("adahop.datasets.load", lambda *args: pytest.fail("nothing is fetched unasked"))
    out = tmp_path / "out"
    code, said, _ = run(
        "reproduce", "table2", "--cells", cells(), "--out", out, "--datasets", "reddit", "--data", tmp_path, "--jobs", 1
    )
    assert code == 0 and "not run here (the data is not here): table2/reddit" in said
    row = next(line for line in said.splitlines() if "gcn-bs" in line)
    assert "not run here" in row and "0.957" in row  # the paper's, in its own column
    assert not facts(out)
    (o,) = outcomes("table2", cells(), out, ["reddit"])
    assert o.ours is None and o.difference is None


def test_an_unknown_method_is_not_run(cells, run, tmp_path):
    folder = cells()
    write(folder / "table2" / "digits.json", {"other": {"name": "Other", "method": "nobody-has-it"}})
    code, said, _ = run(
        "reproduce", "table2", "--cells", folder, "--out", tmp_path / "out", "--rows", "other", "--jobs", 1
    )
    assert code == 0 and "method 'nobody-has-it' is not known here" in said


def test_what_is_done_is_not_run_again(cells, run, tmp_path, monkeypatch):
    words = ("reproduce", "table2", "--cells", cells(), "--out", tmp_path / "out", "--jobs", 1, "--datasets", "digits")
    run(*words, "--runs", 1)
    before = facts(tmp_path / "out")
    ran, real = [], MEASURES["scores"]

    def noted(cell, data, config, seed):
        ran.append((cell.row, seed))
        return real(cell, data, config, seed)

    monkeypatch.setitem(MEASURES, "scores", noted)
    run(*words, "--runs", 1)
    assert ran == [] and facts(tmp_path / "out") == before
    run(*words, "--runs", 2)
    assert sorted(ran) == [("gcn-bs", 1), ("graphsage", 1)]


def test_results_of_other_settings_are_kept(cells, run, tmp_path):
    words = (
        "reproduce",
        "table2",
        "--out",
        tmp_path / "out",
        "--jobs",
        1,
        "--runs",
        1,
        "--datasets",
        "digits",
        "--cells",
    )
    run(*words, cells(1))
    before = facts(tmp_path / "out")
    code, _, err = run(*words, cells(2))
    assert code == 2 and "epochs different" in err and "--renew" in err and facts(tmp_path / "out") == before
    code, _, _ = run(*words, cells(2), "--renew")
    rows = json.loads((tmp_path / "out/table2/digits.json").read_text())["rows"]
    assert code == 0 and [row["settings"]["epochs"] for row in rows] == [2, 2]


def test_a_failure_is_told_and_the_others_go_on(cells, run, tmp_path, monkeypatch):
    real = MEASURES["scores"]

    def brittle(cell, data, config, seed):
        if config.method == "bs":
            raise RuntimeError("it broke")
        return real(cell, data, config, seed)

    monkeypatch.setitem(MEASURES, "scores", brittle)
    out = tmp_path / "out"
    code, _, err = run("reproduce", "table2", "--cells", cells(), "--out", out, "--jobs", 1, "--datasets", "digits")
    assert code == 1 and "it broke" in err
    assert [row["row"] for row in json.loads((out / "table2/digits.json").read_text())["rows"]] == ["graphsage"]


def test_killed_and_started_again(cells, run, tmp_path):
    """SIGKILL in the middle, in several processes; then the same command: the same files as without."""
    folder, whole, parts = cells(epochs=8), tmp_path / "whole", tmp_path / "parts"
    words = ["reproduce", "table2", "--cells", str(folder), "--runs", "4", "--datasets", "digits"]
    program = [sys.executable, "-m", "adahop", *words, "--out", str(parts), "--jobs", "2"]
    with subprocess.Popen(program, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as started:
        while not list(parts.rglob("seed-*[0-9].json")):
            assert started.poll() is None
            time.sleep(0.02)
        workers = psutil.Process(started.pid).children(recursive=True)
        os.kill(started.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive, "no worker outlives its parent"
    joined = parts / "table2/digits.json"
    assert facts(parts) and not (joined.exists() and len(json.loads(joined.read_text())["rows"]) == 2), "in the middle"
    assert run(*words, "--out", parts, "--jobs", 1)[0] == 0
    assert run(*words, "--out", whole, "--jobs", 1)[0] == 0
    assert facts(parts) == facts(whole) and list(facts(whole)) == ["table2/digits.json"]


# --- the grid ------------------------------------------------------------------------------------------------------


def test_the_grid_is_the_papers_and_sees_validation_alone(cells, run, tmp_path, monkeypatch):
    asked = []

    def made_up(cell, data, config, seed):
        asked.append((config.lr, config.weight_decay, config.dropout, seed))
        val = 0.9 if (config.lr, config.weight_decay, config.dropout) == (0.001, 0.0005, 0.2) else 0.5
        found = {"seed": seed, "test": 1.0 - val, "val": val, "history": {"val": [val], "loss": [0.0]}}
        return found, {"seed": seed, "seconds": 0.0}

    monkeypatch.setitem(MEASURES, "scores", made_up)
    out = tmp_path / "out"
    words = ("reproduce", "table2", "--cells", cells(), "--out", out, "--jobs", 1, "--runs", 2, "--rows", "graphsage")
    assert run(*words, "--grid", "full")[0] == 0
    assert len(points()) == 32 and len(asked) == 34 and all(seed in (0, 1) for *_, seed in asked[32:])
    assert {seed for *_, seed in asked[:32]}.isdisjoint({0, 1})
    found = row_of(out / "table2/digits.json", "graphsage")
    assert found["settings"] | {"lr": 0.001, "weight_decay": 0.0005, "dropout": 0.2} == found["settings"]
    assert len(found["grid"]) == 32 and all(
        set(row) == {"lr", "weight_decay", "dropout", "val"} for row in found["grid"]
    )
    run(*words, "--grid", "full")
    assert len(asked) == 34  # neither the search nor the runs are done again


def test_of_equals_the_first_is_taken():
    rows = [{**point, "val": 0.5} for point in points()]
    assert best(rows) == points()[0]


# --- parts ---------------------------------------------------------------------------------------------------------


def test_data_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("ADAHOP_DATA", str(tmp_path))
    assert roots(None) == [tmp_path, Path("~/.cache/adahop").expanduser()] and roots("elsewhere") == [Path("elsewhere")]
    monkeypatch.delenv("ADAHOP_DATA")
    assert roots(None) == [Path("~/.cache/adahop").expanduser()]  # no folder that was not named
    monkeypatch.setenv("ADAHOP_DATA", str(tmp_path))
    assert find("cora", [tmp_path]) is None and find("cora", [tmp_path], download=True) == ("cora", tmp_path)
    (tmp_path / "ogbn_proteins").mkdir()
    assert find("ogbn-proteins", [tmp_path]) == ("ogbn-proteins", tmp_path)
    (tmp_path / "cora.npz").touch()
    assert find("cora", [tmp_path]) == (str(tmp_path / "cora.npz"), None)


def test_the_commit_is_this_projects_own(tmp_path):
    assert made.commit(tmp_path) is None
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert made.commit(tmp_path) is None  # another project's repository
    found = made.commit(Path(__file__).parents[2])
    assert found is None or len(found.split("+")[0]) == 40


def test_regret_is_bounded_and_shrinks():
    more = {"degree": 20, "draws": 4, "visits": 300}
    learned = regret({"method": "bs"}, more, seed=0)
    oracle = regret({"method": "graphsage", "method_options": {"policy": "oracle"}}, more, seed=0)
    assert round(CONSTANT, 1) == 48.4
    first, last = learned["rows"][0], learned["rows"][-1]
    assert first["visits"] == 0 and last["visits"] == 300
    assert last["effective"] < 1.1 < first["effective"]
    assert all(abs(row["effective"] - 1) < 1e-5 for row in oracle["rows"])
    assert learned["least"] <= learned["mean"] <= learned["bound"]


def test_a_run_without_its_times_is_still_a_run(tmp_path):
    (cell,) = [c for c in cells_of("regret", RUNS) if c.row == "bs"]
    store = Store(tmp_path)
    about = {"metric": None, "data": None, "config": {}}
    made_up = {
        "seed": 0,
        "rows": [],
        "with": {"commit": None, "versions": {}},
        "about": about,
        "settings": cell.settings,
    }
    store.keep(cell, "seed-0", made_up, {"seed": 0})
    (store.pending(cell) / "seed-0.times.json").unlink()
    assert list(store.runs(cell, cell.settings)) == [0] and store.runs(cell, {"other": 1}) == {}
    store.join(cell, cell.settings, None)
    assert not store.pending(cell).exists() and store.cell(cell)[0]["seeds"] == [0]


def test_every_experiment_has_a_name_for_the_command(run):
    code, out, _ = run("reproduce", "--help")
    assert code == 0 and all(name in out for name in EXPERIMENTS)
    code, _, err = run("reproduce", "table9")
    assert code == 2 and "did you mean 'table" in err


def test_rows_by_name_or_with_one_k(tmp_path, run):
    home = tmp_path / "runs" / "sample-size" / "digits"
    common = {"name": "X", "method": "graphsage", "hidden": 4, "epochs": 1, "runs": 1, "ks": [2, 3]}
    write(home.with_suffix(".json"), {"residual-x": {}, "residual-y": {}}, common)
    words = ("reproduce", "sample-size", "--cells", home.parent.parent, "--jobs", 1)
    for rows, want in (("residual-x", ["residual-x-k2", "residual-x-k3"]), ("residual-y-k3", ["residual-y-k3"])):
        out = tmp_path / rows
        assert run(*words, "--rows", rows, "--out", out)[0] == 0
        assert [row["row"] for row in json.loads((out / "sample-size/digits.json").read_text())["rows"]] == want
    code, _, err = run(*words, "--rows", "residual-z")
    assert code == 2 and "`rows` must be one of residual-x, residual-y, got 'residual-z'" in " ".join(err.split())


@pytest.mark.parametrize("method", ["adahop", "ladies", "graphsaint"])
def test_every_measure_measures(tmp_path, method):
    said = {"name": "X", "method": method, "hidden": 8, "epochs": 1, "ks": [3], "per_k": [9, 9]}
    (cell,) = parse(write(tmp_path / "sample-size" / "digits.json", {"residual-x": said}))
    data, config = load("digits"), cell.config()
    assert config.sizes == (27, 27) and cell.row == "residual-x-k3"
    found, spent = MEASURES["sample-size"](cell, data, config, 0)
    layers = [row["layer"] for row in found.get("layers", [])]
    assert layers == ([] if method == "graphsaint" else [1, 2]) and len(spent["training"]) == 1
    found, spent = MEASURES["timing"](cell, data, config, 0)
    assert found["steps"] == -(-int(data.train_mask.sum()) // config.batch_size) and min(spent["epoch"]) > 0
    assert len(spent["epoch"]) == found["epochs"] == 3
    assert MEASURES["scores"](cell, data, config, 3)[0] == MEASURES["scores"](cell, data, config, 3)[0]


def test_the_board_counts(tmp_path):
    jobs = []
    for row, dataset, left in (("a", "one", 0), ("b", "one", 2), ("c", "two", 4)):
        cell = Cell("table2", dataset, row, row, {})
        jobs.append(Job(cell, list(range(left)), False, waiting=[Piece(cell, seed) for seed in range(left)]))
    jobs.append(Job(Cell("table2", "reddit", "d", "d", {}), [0, 1], False, reason="the data is not here"))
    board = Progress(jobs, workers=2)
    assert board.line() == "1 cells done, 0 running, 2 left"
    piece = jobs[1].waiting.pop()
    jobs[1].out, board.running[id(piece)] = 1, (jobs[1], piece, 0.0)
    board.spent = {"one": [60.0]}
    assert board.line() == "1 cells done, 1 running, 1 left, about 3 min still needed"  # (2 + 4) minutes, two at a time
    board.spent["two"] = [120.0]
    assert board.line().endswith("about 5 min still needed")
    assert board.table().row_count == 1
