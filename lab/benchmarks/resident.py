"""Resident size and live tensors over many epochs: neither may grow.

    python lab/benchmarks/resident.py --epochs 50 --methods bs,s-gcn,graphsaint

One line of JSON a method: bytes of all live tensors after an early and after the last epoch, and the process's resident
size at both, in MiB.
"""

from __future__ import annotations

import argparse
import gc
import json

import torch

import adahop
from adahop.methods import METHODS
from adahop_lab.process import memory

EARLY = 10  # epochs until caches and allocators have settled


def live() -> int:
    """Bytes of all tensors that anyone still holds, each storage once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def over(method: str, epochs: int, data: str, prefetch: int, **options) -> dict[str, float]:
    """A run of so many epochs, looked at after the early ones and after the last."""
    seen: dict[int, tuple[int, float]] = {}

    def look(row: dict[str, float]) -> None:
        if row["epoch"] in (EARLY, epochs):
            seen[int(row["epoch"])] = live(), memory() / 2**20

    sizes = (60, 60) if METHODS[method].family == "layer-wise" else (5, 5)
    adahop.fit(adahop.load(data), method=method, sizes=sizes, epochs=epochs, batch_size=100, on_epoch=look, noise=0.0,
               prefetch=prefetch, hidden=32, lr=1e-4, **options)  # fmt: skip
    (tensors, early), (after, last) = seen[EARLY], seen[epochs]
    return {"method": method, "prefetch": prefetch, "epochs": epochs, "tensors_grew_bytes": after - tensors,
            "resident_early_mib": round(early, 1), "resident_last_mib": round(last, 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--methods", default="all")
    parser.add_argument("--data", default="synthetic:1000,10000,32,4")
    parser.add_argument("--prefetch", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for method in list(METHODS) if given.methods == "all" else given.methods.split(","):
        print(json.dumps(over(method, given.epochs, given.data, given.prefetch)), flush=True)


if __name__ == "__main__":
    main()
