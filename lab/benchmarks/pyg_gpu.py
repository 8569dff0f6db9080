"""A PyG model on one GPU: an epoch with batches of the loader on the CPU and on the device, at Reddit's size.

    python lab/benchmarks/pyg_gpu.py --out pyg_gpu.json
    python lab/benchmarks/pyg_gpu.py --small --device cpu --out small.json     # a trial of the script

A two-layer SAGE of PyG's own layers, batches of 1,024 with 10 + 10 neighbours, over a made graph of 233 k nodes, 110 M
edges and 602 features. Each way is measured by itself: seconds until the loader stands, of the first epoch, and the
median of the epochs after it, with the loader's share of them. A way that fails leaves its traceback in its row and the
others run. `padded` and `compiled` are plain PyG models, to which the scale is the edge weight's business.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import time
import traceback
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch_geometric
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import GraphConv, SAGEConv

import adahop
from adahop import ops
from adahop.pyg import AdaptiveNeighborLoader
from adahop_lab.process import turn

REDDIT = {"nodes": 232_965, "edges": 110_000_000, "width": 602, "classes": 41, "train": 153_932}
SMALL = {"nodes": 2_000, "edges": 40_000, "width": 32, "classes": 5, "train": 1_200}
HERE = "the loader on the CPU, batches moved"
WAYS: dict[str, dict[str, Any]] = {  # arguments of the loader; `learn`, `weighted` and `compile` are the script's
    "cpu uniform": {"method": "graphsage", "prefetch": 2, "at": HERE},
    "cpu adahop": {"estimator": "plain", "prefetch": 2, "learn": True, "at": HERE},
    "device uniform": {"method": "graphsage"},
    "device adahop, plain": {"estimator": "plain", "learn": True},
    "device adahop, history": {"estimator": "history", "learn": True},
    "device adahop, snapshot": {"learn": True},
    "device uniform, cache .2": {"method": "graphsage", "cache": 0.2},
    "device uniform, cache 0": {"method": "graphsage", "cache": 0.0},
    "device uniform, padded": {"method": "graphsage", "padded": True, "drop_last": True, "weighted": True},
    "device uniform, compiled": {
        "method": "graphsage", "padded": True, "drop_last": True, "weighted": True, "compile": True
    },
}  # fmt: skip


def made(size: dict[str, int], seed: int = 0) -> Data:
    """A power law of degrees and sources that prefer low numbers, as in gpu_epoch.py; labels are chance."""
    g = torch.Generator().manual_seed(seed)
    n = size["nodes"]
    degree = torch.rand(n, generator=g).pow(-0.6)
    degree = (degree * size["edges"] / degree.sum()).long().clamp(1, 20_000)
    many = int(degree.sum())
    source = (torch.rand(many, generator=g).pow(1.5) * n).long().clamp(max=n - 1)
    target = torch.repeat_interleave(torch.arange(n), degree)
    source = torch.where(source == target, (source + 1) % n, source)
    data = Data(x=torch.randn(n, size["width"], generator=g), edge_index=torch.stack([source, target]))
    data.y = torch.randint(size["classes"], (n,), generator=g)
    data.train_mask = torch.zeros(n, dtype=torch.bool)
    data.train_mask[torch.randperm(n, generator=g)[: size["train"]]] = True
    return data


class TwoLayers(nn.Module):
    """SAGE; `weighted`, a sum of messages times the edge weight instead of a mean."""

    def __init__(self, width: int, hidden: int, classes: int, weighted: bool):
        super().__init__()
        kind = GraphConv if weighted else SAGEConv
        self.one, self.two, self.weighted = kind(width, hidden), kind(hidden, classes), weighted

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        more = (edge_weight,) if self.weighted else ()
        return self.two(self.one(x, edge_index, *more).relu(), edge_index, *more)


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def measure(data: Data, size: dict[str, int], way: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a way, by part."""
    options, device = dict(way), given.device
    learn, weighted, compiled = (options.pop(name, False) for name in ("learn", "weighted", "compile"))
    there = options.pop("at", None) is None
    began = time.perf_counter()
    loader = AdaptiveNeighborLoader(
        data, given.neighbors, data.train_mask, batch_size=given.batch, shuffle=True, seed=0,
        **({"device": device} if there else {}), **options,
    )  # fmt: skip
    wait(device)
    row: dict[str, Any] = {"setup_s": time.perf_counter() - began}
    torch.manual_seed(0)
    model = TwoLayers(size["width"], given.hidden, size["classes"], weighted).to(device)
    run = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    if learn:
        loader.learn(model)
    seconds, drawing, seen = [], [], {"batches": 0, "nodes": 0, "edges": 0}
    for _ in range(given.epochs + 1):
        began = asked = time.perf_counter()
        waited = 0.0
        for batch in loader:
            waited += time.perf_counter() - asked
            batch = batch if there else batch.to(device)
            out = run(batch.x, batch.edge_index, batch.edge_weight) if weighted else run(batch.x, batch.edge_index)
            loss = cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seen = {"batches": seen["batches"] + 1, "nodes": seen["nodes"] + int(batch.num_nodes or 0),
                    "edges": seen["edges"] + batch.num_edges}  # fmt: skip
            asked = time.perf_counter()
        wait(device)
        seconds.append(time.perf_counter() - began)
        drawing.append(waited)
    row |= {
        "first_epoch_s": seconds[0], "epoch_s": median(seconds[1:]), "epochs_s": seconds,
        "host_in_loader_s": median(drawing[1:]),  # on a device the host queues work, and waits for sizes
        "batches": seen["batches"] // (given.epochs + 1), "nodes_per_batch": seen["nodes"] / seen["batches"],
        "edges_per_batch": seen["edges"] / seen["batches"], "loss": float(loss.detach()), "hit_rate": loader.hit_rate(),
    }  # fmt: skip
    if device.startswith("cuda"):
        row["peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    return row


def tried(data: Data, size: dict[str, int], way: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    try:
        return measure(data, size, way, given)
    except Exception:
        return {"failed": traceback.format_exc()[-3000:]}
    finally:
        if given.device.startswith("cuda"):
            with contextlib.suppress(Exception):  # after a kernel that failed, every call of CUDA fails
                torch.cuda.empty_cache()


def main(words: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="2,000 nodes: to try the script")
    parser.add_argument("--only", default="", help="ways whose name has this in it")
    parser.add_argument("--neighbors", type=int, nargs="+", default=[10, 10])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3, help="after the first")
    parser.add_argument("--out", default="pyg_gpu.json")
    given = parser.parse_args(words)
    size = SMALL if given.small else REDDIT
    data = made(size)
    about = {
        "command": "python lab/benchmarks/pyg_gpu.py " + " ".join(sys.argv[1:] if words is None else words),
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else platform.processor() or "cpu",
        "graph": f"{data.num_nodes} nodes, {data.num_edges} edges, {size['width']} features", "batch": given.batch,
        "neighbors": given.neighbors, "hidden": given.hidden, "threads": ops.get_threads(),
        "torch": torch.__version__, "pyg": torch_geometric.__version__, "adahop": adahop.__version__,
    }  # fmt: skip
    rows = []
    for name in (name for name in WAYS if given.only in name):
        with turn():
            rows.append({"way": name, **tried(data, size, WAYS[name], given), **about})
        short = {k: rows[-1][k] for k in ("setup_s", "first_epoch_s", "epoch_s", "hit_rate", "failed") if k in rows[-1]}
        print(name, short, flush=True)
        Path(given.out).write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
