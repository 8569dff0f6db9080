"""The sampling loop: from the seeds down, layer by layer, rows -> expand -> number."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block, Seeds, Span, as_block, nothing
from adahop.checks import InputError
from adahop.ops import Drawn, Odds, Rows, Slots, random
from adahop.samplers.budget import passed_down
from adahop.samplers.slots import TypedHops
from adahop.typed import TypedBatch, Types

if TYPE_CHECKING:
    from adahop.samplers.base import Sampler

LOOPS = 8  # the most self-loops of a row that padded blocks have slots for
SLOTS = 1 << 14  # the most slots below one seed of a typed graph: of more, most would be empty


class Draw(NamedTuple):
    """The arguments of a draw that is not made yet: the numbering decides in which shape it is made."""

    k: Tensor  # one number for all rows, or one each
    how: str
    odds: Odds
    key: int | random.Stream
    size: int = -1  # k where it is one number
    slots: Callable[[int], Slots] | None = None  # the draw of a policy with `own_draw`, given the self-loops per row


class Fetched(NamedTuple):
    """Edges that another rank drew and looked up; `pos` of `drawn` is their place among its answers."""

    drawn: Drawn
    src: Tensor  # global ids
    e_id: Tensor
    weight: Tensor


def sample(sampler: Sampler, seeds: Seeds, numbering: Numbering | None = None) -> list[Block]:
    """Blocks for the seeds, input layer first. Layers in `sampler.skip` are not drawn: their blocks have no edges."""
    by = Compact() if numbering is None else numbering
    dst, blocks = by.begin(sampler, seeds.n_id), []
    weigh = torch.ones(dst.numel(), device=dst.device) if sampler.budget else None
    try:
        for layer in reversed(range(len(sampler.sizes))):
            if layer in sampler.skip:
                blocks.append(by.empty(dst))
                dst = by.skipped(dst)
                continue
            until = None if seeds.time is None else seeds.time[by.trees()]
            rows = by.rows(sampler, layer, dst, until)._replace(weigh=weigh)
            block = by.number(sampler, rows, sampler.expand(layer, rows, by.key(sampler, layer)))
            blocks.append(sampler.graph.with_edge_features(block))
            dst = by.next(block)
            weigh = None if weigh is None else by.passed(block, weigh)
    finally:
        by.end(sampler)
    return blocks[::-1]


def drawn_from(sampler: Sampler, rows: Rows, found: Drawn | Draw | Fetched) -> Drawn:
    """What was drawn; a `Draw` is made now."""
    if isinstance(found, Fetched):
        return found.drawn
    if isinstance(found, Draw):
        drawn: Drawn = ops.draw(sampler.graph.edges, rows, found.k, found.how, found.odds, _now(found.key))
        return sampler.scaled(rows, drawn)
    return sampler.scaled(rows, found)


def numbered_block(sampler: Sampler, rows: Rows, drawn: Drawn) -> Block:
    """The block of drawn places: targets first, then their sources in order of appearance."""
    edges = sampler.graph.edges
    numbered = ops.number(rows.targets, drawn, edges, rows.target, sampler._scratch, None)
    return as_block(rows, edges.finished(rows, drawn, numbered), drawn)


def _now(key: int | random.Stream) -> int:
    return key.now() if isinstance(key, random.Stream) else key


class Numbering:
    """How the nodes of a batch are numbered; the caller of `sample` chooses."""

    def begin(self, sampler: Sampler, seeds: Tensor) -> Tensor:
        """The targets of the topmost layer."""
        return seeds

    def key(self, sampler: Sampler, layer: int) -> int | random.Stream:
        return sampler.key(layer)

    def rows(self, sampler: Sampler, layer: int, dst: Tensor, until: Tensor | None) -> Rows:
        """What a layer draws from for these targets."""
        return sampler.rows(layer, dst, until)

    def number(self, sampler: Sampler, rows: Rows, found: Drawn | Draw | Fetched) -> Block:
        raise NotImplementedError

    def empty(self, dst: Tensor) -> Block:
        """The block of a layer for which nothing is drawn."""
        return nothing(dst)

    def next(self, block: Block) -> Tensor:
        """The targets of the layer below."""
        return block.n_id

    def skipped(self, dst: Tensor) -> Tensor:
        """The targets of the layer below one that was not drawn."""
        return dst

    def passed(self, block: Block, weigh: Tensor) -> Tensor:
        """The weight of an error in each of the next targets, see `Rows.weigh`."""
        return passed_down(block, weigh)

    def trees(self) -> Tensor:
        """The seed from which each of the present targets was reached; its time applies to them."""
        raise InputError("`disjoint` must be True where seeds have times, as a node may be reached at two, got False")

    def end(self, sampler: Sampler) -> None:
        """After the last layer."""


class Compact(Numbering):
    """Targets first, then each other node once, in order of appearance."""

    def __init__(self) -> None:
        self.numbered: Tensor | None = None  # nodes whose numbers are still in the scratch, for the next layer

    def number(self, sampler: Sampler, rows: Rows, found: Drawn | Draw | Fetched) -> Block:
        if isinstance(found, Fetched):
            return fetched_block(rows, found, sampler._scratch)
        if not isinstance(found, Draw):
            self.numbered = None
            return numbered_block(sampler, rows, sampler.scaled(rows, found))
        edges, known = sampler.graph.edges, self.numbered is not None
        drawn, numbered = ops.hop(edges, rows, found.k, found.how, found.odds, _now(found.key), sampler._scratch, known)
        self.numbered = numbered.n_id
        return as_block(rows, edges.finished(rows, drawn, numbered), sampler.scaled(rows, drawn))

    def end(self, sampler: Sampler) -> None:
        if self.numbered is not None:
            ops.forget(self.numbered, sampler._scratch)


def fetched_block(rows: Rows, found: Fetched, scratch: Tensor) -> Block:
    n_id, src = ops.relabel(rows.targets, found.src, scratch)
    row = ops.segment_of(found.drawn.ptr, found.src.numel())
    edge_index = torch.stack([src, row if rows.target is None else rows.target[row]])
    return as_block(rows, ops.Numbered(n_id, edge_index, found.e_id, found.weight), found.drawn)


class Padded(Numbering):
    """The same number of slots for every target, so that the shape does not depend on the draw: for CUDA graphs.

    Slots hold the same edges as other blocks, self-loops first, then one slot per draw. Sources are not numbered: a
    node may occur several times in `n_id`, and its copies draw the same edges, since draws depend on the step and the
    node alone. With `bare`, blocks may leave out the user's edge ids, which training does not read.
    """

    def __init__(self, loops: int, bare: bool = False):
        self.loops, self.bare = loops, bare
        self.layouts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @staticmethod
    def of(sampler: Sampler, bare: bool = False, seeds: Tensor | None = None) -> Padded | None:
        """For a sampler whose draws have a fixed size, on a device that has kernels for them; else None.

        In a typed graph, `seeds` are the nodes that batches are drawn for, which must be of one type.
        """
        found = Padded.fitted(sampler, bare, seeds) if ops.pads(sampler.graph.indptr) else None
        return None if isinstance(found, str) else found

    @staticmethod
    def fitted(sampler: Sampler, bare: bool = False, seeds: Tensor | None = None) -> Padded | str:
        """The same on any device; a string says why there is none."""
        g = sampler.graph
        if not sampler.fixed_size or g.num_edges == 0:
            return "its method has no fixed fan-out"
        many = g.first - g.indptr[:-1]
        loops = int(many.max())
        uniform = loops == int(many.min()) or not sampler.rescales
        if not uniform or loops > LOOPS:
            return "its nodes have different numbers of self-loops"
        if g.types is None:
            return Padded(loops, bare)
        if sampler.rescales or g.attr is not None:
            return "its relations have features of edges, or its policy scales by them"
        kinds = g.types.type_of(g.ids([]) if seeds is None else seeds).unique()
        if kinds.numel() != 1:
            return "its seeds have several node types"
        hops, kind = TypedHops(g, loops), int(kinds)
        if hops.slots(kind, sampler.sizes, sampler.skip) > SLOTS:
            return "its relations and sizes make too many slots below a seed"
        return TypedPadded(hops, kind, bare)

    def key(self, sampler: Sampler, layer: int) -> random.Stream:
        return sampler.stream(layer)

    def number(self, sampler: Sampler, rows: Rows, found: Drawn | Draw | Fetched) -> Block:
        assert isinstance(found, Draw), "a draw that is already made has no fixed shape"
        g, k = sampler.graph, found.size
        if found.slots is not None:
            f = found.slots(self.loops)
        else:
            f = ops.padded(g.edges, rows, rows.nodes, k, self.loops, found.how, found.odds, found.key)
        edge_index, ptr = self.layout(rows.row, k)
        drawn = Drawn(ptr, f.pos, f.prob, f.scale)
        scale = sampler.scaled(rows, drawn).scale
        if scale is not f.scale:
            scale = scale * (f.scale > 0)
        e_id = f.pos if g.eid is None or (self.bare and g.attr is None) else g.eid[f.pos]
        return Block(f.n_id, f.rows, edge_index, e_id, f.weight, f.prob, scale, ptr, f.pos, self.loops + k)

    def layout(self, dst: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(edge_index, ptr): the source of a self-loop is the target's own place, that of a drawn slot a new one."""
        rows = dst.numel()
        if (rows, k) not in self.layouts:
            row = torch.arange(rows, device=dst.device)
            drawn = rows + torch.arange(rows * k, device=dst.device).view(rows, k)
            src = torch.cat([row[:, None].expand(rows, self.loops), drawn], 1)
            slots = self.loops + k
            edge_index = torch.stack([src.flatten(), row.repeat_interleave(slots)])
            self.layouts[rows, k] = edge_index, torch.arange(rows + 1, device=dst.device) * slots
        return self.layouts[rows, k]


