"""The best score on a graph with few validation nodes: settings by repeated splits, then ten seeds on its own split.

    python lab/benchmarks/repeated_splits.py pubmed.npz [--splits 3] [--seeds 10] [--out FILE]
    python lab/benchmarks/repeated_splits.py --table [--out FILE]

The candidates (MODELS x HIDDEN x DROPOUT) are fixed beforehand. Each trains once on every split of training and
validation nodes into new ones, of which a fifth is judged; the best mean validation score decides. Test nodes take no
part in that, and only the chosen candidate's test scores are computed. Runs that have ended are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import torch

import adahop
from adahop.config import Config
from adahop.seams import NodeData
from adahop_lab.rows import Lines, Row, markdown

MODELS: dict[str, dict[str, Any]] = {
    "gcn, residual": {"model": "gcn", "arch": "residual", "model_options": {"activation": "relu"}},
    "gcn, gcnii": {"model": "gcn", "arch": "gcnii"},
    "gcn, gcnii, 4 layers": {"model": "gcn", "arch": "gcnii", "sizes": (2,) * 4},
    "sage, residual": {"model": "sage", "arch": "residual", "model_options": {"activation": "relu"}},
    "sage, plain": {"model": "sage", "arch": "plain"},
    "gat, residual": {"model": "gat", "arch": "residual"},
}
HIDDEN, DROPOUT = (64, 256), (0.2, 0.5)
COMMON = {"sizes": (2, 2), "epochs": 40, "lr": 0.003, "batch_size": 256, "average": 0.99}
TRIAL = 1000  # the first seed of the runs that choose
NAMES = ("graph", "model", "hidden", "dropout", "seed")
Task = tuple[str, str, int, float, int]


def split_anew(data: NodeData, seed: int) -> NodeData:
    """Training and validation nodes dealt out anew, a fifth of them for validation; the test nodes are left out."""
    both = (data.train_mask | data.val_mask).nonzero().flatten()
    both = both[torch.randperm(len(both), generator=torch.Generator().manual_seed(seed))]
    val, train = (
        torch.zeros_like(data.train_mask).index_fill_(0, part, True) for part in both.tensor_split([len(both) // 5])
    )
    out: Any = copy.copy(data)
    out.val_mask, out.train_mask, out.test_mask = val, train, val
    return out


def train(task: Task, folder: str, device: str = "cpu") -> Row:
    torch.set_num_threads(1)
    graph, model, hidden, dropout, seed = task
    data: NodeData = adahop.load(str(Path(folder) / graph))
    if seed >= TRIAL:
        data = split_anew(data, seed)
    config = Config(**{**COMMON, **MODELS[model]}, hidden=hidden, dropout=dropout, device=device)
    result = adahop.fit(data, config, seed=seed)
    row = {**dict(zip(NAMES, task, strict=True)), "val": result.val, "noise": result.noise, "seconds": result.seconds}
    return row if seed >= TRIAL else {**row, "test": result.test}


def best(rows: list[Row], graph: str) -> tuple[str, int, float]:
    """The candidate with the best mean validation score over the splits."""
    found: dict[tuple[str, int, float], list[float]] = {}
    for row in rows:
        if row["graph"] == graph and row["seed"] >= TRIAL:
            found.setdefault((row["model"], row["hidden"], row["dropout"]), []).append(row["val"])
    return max(found, key=lambda candidate: statistics.fmean(found[candidate]))


def table(rows: list[Row]) -> str:
    lines = []
    for graph in dict.fromkeys(row["graph"] for row in rows):
        chosen = best(rows, graph)
        for candidate in dict.fromkeys((r["model"], r["hidden"], r["dropout"]) for r in rows if r["graph"] == graph):
            own = [r for r in rows if (r["graph"], r["model"], r["hidden"], r["dropout"]) == (graph, *candidate)]
            val = statistics.fmean(r["val"] for r in own if r["seed"] >= TRIAL)
            test = [r["test"] for r in own if r["seed"] < TRIAL] if candidate == chosen else []
            score = f"{statistics.fmean(test):.4f} ± {statistics.stdev(test):.4f}" if len(test) > 1 else ""
            lines.append([graph, *map(str, candidate), f"{val:.4f}", score])
    return markdown(("graph", "model", "hidden", "dropout", "validation, splits", "test"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graph", nargs="?", type=Path)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/repeated_splits.jsonl")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    said = parser.parse_args()
    lines = Lines(said.out, NAMES)
    if said.table:
        print(table(list(lines.rows.values())))
        return
    if said.graph is None:
        parser.error("a graph must be given, like pubmed.npz")
    name, folder = said.graph.name, str(said.graph.parent)
    given, seeds = (folder, said.device), range(TRIAL, TRIAL + said.splits)
    lines.fill(((name, *c, s) for s, *c in product(seeds, MODELS, HIDDEN, DROPOUT)), train, *given, jobs=said.processes)
    chosen = best(list(lines.rows.values()), name)
    print("chosen:", *chosen, flush=True)
    lines.fill(((name, *chosen, s) for s in range(said.seeds)), train, *given, jobs=said.processes)


if __name__ == "__main__":
    main()
