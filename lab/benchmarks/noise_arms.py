"""Where sampling noise hurts and where it regularises: ways to leave noise in, on made graphs of both kinds.

    python lab/benchmarks/noise_arms.py [--out FILE] [--processes 2]
    python lab/benchmarks/noise_arms.py --table [--out FILE]

Residual GCN, hidden 64, 40 epochs, batches of 256, k = 2, rate .003 and .01, three seeds. `noise` 0, .5 and 1 have an
exact first layer and a dial on the second; "sampled" draws both layers by the learned odds and "uniform" evenly, with
plain sums; RNS trains on random subgraphs. `average` evaluates a running mean of the weights that keeps .9 per step.
The table has mean test scores, and how the race's choice between noise 0 and uniform would have ended, had it been made
from the first epochs of these runs by another rule: `regret` is what the better of the two scored above the chosen one.
Graphs, arms and rules were fixed before the first of these runs, after a look at other graphs of the same kinds; dense
texts and the arms with more uniform draws were added later, before a run of theirs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import adahop
from adahop.config import Config
from adahop_lab.rows import Lines, Row, markdown

# looked at only when the number of draws of the race's uniform arm had been narrowed down on the others
LATER = {
    "texts, degree 25": "texts:4000,100000,1000,6,signal=0.4,seed=11",
    "texts, degree 25, told": "texts:4000,100000,1000,6,signal=0.4,told=0.6,seed=12",
    "texts, degree 50": "texts:4000,200000,1000,6,signal=0.3,seed=13",
    "texts, degree 50, told": "texts:4000,200000,1000,6,signal=0.3,told=0.6,seed=14",
    "homophily, degree 50": "planted:3000,150000,300,7,signal=0.75,own=0.8,strength=5,train=0.4,seed=15",
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
}
ARMS: dict[str, dict[str, Any]] = {
    "noise 0": {"noise": 0.0},
    "noise .5": {"noise": 0.5},
    "noise 1": {"noise": 1.0},
    "sampled": {"estimator": "plain"},
    "uniform": {"method": "graphsage"},
    "uniform 5": {"method": "graphsage", "sizes": (5, 5)},
    "uniform 10": {"method": "graphsage", "sizes": (10, 10)},
    "RNS": {"method": "rns"},
    "noise 0, average": {"noise": 0.0, "average": 0.9},
    "uniform, average": {"method": "graphsage", "average": 0.9},
}
RACED = ("noise 0", "uniform", "uniform 5", "uniform 10")
RATES, SEEDS, EPOCHS = (0.003, 0.01), (0, 1, 2), 40
NAMES = ("graph", "arm", "lr", "seed")
RULES: dict[str, Callable[[list[float]], float]] = {
    "best epoch": max,
    "mean of the best three": lambda scores: statistics.fmean(sorted(scores)[-3:]),
    "mean of the last five": lambda scores: statistics.fmean(scores[-5:]),
}


def train(task: tuple[str, str, float, int]) -> Row:
    graph, arm, lr, seed = task
    torch.set_num_threads(1)
    config = Config(**{"hidden": 64, "epochs": EPOCHS, "sizes": (2, 2), "lr": lr, "dropout": 0.0, **ARMS[arm]})
    result = adahop.fit(adahop.load(GRAPHS[graph]), config, seed=seed)
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


def choices(rows: list[Row]) -> str:
    """What each rule would have lost, as Markdown."""
    found = {tuple(row[name] for name in NAMES): row for row in rows}
    lines = []
    pairs = [(row, found.get((key[0], "uniform", *key[2:]))) for key, row in found.items() if key[1] == "noise 0"]
    for name, rule in RULES.items():
        for end in (6, 12, 16):
            for lead in (0.0, 0.01):
                regret = []
                for one, other in pairs:
                    if other is not None:
                        ahead = rule(other["history"][2:end]) - rule(one["history"][2:end])
                        chosen = other if ahead > lead else one
                        regret.append(max(one["test"], other["test"]) - chosen["test"])
                if regret:
                    lost = f"{statistics.fmean(regret):.4f}", f"{max(regret):.4f}"
                    lines.append([name, str(end), f"{lead:g}", *lost])
    return markdown(["choice by", "after epoch", "uniform where ahead by", "mean regret", "largest"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/noise_arms.jsonl")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    said = parser.parse_args()
    lines = Lines(said.out, NAMES)
    if not said.table:
        tasks = [(g, a, lr, s) for s in SEEDS for g in GRAPHS for a in ARMS if g not in LATER or a in RACED for lr in RATES]
        lines.fill(tasks, train, jobs=said.processes)
    rows = list(lines.rows.values())
    print(scores(rows), choices(rows), sep="\n\n")


if __name__ == "__main__":
    main()