class TypedPadded(Padded):
    """The same for a typed graph: equal numbers of slots for every (target, relation), a hop's rows drawn in one call.

    Targets have a row for every relation into their type, and empty slots hold a node of the relation's source type. So
    the types of a hop's nodes, and with them the relations of the next hop's rows, do not depend on the draw.
    """

    def __init__(self, hops: TypedHops, kind: int, bare: bool = False):
        super().__init__(hops.loops, bare)
        self.hops, self.kind = hops, kind
        self.spans: tuple[Span, ...] = ()  # of the present targets

    def begin(self, sampler: Sampler, seeds: Tensor) -> Tensor:
        self.spans = (Span(self.kind, 0, seeds.numel()),)
        return seeds

    def rows(self, sampler: Sampler, layer: int, dst: Tensor, until: Tensor | None) -> Rows:
        hop = self.hops.hop(self.spans, sampler.sizes[layer])
        return Rows(self.hops.rows(self.spans, dst), dst, hop.target, relation=hop.relation, ptr=hop.ptr)

    def number(self, sampler: Sampler, rows: Rows, found: Drawn | Draw | Fetched) -> Block:
        assert isinstance(found, Draw), "a draw that is already made has no fixed shape"
        g, k, hop = sampler.graph, found.size, self.hops.hop(self.spans, found.size)
        f = ops.padded(g.edges, rows, hop.blank, k, self.loops, found.how, found.odds, found.key)
        n_id = torch.cat([rows.targets, f.n_id[f.rows :].index_select(0, hop.order)])
        e_id = f.pos if g.eid is None or self.bare else g.eid[f.pos].long()
        return Block(
            n_id, rows.targets.numel(), hop.edge_index, e_id, f.weight, f.prob, f.scale, hop.edge_ptr, f.pos,
            self.loops + k, row=rows.row, row_ptr=hop.row_ptr, relation=hop.relation, layout=hop.layout,
        )  # fmt: skip

    def empty(self, dst: Tensor) -> Block:
        return nothing(dst)._replace(layout=self.hops.hop(self.spans, 0).layout)

    def next(self, block: Block) -> Tensor:
        assert block.layout is not None
        self.spans = block.layout.sources
        return block.n_id


