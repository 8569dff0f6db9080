"""What inference over a whole graph takes: its peak of resident memory beside that of graph, features and output."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import torch

from adahop import models
from adahop.checks import InputError
from adahop.graph import Graph
from adahop_lab.bench.graphs import graph
from adahop_lab.process import memory


def measure(text: str, features: int = 64, hidden: int = 64, outputs: int = 64, arch: str = "plain") -> dict[str, Any]:
    """One pass in a fresh process, so that the peak is its own."""
    words = [text, str(features), str(hidden), str(outputs), arch]
    done = subprocess.run([sys.executable, "-m", "adahop_lab.bench.inference", *words], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"`graph` must be one that inference can run on, got {text} ({done.stderr.strip()[-200:]})")
    return json.loads(done.stdout.splitlines()[-1])


def forget_peak() -> None:
    """Linux counts the peak anew from here."""
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")


def once(text: str, features: int, hidden: int, outputs: int, arch: str) -> dict[str, Any]:
    """Bytes before the graph is there, with graph and features, and at the peak; `ratio` is what the bar asks for."""
    g = row_normalized(graph(text))
    model = models.make("gcn", features, hidden, outputs, arch=arch)
    x = torch.rand(g.num_nodes, features)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in g._tensors()}
    needed = sum(held.values()) + x.nbytes + g.num_nodes * outputs * 4
    before = memory() - sum(held.values()) - x.nbytes
    forget_peak()
    began = time.perf_counter()
    out = model.inference(g, x)
    seconds = time.perf_counter() - began
    used = memory("VmHWM") - before
    return {
        "graph": text, "arch": arch, "features": features, "outputs": out.shape[1], "seconds": seconds,
        "needed_bytes": needed, "peak_bytes": used, "ratio": used / needed,
    }  # fmt: skip


def row_normalized(g: Graph) -> Graph:
    """Weights 1/degree, without the copies of `Graph.normalized`: this process is measured."""
    degree = g.degree()
    weight = torch.repeat_interleave(1.0 / degree.clamp(min=1).float(), degree)
    return Graph(g.indptr, g.indices, weight, g.eid, g.first)


if __name__ == "__main__":
    name, *numbers, arch = sys.argv[1:]
    print(json.dumps(once(name, *map(int, numbers), arch)))  # type: ignore[arg-type,call-arg]
