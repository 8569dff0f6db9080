"""Cell: one row of a table on one data set, read from `runs/<experiment>/<dataset>/<row>.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from adahop.checks import InputError, count
from adahop.config import Config
from adahop.methods import METHODS
from adahop_lab.experiments.plain import read

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
    def file(self) -> str:
        """The name of its file, which a row has in common with those of another k."""
        return self.row if self.k is None else self.row.removesuffix(f"-k{self.k}")

    def config(self, device: str = "cpu", **changes: Any) -> Config:
        settings = {**self.settings, **changes}
        return Config(**{**settings, "sizes": tuple(settings.get("sizes", (10, 10)))}, device=device)

    def why_not(self) -> str:
        """Why this library cannot run it at all; empty where it can."""
        method = self.settings.get("method")
        return "" if method is None or method in METHODS else f"method '{method}' is not known here"


def parse(path: Path) -> list[Cell]:
    """The cells of a file: one, or one for each of its `ks`."""
    said = read(path)
    for key in said:
        if key not in OWN and key not in SETTINGS:
            raise InputError(f"a key of {path} must be one of {', '.join((*OWN, *SETTINGS))}, got '{key}'")
    if "name" not in said:
        raise InputError(f"{path} must have a `name`, got none")
    dataset, experiment = path.parent.name, path.parent.parent.name
    cell = Cell(
        experiment, dataset, path.stem, str(said["name"]), {k: v for k, v in said.items() if k in SETTINGS},
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
    """Every cell of an experiment's folder, on these data sets; the order is that of the file names."""
    home = folder / experiment
    known = sorted(p.name for p in home.iterdir() if p.is_dir()) if home.is_dir() else []
    return [
        cell for name in known if datasets is None or name in datasets
        for path in sorted((home / name).glob("*.yaml")) for cell in parse(path)
    ]  # fmt: skip


def cells_folder(given: str | None) -> Path:
    """The folder of cell files: the given one, `runs` here, or the one beside the source."""
    beside = Path(__file__).parents[3] / "runs"
    tries = [Path(given)] if given is not None else [Path("runs"), beside]
    for folder in tries:
        if any(folder.glob("*/*/*.yaml")):
            return folder
    raise InputError(f"`cells` must be a folder of <experiment>/<dataset>/<row>.yaml files, got {tries[0]}")
