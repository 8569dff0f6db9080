"""Cell: one row of a table on one data set, read from `runs/<experiment>/<dataset>.json`.

{"common": {"epochs": 200, ...}, "rows": {"gcn-bs": {"name": "GCN-BS", "method": "bs", ...}, ...}}

A row has what is in `common` and what it says itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adahop.checks import InputError, count
from adahop.config import Config, as_said
from adahop.methods import METHODS

OWN = ("name", "runs", "metric", "note", "chosen", "ks", "per_k", "visits", "degree", "draws")
SETTINGS = tuple(name for name in Config.__dataclass_fields__ if name != "device")


@dataclass(frozen=True)
class Cell:
    """A method with a model on a data set: the settings, how many runs, and what a reader should know.

    `chosen` says how the settings came about, `note` why the scores differ from the paper's. `k` is the number drawn,
    where the experiment varies it.
    """

    experiment: str
    dataset: str
    row: str
    name: str
    settings: dict[str, Any]
    runs: int = 3
    metric: str | None = None
    note: str = ""
    chosen: str = ""
    k: int | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> Path:
        """Where its results lie, below the results' folder."""
        return Path(self.experiment, self.dataset, self.row)

    @property
    def line(self) -> str:
        """Its name in the file, which it shares with those of another k."""
        return self.row if self.k is None else self.row.removesuffix(f"-k{self.k}")

    def config(self, device: str = "cpu", **changes: Any) -> Config:
        settings = {**as_said(self.settings), **changes}  # a cell is what it was when its results were made
        return Config(**{**settings, "sizes": tuple(settings.get("sizes", (10, 10)))}, device=device)

    def why_not(self) -> str:
        """Why this library cannot run it at all; empty where it can."""
        method = self.settings.get("method")
        return "" if method is None or method in METHODS else f"method '{method}' is not known here"


def parse(path: Path) -> list[Cell]:
    """The cells of a file: one for each row, or for each of a row's `ks`."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = {row: {**found.get("common", {}), **own} for row, own in found["rows"].items()}
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        raise InputError(f"{path} must be JSON with `common` and `rows`, got {type(e).__name__}: {e}") from None
    return [cell for row, said in rows.items() for cell in _cells(path, row, said)]


def _cells(path: Path, row: str, said: dict[str, Any]) -> list[Cell]:
    for key in said:
        if key not in OWN and key not in SETTINGS:
            raise InputError(f"a key of {row} in {path} must be one of {', '.join((*OWN, *SETTINGS))}, got '{key}'")
    if "name" not in said:
        raise InputError(f"{row} in {path} must have a `name`, got none")
    cell = Cell(
        path.parent.name, path.stem, row, str(said["name"]), {k: v for k, v in said.items() if k in SETTINGS},
        count(said.get("runs", 3), 1, "runs"), said.get("metric"), said.get("note", ""), said.get("chosen", ""),
        more={k: v for k, v in said.items() if k in ("visits", "degree", "draws")},
    )  # fmt: skip
    if "ks" not in said:
        return [cell]
    return [_at(cell, count(k, 1, "ks"), said.get("per_k", [1, 1])) for k in said["ks"]]


def _at(cell: Cell, k: int, per_k: list[int]) -> Cell:
    sizes = [k * each for each in per_k]
    return replace(cell, row=f"{cell.row}-k{k}", k=k, settings={**cell.settings, "sizes": sizes})


def read_cells(folder: Path, experiment: str, datasets: list[str] | None = None) -> list[Cell]:
    """Every cell of an experiment, on these data sets; the order is that of the files."""
    paths = sorted((folder / experiment).glob("*.json"))
    return [cell for path in paths if datasets is None or path.stem in datasets for cell in parse(path)]


def cells_folder(given: str | None) -> Path:
    """The folder of cell files: the given one, `runs` here, or the one beside the source."""
    beside = Path(__file__).parents[3] / "runs"
    tries = [Path(given)] if given is not None else [Path("runs"), beside]
    for folder in tries:
        if any(folder.glob("*/*.json")):
            return folder
    raise InputError(f"`cells` must be a folder of <experiment>/<dataset>.json files, got {tries[0]}")
