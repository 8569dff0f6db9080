"""Seconds to the first step, by part, in a process of its own: cold, with no kernel compiled yet, and warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from adahop.checks import InputError

PARTS = ("import", "normalise", "sampler", "memory", "rest", "batch", "step")


def measure(text: str, method: str, sizes: str, hidden: int, batch_size: int, threads: int, device: str) -> list[dict]:
    """A row for the cold and one for the warm process: seconds of each part, and of all but the data's loading."""
    rows = []
    with tempfile.TemporaryDirectory() as kernels:
        for kind in ("cold", "warm"):
            caches = {"NUMBA_CACHE_DIR": kernels, "TRITON_CACHE_DIR": os.path.join(kernels, "triton")}
            words = [text, method, sizes, str(hidden), str(batch_size), str(threads), device]
            done = subprocess.run(
                [sys.executable, "-m", "adahop_lab.bench.setup", *words],
                capture_output=True,
                text=True,
                env={**os.environ, **caches},
            )
            if done.returncode:
                raise InputError(f"`graph` must be one that can be trained on, got {text} ({done.stderr[-200:]})")
            found = json.loads(done.stdout.splitlines()[-1])
            rows.append({"kind": kind, "first_step": sum(found[part] for part in PARTS), **found, "graph": text})
    return rows


def parts(
    text: str, method: str, sizes: str, hidden: str, batch_size: str, threads: str, device: str
) -> dict[str, Any]:
    """Seconds of each part, in the order in which `fit` goes through them; what is left of its set-up is `rest`."""
    began = time.perf_counter()
    import torch

    import adahop
    from adahop import graph, models, run, train
    from adahop.config import Config

    now = time.perf_counter()
    found: dict[str, Any] = {"import": now - began}
    torch.set_num_threads(int(threads))
    data = adahop.load(text)
    found["load"] = time.perf_counter() - now
    fan_out = tuple(int(k) for k in sizes.split(","))
    config = Config(
        method=method, sizes=fan_out, hidden=int(hidden), batch_size=int(batch_size), device=device, noise=0.0
    )
    spent = {
        "normalise": _timed(graph.Graph, "normalized"),
        "sampler": _timed(run, "make_sampler"),
        "memory": _timed(models.GNN, "remember"),
    }
    now = time.perf_counter()
    made = run.Run(data, config, 0)
    whole = time.perf_counter() - now
    found.update({name: seconds[0] for name, seconds in spent.items()})
    found["rest"] = whole - sum(seconds[0] for seconds in spent.values())
    now = time.perf_counter()
    batch = next(iter(made.loader))
    found["batch"] = time.perf_counter() - now
    now = time.perf_counter()
    float(train.train_step(made.net, made.sampler, made.optimizer, batch))
    found["step"] = time.perf_counter() - now
    return found


def _timed(owner: Any, name: str) -> list[float]:
    """The seconds that calls of a function take from now on, in a list of one."""
    inner, total = getattr(owner, name), [0.0]

    def timed(*args: Any, **options: Any) -> Any:
        now = time.perf_counter()
        try:
            return inner(*args, **options)
        finally:
            total[0] += time.perf_counter() - now

    setattr(owner, name, timed)
    return total


if __name__ == "__main__":
    print(json.dumps(parts(*sys.argv[1:])))
