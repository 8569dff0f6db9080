"""Several processes on one machine: accuracy beside one process, equal states, memory of a part, scaling, bytes a step.

    python lab/benchmarks/distributed.py accuracy | parts | scaling [--json FILE]

`scaling` wants two idle cores. Each part starts its own processes, which meet as torchrun's do.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import adahop
from adahop import distributed
from adahop.distributed import Peers, Shard, write_shards
from adahop.distributed.exchange import Updates
from adahop.mapped import save
from adahop.train import fit
from adahop_lab.process import memory

SPEC = "synthetic:6208,93000,16,8"  # 4,097 nodes to train on
LARGE = "synthetic:300000,9000000,4,8"
HOW = {"batch_size": 1024, "epochs": 12, "sizes": (10, 10), "hidden": 32, "lr": 0.01, "noise": 0.0}


def launch(ranks: int, *command: str) -> list[dict]:
    """What each of so many ranks of this file prints last."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    meet = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    line = [sys.executable, __file__, *command]
    processes = [
        subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**meet, "RANK": str(r)}) for r in range(ranks)
    ]
    out = [p.communicate()[0] for p in processes]
    assert all(p.returncode == 0 for p in processes), "a rank failed"
    return [json.loads(text.splitlines()[-1]) for text in out]


def digest(tensors) -> str:
    h = hashlib.blake2b(digest_size=8)
    for t in tensors:
        h.update(t.detach().cpu().numpy().tobytes())
    return h.hexdigest()


# --- what a rank does ----------------------------------------------------------------------------------------------


def run_accuracy(method: str, seeds: int) -> dict:
    data, out = adahop.load(SPEC), []
    for seed in range(seeds):
        r = fit(data, method=method, seed=seed, **HOW)
        state = digest(v for _, v in sorted(r.sampler.state_dict().items()))
        out.append({"test": r.test, "steps": r.steps, "state": state, "model": digest(r.model.state_dict().values())})
    return {"runs": out}


def run_parts(method: str, folder: str, seeds: int) -> dict:
    peers = Peers() if distributed.several_ranks() else None
    data = adahop.load(folder) if peers is None else Shard(folder, peers.rank, peers.size, "metis")
    return {"test": [fit(data, method=method, seed=seed, estimator="plain", **HOW).test for seed in range(seeds)]}


def run_memory(folder: str, tiny: str) -> dict:
    """Load the whole, or a part, and normalise its graph: the bytes of it, and what the process grows by."""
    peers = Peers() if distributed.several_ranks() else None
    hold(tiny, peers)  # what is loaded with the first use is not the graph's
    before = memory()
    held = hold(folder, peers)
    return {"bytes": sum(t.numel() * t.element_size() for t in held), "resident": memory() - before}


def hold(folder: str, peers: Peers | None) -> list[torch.Tensor]:
    if peers is None:
        data = adahop.load(folder)
        copied = [None if t is None else t.clone() for t in (
            data.graph.indptr, data.graph.indices, data.graph.weight, data.graph.eid, data.graph.first)]  # fmt: skip
        graph, rest = adahop.Graph(*copied), [data.x.clone(), data.y.clone()]
    else:
        shard = Shard(folder, peers.rank, peers.size, "range")
        graph, rest = shard.graph, [shard.x, shard.y, shard.halo, *(t for t in shard.edges[2:] if t is not None)]
    ready = graph.normalized("row", True)
    tensors = [t for g in (graph, ready) for _, t in g._tensors()] + rest
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return tensors


def run_sampling(method: str, folder: str, batches: int) -> dict:
    """Batches of 1,024 a rank: drawn, then drawn and learnt from together."""
    rank, size = (Peers().rank, Peers().size) if distributed.several_ranks() else (0, 1)
    data = adahop.load(folder)
    mapped = data.graph.normalized("row", True)
    graph = adahop.Graph(*(t.clone() for t in (mapped.indptr, mapped.indices, mapped.weight, mapped.eid, mapped.first)))
    sampler = adahop.make(method, graph, [10, 10])
    nodes = data.train_idx
    seeds = [nodes[(i * size + rank) * 1024 : (i * size + rank + 1) * 1024] for i in range(batches)]
    out = {}
    blocks = [sampler.sample(s) for s in seeds[:3]]
    sampler.update(blocks[0], [torch.ones(b.num_edges) for b in blocks[0]])
    peers = Peers() if size > 1 else None
    for name in ("draw", "draw and learn"):
        if peers is not None and name != "draw":
            sampler.exchange = Updates(peers)
        if peers is not None:
            peers.barrier()
        began, busy, edges = time.perf_counter(), time.process_time(), 0
        for s in seeds:
            drawn = sampler.sample(s)
            edges += sum(b.num_edges for b in drawn)
            if name != "draw":
                sampler.update(drawn, [b.scale for b in drawn])
        out[name] = edges / (time.perf_counter() - began)
        out[f"{name}, a CPU second"] = edges / (time.process_time() - busy)
    if peers is not None:
        out["sent_a_step"] = peers.sent / batches
    out["edges_a_step"] = edges / batches
    return out


