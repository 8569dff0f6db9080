"""Candidates: ways to train that are compared with each other, tuned alike; every run is kept as a line of JSON."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adahop import run as running
from adahop.checks import InputError, one_of
from adahop.config import Config
from adahop.datasets import load
from adahop.run import Result, stored
from adahop.seams import NodeData
from adahop.train import fit
from adahop_lab import stale
from adahop_lab.rows import Lines, Row

GRID = tuple({"lr": lr, "dropout": share} for lr, share in product((0.001, 0.003, 0.01), (0.0, 0.5)))
TUNING = (1000, 1001)  # seeds of the choice by validation; no run that counts has them
MOST = 400  # epochs of a candidate whose epoch is one step
BATCHES = 5  # of which what a step reads is counted


def _fit(data: NodeData, config: Config, seed: int) -> tuple[Result, float]:
    result = fit(data, config, seed=seed)
    return result, result.steps * read_by_a_step(result, stored(data, config), config.batch_size)


def _stale(kind: str) -> Callable[[NodeData, Config, int], tuple[Result, float]]:
    def run(data: NodeData, config: Config, seed: int) -> tuple[Result, float]:
        result, trainer = stale.fit(data, config, kind, seed)
        return result, trainer.read

    return run


TRAINERS = {"fit": _fit, **{kind: _stale(kind) for kind in stale.KINDS}}


@dataclass(frozen=True)
class MethodChoice:
    """A method with `k` neighbours per layer, and who trains it: `fit`, or a baseline of the lab."""

    name: str
    method: str
    k: int = -1
    trainer: str = "fit"
    options: dict[str, Any] = field(default_factory=dict)
    one_step: bool = False  # an epoch is a step: it gets as many epochs as others have steps, up to `MOST`

    def config(self, base: Config, data: NodeData, **settings: Any) -> Config:
        """`base` with what this candidate is, and what is chosen for it."""
        steps = -(-int(data.train_mask.sum()) // base.batch_size)
        epochs = max(base.epochs, min(base.epochs * steps, MOST)) if self.one_step else base.epochs
        sizes = (self.k,) * len(base.sizes)
        return replace(base, method=self.method, sizes=sizes, epochs=epochs, method_options=self.options, **settings)


CANDIDATES = {
    c.name: c
    for c in (
        MethodChoice("adahop, k = 2", "adahop", 2),
        MethodChoice("adahop, k = 5", "adahop", 5),
        MethodChoice("uniform, k = 2", "graphsage", 2),
        MethodChoice("uniform, k = 10", "graphsage", 10),
        MethodChoice("labor, k = 10", "labor", 10),
        MethodChoice("full batch", "rns", options={"parts": 1}, one_step=True),
        MethodChoice("DropEdge", "dropedge", one_step=True),
        MethodChoice("RNS", "rns"),
        MethodChoice("GAS", "graphsage", trainer="gas"),
        MethodChoice("LMC", "graphsage", trainer="lmc"),
    )
}


def chosen(names: str | None) -> list[MethodChoice]:
    """Some of the candidates by their names with semicolons between; all without names."""
    wanted = list(CANDIDATES) if names is None else [name.strip() for name in names.split(";") if name.strip()]
    unknown = [name for name in wanted if name not in CANDIDATES]
    if unknown or not wanted:
        raise InputError(f"`candidates` must be some of {'; '.join(CANDIDATES)}, got '{names}'")
    return [CANDIDATES[name] for name in wanted]


def read_by_a_step(result: Result, data: NodeData, batch_size: int) -> float:
    """Bytes of features and memories that a step of fixed weights reads, the mean of a few batches after training."""
    sampler, model, total = result.sampler, result.model, []
    assert sampler is not None and model is not None
    nodes, row = data.train_mask.nonzero().flatten(), data.x.nbytes / len(data.x)
    for seeds in islice(sampler.epoch(nodes, batch_size), BATCHES):
        blocks = sampler.sample(seeds)
        read = blocks[0].num_src * row
        for layer, width in enumerate(model.widths):
            how, block = model.memory(layer), blocks[layer]
            if how is not None and how.draws:  # a snapshot: a row of h per source, and one of its sums per target
                read += 4 * width * (block.num_src + block.num_dst)
            elif how is not None:  # an exact sum: a row of its sums per target, or of sparse features per neighbour
                rows = (
                    block.num_dst if torch.is_tensor(data.x) else len(sampler.graph.sources_of(block.targets).unique())
                )
                read += rows * row
        total.append(read)
    return statistics.fmean(total)


def count_seconds(clock: str) -> None:
    """By "wall", or as processor time ("cpu"), for one thread on a machine that others use."""
    running.now = {"wall": time.perf_counter, "cpu": time.process_time}[one_of(clock, ("wall", "cpu"), "clock")]
    if clock == "cpu":
        torch.set_num_threads(1)


# --- runs that are kept ----------------------------------------------------------------------------------------------


NAMES = ("dataset", "candidate", "lr", "dropout", "seed", "epochs", "hidden", "batch_size", "layers", "device")


def run(dataset: str, data: NodeData, candidate: MethodChoice, base: Config, point: Row, seed: int) -> Row:
    """One run: what names it, its scores and its seconds."""
    config = candidate.config(base, data, **point)
    torch.manual_seed(seed)
    result, read = TRAINERS[candidate.trainer](data, config, seed)
    kept = {k: getattr(result, k) for k in ("val", "test", "best_epoch", "steps", "seconds", "noise")}
    history = [{k: round(row[k], 5) for k in ("epoch", "val", "seconds")} for row in result.history]
    clock = "cpu" if running.now is time.process_time else "wall"
    named = name_of(dataset, candidate, base, point, seed)
    return {**named, **kept, "clock": clock, "megabytes": round(read / 2**20, 2), "history": history}


def name_of(dataset: str, candidate: MethodChoice, base: Config, point: Row, seed: int) -> Row:
    """What names a run: the fields of `NAMES`."""
    own = {name: getattr(base, name) for name in ("epochs", "hidden", "batch_size", "device")}
    return {"dataset": dataset, "candidate": candidate.name, **point, "seed": seed, "layers": len(base.sizes), **own}


def train(
    lines: Lines, dataset: str, data: NodeData, candidate: MethodChoice, base: Config, point: Row, seed: int
) -> Row:
    """One run, or what is kept of it."""
    key = lines.key(name_of(dataset, candidate, base, point, seed))
    return lines.rows[key] if key in lines.rows else lines.add(run(dataset, data, candidate, base, point, seed))


def tuned(
    lines: Lines, dataset: str, data: NodeData, candidate: MethodChoice, base: Config, seeds: Iterable[int] = TUNING
) -> Row:
    """The point of the grid with the best mean validation score; of equals, the first."""
    tries = list(seeds)

    def mean(point: Row) -> float:
        return statistics.fmean(train(lines, dataset, data, candidate, base, point, s)["val"] for s in tries)

    return max(GRID, key=mean)


# --- many of them at a time ------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A candidate on a data set: tuned, and then run with the seeds that count."""

    path: str
    candidate: MethodChoice
    base: Config

    @property
    def dataset(self) -> str:
        return Path(self.path).stem


