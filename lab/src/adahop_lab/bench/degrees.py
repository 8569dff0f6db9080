"""Cost of a batch as the degree grows: stars of one degree each, and RMAT nodes of about one degree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from adahop.checks import InputError, count
from adahop.graph import Graph
from adahop.ops import random
from adahop_lab.bench import ours
from adahop_lab.bench.clock import Runner, Turn, quartiles, take_turns, threads
from adahop_lab.bench.graphs import graph


def measure(
    graphs: str, degrees: Sequence[int], k: int, batch_size: int, n: int, methods: Sequence[str], rounds: int,
    seconds: float, say: Callable[[str], None], clock: str = "wall",
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each degree and method: one layer, targets of that degree alone."""
    count(rounds, 1, "rounds")
    known = None if graphs == "star" else graph(graphs)
    rows = []
    for degree in degrees:
        g = graph(f"star:{degree}") if known is None else known
        nodes = near(g, degree, batch_size)
        if nodes is None:
            say(f"{graphs} has no node of a degree near {degree:,}")
            continue
        with threads(count(n, 1, "threads")):
            runners = [ours.runner(text, g, [count(k, 1, "sizes")], batch_size) for text in methods]
            turns = take_turns(runners, [nodes], rounds, seconds, clock=clock)
        rows += [row(graphs, degree, nodes.numel(), n, k, runner, turns[runner]) for runner in runners]
    if not rows:
        raise InputError(f"`degrees` must be those of some nodes of {graphs}, got {list(degrees)}")
    return rows


def near(g: Graph, degree: int, batch_size: int) -> Tensor | None:
    """A batch of the nodes whose degree is within a third of this one; some come twice where they are few."""
    own = g.degree()
    nodes = ((own > degree * 2 / 3) & (own < degree * 4 / 3)).nonzero().flatten()
    if nodes.numel() == 0:
        return None
    nodes = random.shuffled(nodes, random.key(0, degree))
    return nodes.repeat(-(-batch_size // nodes.numel()))[:batch_size].clone()


def row(graphs: str, degree: int, size: int, n: int, k: int, runner: Runner, turns: list[Turn]) -> dict[str, Any]:
    low, mid, high = quartiles([1e6 / t.batches_per_s for t in turns])
    return {
        "method": runner.name,
        "edges_per_s": quartiles([t.edges_per_s for t in turns])[1],
        "batches_per_s": 1e6 / mid,
        "ratio_dgl_uniform": None,
        "ratio_pyg_uniform": None,
        "threads": n,
        "graph": graphs,
        "degree": degree,
        "sizes": [k],
        "batch_size": size,
        "us_per_batch": mid,
        "spread": [low, high],
    }


def lines(rows: Sequence[dict[str, Any]], path_stem: Any) -> list[Any]:
    """Microseconds a batch over the degree, both on log scales: a flat line costs the same whatever the degree."""
    from pathlib import Path

    from matplotlib.figure import Figure

    from adahop_lab.plots import COLOURS, INK, STYLES, _dress, _save

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    ax = figure.subplots()
    for at, name in enumerate(dict.fromkeys(r["method"] for r in rows)):
        mine = [r for r in rows if r["method"] == name]
        ax.plot([r["degree"] for r in mine], [r["us_per_batch"] for r in mine], marker="o", markersize=3, label=name,
                color=COLOURS[at % len(COLOURS)], linestyle=STYLES[at % len(STYLES)])  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    _dress(ax, "degree of the targets")
    ax.set_ylabel("µs a batch", color=INK)
    figure.legend(loc="outside right center", frameon=False, fontsize=9)
    return _save(figure, Path(path_stem))
