"""`adahop train --resume`: no row lost or doubled, nothing half-written, and only what the folder says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adahop import cli
from adahop.cli import train as train_module
from adahop.records import Records, sweep

SMALL = ["--dataset", "synthetic:120,900,6,3", "--sizes", "3,3", "--hidden", "8", "--epochs", "3", "--batch-size", "32"]
SOAK = Path(__file__).parents[2] / "lab" / "benchmarks" / "soak.py"


class Stopped(Exception):
    pass


@pytest.fixture
def run(capsys):
    """(exit code, stdout, stderr) of a command, in this process."""

    def command(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main([str(a) for a in args])
        return (left.value.code or 0, *capsys.readouterr())

    return command


def stopped(monkeypatch, at: int, seed: int, *args: object) -> None:
    """A command that ends within a step, as a kill would have it: whatever is on disk stays as it is."""
    fit = train_module.fit

    def short(*given, on_step, **named):
        def tick(step: int) -> None:
            if step == at and named["seed"] == seed:
                raise Stopped

        return fit(*given, on_step=tick, **named)

    with monkeypatch.context() as m, pytest.raises(Stopped):
        m.setattr(train_module, "fit", short)
        cli.main([str(a) for a in args])


def rows(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def weights(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def same_runs(one: Path, other: Path) -> bool:
    assert {p.name for p in one.iterdir()} == {p.name for p in other.iterdir()}
    best = [(weights(p), weights(other / p.name)) for p in one.glob("best-*.pt")]
    return rows(one) == rows(other) and all(all(torch.equal(a[k], b[k]) for k in a) for a, b in best)


@pytest.mark.parametrize("more", [[], ["--prefetch", "2"], ["--log-variance", "3", "--estimator", "exact+history"]])
def test_rows_are_neither_lost_nor_doubled(run, monkeypatch, tmp_path, more):
    args = ["train", *SMALL, "--runs", "2", *more]
    assert run(*args, "--out", tmp_path / "whole")[0] == 0
    folder = tmp_path / "stopped"
    stopped(monkeypatch, 5, 0, *args, "--out", folder, "--checkpoint-every", 2)
    stopped(monkeypatch, 8, 1, "train", "--resume", folder, "--checkpoint-every", 3)
    with open(folder / "metrics.jsonl", "ab") as f:
        f.write(b'{"seed": 1, "ep')  # a line that a kill cut
    code, out, err = run("train", "--resume", folder, "--json")
    assert code == 0 and "seed 1 continues after step 6, epoch 2" in err
    result, whole = (json.loads((tmp_path / n / "result.json").read_text()) for n in ("stopped", "whole"))
    assert json.loads(out.splitlines()[-1]) == result and result["test_mean"] == whole["test_mean"]
    assert same_runs(tmp_path / "whole", folder)
    again, files = run("train", "--resume", folder, "--json"), sorted(p.stat().st_mtime_ns for p in folder.iterdir())
    assert again[0] == 0 and "is finished" in again[2] and json.loads(again[1].splitlines()[-1]) == result
    assert files == sorted(p.stat().st_mtime_ns for p in folder.iterdir())


def test_a_damaged_file_is_spoken_of(run, monkeypatch, tmp_path):
    assert run("train", *SMALL, "--out", tmp_path / "whole")[0] == 0
    folder = tmp_path / "stopped"
    stopped(monkeypatch, 6, 0, "train", *SMALL, "--out", folder, "--checkpoint-every", 1)
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    (folder / ".result.json.999999999.part").write_text("half")
    code, _, err = run("train", "--resume", folder)
    assert code == 0 and f"adahop: {newest} must be a complete checkpoint" in err and "the previous one is used" in err
    assert same_runs(tmp_path / "whole", folder)


def test_before_the_first_checkpoint_a_run_begins_anew(run, monkeypatch, tmp_path):
    folder = tmp_path / "stopped"
    stopped(monkeypatch, 1, 0, "train", *SMALL, "--out", folder, "--checkpoint-every", 100)
    assert run("train", "--resume", folder)[0] == 0 and [r["epoch"] for r in rows(folder)] == [1, 2, 3]


def test_a_new_command_forgets_the_old_ones_checkpoints(run, monkeypatch, tmp_path):
    stopped(monkeypatch, 5, 0, "train", *SMALL, "--out", tmp_path, "--checkpoint-every", 1)
    assert run("train", *SMALL, "--lr", "0.1", "--out", tmp_path)[0] == 0 and len(rows(tmp_path)) == 3


@pytest.fixture
def folder(monkeypatch, tmp_path):
    args = [*SMALL, "--option", "eta=0.2", "--model", "gat", "--heads", "2"]
    stopped(monkeypatch, 3, 0, "train", *args, "--out", tmp_path / "a", "--checkpoint-every", 1)
    return tmp_path / "a"


@pytest.mark.parametrize("flags, words", [
    (["--lr", "0.5"], "`lr` must be 0.01 or left out"),
    (["--epochs", "5"], "`epochs` must be 3 or left out"),
    (["--sizes", "3,4"], "`sizes` must be 3,3 or left out"),
    (["--option", "eta=0.3"], "`option` must be ['eta=0.2'] or left out"),
    (["--heads", "4"], "`heads` must be 2 or left out"),
    (["--norm", "sym"], "`norm` must be None or left out"),
    (["--runs", "2"], "`runs` must be 1 or left out"),
    (["--seed", "2"], "`seed` must be 0 or left out"),
    (["--dataset", "digits"], "`dataset` must be synthetic:120,900,6,3 or left out"),
    (["--out", "elsewhere"], "`out` must be"),
    (["--log-variance", "4"], "`log_variance` must be 0 or left out"),
    (["--checkpoint-every", "x"], "`checkpoint_every` must be a number of steps, seconds like 30s, or auto, got 'x'"),
])  # fmt: skip
def test_flags_that_say_otherwise_are_refused(run, folder, flags, words):
    code, _, err = run("train", "--resume", folder, *flags)
    assert code == 2 and words in err and len(err.splitlines()) == 1


def test_flags_that_say_the_same_are_welcome(run, folder):
    flags = ["--lr", "0.01", "--sizes", "3,3", "--option", "eta=0.2", "--heads", "2", "--out", folder, *SMALL]
    assert run("train", "--resume", folder, *flags)[0] == 0


def test_flags_that_say_the_same_in_other_words_are_welcome(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    said = ["--noise", "0", "--option", "eta=0.20", "--lr", "1e-2", "--out", "a/"]
    stopped(monkeypatch, 3, 0, "train", *SMALL, *said, "--checkpoint-every", 1)
    for flags in (said, ["--noise", "0.0", "--option", "eta=.2", "--out", tmp_path / "a"], ["--sizes", "3, 3"]):
        code, _, err = run("train", "--resume", "a", *flags)
        assert code == 0, err


@pytest.mark.parametrize("change, words", [
    (lambda p: p.unlink(), "`resume` must be a folder that `adahop train --out` wrote, got"),
    (lambda p: p.write_text("{"), "config.json must be a JSON object"),
    (lambda p: p.write_text("[1]"), "config.json must be a JSON object"),
    (lambda p: p.write_text("{}"), "config.json must hold the settings of `adahop train`"),
    (lambda p: p.write_bytes(b"\xff\xfe"), "config.json must be a JSON object"),
    (lambda p: p.write_text(p.read_text().replace('"lr": 0.01', '"lr": -1')), "config.json, `lr` must be a number in"),
    (lambda p: p.write_text(p.read_text().replace('"lr"', '"rl"')), "config.json must hold the settings"),
    (lambda p: p.write_text(p.read_text().replace("120,900", "120,901")), "the data's content must be"),
    (lambda p: p.write_text(p.read_text().replace('"lr": 0.01', '"lr": 0.02')), "`lr` must be 0.01 as in the"),
])  # fmt: skip
def test_a_folder_that_is_not_what_it_was(run, folder, change, words):
    change(folder / "config.json")
    code, _, err = run("train", "--resume", folder)
    assert code == 2 and words in err and "Traceback" not in err


def test_sweep_leaves_what_lives(tmp_path):
    mine, theirs = tmp_path / f".a.{__import__('os').getpid()}.part", tmp_path / ".a.999999999.part"
    other = tmp_path / ".hidden.part"
    for path in (mine, theirs, other):
        path.touch()
    sweep(tmp_path / "nowhere")
    Records(tmp_path)
    assert mine.exists() and other.exists() and not theirs.exists()


def test_keep(tmp_path):
    records = Records(tmp_path)
    for i in range(4):
        records.row("m.jsonl", {"epoch": i})
    records.keep("m.jsonl", lambda row: row["epoch"] < 2)
    records.keep("none.jsonl", lambda row: True)
    assert (tmp_path / "m.jsonl").read_text() == '{"epoch": 0}\n{"epoch": 1}\n' and not (
        tmp_path / "none.jsonl"
    ).exists()


def test_the_soak_finds_nothing(tmp_path):
    """Three real SIGKILLs at random moments; the long run's counts are in docs/reliability.md."""
    args = [sys.executable, str(SOAK), "--methods", "bs.m", "--kills", "3", "--minutes", "3", "--seed", "1"]
    done = subprocess.run(args, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["identical"] == said["ends of killed runs"] == 3 and said["left over or lost"] == 0
