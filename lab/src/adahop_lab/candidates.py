"""Candidates: ways to train that are compared with each other, tuned alike; every run is kept as a line of JSON."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

import torch

from adahop import run as running
from adahop.checks import InputError, one_of
from adahop.config import Config
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


def train(
    lines: Lines, dataset: str, data: NodeData, candidate: MethodChoice, base: Config, point: Row, seed: int
) -> Row:
    """One run, or what is kept of it."""
    config = candidate.config(base, data, **point)
    named: Row = {"dataset": dataset, "candidate": candidate.name, **point, "seed": seed, "layers": len(base.sizes)}
    named |= {name: getattr(base, name) for name in ("epochs", "hidden", "batch_size", "device")}

    def make() -> Row:
        torch.manual_seed(seed)
        result, read = TRAINERS[candidate.trainer](data, config, seed)
        kept = {k: getattr(result, k) for k in ("val", "test", "best_epoch", "steps", "seconds", "noise")}
        history = [{k: round(row[k], 5) for k in ("epoch", "val", "seconds")} for row in result.history]
        clock = "cpu" if running.now is time.process_time else "wall"
        return {**kept, "clock": clock, "megabytes": round(read / 2**20, 2), "history": history}

    return lines.get(named, make)


def tuned(
    lines: Lines, dataset: str, data: NodeData, candidate: MethodChoice, base: Config, seeds: Iterable[int] = TUNING
) -> Row:
    """The point of the grid with the best mean validation score; of equals, the first."""
    tries = list(seeds)

    def mean(point: Row) -> float:
        return statistics.fmean(train(lines, dataset, data, candidate, base, point, s)["val"] for s in tries)

    return max(GRID, key=mean)
