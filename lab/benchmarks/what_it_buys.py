"""What each part buys, on the graphs of a folder: the runs behind docs/ablation.md, a JSON line each.

    python lab/benchmarks/what_it_buys.py --data DIR [--out FILE] [--jobs 2] [--only TEXT] [--device cpu]

Finished runs are not repeated. Settings were fixed beforehand, one for all methods on a graph; no dropout, so that what
is measured is the sampler's noise alone.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from adahop.samplers import Sampler
from adahop_lab.rows import Lines

GRAPHS = {  # file: hidden, lr, epochs
    "ppi_rebuilt_labels": (256, 3e-3, 12),
    "amazon_computers": (64, 1e-2, 20),
    "tolokers": (64, 1e-2, 20),
    "cora": (64, 1e-2, 20),
    "pubmed": (64, 1e-2, 10),
    "blogcatalog_attr": (64, 1e-2, 8),
    "flickr_small_attr": (64, 1e-2, 8),
    "coauthor_physics": (64, 1e-2, 4),
}
TRACKED = {"policy": "tracked", "draw": "systematic"}
ATTENDED = {"policy": "attended", "draw": "systematic"}
UNIFORM = {"policy": "uniform", "draw": "systematic"}
PARTS: dict[str, tuple[str, str, dict[str, Any], str | None]] = {  # name: model, method, options, estimator
    "graphsage": ("gcn", "graphsage", {}, None),
    "tracked": ("gcn", "graphsage", TRACKED, None),
    "adahop": ("gcn", "adahop", {}, None),
    "adahop, history": ("gcn", "adahop", {}, "exact+history"),
    "adahop, snapshot": ("gcn", "adahop", {}, "exact+snapshot"),
    "gat, everyone": ("gat", "graphsage", {}, None),
    "gat, adahop": ("gat", "adahop", {}, None),
    "gat, uniform, history": ("gat", "graphsage", UNIFORM, "exact+history"),
    "gat, tracked, history": ("gat", "graphsage", TRACKED, "exact+history"),
    "gat, attended, history": ("gat", "graphsage", ATTENDED, "exact+history"),
    "gat, attended, sums": ("gat", "graphsage", ATTENDED, "exact+sums"),
    "gat, tracked, snapshot": ("gat", "graphsage", TRACKED, "exact+snapshot"),
    "gat, attended, scores": ("gat", "graphsage", ATTENDED, "exact+scores"),
    "gat, attended, exact first": ("gat", "graphsage", ATTENDED, "exact"),
    "gat, tracked": ("gat", "graphsage", TRACKED, None),
    "gat, uniform, self-normalised": ("gat", "graphsage", {}, None),
    "gat, uniform, paper": ("gat", "graphsage", {}, None),
    "gat, uniform, softmax": ("gat", "graphsage", {}, None),
}
FORMS = ("self-normalised", "paper", "softmax")  # of attention over a sample without a memory; the first elsewhere


class PartTask(NamedTuple):
    """One run: a graph, the parts by name, neighbours a layer, a seed."""

    graph: str
    name: str
    k: int
    seed: int


def tasks() -> list[PartTask]:
    """Seed by seed, so that what is there at any time is balanced."""
    out = []
    for seed in range(3):
        for graph in GRAPHS:
            for name, k in (("adahop", 2), ("graphsage", 10), ("tracked", 2), ("tracked", 5)):
                out.append(PartTask(graph, name, k, seed))
        out.append(PartTask("ppi_rebuilt_labels", "adahop", 10, seed))
        if seed == 0:
            for graph in ("ppi_rebuilt_labels", "amazon_computers", "tolokers"):
                out += [PartTask(graph, f"adahop, {kind}", 2, seed) for kind in ("history", "snapshot")]
        for name in (n for n in PARTS if n.startswith("gat")):
            out.append(PartTask("ppi_rebuilt_labels", name, -1 if "everyone" in name else 5, seed))
    return out


def run(task: PartTask, folder: str, device: str) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    import adahop
    from adahop.diagnostics import Probe
    from adahop_lab.normaliser import normaliser_error

    hidden, lr, epochs = GRAPHS[task.graph]
    model, method, options, estimator = PARTS[task.name]
    lr = 2e-3 if model == "gat" else lr
    data = adahop.load(Path(folder) / f"{task.graph}.npz")
    last = -(-int(data.train_mask.sum()) // 256) * epochs
    at = [] if task.k < 0 else [last]
    probe = Probe(data, at=at, nodes=256, seed=task.seed, repeats=20, against=("uniform", "oracle"), gradient=True)
    normaliser: list[float] = []

    def look(step: int, net: Any, sampler: Sampler) -> None:
        probe(step, net, sampler)
        if step in at and model == "gat":
            x = data.to(device).x
            normaliser.extend(normaliser_error(net, sampler, x, probe.nodes, repeats=20, seed=task.seed))

    form = next((f for f in FORMS if task.name.endswith(f)), FORMS[0])
    began = time.perf_counter()
    result = adahop.fit(
        data, model=model, method=method, method_options=options, estimator=estimator, sizes=(task.k, task.k),
        hidden=hidden, lr=lr, epochs=epochs, dropout=0.0, batch_size=256, seed=task.seed, probe=look, device=device,
        model_options={"attention": form, "heads": 1} if model == "gat" else {}, noise=0.0,
    )  # fmt: skip
    return {
        **task._asdict(), "test": result.test, "val": result.val, "metric": data.metric, "hidden": hidden, "lr": lr,
        "epochs": epochs, "device": device, "layers": probe.rows, "normaliser": normaliser,
        "seconds": result.history[-1]["seconds"], "wall": time.perf_counter() - began,
        "curve": [[h["epoch"], h["val"], h["test"]] for h in result.history],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of the .npz files")
    parser.add_argument("--out", default="lab/benchmarks/results/what_it_buys.jsonl")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="words with commas between, one of which must be in 'graph name k'")
    parser.add_argument("--leave", default="", help="words that must not be")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    def wanted(t: PartTask) -> bool:
        text = f"{t.graph} {t.name} {t.k}"
        named = any(w in text for w in args.only.split(",")) if args.only else True
        left = any(w in text for w in args.leave.split(",")) if args.leave else False
        return named and not left and t.seed < args.seeds

    asked = filter(wanted, tasks())
    Lines(args.out, PartTask._fields).fill(asked, run, args.data, args.device, jobs=args.jobs)


if __name__ == "__main__":
    main()
