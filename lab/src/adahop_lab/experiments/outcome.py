"""Outcomes: cells beside what was measured of them, for tables in the terminal and on the page."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adahop_lab.experiments.catalogue import EXPERIMENTS, cells_of, printed
from adahop_lab.experiments.cells import Cell
from adahop_lab.experiments.stats import Paired, Summary, far, paired, scores, summary, verdicts
from adahop_lab.experiments.store import Store

NOT_RUN = "not run here"
LABELS = {
    "ppi": "PPI", "ppi_rebuilt_labels": "PPI file (rebuilt labels)", "blogcatalog_attr": "BlogCatalog",
    "flickr_small_attr": "Flickr (small)", "coauthor_physics": "Physics", "amazon_computers": "Computers",
    "ogbn-proteins": "ogbn-proteins",
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """A cell, and its results where there are any; never a number that was not measured."""

    cell: Cell
    facts: dict[str, Any] | None
    times: dict[str, Any] | None

    @property
    def ours(self) -> Summary | None:
        if self.facts is None or not all("test" in run for run in self.facts["runs"]):
            return None
        return summary([run["test"] for run in self.facts["runs"]])

    @property
    def epoch(self) -> float | None:
        """Median seconds an epoch of the timing experiment; its older runs have drawing and the model's step apart."""
        runs = [run for run in (self.times or {"runs": []})["runs"] if "epoch" in run or "sampling" in run]
        spent = [
            run.get("epoch") or [a + b for a, b in zip(run["sampling"], run["model"], strict=True)] for run in runs
        ]
        return statistics.median(t for run in spent for t in run) if spent else None

    @property
    def paper(self) -> tuple[float, float] | None:
        return printed(self.cell)

    @property
    def difference(self) -> float | None:
        return None if self.ours is None or self.paper is None else self.ours.mean - self.paper[0]

    @property
    def far(self) -> bool:
        return self.ours is not None and far(self.ours, self.paper)

    @property
    def unexplained(self) -> bool:
        """It differs from the paper, and no note says why."""
        return self.far and not self.cell.note


def outcomes(name: str, folder: Path, out: Path, datasets: list[str] | None = None) -> list[Outcome]:
    """Every cell of an experiment, whether it was run or not."""
    store = Store(out)
    found = []
    for cell in cells_of(name, folder, datasets):
        done = store.cell(cell)
        found.append(Outcome(cell, *(done or (None, None))))
    return found


def by_dataset(found: list[Outcome]) -> dict[str, list[Outcome]]:
    out: dict[str, list[Outcome]] = {}
    for outcome in found:
        out.setdefault(outcome.cell.dataset, []).append(outcome)
    return out


def label(dataset: str) -> str:
    return LABELS.get(dataset, dataset.replace("_", " ").capitalize())


def best(found: list[Outcome]) -> Outcome | None:
    """The highest mean of those that were run."""
    run = [(o.ours.mean, -i, o) for i, o in enumerate(found) if o.ours is not None]
    return max(run)[2] if run else None


def against(top: Outcome, other: Outcome) -> Paired | None:
    assert top.facts is not None and other.facts is not None
    return paired(scores(top.facts), scores(other.facts))


def said(found: list[Outcome], numbers: bool = True) -> list[str]:
    """The highest mean against each of the others: who is behind, and who cannot be told apart."""
    top = best(found)
    if top is None:
        return []
    others = {o.cell.name: against(top, o) for o in found if o is not top and o.ours is not None}
    return verdicts(top.cell.name, others, numbers)


def title(name: str) -> str:
    return EXPERIMENTS[name].title
