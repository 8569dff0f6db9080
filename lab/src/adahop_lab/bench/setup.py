"""Seconds to the first step, by part, in a process of its own: cold, with no kernel compiled yet, and warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from adahop.checks import InputError

PARTS = ("import", "normalise", "sampler", "memory", "rest", "batch", "step")


def measure(
    text: str, method: str, sizes: str, hidden: int, batch_size: int, threads: int, device: str, clock: str
) -> list[dict]:
    """A row for the cold and one for the warm process: seconds of each part, and of all but the data's loading."""
    rows = []
    with tempfile.TemporaryDirectory() as kernels:
        for kind in ("cold", "warm"):
            caches = {"NUMBA_CACHE_DIR": kernels, "TRITON_CACHE_DIR": os.path.join(kernels, "triton")}
            words = [text, method, sizes, str(hidden), str(batch_size), str(threads), device, clock]
            done = subprocess.run(
                [sys.executable, "-m", "adahop_lab.bench.setup", *words],
                capture_output=True,
                text=True,
                env={**os.environ, **caches},
            )
            if done.returncode:
                raise InputError(f"`graph` must be one that can be trained on, got {text} ({done.stderr[-200:]})")
            found = json.loads(done.stdout.splitlines()[-1])
            rows.append(
                {"kind": kind, "first_step": sum(found[part] for part in PARTS), **found, "graph": text, "clock": clock}
            )
    return rows


def parts(
    text: str, method: str, sizes: str, hidden: str, batch_size: str, threads: str, device: str, clock: str
) -> dict[str, Any]:
    """Seconds of each part, in the order in which `fit` goes through them; what is left of its set-up is `rest`."""
    seconds = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    began = seconds()
    import torch

    import adahop
    from adahop import graph, models, run, train
    from adahop.config import Config

    now = seconds()
    found: dict[str, Any] = {"import": now - began}
    torch.set_num_threads(int(threads))
    data = adahop.load(text)
    found["load"] = seconds() - now
    fan_out = tuple(int(k) for k in sizes.split(","))
    config = Config(
        method=method, sizes=fan_out, hidden=int(hidden), batch_size=int(batch_size), device=device, noise=0.0
    )
    spent = {
        "normalise": _timed(graph.Graph, "normalized", seconds),
        "sampler": _timed(run, "make_sampler", seconds),
        "memory": _timed(models.GNN, "remember", seconds),
    }
    now = seconds()
    made = run.Run(data, config, 0)
    whole = seconds() - now
    found.update({name: took[0] for name, took in spent.items()})
    found["rest"] = whole - sum(took[0] for took in spent.values())
    now = seconds()
    batch = next(iter(made.loader))
    found["batch"] = seconds() - now
    now = seconds()
    float(train.train_step(made.net, made.sampler, made.optimizer, batch))
    found["step"] = seconds() - now
    return found


def _timed(owner: Any, name: str, seconds: Callable[[], float]) -> list[float]:
    """The seconds that calls of a function take from now on, in a list of one."""
    inner, total = getattr(owner, name), [0.0]

    def timed(*args: Any, **options: Any) -> Any:
        now = seconds()
        try:
            return inner(*args, **options)
        finally:
            total[0] += seconds() - now

    setattr(owner, name, timed)
    return total


if __name__ == "__main__":
    print(json.dumps(parts(*sys.argv[1:])))
