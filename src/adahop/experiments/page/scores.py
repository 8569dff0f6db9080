"""The score tables: ours beside the paper's, every run as a dot, and what may be said of the differences."""

from __future__ import annotations

from typing import Any

from adahop.experiments.outcome import NOT_RUN, Outcome, against, best, by_dataset, label, said
from adahop.experiments.page.html import Html, tag
from adahop.experiments.stats import Paired, scores

WIDE, HIGH = 150, 18  # of the strip of runs


def overview(found: list[Outcome]) -> Html:
    """The table as the paper has it: a row a method, a column a data set; the paper's figure small below ours."""
    groups = by_dataset(found)
    names = {o.cell.row: o.cell.name for o in found}
    tops = {dataset: best(rows) for dataset, rows in groups.items()}
    at = {(o.cell.row, o.cell.dataset): o for o in found}
    head = tag("tr", tag("th", "Method", scope="col"), [tag("th", label(d), scope="col") for d in groups])
    body = [
        tag("tr", tag("th", name, scope="row"), [_small(at.get((row, d)), tops[d]) for d in groups])
        for row, name in names.items()
    ]
    caption = tag("caption", "Mean test score, and below it the paper's. The best of a column is bold.")
    return tag("div", tag("table", caption, tag("thead", head), tag("tbody", body), class_="matrix"), class_="scroll",
               tabindex="0", role="region", aria_label="Overview table")  # fmt: skip


def _small(o: Outcome | None, top: Outcome | None) -> Html:
    if o is None:
        return tag("td", "–")
    paper = None if o.paper is None else tag("small", f"paper {o.paper[0]:.3f}")
    if o.ours is None:
        return tag("td", tag("span", NOT_RUN, class_="absent"), paper)
    return tag("td", tag("span", f"{o.ours.mean:.4f}", class_="best" if o is top else None), paper)


def dataset_table(rows: list[Outcome]) -> Html:
    """A row a method: mean and deviation, the runs, the paper's, both differences."""
    top = best(rows)
    span = _span(rows)
    heads = ("Method", "Ours", "Runs", "Paper", "Ours − paper", "Best − this, 95 % interval")
    body = [_row(o, top, span) for o in rows]
    table = tag("table", tag("thead", tag("tr", [tag("th", h, scope="col") for h in heads])), tag("tbody", body))
    words = [tag("p", sentence) for sentence in said(rows, numbers=False)]
    how = "Differences are paired by seed; each interval (t) stands by itself." if words else None
    return tag("div", table, words, tag("p", how, class_="fine") if how else None, _far(rows), class_="cards")


def _row(o: Outcome, top: Outcome | None, span: tuple[float, float]) -> Html:
    name = tag("th", o.cell.name, scope="row")
    paper = "–" if o.paper is None else f"{o.paper[0]:.3f} ± {o.paper[1]:.3f}"
    if o.ours is None:
        none = tag("span", NOT_RUN, class_="absent")
        cells = (("Ours", none), ("Runs", "–"), ("Paper", paper), ("Ours − paper", "–"), ("Best − this", "–"))
        return tag("tr", name, [_labelled(k, v) for k, v in cells])
    gap = "–" if o.difference is None else f"{o.difference:+.3f}"
    mark = tag("span", " *", class_="bad" if o.unexplained else None) if o.far else None
    full: tuple[tuple[str, Any], ...] = (
        ("Ours", tag("span", o.ours.text(), class_="best" if o is top else None)),
        ("Runs", strip(o, span)),
        ("Paper", paper),
        ("Ours − paper", [gap, mark]),
        ("Best − this", "the best" if o is top else _paired(top, o)),
    )
    return tag("tr", name, [_labelled(k, v) for k, v in full])


def _labelled(head: str, value: Any) -> Html:
    """A cell that says its column's head where the table is a list; empty ones are then left out."""
    return tag("td", value, data_label=head, class_="none" if value in ("–", ["–", None]) else None)


def _paired(top: Outcome | None, o: Outcome) -> Any:
    test: Paired | None = None if top is None else against(top, o)
    if test is None:
        return "too few seeds"
    text = f"{test.difference:+.4f} [{test.low:+.4f}, {test.high:+.4f}]"
    return text if test.apart else [text, tag("span", " not told apart", class_="fine")]


def _span(rows: list[Outcome]) -> tuple[float, float]:
    values = [v for o in rows if o.facts is not None and o.ours for v in scores(o.facts).values()]
    values += [o.paper[0] for o in rows if o.paper is not None and o.ours]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = max(0.05 * (high - low), 1e-4)
    return low - room, high + room


def strip(o: Outcome, span: tuple[float, float]) -> Html:
    """Every run a dot, the mean a line, the paper's mean a diamond."""
    assert o.facts is not None and o.ours is not None
    low, high = span

    def x(value: float) -> float:
        return round(4 + (WIDE - 8) * (value - low) / (high - low), 1)

    dots = [tag("circle", cx=x(v), cy=HIGH / 2, r=2.5, class_="dot") for v in scores(o.facts).values()]
    mean = tag("line", x1=x(o.ours.mean), x2=x(o.ours.mean), y1=2, y2=HIGH - 2, class_="mean")
    paper = None
    if o.paper is not None:
        paper = tag("path", d=f"M{x(o.paper[0])} 4l5 5l-5 5l-5 -5z", class_="paper")
    words = f"{o.ours.runs} runs, mean {o.ours.mean:.4f}" + ("" if o.paper is None else f", paper {o.paper[0]:.3f}")
    return tag("svg", tag("title", words), dots, mean, paper, viewBox=f"0 0 {WIDE} {HIGH}", width=WIDE, height=HIGH,
               role="img", aria_label=words, class_="strip")  # fmt: skip


def _far(rows: list[Outcome]) -> Html | None:
    """Why rows differ from the paper by more than two standard deviations; rows with one reason share it."""
    groups: dict[str, list[Outcome]] = {}
    for o in rows:
        if o.far:
            groups.setdefault(o.cell.note, []).append(o)
    if not groups:
        return None
    items = []
    for note, some in groups.items():
        names = ", ".join(f"{o.cell.name} ({o.difference:+.3f})" for o in some)
        reason = note or "Unexplained: the cell's file has no note on it."
        items.append(tag("li", tag("b", names), ": ", tag("span", reason, class_=None if note else "bad unexplained")))
    head = "* More than two standard deviations (the larger of ours and the paper's) from the paper, and why:"
    return tag("div", tag("p", head), tag("ul", items), class_="why")
