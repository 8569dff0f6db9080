"""The memory without a pass beside the snapshot and plain draws: error, score, bytes, time per step.

    python lab/benchmarks/pyg_memory.py train --data DIR [--graph ppi_rebuilt_labels] [--model gcn] [--seeds 2]
    python lab/benchmarks/pyg_memory.py time --data DIR [--graph ppi_rebuilt_labels] [--model gcn]
    python lab/benchmarks/pyg_memory.py big [--nodes 1000000] [--edges 50000000] [--keep FILE]

One JSON line per row is appended to results/pyg_memory.jsonl, with the command. `train`: the relative squared error of
a batch's results before a step, against all neighbours and without dropout, four batches per epoch; the score of the
best validation epoch. Scores and errors come from a copy of the model, so that the history never sees the whole graph.
`time`: processor milliseconds per step, all ways in turns. `big`: steps per second with it and without, in turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE

import adahop
from adahop.metrics import criterion, score
from adahop.pyg import AdaptiveNeighborLoader, inference, scale_messages
from adahop_lab.rows import add_row

MODELS: dict[str, Any] = {"sage": GraphSAGE, "gcn": GCN, "gat": GAT}
GRAPHS = {  # features, metric, batch size, epochs, rate, dropout
    "ppi_rebuilt_labels": ("auto", "micro-f1", 1024, 12, 0.01, 0.1),
    "amazon_computers": ("raw", "accuracy", 512, 20, 0.01, 0.1),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"estimator": "plain"},
    "snapshot": {"estimator": "snapshot"},
    "history": {"estimator": "history"},
    "history, half": {"estimator": "history", "history_dtype": torch.float16},
    "history, 8 bits": {"estimator": "history", "history_dtype": torch.int8},
    "history, training rows alone": {"estimator": "history", "history_refresh": 0},
}


class Training:
    """A model of PyG's and its loader."""

    def __init__(self, data: Data, kind: str, way: dict[str, Any], k: int, batch: int, seed: int, dropout: float,
                 hidden: int = 64, rate: float = 0.01):  # fmt: skip
        torch.manual_seed(seed)
        self.data, outputs = data, int(data.classes)
        self.model = scale_messages(MODELS[kind](data.x.shape[1], hidden, 2, outputs, dropout=dropout))
        self.loader = AdaptiveNeighborLoader(
            data, [k, k], data.train_mask, batch_size=batch, shuffle=True, seed=seed, **way
        )
        self.loader.learn(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate)
        self.spent: list[float] = []
        self.batches = iter(self.loader)

    def next(self) -> Data:
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        return batch

    def learn(self, batch: Data) -> None:
        out = self.model(batch.x, batch.edge_index)[: batch.batch_size]
        criterion(out, batch.y[: batch.batch_size]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, clock: Any = time.process_time) -> None:
        began = clock()
        self.learn(self.next())
        self.spent.append(clock() - began)

    @torch.no_grad()
    def exact(self) -> Tensor:
        """By a copy, which no history listens to."""
        return inference(copy.deepcopy(self.model), self.data)

    @torch.no_grad()
    def error(self, batch: Data) -> float:
        """Of this batch's results, as they would be without dropout; nothing is written down."""
        exact = self.exact()[batch.n_id[: batch.batch_size]]
        self.model.eval()
        out = self.model(batch.x, batch.edge_index)[: batch.batch_size]
        self.model.train()
        if self.loader.estimator == "history":
            self.loader._memory._pending.clear()
        return float((out - exact).square().sum() / exact.square().sum())


