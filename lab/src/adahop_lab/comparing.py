"""Comparing methods: the same data set and seeds for all, what is known on disk after each run."""

from __future__ import annotations

import contextlib
import statistics
import sys
import traceback
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from adahop.checks import InputError, count, one_of
from adahop.cli import numbers
from adahop.cli.train import seed_range, summarise
from adahop.datasets import load
from adahop.datasets.base import Dataset
from adahop.methods import METHODS
from adahop.models import MODELS
from adahop.records import Records, json_text
from adahop.train import Config, Result, fit
from adahop_lab.plots import convergence
from adahop_lab.ranking import best_two, show


def start(
    dataset: str, methods: str, sizes: str, layer_sizes: str, seed: int, runs: int, out: str, as_json: bool,
    **common: Any,
) -> None:  # fmt: skip
    """Every method with every seed; `common` is what all have alike."""
    seeds = seed_range(seed, runs)
    count(common["batch_size"], 1, "batch_size")
    wide = numbers(sizes, "sizes")
    auto = [k if k < 0 else k * common["batch_size"] for k in wide]
    budget = auto if layer_sizes == "auto" else numbers(layer_sizes, "layer_sizes")
    configs, skipped = plan(chosen(methods), wide, budget, common)
    records, data, console = Records(out), load(dataset), Console(stderr=as_json)
    records.fresh("metrics.jsonl", "failed.jsonl", "result.json", "convergence.png", "convergence.svg")
    plans = [config.as_dict() for config in configs.values()]
    records.json("config.json", {"dataset": dataset, "seeds": list(seeds), "methods": plans, "skipped": skipped})
    console.print(
        f"[bold]{len(configs)} methods[/] · {common['model']} ({common['arch']}) on {escape(data.name)}: "
        f"{data.num_nodes:,} nodes, {data.graph.num_edges:,} edges, {int(data.train_mask.sum()):,} to train on"
        + (f" ({escape(data.note)})" if data.note else "")
    )
    for reason in skipped.values():
        console.print(f"skipped: {reason}", highlight=False, markup=False)
    board = Scoreboard(dataset, data.metric, configs, skipped, len(seeds))
    run_all(data, board, seeds, records)
    summary = board.summary()
    if not summary["methods"]:
        print("adahop: no run finished", file=sys.stderr)  # each has said why
        raise typer.Exit(1)
    show(console, summary, configs)
    histories = {name: [r.history for r in results] for name, results in board.done.items() if results}
    paths = convergence(histories, data.metric, records.folder / "convergence")
    console.print("plot: " + ", ".join(map(str, paths)), highlight=False, markup=False, soft_wrap=True)
    if as_json:
        print(json_text(summary))


def chosen(text: str) -> list[str]:
    """The methods of a list with commas, each once, in the order given; "all" for every one."""
    if text.strip() == "all":
        return list(METHODS)
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise InputError(f"`methods` must be names with commas between, like graphsage,bs, or all, got '{text}'")
    return list(dict.fromkeys(one_of(name, METHODS, "methods") for name in names))


def plan(
    names: list[str], sizes: list[int], budget: list[int], common: dict[str, Any]
) -> tuple[dict[str, Config], dict[str, str]]:
    """A config a method, and a sentence for each that cannot serve the model; layer-wise methods take the budget."""
    one_of(common["model"], MODELS, "model")
    if len(budget) != len(sizes):
        raise InputError(f"`layer_sizes` must have as many numbers as `sizes`, {len(sizes)}, got {budget}")
    configs: dict[str, Config] = {}
    skipped: dict[str, str] = {}
    for name in names:
        own = budget if METHODS[name].family == "layer-wise" else sizes
        try:
            configs[name] = Config(method=name, sizes=tuple(own), noise=0.0, **common)
        except InputError as e:
            if common["model"] in METHODS[name].models:
                raise
            skipped[name] = str(e)
    if not configs:
        raise InputError(f"`methods` must hold one that can serve the model, got none: {'; '.join(skipped.values())}")
    return configs, skipped


