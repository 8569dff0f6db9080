"""Where sampling noise hurts and where it regularises: ways to leave noise in, on made graphs of both kinds.

    python lab/benchmarks/noise_arms.py [--out FILE] [--processes 2]
    python lab/benchmarks/noise_arms.py --table [--out FILE]

Residual GCN, hidden 64, 40 epochs, batches of 256, k = 2, rate .003 and .01, three seeds. `noise` 0, .5 and 1 have an
exact first layer and a dial on the second; "sampled" draws both layers by the learned odds and "uniform" evenly, with
plain sums, two neighbours, 5, 10 or a fifth of the mean degree (but 2 to 10); RNS trains on random subgraphs. `average`
evaluates a running mean of the weights that keeps .9 per step. The tables have mean test scores, and how races between
noise 0 and uniform arms would have ended, had they been run in the first epochs of these runs: `regret` is what the
best of noise 0 and all uniform arms scored above the chosen one.
Graphs, arms and rules were fixed before the first of these runs, after a look at other graphs of the same kinds; dense
texts and the arms with more uniform draws were added later, before a run of theirs, and `LAST` at the very end.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch

import adahop
from adahop.config import Config
from adahop_lab.rows import Lines, Row, markdown

LATER = {
    "texts, degree 25": "texts:4000,100000,1000,6,signal=0.4,seed=11",
    "texts, degree 25, told": "texts:4000,100000,1000,6,signal=0.4,told=0.6,seed=12",
    "texts, degree 50": "texts:4000,200000,1000,6,signal=0.3,seed=13",
    "texts, degree 50, told": "texts:4000,200000,1000,6,signal=0.3,told=0.6,seed=14",
    "homophily, degree 50": "planted:3000,150000,300,7,signal=0.75,own=0.8,strength=5,train=0.4,seed=15",
}
LAST = {  # run once, when a fifth had been chosen on the others
    "texts, degree 16": "texts:4000,64000,1000,6,signal=0.5,seed=21",
    "texts, degree 16, told": "texts:4000,64000,1000,6,signal=0.5,told=0.6,seed=22",
    "texts, degree 80, told": "texts:3000,240000,800,5,signal=0.3,told=0.6,seed=23",
    "homophily, degree 20": "planted:3000,60000,300,7,signal=0.75,own=0.8,strength=5,train=0.4,seed=24",
    "heterophily, degree 80": "planted:3000,240000,64,4,signal=0.2,own=0.1,shift=1,strength=2,train=0.5,seed=25",
}
GRAPHS = {
    "dense": "planted:4000,160000,32,2,signal=0.12,own=0.3,strength=1.5,train=0.5,seed=1",
    "wrong labels": "planted:4000,60000,100,5,signal=0.35,own=0.5,strength=3,train=0.5,wrong=0.15,seed=3",
    "heterophily": "planted:4000,60000,64,4,signal=0.3,own=0.1,shift=1,strength=3,train=0.5,seed=4",
    "homophily": "planted:3000,12000,300,7,signal=0.75,own=0.8,strength=5,train=0.4,seed=2",
    "texts": "texts:3000,12000,1000,7,seed=1",
    "texts, told": "texts:3000,12000,1000,7,told=0.6,seed=5",
    "texts, linked": "texts:3000,30000,1000,5,signal=0.5,told=0.3,seed=3",
    "texts, few": "texts:3000,18000,600,5,train=0.1,seed=4",
    "texts, dense": "texts:4000,130000,1000,6,signal=0.4,seed=6",
    "texts, dense, told": "texts:4000,130000,1000,6,signal=0.4,told=0.6,seed=7",
    **LATER,
    **LAST,
}
ARMS: dict[str, dict[str, Any]] = {
    "noise 0": {"noise": 0.0},
    "noise .5": {"noise": 0.5},
    "noise 1": {"noise": 1.0},
    "sampled": {"estimator": "plain"},
    "uniform": {"method": "graphsage"},
    "uniform 5": {"method": "graphsage", "sizes": (5, 5)},
    "uniform 10": {"method": "graphsage", "sizes": (10, 10)},
    "uniform, a fifth": {"method": "graphsage", "sizes": None},
    "RNS": {"method": "rns"},
    "noise 0, average": {"noise": 0.0, "average": 0.9},
    "uniform, average": {"method": "graphsage", "average": 0.9},
}
UNIFORM = ("uniform", "uniform 5", "uniform 10", "uniform, a fifth")
RATES, SEEDS, EPOCHS = (0.003, 0.01), (0, 1, 2), 40
NAMES = ("graph", "arm", "lr", "seed")
BEST_THREE = "mean of the best three"
RACED = tuple(
    ("noise 0", *more) for more in (*((arm,) for arm in UNIFORM), ("uniform", "uniform 10"))
)  # the race's last
ENDS, OF_TWO = ((7, 13), (6, 12), (8, 12)), 16  # the race's first, others; and of a race of two arms
THREE = 20  # neighbours from which on there are three arms
MARGIN = {"uniform 10": 0.01}  # by which an arm must be ahead in the library's race
RULES: dict[str, Callable[[list[float]], float]] = {
    "best epoch": max,
    "mean of the best three": lambda scores: statistics.fmean(sorted(scores)[-3:]),
    "mean of the last five": lambda scores: statistics.fmean(scores[-5:]),
}


def train(task: tuple[str, str, float, int]) -> Row:
    graph, arm, lr, seed = task
    torch.set_num_threads(1)
    data = adahop.load(GRAPHS[graph])
    how = {"hidden": 64, "epochs": EPOCHS, "sizes": (2, 2), "lr": lr, "dropout": 0.0, **ARMS[arm]}
    fifth = min(max(round(data.graph.num_edges / data.graph.num_nodes / 5), 2), 10)
    config = Config(**{**how, "sizes": how["sizes"] or (fifth, fifth)})
    result = adahop.fit(data, config, seed=seed)
    history = [round(row["val"], 5) for row in result.history]
    named = dict(zip(NAMES, task, strict=True))
    return {**named, "val": result.val, "test": result.test, "seconds": result.seconds, "history": history}


def scores(rows: list[Row]) -> str:
    """Mean test scores, as Markdown."""
    lines = []
    for graph in GRAPHS:
        means = []
        for arm in ARMS:
            scores = [row["test"] for row in rows if (row["graph"], row["arm"]) == (graph, arm)]
            means.append(f"{statistics.fmean(scores):.3f}" if scores else "–")
        lines.append([graph, *means])
    return markdown(["graph", *ARMS], lines)


Runs = dict[str, Row]  # one run of every arm, of the same graph, rate and seed


def cells(rows: list[Row], graph: str) -> list[Runs]:
    """Of every rate and seed, the runs with noise 0 and all uniform arms."""
    found = {tuple(row[name] for name in NAMES): row for row in rows if row["graph"] == graph}
    every = [{arm: found.get((graph, arm, lr, s)) for arm in ("noise 0", *UNIFORM)} for lr, s in product(RATES, SEEDS)]
    return [runs for runs in every if all(runs.values())]


def regret(
    arms: tuple[str, ...], first: int, second: int, rule: str, runs: Runs, margin: dict[str, float] | None = None
) -> float:
    """What the best arm scored above the one that a race between these would have ended with: the last of three or more
    leaves it after so many epochs, and the better one is chosen after so many, of which two are shared."""

    def ranked(left: tuple[str, ...], end: int) -> list[str]:
        score = {arm: RULES[rule](runs[arm]["history"][2:end]) - (margin or {}).get(arm, 0.0) for arm in left}
        return sorted(left, key=lambda arm: score[arm], reverse=True)

    while len(arms) > 2:
        arms = tuple(arm for arm in arms if arm != ranked(arms, first)[-1])
    return max(row["test"] for row in runs.values()) - runs[ranked(arms, second)[0]]["test"]


def degree(graph: str) -> float:
    nodes, edges = GRAPHS[graph].split(":")[1].split(",")[:2]
    return int(edges) / int(nodes)


def race(graph: str, ends: tuple[int, int] = ENDS[0]) -> tuple[tuple[str, ...], int, int]:
    """The arms of the library's race on a graph, and when it ends."""
    return (RACED[-1], *ends) if degree(graph) >= THREE else (RACED[0], OF_TWO, OF_TWO)