class Merged(Compact):
    """One subgraph of all layers, as PyG's models take it: each node is expanded once, where it first appears.

    With `disjoint`, every seed has its own tree, and a node is identified by (tree, id). After the loop, `n_id`, `tree`
    and the edges of each hop, that of the seeds first, use the numbers of the whole batch.
    """

    def __init__(self, disjoint: bool = False):
        super().__init__()
        self.disjoint = disjoint
        self.n_id = torch.zeros(0, dtype=torch.long)
        self.tree: Tensor | None = None
        self.start = 0  # the first of the present targets
        self.edges: list[Tensor] = []

    def by_type(self, types: Types, blocks: list[Block]) -> TypedBatch:
        """The drawn blocks of a typed graph as in PyG: ids by type, edges by relation."""
        return types.batch(blocks, (self.n_id, self.edges, self.counts))

    def begin(self, sampler: Sampler, seeds: Tensor) -> Tensor:
        if self.disjoint and not sampler.per_node:
            raise InputError("`disjoint` must be False for a draw whose targets share their sources, got True")
        self.n_id, self.scratch, self.nodes = seeds, sampler._scratch, max(sampler.graph.num_nodes, 1)
        self.tree = torch.arange(seeds.numel(), device=seeds.device) if self.disjoint else None
        self.counts = [seeds.numel()]
        return seeds

    def number(self, sampler: Sampler, rows: Rows, found: Drawn | Draw | Fetched) -> Block:
        if isinstance(found, Fetched):
            block = fetched_block(rows, found, sampler._scratch)
        else:
            block = numbered_block(sampler, rows, drawn_from(sampler, rows, found))
        known = self.n_id.numel()
        src = self._trees(block) if self.disjoint else self._once(block)
        self.edges.append(torch.stack([src, block.dst + self.start]))
        self.start = known
        self.counts.append(self.n_id.numel() - known)
        return block

    def _once(self, block: Block) -> Tensor:
        """The number of each edge's source; nodes not seen before are added at the end."""
        others = block.n_id[block.num_dst :]
        self.n_id, local = ops.relabel(self.n_id, others, self.scratch)
        own = self.start + torch.arange(block.num_dst, device=local.device)
        return torch.cat([own, local])[block.src]

    def _trees(self, block: Block) -> Tensor:
        assert self.tree is not None
        old = self.tree * self.nodes + self.n_id
        key = torch.cat([old, self.tree[self.start + block.dst] * self.nodes + block.n_id[block.src]])
        local, first = ops.in_order(key)
        names, known = key[first], old.numel()
        self.n_id, self.tree = names % self.nodes, names // self.nodes
        return local[known:]

    def trees(self) -> Tensor:
        return super().trees() if self.tree is None else self.tree[self.start :]

    def next(self, block: Block) -> Tensor:
        return self.n_id[self.start :]

    def skipped(self, dst: Tensor) -> Tensor:
        self.edges.append(dst.new_zeros(2, 0))
        self.start = self.n_id.numel()
        self.counts.append(0)
        return self.n_id[self.start :]

    def passed(self, block: Block, weigh: Tensor) -> Tensor:
        square = (block.weight * block.scale * weigh[block.dst]).square()
        return ops.segment_sum(square, self.edges[-1][0], self.n_id.numel())[self.start :].sqrt()
