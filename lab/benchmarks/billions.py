"""Train on 2e9 edges from disk within a memory limit, page cache included, and the same steps in memory on a cut.

    python lab/benchmarks/billions.py --folder DIR --nodes 40000000 --edges 2120000000 --limit-mib 12288 --json FILE
    python lab/benchmarks/billions.py --folder DIR --nodes 400000 --edges 20000000 --limit-mib 700 --memory --json FILE

The graph is made row after row, so nothing is sorted: degrees follow a power law, sources too, every number is a hash
of its place, and each row begins with the node's own loop (`adahop.mapped`). Training is one epoch of the preset with
`judged`: no pass over the graph. It runs in a process of its own in a memory control group. `--memory` then takes the
same steps with an ordinary graph in memory. Files lie in DIR, which is made if it is missing; `--remove` deletes it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numba as nb
import numpy as np
import torch

import adahop
from adahop.capture import steps
from adahop.mapped import Folder
from adahop.run import Run
from adahop.train import Config, Judged
from adahop_lab.process import Peak, forget, limited, memory, printed

CLASSES = 16
ALIKE = 0.4  # of the edges come from a node of the same class
TAIL = 0.6  # degrees are in proportion to u^-TAIL
MOST = 100_000  # neighbours
PIECE = 1 << 18  # rows made at once


@nb.njit(inline="always")
def bits(a, b):
    """64 bits of two numbers (splitmix64)."""
    z = np.uint64(a) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(b) * np.uint64(0xD1B54A32D192ED03)
    z += np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@nb.njit(parallel=True, cache=True)
def degrees(a, b, scale, out):
    for i in nb.prange(a, b):
        u = (np.float64(bits(i, 1) >> np.uint64(11)) + 0.5) / 2.0**53
        out[i - a] = min(np.int64(scale * u**-TAIL) + 1, MOST)


@nb.njit(parallel=True, cache=True)
def rows(a, b, indptr, n, out):
    """The loop and the sources of the nodes a..b."""
    start = indptr[a]
    for i in nb.prange(a, b):
        o, kind = indptr[i] - start, i % CLASSES
        out[o] = i
        for e in range(1, indptr[i + 1] - indptr[i]):
            z = bits(indptr[i] + e, 2)
            u = np.float64(z >> np.uint64(11)) / 2.0**53
            j = np.int64(n * u * u * u)
            if (bits(z, 3) >> np.uint64(40)) < np.uint64(ALIKE * 2**24):
                j += kind - j % CLASSES
            out[o + e] = (j + CLASSES) % n if j == i or j >= n else j


@nb.njit(parallel=True, cache=True)
def features(a, b, means, out):
    """A class's mean and about a normal number: the sum of four bytes."""
    for i in nb.prange(a, b):
        for c in range(out.shape[1]):
            z = bits(i * 64 + c // 2, 4) >> np.uint64(32 * (c % 2))
            total = 0
            for k in range(4):
                total += np.int64((z >> np.uint64(8 * k)) & np.uint64(255))
            out[i - a, c] = means[i % CLASSES, c] + np.float32((total - 510) / 147.8)


def make(home: Path, n: int, m: int, width: int, train: int) -> None:
    rng = np.random.default_rng(0)
    with Folder(home, {"name": home.name, "classes": CLASSES, "metric": "accuracy", "loops": True}) as out:
        indptr = out.array("indptr", np.int64, (n + 1,))
        size = np.empty(PIECE, np.int64)
        for a in range(0, n, PIECE):
            b = min(a + PIECE, n)
            degrees(a, b, m / n * (1 - TAIL), size)
            indptr[a + 1 : b + 1] = indptr[a] + np.cumsum(size[: b - a] + 1)
        indices, ptr = out.array("indices", np.int32, (int(indptr[-1]),)), np.array(indptr)
        for a in range(0, n, PIECE):
            b = min(a + PIECE, n)
            piece = np.empty(ptr[b] - ptr[a], np.int32)
            rows(a, b, ptr, n, piece)
            indices[ptr[a] : ptr[b]] = piece
        x, piece = out.array("x", np.float16, (n, width)), np.empty((PIECE, width), np.float32)
        means = (0.15 * rng.standard_normal((CLASSES, width))).astype(np.float32)
        for a in range(0, n, PIECE):
            b = min(a + PIECE, n)
            features(a, b, means, piece)
            x[a:b] = torch.from_numpy(piece[: b - a]).half().numpy()
        out.save("y", (np.arange(n) % CLASSES).astype(np.int16))
        ids = rng.permutation(np.unique(rng.integers(n, size=4 * train)))
        assert len(ids) >= 3 * train, "more nodes are needed for so many to train on"
        for k, part in enumerate(("train", "val", "test")):
            out.save(f"{part}_idx", np.sort(ids[k * train : (k + 1) * train]))


def read_bytes() -> int:
    """What this process had the disk read so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def child(args: argparse.Namespace) -> None:
    """One epoch of training; prints one JSON line."""
    torch.set_num_threads(args.threads)
    how = {"method": args.method, "sizes": (args.k, args.k), "judged": args.judged, "half": True, "hidden": args.hidden}
    adahop.fit(adahop.load("synthetic:300,2000,4,2"), **how, epochs=1)  # kernels are compiled
    out: dict[str, object] = {"before_mib": memory("RssAnon") / 2**20}
    began, taken, busy, losses, read = time.perf_counter(), [], [], [], [read_bytes()]
    with Peak() as peak:
        data = adahop.load(args.folder)
        if args.memory:
            data.graph, data.x = data.graph.plain, data.x.float()
        config = Config(
            **how, batch_size=args.batch, epochs=1, state=None if args.memory else args.state, prefetch=args.prefetch
        )
        torch.manual_seed(0)
        run = Run(data, config, 0)
        out["setup_s"] = time.perf_counter() - began
        mark, work = time.perf_counter(), time.process_time()
        for loss, _ in steps(run):
            losses.append(float(loss))
            taken.append(time.perf_counter() - mark)
            busy.append(time.process_time() - work)
            read.append(read_bytes())
            mark, work = time.perf_counter(), time.process_time()
            if len(taken) % 25 == 0:
                print(f"step {len(taken)}: {taken[-1]:.2f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        judged = Judged(run.model, data, run.sampler.graph, data.metric, run.strategy, args.judged)
        out["scores"], out["evaluate_s"] = judged.scores(), time.perf_counter() - began
    each, cpu = np.array(taken), np.array(busy)
    mib = np.diff(np.array(read)) / 2**20
    part = max(len(each) // 30, 1)
    out |= {"steps": len(each), "seconds": each.sum(), "first_step_s": each[0]}
    for name, of in (("cold", slice(0, part)), ("middle", slice(part, 10 * part)), ("warm", slice(-10 * part, None))):
        out[name] = {
            "steps": len(each[of]), "median_s": float(np.median(each[of])), "mean_s": each[of].mean(),
            "processor_s": float(np.median(cpu[of])), "read_mib_a_step": mib[of].mean(),
        }  # fmt: skip
    out["loss_first"], out["loss_last"] = losses[:3], float(np.mean(losses[-10:]))
    out["losses"] = losses
    out["peak_anonymous_mib"] = peak.value / 2**20
    print(json.dumps({k: v.item() if isinstance(v, np.generic) else v for k, v in out.items()}))


def run_child(args: argparse.Namespace, limit: bool) -> dict:
    names = ("folder", "state", "method", "threads", "k", "judged", "hidden", "batch", "prefetch")
    command = [sys.executable, __file__, "--child", *([] if limit else ["--memory"])]
    command += [part for k in names for part in (f"--{k}", str(getattr(args, k)))]
    if not limit:
        return printed(command)
    forget(args.folder)
    found = limited(command, args.limit_mib)
    if found is None:
        raise SystemExit("a memory control group is needed, and none could be made")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True)
    for name, value in {"nodes": 400_000, "edges": 20_000_000, "features": 64, "train": 30_720, "batch": 1024, "k": 10,
                        "hidden": 64, "judged": 1024, "threads": 1, "prefetch": 0,
                        "limit-mib": 700}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in {"method": "adahop", "state": None, "json": None}.items():
        parser.add_argument(f"--{name}", default=value)
    for flag in ("child", "memory", "remove", "only-make"):
        parser.add_argument(f"--{flag}", action="store_true")
    args = parser.parse_args()
    given = [a for a in sys.argv[1:] if a not in ("--folder", args.folder, "--json", args.json)]
    home = Path(args.folder)
    args.state = args.state or str(home.parent / "state")
    if args.child:
        return child(args)
    os.environ["ADAHOP_TRUST"] = "1"  # checksums were written a moment ago
    out: dict = {k: getattr(args, k) for k in ("nodes", "edges", "features", "method", "k", "batch", "threads")}
    if not home.exists():
        began = time.perf_counter()
        nb.set_num_threads(max(args.threads, 2))
        make(home, args.nodes, args.edges, args.features, args.train)
        out["make_s"] = time.perf_counter() - began
    out["files_mib"] = {f.stem: f.stat().st_size / 2**20 for f in sorted(home.glob("*.npy"))}
    out["places"] = int(np.load(home / "indices.npy", mmap_mode="r").shape[0])
    if not args.only_make:
        out["disk"] = run_child(args, True)
    if args.memory:
        out["in_memory"] = run_child(args, False)
        pairs = zip(out["disk"]["losses"], out["in_memory"]["losses"], strict=True)
        out["largest_difference_of_losses"] = max(abs(a - b) for a, b in pairs)
    print(json.dumps(out, indent=1))
    if args.json:
        with open(args.json, "a") as f:
            f.write(json.dumps({"command": " ".join(["billions.py", *given]), **out}) + "\n")
    if args.remove:
        shutil.rmtree(home)


if __name__ == "__main__":
    main()
