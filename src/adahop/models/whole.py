"""The whole graph in pieces: ranges of nodes, and the block of all their in-edges."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block, expand
from adahop.checks import InputError, count, of_kind
from adahop.graph import Graph
from adahop.storage import MEMORY, Storage


def check_whole(graph: Graph, x: Tensor, edges: int = 0) -> None:
    """A graph, and a row of features for each of its nodes."""
    count(edges, 0, "edges")
    of_kind(graph, Graph, "graph")
    if of_kind(x, Tensor, "x").dim() != 2 or len(x) != graph.num_nodes or not x.is_floating_point():
        raise InputError(f"`x` must be floating-point of shape [{graph.num_nodes}, F], got {tuple(x.shape)}")


class Filled:
    """A row per node, filled a piece at a time: no piece is held twice, and the whole may lie on disk."""

    all: Tensor

    def __init__(self, n: int, storage: Storage = MEMORY):
        self.n, self.storage = n, storage

    def put(self, a: int, part: Tensor) -> None:
        if not hasattr(self, "all"):
            self.all = self.storage.empty((self.n, *part.shape[1:]), part.dtype, part.device)
        self.all[a : a + len(part)] = part


def in_pieces(h: Tensor, f: Callable[[Tensor], Tensor], storage: Storage = MEMORY, rows: int = 1 << 14) -> Tensor:
    """f of some rows at a time."""
    out, far = Filled(len(h), storage), ops.in_file(h)
    for a in range(0, max(len(h), 1), rows):
        if far:
            here = torch.arange(a, min(a + rows, len(h)))
            ops.ask_for(h, here, here + 1)
        out.put(a, f(h[a : a + rows]))
    return out.all


def node_chunks(graph: Graph, edges: int, low: int = 0, high: int | None = None) -> list[tuple[int, int]]:
    """Ranges of the nodes low..high (all) with about `edges` in-edges each."""
    n = graph.num_nodes if high is None else high
    cost = graph.indptr[low : n + 1] + torch.arange(low, n + 1, device=graph.device)
    marks = torch.arange(int(cost[0]), int(cost[-1]) + edges, edges, device=graph.device)
    cuts = sorted({*(torch.searchsorted(cost, marks) + low).clamp(max=n).tolist(), low, n})
    return list(pairwise(cuts)) or [(low, low)]


def full_block(graph: Graph, a: int, b: int) -> Block:
    """All in-edges of the nodes a..b; sources keep their global ids."""
    graph.soon(torch.arange(a, b, device=graph.device))
    lo, hi = int(graph.indptr[a]), int(graph.indptr[b])
    ptr = graph.indptr[a : b + 1] - lo
    one, pos = torch.ones(hi - lo, device=graph.device), torch.arange(lo, hi, device=graph.device)
    src, e_id, weight = graph.at(pos, slice(lo, hi))
    everyone = torch.arange(graph.num_nodes, device=graph.device)
    edge_index = torch.stack([src, expand(ptr, hi - lo)])
    block = Block(everyone, b - a, edge_index, e_id, weight, one, one, ptr, pos, target=everyone[a:b])
    return graph.described(block)