# --- what is reported ----------------------------------------------------------------------------------------------


def accuracy(seeds: int = 5) -> dict:
    out = {"data": SPEC, **HOW, "training_nodes": 4097}
    for method in ("bs", "adahop"):
        one = launch(1, "rank", "accuracy", method, str(seeds))[0]["runs"]
        four = launch(4, "rank", "accuracy", method, str(seeds))
        tests, theirs = [r["test"] for r in one], [r["test"] for r in four[0]["runs"]]
        out[method] = {
            "one": tests, "four": theirs, "steps": [one[0]["steps"], four[0]["runs"][0]["steps"]],
            "mean": [statistics.fmean(tests), statistics.fmean(theirs)], "deviation_of_one": statistics.stdev(tests),
            "equal_states": all(r == four[0] for r in four),
        }  # fmt: skip
    return out


def parts(seeds: int = 5) -> dict:
    out: dict = {"data": SPEC, "cut": "metis"}
    with tempfile.TemporaryDirectory() as home:
        write_shards(adahop.load(SPEC), f"{home}/g", 2, "metis")
        for method in ("bs", "adahop"):
            one = launch(1, "rank", "parts", method, f"{home}/g", str(seeds))[0]
            two = launch(2, "rank", "parts", method, f"{home}/g", str(seeds))
            out[method] = {
                "one": one["test"], "two": two[0]["test"],
                "mean": [statistics.fmean(one["test"]), statistics.fmean(two[0]["test"])],
                "deviation_of_one": statistics.stdev(one["test"]),
            }  # fmt: skip
        data = "synthetic:400000,12000000,64,8"
        for name, spec in (("large", data), ("tiny", "synthetic:500,5000,8,3")):
            write_shards(adahop.load(spec), f"{home}/{name}", 2, "range")
        whole = launch(1, "rank", "memory", f"{home}/large", f"{home}/tiny")[0]
        halves = launch(2, "rank", "memory", f"{home}/large", f"{home}/tiny")
        out["memory"] = {"data": data, "cut": "range", "whole": whole, "parts": halves,
                         "share_bytes": [h["bytes"] / whole["bytes"] for h in halves],
                         "share_resident": [h["resident"] / whole["resident"] for h in halves]}  # fmt: skip
    return out


def scaling(batches: int = 40) -> dict:
    out: dict = {"data": LARGE, "batch_a_rank": 1024, "sizes": [10, 10]}
    with tempfile.TemporaryDirectory() as home:
        save(adahop.load(LARGE), f"{home}/g")
        adahop.load(f"{home}/g").graph.normalized("row", True)
        for method in ("graphsage", "bs"):
            given = ("rank", "sampling", method, f"{home}/g", str(batches))
            one, two = launch(1, *given)[0], launch(2, *given)
            out[method] = {
                name: {
                    "one": one[name],
                    "two": sum(r[name] for r in two),
                    "times": sum(r[name] for r in two) / one[name],
                }
                for name in ("draw", "draw, a CPU second", "draw and learn")
            }
            out[method]["edges_a_step_and_rank"] = two[0]["edges_a_step"]
            out[method]["bytes_sent_a_step_and_rank"] = two[0]["sent_a_step"]
    return out


def rank(what: str, *args: str) -> None:
    torch.set_num_threads(1)
    with distributed.session():
        typed = [int(a) if a.isdigit() else a for a in args]
        value = globals()[f"run_{what}"](*typed)
    print(json.dumps(value), flush=True)


def main() -> None:
    if sys.argv[1] == "rank":
        return rank(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["accuracy", "parts", "scaling"], nargs="+")
    parser.add_argument("--json")
    args = parser.parse_args()
    path = Path(args.json) if args.json else None
    out = json.loads(path.read_text()) if path and path.exists() else {}
    for what in args.what:
        out[what] = {"accuracy": accuracy, "parts": parts, "scaling": scaling}[what]()
        print(json.dumps({what: out[what]}, indent=1))
        if path:
            path.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
