"""The preset beside uniform draws, each with the settings that validation likes best: scores of docs/ablation.md.

    python lab/benchmarks/tuned.py --data DIR [--out FILE] [--jobs 4] [--device cuda] [--seeds 10]

Every method on every graph has the same candidates (LR, DROPOUT, DECAY, AVERAGE, fixed beforehand). One run of each,
then two more of the best FINAL, with seeds of their own, name the settings by mean validation score; their test scores
are not looked at. The chosen settings are then run with seeds 0 to 9. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from adahop_lab.rows import Lines

GRAPHS = {  # file: hidden, epochs
    "ppi_rebuilt_labels": (256, 12),
    "amazon_computers": (64, 40),
    "tolokers": (64, 40),
    "cora": (64, 40),
    "pubmed": (64, 40),
    "blogcatalog_attr": (64, 40),
    "flickr_small_attr": (64, 40),
    "coauthor_physics": (64, 15),
}
LR, DROPOUT, DECAY, AVERAGE = (3e-3, 1e-2, 3e-2), (0.0, 0.1, 0.3, 0.5, 0.7), (0.0, 1e-3), (0.0, 0.99)
FINAL, TRIAL = 4, 100  # candidates that get two more runs; the first seed of the runs that choose


class TunedTask(NamedTuple):
    """One run."""

    graph: str
    method: str
    k: int
    lr: float
    dropout: float
    decay: float
    average: float
    seed: int


def compared() -> list[tuple[str, str, int]]:
    both = [(g, m, k) for g in GRAPHS for m, k in (("adahop", 2), ("graphsage", 10))]
    return [*both, ("ppi_rebuilt_labels", "adahop", 10)]


@functools.cache
def loaded(path: str) -> Any:
    import adahop

    return adahop.load(path)


def run(task: TunedTask, folder: str, device: str) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    import adahop

    hidden, epochs = GRAPHS[task.graph]
    data = loaded(str(Path(folder) / f"{task.graph}.npz"))
    began = time.perf_counter()
    method, _, estimator = task.method.partition(", ")
    result = adahop.fit(
        data, method=method, estimator=estimator or None, sizes=(task.k, task.k), hidden=hidden, epochs=epochs,
        lr=task.lr, batch_size=256, dropout=task.dropout, weight_decay=task.decay, average=task.average,
        seed=task.seed, device=device, noise=0.0,
    )  # fmt: skip
    row = {**task._asdict(), "val": result.val, "epoch": result.best_epoch, "device": device}
    if task.seed < TRIAL:
        row["test"] = result.test
    return {**row, "seconds": result.history[-1]["seconds"], "wall": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of the .npz files")
    parser.add_argument("--out", default="lab/benchmarks/results/tuned.jsonl")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="graphs with commas between")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    book, grid = Lines(args.out, TunedTask._fields), list(itertools.product(LR, DROPOUT, DECAY, AVERAGE))
    cases = [c for c in compared() if not args.only or c[0] in args.only.split(",")]

    def fill(settings: dict[tuple, list], seeds: Iterable[int]) -> None:
        tasks = [TunedTask(*case, *one, seed) for case in cases for one in settings[case] for seed in seeds]
        book.fill(tasks, run, args.data, args.device, jobs=args.jobs)

    def best(case: tuple, among: list, seeds: int) -> list:
        tried = range(TRIAL, TRIAL + seeds)
        return sorted(among, key=lambda one: -sum(book.rows[(*case, *one, s)]["val"] for s in tried))

    fill(dict.fromkeys(cases, grid), [TRIAL])
    short = {case: best(case, grid, 1)[:FINAL] for case in cases}
    fill(short, (TRIAL + 1, TRIAL + 2))
    chosen = {case: best(case, short[case], 3)[0] for case in cases}
    fill({case: [one] for case, one in chosen.items()}, range(args.seeds))
    for case in cases:
        tests = [book.rows[(*case, *chosen[case], s)]["test"] for s in range(args.seeds)]
        mean = sum(tests) / len(tests)
        print(*case, "lr, dropout, decay, average =", chosen[case], f"test {mean:.4f}", [round(t, 4) for t in tests])


if __name__ == "__main__":
    main()
