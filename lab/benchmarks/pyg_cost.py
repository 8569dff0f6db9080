"""What training costs: the scripts in pyg/ at k neighbours, and converted at k/2, part by part.

    python lab/benchmarks/pyg_cost.py --data DIR [--only "tolokers gat"] [--rounds 5]

The scripts are those of pyg_half.py, with the settings that it chose. Their epochs run in turns, one of each way per
round, on one thread; a figure is the median over rounds, after one round that is not counted, and a ratio the median of
the rounds' own ratios. An epoch is split into the draw (from one batch to the next, with what the sampler learns), the
rest of the step (model, loss, gradient, optimizer), and the evaluation on all nodes that follows it in every script,
which takes the snapshot (measured for the first and the last way). `listening` is what it adds to a step to note
messages and to learn from them, with batches drawn by the same odds; `learned odds` adds what these odds change in a
batch (GCN's reach more nodes). Each cell is written as it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from adahop_lab.rows import read_rows

HERE = Path(__file__).parent
GRAPHS = ("amazon_computers", "tolokers", "ppi_rebuilt_labels")
K = 10
DRAWS = 'method="adahop", estimator="plain"'
TAUGHT = "learned, k/2"  # draws by what the way after it has learned
WAYS: dict[str, tuple[int, str, bool, bool]] = {  # neighbours, arguments of the loader, scale_messages, learn
    "script, k": (K, 'method="graphsage", replace=False', False, False),
    "script, k/2": (K // 2, 'method="graphsage", replace=False', False, False),
    "scaled, k/2": (K // 2, DRAWS, True, False),
    TAUGHT: (K // 2, DRAWS, True, False),
    "listening, k/2": (K // 2, DRAWS, True, True),
    "adahop, k/2": (K // 2, 'method="adahop"', True, True),
}
ABOUT = {
    "script, k": "uniform draws of our loader without replacement, k neighbours per hop, layers as PyG has them",
    "script, k, pyg": "PyG's own NeighborLoader, k neighbours per hop",
    "script, k/2": "the same with k/2",
    "scaled, k/2": "draws of method adahop, nothing is learned; layers apply the scale",
    TAUGHT: "the same by the odds that the next way has learned so far: other nodes, and as many edges",
    "listening, k/2": "and the sampler learns from their messages",
    "adahop, k/2": "and the snapshot: the default of the loader",
}


def scripts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pyg_half", HERE / "pyg_half.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyg_half"] = module
    spec.loader.exec_module(module)
    return module


def with_wheel() -> bool:
    """Whether PyG's NeighborLoader can draw here."""
    from torch_geometric import typing

    return bool(typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE)


