"""`adahop compare`: paired seeds, its table and verdict, what it leaves on disk; and the plot."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from adahop.checks import InputError
from adahop.cli import main
from adahop.cli.train import summarise
from adahop.train import Config, Result, fit
from adahop_lab import comparing as command
from adahop_lab import ranking
from adahop_lab.plots import COLOURS, STYLES, _curves, convergence

SMALL = ["--dataset", "synthetic:200,2000,8,3", "--epochs", "2", "--hidden", "8", "--batch-size", "64"]


def run(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["compare", *SMALL, *args])
    text = capsys.readouterr()
    return end.value.code or 0, text.out, text.err


def row(method: str, tests: list[float], seeds=None) -> dict:
    seeds = seeds or range(len(tests))
    results = [Result(s, t, t, 1, 1, 5, 1.0) for s, t in zip(seeds, tests, strict=True)]
    return summarise("toy", "accuracy", Config(method=method), results)


# --- the command ---------------------------------------------------------------------------------------------------


def test_all_methods_end_to_end(tmp_path, capsys):
    code, out, err = run(capsys, "--methods", "all", "--runs", "1", "--out", str(tmp_path), "--json", "--sizes", "3,3")
    assert code == 0, err
    got = json.loads(out.splitlines()[-1])
    assert got["dataset"].startswith("synthetic") and (got["model"], got["arch"]) == ("gcn", "residual")
    names = {m["method"] for m in got["methods"]}
    assert names | set(got["skipped"]) == set(command.METHODS) and not got["failed"] and len(names) > 10
    means = [m["test_mean"] for m in got["methods"]]
    assert means == sorted(means, reverse=True) and got["metric"] == "accuracy"
    assert err.count(" seed 0: test ") == len(names), "a line a finished run without a terminal"
    assert {p.name for p in tmp_path.iterdir()} == {
        "config.json", "metrics.jsonl", "result.json", "convergence.png", "convergence.svg",
    }  # fmt: skip
    assert json.loads((tmp_path / "result.json").read_text()) == got
    config = {c["method"]: c for c in json.loads((tmp_path / "config.json").read_text())["methods"]}
    assert config["graphsage"]["sizes"] == [3, 3] and config["ladies"]["sizes"] == [192, 192]
    assert (tmp_path / "convergence.png").read_bytes()[:4] == b"\x89PNG"
    assert ">bs.m</text>" in (tmp_path / "convergence.svg").read_text()


def test_seeds_are_paired_and_runs_are_those_of_fit(tmp_path, capsys):
    flags = ["--methods", "bs,graphsage,bs", "--seed", "4", "--runs", "3", "--out", str(tmp_path), "--sizes", "2,2"]
    code, out, _ = run(capsys, *flags)
    assert code == 0 and "paired t-test over 3 seeds" in " ".join(out.split())
    got = json.loads((tmp_path / "result.json").read_text())
    assert sorted(m["method"] for m in got["methods"]) == ["bs", "graphsage"]  # named twice, run once
    for m in got["methods"]:
        assert [r["seed"] for r in m["runs"]] == [4, 5, 6]
        data = command.load("synthetic:200,2000,8,3")
        alone = fit(data, method=m["method"], sizes=(2, 2), epochs=2, hidden=8, batch_size=64, seed=5)
        assert (alone.test, alone.val) == (m["runs"][1]["test"], m["runs"][1]["val"])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 3 * 2 and {(r["method"], r["seed"]) for r in rows} == {
        (name, seed) for name in ("bs", "graphsage") for seed in (4, 5, 6)
    }
    run(capsys, *flags[2:], "--methods", "bs")  # a folder used again holds the new command's rows only
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_own_sizes_for_layer_wise_methods(tmp_path, capsys):
    run(capsys, "--methods", "ladies,graphsage", "--layer-sizes", "20,30", "--runs", "1", "--out", str(tmp_path))
    config = {c["method"]: c for c in json.loads((tmp_path / "config.json").read_text())["methods"]}
    assert config["ladies"]["sizes"] == [20, 30] and config["graphsage"]["sizes"] == [10, 10]


def test_one_bad_run_does_not_lose_the_others(tmp_path, capsys, monkeypatch):
    def sometimes(data, config, seed=0, **more):
        if config.method == "bs" and seed == 1 and data.num_nodes > 60:
            raise RuntimeError("the dice\nfell off the table")
        return fit(data, config, seed=seed, **more)

    monkeypatch.setattr(command, "fit", sometimes)
    code, out, err = run(capsys, "--methods", "bs,graphsage", "--runs", "4", "--out", str(tmp_path), "--json")
    assert code == 0 and "bs seed 1 failed: RuntimeError: the dice fell off the table" in err
    got = json.loads(out.splitlines()[-1])
    assert {m["method"]: len(m["runs"]) for m in got["methods"]} == {"bs": 3, "graphsage": 4}
    assert got["failed"] == [{"method": "bs", "seed": 1, "reason": "RuntimeError: the dice fell off the table"}]
    assert got["best_two"]["seeds"] == 3, "only seeds that both finished are paired"
    assert "Traceback" in json.loads((tmp_path / "failed.jsonl").read_text())["traceback"]


def test_no_run_finished(tmp_path, capsys, monkeypatch):
    def never(*args, **more):
        raise MemoryError

    monkeypatch.setattr(command, "fit", never)
    code, out, err = run(capsys, "--methods", "bs", "--runs", "1", "--out", str(tmp_path), "--json")
    assert code == 1 and out == "" and "no run finished" in err and "Traceback" not in err


def test_methods_that_cannot_serve_the_model_are_skipped(tmp_path, capsys, monkeypatch):
    only = command.METHODS["bliss"].__class__(
        "only-gcn", "node-wise", True, "none", command.METHODS["labor"].build, {}, ("gcn",), "labor must not see a sage"
    )
    monkeypatch.setitem(command.METHODS, "only-gcn", only)
    flags = ["--model", "sage", "--runs", "1", "--out", str(tmp_path), "--json"]
    code, out, err = run(capsys, "--methods", "only-gcn,graphsage", *flags)
    got = json.loads(out.splitlines()[-1])
    assert code == 0 and got["skipped"] == {"only-gcn": "labor must not see a sage"}
    assert "skipped: labor must not see a sage" in err and [m["method"] for m in got["methods"]] == ["graphsage"]
    code, _, err = run(capsys, "--methods", "only-gcn", *flags)
    assert code == 2 and "must hold one that can serve the model" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--methods", "bs,graphsag"], "did you mean 'graphsage'"),
        (["--methods", ","], "`methods` must be names with commas between"),
        (["--runs", "0"], "`runs` must be"),
        (["--sizes", "5,x"], "`sizes` must be whole numbers"),
        (["--sizes", "5,0"], "`sizes` must be positive"),
        (["--layer-sizes", "5"], "`layer_sizes` must have as many numbers as `sizes`, 2, got [5]"),
        (["--batch-size", "0", "--methods", "ladies"], "`batch_size` must be"),
        (["--model", "gnc"], "did you mean 'gcn'"),
        (["--dataset", "coar"], "did you mean 'cora'"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, flags, words):
    code, out, err = run(capsys, "--out", str(tmp_path / "x"), *flags)
    assert code == 2 and words in err and out == "" and len(err.splitlines()) == 1


def test_a_terminal_sees_a_live_table():
    configs = {name: Config(method=name) for name in ("bs", "graphsage")}
    board = command.Scoreboard("toy", "accuracy", configs, {}, 2)
    board.done["bs"].append(Result(0, 0.5, 0.6, 1, 1, 5, 1.5))
    board.now["graphsage"] = "seed 0 · epoch 3 · val 0.4000"
    screen = Console(file=io.StringIO(), width=120)
    screen.print(board.table())
    text = screen.file.getvalue()
    assert "1 of 2" in text and "0.5000" in text and "epoch 3" in text and "0 of 2" in text


# --- the verdict ---------------------------------------------------------------------------------------------------


def test_the_best_two():
    same = ranking.best_two([row("bs", [0.80, 0.90, 0.85, 0.70]), row("graphsage", [0.81, 0.88, 0.86, 0.69])])
    assert same["methods"] == ["bs", "graphsage"] and same["p"] > 0.05 and same["seeds"] == 4
    assert "bs and graphsage can't be told apart" in ranking.verdict({"best_two": same})
    far = ranking.best_two([row("bs", [0.80, 0.90, 0.85]), row("graphsage", [0.70, 0.81, 0.74])])
    assert far["p"] < 0.05 and abs(far["difference"] - 0.1) < 1e-9
    assert "bs is ahead of graphsage: +0.1000" in ranking.verdict({"best_two": far})


def test_odd_cases_of_the_verdict():
    assert ranking.best_two([row("bs", [0.5] * 3)]) is None
    assert ranking.best_two([row("bs", [0.5] * 2), row("labor", [0.4] * 2)]) is None
    assert ranking.best_two([row("bs", [0.5] * 3), row("labor", [0.4] * 3, range(2, 5))]) is None
    assert "cannot be tested" in ranking.verdict({"best_two": None})
    assert ranking.best_two([row("bs", [0.5] * 3), row("labor", [0.5] * 3)])["p"] == 1.0
    assert ranking.best_two([row("bs", [0.75] * 3), row("labor", [0.5] * 3)])["p"] == 0.0


# --- the plot ------------------------------------------------------------------------------------------------------


def history(top: float, epochs: int, seconds: float) -> list[dict[str, float]]:
    return [{"epoch": e, "loss": 1.0, "val": top - 0.5**e, "seconds": e * seconds} for e in range(1, epochs + 1)]


def test_curves():
    (x, mean, spread), (t, by_time, _) = _curves([history(0.8, 5, 1.0), history(0.6, 3, 2.0)])
    assert x.tolist() == [1, 2, 3, 4, 5] and abs(mean[0] - 0.2) < 1e-12
    assert abs(mean[-1] - (0.8 - 0.5**5 + 0.6 - 0.5**3) / 2) < 1e-12  # the one that stopped keeps its last score
    assert abs(spread[0] - 0.2 / 2**0.5) < 1e-12
    assert t[0] == 2.0 and t[-1] == 6.0 and abs(by_time[0] - (0.8 - 0.25 + 0.6 - 0.5) / 2) < 1e-12


def test_plots_of_many_shapes(tmp_path):
    many = {f"m{i}": [history(0.8, 6, 0.1 * (i + 1)), history(0.7, 4, 0.1)] for i in range(16)}
    odd = {"one": [history(0.5, 1, 0.1)], "none": [], "lost": [[]]}
    nan = {"a": [[{"epoch": 1, "val": float("nan"), "seconds": 1.0}, {"epoch": 2, "val": 0.5, "seconds": 2.0}]]}
    for name, histories in {"many": many, "odd": odd, "nan": nan}.items():
        paths = convergence(histories, "micro-f1", tmp_path / f"plot.{name}")
        assert [p.name for p in paths] == [f"plot.{name}.png", f"plot.{name}.svg"]
        assert all(p.stat().st_size > 5000 for p in paths)
    text = (tmp_path / "plot.many.svg").read_text()
    assert "validation micro-f1" in text and all(f">m{i}</text>" in text for i in range(16))
    again = convergence(many, "micro-f1", tmp_path / "again")[1].read_text()
    assert text == again, "equal scores, equal files"
    assert len({(COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]) for i in range(28)}) == 28
    with pytest.raises(InputError, match="at least one run"):
        convergence({"none": []}, "accuracy", tmp_path / "x")
    with pytest.raises(InputError, match="must be writable"):
        convergence(odd, "accuracy", tmp_path / "no" / "folder")


def test_matplotlib_waits_until_it_is_needed():
    code = "import sys, adahop_lab.plots, adahop_lab.comparing; print('matplotlib' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "False", ran.stderr
