"""`adahop train`: one method on one data set, any number of runs."""

from __future__ import annotations

import statistics
import sys
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from adahop.checkpoint import pace
from adahop.checks import InputError, count
from adahop.cli import levels, numbers, pairs
from adahop.cli.partition import shard
from adahop.cli.resume import CHECKPOINTS, Stopped, checkpoints, read_json, restarted
from adahop.cli.tables import show_table
from adahop.datasets import load
from adahop.diagnostics import Probe
from adahop.distributed import session, strategy
from adahop.race import UNIFORM
from adahop.records import Read, Records, json_text
from adahop.seams import NodeData
from adahop.train import Config, Result, fit

TWICE = "seed {seed}: from epoch {epoch} once more with uniform draws of {k}"
WHY = ", to compare on validation nodes how much sampling noise is best; --noise 0 leaves this out"
MODEL_FLAGS = (
    "alpha", "theta", "norm", "activation", "heads", "conv", "bases", "blocks", "edges", "score", "attention",
)  # fmt: skip


def start(context: typer.Context) -> None:
    """Train with the flags' settings, or resume the run of a folder."""
    given = context.params
    out, every, as_json = given["out"], given["checkpoint_every"], given["as_json"]
    pace(every)
    resume = given["resume"] or restarted(out)
    if resume is not None:
        run = Stopped(resume)
        run.agrees(context)
        return go(run.config, run.dataset, run.seeds, run.log_variance, resume, every, as_json, True)
    seeds = seed_range(given["seed"], given["runs"])
    go(config_of(given), given["dataset"], seeds, given["log_variance"], out, every, as_json)


def config_of(given: dict[str, Any]) -> Config:
    """The settings that flags name; those of a model are left to it where they are not given."""
    fields = {name: given[name] for name in Config.__dataclass_fields__ if name in given}
    of_model = {name: given[name] for name in MODEL_FLAGS if given[name] is not None}
    fields |= {"sizes": tuple(numbers(given["sizes"], "sizes")), "noise": levels(given["noise"])}
    return Config(**fields, model_options=of_model, method_options=method_options(given["options"] or []))


def go(
    config: Config, dataset: str, seeds: range, log_variance: int, out: str | None, every: str, as_json: bool,
    resume: bool = False,
) -> None:  # fmt: skip
    """Start, or with `resume` continue; the result is written and printed at the end."""
    with session(config.device) as first:
        records = None if out is None else (Records if first else Read)(out)
        if records and resume and records.has("result.json"):
            print(f"the run in {records.folder} is finished; nothing is done", file=sys.stderr)
            records.drop(CHECKPOINTS)
            return report(read_json(records.folder / "result.json"), as_json)
        data = load(dataset) if config.partition is None else shard(dataset, config.partition)
        console = Console(stderr=as_json)
        note = f" ({escape(data.note)})" if data.note else ""
        console.print(
            f"[bold]{config.method}[/] · {config.model} ({config.arch}) on {escape(data.name)}: "
            f"{data.num_nodes:,} nodes, {data.num_edges:,} edges, {training(data):,} to train on"
            f"{'' if config.partition or bool(data.test_mask.any()) else ', none to test on'}{note}"
        )
        if records and not resume:
            records.fresh("config.json", "metrics.jsonl", "result.json", *(f"best-seed{s}.pt" for s in seeds))
            records.drop(CHECKPOINTS)
            asked = {"dataset": dataset, "seeds": list(seeds), "log_variance": log_variance}
            records.json("config.json", {**asked, **config.as_dict()})
        strategy().barrier()  # rank 0 has deleted old files
        try:
            results = run_all(data, config, seeds, records, log_variance, every)
        except KeyboardInterrupt:
            then = f"interrupted; `adahop train --resume {records.folder}` continues it" if records else ""
            raise KeyboardInterrupt(then) from None
        summary = summarise(dataset, data.metric, config, results)
        if records:
            records.json("result.json", summary)
            records.drop(CHECKPOINTS)  # the run is finished
        report(summary, as_json)


def report(summary: dict[str, Any], as_json: bool) -> None:
    show(Console(stderr=as_json), summary)
    if as_json:
        print(json_text(summary))


def training(data: NodeData) -> int:
    """Nodes to train on; of a part, those of all parts."""
    return getattr(data, "training", None) or int(data.train_mask.sum())