def train(args: argparse.Namespace) -> None:
    features, metric, size, epochs, rate, dropout = GRAPHS[args.graph]
    data = adahop.load(str(args.data / f"{args.graph}.npz"), features=features)
    for seed in range(args.seeds):
        for name in args.ways or WAYS:
            run = Training(data, args.model, WAYS[name], args.neighbors, size, seed, dropout, rate=rate)
            errors, curve, cpu = [], [], 0.0
            for _ in range(args.epochs or epochs):
                many, found = len(run.loader), []
                began = time.process_time()
                for i, batch in enumerate(run.loader):
                    if i % max(many // 4, 1) == max(many // 8, 0) and len(found) < 4:
                        cpu += time.process_time() - began
                        found.append(run.error(batch))
                        began = time.process_time()
                    run.learn(batch)
                cpu += time.process_time() - began
                errors.append(sum(found) / len(found))
                out = run.exact()
                curve.append([score(metric, out[m], data.y[m]) for m in (data.val_mask, data.test_mask)])
            best = max(range(len(curve)), key=lambda i: curve[i][0])
            keep({
                "what": "train", "graph": args.graph, "model": args.model, "k": args.neighbors, "way": name,
                "seed": seed, "dropout": dropout, "error_first": errors[0], "error": sum(errors[1:]) / len(errors[1:]),
                "test": curve[best][1], "val": curve[best][0], "best_epoch": best + 1, "cpu_seconds": round(cpu, 1),
                **run.loader.memory_cost(),
            }, args.out)  # fmt: skip


def turns(runs: dict[str, Training], steps: int, clock: Any) -> None:
    for _ in range(steps):
        for run in runs.values():
            run.step(clock)


def timed(args: argparse.Namespace) -> None:
    features, _, size, _, rate, dropout = GRAPHS[args.graph]
    data = adahop.load(str(args.data / f"{args.graph}.npz"), features=features)
    runs = {
        n: Training(data, args.model, WAYS[n], args.neighbors, size, 0, dropout, rate=rate) for n in args.ways or WAYS
    }
    turns(runs, args.warm, time.process_time)
    for run in runs.values():
        run.spent.clear()
    turns(runs, args.steps, time.process_time)
    for name, run in runs.items():
        ms = round(1e3 * median(run.spent), 2)
        mean = round(1e3 * sum(run.spent) / len(run.spent), 2)
        keep({"what": "time", "graph": args.graph, "model": args.model, "k": args.neighbors, "way": name,
              "step_ms": ms, "mean_ms": mean, **run.loader.memory_cost()}, args.out)  # fmt: skip


def big_graph(nodes: int, edges: int, file: Path | None) -> Data:
    """Sources by a power law, targets at random, 64 features."""
    if file is not None and file.exists():
        return torch.load(file, weights_only=False)
    g = torch.Generator().manual_seed(0)
    src = (nodes * torch.rand(edges, generator=g).square_()).long()
    dst = torch.randint(nodes, (edges,), generator=g)
    x, y = torch.randn(nodes, 64, generator=g), torch.randint(16, (nodes,), generator=g)
    data = Data(x=x, y=y, edge_index=torch.stack([src, dst]), num_nodes=nodes, classes=16)
    data.train_mask = torch.rand(nodes, generator=g) < 0.1
    if file is not None:
        torch.save(data, file)
    return data


def big(args: argparse.Namespace) -> None:
    data = big_graph(args.nodes, args.edges, args.keep)
    folder = tempfile.mkdtemp()
    more = {"history, half, on disk": {**WAYS["history, half"], "history_dir": folder}}
    ways = {k: v for k, v in {**WAYS, **more}.items() if k in (args.ways or ["plain", "history"])}
    graph = AdaptiveNeighborLoader(data).sampler.graph  # made once
    data.graph = graph
    runs = {n: Training(data, args.model, way, args.neighbors, 1024, 0, 0.0) for n, way in ways.items()}
    turns(runs, 3, time.perf_counter)  # kernels compile
    for part, steps in (("first", args.steps), ("later", args.steps)):
        for run in runs.values():
            run.spent.clear()
        turns(runs, steps, time.perf_counter)
        for name, run in runs.items():
            per_second = round(1.0 / median(run.spent), 2)
            keep({"what": "big", "part": part, "nodes": args.nodes, "edges": args.edges, "model": args.model,
                  "k": args.neighbors, "way": name, "steps_per_second": per_second,
                  "step_ms": round(1e3 * median(run.spent), 1), "threads": torch.get_num_threads(),
                  **run.loader.memory_cost()}, args.out)  # fmt: skip
        if part == "first":
            filled(runs)


def filled(runs: dict[str, Training]) -> None:
    """What a run comes to after an epoch or two: all sums that never change are known, all rows seen."""
    for run in runs.values():
        memory = run.loader._memory
        if run.loader.estimator != "history" or not memory.refresh:
            continue
        usual, memory.refresh = memory.refresh, 1 << 15
        while not memory.round:
            memory.begin_batch(memory.whole_graph)
        memory.refresh = usual
        memory.spent = dict.fromkeys(memory.spent, 0.0)
        memory.steps = 0


def keep(row: dict[str, Any], out: Path) -> None:
    row = {**row, "command": shlex.join(["python", "lab/benchmarks/pyg_memory.py", *(shown(a) for a in sys.argv[1:])])}
    row = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
    print(json.dumps({k: v for k, v in row.items() if k != "command"}), flush=True)
    add_row(out, row)


def shown(word: str) -> str:
    return "DIR" if word.startswith("/") else word


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "time", "big"])
    parser.add_argument("--data", default=os.environ.get("ADAHOP_DATA", "data"), type=Path)
    parser.add_argument("--graph", default="ppi_rebuilt_labels", choices=list(GRAPHS))
    parser.add_argument("--model", default="gcn", choices=list(MODELS))
    parser.add_argument("--ways", nargs="*")
    parser.add_argument("--neighbors", type=int, default=5)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--edges", type=int, default=50_000_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a file for the big graph")
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "pyg_memory.jsonl", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    {"train": train, "time": timed, "big": big}[args.what](args)


if __name__ == "__main__":
    main()
