"""`adahop bench`: how fast sampling and training are here, beside other libraries."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from adahop.checks import InputError, between, device_of, one_of
from adahop.cli import numbers
from adahop.cli.commands import option
from adahop.records import Records
from adahop_lab.bench import degrees as by_degree
from adahop_lab.bench import epoch as training
from adahop_lab.bench import inference as whole
from adahop_lab.bench import sampling as side_by_side
from adahop_lab.bench import setup as start
from adahop_lab.bench import show
from adahop_lab.bench.clock import CLOCKS

bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory beside other libraries, in turns.")

GRAPH = "rmat:N,E, star:DEGREE, a name of `adahop list`, or a .npz or .pt path."
PARTS = "With commas between; parts may be set, like bs:update=true or graphsage:policy=tracked:draw=systematic."
PEERS = "Libraries to measure beside, or one kind of sampler like dgl:uniform:ids=int32; none for none."
CLOCK = "wall, or cpu: processor seconds, for one thread on a busy machine."
AS_JSON = typer.Option("--json", help="One JSON object a line on stdout.")


@bench.command()
def sampling(
    graph: Annotated[str, option(GRAPH)] = "rmat:200000,10000000",
    sizes: Annotated[str, option("Neighbours a node draws, input layer first; layer-wise: times the batch.")] = "10,10",
    batch_size: Annotated[int, option("Seeds a batch.")] = 1024,
    threads: Annotated[str, option("Numbers of threads, each measured in turn.")] = "1",
    methods: Annotated[str, option(PARTS)] = ",".join(side_by_side.METHODS),
    peers: Annotated[str, option(PEERS)] = "dgl,pyg",
    rounds: Annotated[int, option("Rounds per method.")] = 5,
    seconds: Annotated[float, option("What a turn lasts, at least.")] = 0.25,
    device: Annotated[str, option("cpu or cuda.")] = "cpu",
    clock: Annotated[str, option(CLOCK)] = "wall",
    out: Annotated[str | None, option("Folder for sampling.jsonl and a plot.")] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Edges drawn and relabelled a second, and the ratio to every peer that can be imported."""
    plan = side_by_side.Plan(
        graph, numbers(sizes, "sizes"), batch_size, numbers(threads, "threads"), words(methods, "methods"),
        words(peers, "peers"), rounds, between(seconds, 0.0, 3600.0, "seconds"), str(device_of(device)), clock,
    )  # fmt: skip
    if not plan.methods:
        raise InputError(f"`methods` must be names with commas between, like graphsage,bs, got '{methods}'")
    records = None if out is None else Records(out)
    rows = side_by_side.measure(plan, say)
    publish(rows, "sampling", records, as_json)


