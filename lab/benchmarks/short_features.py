"""What `features="bfloat16"` and sparse features ("auto") do: steps of an epoch in turns, and scores on a small graph.

    python lab/benchmarks/short_features.py steps [--graph synthetic:200000,10000000,256,10] [--threads 1]
    python lab/benchmarks/short_features.py scores cora.npz [--seeds 10]

A line of JSON per row: medians over rounds of the seconds of a step, or mean and deviation of test scores over seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch

import adahop
from adahop import ops
from adahop.capture import steps
from adahop.config import FEATURES, Config
from adahop.run import Run

METHODS = {"graphsage": "plain", "adahop": None}  # with their estimators; None: the method's own


def step_rows(graph: str, threads: int, rounds: int, many: int) -> list[dict]:
    """A row per method and precision; everyone takes `many` steps in every round."""
    data = adahop.load(graph)
    runs = {}
    for method, kind in itertools.product(METHODS, FEATURES):
        config = Config(
            method=method, estimator=METHODS[method], arch="plain", sizes=(10, 10), hidden=64, batch_size=1024,
            dropout=0.0, noise=0.0, features=kind,
        )  # fmt: skip
        runs[method, kind] = steps(Run(data, config, 0))
    clock = time.process_time if threads == 1 else time.perf_counter
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    torch.set_num_threads(threads)
    with ops.threads(threads):
        for _, key in itertools.product(range(rounds + 1), runs):
            began, taken = clock(), 0
            for _ in itertools.islice(iter(runs[key]), many):
                taken += 1
            seconds[key].append((clock() - began) / taken)
    return [
        {"graph": graph, "threads": threads, "method": method, "features": kind, "rounds": rounds, "steps": many,
         "clock": clock.__name__, "seconds": float(np.median(took[1:]))}
        for (method, kind), took in seconds.items()
    ]  # fmt: skip


def score_rows(name: str, seeds: int) -> list[dict]:
    data, rows = adahop.load(name), []
    for kind in FEATURES:
        test = [adahop.fit(data, seed=seed, sizes=(5, 5), epochs=30, features=kind).test for seed in range(seeds)]
        row = {"data": Path(name).name, "features": kind, "seeds": seeds}
        rows.append({**row, "test": float(np.mean(test)), "std": float(np.std(test, ddof=1))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("steps", "scores"))
    parser.add_argument("data", nargs="?", default="cora.npz")
    parser.add_argument("--graph", default="synthetic:200000,10000000,256,10")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args()
    if given.what == "steps":
        rows = step_rows(given.graph, given.threads, given.rounds, given.steps)
    else:
        rows = score_rows(given.data, given.seeds)
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
