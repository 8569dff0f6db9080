"""Block: the messages of one layer, src -> dst."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from adahop.ops import Drawn, Numbered, Rows, segment_of


class Seeds(NamedTuple):
    """The seeds of a batch: nodes, and for some tasks a time per seed, pairs of seeds, and labels."""

    n_id: Tensor  # [S] global node ids
    time: Tensor | None = None  # [S] only earlier edges are drawn
    pair: Tensor | None = None  # [2, P] places among the seeds
    label: Tensor | None = None  # [S] or [P]


class Span(NamedTuple):
    """A contiguous range of nodes of one type."""

    kind: int  # the place of their type among the types
    start: int
    stop: int


class RelationSlots(NamedTuple):
    """The slots of one relation in a padded block of a typed graph."""

    places: Tensor  # [D] its targets among the block's
    edges: Tensor  # [D * slots] its slots among the block's
    edge_index: Tensor  # [2, D * slots] their sources among the block's, their targets among its own
    ptr: Tensor  # [D + 1]


class SlotLayout(NamedTuple):
    """How a padded block of a typed graph is laid out; it does not depend on the draw and is the same for every batch.

    The type of a node and the relation of a slot follow from their place.
    """

    targets: tuple[Span, ...]
    sources: tuple[Span, ...]  # of all nodes, the targets first
    drawn: tuple[tuple[int, ...], ...]  # for each span of targets the relations of a target's rows, in their order
    rows: Tensor  # [2, M] the source of each slot and its row
    parts: tuple[RelationSlots, ...]  # one per relation of the graph


class Block(NamedTuple):
    """Messages of one layer: the model computes sum over edges of weight * scale * h[src] for each target.

    Edges are grouped by target: `ptr[i]:ptr[i + 1]` are target i's. A named tuple survives `Data.to()` and pinning.
    """

    n_id: Tensor  # [S] global node ids; the first num_dst are the targets
    num_dst: int
    edge_index: Tensor  # [2, M] local ids, sources and targets
    e_id: Tensor  # [M] the edge in the user's own order
    weight: Tensor  # [M] a: the graph's weight of the edge
    prob: Tensor  # [M] q with replacement, else the inclusion probability; 1 where nothing is random
    scale: Tensor  # [M] the factor that makes the estimate unbiased
    ptr: Tensor  # [num_dst + 1]
    pos: Tensor  # [M] the edge's place in the graph's CSR: the address of per-edge state
    slots: int = 0  # edges per row of a padded block (empty slots have weight 0, and nodes may repeat); else 0
    # in a graph with several relations, where a target has one row per relation, contiguous:
    row: Tensor | None = None  # [T] the graph's rows: addresses of per-row state; in padded blocks, -1: no such row
    row_ptr: Tensor | None = None  # [T + 1] row t's edges are row_ptr[t]:row_ptr[t + 1]
    relation: Tensor | None = None  # [T] the relation of each row
    target: Tensor | None = None  # [num_dst] global ids of the targets, where they are not the first of n_id
    # of a graph whose edges have features: a table per relation, with a row for each of its edges here, in their order
    attr: tuple[Tensor, ...] | None = None
    layout: SlotLayout | None = None  # of a padded block of a typed graph

    @property
    def src(self) -> Tensor:
        return self.edge_index[0]

    @property
    def dst(self) -> Tensor:
        return self.edge_index[1]

    @property
    def targets(self) -> Tensor:
        """[num_dst] global ids."""
        return self.n_id[: self.num_dst] if self.target is None else self.target

    @property
    def num_src(self) -> int:
        return self.n_id.numel()

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]

    def by_row(self) -> Block:
        """The same edges with every row, a relation and a target, as a target of its own."""
        assert self.row_ptr is not None and self.row is not None
        if self.layout is None:
            ends = torch.stack([self.src, segment_of(self.row_ptr, self.num_edges)])
        else:
            ends = self.layout.rows
        return self._replace(
            num_dst=self.row.numel(), edge_index=ends, ptr=self.row_ptr, row=None, row_ptr=None, relation=None,
            layout=None,
        )  # fmt: skip

    def edge_relation(self) -> Tensor:
        """[M] the relation of each edge; 0 in a graph of one relation, and in a block without edges."""
        if self.relation is None or self.row_ptr is None:
            return self.e_id.new_zeros(self.num_edges)
        return self.relation.repeat_interleave(self.row_ptr.diff(), output_size=self.num_edges)

    def is_self(self) -> Tensor:
        """[M] whether the edge is a self-loop."""
        return self.n_id[self.src] == self.targets[self.dst]

    def drawn(self) -> Tensor:
        """[M] whether the edge was drawn at random."""
        return self.prob < 1


def as_block(rows: Rows, found: Numbered, drawn: Drawn) -> Block:
    """The block of some rows, from the places that were drawn and their numbered edges."""
    ptr, pos, prob, scale = drawn
    block = Block(found.n_id, rows.targets.numel(), found.edge_index, found.e_id, found.weight, prob, scale, ptr, pos)
    if rows.ptr is None:
        return block
    return block._replace(ptr=ptr.index_select(0, rows.ptr), row=rows.row, row_ptr=ptr, relation=rows.relation)


def nothing(dst: Tensor) -> Block:
    """A block without edges, for a layer that is skipped."""
    none = torch.zeros(0, device=dst.device)
    ptr = torch.zeros(dst.numel() + 1, dtype=torch.long, device=dst.device)
    edges = ptr.new_zeros(2, 0)
    return Block(dst, dst.numel(), edges, edges[0], none, none, none, ptr, edges[0])


class Ungathered:
    """Rows of a table that are not gathered yet, so that a sum can read the table in place."""

    def __init__(self, table: Tensor, n_id: Tensor):
        self.table, self.n_id = table, n_id

    def gathered(self) -> Tensor:
        return self.table.index_select(0, self.n_id).float()

    def __getitem__(self, rows: slice) -> Ungathered:
        return Ungathered(self.table, self.n_id[rows])

    def to(self, *args: Any, **options: Any) -> Tensor:
        """The rows are gathered and moved, not the table."""
        return self.gathered().to(*args, **options)


expand = segment_of  # the target of every edge, from the pointer of each target's edges
