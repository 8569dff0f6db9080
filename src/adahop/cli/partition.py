"""`adahop partition`: a data set cut into parts, one per process; and the part of a rank of `adahop train`."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from adahop.checks import InputError
from adahop.datasets import load
from adahop.distributed import Shard, launched, strategy, write_shards
from adahop.mapped import cache_path, manifest
from adahop.mapped.folder import MANIFEST


def start(dataset: str, out: str, parts: int, how: str) -> None:
    """Write the parts and print their sizes."""
    data = load(dataset)
    cuts = write_shards(data, out, parts, how)
    sizes = ", ".join(f"{b - a:,}" for a, b in pairwise(cuts))
    print(f"{out}: {data.num_nodes:,} nodes, {data.graph.num_edges:,} edges in parts of {sizes} nodes, cut by {how}")


def shard(dataset: str, how: str) -> Shard:
    """This rank's part. A data set without parts is cut first by a separate process: no rank holds all of it."""
    if not launched():
        raise InputError(f"`partition` must be left out for one process, or torchrun must start several, got {how}")
    home, here = Path(dataset).expanduser(), strategy()
    if not ((home / MANIFEST).is_file() and (how == "range" or "bounds" in manifest(home)[1])):
        home = _parts_folder(dataset, how, here.size)
        error = ""
        if here.rank == 0 and not home.exists():
            home.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "adahop", "partition", dataset, "-o", str(home)]
            done = subprocess.run(
                [*command, "--parts", str(here.size), "--how", how], capture_output=True, text=True, check=False
            )
            error = done.stderr.strip().splitlines()[-1].removeprefix("adahop: ") if done.returncode else ""
        here.barrier()
        if not home.exists():
            raise InputError(error or f"{home} must be there once the first rank has written it, got nothing")
    return Shard(home, here.rank, here.size, how)


def _parts_folder(dataset: str, how: str, parts: int) -> Path:
    """The folder of a data set's parts; a changed file gets another folder."""
    file = Path(dataset).expanduser()
    stamp = f"{file.stat().st_mtime_ns} {file.stat().st_size} {file.resolve()}" if file.is_file() else dataset
    name = hashlib.blake2b(f"{stamp} {how} {parts}".encode(), digest_size=8).hexdigest()
    return cache_path("shards", f"{how}-{parts}-{name}")
