"""`adahop train`: one method on one data set, any number of runs."""

from __future__ import annotations

import json
import statistics
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from adahop.checks import count
from adahop.cli import app, numbers


def option(help: str) -> Any:
    return typer.Option(help=help, show_default=True)


@app.command()
def train(
    dataset: Annotated[str, option("A name of `adahop list`, a .npz or .pt path, or synthetic:N,E,F,C.")] = "digits",
    model: Annotated[str, option("gcn, sage, gat or geniepath.")] = "gcn",
    arch: Annotated[str, option("plain or residual.")] = "residual",
    method: Annotated[str, option("How neighbours are sampled; see `adahop list`.")] = "bs",
    sizes: Annotated[str, option("Neighbours (or nodes) drawn a layer, input layer first; -1 for all.")] = "10,10",
    hidden: Annotated[int, option("Width of the hidden layers.")] = 64,
    epochs: Annotated[int, option("Passes over the training nodes.")] = 30,
    lr: Annotated[float, option("Adam's learning rate.")] = 0.01,
    weight_decay: Annotated[float, option("L2 penalty.")] = 0.0,
    dropout: Annotated[float, option("Share of inputs dropped in training.")] = 0.1,
    batch_size: Annotated[int, option("Training nodes a step.")] = 256,
    patience: Annotated[int, option("Stop after so many epochs without a better validation score; 0 never.")] = 0,
    prefetch: Annotated[int, option("Batches drawn ahead in a thread; feedback is that late.")] = 0,
    seed: Annotated[int, option("Seed of the first run.")] = 0,
    runs: Annotated[int, option("Runs, with seeds counted up.")] = 1,
    device: Annotated[str, option("cpu or cuda.")] = "cpu",
    out: Annotated[str | None, option("Folder for config, metrics and the best checkpoint.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Last line on stdout is one JSON object.")] = False,
) -> None:
    """Train a model with sampled neighbours; report the test score of the best validation epoch."""
    from adahop.datasets import load
    from adahop.records import Records
    from adahop.train import Config

    config = Config(
        model=model, arch=arch, method=method, sizes=tuple(numbers(sizes, "sizes")), hidden=hidden, epochs=epochs,
        lr=lr, weight_decay=weight_decay, dropout=dropout, batch_size=batch_size, patience=patience,
        prefetch=prefetch, device=device,
    )  # fmt: skip
    count(runs, 1, "runs")
    records = Records(out) if out else None
    data = load(dataset)
    console = Console(stderr=as_json)
    console.print(
        f"[bold]{method}[/] · {model} ({arch}) on {data.name}: {data.num_nodes:,} nodes, "
        f"{data.graph.num_edges:,} edges, {int(data.train_mask.sum()):,} to train on"
        + (f" ({data.note})" if data.note else "")
    )
    results = run_all(data, config, range(seed, seed + runs), records, console)
    summary = summarise(dataset, data.metric, config, results)
    if records:
        records.json("result.json", summary)
    show(console, summary)
    if as_json:
        print(json.dumps(summary))


def run_all(data: Any, config: Any, seeds: range, records: Any, console: Console) -> list[Any]:
    """Fit once a seed, with a bar for the steps and a line for each better epoch kept on disk."""
    from adahop.train import fit

    if records:
        records.json("config.json", {"dataset": data.name, "seeds": list(seeds), **config.as_dict()})
        records.fresh("metrics.jsonl")
    steps = -(-int(data.train_mask.sum()) // config.batch_size) * config.epochs
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    results = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for seed in seeds:
            task = progress.add_task(f"seed {seed}", total=steps)

            def note(row: dict[str, float], seed: int = seed, task: Any = task) -> None:
                progress.update(task, description=f"seed {seed} · epoch {row['epoch']} · val {row['val']:.4f}")
                if records:
                    records.row("metrics.jsonl", {"seed": seed, **row})
                if not progress.console.is_terminal and not sys.stderr.isatty():
                    print(f"seed {seed} epoch {row['epoch']} loss {row['loss']:.4f} val {row['val']:.4f}", file=sys.stderr)

            result = fit(
                data, config, seed=seed, on_epoch=note, on_step=lambda s, task=task: progress.update(task, completed=s)
            )
            progress.update(task, total=result.steps, completed=result.steps)
            if records:
                records.tensors(f"best-seed{seed}.pt", result.model.state_dict())
            results.append(result)
    return results


def summarise(dataset: str, metric: str, config: Any, results: list[Any]) -> dict[str, Any]:
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
    table = Table("seed", f"test {summary['metric']}", "val", "best epoch", "steps", "seconds")
    for r in summary["runs"]:
        table.add_row(
            str(r["seed"]), f"{r['test']:.4f}", f"{r['val']:.4f}", f"{r['best_epoch']} of {r['epochs']}",
            str(r["steps"]), f"{r['seconds']:.1f}",
        )  # fmt: skip
    console.print(table)
    spread = f" ± {summary['test_std']:.4f}" if len(summary["runs"]) > 1 else ""
    console.print(f"test {summary['metric']} [bold]{summary['test_mean']:.4f}[/]{spread}")


