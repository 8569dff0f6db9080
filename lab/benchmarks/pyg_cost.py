"""What a step costs with PyG's models: the draw, the model alone, and what learning and the snapshot add to it.

    python lab/benchmarks/pyg_cost.py --data DIR [--graph ppi_rebuilt_labels] [--neighbors 10] [--batches 12]

Processor milliseconds a batch, in turns, median; one thread; the last row has half the neighbours. `pass` is a
pass over the whole graph, once an epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch_geometric.nn import GAT, GCN, GraphSAGE

import adahop
from adahop.metrics import criterion
from adahop.pyg import AdaptiveNeighborLoader, inference, scale_messages

MODELS: dict[str, Any] = {"GraphSAGE": GraphSAGE, "GCN": GCN, "GAT": GAT}
WAYS: dict[str, dict[str, Any]] = {
    "graphsage": {"method": "graphsage", "replace": False},
    "adahop, plain": {"method": "adahop", "estimator": "plain"},
    "adahop": {"method": "adahop"},
    "bs": {"method": "bs"},
    "bs.m": {"method": "bs.m"},
}


class Bench:
    """A model of PyG's with a loader of its own, which it teaches or not."""

    def __init__(self, data: Any, kind: str, way: str, k: int, learn: bool):
        torch.manual_seed(0)
        self.kind, self.way, self.k, self.learn = kind, way, k, learn
        self.model = MODELS[kind](data.x.shape[1], 128, num_layers=2, out_channels=data.classes)
        self.loader = AdaptiveNeighborLoader(
            data, [k, k], data.train_mask, batch_size=512, shuffle=True, **WAYS[way]
        )  # fmt: skip
        if learn:
            self.loader.learn(scale_messages(self.model))
        self.steps = iter(self.loader)
        self.spent: dict[str, list[float]] = {"draw": [], "step": []}

    def turn(self) -> None:
        """One batch: drawn (with what the last one taught), then forward and backward."""
        began = time.process_time()
        batch = next(self.steps)
        drawn = time.process_time()
        out = self.model(batch.x, batch.edge_index)[: batch.batch_size]
        criterion(out, batch.y[: batch.batch_size]).backward()
        self.model.zero_grad()
        self.spent["draw"].append(drawn - began)
        self.spent["step"].append(time.process_time() - drawn)

    def row(self) -> dict[str, Any]:
        ms = {name: round(1e3 * median(times[2:]), 1) for name, times in self.spent.items()}
        return {"model": self.kind, "way": self.way, "k": self.k, "learn": self.learn, **ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", default=os.environ.get("ADAHOP_DATA", "data"), type=Path, help="folder of the .npz files"
    )
    parser.add_argument("--graph", default="ppi_rebuilt_labels")
    parser.add_argument("--neighbors", type=int, default=10)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--out", default=Path(__file__).parent / "results" / "pyg_cost.json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = adahop.load(str(args.data / f"{args.graph}.npz"))
    found = []
    for kind in MODELS:
        alike = [Bench(data, kind, way, args.neighbors, learn) for way in WAYS for learn in (False, True)]
        alike.append(Bench(data, kind, "adahop", args.neighbors // 2, True))
        for _ in range(args.batches):
            for bench in alike:
                bench.turn()
        rows = [bench.row() for bench in alike]
        began = time.process_time()
        inference(alike[0].model, data)
        found.append({"model": kind, "pass": round(1e3 * (time.process_time() - began), 1), "rows": rows})
        for row in rows:
            print(*row.values(), flush=True)
        print(kind, "pass", found[-1]["pass"], flush=True)
    about = {"graph": args.graph, "neighbors": args.neighbors, "batches": args.batches, "batch_size": 512}
    args.out.write_text(json.dumps({**about, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
