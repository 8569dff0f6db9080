"""The list of experiments, and the order of their rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from adahop_lab.experiments import EXPERIMENTS
from adahop_lab.experiments.cells import Cell, read_cells

ORDER = (
    *("graphsage", "fastgcn", "ladies", "as-gcn", "s-gcn", "clustergcn", "graphsaint", "gcn-bs", "gcn-bs-m"),
    *("thanos", "bliss", "labor", "adahop", "as-gat", "graphsaint-gat", "gat-bs", "gat-bs-m", "gp-bs", "gp-bs-m"),
    *("adahop-gat", "uniform", "bs", "bs-m", "bs-paper", "bs-m-paper", "tracked", "oracle", "oracle-without"),
)
DATASETS = (
    *("cora", "pubmed", "ppi", "reddit", "flickr", "ppi_rebuilt_labels", "amazon_computers", "tolokers"),
    *("blogcatalog_attr", "flickr_small_attr", "coauthor_physics", "ogbn-proteins", "stars"),
)


def cells_of(name: str, folder: Path, datasets: list[str] | None = None) -> list[Cell]:
    """An experiment's cells, data set by data set, rows in the paper's order."""
    experiment = EXPERIMENTS[name]
    found = [cell for part in experiment.folders for cell in read_cells(folder, part, datasets)]
    if experiment.measure == "timing":
        found = [replace(cell, experiment=name, runs=1) for cell in found]
    return sorted(found, key=_rank)


def _rank(cell: Cell) -> tuple[Any, ...]:
    where = DATASETS.index(cell.dataset) if cell.dataset in DATASETS else len(DATASETS)
    plain = cell.row.split("-k")[0].removeprefix("plain-").removeprefix("residual-")
    row = ORDER.index(plain) if plain in ORDER else len(ORDER)
    return cell.experiment, where, cell.dataset, cell.row.startswith("residual-"), row, cell.k or 0, cell.row


def measure_of(cell: Cell) -> str:
    return EXPERIMENTS[cell.experiment].measure


PAPER: dict[str, Any] = json.loads((Path(__file__).parent / "paper.json").read_text(encoding="utf-8"))


def printed(cell: Cell) -> tuple[float, float] | None:
    """(mean, standard deviation) that the paper prints for this cell."""
    found = PAPER["scores"].get(cell.experiment, {}).get(cell.row, {}).get(cell.dataset)
    return None if found is None else (found[0], found[1])
