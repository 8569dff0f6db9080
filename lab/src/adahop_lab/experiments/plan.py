"""What is still to be done: for each cell the seeds that are missing, or why it cannot be run here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from adahop_lab.experiments.catalogue import EXPERIMENTS, measure_of
from adahop_lab.experiments.cells import Cell
from adahop_lab.experiments.find import find
from adahop_lab.experiments.grid import GRID, best, points
from adahop_lab.experiments.store import Store
from adahop_lab.experiments.work import Piece, Setting


@dataclass
class Job:
    """A cell on its way: pieces that wait, pieces that are out, and what came of them."""

    cell: Cell
    seeds: list[int]
    search: bool
    reason: str = ""  # why it is not run here
    changes: dict[str, Any] = field(default_factory=dict)  # what the grid chose
    waiting: list[Piece] = field(default_factory=list)
    out: int = 0
    failed: list[str] = field(default_factory=list)
    grid: list[dict[str, Any]] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {**self.cell.settings, **self.changes}

    @property
    def over(self) -> bool:
        return not self.waiting and not self.out

    @property
    def left(self) -> int:
        """Pieces still to come, those behind a search included."""
        behind = len(self.seeds) if self.search and self.grid is None and not self.reason else 0
        return len(self.waiting) + self.out + behind


def plan(cell: Cell, runs: int | None, search: bool, setting: Setting, renew: bool) -> Job:
    """The job of a cell; what is on disk counts."""
    store, measure = Store(setting.out), measure_of(cell)
    many = cell.runs if runs is None or measure == "timing" else runs
    job = Job(cell, list(range(many)), search and cell.experiment in ("table2", "table3", "ogb"))
    job.reason = cell.why_not()
    if not job.reason and find(cell.dataset, list(setting.folders), setting.download) is None:
        job.reason = "the data is not here"
    if job.reason:
        return job
    if measure != "regret":
        cell.config(setting.device)  # a mistake in the file shows before anything runs
    job.search &= not _finished(job, store, renew)
    if job.search:
        job.waiting = [
            Piece(cell, i, point, search=True)
            for i, point in enumerate(points())
            if not _kept(store, cell, f"grid-{i}", cell.settings)
        ]
    if not job.search or not job.waiting:
        after_search(job, store, renew)
    return job


def _kept(store: Store, cell: Cell, name: str, settings: dict[str, Any]) -> bool:
    run = store.kept(cell, name)
    return run is not None and run[0]["settings"] == settings


def _finished(job: Job, store: Store, renew: bool) -> bool:
    """Whether the search was done before and its choice is in the cell's file."""
    done = store.cell(job.cell)
    if not job.search or done is None or not done[0].get("grid"):
        return False
    same = {k: v for k, v in done[0]["settings"].items() if k not in GRID}
    if same != {k: v for k, v in job.cell.settings.items() if k not in GRID}:
        return False
    job.grid, job.changes = done[0]["grid"], best(done[0]["grid"])
    return True


def after_search(job: Job, store: Store, renew: bool) -> None:
    """The seeds that are missing, with the settings of the cell or those that the grid chose."""
    if job.search:
        tried = [store.kept(job.cell, f"grid-{i}") for i in range(len(points()))]
        job.grid = [{**run[0]["point"], "val": run[0]["val"]} for run in tried if run is not None]
        job.changes = best(job.grid)
    if not renew:
        store.clash(job.cell, job.settings)
    done = store.runs(job.cell, job.settings)
    job.waiting = [Piece(job.cell, seed, job.changes) for seed in job.seeds if seed not in done]


def finish(job: Job, store: Store) -> None:
    """Join a cell's runs, where all it was asked for came."""
    if job.reason or job.failed or not job.over or (job.search and job.grid is None):
        return
    done = store.runs(job.cell, job.settings)
    if all(seed in done for seed in job.seeds) and store.pending(job.cell).exists():
        store.join(job.cell, job.settings, job.grid)


def alone(job: Job) -> bool:
    return EXPERIMENTS[job.cell.experiment].alone
