"""`adahop variance`: train, then measure the sampling variance of each method in every layer."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from adahop.checks import InputError, count, one_of
from adahop.cli import numbers, pairs
from adahop.cli.tables import show_table
from adahop.cli.train import seed_range
from adahop.config import Config
from adahop.datasets import load
from adahop.diagnostics import Probe
from adahop.methods import METHODS
from adahop.records import Records, json_text
from adahop.run import inputs_of
from adahop.seams import NodeData
from adahop.train import fit

POINTS = 8  # measurements per run, for the plot over training
FIRST = ("method", "layer", "relation", "variance", "over_uniform", "over_oracle", "ess", "gradient_variance")


def start(
    dataset: str, methods: str, sizes: str, ks: str | None, nodes: int, repeats: int, seed: int, runs: int,
    out: str | None, as_json: bool, **common: Any,
) -> None:  # fmt: skip
    """Train each method with each seed and measure; `common` are the settings of all."""
    count(common["batch_size"], 1, "batch_size")
    wide = numbers(sizes, "sizes")
    tries = [wide] if ks is None else [[k] * len(wide) for k in numbers(ks, "ks")]
    plans = [(name, plan(name, each, common)) for each in tries for name in chosen(methods)]
    count(nodes, 1, "nodes")
    seeds = seed_range(seed, runs)
    records, data = None if out is None else Records(out), load(dataset)
    inputs_of(data, common["model"])  # which must fit each other
    if records:
        records.fresh("variance.jsonl", "training.jsonl")
    rows: list[dict[str, Any]] = []
    way: list[dict[str, Any]] = []
    for at, (name, config) in enumerate(plans):
        looked = records is not None and at >= len(plans) - len(plans) // len(tries)  # the last k alone, on its way
        for run in seeds:
            last, along = measured(name, config, data, run, nodes, repeats, looked)
            rows, way = rows + last, way + along
            for found, file in ((last, "variance.jsonl"), (along, "training.jsonl")):
                for row in found if records else ():
                    records.row(file, row)  # type: ignore[union-attr]
            for row in last if as_json else ():
                print(json_text(row), flush=True)
    show(Console(stderr=as_json), rows)
    if records:
        draw(records, rows, way, several=len(tries) > 1)


def draw(records: Records, rows: list[dict[str, Any]], way: list[dict[str, Any]], several: bool) -> None:
    """The plots, where the laboratory is installed."""
    try:
        from adahop_lab.plots import variance_plot
    except ImportError:
        print("no plots: they need adahop-lab (`pip install ./lab` in a checkout)", file=sys.stderr)
        return
    if any("relation" in row for row in rows):
        print("no plots: the rows of a typed graph are too many for one", file=sys.stderr)
        return
    names = variance_plot(way, "step", records.folder / "variance-training")
    if several:
        names += variance_plot(rows, "k", records.folder / "variance-k")
    print("plots: " + ", ".join(map(str, names)), file=sys.stderr)


def chosen(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise InputError(f"`methods` must be names with commas between, like graphsage,bs, got '{text}'")
    return list(dict.fromkeys(names))


def plan(text: str, sizes: list[int], common: dict[str, Any]) -> Config:
    """The config of name:part=value:part=value; layer-wise methods draw the batch size times the numbers."""
    name, *parts = text.split(":")
    family = METHODS[one_of(name, METHODS, "methods")].family
    if family == "subgraph":
        raise InputError(f"`methods` must be node-wise or layer-wise, got {name}, which draws subgraphs and no sums")
    options = pairs(parts, "methods")
    estimator = options.pop("estimator", None)
    wide = common["batch_size"] if family == "layer-wise" else 1
    own = tuple(k if k < 0 else k * wide for k in sizes)
    return Config(method=name, sizes=own, estimator=estimator, noise=0.0, method_options=options, **common)


def measured(
    name: str, config: Config, data: NodeData, seed: int, nodes: int, repeats: int, looked: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows at the last step, rows along the way). The model is as the last step left it, not the best one kept."""
    steps = -(-int(data.train_mask.sum()) // config.batch_size) * config.epochs
    marks = {max(1, round(steps * i / POINTS)) for i in range(1, POINTS + 1)} if looked else ()
    few: dict[str, Any] = {"nodes": nodes, "seed": seed}
    along = Probe(data, at=marks, repeats=max(1, repeats // 4), **few)
    last = Probe(data, at=[steps], repeats=repeats, against=("uniform", "oracle"), gradient=True, **few)

    def both(*now: Any) -> None:
        along(*now)
        last(*now)

    result = fit(data, config, seed=seed, probe=both)
    print(f"{name} sizes {list(config.sizes)} seed {seed}: test {result.test:.4f}", file=sys.stderr, flush=True)
    final, way = ([tidy(name, config, seed, row) for row in probe.rows] for probe in (last, along))
    return final, way


def tidy(name: str, config: Config, seed: int, row: dict[str, Any]) -> dict[str, Any]:
    """A row with its method, the promised fields first; k is the number drawn in its layer."""
    row = {"method": name, **row, "k": config.sizes[row["layer"] - 1], "seed": seed}
    return {**{k: row[k] for k in FIRST if k in row}, **row}


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("method", overflow="fold", min_width=16)
    typed = any("relation" in row for row in rows)
    if typed:
        table.add_column("relation", overflow="fold")
    for head in ("k", "layer", "variance", "/ uniform", "/ oracle", "ess", "seen", "gradient"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        numbers = ("variance", "over_uniform", "over_oracle", "ess", "coverage", "gradient_variance")
        cells = ["-" if row[k] is None else f"{row[k]:.3g}" for k in numbers]
        named = [escape(" ".join(row["relation"]))] if typed else []
        table.add_row(escape(row["method"]), *named, str(row["k"]), str(row["layer"]), *cells)
    show_table(console, table)
