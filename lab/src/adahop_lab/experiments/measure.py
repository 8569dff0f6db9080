"""What is measured of a cell with one seed: (facts, times). Facts are the same on every run; times never are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from adahop.config import Config
from adahop.diagnostics import Probe
from adahop.loader import Loader
from adahop.methods import METHODS
from adahop.run import Result, assemble
from adahop.train import fit, train_step
from adahop_lab.experiments.cells import Cell
from adahop_lab.experiments.regret import regret

Measured = tuple[dict[str, Any], dict[str, Any]]
NODES, REPEATS = 256, 20  # where and how often a variance is measured
TIMED = 3  # epochs that are timed, after one that is not


def scores(cell: Cell, data: Any, config: Config, seed: int) -> Measured:
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


def sample_size(cell: Cell, data: Any, config: Config, seed: int) -> Measured:
    """The score, and the variance of every layer's sum as the last step left the sampler."""
    if METHODS[config.method].family == "subgraph":  # estimates no sum
        return scores(cell, data, config, seed)
    steps = -(-int(data.train_mask.sum()) // config.batch_size) * config.epochs
    probe = Probe(data, at=[steps], nodes=NODES, repeats=REPEATS, seed=seed, against=("uniform",))
    facts, times = _told(fit(data, config, seed=seed, probe=probe))
    kept = ("layer", "variance", "error", "relative", "over_uniform")
    return {**facts, "layers": [{key: row[key] for key in kept} for row in probe.rows]}, times


def timing(cell: Cell, data: Any, config: Config, seed: int) -> Measured:
    """Seconds an epoch: drawing batches (with their features), and the model's step (with the sampler's update)."""
    data = data.to(config.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, sampler = assemble(data, config, seed)
        loader = Loader(data, sampler, data.train_mask, config.batch_size)
        optimizer = torch.optim.Adam([*model.parameters(), *sampler.parameters()], lr=config.lr)
        step = lambda batch: train_step(model, sampler, optimizer, batch)  # noqa: E731
        rows = [_epoch(loader, step, config.device) for _ in range(1 + TIMED)][1:]
    facts = {"seed": seed, "steps": rows[0]["steps"], "epochs": TIMED}
    spent = {key: [round(row[key], 4) for row in rows] for key in ("sampling", "model")}
    return facts, {"seed": seed, "seconds": round(sum(map(sum, spent.values())), 3), **spent}


def _epoch(loader: Loader, step: Callable[[Any], Any], device: str) -> dict[str, Any]:
    spent: dict[str, Any] = {"sampling": 0.0, "model": 0.0, "steps": 0}
    batches, now = iter(loader), time.perf_counter()
    while True:
        batch = next(batches, None)
        then = now
        now = _moment(device)
        spent["sampling"] += now - then
        if batch is None:
            return spent
        step(batch)
        then = now
        now = _moment(device)
        spent["model"] += now - then
        spent["steps"] += 1


def _moment(device: str) -> float:
    """Now, with all that a GPU was asked for done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def stars(cell: Cell, data: Any, config: Any, seed: int) -> Measured:
    """Variance over visits on stars with fixed rewards; needs no data and no model."""
    began = time.perf_counter()
    facts = {"seed": seed, **regret(cell.settings, cell.more, seed)}
    return facts, {"seed": seed, "seconds": round(time.perf_counter() - began, 3)}


MEASURES: dict[str, Callable[[Cell, Any, Any, int], Measured]] = {
    "scores": scores, "sample-size": sample_size, "timing": timing, "regret": stars,
}  # fmt: skip