class Scoreboard:
    """What is known so far, a row a method: results that came, runs that failed, the epoch that is on."""

    def __init__(self, dataset: str, metric: str, configs: dict[str, Config], skipped: dict[str, str], runs: int):
        self.dataset, self.metric, self.configs, self.skipped, self.runs = dataset, metric, configs, skipped, runs
        self.done: dict[str, list[Result]] = {name: [] for name in configs}
        self.failed: list[dict[str, Any]] = []
        self.now = dict.fromkeys(configs, "")

    def table(self) -> Table:
        """For a terminal, while the runs go on."""
        table = Table("method", "runs", "now", f"test {self.metric} so far", "val", "seconds")
        for name, results in self.done.items():
            so_far = ("", "", "")
            if results:
                test, val = statistics.fmean(r.test for r in results), statistics.fmean(r.val for r in results)
                so_far = (f"{test:.4f}", f"{val:.4f}", f"{sum(r.seconds for r in results):.1f}")
            table.add_row(name, f"{len(results)} of {self.runs}", self.now[name], *so_far)
        return table

    def summary(self) -> dict[str, Any]:
        """The whole comparison, best test mean first."""
        rows = [summarise(self.dataset, self.metric, self.configs[name], rs) for name, rs in self.done.items() if rs]
        rows.sort(key=lambda row: -row["test_mean"])
        some = next(iter(self.configs.values()))
        return {
            "dataset": self.dataset, "model": some.model, "arch": some.arch, "metric": self.metric, "methods": rows,
            "best_two": best_two(rows), "failed": self.failed, "skipped": self.skipped,
        }  # fmt: skip


def run_all(data: Dataset, board: Scoreboard, seeds: range, records: Records) -> None:
    """Every method with every seed, a seed at a time, so that what is there early can be compared.

    A run that fails is noted and the others go on; what is known is on disk after each.
    """
    screen = Console(stderr=True)
    live = Live(get_renderable=board.table, console=screen, refresh_per_second=4, transient=True)
    with live if screen.is_terminal else contextlib.nullcontext():
        warm(board.configs)
        for seed in seeds:
            for name in board.configs:
                line = run_one(data, board, name, seed, records)
                records.json("result.json", board.summary())
                if not screen.is_terminal or board.now[name] == "failed":
                    print(line, file=sys.stderr, flush=True)


def run_one(data: Dataset, board: Scoreboard, name: str, seed: int, records: Records) -> str:
    """Fit once; a sentence on how it went."""

    def note(row: dict[str, float]) -> None:
        board.now[name] = f"seed {seed} · epoch {row['epoch']:.0f} · val {row['val']:.4f}"
        records.row("metrics.jsonl", {"method": name, "seed": seed, **row})

    board.now[name] = f"seed {seed}"
    try:
        result = fit(data, board.configs[name], seed=seed, on_epoch=note)
    except Exception as e:
        reason = str(e) if isinstance(e, InputError) else f"{type(e).__name__}: {e}"
        reason = " ".join(reason.split())
        board.failed.append({"method": name, "seed": seed, "reason": reason})
        board.now[name] = "failed"
        records.row("failed.jsonl", {**board.failed[-1], "traceback": traceback.format_exc()})
        return f"{name} seed {seed} failed: {reason}"
    board.done[name].append(replace(result, model=None, sampler=None))  # the scores stay, the tensors go
    board.now[name] = ""
    return f"{name} seed {seed}: test {result.test:.4f} val {result.val:.4f} in {result.seconds:.1f} s"


def warm(configs: dict[str, Config]) -> None:
    """Compile every kernel on a tiny graph first, so that no method's seconds hold it."""
    tiny = load("synthetic:60,400,4,2")
    for config in configs.values():
        small = tuple(max(-1, min(k, 3)) for k in config.sizes)
        with contextlib.suppress(Exception):  # what is wrong will show, and be told, in the runs
            fit(tiny, config, epochs=1, sizes=small, hidden=4)
