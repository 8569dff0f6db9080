"""The command line: what it prints, what it keeps, and one sentence for every mistake."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

import adahop
from adahop import cli, models
from adahop.checkpoint import read
from adahop.cli import train as train_module
from adahop.datasets import DATASETS, FORMS
from adahop.methods import METHODS
from adahop.train import Config

SMALL = ["--dataset", "synthetic:120,900,6,3", "--sizes", "3,3", "--hidden", "8", "--epochs", "2", "--batch-size", "32"]
# signals as at the start of any program, whatever ran the tests
PROGRAM = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from adahop.cli import main; main()",
]


@pytest.fixture
def run(capsys):
    """(exit code, stdout, stderr) of a command, in this process."""

    def command(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            cli.main([str(a) for a in args])
        return (left.value.code or 0, *capsys.readouterr())

    return command


def last(text: str) -> dict:
    return json.loads(text.strip().splitlines()[-1])


# --- list, version, help -------------------------------------------------------------------------------------------


def test_list_as_json(run):
    code, out, err = run("list", "--json")
    assert code == 0 and err == "" and len(out.splitlines()) == 1
    said = json.loads(out)
    assert set(said) == {"methods", "models", "datasets"}
    assert said["models"] == list(models.MODELS) and said["datasets"] == list(DATASETS)
    assert [m["name"] for m in said["methods"]] == list(METHODS)
    for m in said["methods"]:
        assert set(m) == {"name", "family", "unbiased", "state"}
        assert m["family"] in ("node-wise", "layer-wise", "subgraph") and isinstance(m["unbiased"], bool) and m["state"]


def test_list_names_everything(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run("list")
    assert code == 0
    for name in (*METHODS, *models.MODELS, *DATASETS, *FORMS):
        assert name in out
    assert "adahop[ogb]" in out  # rich would take it for markup
    for m in METHODS.values():
        left_out = [name for name in models.MODELS if name not in m.models]
        row = next(line for line in out.splitlines() if f" {m.name} " in line)
        assert ", ".join(left_out) in row and m.why_not in out


@pytest.mark.parametrize("columns", ["20", "60"])
def test_a_narrow_screen_cuts_no_words(run, monkeypatch, columns):
    """rich shortens words to "…", or a column to nothing."""
    monkeypatch.setenv("COLUMNS", columns)
    _, out, _ = run("list")
    assert "…" not in out and all(name in out for name in (*METHODS, *models.MODELS, *DATASETS))
    _, out, _ = run("train", *SMALL)
    assert "…" not in out and "accuracy" in out and "seconds" in out
    _, out, _ = run("variance", *SMALL, "--methods", "graphsage", "--nodes", "8", "--repeats", "2")
    assert "…" not in out and "graphsage" in out and "gradient" in out


def test_an_option_is_a_number_without_its_zero_too():
    """As the tables of options write it."""
    found = cli.pairs(["eta=.05", "step=-.5", "draw=.poisson"], "option")
    assert found == {"eta": 0.05, "step": -0.5, "draw": ".poisson"}


def test_version_and_help(run):
    assert run("--version") == (0, f"adahop {adahop.__version__}\n", "")
    for args in (["--help"], ["train", "--help"]):
        code, out, err = run(*args)
        assert code == 0 and "Usage: adahop" in out and err == ""
    code, out, err = run()
    assert code == 2 and "Usage: adahop" in out and err == ""


# --- train ---------------------------------------------------------------------------------------------------------


def test_train_as_json(run):
    code, out, err = run("train", *SMALL, "--runs", "2", "--seed", "5", "--json")
    said = last(out)
    assert code == 0 and len(out.splitlines()) == 1 and "epoch 2" in err
    assert list(said) == [
        "method", "model", "arch", "dataset", "metric", "test_mean", "test_std", "val_mean", "runs"
    ]  # fmt: skip
    assert (said["method"], said["model"], said["arch"], said["metric"]) == ("adahop", "gcn", "residual", "accuracy")
    assert said["dataset"] == SMALL[1] and [r["seed"] for r in said["runs"]] == [5, 6]
    for r in said["runs"]:
        assert list(r) == ["seed", "test", "val", "best_epoch", "epochs", "steps", "seconds", "noise"]
        assert 0 <= r["test"] <= 1 and 1 <= r["best_epoch"] <= r["epochs"] == 2 and r["steps"] == 6
    tests = [r["test"] for r in said["runs"]]
    assert said["test_mean"] == pytest.approx(np.mean(tests)) and said["test_std"] == pytest.approx(
        np.std(tests, ddof=1)
    )
    assert said["val_mean"] == pytest.approx(np.mean([r["val"] for r in said["runs"]]))


def test_epochs_that_come_twice_are_explained(run):
    code, _, err = run("train", *SMALL, "--epochs", "10")
    lines = err.splitlines()
    at = next(i for i, line in enumerate(lines) if "once more with uniform draws" in line)
    epoch = next(line.split(" noise")[0] for line in lines[at:] if "noise uniform 2" in line)
    assert code == 0 and "--noise 0 leaves this out" in lines[at] and any(epoch in line for line in lines[:at])
    code, _, err = run("train", *SMALL, "--epochs", "10", "--noise", "0")
    assert code == 0 and "once more" not in err


def test_train_without_validation_nodes(run, tmp_path):
    names = ("indptr", "indices", "x", "y", "train_idx", "val_idx", "test_idx")
    ring = [np.arange(0, 13, 2), np.arange(12) % 6, np.eye(6), np.arange(6) % 2, [0, 1, 2], np.zeros(0, int), [4, 5]]
    np.savez(tmp_path / "ring.npz", **dict(zip(names, ring, strict=True)))
    code, out, err = run("train", "--dataset", tmp_path / "ring.npz", "--epochs", "2", "--sizes", "2", "--json")
    assert code == 2 and "`val_mask` must name at least one node" in err and out == ""


def test_train_for_people(run):
    code, out, _ = run("train", *SMALL)
    assert code == 0 and "120 nodes, 900 edges" in out and "test accuracy" in out


def test_out_keeps_what_a_run_was_and_gave(run, tmp_path):
    folder = tmp_path / "runs" / "one"
    code, out, _ = run("train", *SMALL, "--runs", "2", "--out", folder, "--json", "--option", "eta=0.2")
    assert code == 0
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "metrics.jsonl", "result.json", "best-seed0.pt", "best-seed1.pt"
    }  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    assert config["dataset"] == SMALL[1] and config.pop("seeds") == [0, 1] and config["method_options"] == {"eta": 0.2}
    config.pop("dataset")
    assert config.pop("log_variance") == 0
    assert set(config) == {f.name for f in dataclasses.fields(Config)}
    assert Config(**config).sizes == (3, 3)
    assert json.loads((folder / "result.json").read_text()) == last(out)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [(r["seed"], r["epoch"]) for r in rows] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert set(rows[0]) == {"seed", "epoch", "loss", "train", "val", "test", "seconds"}
    best = last(out)["runs"][0]
    assert rows[best["best_epoch"] - 1]["test"] == best["test"]


def test_the_checkpoint_is_the_best_model(run, tmp_path):
    _, out, _ = run("train", *SMALL, "--out", tmp_path, "--json")
    state = torch.load(tmp_path / "best-seed0.pt", weights_only=True)
    data = adahop.load(SMALL[1])
    model = models.make("gcn", data.x.shape[1], 8, data.classes)
    model.load_state_dict(state)
    outputs = model.inference(data.graph.normalized(*model.graph), data.x)
    right = (outputs.argmax(1) == data.y)[data.test_mask].float().mean()
    assert float(right) == pytest.approx(last(out)["runs"][0]["test"], abs=1e-6)


def test_a_folder_used_again_holds_the_new_command_only(run, tmp_path):
    run("train", *SMALL, "--out", tmp_path)
    (tmp_path / "mine.txt").write_text("kept")
    code, _, _ = run("train", *SMALL, "--out", tmp_path, "--epochs", "1")
    assert code == 0 and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "config.json").read_text())["epochs"] == 1
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_the_default_learns_the_digits(run):
    code, out, _ = run("train", "--json")
    assert code == 0 and last(out)["dataset"] == "digits" and last(out)["test_mean"] >= 0.97


def test_a_file_of_ones_own(run, tmp_path):
    data = adahop.load(SMALL[1])
    path = tmp_path / "mine.npz"
    ids = {f"{part}_idx": getattr(data, f"{part}_idx") for part in ("train", "val", "test")}
    np.savez(path, indptr=data.graph.indptr, indices=data.graph.indices, x=data.x, y=data.y, **ids)
    code, out, _ = run("train", *SMALL, "--dataset", path, "--json", "--out", tmp_path)
    assert code == 0 and last(out)["dataset"] == str(path)
    assert json.loads((tmp_path / "config.json").read_text())["dataset"] == str(path)


# --- flags and fields ----------------------------------------------------------------------------------------------

# of the command, not of the run
ELSEWHERE = {"dataset", "seed", "runs", "out", "as_json", "log_variance", "resume", "checkpoint_every", "help"}
MODEL_FLAGS = {
    "alpha",
    "theta",
    "norm",
    "activation",
    "heads",
    "score",
    "attention",
    "conv",
    "bases",
    "blocks",
    "edges",
}


def flags() -> dict:
    return {p.name: p for p in typer.main.get_command(cli.build(["train"])).commands["train"].params}  # type: ignore[attr-defined]


def test_every_field_has_a_flag_and_every_flag_a_field():
    fields = {f.name for f in dataclasses.fields(Config)}
    ours = set(flags()) - ELSEWHERE
    assert ours - MODEL_FLAGS - {"options"} == fields - {"model_options", "method_options"}
    own = {o for name in models.MODELS for o in models.options_of(name)} - {"layers", "arch", "dropout"}
    assert own == MODEL_FLAGS


def test_flags_and_fields_have_the_same_defaults(run, monkeypatch):
    assert seen_config(run, monkeypatch) == Config()


def test_flags_reach_their_fields(run, monkeypatch):
    plain = {
        "model": "gat", "arch": "plain", "method": "bs.m", "sizes": "4,-1,2", "hidden": 12, "epochs": 7, "lr": 0.5,
        "weight-decay": 0.1, "dropout": 0.2, "batch-size": 9, "patience": 3, "prefetch": 2, "estimator": "plain",
        "average": 0.5, "heads": 3, "score": "relu", "attention": "paper",
    }  # fmt: skip
    options = ["eta=0.25", "step=paper", "share_layers=true", "horizon=null"]
    args = [part for k, v in plain.items() for part in (f"--{k}", str(v))]
    args += [part for o in options for part in ("--option", o)]
    assert seen_config(run, monkeypatch, *args) == Config(
        model="gat", arch="plain", method="bs.m", sizes=(4, -1, 2), hidden=12, epochs=7, lr=0.5, weight_decay=0.1,
        dropout=0.2, batch_size=9, patience=3, prefetch=2, estimator="plain", average=0.5,
        model_options={"heads": 3, "score": "relu", "attention": "paper"},
        method_options={"eta": 0.25, "step": "paper", "share_layers": True, "horizon": None},
    )  # fmt: skip


def seen_config(run, monkeypatch, *args: str) -> Config:
    seen = []

    def fake(data, config, *rest):
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "run_all", fake)
    assert run("train", *args)[0] == 130
    return seen[0]


# --- mistakes ------------------------------------------------------------------------------------------------------

MISTAKES = {
    "no such command": (["tran"], "Did you mean 'train'?"),
    "no such flag": (["train", "--epoch", "3"], "--epochs"),
    "a flag without its value": (["train", "--epochs"], "--epochs"),
    "a word for a number": (["train", "--epochs", "ten"], "'--epochs'"),
    "no such method": (["train", "--method", "bsm"], "got 'bsm'; did you mean 'bs.m'?"),
    "no such model": (["train", "--model", "genipath"], "did you mean 'geniepath'?"),
    "no such arch": (["train", "--arch", "flat"], "`arch` must be one of plain, residual, gcnii, got 'flat'"),
    "no such data set": (["train", "--dataset", "core"], "did you mean 'cora'?"),
    "no such estimator": (["train", "--estimator", "histroy"], "did you mean 'history'?"),
    "no such norm": (["train", "--norm", "column"], "`norm` must be one of row, sym, got 'column'"),
    "no such attention": (["train", "--model", "gat", "--attention", "x"], "`attention` must be one of"),
    "another model's option": (["train", "--heads", "2"], "an option of model 'gcn' must be one of norm"),
    "an estimator the model has no use for": (
        ["train", "--estimator", "scores"],
        "`estimator` must not remember scores for model gcn, whose weights are the graph's own",
    ),
    "another policy's option": (
        ["train", "--option", "heads=2"],
        "an option of method 'adahop' must be one of policy, draw, budget, eta, memory",
    ),
    "no such policy": (["train", "--option", "policy=uniforn"], "did you mean 'uniform'?"),
    "parts that remember": (["train", "--partition", "range", "--estimator", "history"], "`estimator` must be plain"),
    "parts of a layer": (["train", "--partition", "range", "--method", "ladies"], "`method` must be one of adahop, "),
    "sizes that are words": (["train", "--sizes", "ten,10"], "like 10,10, got 'ten,10'"),
    "sizes with a hole": (["train", "--sizes", "10,,10"], "got '10,,10'"),
    "no sizes": (["train", "--sizes", ""], "got ''"),
    "sizes of zero": (["train", "--sizes", "10,0"], "`sizes` must be positive or -1, got [10, 0]"),
    "no file": (["train", "--dataset", "nowhere/graph.npz"], "existing .npz or .pt file, got nowhere/graph.npz"),
    "a bad synthetic": (["train", "--dataset", "synthetic:1,2"], "synthetic:N,E,F,C"),
    "hidden of zero": (["train", "--hidden", "0"], "`hidden` must be a whole number of at least 1, got 0"),
    "no runs": (["train", "--runs", "0"], "`runs` must be a whole number of at least 1, got 0"),
    "a negative seed": (["train", "--seed", "-1"], "`seed` must be a whole number of at least 0, got -1"),
    "a huge seed": (["train", "--seed", str(2**63)], "`seed` must be below 2^63"),
    "lr of nan": (["train", "--lr", "nan"], "`lr` must be a number in"),
    "dropout over one": (["train", "--dropout", "1.5"], "`dropout` must be a number in [0, 0.999], got 1.5"),
    "no such device": (["train", "--device", "tpu"], "`device` must be one of cpu, cuda, got 'tpu'"),
    "heads that do not divide": (["train", "--model", "gat", "--heads", "3"], "`hidden` must be divisible by the 3"),
    "an option without a value": (["train", "--option", "eta"], "`option` must be name=value, got 'eta'"),
    "an option that is a list": (["train", "--option", "eta=[1]"], "one number or word as its value, got 'eta=[1]'"),
    "an option with a flag": (["train", "--option", "seed=1"], "got 'seed', which has its own flag"),
    "no such option": (["train", "--option", "etta=1"], "got 'etta'"),
    "an option out of range": (["train", "--option", "eta=2"], "`eta` must be a number in [0, 0.999], got 2"),
    "an option of the wrong kind": (
        ["train", "--option", "eta=high"],
        "`eta` must be a number in [0, 0.999], got 'high'",
    ),
    "an empty folder's name": (["train", "--out", ""], "`out` must be a folder that can be written, got ''"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(run, mistake):
    args, said = MISTAKES[mistake]
    code, _, err = run(*args)
    assert code == 2 and said in err
    assert err.startswith("adahop: ") and len(err.splitlines()) == 1 and "Traceback" not in err


def test_a_folder_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = run("train", "--out", tmp_path / "file" / "below")
    assert code == 2 and out == "" and err.startswith("adahop: `out` must be a folder") and len(err.splitlines()) == 1


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_out_of_memory_is_one_sentence(run, monkeypatch, error):
    def fake(*args):
        raise error

    monkeypatch.setattr(train_module, "run_all", fake)
    code, _, err = run("train", *SMALL)
    assert code == 1 and err.startswith("adahop: out of memory") and len(err.splitlines()) == 1


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug")])
def test_our_own_bugs_keep_their_traceback(monkeypatch, error):
    def fake(*args):
        raise error

    monkeypatch.setattr(train_module, "run_all", fake)
    with pytest.raises(type(error), match="a bug"):
        cli.main(["train", *SMALL])


# --- as a program of its own ---------------------------------------------------------------------------------------


def test_python_dash_m(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "adahop", "train", "--method", "nope"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("adahop: `method` must be one of") and len(done.stderr.splitlines()) == 1


def test_nobody_reads_on(tmp_path):
    program = subprocess.Popen(
        [*PROGRAM, "list"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert program.stderr.read() == b"" and program.wait(120) == 1
    program.stderr.close()


def test_ctrl_c_without_a_terminal(tmp_path):
    args = [*PROGRAM, "train", *SMALL, "--epochs", "100000", "--out", str(tmp_path), "--prefetch", "1"]
    with subprocess.Popen(
        args, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        wait_for(tmp_path / "metrics.jsonl", program)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=120)
    assert program.returncode == 130 and "Traceback" not in out + err
    *epochs, end = err.splitlines()
    assert end == f"adahop: interrupted; `adahop train --resume {tmp_path}` continues it"
    said = ("seed 0 epoch", "adahop compiles its kernels once")  # the latter where nothing was compiled before
    assert all(line.startswith(said) for line in epochs)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "metrics.jsonl", "checkpoints"}
    assert all(read(p) for p in (tmp_path / "checkpoints").iterdir())
    assert json.loads((tmp_path / "config.json").read_text())["epochs"] == 100000
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["epoch"] for r in rows] == list(range(1, len(rows) + 1))


def wait_for(path: Path, program: subprocess.Popen, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < until and program.poll() is None:
        time.sleep(0.05)
    assert path.exists(), "the program must have begun to train"


def test_commands_of_the_laboratory_where_it_is_not_installed():
    """One sentence that says how to get it; the help lists the command all the same."""
    code = "import adahop.cli as c; c.entry_points = lambda group: (); c.main()"
    for words in (["bench", "sampling", "--rounds", "1"], ["reproduce", "table2", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
        said = f"adahop: `adahop {words[0]}` needs adahop-lab: `pip install ./lab` in a checkout adds it\n"
        assert done.returncode == 2 and done.stdout == "" and done.stderr == said
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and all(name in done.stdout for name in ("bench", "compare", "report", "reproduce"))
