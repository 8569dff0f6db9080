"""Slots: how padded blocks of a typed graph are laid out, hop by hop.

A node has a row for every relation into its type, and all rows have the same number of slots. So the relation of a
slot, the type of its source and the rows of the next hop do not depend on the draw.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from adahop.block import RelationSlots, SlotLayout, Span
from adahop.graph import Graph
from adahop.ops import pointer, segment_of


class TypedHop(NamedTuple):
    """The layout of one hop, the same for any batch of its size."""

    layout: SlotLayout
    target: Tensor  # [T] which of the targets each row belongs to
    relation: Tensor  # [T] of each row
    ptr: Tensor  # [D + 1] target i has the rows ptr[i]:ptr[i + 1]
    blank: Tensor  # [T] a node of the row's source type, for empty slots
    order: Tensor  # [T * k] drawn slots by the type of their source
    edge_index: Tensor  # [2, M]
    edge_ptr: Tensor  # [D + 1]
    row_ptr: Tensor  # [T + 1]


class TypedHops:
    """The hops of a typed graph in slots, and the row of every (target, relation).

    `row_of` holds 4 bytes per node and relation into its type: rows are stored only where they have edges.
    """

    def __init__(self, graph: Graph, loops: int):
        types = graph.types
        assert types is not None
        self.loops, self.device = loops, graph.device
        self.ends, self.starts, bounds = types.ends, list(types.nodes.values()), types.bounds
        some = torch.bincount(types.relation, minlength=len(types.relations)).tolist()
        self.into = [
            [r for r, (_, target) in enumerate(self.ends) if target == kind and some[r]]
            for kind in range(len(self.starts))
        ]
        target = segment_of(types.ptr, graph.num_rows)
        cuts = types.ptr[torch.tensor(bounds, device=self.device)].tolist()
        self.row_of: list[Tensor] = []
        for kind, (low, high) in enumerate(pairwise(bounds)):
            column = torch.zeros(len(self.ends), dtype=torch.long, device=self.device)
            column[self.into[kind]] = torch.arange(len(self.into[kind]), device=self.device)
            rows = torch.arange(cuts[kind], cuts[kind + 1], device=self.device)
            table = torch.full((high - low, len(self.into[kind])), -1, dtype=torch.int32, device=self.device)
            table[target[rows] - low, column[types.relation[rows]]] = rows.int()
            self.row_of.append(table)
        self.cache: dict[tuple[tuple[Span, ...], int], TypedHop] = {}

    def rows(self, spans: tuple[Span, ...], nodes: Tensor) -> Tensor:
        """[T] the row of each of the targets by every relation into its type; -1 where it has none."""
        each = [
            self.row_of[s.kind].index_select(0, nodes[s.start : s.stop] - self.starts[s.kind]).flatten() for s in spans
        ]
        return torch.cat(each).long()

    def slots(self, kind: int, sizes: list[int], skip: frozenset[int]) -> int:
        """How many slots all hops below one seed have."""
        many, total = [0] * len(self.starts), 0
        many[kind] = 1
        for layer in reversed(range(len(sizes))):
            if layer in skip:
                continue
            found = list(many)
            for here, relations in enumerate(self.into):
                for r in relations:
                    total += many[here] * (self.loops + sizes[layer])
                    found[self.ends[r][0]] += many[here] * sizes[layer]
            many = found
        return total

    def hop(self, spans: tuple[Span, ...], k: int) -> TypedHop:
        """The hop of targets in these spans with k drawn slots per row, cached. With k = 0 there are no rows."""
        if (spans, k) not in self.cache:
            self.cache[spans, k] = self._hop(spans, k)
        return self.cache[spans, k]

    def _hop(self, spans: tuple[Span, ...], k: int) -> TypedHop:
        device, drawn = self.device, [self.into[s.kind] if k else [] for s in spans]
        per = [torch.full((s.stop - s.start,), len(rs), device=device) for s, rs in zip(spans, drawn, strict=True)]
        ptr = pointer(torch.cat(per))
        targets, rows, slots = ptr.numel() - 1, int(ptr[-1]), self.loops + k if k else 0
        target = segment_of(ptr, rows)
        relation = torch.cat(
            [torch.tensor(rs, dtype=torch.long).repeat(s.stop - s.start) for s, rs in zip(spans, drawn, strict=True)]
        ).to(device)
        source = torch.tensor([kind for kind, _ in self.ends], device=device)[relation]
        # the type of the last targets comes first, so that one span holds both
        first, kinds = spans[-1].kind, len(self.starts)
        order = torch.argsort(((source - first) % kinds).repeat_interleave(k), stable=True)
        place = torch.empty_like(order)
        place[order] = targets + torch.arange(order.numel(), device=device)
        src = torch.cat([target[:, None].expand(rows, slots - k), place.view(rows, k)], 1).flatten()
        row = torch.arange(rows, device=device).repeat_interleave(slots)
        many = (torch.bincount(source, minlength=kinds) * k).tolist()
        below = [(kind % kinds, many[kind % kinds]) for kind in range(first, first + kinds)]
        parts = [self._part(r, spans, (relation == r).nonzero().flatten(), src, slots) for r in range(len(self.ends))]
        layout = SlotLayout(
            spans, _joined(spans, below), tuple(map(tuple, drawn)), torch.stack([src, row]), tuple(parts)
        )
        step = torch.arange(rows + 1, device=device)
        blank = torch.tensor(self.starts, device=device)[source]
        edge_index = torch.stack([src, target[row]])
        return TypedHop(layout, target, relation, ptr, blank, order, edge_index, ptr * slots, step * slots)

    def _part(self, relation: int, spans: tuple[Span, ...], rows: Tensor, src: Tensor, slots: int) -> RelationSlots:
        of = [s for s in spans if s.kind == self.ends[relation][1]]
        none = torch.zeros(0, dtype=torch.long, device=self.device)
        places = torch.cat([none, *(torch.arange(s.start, s.stop, device=self.device) for s in of)])
        edges = (rows[:, None] * slots + torch.arange(slots, device=self.device)).flatten()
        own = torch.arange(rows.numel(), device=self.device).repeat_interleave(slots)
        ptr = torch.arange(places.numel() + 1, device=self.device) * (slots if rows.numel() else 0)
        return RelationSlots(places, edges, torch.stack([src[edges], own]), ptr)


def _joined(spans: tuple[Span, ...], below: list[tuple[int, int]]) -> tuple[Span, ...]:
    """The spans, extended by these numbers of nodes of some types."""
    out = list(spans)
    for kind, many in below:
        last = out[-1]
        if not many:
            continue
        if last.kind == kind:
            out[-1] = last._replace(stop=last.stop + many)
        else:
            out.append(Span(kind, last.stop, last.stop + many))
    return tuple(out)
