"""What a sampler's state weighs, found by looking at the memory it holds, not by a formula."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adahop.graph import Graph
from adahop_lab.bench.ours import sampler


def weigh(text: str, graph: Graph, sizes: Sequence[int], batch_size: int) -> dict[str, float]:
    """Bytes an edge and a node, a layer: a twin of the graph without edges tells the nodes' share from the edges'."""
    indptr = torch.zeros_like(graph.indptr)
    twin = Graph(indptr, graph.indices[:0], None, None, indptr[:-1].clone(), types=graph.types)
    whole, nodes = (held(sampler(text, g, sizes, batch_size)) for g in (graph, twin))
    layers = len(sizes)
    return {
        "bytes_per_edge": max(whole - nodes, 0) / max(graph.num_edges, 1) / layers,
        "bytes_per_node": nodes / max(graph.num_nodes, 1) / layers,
    }


def held(own: nn.Module) -> int:
    """Bytes of all storage that a sampler reaches, less its graph's and its scratch."""
    known = {_place(t) for t in _arrays(vars(own.graph), set())}
    known |= {_place(own._scratch)} if isinstance(getattr(own, "_scratch", None), Tensor) else set()
    seen = {_place(a): _size(a) for a in _arrays(own, set())}
    gc.collect()
    return sum(size for place, size in seen.items() if place not in known)


def _arrays(thing: Any, met: set[int]) -> Iterator[Any]:
    """Tensors and arrays below a thing: in modules, objects, lists and dicts, each once."""
    if id(thing) in met:
        return
    met.add(id(thing))
    if isinstance(thing, Tensor | np.ndarray):
        yield thing
    elif isinstance(thing, dict):
        for value in list(thing.values()):
            yield from _arrays(value, met)
    elif isinstance(thing, list | tuple | set):
        for value in thing:
            yield from _arrays(value, met)
    elif type(thing).__module__.startswith("adahop") and hasattr(thing, "__dict__"):
        yield from _arrays(vars(thing), met)


def _place(a: Any) -> int:
    return a.untyped_storage().data_ptr() if isinstance(a, Tensor) else a.__array_interface__["data"][0]


def _size(a: Any) -> int:
    return a.untyped_storage().nbytes() if isinstance(a, Tensor) else a.nbytes
