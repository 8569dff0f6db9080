"""The score tables: ours beside the paper's, every run as a dot, and what may be said of the differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adahop_lab.experiments.outcome import NOT_RUN, Outcome, against, best, by_dataset, label, said
from adahop_lab.experiments.page.html import Html, scrolled, tag, wide
from adahop_lab.experiments.stats import Paired, scores

NONE = "–"
WIDE, HIGH = 150, 18  # of the strip of runs


def overview(found: list[Outcome]) -> Html:
    """The table as the paper has it: a row a method, a column a data set; the paper's figure small below ours."""
    groups = by_dataset(found)
    names = {o.cell.row: o.cell.name for o in found}
    tops = {dataset: best(rows) for dataset, rows in groups.items()}
    at = {(o.cell.row, o.cell.dataset): o for o in found}
    head = tag(
        "tr", tag("th", "Method", scope="col"), [tag("th", _place(rows), scope="col") for rows in groups.values()]
    )
    body = [
        tag("tr", tag("th", name, scope="row"), [_small(at.get((row, d)), tops[d]) for d in groups])
        for row, name in names.items()
    ]
    caption = tag("caption", "Mean test score, and below it the paper's. The best of a column is bold.")
    return scrolled(tag("table", caption, tag("thead", head), tag("tbody", body), class_="matrix"), "Overview table")


def anchor(o: Outcome) -> str:
    """The name of the part of the page that a data set has below a table."""
    return f"{o.cell.experiment}-{o.cell.dataset}"


def _place(rows: list[Outcome]) -> Html | str:
    """A data set's name, which leads to its part of the page where there is one."""
    name = label(rows[0].cell.dataset)
    return tag("a", name, href=f"#{anchor(rows[0])}") if any(o.facts for o in rows) else name


def _small(o: Outcome | None, top: Outcome | None) -> Html:
    if o is None:
        return tag("td", "–")
    paper = None if o.paper is None else tag("small", f"paper {o.paper[0]:.3f}")
    if o.ours is None:
        return tag("td", tag("span", NOT_RUN, class_="absent"), paper)
    return tag("td", tag("span", f"{o.ours.mean:.4f}", class_="best" if o is top else None), paper)


def dataset_table(rows: list[Outcome], more: dict[str, Callable[[Outcome], str]] | None = None) -> Html:
    """A row a method: mean and deviation, the runs, the paper's where it has any, the differences; `more` columns."""
    top, span = best(rows), _span(rows)
    columns: dict[str, Callable[[Outcome], Any]] = {
        "Ours": lambda o: tag("span", o.ours.text() if o.ours else NOT_RUN, class_=_kind(o, top)),
        "Runs": lambda o: strip(o, span) if o.ours else NONE,
    }
    if any(o.paper for o in rows):
        columns["Paper"] = lambda o: f"{o.paper[0]:.3f} ± {o.paper[1]:.3f}" if o.paper else NONE
        columns["Ours − paper"] = _gap
    columns["Best − this, 95 % interval"] = lambda o: (
        NONE if not o.ours else "the best" if o is top else _paired(top, o)
    )
    columns |= more or {}
    body = [
        tag("tr", tag("th", o.cell.name, scope="row"), [_labelled(head, cell(o)) for head, cell in columns.items()])
        for o in rows
    ]
    words = [tag("p", sentence) for sentence in said(rows, numbers=False)]
    how = tag("p", "Differences are paired by seed; each interval (t) stands by itself.", class_="fine")
    table = wide(("Method", *columns), body, f"Scores on {label(rows[0].cell.dataset)}" if rows else "Scores")
    return tag("div", table, words, how if words else None, _far(rows), class_="cards")


def _kind(o: Outcome, top: Outcome | None) -> str | None:
    return "absent" if o.ours is None else "best" if o is top else None


def _gap(o: Outcome) -> Any:
    if o.difference is None:
        return NONE
    mark = tag("span", " *", class_="bad" if o.unexplained else None) if o.far else None
    return [f"{o.difference:+.3f}", mark]


def _labelled(head: str, value: Any) -> Html:
    """A cell that says its column's head where the table is a list; empty ones are then left out."""
    return tag("td", value, data_label=head, class_="none" if value == NONE else None)


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
