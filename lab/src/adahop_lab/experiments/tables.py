"""Tables for the terminal: each experiment's numbers, with the paper's beside them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from adahop.cli.tables import show_table
from adahop_lab.experiments.catalogue import EXPERIMENTS
from adahop_lab.experiments.outcome import NOT_RUN, Outcome, best, by_dataset, label, outcomes, said, title


def show(
    console: Console, names: list[str], folder: Path, out: Path, datasets: list[str], reasons: dict[Path, str]
) -> None:
    """Every experiment that was asked for; `reasons` say why a cell is not run here."""
    for name in names:
        found = outcomes(name, folder, out, datasets)
        if found:
            KINDS.get(name, scores)(console, name, found)
    for reason in sorted(set(reasons.values())):
        which = sorted({str(place.parent) for place, why in reasons.items() if why == reason})
        console.print(f"{NOT_RUN} ({reason}): {', '.join(which)}", highlight=False, markup=False, soft_wrap=True)


def scores(console: Console, name: str, found: list[Outcome]) -> None:
    """A table a data set: ours, the paper's, the difference; the best is bold."""
    for dataset, rows in by_dataset(found).items():
        top = best(rows)
        metric = next((o.facts["metric"] for o in rows if o.facts), None)
        head = f"{title(name)} on {label(dataset)}" + (f", test {metric}" if metric else "")
        table = Table("method", "ours", "runs", "paper", "difference", title=head)
        for o in rows:
            paper = "" if o.paper is None else f"{o.paper[0]:.3f} ± {o.paper[1]:.3f}"
            if o.ours is None:
                table.add_row(o.cell.name, NOT_RUN, "", paper, "", style="dim")
                continue
            gap = "" if o.difference is None else f"{o.difference:+.3f}" + ("*" if o.far else "")
            table.add_row(o.cell.name, o.ours.text(), str(o.ours.runs), paper, gap, style="bold" if o is top else "")
        show_table(console, table)
        if any(o.far for o in rows):
            console.print("* more than two standard deviations; `adahop report` says why", highlight=False)
        for sentence in said(rows):
            console.print(sentence, highlight=False, soft_wrap=True)
        if top is not None:
            console.print("(differences paired by seed, 95 % t-intervals, each by itself)", highlight=False)


def convergence(console: Console, name: str, found: list[Outcome]) -> None:
    """How soon a method's validation score is within one percent of its own best."""
    for dataset, rows in by_dataset(found).items():
        table = Table(
            "method", "best val", "epochs to 99 %", "seconds to 99 %", title=f"{title(name)}, {label(dataset)}"
        )
        for o in rows:
            reached = [_reached(run, o.times or {}) for run in o.facts["runs"]] if o.facts else []
            if not reached:
                table.add_row(o.cell.name, NOT_RUN, style="dim")
                continue
            val, epochs, seconds = (statistics.fmean(r[i] for r in reached) for i in range(3))
            table.add_row(o.cell.name, f"{val:.4f}", f"{epochs:.1f}", f"{seconds:.2f}")
        show_table(console, table)


def _reached(run: dict[str, Any], times: dict[str, Any]) -> tuple[float, int, float]:
    val = run["history"]["val"]
    at = next(i for i, v in enumerate(val) if v >= 0.99 * max(val))
    spent = next(
        (row["training"] for row in times.get("runs", ()) if row["seed"] == run["seed"]), [float("nan")] * len(val)
    )
    return max(val), at + 1, spent[at]


def sizes(console: Console, name: str, found: list[Outcome]) -> None:
    """Score and last layer's relative variance, a column a k, a table an architecture."""
    for dataset, rows in by_dataset(found).items():
        for arch in ("residual", "plain"):
            mine = [o for o in rows if o.cell.settings.get("arch", "residual") == arch]
            ks = sorted({o.cell.k for o in mine if o.cell.k is not None})
            head = f"{title(name)}, {label(dataset)}, {arch}: test score (variance)"
            table = Table("method", *(f"k = {k}" for k in ks), title=head)
            lines: dict[str, dict[int | None, str]] = {}
            for o in mine:
                lines.setdefault(o.cell.name, {})[o.cell.k] = _with_noise(o)
            for method, cells in lines.items():
                table.add_row(method, *([cells[None]] if None in cells else [cells.get(k, "") for k in ks]))
            if lines:
                show_table(console, table)


def _with_noise(o: Outcome) -> str:
    if o.facts is None or o.ours is None:
        return NOT_RUN
    noise = [run["layers"][-1]["relative"] for run in o.facts["runs"] if run.get("layers")]
    return f"{o.ours.mean:.4f}" + (f" ({statistics.fmean(noise):.2g})" if noise else "")


def timing(console: Console, name: str, found: list[Outcome]) -> None:
    for dataset, rows in by_dataset(found).items():
        table = Table("method", "seconds an epoch", title=f"{title(name)}, {label(dataset)}")
        for o in rows:
            absent = o.epoch is None
            table.add_row(o.cell.name, NOT_RUN if absent else f"{o.epoch:.3f}", style="dim" if absent else "")
        show_table(console, table)


def regret(console: Console, name: str, found: list[Outcome]) -> None:
    """q's part of the variance over the oracle's, by visits; and the theorem's sum beside its bound."""
    for rows in by_dataset(found).values():
        all_marks = next(([row["visits"] for row in o.facts["runs"][0]["rows"]] for o in rows if o.facts), [])
        marks = {i: t for i, t in enumerate(all_marks) if t in (0, 10, 100, 1000, all_marks[-1])}
        heads = (f"t = {t}" for t in marks.values())
        table = Table("method", *heads, "mean V", "bound", title="Effective variance over the oracle's", box=None)
        for o in rows:
            runs = o.facts["runs"] if o.facts else []
            if not runs:
                table.add_row(o.cell.name, NOT_RUN, style="dim")
                continue
            part = [statistics.fmean(run["rows"][i]["effective"] for run in runs) for i in marks]
            ends = (statistics.fmean(run[key] for run in runs) for key in ("mean", "bound"))
            table.add_row(o.cell.name, *(f"{v:.2f}" for v in part), *(f"{v:.3g}" for v in ends))
        show_table(console, table)


KINDS: dict[str, Callable[[Console, str, list[Outcome]], None]] = {
    "convergence": convergence, "sample-size": sizes, "timing": timing, "regret": regret,
}  # fmt: skip
assert set(KINDS) < set(EXPERIMENTS)
