"""Depth and batch size: where do old embeddings break, and what does a step cost?

    python lab/benchmarks/depth.py --data DIR [--graphs amazon_computers] [--depths 2,3,4,5] [--batches 64,256]
                                   [--epochs 20] [--runs 3] [--arch gcnii] [--out FILE] [--device cuda] [--clock cpu]
                                   [--processes 4] [--seconds 500]
    python lab/benchmarks/depth.py --table [--out FILE]

adahop and uniform draws with two neighbours per layer, GAS and LMC, residual GCN (or another --arch, with an --out of
its own), hidden 64. Rate and dropout by
validation on one seed for every cell alike. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product
from pathlib import Path

from adahop.config import Config
from adahop_lab.candidates import CANDIDATES, NAMES, TUNING, Entry, Lines, Row, count_seconds, run_entries

WAYS = ("adahop, k = 2", "uniform, k = 2", "GAS", "LMC")


def entries(said: argparse.Namespace) -> list[Entry]:
    out = []
    for graph, layers, size in product(said.graphs.split(","), said.depths.split(","), said.batches.split(",")):
        base = Config(
            sizes=(2,) * int(layers), hidden=64, epochs=said.epochs, batch_size=int(size), device=said.device,
            arch=said.arch,
        )  # fmt: skip
        out += [Entry(str(said.data / f"{graph}.npz"), CANDIDATES[name], base) for name in WAYS]
    return out


def table(rows: list[Row]) -> list[str]:
    """Lines of Markdown: mean test score, and milliseconds of training a step."""
    cells: dict[tuple[str, int, int], dict[str, list[Row]]] = {}
    for row in rows:
        if row["seed"] not in TUNING:
            place = row["dataset"], row["layers"], row["batch_size"]
            cells.setdefault(place, {}).setdefault(row["candidate"], []).append(row)
    out = [f"| graph | layers | batch | {' | '.join(WAYS)} |", "|---|---|---|" + "---|" * len(WAYS)]
    for (graph, layers, size), found in sorted(cells.items()):
        words = []
        for way in WAYS:
            own = found.get(way, [])
            cost = [1e3 * row["history"][-1]["seconds"] / row["steps"] for row in own]
            score = [row["test"] for row in own]
            words.append(f"{statistics.fmean(score):.4f} ({statistics.fmean(cost):.1f} ms)" if own else "–")
        out.append(f"| {graph} | {layers} | {size} | {' | '.join(words)} |")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--graphs", default="amazon_computers")
    parser.add_argument("--depths", default="2,3,4,5")
    parser.add_argument("--batches", default="64,256,1024,4096")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--arch", default="residual")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/depth.jsonl")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", default="wall")
    parser.add_argument("--processes", type=int, default=0, help="0: in this one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this many")
    parser.add_argument("--table", action="store_true")
    said = parser.parse_args()
    if said.table:
        print("\n".join(table(list(Lines(said.out, NAMES).rows.values()))))
        return
    if said.data is None:
        parser.error("--data must be a folder of .npz files, got none")
    count_seconds(said.clock)
    lines = Lines(said.out, NAMES)
    run_entries(lines, entries(said), range(said.runs), TUNING[:1], jobs=said.processes, seconds=said.seconds)


if __name__ == "__main__":
    main()
