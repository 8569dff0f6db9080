"""What `noise="auto"` costs beside a fixed dial: processor seconds and evaluations of whole runs, in turns.

    python lab/benchmarks/race_cost.py FILE.npz ... [--out FILE]
    python lab/benchmarks/race_cost.py --table

`adahop train`'s defaults, 40 epochs, hidden 64, batches of 256, k = 2 and 5, rate .003, no dropout, one thread; set-up
and evaluations count. A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product
from pathlib import Path

import torch

import adahop
from adahop.config import Config
from adahop_lab.rows import Lines, Row, markdown

NAMES = ("graph", "k", "noise", "seed")
SEEDS, SIZES, DIALS = (0, 1, 2), (2, 5), ("auto", 0.0)


def run(task: tuple[str, int, str | float, int], files: dict[str, str]) -> Row:
    torch.set_num_threads(1)
    adahop.ops.set_threads(1)
    graph, k, noise, seed = task
    data = adahop.load(files[graph])
    config = Config(hidden=64, epochs=40, batch_size=256, sizes=(k, k), lr=0.003, dropout=0.0, noise=noise)
    began, evaluations = time.process_time(), 0

    def count(row: Row) -> None:
        nonlocal evaluations
        evaluations += 1

    result = adahop.fit(data, config, seed=seed, on_epoch=count)
    row = dict(zip(NAMES, task, strict=True))
    return {**row, "seconds": time.process_time() - began, "evaluations": evaluations, "chose": str(result.noise)}


def table(rows: list[Row]) -> str:
    """Ratios of each seed's two runs, the median of seeds."""
    found = {tuple(row[name] for name in NAMES): row for row in rows}
    lines = []
    for graph, k in dict.fromkeys((row["graph"], row["k"]) for row in rows):
        pairs = [(found.get((graph, k, "auto", s)), found.get((graph, k, 0.0, s))) for s in SEEDS]
        both = [(a, b) for a, b in pairs if a and b]
        if both:
            ratios = [statistics.median(a[what] / b[what] for a, b in both) for what in ("seconds", "evaluations")]
            seconds = [statistics.median(pair[i]["seconds"] for pair in both) for i in (0, 1)]
            chose = ", ".join(a["chose"] for a, _ in both)
            lines.append([graph, str(k), *(f"{x:.1f}" for x in seconds), *(f"{x:.2f}" for x in ratios), chose])
    return markdown(["graph", "k", "auto, s", "noise 0, s", "seconds", "evaluations", "chosen"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/race_cost.jsonl")
    parser.add_argument("--table", action="store_true")
    said = parser.parse_args()
    lines = Lines(said.out, NAMES)
    if not said.table:
        files = {Path(path).stem: path for path in said.files}
        lines.fill([(g, k, noise, s) for g, k, s, noise in product(files, SIZES, SEEDS, DIALS)], run, files)
    print(table(list(lines.rows.values())))


if __name__ == "__main__":
    main()
