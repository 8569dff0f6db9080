"""What is measured of a cell with one seed: (facts, times). Facts are the same on every run; times never are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from adahop.config import Config
from adahop.datasets.base import Dataset
from adahop.diagnostics import Probe
from adahop.methods import METHODS
from adahop.run import Result
from adahop.train import fit
from adahop_lab.experiments.cells import Cell
from adahop_lab.experiments.regret import regret

Measured = tuple[dict[str, Any], dict[str, Any]]
NODES, REPEATS = 256, 20  # where and how often a variance is measured
TIMED = 3  # epochs that are timed, after one that is not


def scores(cell: Cell, data: Dataset, config: Config, seed: int) -> Measured:
    """The test score at the best validation epoch, and validation along the way."""
    return _told(fit(data, config, seed=seed))


def _told(result: Result) -> Measured:
    way = result.history
    facts = {
        "seed": result.seed, "test": result.test, "val": result.val, "best_epoch": result.best_epoch,
        "epochs": result.epochs, "steps": result.steps,
        "history": {key: [round(row[key], 6) for row in way] for key in ("loss", "val")},
    }  # fmt: skip
    times = {"seed": result.seed, "seconds": round(result.seconds, 3)}
    return facts, {**times, "training": [round(row["seconds"], 4) for row in way]}


def sample_size(cell: Cell, data: Dataset, config: Config, seed: int) -> Measured:
    """The score, and the variance of every layer's sum as the last step left the sampler."""
    if METHODS[config.method].family == "subgraph":  # estimates no sum
        return scores(cell, data, config, seed)
    steps = -(-int(data.train_mask.sum()) // config.batch_size) * config.epochs
    probe = Probe(data, at=[steps], nodes=NODES, repeats=REPEATS, seed=seed, against=("uniform",))
    facts, times = _told(fit(data, config, seed=seed, probe=probe))
    kept = ("layer", "variance", "error", "relative", "over_uniform")
    return {**facts, "layers": [{key: row[key] for key in kept} for row in probe.rows]}, times


def timing(cell: Cell, data: Dataset, config: Config, seed: int) -> Measured:
    """Seconds of training an epoch, by `fit`'s own clock: its loader, its step, its captured step on a GPU."""
    result = fit(data, replace(config, epochs=1 + TIMED, patience=0), seed=seed)
    ends = [row["seconds"] for row in result.history]
    spent = [round(after - before, 4) for before, after in pairwise(ends)]  # the first epoch warms up
    facts = {"seed": seed, "steps": result.steps // (1 + TIMED), "epochs": TIMED}
    return facts, {"seed": seed, "seconds": round(sum(spent), 3), "epoch": spent}


def stars(cell: Cell, data: Dataset, config: Any, seed: int) -> Measured:
    """Variance over visits on stars with fixed rewards; needs no data and no model."""
    began = time.perf_counter()
    facts = {"seed": seed, **regret(cell.settings, cell.more, seed)}
    return facts, {"seed": seed, "seconds": round(time.perf_counter() - began, 3)}


MEASURES: dict[str, Callable[[Cell, Any, Any, int], Measured]] = {
    "scores": scores, "sample-size": sample_size, "timing": timing, "regret": stars,
}  # fmt: skip
