"""`adahop reproduce`: the paper's tables and figures, cell by cell, going on where it was stopped."""

from __future__ import annotations

from typing import Annotated

import typer

from adahop.cli.commands import option
from adahop_lab.experiments import EXPERIMENTS


def reproduce(
    context: typer.Context,
    experiment: Annotated[str, typer.Argument(help=f"{', '.join(EXPERIMENTS)}, all (of these), or tta.")],
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
    epochs: Annotated[int, option("Of tta: epochs of a run.")] = 40,
    tries: Annotated[int, option("Of tta: seeds of the choice by validation.")] = 2,
) -> None:
    """Run an experiment's cells and print its table; stopped or killed, the same command goes on.

    tta, time to accuracy, has candidates instead of cells: --rows names them with semicolons between.
    """
    given = dict(context.params)
    of_tta = {name: given.pop(name) for name in ("epochs", "tries")}
    if experiment == "tta":
        from adahop_lab import tta

        tta.start(datasets, rows, runs or 5, out, data, device, **of_tta)
        return
    from adahop_lab.experiments.reproduce import start

    start(**given)