@cache
def _loaded(path: str) -> NodeData:
    return load(path)


def _run(entry: Entry, point: Row, seed: int) -> Row:
    return run(entry.dataset, _loaded(entry.path), entry.candidate, entry.base, point, seed)


class Here(Executor):
    """Runs what it is given at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        job: Future[Any] = Future()
        try:
            job.set_result(fn(*args, **kwargs))
        except Exception as e:
            job.set_exception(e)
        return job


def run_entries(
    lines: Lines, entries: list[Entry], seeds: Iterable[int], tuning: Iterable[int] = TUNING, jobs: int = 0,
    seconds: float = float("inf"),
) -> bool:  # fmt: skip
    """Tune and run entries in `jobs` processes (0: in this one), earlier entries first; whether all is done.

    An entry's runs begin as soon as it is tuned. No run begins so many seconds after the file was opened; runs that
    fail are told of and left out. Processes share the machine, so seconds of these rows say little.
    """
    seeds, tuning = list(seeds), list(tuning)

    def missing(entry: Entry) -> list[tuple[Entry, Row, int]]:
        """The runs of an entry that can begin: all of its tuning, or then those that count."""

        def kept(point: Row, seed: int) -> Row | None:
            return lines.rows.get(lines.key(name_of(entry.dataset, entry.candidate, entry.base, point, seed)))

        first = [(entry, point, seed) for seed in tuning for point in GRID if kept(point, seed) is None]
        if first:
            return first
        best = max(GRID, key=lambda point: statistics.fmean((kept(point, s) or {})["val"] for s in tuning))
        return [(entry, best, seed) for seed in seeds if kept(best, seed) is None]

    def key(task: tuple[Entry, Row, int]) -> tuple[Any, ...]:
        entry, point, seed = task
        return lines.key(name_of(entry.dataset, entry.candidate, entry.base, point, seed))

    begun: set[tuple[Any, ...]] = set()
    at_work: dict[Future[Row], tuple[Entry, Row, int]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) if jobs else Here() as pool:
        while True:
            late = time.monotonic() - lines.began > seconds
            todo = [] if late else [task for entry in entries for task in missing(entry) if key(task) not in begun]
            for task in todo[: max(jobs, 1) - len(at_work)]:
                begun.add(key(task))
                at_work[pool.submit(_run, *task)] = task
            if not at_work:
                return not any(missing(entry) for entry in entries)
            for job in wait(at_work, return_when=FIRST_COMPLETED).done:
                entry, point, seed = at_work.pop(job)
                said = f"{entry.dataset} {entry.candidate.name} {point} {seed}"
                if (error := job.exception()) is not None:
                    print(f"{said}: failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
                row = lines.add(job.result())
                print(f"{said}: val {row['val']:.4f}, {row['seconds']:.1f} s", flush=True)