def choices(rows: list[Row]) -> str:
    """What each rule would have lost with the race's arms, as Markdown."""
    lines = []
    for name, ends in product(RULES, ENDS):
        lost = [regret(*race(graph, ends), name, runs, MARGIN) for graph in GRAPHS for runs in cells(rows, graph)]
        if lost:
            lines.append([name, *map(str, ends), f"{statistics.fmean(lost):.4f}", f"{max(lost):.4f}"])
    return markdown(["choice by", "one leaves after", "end after epoch", "mean regret", "largest"], lines)


def partners(rows: list[Row]) -> str:
    """What races between these arms, and the library's, would have lost on each graph and on all, as Markdown."""
    table: list[list[list[float]]] = []
    for graph in GRAPHS:
        runs = cells(rows, graph)
        ends = [ENDS[0] if len(arms) > 2 else (OF_TWO, OF_TWO) for arms in RACED]
        ways = [(arms, *end) for arms, end in zip(RACED, ends, strict=True)]
        lost = [[regret(*way, BEST_THREE, r) for r in runs] for way in ways]
        table.append([*lost, [regret(*race(graph), BEST_THREE, r, MARGIN) for r in runs]])
    every = [[x for row in table for x in row[i]] for i in range(len(table[0]))]
    lines = [[graph, *map(_mean, row)] for graph, row in zip(GRAPHS, table, strict=True)]
    lines += [["all runs", *map(_mean, every)], ["largest", *(f"{max(x):.4f}" if x else "–" for x in every)]]
    return markdown(["regret of", *(" / ".join(arms) for arms in RACED), "the race"], lines)


def _mean(numbers: list[float]) -> str:
    return f"{statistics.fmean(numbers):.4f}" if numbers else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/noise_arms.jsonl")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    said = parser.parse_args()
    lines = Lines(said.out, NAMES)
    if not said.table:
        some = ("noise 0", *UNIFORM)  # arms of graphs that were added for the race alone
        arms = {graph: some if graph in LATER or graph in LAST else ARMS for graph in GRAPHS}
        tasks = [(graph, arm, lr, seed) for seed in SEEDS for graph in GRAPHS for arm in arms[graph] for lr in RATES]
        lines.fill(tasks, train, jobs=said.processes)
    rows = list(lines.rows.values())
    print(scores(rows), partners(rows), choices(rows), sep="\n\n")


if __name__ == "__main__":
    main()
