"""Damage files in many ways and read them: each must be refused in one sentence, or still be a valid file.

    python lab/benchmarks/fuzz.py --refused 1000 --out lab/benchmarks/results/fuzz.json

Every kind of file that the library reads is made small, then cut, changed, mixed or replaced, at random from a seed.
The reading happens in a process of its own with a limit on its memory, so that a crash would be seen and counted. A
damaged file may still be a valid one (another digit in a table): those are counted apart and more are made, until as
many as asked were refused.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import adahop
from adahop.checkpoint import Checkpoints, read
from adahop.checks import InputError
from adahop.cli.resume import Stopped
from adahop.convert import convert
from adahop.datasets import load
from adahop.graph import Graph

SECONDS = 20  # for one file; longer is a hang
BYTES = 6 << 30  # of address space for the reading process, above what it has


def make_all(home: Path) -> dict[str, tuple[Path, Callable[[Path], Any]]]:
    """Every kind of file: a good one, and what reads it."""
    data = load("synthetic:40,200,6,3")
    n = data.num_nodes
    torch.manual_seed(0)
    rows = [f"{s},{d}" for s, d in data.graph.edge_index().t().tolist()]
    (home / "edges.csv").write_text("src,dst\n" + "\n".join(rows) + "\n")
    (home / "labels.csv").write_text("\n".join(str(int(v)) for v in data.y) + "\n")
    (home / "features.csv").write_text("\n".join(",".join(f"{v:.3f}" for v in row) for row in data.x.tolist()) + "\n")
    np.save(home / "features.npy", data.x.numpy())
    parts = [home / "edges.csv", home / "features.npy", home / "labels.csv"]
    convert([str(p) for p in parts], home / "graph.npz")
    packed = {"x_indptr": np.arange(n + 1), "x_indices": np.zeros(n, int), "x_shape": np.array([n, 120]),
              "y_packed": np.zeros((n, 1), np.uint8), "y_shape": np.array([n, 3])}  # fmt: skip
    plain = np.load(home / "graph.npz", allow_pickle=False)
    kept = {k: plain[k] for k in ("indptr", "indices", "train_idx", "val_idx", "test_idx")}
    np.savez(home / "packed.npz", **kept, **packed)
    names = ("x", "y", "train_mask", "val_mask", "test_mask")
    saved = adahop.datasets.base.Data(edge_index=data.edge_index, **{k: data[k] for k in names})
    torch.save(saved, home / "data.pt")
    folder = home / "run"
    adahop.fit(data, epochs=1, sizes=(2, 2), hidden=4, checkpoint=Checkpoints(folder, 1))
    shutil.copy(Checkpoints(folder).files()[-1], home / "run.ckpt")
    config = {"dataset": "digits", "seeds": [0], "log_variance": 0, **adahop.train.Config().as_dict()}
    (home / "config.json").write_text(json.dumps(config, indent=2))
    return {
        "dataset.npz": (home / "graph.npz", load),
        "packed.npz": (home / "packed.npz", load),
        "graph.npz": (home / "graph.npz", Graph.load),
        "data.pt": (home / "data.pt", load),
        "checkpoint": (home / "run.ckpt", read),
        "config.json": (home / "config.json", lambda path: Stopped(str(path.parent))),
        "edges.csv": (parts[0], lambda path: convert([str(path), str(parts[1]), str(parts[2])], home / "o.npz")),
        "features.npy": (parts[1], lambda path: convert([str(parts[0]), str(path), str(parts[2])], home / "o.npz")),
        "features.csv": (
            home / "features.csv", lambda path: convert([str(parts[0]), str(path), str(parts[2])], home / "o.npz")),
        "labels.csv": (parts[2], lambda path: convert([str(parts[0]), str(parts[1]), str(path)], home / "o.npz")),
        **_parquet(home, parts),
    }  # fmt: skip


def _parquet(home: Path, parts: list[Path]) -> dict[str, Any]:
    if not (importlib.util.find_spec("pandas") and importlib.util.find_spec("pyarrow")):
        return {}
    import pandas

    pandas.read_csv(parts[0]).to_parquet(home / "edges.parquet")
    more = [str(parts[1]), str(parts[2])]
    return {"edges.parquet": (home / "edges.parquet", lambda path: convert([str(path), *more], home / "o.npz"))}


def damaged(content: bytes, other: bytes, dice: random.Random) -> tuple[str, bytes]:
    """One of many ways to spoil a file."""
    n = len(content)
    at, end = sorted((dice.randrange(n + 1), dice.randrange(n + 1)))
    noise = dice.randbytes(dice.randint(1, 64))
    some = bytearray(content)
    for _ in range(dice.choice([1, 8, 64])):
        some[dice.randrange(n)] = dice.randrange(256)
    ways = {
        "cut": content[:at],
        "the beginning is lost": content[at:],
        "a hole": content[:at] + content[end:],
        "zeros": content[:at] + bytes(end - at) + content[end:],
        "bytes changed": bytes(some),
        "bytes added": content[:at] + noise + content[at:],
        "twice": content + content[:at],
        "another kind": other,
        "mixed": content[:at] + other[at:],
        "noise": dice.randbytes(max(1, at)),
        "empty": b"",
    }
    way = dice.choice(list(ways))
    return way, ways[way]


def outcome(reads: Callable[[Path], Any], path: Path) -> tuple[str, str]:
    """("refused", sentence), ("taken", "") or ("wrong", what happened)."""

    def ring(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        reads(path)
        return "taken", ""
    except InputError as e:
        said = str(e)
        plain = len(said) > 0 and len(said.splitlines()) == 1 and ("must" in said or "row " in said)
        return ("refused", said) if plain else ("wrong", f"InputError without a sentence: {said}")
    except BaseException as e:
        return "wrong", f"{type(e).__name__}: {str(e)[:300]}"
    finally:
        signal.alarm(0)


def reading(jobs: list[tuple[str, str, Path, Callable[[Path], Any]]], out: int) -> None:
    """In the child: a line for every file, before and after."""
    soft = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
    warnings.simplefilter("ignore")
    for at, (_, _, path, reads) in enumerate(jobs):
        os.write(out, (json.dumps([at, *outcome(reads, path)]) + "\n").encode())


def batch(jobs: list[tuple[str, str, Path, Callable[[Path], Any]]], log: Path) -> list[tuple[str, str]]:
    """What became of each file; a child that dies names the file it died of, and another one goes on after it."""
    found: list[tuple[str, str]] = []
    while len(found) < len(jobs):
        with open(log, "wb") as f:
            pid = os.fork()
            if pid == 0:
                try:
                    reading(jobs[len(found) :], f.fileno())
                finally:
                    os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found += [(kind, said) for _, kind, said in map(json.loads, log.read_text().splitlines())]
        if len(found) < len(jobs):
            found.append(("wrong", f"the process died with {status}"))
    return found


def fuzz(refused: int, seed: int, home: Path) -> dict[str, Any]:
    dice, counts, by, wrong = random.Random(seed), Counter(), Counter(), []
    kinds = make_all(home)
    good = {name: path.read_bytes() for name, (path, _) in kinds.items()}
    while counts["refused"] < refused and counts["files"] < 3 * refused:
        jobs = []
        for i in range(min(100, refused - counts["refused"])):
            name = list(kinds)[i % len(kinds)]
            way, content = damaged(good[name], good[dice.choice([k for k in kinds if k != name])], dice)
            path, reads = kinds[name]
            folder = home / f"bad{i}"
            folder.mkdir(exist_ok=True)
            (folder / path.name).write_bytes(content)
            if content != good[name]:
                jobs.append((name, way, folder / path.name, reads))
        for (name, way, path, _), (kind, said) in zip(jobs, batch(jobs, home / "log"), strict=True):
            counts["files"] += 1
            counts[kind] += 1
            by[f"{name}, {kind}"] += 1
            if kind == "wrong":
                wrong.append({"kind": name, "way": way, "said": said, "file": path.name})
    return {**counts, "by kind": dict(sorted(by.items())), "wrong ones": wrong, "seed": seed,
            "parquet": "edges.parquet" in kinds}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refused", type=int, default=1000, help="how many refusals to see")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        report = fuzz(given.refused, given.seed, Path(home))
    text = json.dumps(report, indent=2)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)
    sys.exit(bool(report["wrong ones"]))


if __name__ == "__main__":
    main()