@bench.command()
def epoch(
    graph: Annotated[str, option("A name of `adahop list`, a .npz or .pt path, or synthetic:N,E,F,C.")] = "digits",
    sizes: Annotated[str, option("Neighbours a node draws, input layer first.")] = "10,10",
    batch_size: Annotated[int, option("Training nodes a step.")] = 256,
    threads: Annotated[str, option("Numbers of threads, each measured in turn.")] = "1",
    methods: Annotated[str, option(PARTS)] = ",".join(training.METHODS),
    peers: Annotated[str, option("dgl, dgl:graphconv, dgl:sum-first; none for none.")] = "dgl",
    rounds: Annotated[int, option("Epochs measured per method.")] = 3,
    arch: Annotated[str, option("plain or residual.")] = "residual",
    hidden: Annotated[int, option("Width of the hidden layers.")] = 256,
    prefetch: Annotated[int, option("Batches our loader draws ahead in a thread of its own.")] = 0,
    device: Annotated[str, option("cpu, or cuda: then captured and eager, and pyg among the peers.")] = "cpu",
    model: Annotated[str, option("gcn, sage, gat or geniepath.")] = "gcn",
    half: Annotated[bool, option("On a GPU: features and history in half precision.")] = False,
    clock: Annotated[str, option(CLOCK)] = "wall",
    out: Annotated[str | None, option("Folder for epoch.jsonl and a plot.")] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Seconds a whole epoch of a GCN takes, ours and the same model on DGL's sampler and blocks."""
    plan = training.Plan(
        graph, numbers(sizes, "sizes"), batch_size, numbers(threads, "threads"), words(methods, "methods"),
        words(peers, "peers"), rounds, arch, hidden, prefetch, device, clock, model, half,
    )  # fmt: skip
    records = None if out is None else Records(out)
    publish(training.measure(plan, say), "epoch", records, as_json)


@bench.command()
def degrees(
    graph: Annotated[str, option("star, or rmat:N,E whose nodes are taken by degree.")] = "star",
    degrees: Annotated[str, option("Degrees of the targets.")] = ",".join(map(str, by_degree.DEGREES)),
    size: Annotated[int, option("Neighbours a target draws.")] = 5,
    batch_size: Annotated[int, option("Targets a batch.")] = 256,
    threads: Annotated[int, option("Threads.")] = 1,
    methods: Annotated[str, option(PARTS)] = ",".join(by_degree.METHODS),
    rounds: Annotated[int, option("Rounds per method.")] = 5,
    seconds: Annotated[float, option("What a turn lasts, at least.")] = 0.1,
    clock: Annotated[str, option(CLOCK)] = "wall",
    out: Annotated[str | None, option("Folder for degrees.jsonl and a plot.")] = None,
    as_json: Annotated[bool, AS_JSON] = False,
) -> None:
    """Microseconds a batch of one layer takes as the degree of its targets grows."""
    records = None if out is None else Records(out)
    rows = by_degree.measure(
        graph, numbers(degrees, "degrees"), size, batch_size, threads, words(methods, "methods"), rounds,
        between(seconds, 0.0, 3600.0, "seconds"), say,
        one_of(clock, CLOCKS, "clock"),
    )  # fmt: skip
    publish(rows, "degrees", records, as_json, plot=by_degree.lines)


@bench.command()
def inference(
    graph: Annotated[str, option(GRAPH)] = "rmat:200000,10000000",
    features: Annotated[int, option("Columns of x.")] = 64,
    hidden: Annotated[int, option("Width of the hidden layers.")] = 64,
    outputs: Annotated[int, option("Columns of the output.")] = 64,
    arch: Annotated[str, option("plain or residual.")] = "plain",
) -> None:
    """Peak memory of a GCN's pass over the whole graph, over that of graph, features and output; one JSON line."""
    print(json.dumps(whole.measure(graph, features, hidden, outputs, arch)))


@bench.command()
def setup(
    graph: Annotated[
        str, option("A data set with features, like synthetic:N,E,F,C.")
    ] = "synthetic:200000,10000000,100,10",
    method: Annotated[str, option("A name of `adahop list`.")] = "adahop",
    sizes: Annotated[str, option("Neighbours a node draws, input layer first.")] = "10,10",
    hidden: Annotated[int, option("Width of the hidden layers.")] = 64,
    batch_size: Annotated[int, option("Training nodes a step.")] = 1024,
    threads: Annotated[int, option("Threads.")] = 2,
    device: Annotated[str, option("cpu or cuda.")] = "cpu",
) -> None:
    """Seconds to the first step by part, the data being loaded: without a compiled kernel, then with; JSON lines."""
    numbers(sizes, "sizes")
    for row in start.measure(graph, method, sizes, hidden, batch_size, threads, str(device_of(device))):
        print(json.dumps(row), flush=True)


def words(text: str, what: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    return list(dict.fromkeys(part for part in parts if part and part != "none"))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def publish(
    rows: list[dict[str, Any]], name: str, records: Records | None, as_json: bool, plot: Any = show.bars
) -> None:
    """The table for people, the rows for programs, the plot for a page."""
    for row in rows if as_json else ():
        print(json.dumps(row), flush=True)
    Console(stderr=as_json, width=None if sys.stdout.isatty() else 160).print(show.table(rows))
    if records:
        records.fresh(f"{name}.jsonl")
        for row in rows:
            records.row(f"{name}.jsonl", row)
        say("plot: " + ", ".join(map(str, plot(rows, records.folder / name))))
