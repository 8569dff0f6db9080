"""The plots as data: the page's script draws them."""

from __future__ import annotations

import statistics
from typing import Any

from adahop_lab.experiments.outcome import Outcome, by_dataset, label

Figure = dict[str, Any]


def _series(name: str, x: list[float], values: list[list[float]]) -> dict[str, Any]:
    """A line of means with a band of one standard deviation; `values` has a list for each x."""
    mean = [statistics.fmean(v) for v in values]
    std = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]
    tidy = lambda v: float(f"{v:.5g}")  # noqa: E731
    return {"name": name, "x": [tidy(v) for v in x], "y": [tidy(v) for v in mean], "s": [tidy(v) for v in std]}


def convergence(found: list[Outcome], table: str) -> list[Figure]:
    """Validation score over epochs and over seconds of training, a figure a data set."""
    out = []
    for dataset, rows in by_dataset(found).items():
        lines = [(o, *_ways(o)) for o in rows if o.facts is not None]
        if not lines:
            continue
        metric = lines[0][0].facts["metric"]  # type: ignore[index]
        epochs = [_series(o.cell.name, list(range(1, len(val) + 1)), val) for o, val, _ in lines]
        spent = [_series(o.cell.name, [statistics.fmean(t) for t in when], val) for o, val, when in lines if when]
        views = [{"label": "epochs", "x": "epoch", "y": f"validation {metric}", "series": epochs}]
        views.append({"label": "seconds", "x": "seconds of training", "y": f"validation {metric}", "series": spent})
        title = f"{label(dataset)}: validation along the way"
        out.append({"id": f"{table}-{dataset}-way", "title": title, "zoom": True, "views": views})
    return out


def _ways(o: Outcome) -> tuple[list[list[float]], list[list[float]]]:
    """For every epoch that all runs have: the validation scores, and the seconds trained until then."""
    assert o.facts is not None
    val = [run["history"]["val"] for run in o.facts["runs"]]
    when = [row["training"] for row in (o.times or {}).get("runs", []) if "training" in row]
    short = min(map(len, val))
    return [list(v) for v in zip(*(v[:short] for v in val), strict=True)], [
        list(v) for v in zip(*(v[:short] for v in when), strict=True)
    ]


def sample_size(found: list[Outcome]) -> list[Figure]:
    """For every data set and architecture, score and relative variance of the last layer against k."""
    out = []
    for dataset, rows in by_dataset(found).items():
        for arch in ("residual", "plain"):
            mine = [o for o in rows if o.facts is not None and o.facts["config"]["arch"] == arch and o.cell.k]
            if not mine:
                continue
            name = f"{arch.capitalize()} GCN"
            metric = mine[0].facts["metric"]  # type: ignore[index]
            kinds = (
                ("score", f"test {metric}", False),
                ("variance", "relative variance, last layer", True),
            )
            for kind, axis, log in kinds:
                view = {"label": kind, "x": "k", "y": axis, "xlog": True, "ylog": log, "series": _over_k(mine, kind)}
                out.append(
                    {"id": f"size-{dataset}-{arch}-{kind}", "title": f"{name}: {kind} against k", "views": [view]}
                )
    return out


def _over_k(rows: list[Outcome], kind: str) -> list[dict[str, Any]]:
    lines: dict[str, dict[int, list[float]]] = {}
    for o in rows:
        assert o.facts is not None and o.cell.k is not None
        runs = o.facts["runs"]
        if kind == "score":
            values = [run["test"] for run in runs]
        else:
            values = [run["layers"][-1]["relative"] for run in runs if run.get("layers")]
        if values:
            lines.setdefault(o.cell.name, {})[o.cell.k] = values
    return [_series(name, list(sorted(at)), [at[k] for k in sorted(at)]) for name, at in lines.items()]


def regret(found: list[Outcome]) -> list[Figure]:
    """Variance over visits, relative to the oracle's odds and as it is."""
    rows = [o for o in found if o.facts is not None]
    if not rows:
        return []
    views = []
    kinds = (("effective", "part that q decides, over the oracle's"), ("variance", "E|estimate − truth|²"))
    for kind, axis in kinds:
        lines = []
        for o in rows:
            runs = [run["rows"] for run in o.facts["runs"]]  # type: ignore[index]
            marks = [row["visits"] + 1 for row in runs[0]]
            lines.append(_series(o.cell.name, marks, [[run[i][kind] for run in runs] for i in range(len(marks))]))
        views.append({"label": kind, "x": "visits + 1", "y": axis, "xlog": True, "series": lines})
    return [{"id": "regret-plot", "title": "Stars with fixed rewards", "views": views}]
