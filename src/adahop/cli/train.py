"""`adahop train`: one method on one data set, any number of runs."""

from __future__ import annotations

import json
import statistics
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from adahop.checkpoint import pace
from adahop.checks import InputError, count
from adahop.cli import numbers, pairs
from adahop.cli.partition import shard
from adahop.cli.resume import CHECKPOINTS, Stopped, checkpoints, read_json, restarted
from adahop.datasets import load
from adahop.diagnostics import Probe
from adahop.distributed import session, team
from adahop.records import Read, Records
from adahop.seams import NodeData
from adahop.sum import ESTIMATORS
from adahop.train import Config, Result, fit


def option(help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, show_default=True, **more)


def train(
    context: typer.Context,
    dataset: Annotated[str, option("A name of `adahop list`, a .npz or .pt path, or synthetic:N,E,F,C.")] = "digits",
    model: Annotated[str, option("gcn, sage, gat, gatv2 or geniepath; typed graphs: rgcn, rgat or hgt.")] = "gcn",
    arch: Annotated[str, option("plain or residual.")] = "residual",
    method: Annotated[str, option("How neighbours are sampled; see `adahop list`.")] = "adahop",
    sizes: Annotated[str, option("Neighbours (or nodes) per layer, input layer first; -1 for all.")] = "10,10",
    hidden: Annotated[int, option("Width of the hidden layers.")] = 64,
    epochs: Annotated[int, option("Passes over the training nodes.")] = 30,
    lr: Annotated[float, option("Adam's learning rate.")] = 0.01,
    weight_decay: Annotated[float, option("L2 penalty.")] = 0.0,
    dropout: Annotated[float, option("Fraction of inputs dropped in training.")] = 0.1,
    batch_size: Annotated[int, option("Training nodes per step.")] = 256,
    patience: Annotated[int, option("Stop after this many epochs without a better validation score; 0: never.")] = 0,
    prefetch: Annotated[int, option("Batches drawn ahead in a thread; feedback is that many batches late.")] = 0,
    estimator: Annotated[str | None, option(f"{', '.join(ESTIMATORS)}; default the method's own.")] = None,
    noise: Annotated[
        str,
        option(
            "Sampling noise that a control variate leaves in, 0 to 1, one number or one per layer; auto: chosen on "
            "validation during the run."
        ),
    ] = "auto",
    average: Annotated[float, option("Evaluate a running average of the weights; the fraction kept per step.")] = 0.0,
    norm: Annotated[str | None, option("Of a gcn's weights: row (default) or sym.")] = None,
    activation: Annotated[str | None, option("relu, elu or tanh instead of the architecture's own.")] = None,
    heads: Annotated[int | None, option("Of a gat, gatv2 or rgat (default 1) or an hgt (default 4).")] = None,
    conv: Annotated[str | None, option("Of an rgcn's relations: gcn (default) or sage.")] = None,
    bases: Annotated[int | None, option("Of an rgcn with many relations: their maps mix this many; 0: none.")] = None,
    score: Annotated[str | None, option("Of a gat: leaky_relu (default) or relu.")] = None,
    attention: Annotated[
        str | None, option("Of a gat, gatv2 or geniepath: self-normalised (default), paper or softmax.")
    ] = None,
    options: Annotated[
        list[str] | None, option("An option of the method, like eta=0.2; any number.", "--option", metavar="NAME=VALUE")
    ] = None,
    seed: Annotated[int, option("Seed of the first run.")] = 0,
    runs: Annotated[int, option("Runs, with seeds counted up.")] = 1,
    device: Annotated[str, option("cpu or cuda.")] = "cpu",
    capture: Annotated[
        bool | None, option("On a GPU: run the step as one CUDA graph; default: where possible.")
    ] = None,
    half: Annotated[bool, option("On a GPU: features and history in half precision.")] = False,
    tf32: Annotated[bool, option("On a GPU: matrix products in TF32.")] = True,
    cache: Annotated[
        float | None, option("On a GPU: keep features in host memory, with this fraction of rows on the device.")
    ] = None,
    state: Annotated[
        str | None, option("Folder for policy state and histories, kept in files instead of memory.")
    ] = None,
    partition: Annotated[str | None, option("Under torchrun, each process owns a part: range or metis.")] = None,
    log_variance: Annotated[int, option("Measure every layer's variance every this many steps; 0: never.")] = 0,
    out: Annotated[str | None, option("Folder for config, metrics and the best checkpoint.")] = None,
    checkpoint_every: Annotated[
        str, option("With --out, checkpoint after this many steps, or 30s; auto: at most a twentieth of the time.")
    ] = "auto",
    resume: Annotated[
        str | None, option("Continue the run in this folder with the settings of its config.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line on stdout.")] = False,
) -> None:
    """Train a model with sampled neighbours; report the test score of the best validation epoch."""
    pace(checkpoint_every)
    resume = resume or restarted(out)
    if resume is not None:
        kept = Stopped(resume)
        kept.agrees(context)
        return go(kept.config, kept.dataset, kept.seeds, kept.log_variance, resume, checkpoint_every, as_json, True)
    given = {"norm": norm, "activation": activation, "heads": heads, "score": score, "attention": attention,
             "conv": conv, "bases": bases}  # fmt: skip
    config = Config(
        model=model, arch=arch, method=method, sizes=tuple(numbers(sizes, "sizes")), hidden=hidden, epochs=epochs,
        lr=lr, weight_decay=weight_decay, dropout=dropout, batch_size=batch_size, patience=patience,
        prefetch=prefetch, estimator=estimator, noise=levels(noise), average=average, device=device, capture=capture,
        half=half, tf32=tf32, cache=cache, state=state, partition=partition,
        model_options={k: v for k, v in given.items() if v is not None}, method_options=method_options(options or []),
    )  # fmt: skip
    go(config, dataset, seed_range(seed, runs), log_variance, out, checkpoint_every, as_json)


