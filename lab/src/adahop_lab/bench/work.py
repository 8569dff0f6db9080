"""The commands of `adahop bench`: measure, then a table for people, rows for programs, a plot."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

from adahop.checks import InputError, between, device_of, one_of
from adahop.cli import numbers
from adahop.records import Records
from adahop_lab.bench import degrees as by_degree
from adahop_lab.bench import epoch as training
from adahop_lab.bench import inference as whole
from adahop_lab.bench import sampling as side_by_side
from adahop_lab.bench import setup as beginning
from adahop_lab.bench import show
from adahop_lab.bench.clock import CLOCKS


def sampling(
    sizes: str, threads: str, methods: str, peers: str, seconds: float, device: str, out: str | None, as_json: bool,
    **rest: Any,
) -> None:  # fmt: skip
    plan = side_by_side.SamplingBench(
        sizes=numbers(sizes, "sizes"), threads=numbers(threads, "threads"), methods=words(methods, "methods"),
        peers=words(peers, "peers"), seconds=between(seconds, 0.0, 3600.0, "seconds"), device=str(device_of(device)),
        **rest,
    )  # fmt: skip
    if not plan.methods:
        raise InputError(f"`methods` must be names with commas between, like graphsage,bs, got '{methods}'")
    records = None if out is None else Records(out)
    publish(side_by_side.measure(plan, say), "sampling", records, as_json)


def epoch(sizes: str, threads: str, methods: str, peers: str, out: str | None, as_json: bool, **rest: Any) -> None:
    plan = training.EpochBench(
        sizes=numbers(sizes, "sizes"), threads=numbers(threads, "threads"), methods=words(methods, "methods"),
        peers=words(peers, "peers"), **rest,
    )  # fmt: skip
    records = None if out is None else Records(out)
    publish(training.measure(plan, say), "epoch", records, as_json)


def degrees(
    graph: str, degrees: str, size: int, batch_size: int, threads: int, methods: str, rounds: int, seconds: float,
    clock: str, out: str | None, as_json: bool,
) -> None:  # fmt: skip
    records = None if out is None else Records(out)
    rows = by_degree.measure(
        graph, numbers(degrees, "degrees"), size, batch_size, threads, words(methods, "methods"), rounds,
        between(seconds, 0.0, 3600.0, "seconds"), say, one_of(clock, CLOCKS, "clock"),
    )  # fmt: skip
    publish(rows, "degrees", records, as_json, plot=by_degree.lines)


def inference(graph: str, features: int, hidden: int, outputs: int, arch: str) -> None:
    print(json.dumps(whole.measure(graph, features, hidden, outputs, arch)))


def setup(
    graph: str, method: str, sizes: str, hidden: int, batch_size: int, threads: int, device: str, clock: str
) -> None:
    numbers(sizes, "sizes")
    one_of(clock, CLOCKS, "clock")
    for row in beginning.measure(graph, method, sizes, hidden, batch_size, threads, str(device_of(device)), clock):
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
