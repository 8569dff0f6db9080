"""A data set as a folder of mapped arrays, which `load` and the ranks of a partitioned training read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adahop.checks import flag
from adahop.graph import Graph
from adahop.mapped.folder import Folder
from adahop.mapped.graph import MappedGraph
from adahop.mapped.looped import UnloopedGraph, save_looped
from adahop.ops import pointer, spans
from adahop.seams import NodeData

SPLITS = ("train", "val", "test")
ABOUT = ("name", "classes", "metric", "note")
ROWS = 1 << 14  # copied at once


def save(data: NodeData, out: str | Path, order: Tensor | None = None, loops: bool = False, **more: Any) -> None:
    """Write a data set, with its features as they are; `more` joins the manifest.

    With an `order`, node order[i] becomes node i of the folder, which stores the order as `original`. With `loops`,
    rows begin with a self-loop, so that models which add one to every node need no second graph, see `looped`.
    """
    graph = data.graph if order is None else renumbered(data.graph, order)
    about = {"loops": True} if flag(loops, "loops") else {}
    with Folder(out, {**{k: getattr(data, k, None) for k in ABOUT}, **about, **more}) as folder:
        save_graph(graph, folder, loops)
        if order is None:
            order = torch.arange(graph.num_nodes)
        else:
            folder.save("original", order)
        for name in ("x", "y"):
            rows = getattr(data, name)
            whole = folder.array(name, rows[:0].numpy().dtype, tuple(rows.shape))
            for a in range(0, len(rows), ROWS):
                whole[a : a + ROWS] = rows[order[a : a + ROWS]].numpy()
        for part in SPLITS:
            folder.save(f"{part}_idx", getattr(data, f"{part}_mask")[order].nonzero().flatten())


def save_graph(graph: Graph, folder: Folder, loops: bool = False) -> None:
    if loops:
        save_looped(graph, folder)
    for name, t in () if loops else graph._tensors():
        folder.save(name, t)
    if graph.attr is not None:
        folder.save("attr", graph.attr.tables[0])


def renumbered(g: Graph, order: Tensor) -> Graph:
    """The graph with node order[i] as node i; edges keep their ids."""
    if bool((order[1:] > order[:-1]).all()):
        return g
    many = g.degree()[order]
    _, old = spans(g.indptr[order], many)
    indptr = pointer(many)
    first = indptr[:-1] + (g.first - g.indptr[:-1])[order]
    eid = old if g.eid is None else g.eid[old]
    weight = None if g.weight is None else g.weight[old]
    small = torch.int32 if g.num_edges < 2**31 else torch.int64
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
    indices = place[g.indices[old].long()].to(g.indices.dtype)
    return Graph(indptr, indices, weight, eid.to(small), first, attr=g.attr)


def graph_of(home: Path, arrays: dict[str, Tensor], meta: dict[str, Any]) -> Graph:
    """The graph of a folder's arrays."""
    return UnloopedGraph(home, arrays) if meta.get("loops") else MappedGraph.of(home, arrays)
