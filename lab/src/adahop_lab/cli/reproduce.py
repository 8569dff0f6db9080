"""`adahop reproduce`: the paper's tables and figures, cell by cell, going on where it was stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from adahop.checks import InputError, count, one_of
from adahop.cli.commands import option
from adahop.records import Records
from adahop_lab.experiments.catalogue import EXPERIMENTS, cells_of
from adahop_lab.experiments.cells import cells_folder
from adahop_lab.experiments.find import roots
from adahop_lab.experiments.plan import plan
from adahop_lab.experiments.schedule import run_all
from adahop_lab.experiments.tables import show
from adahop_lab.experiments.work import Setting


def reproduce(
    experiment: Annotated[str, typer.Argument(help=f"{', '.join(EXPERIMENTS)}, or all.")],
    datasets: Annotated[str | None, option("With commas between; all that have cells if left out.")] = None,
    rows: Annotated[
        str | None,
        option("Rows with commas between, all k or one (as bliss-k5); all if left out."),
    ] = None,
    runs: Annotated[
        int | None, option("Runs a cell, seeds counted up from 0; the cell's own number if left out.")
    ] = None,
    grid: Annotated[
        str, option("none: the cells' settings; full: the paper's grid first, by validation alone.")
    ] = "none",
    out: Annotated[str, option("Folder for the results; what is there is not run again.")] = "results",
    device: Annotated[str, option("cpu or cuda.")] = "cpu",
    jobs: Annotated[int, option("Processes side by side, a thread each; 0 for one a core.")] = 0,
    data: Annotated[
        str | None, option("Folder of .npz files and downloads; else ADAHOP_DATA, and the cache of downloads.")
    ] = None,
    cells: Annotated[str | None, option("Folder of the cells' files; else `runs` here or beside the source.")] = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch public data sets that are not here.")] = False,
    renew: Annotated[bool, typer.Option("--renew", help="Run cells anew whose settings have changed.")] = False,
) -> None:
    """Run an experiment's cells and print its table; stopped or killed, the same command goes on."""
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
