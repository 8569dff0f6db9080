"""The experiments: every table and figure, made of cells that run alone, in any order, and go on after a kill."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Experiment:
    """`folders` is where its cells are; one that measures nothing of its own looks at the tables' runs."""

    name: str
    short: str
    title: str
    folders: tuple[str, ...]
    measure: str = "scores"
    alone: bool = False  # a run at a time, whatever `jobs` says: seconds are what it measures


TABLES = ("table2", "table3")
EXPERIMENTS = {
    e.name: e
    for e in (
        Experiment("table2", "Table 2", "Table 2: GCN", ("table2",)),
        Experiment("table3", "Table 3", "Table 3: attention", ("table3",)),
        Experiment("convergence", "Convergence", "Convergence on validation", TABLES),
        Experiment(
            "sample-size", "Sample size", "Score and variance against sample size", ("sample-size",), "sample-size"
        ),
        Experiment("ogb", "OGB", "ogbn-proteins with GeniePath", ("ogb",)),
        Experiment("regret", "Regret", "Variance over visits", ("regret",), "regret"),
        Experiment("timing", "Timing", "Seconds an epoch", TABLES, "timing", alone=True),
    )
}
