"""Partitions by METIS, kept on disk under the graph's own hash."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adahop.checks import InputError
from adahop.graph import Graph


def partition(graph: Graph, parts: int) -> Tensor:
    """[N] the cluster of each node, 0, 1, ... without gaps; no more clusters than nodes.

    METIS sees the graph as undirected, without self-loops and weights. The result is kept under
    `$ADAHOP_CACHE/partitions` (~/.cache/adahop/partitions); a file that cannot be read is made anew.
    """
    n = graph.num_nodes
    if parts >= n:
        return torch.arange(n)
    if parts == 1:
        return torch.zeros(n, dtype=torch.long)
    path = cache_dir() / f"{graph.hash()}-{parts}.npy"
    found = _read(path, n, parts)
    if found is None:
        found = _metis(graph, parts)
        _write(path, found)
    return found


def cache_dir() -> Path:
    return Path(os.environ.get("ADAHOP_CACHE") or Path.home() / ".cache" / "adahop") / "partitions"


def _metis(graph: Graph, parts: int) -> Tensor:
    try:
        import pymetis
    except ImportError:
        raise InputError("`cluster-gcn` needs pymetis: pip install adahop[metis]") from None
    n, src, dst = graph.num_nodes, graph.indices.long().cpu(), graph.dst().cpu()
    true = src != dst
    src, dst = src[true], dst[true]
    pairs = torch.unique(torch.cat([dst * n + src, src * n + dst]))  # both ways, each once, in order
    if pairs.numel() == 0:
        return torch.arange(n) * parts // n
    ptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.bincount(pairs // n, minlength=n).cumsum(0)])
    _, part = pymetis.part_graph(parts, xadj=ptr.numpy(), adjncy=(pairs % n).numpy(), options=pymetis.Options(seed=0))
    return torch.unique(torch.as_tensor(part, dtype=torch.long), return_inverse=True)[1]


def _read(path: Path, n: int, parts: int) -> Tensor | None:
    try:
        part = np.load(path, allow_pickle=False)
    except Exception:  # missing, truncated or not ours: all the same
        return None
    if part.shape != (n,) or part.dtype != np.int32 or part.min() < 0 or part.max() >= parts:
        return None
    return torch.from_numpy(part.astype(np.int64))


def _write(path: Path, part: Tensor) -> None:
    """A file is there whole or not at all; without a place to write, it is made anew each time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as f:
                np.save(f, part.numpy().astype(np.int32))
            os.replace(name, path)
        except OSError:
            os.unlink(name)
