"""Half the neighbours: pyg/nodes.py, converted in three lines, beside uniform draws of twice as many.

    python lab/benchmarks/pyg_half.py --data DIR [--out FILE] [--only TEXT] [--seeds 3] [--tune | --table]

One JSON line a run; finished runs are not repeated. `--tune` runs the grid with PyG's uniform draws alone, at k
neighbours and another seed; every way of drawing then takes what was best on validation there. `--table` writes the
table of lab/docs/results.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from adahop_lab.rows import Lines, markdown, replaced

HERE = Path(__file__).parent
SCRIPTS = ("sage", "gcn", "gat")
GRAPHS: dict[str, tuple[str, str, tuple[int, ...], int, int]] = {  # file: features, metric, each k, batch size, epochs
    "cora": ("auto", "accuracy", (4,), 256, 40),
    "amazon_computers": ("raw", "accuracy", (4, 10), 512, 20),
    "tolokers": ("auto", "roc-auc", (10,), 512, 40),
    "pubmed": ("auto", "accuracy", (4,), 512, 20),
    "ppi_rebuilt_labels": ("auto", "micro-f1", (10,), 1024, 12),
}
GRID = ((0.01, 0.5), (0.01, 0.1), (0.003, 0.1))  # learning rate, dropout
WAYS = {  # what the loader's line is given besides
    "pyg": 'method="graphsage", replace=False',  # the script as it is: uniform, without replacement, no scale
    "adahop": 'method="adahop"',
    "adahop, noise .5": 'method="adahop", noise=0.5',  # half of what is remembered, and none of it
    "adahop, noise 1": 'method="adahop", noise=1.0',
    "plain": 'method="adahop", estimator="plain"',  # learned draws without the snapshot
    "snapshot": 'method="graphsage", replace=False, estimator="snapshot"',  # the snapshot with uniform draws
    "bs.m": 'method="bs.m"',
    "bs": 'method="bs"',
}
WHICH = [("pyg", 1), ("adahop", 2), ("plain", 2), ("snapshot", 2), ("pyg", 2), ("bs.m", 2), ("bs", 2)]  # of k, k / 2
NAMES = {"cora": "Cora", "amazon_computers": "computers", "tolokers": "tolokers", "pubmed": "Pubmed",
         "ppi_rebuilt_labels": "PPI"}  # fmt: skip
SAID = {"pyg": "the script", "adahop": "adahop", "plain": "learned draws alone", "snapshot": "snapshot alone",
        "bs.m": "bs.m", "bs": "bs"}  # fmt: skip
IMPORT = "from torch_geometric.loader import NeighborLoader"
LOADER = "batch_size=args.batch_size, shuffle=True)"


def converted(text: str, way: str) -> str:
    """A script with our loader in three changed lines, or two where nothing is scaled and nothing learned."""
    more = "" if way == "pyg" else ", scale_messages"
    for old, new in (
        (IMPORT, f"from adahop.pyg import AdaptiveNeighborLoader as NeighborLoader{more}"),
        (LOADER, LOADER[:-1] + f", seed=args.seed, {WAYS[way]})"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text if way == "pyg" else text.replace("\noptimizer =", "\nloader.learn(scale_messages(model))\noptimizer =")


class HalfTask(NamedTuple):
    """One run: a graph, a script, how neighbours are drawn, how many, and the settings."""

    graph: str
    script: str
    way: str
    k: int
    seed: int
    lr: float
    dropout: float


def ran(script: str, way: str, words: dict[str, Any]) -> tuple[str, float]:
    """What a script of pyg/ prints, converted in a way and with these words on its command line; processor seconds."""
    path = HERE / "pyg" / f"{script}.py"
    code, said, before = compile(converted(path.read_text(), way), str(path), "exec"), io.StringIO(), sys.argv
    sys.argv = [str(path), *(w for name, value in words.items() for w in (f"--{name}", str(value)))]
    began = time.process_time()
    try:
        with contextlib.redirect_stdout(said):
            exec(code, {"__name__": "__main__"})
    finally:
        sys.argv = before
    return said.getvalue(), round(time.process_time() - began, 1)


def run(task: HalfTask, folder: Path) -> dict[str, Any]:
    features, metric, _, batch, epochs = GRAPHS[task.graph]
    words = {
        "conv": task.script, "dataset": folder / f"{task.graph}.npz", "features": features, "metric": metric,
        "neighbors": task.k, "batch-size": batch, "lr": task.lr, "dropout": task.dropout, "epochs": epochs,
        "seed": task.seed,
    }  # fmt: skip
    text, seconds = ran("nodes", task.way, words)
    curve = [(float(v), float(t)) for v, t in re.findall(r"val ([\d.]+) test ([\d.]+)", text)]
    best = max(range(len(curve)), key=lambda i: curve[i][0])
    return {
        **task._asdict(), "batch_size": batch, "epochs": epochs, "best_epoch": best + 1, "val": curve[best][0],
        "test": curve[best][1], "curve": curve, "cpu_seconds": seconds,
    }  # fmt: skip


def settings(rows: list[dict[str, Any]], graph: str, script: str) -> tuple[float, float] | None:
    """What was best on validation for the script as it is; None before `--tune` has run."""
    tried = [r for r in rows if (r["graph"], r["script"], r["seed"]) == (graph, script, -1)]
    best = max(tried, key=lambda r: r["val"], default=None)
    return None if best is None else (best["lr"], best["dropout"])


def tasks(rows: list[dict[str, Any]], seeds: int, tune: bool, parts: int) -> list[HalfTask]:
    """The question first, then other ways; seed by seed, so that what is there at any time is balanced."""
    if tune:
        return [HalfTask(g, s, "pyg", GRAPHS[g][2][0], -1, *grid) for g in GRAPHS for s in SCRIPTS for grid in GRID]
    out = []
    for part in (WHICH[:2], WHICH[2:5], WHICH[5:])[:parts]:
        for seed in range(seeds):
            for graph, k, script in cells():
                chosen = settings(rows, graph, script)
                if chosen is not None:
                    out += [HalfTask(graph, script, way, k // half, seed, *chosen) for way, half in part]
    return list(dict.fromkeys(out))


def cells() -> list[tuple[str, int, str]]:
    return [(graph, k, script) for graph in GRAPHS for k in GRAPHS[graph][2] for script in SCRIPTS]


def table(rows: list[dict[str, Any]]) -> str:
    """Test scores of the ways that have run, and the paired difference of ours at k/2 to the script as it is at k."""
    columns = [c for c in WHICH if any(scores(rows, *cell, *c) for cell in cells())]
    head = [f"{SAID[way]}, {'k' if half == 1 else 'k/2'}" for way, half in columns]
    head.insert(2, "difference, paired")
    lines = []
    for graph, k, script in cells():
        found = [scores(rows, graph, k, script, *c) for c in columns]
        if len(found[0]) > 1:
            gaps = [found[1][s] - found[0][s] for s in found[0] if s in found[1]]
            said = [spread(list(f.values()), ".4f") for f in found]
            said.insert(2, spread(gaps, "+.4f"))
            lines.append([f"{NAMES[graph]}, {k}", script.upper(), *said])
    return markdown(["graph, k", "script", *head], lines)


def scores(rows: list[dict[str, Any]], graph: str, k: int, script: str, way: str, half: int) -> dict[int, float]:
    """Test score by seed, of the settings that were chosen."""
    key = (graph, script, way, k // half, *(settings(rows, graph, script) or ()))
    mine = [r for r in rows if tuple(r[f] for f in ("graph", "script", "way", "k", "lr", "dropout")) == key]
    return {r["seed"]: r["test"] for r in mine if r["seed"] >= 0}


def spread(values: list[float], form: str) -> str:
    """Mean and standard deviation; how many where they are not three."""
    if len(values) < 2:
        return "–"
    many = "" if len(values) == 3 else f" ({len(values)} seeds)"
    said = f"{mean(values):{form}} ± {stdev(values):.4f}".replace("0.", ".").replace("-", "−")
    return said + many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", default=os.environ.get("ADAHOP_DATA", "data"), type=Path, help="folder of the .npz files"
    )
    parser.add_argument("--out", default=HERE / "results" / "pyg_half.jsonl", type=Path)
    parser.add_argument("--only", default="", help="words that must all be in 'graph script way k'")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--graphs", default=",".join(GRAPHS))
    parser.add_argument(
        "--parts", type=int, default=3, help="1: the question alone; 2: each half of it by itself; 3: all ways"
    )
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    lines = Lines(args.out, HalfTask._fields)
    rows = list(lines.rows.values())
    if args.table:
        replaced(HERE.parent / "docs" / "results.md", "half", table(rows))
        return
    words, graphs = args.only.split(), args.graphs.split(",")
    asked = tasks(rows, args.seeds, args.tune, args.parts)
    lines.fill([t for t in asked if t.graph in graphs and all(w in map(str, t[:4]) for w in words)], run, args.data)


if __name__ == "__main__":
    main()
