"""Numbering in plain torch: local ids of nodes, targets first, then the others as they first appear."""

from __future__ import annotations

import torch
from torch import Tensor

from adahop.ops.segments import pointer, segment_of, spans
from adahop.ops.types import Drawn, Edges, Numbered, Plan


def in_order(key: Tensor) -> tuple[Tensor, Tensor]:
    """(number of each key, place where each number first stood), numbered as they first appear."""
    unique, which = key.unique(return_inverse=True)
    first = torch.full_like(unique, key.numel())
    first.scatter_reduce_(0, which, torch.arange(key.numel(), device=key.device), "amin")
    order = first.argsort()
    return order.argsort()[which], first[order]


def relabel(dst: Tensor, src: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """(n_id, local source ids): targets first, then sources as they appear. `scratch` [N] int32 is -1 throughout.

    A target that comes twice keeps both its places and goes by the first. How many nodes there are is all that the host
    has to read.
    """
    everyone, n = torch.cat([dst, src]), dst.numel()
    place = torch.arange(everyone.numel(), device=dst.device)
    number = torch.full((scratch.numel(),), everyone.numel(), device=dst.device)  # of every node of the graph
    number.scatter_reduce_(0, everyone, place, "amin")  # at first, its first place here
    others = src[number[src] == place[n:]]
    number[others] = torch.arange(n, n + others.numel(), device=dst.device)
    return torch.cat([dst, others]), number[src]


def relabel_within(dst: Tensor, src: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """`relabel` in a shape that does not depend on the ids, of a graph with so many nodes: `n_id` has room for as many
    others as there can be, filled up with node 0."""
    n, room = dst.numel(), min(src.numel(), nodes)
    everyone = torch.cat([dst, src])
    place = torch.arange(everyone.numel(), device=dst.device)
    number = torch.full((nodes + 1,), everyone.numel(), device=dst.device).scatter_reduce_(0, everyone, place, "amin")
    new = number[src] == place[n:]
    rank = n - 1 + new.cumsum(0)
    number.scatter_(0, torch.where(new, src, nodes), rank)  # the last entry takes what is not to be written
    n_id = torch.cat([dst, dst.new_zeros(room + 1)])
    n_id.scatter_(0, torch.where(new, rank, n + room), src)
    return n_id[:-1], number[src]


def number(
    dst: Tensor, drawn: Drawn | Plan, edges: Edges, target: Tensor | None, scratch: Tensor, known: bool | None
) -> Numbered:
    """Number the nodes of drawn edges as `relabel` does, and look the edges up.

    `target` says which target each row of `drawn` belongs to (None: the t-th row is the t-th target's). With `known`
    True or False, `scratch` keeps the numbers, for the next hop to go on with (True) instead of anew: see `forget`.
    """
    drawn = drawn.drawn if isinstance(drawn, Plan) else drawn
    pos = drawn.pos
    nodes, src = relabel(dst, edges.indices[pos].long(), scratch)
    row = segment_of(drawn.ptr, pos.numel())
    edge_index = torch.stack([src, row if target is None else target[row]])
    w = torch.ones_like(drawn.scale) if edges.weight is None else edges.weight[pos]
    return Numbered(nodes, edge_index, pos if edges.eid is None else edges.eid[pos].long(), w)


def forget(n_id: Tensor, scratch: Tensor) -> None:
    """After the last hop: scratch is -1 again."""


def induced(edges: Edges, nodes: Tensor, rows: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(ptr, pos, src) of the edges among some nodes, grouped by the given rows: places and local source ids.

    A node that comes twice has two rows of edges and is a source by its first. `scratch` [N] int32 holds -1 throughout.
    """
    n, many, device = nodes.numel(), rows.numel(), nodes.device
    local = torch.full((scratch.numel(),), n, device=device)
    local.scatter_reduce_(0, nodes, torch.arange(n, device=device), "amin")
    row, pos = spans(edges.begin[rows], edges.last[rows] - edges.begin[rows])
    src = local[edges.indices[pos].long()]
    inside = src < n
    return pointer(torch.bincount(row[inside], minlength=many)), pos[inside], src[inside]
