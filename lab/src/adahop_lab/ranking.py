"""What a comparison says: the methods best first, and whether the first two differ by more than luck."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from adahop.cli.tables import show_table
from adahop.methods import METHODS
from adahop.train import Config
from adahop_lab.experiments.stats import paired

SURE = 0.05  # below this the best two count as different
PAIRS = 3  # seeds that a paired test needs at least


def best_two(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The paired t-test of the best two over the seeds both finished; None where there are too few."""
    if len(rows) < 2:
        return None
    one, two = ({run["seed"]: run["test"] for run in row["runs"]} for row in rows[:2])
    test = paired(one, two)
    if test is None or test.seeds < PAIRS:
        return None
    names = [row["method"] for row in rows[:2]]
    return {"methods": names, "seeds": test.seeds, "difference": test.difference, "p": test.p}


def show(console: Console, summary: dict[str, Any], configs: dict[str, Config]) -> None:
    """The table, best first, and what to make of its first two rows."""
    runs = max(len(row["runs"]) for row in summary["methods"])
    table = Table("method", "sizes", f"test {summary['metric']}", "val", "steps", "seconds a run")
    for row in summary["methods"]:
        mine, config = row["runs"], configs[row["method"]]
        sizes = "" if METHODS[config.method].family == "subgraph" else ",".join(map(str, config.sizes))
        spread = f" ± {row['test_std']:.4f}" if runs > 1 else ""
        short = f" ({len(mine)} runs)" if len(mine) < runs else ""
        table.add_row(
            row["method"], sizes, f"{row['test_mean']:.4f}{spread}{short}",
            f"{row['val_mean']:.4f}", f"{statistics.fmean(r['steps'] for r in mine):.0f}",
            f"{statistics.fmean(r['seconds'] for r in mine):.2f}",
        )  # fmt: skip
    show_table(console, table)
    for gone in summary["failed"]:
        console.print(f"failed: {gone['method']}, seed {gone['seed']}: {gone['reason']}", highlight=False, markup=False)
    if len(summary["methods"]) > 1:
        console.print(verdict(summary), highlight=False)


def verdict(summary: dict[str, Any]) -> str:
    """One sentence on the best two."""
    test = summary["best_two"]
    if test is None:
        return f"Fewer than {PAIRS} seeds in common: whether the best two differ cannot be tested."
    one, two = test["methods"]
    how = f"{test['difference']:+.4f} on average, p = {test['p']:.2g} (paired t-test over {test['seeds']} seeds)"
    if test["p"] < SURE:
        return f"{one} is ahead of {two}: {how}."
    return f"{one} and {two} can't be told apart: {how}."
