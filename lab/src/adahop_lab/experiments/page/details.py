"""What stands behind a row: settings, runs, how they were made, and the command that makes them again."""

from __future__ import annotations

from typing import Any

from adahop_lab.experiments.outcome import NOT_RUN, Outcome
from adahop_lab.experiments.page.html import Html, tag, wide

SHOWN = (
    "method",
    "model",
    "arch",
    "sizes",
    "hidden",
    "epochs",
    "patience",
    "batch_size",
    "lr",
    "weight_decay",
    "dropout",
)


def details(rows: list[Outcome], title: str) -> Html:
    """Closed until someone asks."""
    return tag("details", tag("summary", title), [_cell(o) for o in rows], class_="runs")


def _cell(o: Outcome) -> Html:
    state = NOT_RUN if o.facts is None else f"{len(o.facts['runs'])} runs"
    parts: list[Any] = [tag("summary", o.cell.name, tag("span", f" {state}", class_="fine"))]
    parts.append(tag("p", tag("b", "Again: "), tag("code", command(o))))
    parts.append(tag("p", tag("b", "Settings: "), settings(o)))
    if o.cell.chosen:
        parts.append(tag("p", tag("b", "How they were chosen: "), o.cell.chosen))
    if o.facts is not None:
        if o.facts.get("grid"):
            parts.append(tag("p", tag("b", "Searched: "), f"{len(o.facts['grid'])} points of the grid, by validation."))
        parts += [_runs(o), _made(o.facts)]
    return tag("details", parts)


def command(o: Outcome) -> str:
    """What to type for this cell alone; one of several k goes by its file's name."""
    runs = len(o.facts["runs"]) if o.facts else o.cell.runs
    many = "" if o.cell.experiment == "timing" else f" --runs {runs}"
    search = " --grid full" if o.facts and o.facts.get("grid") else ""
    return f"adahop reproduce {o.cell.experiment} --datasets {o.cell.dataset} --rows {o.cell.row}{many}{search}"


def settings(o: Outcome) -> str:
    used = o.facts["settings"] if o.facts else o.cell.settings
    order = [*(k for k in SHOWN if k in used), *(k for k in used if k not in SHOWN)]
    return ", ".join(f"{key.replace('_', ' ')} {_plain(used[key])}" for key in order)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}"
    return "/".join(map(str, value)) if isinstance(value, list) else str(value)


def _runs(o: Outcome) -> Html | None:
    assert o.facts is not None
    runs = o.facts["runs"]
    if not runs or "test" not in runs[0]:
        return None
    spent = {row["seed"]: row.get("seconds") for row in (o.times or {}).get("runs", [])}
    heads = ("seed", f"test {o.facts['metric'] or ''}", "validation", "best epoch", "steps", "seconds")
    body = [
        tag("tr", [tag("td", v) for v in (
            run["seed"], f"{run['test']:.4f}", f"{run['val']:.4f}", f"{run['best_epoch']} of {run['epochs']}",
            run["steps"], "–" if spent.get(run["seed"]) is None else f"{spent[run['seed']]:.1f}",
        )])
        for run in runs
    ]  # fmt: skip
    return wide(heads, body, f"Runs of {o.cell.name}")


def _made(facts: dict[str, Any]) -> Html:
    parts = [
        f"seeds {', '.join(map(str, part['seeds']))} with adahop {part['with']['versions']['adahop']} "
        f"({commit(part['with'])})" for part in facts["made"]
    ]  # fmt: skip
    return tag("p", tag("b", "Made: "), "; ".join(parts))


def commit(made: dict[str, Any]) -> str:
    found = made["commit"]
    if found is None:
        return "commit unknown"
    short, plus, _ = found.partition("+")
    return f"commit {short[:10]}" + (" with changes" if plus else "")


def environment(found: list[Outcome]) -> Html:
    """Every set of versions and every machine, with how many runs each made."""
    made: dict[tuple[str, str], int] = {}
    machines: dict[str, int] = {}
    for o in found:
        for part in (o.facts or {}).get("made", []):
            versions = ", ".join(f"{k} {v}" for k, v in part["with"]["versions"].items())
            key = (commit(part["with"]), versions)
            made[key] = made.get(key, 0) + len(part["seeds"])
        for row in (o.times or {}).get("runs", []):
            m = row.get("machine", {})
            many = m.get("jobs", 1)
            beside = "one run at a time" if many == 1 else f"{many} runs side by side"
            words = f"{m.get('device')}, {m.get('cores')} cores, {m.get('system')}; {beside}"
            machines[words] = machines.get(words, 0) + 1
    rows = [tag("tr", tag("td", n), tag("td", who), tag("td", versions)) for (who, versions), n in made.items()]
    table = wide(("runs", "adahop", "versions"), rows, "Versions")
    items = [tag("li", f"{n} runs on {words}") for words, n in machines.items()]
    return tag("div", table, tag("ul", items))
