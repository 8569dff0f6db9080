"""MappedGraph: a graph whose arrays stay on disk; its normalised form is written to disk, too."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adahop.checks import InputError, one_of
from adahop.graph import Graph
from adahop.mapped.folder import MANIFEST, Folder, cache_path, manifest, read
from adahop.ops import ask_for, in_file, no_more_than_asked, normalise, prepend, ranges, segment_of
from adahop.typed import EdgeFeatures

ARRAYS = ("indptr", "indices", "weight", "eid", "first")
EDGES = 1 << 22  # edges at once


class MappedGraph(Graph):
    """A Graph from a folder of `adahop convert --mmap`. Draws read only the pages they need; O(N) arrays are in memory.

    `edge_index()`, `dst()` and `edge_weight()` still make an array of all edges in memory.
    """

    def __init__(self, home: Path, arrays: dict[str, Tensor], name: str):
        super().__init__(*(arrays.get(k) for k in ARRAYS))  # type: ignore[arg-type]
        if "attr" in arrays:
            self.attr = EdgeFeatures((arrays["attr"],), (0,))
        self.home, self.name = home, name

    @classmethod
    def open(cls, home: str | Path) -> MappedGraph:
        return cls.of(Path(home), read(Path(home))[0])

    @classmethod
    def of(cls, home: Path, arrays: dict[str, Tensor]) -> MappedGraph:
        """From a folder's arrays; its name comes from the checksums in the manifest, without reading the arrays."""
        check_arrays(home, arrays, ("indptr", "indices", "first"))
        return cls(home, arrays, name_of(home))

    def hash(self) -> str:
        return self.name

    def prefetch(self, rows: Tensor) -> None:
        begin, last = self.indptr[rows], self.last[rows]
        for t in self._in_files:
            ask_for(t, begin, last)

    @functools.cached_property
    def _in_files(self) -> list[Tensor]:
        """Its arrays with an entry per edge that are read from the disk."""
        arrays = (self.indices, self.edges.weight, self.edges.eid)
        return [no_more_than_asked(t) for t in arrays if t is not None and in_file(t)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Graph:
        return self if torch.device(device).type == "cpu" else super().to(device, non_blocking)

    def normalized(self, kind: str | None = "row", self_loops: bool = True) -> Graph:
        """As `Graph.normalized`, cached in a folder inside the graph's own (or under ADAHOP_CACHE)."""
        if kind is not None:
            one_of(kind, ("row", "sym"), "kind")
        if kind is None and not self_loops:
            return self
        home = self._normalized_home(f"{kind or 'raw'}{'-loops' if self_loops else ''}")
        if not (home / MANIFEST).is_file():
            _write(self, home, kind, self_loops)
        arrays = read(home)[0]
        rest = {k: t for k, t in self._tensors() if k not in arrays}  # without self-loops only the weights are new
        if self.attr is not None:
            rest["attr"] = self.attr.tables[0]
        return MappedGraph(home, {**rest, **arrays}, f"{self.name}-{home.name}")

    def _normalized_home(self, part: str) -> Path:
        """Where the normalised graph is, or will be."""
        inside = self.home / f"normalized-{part}"
        if (inside / MANIFEST).is_file() or os.access(self.home, os.W_OK):
            return inside
        return cache_path("normalized", f"{self.name}-{part}")


def check_arrays(home: Path, arrays: dict[str, Tensor], names: tuple[str, ...]) -> None:
    for name in names:
        if name not in arrays:
            raise InputError(f"{home} must hold the array {name}, got {', '.join(arrays) or 'none'}")


def name_of(home: Path) -> str:
    """A name for the content of a folder's graph, from the checksums in its manifest."""
    known = {k: v["crc32"] for k, v in manifest(home)[0].items() if k in (*ARRAYS, "attr")}
    return hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=16).hexdigest()


def _write(g: MappedGraph, home: Path, kind: str | None, loops: bool) -> None:
    """Write the arrays that differ in the normalised graph, with the edges of some nodes in memory at a time."""
    places = g.indptr + torch.arange(g.num_nodes + 1) if loops else g.indptr
    m = int(places[-1])
    with Folder(home, {"of": g.name}) as folder:
        out: dict[str, np.ndarray] = {}
        if kind is not None or g.weight is not None:
            out["weight"] = folder.array("weight", np.float32, (m,))
        if loops:
            folder.save("indptr", places)
            folder.save("first", g.first + torch.arange(1, g.num_nodes + 1))
            out["indices"] = folder.array("indices", g.indices.numpy().dtype, (m,))
            out["eid"] = folder.array("eid", np.int32 if m < 2**31 else np.int64, (m,))
        parts, root = ranges(g.indptr, EDGES), torch.zeros(g.num_nodes, dtype=torch.double)
        for a, b in parts if kind == "sym" else ():  # a first pass, as an edge's weight needs the sums of both ends
            ptr, found = _edges(g, a, b, loops)
            root[a:b].index_add_(0, segment_of(ptr, len(found["weight"])), found["weight"].double())
        root = root.rsqrt().masked_fill(root == 0, 0.0)
        for a, b in parts:
            ptr, found = _edges(g, a, b, loops)
            if kind == "row":
                found["weight"] = normalise(ptr, found["indices"], found["weight"], False)
            elif kind == "sym":
                row, source = segment_of(ptr, len(found["weight"])), found["indices"].long()
                found["weight"] = found["weight"].double() * root[a:b][row] * root[source]
            for name, array in out.items():
                array[places[a] : places[b]] = found[name].numpy()


def _edges(g: MappedGraph, a: int, b: int, loops: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The pointer, sources, weights and ids of the edges of nodes a..b; with `loops`, a self-loop first in each row."""
    lo, hi, nodes = int(g.indptr[a]), int(g.indptr[b]), torch.arange(a, b)
    ptr = g.indptr[a : b + 1] - lo
    found = {
        "indices": g.indices[lo:hi],
        "weight": torch.ones(hi - lo) if g.weight is None else g.weight[lo:hi],
        "eid": torch.arange(lo, hi) if g.eid is None else g.eid[lo:hi],
    }
    if not loops:
        return ptr, found
    own = {"indices": nodes, "weight": torch.ones(b - a), "eid": nodes + g.num_edges}
    many = torch.arange(b - a + 1)
    return ptr + many, {k: prepend(values, ptr, own[k].to(values.dtype)) for k, values in found.items()}
