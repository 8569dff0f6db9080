"""Shards: a data set cut by nodes, each part with its in-edges, features and labels; and one rank's own part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adahop.checks import InputError, count, one_of
from adahop.graph import Graph
from adahop.mapped import graph_of, read, save
from adahop.mapped.data import SPLITS
from adahop.ops import pointer
from adahop.samplers.partition import partition
from adahop.seams import NodeData

HOW = ("range", "metis")


def write(data: NodeData, out: str | Path, parts: int, how: str) -> list[int]:
    """A folder of the data set whose nodes are numbered part after part; returns the first node of each, and the end.

    "range" leaves the numbers as they are and cuts them where each part has about the same bytes; "metis" keeps
    neighbours together. `load` takes the folder as well: it is a data set like others.
    """
    one_of(how, HOW, "how")
    _no_features("attr" if data.graph.attr is not None else None)
    n = data.graph.num_nodes
    if not 1 <= count(parts, 1, "parts") <= n:
        raise InputError(f"`parts` must be no more than the {n} nodes, got {parts}")
    if how == "metis":
        part = partition(data.graph, parts)
        order, cuts = torch.argsort(part, stable=True), pointer(torch.bincount(part, minlength=parts)).tolist()
    else:
        order, cuts = torch.arange(n), bounds(data.graph.indptr, data.x.shape[1], parts)
    save(data, out, order, partition=how, bounds=cuts)
    return cuts


def _no_features(attr: object) -> None:
    if attr is not None:
        raise InputError("`data` must have no `edge_attr` to be cut into parts, got a graph with features of edges")


def bounds(indptr: Tensor, width: int, parts: int) -> list[int]:
    """Ranges of nodes whose edges, features and state take about the same memory."""
    n = indptr.numel() - 1
    cost = indptr * 16 + torch.arange(n + 1) * (4 * width + 48)
    cuts = torch.searchsorted(cost, int(cost[-1]) * torch.arange(parts + 1) // parts).clamp(max=n).tolist()
    return [0, *cuts[1:-1], n]


class LocalGraph(Graph):
    """The in-edges of a part: its nodes are 0, 1, ..., and after them come the halo, their sources in other parts."""

    def normalized(self, kind: str | None = "row", self_loops: bool = True) -> Graph:
        if kind == "sym":
            raise InputError("`norm` must be row with `partition`, as sym needs the degrees of other parts, got sym")
        return super().normalized(kind, self_loops)


class Shard:
    """One part of a folder, in memory: what `fit` asks of a data set, with a graph of this part and its halo alone.

    Local ids are 0, 1, ... for the part's own nodes [low, high), then those of `halo`, in order of their ids.
    """

    graph: Graph
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    x: Tensor
    y: Tensor

    def __init__(self, folder: str | Path, rank: int, size: int, how: str = "range"):
        arrays, meta = read(Path(folder))
        _no_features(arrays.get("attr"))
        if meta.get("loops"):
            arrays |= dict(graph_of(Path(folder), arrays, meta).replace()._tensors())
        cut = meta.get("bounds")
        if cut is None and how == "range":
            cut = bounds(arrays["indptr"], arrays["x"].shape[1], size)
        if cut is None or len(cut) != size + 1 or (meta.get("partition", how) != how):
            got = "none" if cut is None else f"{len(cut) - 1} by {meta.get('partition', how)}"
            raise InputError(f"{folder} must be cut into {size} parts by {how}, see `adahop partition`, got {got}")
        self.bounds, self.rank, self.size, self.home = torch.tensor(cut), rank, size, Path(folder)
        self.low, self.high, self.num_nodes = cut[rank], cut[rank + 1], cut[-1]
        self.num_edges, self.name = arrays["indices"].numel(), str(meta.get("name") or Path(folder).name)
        self.metric, self.note = str(meta.get("metric") or "accuracy"), str(meta.get("note") or "")
        self.graph, self.halo = self._graph(arrays)
        own = slice(self.low, self.high)
        self.x, self.y = arrays["x"][own].clone(), arrays["y"][own].clone()
        self.y = self.y.long() if self.y.dim() == 1 else self.y.float()
        self.classes = int(meta["classes"]) if meta.get("classes") else self.y.shape[-1]
        self.training = arrays["train_idx"].numel()
        for name in SPLITS:
            ids = arrays[f"{name}_idx"]
            mask = torch.zeros(self.high - self.low, dtype=torch.bool)
            mask[ids[(ids >= self.low) & (ids < self.high)] - self.low] = True
            setattr(self, f"{name}_mask", mask)

    def _graph(self, arrays: dict[str, Tensor]) -> tuple[LocalGraph, Tensor]:
        low, high, indptr = self.low, self.high, arrays["indptr"]
        a, b = int(indptr[low]), int(indptr[high])
        src = arrays["indices"][a:b].long()
        own = (src >= low) & (src < high)
        halo = torch.unique(src[~own])
        local = torch.where(own, src - low, torch.searchsorted(halo, src) + high - low).int()
        ends = torch.full((halo.numel(),), b - a)
        weight = arrays["weight"][a:b].clone() if "weight" in arrays else None
        self.edges = a, b - a, arrays["eid"][a:b].clone() if "eid" in arrays else None
        places = torch.cat([indptr[low : high + 1] - a, ends])
        first = torch.cat([arrays["first"][low:high] - a, ends])
        return LocalGraph(places, local, weight, None, first), halo

    def ids(self, local: Tensor) -> Tensor:
        """Global ids of local ones."""
        n, local = self.high - self.low, local.long()
        if self.halo.numel() == 0:
            return local + self.low
        return torch.where(local < n, local + self.low, self.halo[(local - n).clamp(min=0)])

    def edge_ids(self, local: Tensor) -> Tensor:
        """The user's ids of local edges; those past the last are the self-loops that normalising added."""
        start, many, eid = self.edges
        true = local.clamp(max=max(many - 1, 0))
        own = local + start if eid is None else eid[true].long() if many else true
        return torch.where(local < many, own, local - many + self.low + self.num_edges)

    def to(self, device: Any) -> Shard:
        if torch.device(device).type != "cpu":
            raise InputError(f"`device` must be cpu with `partition`, got {device}")
        return self
