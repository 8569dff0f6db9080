"""The paper's tables and figures, cell by cell, going on where it was stopped."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from rich.console import Console

from adahop.checks import InputError, count, one_of
from adahop.records import Records
from adahop_lab.experiments import EXPERIMENTS
from adahop_lab.experiments.catalogue import cells_of
from adahop_lab.experiments.cells import cells_folder
from adahop_lab.experiments.find import roots
from adahop_lab.experiments.plan import plan
from adahop_lab.experiments.schedule import run_all
from adahop_lab.experiments.tables import show
from adahop_lab.experiments.work import Setting


def start(
    experiment: str, datasets: str | None, rows: str | None, runs: int | None, grid: str, out: str, device: str,
    jobs: int, data: str | None, cells: str | None, download: bool, renew: bool,
) -> None:  # fmt: skip
    """Plan the cells that are asked for, run those that are not there yet, show the table."""
    one_of(experiment, [*EXPERIMENTS, "all"], "experiment")
    one_of(grid, ("none", "full"), "grid")
    count(jobs, 0, "jobs")
    if runs is not None:
        count(runs, 1, "runs")
    folder = cells_folder(cells)
    names = list(EXPERIMENTS) if experiment == "all" else [experiment]
    found = {cell.place: cell for name in names for cell in cells_of(name, folder)}
    wanted = _chosen(datasets, sorted({c.dataset for c in found.values()}), "datasets")
    one_k = {c.row for c in found.values() if c.k is not None}
    kept = _chosen(rows, sorted({c.line for c in found.values()}), "rows", one_k)
    chosen = [c for c in found.values() if c.dataset in wanted and (c.line in kept or c.row in kept)]
    Records(out)
    workers = jobs or (1 if device.startswith("cuda") else _cores())
    setting = Setting(Path(out), tuple(p.resolve() for p in roots(data)), device, workers, download)
    work = [plan(cell, runs, grid == "full", setting, renew) for cell in chosen]
    run_all(work, setting, renew)
    show(Console(), names, folder, Path(out), wanted, {job.cell.place: job.reason for job in work if job.reason})
    if any(job.failed for job in work):
        raise typer.Exit(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chosen(text: str | None, known: list[str], what: str, also: set[str] | frozenset[str] = frozenset()) -> list[str]:
    if text is None:
        return known
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise InputError(f"`{what}` must be names with commas between, got '{text}'")
    return [name if name in also else one_of(name, known, what) for name in names]
