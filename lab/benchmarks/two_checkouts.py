"""Two checkouts side by side: sampling and epochs in turns, a process for each, only one of them working at a time.

python lab/benchmarks/two_checkouts.py sampling OLD NEW --graph rmat:200000,10000000 --sizes 10,10 --out result.json
python lab/benchmarks/two_checkouts.py epoch OLD NEW --graph ppi.npz --out result.json

A checkout is a folder with src/ (and lab/src/ where the laboratory is a distribution of its own). The ratio of a row is
the median over rounds of new over old seconds per batch in the same round; below 1 the new one is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

WORKER = """
import sys, json, time, importlib
room = sys.argv[2]
ours, clock, graphs, epoch = (importlib.import_module(f"{room}.{m}") for m in ("ours", "clock", "graphs", "epoch"))
import torch
from adahop import ops
what, graph, sizes, batch_size, threads, methods, hidden, arch, rounds = json.loads(sys.argv[1])
torch.set_num_threads(threads)
ops.set_threads(threads)

def learning(text, own):
    energy = -torch.rand(1 << 21, generator=torch.Generator().manual_seed(0)).log()
    def work(seeds):
        blocks = own.sample(seeds)
        own.update(blocks, [energy[:block.num_edges] for block in blocks])
        return sum(block.num_edges for block in blocks)
    return clock.Runner(text, work)

def made(text, g):
    own = ours.sampler(text, g, sizes, batch_size)
    return learning(text, own) if ours.parse(text)[1].get("update") else ours.drawing(text, own)

if what == "sampling":
    g = graphs.graph(graph)
    runners, seeds = {text: made(text, g) for text in methods}, graphs.batches(g, batch_size)
else:
    data = epoch.load(graph)
    plan = getattr(epoch, "EpochBench", None) or epoch.Plan  # as it was called before
    plan = plan(graph, sizes, batch_size, [threads], methods, [], hidden=hidden, arch=arch)
    runners, seeds = {text: epoch._ours(text, data, plan)[0] for text in methods}, [data.train_idx]
for runner in runners.values():
    runner.work(seeds[0]), runner.rest()
print("ready", flush=True)
for line in sys.stdin:
    text, seconds = json.loads(line)
    cpu = time.process_time()
    turn = clock.turn(runners[text], seeds, seconds, "cpu", time.perf_counter)
    print(json.dumps([turn.edges, turn.batches, turn.seconds, time.process_time() - cpu]), flush=True)
"""


class Checkout:
    """A process of one checkout, which works when it is asked to."""

    def __init__(self, folder: str, plan: list):
        root = Path(folder).resolve()
        path = os.pathsep.join(str(root / p) for p in ("src", "lab/src") if (root / p).is_dir())
        room = "adahop_lab.bench" if (root / "lab/src").is_dir() else "adahop.bench"
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps(plan), room],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            cwd=root,
        )
        self.commit = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        if self.answer() != "ready":
            raise SystemExit(f"{folder} did not start")

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def turn(self, method: str, seconds: float) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, seconds]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def median(values: list[float]) -> float:
    found = sorted(values)
    half = len(found) // 2
    return found[half] if len(found) % 2 else (found[half - 1] + found[half]) / 2


def measure(args: argparse.Namespace, say=print) -> dict:
    methods, sizes = args.methods.split(","), [int(k) for k in args.sizes.split(",")]
    plan = [args.what, args.graph, sizes, args.batch_size, args.threads, methods, args.hidden, args.arch, args.rounds]
    both = [Checkout(folder, plan) for folder in (args.old, args.new)]
    turns: dict[str, list[list[list[float]]]] = {m: [] for m in methods}
    for i in range(args.rounds):
        for method in methods:
            order = (0, 1) if i % 2 == 0 else (1, 0)  # who comes first changes
            pair = {at: both[at].turn(method, args.seconds if args.what == "sampling" else 0.0) for at in order}
            turns[method].append([pair[0], pair[1]])
    for one in both:
        one.close()
    rows = []
    for method, found in turns.items():
        row: dict = {"method": method}
        for name, column in (("wall", 2), ("cpu", 3)):
            per = [[t[column] / t[1] for t in pair] for pair in found]
            row[f"{name}_ms_old"], row[f"{name}_ms_new"] = (1e3 * median([p[i] for p in per]) for i in (0, 1))
            row[f"{name}_ratio"] = median([p[1] / p[0] for p in per])
        row["edges_per_batch"] = [sum(t[i][0] for t in found) / sum(t[i][1] for t in found) for i in (0, 1)]
        rows.append(row)
        say(f"{method:55s} wall {row['wall_ms_old']:.3f} -> {row['wall_ms_new']:.3f} ms, {row['wall_ratio']:.3f}; "
            f"cpu {row['cpu_ratio']:.3f}")  # fmt: skip
    told = {k: v for k, v in vars(args).items() if k not in ("old", "new", "out")}
    return {**told, "old": both[0].commit, "new": both[1].commit, "at": time.strftime("%Y-%m-%d"), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sampling", "epoch"))
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--graph", default="rmat:200000,10000000")
    parser.add_argument("--sizes", default="10,10")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", default="graphsage,bs,bs:update=true,graphsage:policy=tracked")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.25)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--arch", default="residual")
    parser.add_argument("--out", help="a .json file to which the result is added as one more entry")
    args = parser.parse_args()
    result = measure(args)
    if args.out:
        path = Path(args.out)
        before = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*before, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
