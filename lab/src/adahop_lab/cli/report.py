"""`adahop report`: the results of `adahop reproduce` as one page that needs no network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from adahop.cli.commands import option
from adahop.errors import InputError
from adahop_lab.experiments import EXPERIMENTS


def report(
    folder: Annotated[str, typer.Argument(help="Folder that `adahop reproduce` wrote to.")] = "results",
    output: Annotated[str, option("The page.", "--output", "-o")] = "report.html",
    cells: Annotated[
        str | None, option("Folder with the cells' settings; default `runs` here or in the checkout.")
    ] = None,
) -> None:
    """Write tables and plots as one HTML page; fails if a row differs from the paper without an explanation."""
    from adahop.records import write_whole
    from adahop_lab.experiments.cells import cells_folder
    from adahop_lab.experiments.outcome import outcomes
    from adahop_lab.experiments.page import build

    if not Path(folder).is_dir():
        raise InputError(f"`folder` must be a folder of results of `adahop reproduce`, got {folder}, which is none")
    cells_in = cells_folder(cells)
    names = [name for name in EXPERIMENTS if name != "convergence"]
    if not any(o.facts is not None for name in names for o in outcomes(name, cells_in, Path(folder))):
        raise InputError(f"`folder` must hold results of `adahop reproduce`, got {folder} with none")
    page, loose = build(Path(folder), cells_in)
    write_whole(Path(output), page.encode())
    print(f"{output}: {len(page) / 1e6:.1f} MB")
    if loose:
        print(
            f"adahop: rows that differ from the paper must have a `note`, got none for {', '.join(loose)}",
            file=sys.stderr,
        )
        raise typer.Exit(1)
