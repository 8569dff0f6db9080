"""`adahop reproduce`: the paper's tables and figures, cell by cell, going on where it was stopped."""

from __future__ import annotations

from typing import Annotated

import typer

from adahop.cli.commands import option
from adahop_lab.experiments import EXPERIMENTS


def reproduce(
    context: typer.Context,
    experiment: Annotated[str, typer.Argument(help=f"{', '.join(EXPERIMENTS)}, all (of these), or tta.")],
    datasets: Annotated[str | None, option("Separated by commas; default all that have cells.")] = None,
    rows: Annotated[
        str | None,
        option("Rows of the table, separated by commas, like bliss or for one k bliss-k5; default all."),
    ] = None,
    runs: Annotated[int | None, option("Runs per cell, with seeds from 0; default the cell's own number.")] = None,
    grid: Annotated[
        str, option("none: the cells' settings; full: first search the paper's grid on validation data.")
    ] = "none",
    out: Annotated[str, option("Folder for the results; results that are there are not run again.")] = "results",
    device: Annotated[str, option("cpu or cuda.")] = "cpu",
    jobs: Annotated[int, option("Parallel processes with one thread each; 0: one per core.")] = 0,
    data: Annotated[
        str | None, option("Folder of .npz files and downloads; default $ADAHOP_DATA and the download cache.")
    ] = None,
    cells: Annotated[
        str | None, option("Folder with the cells' settings; default `runs` here or in the checkout.")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="Download public data sets that are missing.")] = False,
    renew: Annotated[bool, typer.Option("--renew", help="Run cells again whose settings have changed.")] = False,
    epochs: Annotated[int, option("tta: epochs per run.")] = 40,
    tries: Annotated[int, option("tta: seeds for the choice of settings on validation data.")] = 2,
    clock: Annotated[str, option("tta: wall, or cpu: processor time of one thread, on a busy machine.")] = "wall",
) -> None:
    """Run an experiment and print its table; a stopped run continues with the same command.

    A cell is one row of a table on one data set. tta, time to accuracy, has candidates instead of cells: --rows names
    them, separated by semicolons.
    """
    given = dict(context.params)
    of_tta = {name: given.pop(name) for name in ("epochs", "tries", "clock")}
    if experiment == "tta":
        from adahop_lab import tta

        tta.start(datasets, rows, runs or 5, out, data, device, **of_tta)
        return
    from adahop_lab.experiments.reproduce import start

    start(**given)
