"""Graphs to measure on, by a word: rmat:N,E, star:DEGREE, or any data set's name or path."""

from __future__ import annotations

import torch
from torch import Tensor

from adahop.checks import InputError
from adahop.datasets import load
from adahop.graph import Graph
from adahop.ops import random
from adahop_lab.bench.rmat import rmat

STARS = 1 << 22  # edges in all of a star graph, or one star


def graph(text: str) -> Graph:
    """The raw graph, without weights and loops of our own."""
    if text.startswith("rmat:"):
        return rmat(text)
    if text.startswith("star:"):
        return stars(text)
    return load(text).graph


def stars(text: str) -> Graph:
    """`star:DEGREE`: hubs of that degree, as many as make some millions of edges; their leaves are shared."""
    try:
        degree = int(text.partition(":")[2])
    except ValueError:
        degree = 0
    if not 1 <= degree <= STARS:
        raise InputError(f"`graph` star:DEGREE must have a degree in [1, {STARS}], got '{text}'")
    hubs = max(STARS // degree, 256)
    leaves = max(degree, 1 << 17)
    place = torch.arange(hubs * degree)
    src = hubs + (place % degree + 7919 * (place // degree)) % leaves  # each hub's leaves differ from one another
    ptr = torch.arange(hubs + 1) * degree
    indptr = torch.cat([ptr, ptr[-1].expand(leaves)])
    return Graph(indptr, src.int(), None, None, indptr[:-1])


def untyped(graph: Graph) -> Graph:
    """The edges of a typed graph as one relation: a node's rows, which lie side by side, are one.

    Where a row has self-loops they are among the neighbours; what is measured here has none.
    """
    if graph.types is None:
        return graph
    indptr = graph.indptr[graph.types.ptr].clone()
    return Graph(indptr, graph.indices, graph.weight, graph.eid, indptr[:-1])


def batches(graph: Graph, batch_size: int, seed: int = 0, most: int = 256, live: bool = False) -> list[Tensor]:
    """Different nodes in batches, of the first type, the same for everyone; `live`: only those with neighbours."""
    many = graph.num_nodes if graph.types is None else graph.types.bounds[1]
    nodes = graph.degree().nonzero().flatten() if live else torch.arange(many)
    nodes = random.shuffled(nodes, random.key(seed, 5))[: most * batch_size]
    parts = list(nodes.split(batch_size))
    return parts[:-1] if len(parts) > 1 and parts[-1].numel() < batch_size else parts
