"""Train on a graph that does not fit into the memory allowed: 2e8 edges, 2 GiB.

    python lab/benchmarks/beyond_memory.py --folder DIR
        [--nodes 4000000 --edges 200000000 --limit-mib 2048] [--json FILE]

Makes the graph straight on disk (once), then trains from the folder in a process of its own whose memory is limited:
by a memory control group where one can be made (page cache counts), else by RLIMIT_DATA (mapped pages do not). Then the
same steps with everything in memory, unlimited, for the throughput beside; `--steps-only` leaves the evaluation
out, `--cached` leaves in the page cache what is there.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

import adahop
from adahop.capture import steps
from adahop.graph import Graph
from adahop.mapped import Folder
from adahop.run import Run
from adahop.train import Config, evaluate
from adahop_lab.process import Peak, forget, limited, memory, printed

CHUNK = 1 << 24


def make(home: Path, n: int, m: int, f: int, classes: int, train: int) -> None:
    """Planted classes, power-law degrees, seven edges in ten inside the class; a chunk of edges in memory at a time."""
    rng = np.random.default_rng(0)
    y = rng.integers(classes, size=n).astype(np.int16)
    order = np.argsort(y, kind="stable").astype(np.int32)
    size = np.bincount(y, minlength=classes)
    start = np.cumsum(size) - size
    w = np.minimum(rng.pareto(1.5, n) + 1.0, 200.0)
    indptr = np.concatenate([[0], np.rint(np.cumsum(w) * (m / w.sum()))]).astype(np.int64)
    with Folder(home, {"name": home.name, "classes": classes, "metric": "accuracy"}) as out:
        out.save("indptr", indptr)
        out.save("first", indptr[:-1])
        indices, x = out.array("indices", np.int32, (int(indptr[-1]),)), out.array("x", np.float32, (n, f))
        for a in range(0, len(indices), CHUNK):
            b = min(a + CHUNK, len(indices))
            kind = y[np.searchsorted(indptr, np.arange(a, b), side="right") - 1]
            inside, u = rng.random(b - a, dtype=np.float32) < 0.7, rng.random(b - a)
            own = order[start[kind] + (u * size[kind]).astype(np.int64)]
            indices[a:b] = np.where(inside, own, (u * n).astype(np.int32))
        means = (rng.standard_normal((classes, f)) / np.sqrt(f)).astype(np.float32)
        for a in range(0, n, 1 << 18):
            rows = y[a : a + (1 << 18)]
            x[a : a + len(rows)] = rng.standard_normal((len(rows), f), dtype=np.float32) + means[rows]
        out.save("y", y)
        ids = rng.permutation(n)
        for part, cut in {
            "train": slice(0, train),
            "val": slice(train, 2 * train),
            "test": slice(2 * train, 3 * train),
        }.items():
            out.save(f"{part}_idx", np.sort(ids[cut]))


class Held(Graph):
    """The normalised graph, copied into memory."""

    def normalized(self, kind=None, self_loops=True):
        return self

    def to(self, device, non_blocking=False):
        return self


def steps_of(run: Run, many: int) -> dict[str, float]:
    began, done, nodes, loss = time.perf_counter(), 0, 0, 0.0
    step = steps(run)
    while done < many:
        for found, batch in step:
            loss = float(found)
            done, nodes = done + 1, nodes + batch.num_nodes
            if done == many:
                break
    seconds = time.perf_counter() - began
    return {
        "steps": done,
        "seconds": seconds,
        "ms_a_step": 1000 * seconds / done,
        "nodes_a_step": nodes / done,
        "loss": loss,
    }


def child(args: argparse.Namespace) -> None:
    """One training; prints one JSON line."""
    torch.set_num_threads(1)
    adahop.fit(adahop.load("synthetic:300,2000,4,2"), method=args.method, epochs=1)  # kernels are compiled
    if args.rlimit:
        data = sum(f.stat().st_size for f in Path(args.folder).rglob("*.npy"))
        bound = args.limit_mib * 2**20 + 2 * data  # mapped files count as data though they take no memory
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    out: dict[str, object] = {"before_mib": memory("RssAnon") / 2**20}
    with Peak() as peak:
        data = adahop.load(args.folder)
        state = None if args.memory else args.state
        config = Config(method=args.method, sizes=(10, 10), hidden=64, batch_size=args.batch, lr=0.003, state=state)
        if args.memory:
            g = data.graph.normalized("row", True)
            data.graph = Held(
                *(None if t is None else t.clone() for t in (g.indptr, g.indices, g.weight, g.eid, g.first))
            )
            data.x = data.x.clone()
        began = time.perf_counter()
        torch.manual_seed(0)
        run = Run(data, config, 0)
        out["setup_s"] = time.perf_counter() - began
        out["warm"] = steps_of(run, args.steps // 4)
        out["train"] = steps_of(run, args.steps)
        if not args.memory and not args.steps_only:
            began = time.perf_counter()
            out["scores"] = evaluate(run.model, data, run.sampler.graph)
            out["evaluate_s"] = time.perf_counter() - began
    out["peak_anonymous_mib"] = peak.value / 2**20
    out["state_mib"] = sum(b.numel() * b.element_size() for b in run.sampler.buffers()) / 2**20
    print(json.dumps(out))


def on_disk(args: argparse.Namespace) -> dict:
    """The child under the limit, and what the limit was."""
    if not args.cached:
        forget(args.folder)
    found = limited(command(args), args.limit_mib)
    if found is not None:
        return found
    return {**printed(command(args, "--rlimit")), "limit": f"RLIMIT_DATA, {args.limit_mib} MiB beside the maps"}


def command(args: argparse.Namespace, *flags: str) -> list[str]:
    """One training in a process of its own."""
    names = ("folder", "steps", "batch", "method", "state", "limit_mib")
    given = [part for k in names for part in (f"--{k.replace('_', '-')}", str(getattr(args, k)))]
    return [sys.executable, __file__, "--child", *flags, *(["--steps-only"] if args.steps_only else []), *given]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True)
    for name, value in {"nodes": 4_000_000, "edges": 200_000_000, "features": 64, "classes": 16, "train": 100_000,
                        "steps": 60, "batch": 512, "limit-mib": 2048}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--method", default="bs")
    parser.add_argument("--state")
    parser.add_argument("--json")
    for flag in ("child", "rlimit", "memory", "no-memory", "steps-only", "cached"):
        parser.add_argument(f"--{flag}", action="store_true")
    args = parser.parse_args()
    args.state = args.state or str(Path(args.folder).parent / "state")
    if args.child:
        return child(args)
    home = Path(args.folder)
    if not home.exists():
        make(home, args.nodes, args.edges, args.features, args.classes, args.train)
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", f"import adahop; adahop.load({str(home)!r}).graph.normalized('row', True)"], check=True
    )
    out = {k: getattr(args, k) for k in ("nodes", "edges", "features", "method", "batch")}
    out["normalize_s"] = time.perf_counter() - began
    out["files_mib"] = sum(f.stat().st_size for f in home.rglob("*.npy")) / 2**20
    out["disk"] = on_disk(args)
    if not args.no_memory:
        out["memory"] = printed(command(args, "--memory"))
        out["slower"] = out["disk"]["train"]["ms_a_step"] / out["memory"]["train"]["ms_a_step"]
    print(json.dumps(out, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
