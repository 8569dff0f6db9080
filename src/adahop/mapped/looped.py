"""A graph in files whose rows begin with the node's self-loop: A + I is not stored a second time, nor are its weights.

Of an edge only the source is stored. A normalised weight is 1 / degree (or, where the user's own weights are stored,
the weight over their sum, one number per node), and an edge's id follows from its place and its row.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adahop.checks import one_of
from adahop.graph import Graph
from adahop.mapped.folder import MANIFEST, Folder, open_array
from adahop.mapped.graph import EDGES, MappedGraph, check_arrays, name_of
from adahop.ops import Edges, ranges

PLAIN = ("indptr", "indices", "weight", "eid", "first")


class LoopedGraph(MappedGraph):
    """A + I as it is stored; with `mean`, each weight is divided by its row's sum.

    `weight` and `eid` of all edges are made in memory on access; draws, sums and updates do not need them.
    """

    def __init__(self, home: Path, arrays: dict[str, Tensor], name: str, mean: bool = False):
        super().__init__(home, arrays, name)
        self.arrays, self.mean = arrays, mean
        del self.weight, self.eid

    @functools.cached_property
    def edges(self) -> Edges:
        a, begin = self.arrays, self.indptr[:-1]
        added = None if "eid" in a else begin
        return Edges(
            begin, self.first, self.indptr[1:], self.indices, a.get("weight"), a.get("eid"), self.mean, a.get("total"),
            added,
        )  # fmt: skip

    @property
    def relative(self) -> Tensor | None:
        return self.edges.weight

    @functools.cached_property
    def weight(self) -> Tensor | None:  # type: ignore[override]
        if self.relative is None and not self.mean:
            return None
        return self.edges.weights(self.row(), torch.arange(self.num_edges))

    @functools.cached_property
    def eid(self) -> Tensor:  # type: ignore[override]
        word = torch.int32 if self.num_edges < 2**31 else torch.int64
        return self.edges.numbers(self.row(), torch.arange(self.num_edges)).to(word)

    def at(self, pos: Tensor, span: slice | None = None) -> tuple[Tensor, Tensor, Tensor]:
        row = torch.searchsorted(self.indptr, pos, right=True) - 1
        return (
            self.indices[pos if span is None else span].long(),
            self.edges.numbers(row, pos),
            self.edges.weights(row, pos),
        )

    def normalized(self, kind: str | None = "row", self_loops: bool = True) -> Graph:
        return self.replace().normalized(kind, self_loops)


class UnloopedGraph(Graph):
    """A of a folder that holds A + I. With self-loops, its normalised form reads the stored arrays; without, and for
    access to its own arrays, they are made in memory."""

    def __init__(self, home: Path, arrays: dict[str, Tensor]):
        check_arrays(home, arrays, ("indptr", "indices"))
        indptr = arrays["indptr"].clone()  # read at random at every step, and small
        first = arrays["first"].clone() if "first" in arrays else indptr[:-1] + 1
        total = {"total": arrays["total"].clone()} if "total" in arrays else {}
        self.whole = LoopedGraph(home, {**arrays, "indptr": indptr, "first": first, **total}, name_of(home))
        self.ends, self.time, self.types, self.attr = None, None, None, self.whole.attr

    def __getattr__(self, name: str) -> Any:
        if name in PLAIN:
            return getattr(self.plain, name)
        raise AttributeError(name)

    @functools.cached_property
    def plain(self) -> Graph:
        """The same graph in memory, without loops."""
        g, stored = self.whole, self.whole.edges
        own = torch.ones(g.num_edges, dtype=torch.bool)
        own[g.indptr[:-1]] = False
        indices, weight, eid = (None if t is None else t[own] for t in (g.indices, stored.weight, stored.eid))
        assert indices is not None
        steps = torch.arange(self.num_nodes + 1)
        return Graph(g.indptr - steps, indices, weight, eid, g.first - steps[1:], attr=self.attr)

    @property
    def num_rows(self) -> int:
        return self.whole.num_rows

    @property
    def num_edges(self) -> int:
        return self.whole.num_edges - self.whole.num_nodes

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def degree(self) -> Tensor:
        return self.whole.degree() - 1

    def hash(self) -> str:
        return self.whole.name

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Graph:
        return self if torch.device(device).type == "cpu" else self.plain.to(device, non_blocking)

    def normalized(self, kind: str | None = "row", self_loops: bool = True) -> Graph:
        """With self-loops, from the stored arrays; the weights of "sym" are cached in a file beside it."""
        if kind is not None:
            one_of(kind, ("row", "sym"), "kind")
        if not self_loops:
            return self.plain.normalized(kind, False)
        g, arrays = self.whole, dict(self.whole.arrays)
        if kind == "sym":
            arrays["weight"] = _by_both_ends(g)
        made = LoopedGraph(g.home, arrays, f"{g.name}-{kind}-loops", kind == "row")
        made.attr = self.attr
        return made


def _by_both_ends(g: LoopedGraph) -> Tensor:
    """Weights divided by the square roots of both ends' sums, cached in a file."""
    home = g._normalized_home("sym-loops")
    if not (home / MANIFEST).is_file():
        total = g.edges.total
        root = (g.degree().double() if total is None else total).rsqrt()
        with Folder(home, {"of": g.name}) as folder:
            out = folder.array("weight", np.float32, (g.num_edges,))
            for a, b in ranges(g.indptr, EDGES):
                lo, hi = int(g.indptr[a]), int(g.indptr[b])
                row = torch.repeat_interleave(torch.arange(a, b), g.indptr[a : b + 1].diff())
                weight = 1.0 if g.relative is None else g.relative[lo:hi].double()
                out[lo:hi] = (weight * root[row] * root[g.indices[lo:hi].long()]).numpy()
    return open_array(home / "weight.npy")


def save_looped(graph: Graph, folder: Folder) -> None:
    """Write the arrays of A + I: edge ids only where the user's order differs, row sums only of given weights."""
    looped = graph._with_loops()
    folder.save("indptr", looped.indptr)
    folder.save("indices", looped.indices)
    if not torch.equal(graph.first, graph.indptr[:-1]):
        folder.save("first", looped.first)
    if graph.eid is not None:
        folder.save("eid", looped.eid)
    if looped.weight is not None:
        folder.save("weight", looped.weight)
        total = torch.zeros(graph.num_nodes, dtype=torch.double)
        folder.save("total", total.index_add_(0, looped.row(), looped.weight.double()))
