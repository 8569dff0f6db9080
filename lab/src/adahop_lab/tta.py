"""`adahop reproduce tta`, time to accuracy: seconds of training until a share of the best validation score.

Every candidate has the same trials on validation; test scores are those of other seeds.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from adahop.checks import count
from adahop.cli.tables import show_table
from adahop.config import Config
from adahop.records import Records
from adahop_lab.candidates import NAMES, TUNING, Lines, Row, chosen, count_seconds, train, tuned
from adahop_lab.experiments.find import fetch, roots
from adahop_lab.plots import convergence

DATASETS = "cora,amazon_computers,tolokers"
MARKS = (0.95, 0.99, 1.0)  # shares of the best candidate's mean validation score


def start(
    datasets: str | None, candidates: str | None, runs: int, out: str, data: str | None, device: str, epochs: int,
    tries: int, clock: str = "wall",
) -> None:  # fmt: skip
    """Tune every candidate on validation with equal trials, run it with other seeds, show and draw."""
    count_seconds(clock)
    ways, seeds = chosen(candidates), range(count(runs, 1, "runs"))
    tuning = TUNING[: count(tries, 1, "tries")]
    base = Config(hidden=64, epochs=epochs, batch_size=256, device=device)
    lines = Lines(Path(out) / "tta.jsonl", NAMES)
    for name in filter(None, map(str.strip, (datasets or DATASETS).split(","))):
        loaded = fetch(name, roots(data))
        found: dict[str, list[Row]] = {}
        for way in ways:
            point = tuned(lines, name, loaded, way, base, tuning)
            found[way.name] = [train(lines, name, loaded, way, base, point, seed) for seed in seeds]
        show(Console(), name, loaded.metric, found)
        Records(out).json(f"tta-{name}.json", {"dataset": name, "metric": loaded.metric, "rows": table(found)})
        convergence({way: [row["history"] for row in rows] for way, rows in found.items()}, loaded.metric,
                    Path(out) / f"tta-{name}")  # fmt: skip


def reached(history: list[Row], mark: float) -> float | None:
    """Seconds of training after which a run's best validation score was that high; None: never."""
    return next((row["seconds"] for row in history if row["val"] >= mark), None)


def table(found: dict[str, list[Row]]) -> list[Row]:
    """A row per candidate; a mark counts as reached where more than half of the runs reached it: their median."""
    means = {way: statistics.fmean(row["val"] for row in rows) for way, rows in found.items()}
    best = max(means.values())
    out = []
    for way, rows in found.items():
        to: dict[str, float | None] = {}
        for mark in MARKS:
            times = [reached(row["history"], mark * best) for row in rows]
            known = sorted(t for t in times if t is not None)
            to[f"to {mark:.0%}"] = known[len(times) // 2] if len(known) > len(times) // 2 else None
        out.append({
            "candidate": way, "val": means[way], "test": statistics.fmean(row["test"] for row in rows), **to,
            "training": statistics.fmean(row["history"][-1]["seconds"] for row in rows),
            "whole run": statistics.fmean(row["seconds"] for row in rows),
            "megabytes": statistics.fmean(row["megabytes"] for row in rows),
            "lr": rows[0]["lr"], "dropout": rows[0]["dropout"], "runs": len(rows),
        })  # fmt: skip
    return sorted(out, key=lambda row: -row["val"])


def show(console: Console, dataset: str, metric: str, found: dict[str, list[Row]]) -> None:
    rows = table(found)
    heads = [k for k in rows[0] if k not in ("runs", "candidate", "lr", "dropout")]
    view = Table(title=f"{dataset}: {metric}, {rows[0]['runs']} seeds; seconds", box=None, pad_edge=False)
    for head in ("candidate", *heads):
        view.add_column(head, no_wrap=head == "candidate")
    for row in rows:
        view.add_row(row["candidate"], *("–" if row[k] is None else f"{row[k]:.4g}" for k in heads))
    show_table(console, view)