class Script:
    """A script up to its first epoch, and its epochs one at a time."""

    def __init__(self, half: ModuleType, graph: str, script: str, way: str, folder: Path, settings: tuple):
        features, metric, _, batch, _ = half.GRAPHS[graph]
        text = (HERE / "pyg" / "nodes.py").read_text()
        k = K
        if way != "script, k, pyg":
            k, options, scaled, learn = WAYS[way]
            line = "from adahop.pyg import AdaptiveNeighborLoader as NeighborLoader, scale_messages"
            text = text.replace(half.IMPORT, line)
            text = text.replace(half.LOADER, half.LOADER[:-1] + f", seed=args.seed, {options})")
            more = ("scale_messages(model)\n" if scaled else "") + ("loader.learn(model)\n" if learn else "")
            text = text.replace("\noptimizer =", f"\n{more}optimizer =")
        words = {
            "conv": script, "dataset": folder / f"{graph}.npz", "features": features, "metric": metric,
            "neighbors": k, "batch-size": batch, "lr": settings[0], "dropout": settings[1], "epochs": 0,
        }  # fmt: skip
        before, sys.argv = sys.argv, [script, *(w for n, v in words.items() for w in (f"--{n}", str(v)))]
        self.parts: dict[str, Any] = {"__name__": "__main__"}
        try:
            exec(compile(text, f"{script}.py", "exec"), self.parts)
        finally:
            sys.argv = before
        self.spent: list[dict[str, float]] = []
        self.edges = self.batches = 0

    def epoch(self, evaluate: bool = True) -> None:
        """As in the script; ways that take no snapshot may leave the evaluation out."""
        model, optimizer, criterion = (self.parts[name] for name in ("model", "optimizer", "criterion"))
        adahop, data, clock = self.parts["adahop"], self.parts["data"], time.process_time
        draw = step = 0.0
        self.edges = self.batches = 0
        model.train()
        at = clock()
        for batch in self.parts["loader"]:
            now = clock()
            draw += now - at
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = criterion(out, batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            self.edges += batch.edge_index.shape[1]
            self.batches += 1
            at = clock()
            step += at - now
        draw += clock() - at
        at = clock()
        if evaluate:
            adahop.inference(model, data)
        self.spent.append({"train": draw + step, "draw": draw, "step": step, "evaluation": clock() - at})

    def row(self, base: Script) -> dict[str, Any]:
        """Milliseconds per epoch, and the ratio to another way by rounds."""
        mine, theirs = self.spent[1:], base.spent[1:]
        ms = {name: round(1e3 * median(s[name] for s in mine), 1) for name in mine[0]}
        ratio = [a["train"] / b["train"] for a, b in zip(mine, theirs, strict=True)]
        return {**ms, "edges": self.edges, "batches": self.batches, "ratio": round(median(ratio), 3),
                "ratios": [round(r, 3) for r in ratio]}  # fmt: skip


def cell(half: ModuleType, graph: str, script: str, args: argparse.Namespace, settings: tuple) -> dict[str, Any]:
    names = [*WAYS, *(["script, k, pyg"] if with_wheel() else [])]
    names = [n for n in names if not args.ways or n in args.ways.split(";")]
    ways = {name: Script(half, graph, script, name, args.data, settings) for name in names}
    for _ in range(args.rounds + 1):
        for name, one in ways.items():
            if name == TAUGHT:
                taught, teacher = (ways[n].parts["loader"].sampler for n in (TAUGHT, "listening, k/2"))
                taught.policy.load_state_dict(copy.deepcopy(teacher.policy.state_dict()))
            one.epoch(evaluate=name in ("script, k", "adahop, k/2"))
    full = [w for n, w in ways.items() if n in ("script, k", "script, k, pyg")] or list(ways.values())[:1]
    base = min(full, key=lambda w: median(s["train"] for s in w.spent[1:]))
    rows = {name: one.row(base) for name, one in ways.items()}
    found: dict[str, Any] = {"lr": settings[0], "dropout": settings[1], "rows": rows}
    for name, before in (("listening", TAUGHT), ("learned odds", "scaled, k/2")):
        if {"listening, k/2", before} <= ways.keys():
            pairs = zip(ways["listening, k/2"].spent[1:], ways[before].spent[1:], strict=True)
            found[name] = round(median(a["train"] / b["train"] for a, b in pairs) - 1, 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", default=os.environ.get("ADAHOP_DATA", "data"), type=Path, help="folder of the .npz files"
    )
    parser.add_argument("--only", default="", help="words that must all be in 'graph script'")
    parser.add_argument("--ways", default="", help="some of the ways, separated by semicolons")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=HERE / "results" / "pyg_cost.json", type=Path)
    args = parser.parse_args()

    import torch

    from adahop.ops import set_threads

    torch.set_num_threads(1)
    set_threads(1)
    half = scripts()
    tried = read_rows(HERE / "results" / "pyg_half.jsonl")
    found: dict[str, Any] = {"cells": {}}
    with contextlib.suppress(FileNotFoundError):
        found = {"cells": {}, **json.loads(args.out.read_text())}
    found |= {
        "command": "python lab/benchmarks/pyg_cost.py --data DIR",
        "unit": "processor milliseconds per epoch, one thread, epochs of all ways in turns, median over rounds",
        "k": K, "hidden": 64, "rounds": args.rounds, "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "baseline": "the faster of our uniform loader and PyG's NeighborLoader" if with_wheel() else
        "our uniform loader: neither pyg-lib nor torch-sparse has a wheel here, so PyG's NeighborLoader cannot draw",
        "ways": {name: text for name, text in ABOUT.items() if name in WAYS or with_wheel()},
    }  # fmt: skip
    for graph in GRAPHS:
        for script in half.SCRIPTS:
            if not all(word in f"{graph} {script}" for word in args.only.split()):
                continue
            settings = half.settings(tried, graph, script)
            found["cells"][f"{graph} {script}"] = one = cell(half, graph, script, args, settings)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
            print(graph, script, settings, *(f"{n} {one.get(n)}" for n in ("listening", "learned odds")))
            for name, row in one["rows"].items():
                print(f"  {name:16}", *(f"{k} {v}" for k, v in row.items() if k != "ratios"), flush=True)


if __name__ == "__main__":
    main()
