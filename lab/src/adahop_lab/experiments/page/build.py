"""The whole page from a folder of results and the cells they belong to."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from adahop_lab.experiments.catalogue import EXPERIMENTS, PAPER
from adahop_lab.experiments.outcome import NOT_RUN, Outcome, by_dataset, label, outcomes
from adahop_lab.experiments.page import figures
from adahop_lab.experiments.page.details import details, environment
from adahop_lab.experiments.page.html import Html, join, tag, wide
from adahop_lab.experiments.page.scores import anchor, dataset_table, overview
from adahop_lab.experiments.page.sizes import order

HERE = Path(__file__).parent
Found = dict[str, list[Outcome]]


def build(out: Path, folder: Path) -> tuple[str, list[str]]:
    """(the page, the rows that differ from the paper and have no note)."""
    found = {name: outcomes(name, folder, out) for name in EXPERIMENTS if name != "convergence"}
    drawn: list[figures.Figure] = []
    sections = [
        _tables("table2", found, drawn), _tables("table3", found, drawn), _sizes(found, drawn), _timing(found),
        _ogb(found), _regret(found, drawn), _environment(found),
    ]  # fmt: skip
    loose = [str(o.cell.place) for rows in found.values() for o in rows if o.unexplained]
    links = [tag("li", tag("a", _short(name), href=f"#{name}")) for name, _, _ in sections]
    body = [
        tag("a", "Skip to the results", href="#main", class_="skip"),
        tag("header", tag("h1", "adahop: results"), _lead(found), tag("button", "Dark", id="theme", type="button")),
        tag("nav", tag("ul", links), aria_label="Sections"),
        tag("main", _loose(loose), [tag("section", tag("h2", t), part, id=n) for n, t, part in sections], id="main"),
        tag("footer", tag("p", "The paper: ", PAPER["source"])),
    ]
    data = json.dumps(drawn, allow_nan=False).replace("</", "<\\/")
    script = [Html(f'<script type="application/json" id="figures">{data}</script>'), _inline("script", "page.js")]
    head = [
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<link rel="icon" href="data:,">'), tag("title", "adahop: results"), _inline("style", "page.css"),
    ]  # fmt: skip
    page = Html('<!doctype html>\n<html lang="en">') + join(tag("head", head), tag("body", body, script)) + "</html>\n"
    return page, loose


def _short(name: str) -> str:
    return EXPERIMENTS[name].short if name in EXPERIMENTS else "How it was made"


def _inline(name: str, file: str) -> Html:
    return Html(f"<{name}>{(HERE / file).read_text(encoding='utf-8')}</{name}>")


def _lead(found: Found) -> Html:
    rows = [o for part in found.values() for o in part]
    run = [o for o in rows if o.facts is not None]
    seeds = sum(len(o.facts["runs"]) for o in run if o.facts)
    words = (
        f"{len(run)} of {len(rows)} cells were run here, {seeds} runs in all. Test scores are those of the epoch that "
        "was best on validation, computed from all neighbours; ± is the standard deviation over seeds. What was not "
        f"run says “{NOT_RUN}”: no number here was not measured."
    )
    return tag("p", words)


def _loose(loose: list[str]) -> Html | None:
    if not loose:
        return None
    return tag(
        "p", f"Unexplained differences from the paper: {', '.join(loose)}.", class_="bad unexplained", role="alert"
    )


def _figure(figure: figures.Figure, drawn: list[figures.Figure]) -> Html:
    drawn.append(figure)
    return tag(
        "figure", tag("figcaption", figure["title"]), tag("noscript", "The plot needs JavaScript."), id=figure["id"]
    )


def _tables(name: str, found: Found, drawn: list[figures.Figure]) -> tuple[str, str, Html]:
    """A table of the paper: all data sets in one view, then each with its runs and its road to them."""
    rows = found[name]
    ways = {f["id"]: f for f in figures.convergence(rows, name)}
    parts: list[Any] = [overview(rows)] if rows else []
    for dataset, some in by_dataset(rows).items():
        if not any(o.facts for o in some):
            continue
        data = next(o.facts["data"] for o in some if o.facts)
        own = data["note"] and data["note"] not in label(dataset)
        mark = tag("span", data["note"], class_="badge") if own else None
        size = f"{data['nodes']:,} nodes, {data['edges']:,} edges, {data['training']:,} to train on"
        parts += [
            tag("h3", label(dataset), " ", mark, id=anchor(some[0])),
            tag("p", size, class_="fine"),
            dataset_table(some),
        ]
        way = ways.get(f"{name}-{dataset}-way")
        parts += [_figure(way, drawn) if way else None, details(some, "Runs, settings, commands")]
    return name, EXPERIMENTS[name].title, join(parts)


def _sizes(found: Found, drawn: list[figures.Figure]) -> tuple[str, str, Html]:
    rows = found["sample-size"]
    plots = [_figure(figure, drawn) for figure in figures.sample_size(rows)]
    words = (
        "The variance is E|estimate − truth|² of the last layer's sum over |sum|², all layers drawn as in training, "
        "measured at 256 training nodes after the last step."
    )
    where = [tag("h3", label(dataset)) for dataset in by_dataset(rows)]  # one, as the paper has it
    parts = [
        *(tag("p", words), where, tag("div", plots, class_="pair")),
        *(order(rows), details(rows, "Runs, settings, commands")),
    ]
    return "sample-size", EXPERIMENTS["sample-size"].title, join(parts if plots else _absent(rows))


def _absent(rows: list[Outcome]) -> list[Html]:
    return [tag("p", NOT_RUN, class_="absent"), details(rows, "Settings, commands")]


def _timing(found: Found) -> tuple[str, str, Html]:
    """Bars: seconds an epoch."""
    parts: list[Any] = []
    for dataset, rows in by_dataset(found["timing"]).items():
        spent = {o.cell.name: o.epoch for o in rows if o.epoch is not None}
        if spent:
            parts += [tag("h3", label(dataset)), _bars(spent, f"Seconds on {label(dataset)}")]
    words = (
        "One thread, one run at a time, medians of three epochs: drawing, gathering features, forward, backward, the "
        "optimizer and the sampler's update."
    )
    told = [tag("p", words), *parts] if parts else [tag("p", NOT_RUN, class_="absent")]
    return "timing", EXPERIMENTS["timing"].title, join(told)


def _bars(spent: dict[str, float], what: str) -> Html:
    most = max(spent.values())
    body = []
    for name, seconds in spent.items():
        bar = tag("td", tag("span", style=f"width:{100 * seconds / most:.1f}%"), class_="bar")
        body.append(tag("tr", tag("th", name, scope="row"), bar, tag("td", f"{seconds:.3g}")))
    return wide(("Method", "", "seconds"), body, what, class_="bars")


def _ogb(found: Found) -> tuple[str, str, Html]:
    rows = found["ogb"]
    return "ogb", EXPERIMENTS["ogb"].title, join(dataset_table(rows), details(rows, "Runs, settings, commands"))


def _regret(found: Found, drawn: list[figures.Figure]) -> tuple[str, str, Html]:
    rows = found["regret"]
    run = [o for o in rows if o.facts]
    if not run:
        return "regret", EXPERIMENTS["regret"].title, join(_absent(rows))
    more = run[0].cell.more
    words = (
        f"Stars of {more['degree']} neighbours with fixed weights and norms, {more['draws']} drawn, "
        f"{more['visits']:,} visits. V is the paper's effective variance, the sum of a|h|²/q with q summing to k. Its "
        "theorem, with the constant mended from 10 to 48.4, bounds the mean of V over the visits by "
        "3 V* + 48.4 sqrt(n⁴ ln(n/k) / (T k³)). The bound holds, and says little: it lies far above what even uniform "
        "draws have."
    )
    heads = ("Method", "mean V over the visits", "V* (least possible)", "bound on the mean")
    body = [
        tag("tr", tag("th", o.cell.name, scope="row"), [
            tag("td", f"{statistics.fmean(r[key] for r in o.facts['runs']):.4g}") for key in ("mean", "least", "bound")
        ])
        for o in run if o.facts
    ]  # fmt: skip
    plots = [_figure(figure, drawn) for figure in figures.regret(rows)]
    parts = [tag("p", words), *plots, wide(heads, body, "The bound"), details(rows, "Runs, settings, commands")]
    return "regret", EXPERIMENTS["regret"].title, join(parts)


def _environment(found: Found) -> tuple[str, str, Html]:
    every = [o for rows in found.values() for o in rows]
    again = "Every row's command is with its runs. All of it again: "
    return "environment", "How it was made", join(
        tag("p", again, tag("code", "adahop reproduce all"), ", then ",
            tag("code", "adahop report results -o report.html"), "."),
        environment(every),
    )  # fmt: skip