def go(
    config: Config, dataset: str, seeds: range, log_variance: int, out: str | None, every: str, as_json: bool,
    resume: bool = False,
) -> None:  # fmt: skip
    """Start, or with `resume` continue; the result is written and printed at the end."""
    with session(config.device) as first:
        records = None if out is None else (Records if first else Read)(out)
        _go(config, dataset, seeds, log_variance, records, every, as_json, resume)


def _go(
    config: Config, dataset: str, seeds: range, log_variance: int, records: Records | None, every: str, as_json: bool,
    resume: bool,
) -> None:  # fmt: skip
    if records and resume and records.has("result.json"):
        print(f"the run in {records.folder} is finished; nothing is done", file=sys.stderr)
        records.drop(CHECKPOINTS)
        return tell(read_json(records.folder / "result.json"), as_json)
    data = load(dataset) if config.partition is None else shard(dataset, config.partition)
    console = Console(stderr=as_json)
    console.print(
        f"[bold]{config.method}[/] · {config.model} ({config.arch}) on {escape(data.name)}: {data.num_nodes:,} nodes, "
        f"{data.num_edges:,} edges, {training(data):,} to train on" + (f" ({escape(data.note)})" if data.note else "")
    )
    if records and not resume:
        records.fresh("config.json", "metrics.jsonl", "result.json", *(f"best-seed{s}.pt" for s in seeds))
        records.drop(CHECKPOINTS)
        asked = {"dataset": dataset, "seeds": list(seeds), "log_variance": log_variance}
        records.json("config.json", {**asked, **config.as_dict()})
    team().wait()  # rank 0 has deleted old files
    try:
        results = run_all(data, config, seeds, records, log_variance, every)
    except KeyboardInterrupt:
        then = f"interrupted; `adahop train --resume {records.folder}` continues it" if records else ""
        raise KeyboardInterrupt(then) from None
    summary = summarise(dataset, data.metric, config, results)
    if records:
        records.json("result.json", summary)
        records.drop(CHECKPOINTS)  # the run is finished
    tell(summary, as_json)


def tell(summary: dict[str, Any], as_json: bool) -> None:
    show(Console(stderr=as_json), summary)
    if as_json:
        print(json.dumps(summary))


def training(data: NodeData) -> int:
    """Nodes to train on; of a part, those of all parts."""
    return getattr(data, "training", None) or int(data.train_mask.sum())


def levels(text: str) -> float | tuple[float, ...] | str:
    """'0.5' as 0.5, '0,0.5' as (0.0, 0.5), 'auto' as it is."""
    if text == "auto":
        return text
    try:
        each = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"`noise` must be auto, or numbers in [0, 1] with commas between, got '{text}'") from None
    return each[0] if len(each) == 1 else each


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

    def note(row: dict[str, float]) -> None:
        progress.update(task, description=f"seed {seed} · epoch {row['epoch']} · val {row['val']:.4f}")
        if records:
            records.row("metrics.jsonl", {"seed": seed, **row})
        if progress.disable:
            level = f" noise {row['noise']:g}" if "noise" in row else ""
            said = f"seed {seed} epoch {row['epoch']}{level} loss {row['loss']:.4f} val {row['val']:.4f}"
            print(said, file=sys.stderr)

    def tick(step: int) -> None:
        progress.update(task, completed=step)

    def noise(row: dict[str, Any]) -> None:
        if records:
            records.row("metrics.jsonl", {"seed": seed, **row})
        else:
            share = "" if row["over_uniform"] is None else f", {row['over_uniform']:.3g} of uniform's"
            said = f"seed {seed} step {row['step']} layer {row['layer']} variance {row['variance']:.4g}{share}"
            progress.console.print(said, highlight=False)

    probe = Probe(data, every=log_variance, seed=seed, write=noise) if count(log_variance, 0, "log_variance") else None
    kept = None if records is None else checkpoints(records, seed, every, getattr(data, "rank", None))
    result = fit(data, config, seed=seed, on_epoch=note, on_step=tick, probe=probe, checkpoint=kept)
    progress.update(task, total=result.steps, completed=result.steps)
    if result.race is not None:
        progress.console.print(f"seed {seed} {result.race['why']}", highlight=False)
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
    console.print(table)
    spread = f" ± {summary['test_std']:.4f}" if len(summary["runs"]) > 1 else ""
    console.print(f"test {summary['metric']} [bold]{summary['test_mean']:.4f}[/]{spread}")