def method_options(texts: list[str]) -> dict[str, Any]:
    given = pairs(texts, "option")
    for name in ("graph", "sizes", "seed", "storage"):
        if name in given:
            raise InputError(f"`option` must be an option of the method, got '{name}', which has its own flag")
    return given


def seed_range(seed: int, runs: int) -> range:
    """Seeds counted up from the first; torch takes them up to 2^63."""
    count(runs, 1, "runs")
    if count(seed, 0, "seed") + runs > 2**63:
        raise InputError(f"`seed` must be below 2^63, got {seed}")
    return range(seed, seed + runs)


def run_all(
    data: NodeData, config: Config, seeds: range, records: Records | None, log_variance: int = 0, every: str = "auto"
) -> list[Result]:
    """Fit once per seed, with a progress bar (without a terminal: one line per epoch), and write the records."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        return [run_one(data, config, seed, records, progress, log_variance, every) for seed in seeds]


def run_one(
    data: NodeData, config: Config, seed: int, records: Records | None, progress: Progress, log_variance: int = 0,
    every: str = "auto",
) -> Result:  # fmt: skip
    steps = -(-training(data) // config.batch_size) * config.epochs
    task = progress.add_task(f"seed {seed}", total=steps)
    before, why = 0, WHY  # the epoch of the last row; what is said once

    def note(row: dict[str, Any]) -> None:
        nonlocal before, why
        if row["epoch"] <= before and isinstance(row.get("noise"), str):
            said = TWICE.format(seed=seed, epoch=row["epoch"], k=UNIFORM[row["noise"]]) + why
            progress.console.print(said, highlight=False, soft_wrap=True)
            why = ""
        before = row["epoch"]
        progress.update(task, description=f"seed {seed} · epoch {row['epoch']} · val {row['val']:.4f}")
        if records:
            records.row("metrics.jsonl", {"seed": seed, **row})
        if progress.disable:
            level = f" noise {row['noise']}" if "noise" in row else ""
            line = f"seed {seed} epoch {row['epoch']}{level} loss {row['loss']:.4f} val {row['val']:.4f}"
            print(line, file=sys.stderr)

    def tick(step: int) -> None:
        progress.update(task, completed=step)

    def noise(row: dict[str, Any]) -> None:
        if records:
            records.row("metrics.jsonl", {"seed": seed, **row})
        else:
            share = "" if row["over_uniform"] is None else f", {row['over_uniform']:.3g} of uniform's"
            line = f"seed {seed} step {row['step']} layer {row['layer']} variance {row['variance']:.4g}{share}"
            progress.console.print(line, highlight=False)

    probe = Probe(data, every=log_variance, seed=seed, write=noise) if count(log_variance, 0, "log_variance") else None
    kept = None if records is None else checkpoints(records, seed, every, getattr(data, "rank", None))
    result = fit(data, config, seed=seed, on_epoch=note, on_step=tick, probe=probe, checkpoint=kept)
    progress.update(task, total=result.steps, completed=result.steps)
    if result.race is not None:
        progress.console.print(f"seed {seed} {result.race['why']}", highlight=False, soft_wrap=True)
    assert result.model is not None
    if records:
        records.tensors(f"best-seed{seed}.pt", result.model.state_dict())
    return result


def summarise(dataset: str, metric: str, config: Config, results: list[Result]) -> dict[str, Any]:
    tests = [r.test for r in results]
    return {
        "method": config.method,
        "model": config.model,
        "arch": config.arch,
        "dataset": dataset,
        "metric": metric,
        "test_mean": statistics.fmean(tests),
        "test_std": statistics.stdev(tests) if len(tests) > 1 else 0.0,
        "val_mean": statistics.fmean(r.val for r in results),
        "runs": [r.summary() for r in results],
    }


def show(console: Console, summary: dict[str, Any]) -> None:
    table = Table("seed", f"test {summary['metric']}", "val", "best epoch", "steps", "seconds", "noise")
    for r in summary["runs"]:
        table.add_row(
            str(r["seed"]), f"{r['test']:.4f}", f"{r['val']:.4f}", f"{r['best_epoch']} of {r['epochs']}",
            str(r["steps"]), f"{r['seconds']:.1f}", "–" if r.get("noise") is None else str(r["noise"]),
        )  # fmt: skip
    show_table(console, table)
    spread = f" ± {summary['test_std']:.4f}" if len(summary["runs"]) > 1 else ""
    console.print(f"test {summary['metric']} [bold]{summary['test_mean']:.4f}[/]{spread}")
