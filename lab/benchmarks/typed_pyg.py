"""Half the neighbours on typed graphs: pyg/hetero.py as it is at k, and converted in three lines at k / 2.

    python lab/benchmarks/typed_pyg.py --data DIR [--out FILE] [--minutes M] [--table]

Candidates, fixed beforehand: rate in {.003, .01} and dropout in {.2, .5}; every arm takes the pair with the best mean
validation score over seeds 100 to 102, then runs seeds 0 to 9. The test score is that of the epoch with the best
validation score. One JSON line per run; finished runs are not repeated. `--table` prints means and paired 95 %
intervals. `planted` is the dense typed graph of typed_scores.py.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from pyg_half import ran
from typed_scores import SEEDS, SETTINGS, TRIALS, paired, planted_splits

import adahop
from adahop_lab.rows import Lines, markdown

HERE = Path(__file__).parent
GRAPHS = {"planted": (10, 256, 32), "freebase": (10, 64, 60)}  # k, batch size, epochs
ARMS = {"the script": ("pyg", 1), "adahop at k/2": ("adahop", 2), "the script at k/2": ("pyg", 2)}  # way, k over it


def path_of(graph: str, folder: Path) -> Path:
    if graph != "planted":
        return folder / f"{graph}.npz"
    path = Path(tempfile.gettempdir()) / f"adahop-planted-{os.getpid()}.pt"
    if not path.exists():
        torch.save(planted_splits(), path)
    return path


def run(task: tuple[str, str, float, float, int, int], folder: Path) -> dict[str, Any]:
    graph, arm, lr, dropout, seed, epochs = task
    (k, batch, _), (way, over) = GRAPHS[graph], ARMS[arm]
    words = {
        "dataset": path_of(graph, folder), "neighbors": k // over, "batch-size": batch, "lr": lr, "dropout": dropout,
        "epochs": epochs, "seed": seed,
    }  # fmt: skip
    text, seconds = ran("hetero", way, words)
    curve = [tuple(map(float, c)) for c in re.findall(r"val ([\d.]+) test ([\d.]+) macro ([\d.]+)", text)]
    val, micro, macro = max(curve, key=lambda c: c[0])
    return {
        "graph": graph, "arm": arm, "k": k // over, "rate": lr, "dropout": dropout, "seed": seed, "batch_size": batch,
        "epochs": epochs, "val": val, "micro": micro, "macro": macro, "cpu_seconds": seconds,
    }  # fmt: skip


NAMES = ("graph", "arm", "rate", "dropout", "seed", "epochs")


def rows_of(lines: Lines) -> list[dict[str, Any]]:
    """Runs of the length that is asked for."""
    return [row for row in lines.rows.values() if row["epochs"] == GRAPHS[row["graph"]][2]]


def best(rows: list[dict[str, Any]], graph: str, arm: str) -> tuple[float, float]:
    """The pair of settings with the best mean validation score over the trials."""
    mine = [r for r in rows if (r["graph"], r["arm"]) == (graph, arm) and r["seed"] in TRIALS]

    def val(pair: tuple[float, float]) -> float:
        return statistics.mean(r["val"] for r in mine if (r["rate"], r["dropout"]) == pair)

    return max(SETTINGS, key=val)


def table(rows: list[dict[str, Any]]) -> str:
    head = ("graph", "", "neighbours", "rate, dropout", "micro-F1", "macro-F1", "less the script at k", "seeds")
    lines = []
    for graph in GRAPHS:
        found = {
            arm: {r["seed"]: r for r in rows if (r["graph"], r["arm"]) == (graph, arm) and r["seed"] in SEEDS}
            for arm in ARMS
        }
        for arm, mine in found.items():
            if not mine:
                continue
            one = next(iter(mine.values()))
            micro, macro = (statistics.mean(r[k] for r in mine.values()) for k in ("micro", "macro"))
            apart = "" if arm == "the script" else paired(mine, found["the script"])
            cells = (graph, arm, f"{one['k']}, {one['k']}", f"{one['rate']}, {one['dropout']}", f"{micro:.4f}",
                     f"{macro:.4f}", apart, str(len(mine)))  # fmt: skip
            lines.append(cells)
    return markdown(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("ADAHOP_DATA", "data"), type=Path)
    parser.add_argument("--out", default=HERE / "results" / "typed_pyg.jsonl", type=Path)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after this many")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--processes", type=int, default=0, help="0: in this one")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    lines = Lines(args.out, NAMES)
    if args.table:
        print(table(rows_of(lines)))
        return
    torch.set_num_threads(1)
    adahop.ops.set_threads(1)
    for stage in (TRIALS, SEEDS):
        rows = rows_of(lines)
        asked = [
            (graph, arm, *pair, seed, GRAPHS[graph][2])
            for seed in stage
            for graph in GRAPHS
            for arm in args.arms.split(",")
            for pair in (SETTINGS if stage is TRIALS else [best(rows, graph, arm)])
        ]
        if not lines.fill(asked, run, args.data, jobs=args.processes, seconds=60 * args.minutes):
            return
    print(table(rows_of(lines)))


if __name__ == "__main__":
    main()
