"""Where results lie. A run that is done is a whole file; a data set's cells that are done are one file.

<out>/<experiment>/<dataset>.json          settings, scores, what they were made with: the same on every run
<out>/<experiment>/<dataset>.times.json    seconds and machine: never the same
<out>/<experiment>/.<dataset>/<row>/       runs of a cell that is not done yet
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adahop.checks import InputError
from adahop.records import Records, json_text, write_whole
from adahop_lab.experiments.cells import Cell

Row = dict[str, Any]
ABOUT = ("metric", "data", "config")


class Store:
    """The results' folder."""

    def __init__(self, out: str | Path):
        self.out = Path(out)

    def files(self, cell: Cell) -> tuple[Path, Path]:
        home = self.out / cell.experiment
        return home / f"{cell.dataset}.json", home / f"{cell.dataset}.times.json"

    def pending(self, cell: Cell) -> Path:
        return self.out / cell.experiment / f".{cell.dataset}" / cell.row

    def cell(self, cell: Cell) -> tuple[Row, Row] | None:
        """(facts, times) of a cell that is done, for however many runs."""
        facts, times = (_rows(path).get(cell.row) for path in self.files(cell))
        return None if facts is None else (facts, times or {"runs": []})

    def keep(self, cell: Cell, name: str, facts: Row, times: Row) -> None:
        """A run that is done; the facts come last, so that a run with facts has times."""
        home = Records(self.pending(cell)).folder
        _write(home / f"{name}.times.json", times)
        _write(home / f"{name}.json", facts)

    def kept(self, cell: Cell, name: str) -> tuple[Row, Row] | None:
        facts, times = (_read(self.pending(cell) / f"{name}{end}") for end in (".json", ".times.json"))
        return None if facts is None else (facts, times or {})

    def runs(self, cell: Cell, settings: Row) -> dict[int, tuple[Row, Row]]:
        """Every run so far with these settings, by its seed: those of the cell's file, and those not joined yet."""
        done = self.cell(cell)
        found: dict[int, tuple[Row, Row]] = {}
        if done is not None and done[0]["settings"] == settings:
            times = {row["seed"]: row for row in done[1]["runs"]}
            made = {seed: part["with"] for part in done[0]["made"] for seed in part["seeds"]}
            about = {key: done[0][key] for key in ABOUT}
            for row in done[0]["runs"]:
                own = {"with": made[row["seed"]], "about": about}
                found[row["seed"]] = ({**row, **own}, times.get(row["seed"], {}))
        for path in sorted(self.pending(cell).glob("seed-*[0-9].json")):
            run = self.kept(cell, path.stem)
            if run is not None and run[0]["settings"] == settings:
                facts = {k: v for k, v in run[0].items() if k != "settings"}
                found.setdefault(facts["seed"], (facts, run[1]))
        return found

    def join(self, cell: Cell, settings: Row, grid: list[Row] | None) -> None:
        """All runs of a cell into its data set's file; the parts go once they are there."""
        runs = dict(sorted(self.runs(cell, settings).items()))
        made: list[Row] = []
        for seed, (facts, _) in runs.items():
            if not made or made[-1]["with"] != facts["with"]:
                made.append({"seeds": [], "with": facts["with"]})
            made[-1]["seeds"].append(seed)
        rows = [{k: v for k, v in facts.items() if k not in ("with", "about")} for facts, _ in runs.values()]
        about = next(iter(runs.values()))[0]["about"]
        head = {"row": cell.row, "name": cell.name}
        facts = {**head, "settings": settings, **about, "grid": grid, "made": made, "seeds": list(runs), "runs": rows}
        score, spent_on = self.files(cell)
        with _locked(score.parent):
            _put(spent_on, cell, {**head, "runs": [spent for _, spent in runs.values()]})
            _put(score, cell, facts)
        self.clear(cell)

    def clear(self, cell: Cell) -> None:
        """The parts of a cell, and what a killed writer left of one."""
        home = self.pending(cell)
        for path in (*home.glob("*"), *home.glob(".*.part")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # absent, or with another cell's parts in it
            home.rmdir()
            home.parent.rmdir()

    def clash(self, cell: Cell, settings: Row) -> None:
        """Results of other settings are never written over unasked."""
        done = self.cell(cell)
        if done is not None and done[0]["settings"] != settings:
            gone = {k for k in {**settings, **done[0]["settings"]} if settings.get(k) != done[0]["settings"].get(k)}
            raise InputError(
                f"`out` must hold no results of {cell.place} with other settings, got {', '.join(sorted(gone))} "
                f"different in {self.files(cell)[0]}; --renew runs such cells anew"
            )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One command at a time changes the files of a folder; the system lets go when a process dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _put(path: Path, cell: Cell, row: Row) -> None:
    """The file with this row in it, rows by name; whole or as before."""
    rows = {**_rows(path), row["row"]: row}
    ordered = [rows[name] for name in sorted(rows)]
    _write(path, {"experiment": cell.experiment, "dataset": cell.dataset, "rows": ordered})


def _write(path: Path, value: Row) -> None:
    """JSON with one line per key and per row of a list of rows, for short files and readable diffs."""
    Records(path.parent)
    write_whole(path, ("{\n" + ",\n".join(_line(k, v) for k, v in value.items()) + "\n}\n").encode())


def _line(key: str, value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        return f"  {json_text(key)}: [\n" + ",\n".join(f"    {json_text(row)}" for row in value) + "\n  ]"
    return f"  {json_text(key)}: {json_text(value)}"


def _rows(path: Path) -> dict[str, Row]:
    """A file's rows by name; none where there is no file."""
    found = _read(path)
    return {} if found is None else {row["row"]: row for row in found["rows"]}


def _read(path: Path) -> Row | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as e:
        raise InputError(f"{path} must hold JSON, got {e}") from None
