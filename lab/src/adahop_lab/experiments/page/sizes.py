"""Score and variance against k: plots, and the order of the methods at one k."""

from __future__ import annotations

import statistics
from typing import Any

from adahop_lab.experiments.outcome import Outcome, by_dataset, label
from adahop_lab.experiments.page.html import Html, tag
from adahop_lab.experiments.page.scores import NONE, dataset_table

AT = 10  # the paper's k for this graph


def order(found: list[Outcome]) -> list[Html]:
    """For every data set and architecture the methods at k = 10, or without a k, best first."""
    parts: list[Any] = []
    for dataset, rows in by_dataset(found).items():
        for arch in ("residual", "plain"):
            mine = [o for o in rows if o.cell.settings.get("arch", "residual") == arch and o.cell.k in (AT, None)]
            if any(o.ours for o in mine):
                mine.sort(key=lambda o: -o.ours.mean if o.ours else 1.0)
                words = {
                    "Relative variance": lambda o: _noise(o, "relative"),
                    "over uniform": lambda o: _noise(o, "over_uniform"),
                }
                parts += [tag("h3", f"{label(dataset)}, {arch} GCN, k = {AT}"), dataset_table(mine, words)]
    return parts


def _noise(o: Outcome, key: str) -> str:
    """Of the last layer's sum; methods that draw subgraphs estimate none."""
    runs = [run["layers"][-1][key] for run in (o.facts or {"runs": []})["runs"] if run.get("layers")]
    known = [value for value in runs if value is not None]
    return f"{statistics.fmean(known):.2g}" if known else NONE
