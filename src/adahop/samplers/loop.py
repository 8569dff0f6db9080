"""The loop: from the seeds down, layer by layer, rows -> expand -> number."""

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

LOOPS = 8  # self-loops of a row that have slots
SLOTS = 1 << 14  # below one seed of a typed graph: more would mostly be empty


class Draw(NamedTuple):
    """A draw that is described and not made yet: the numbering decides in which shape it is made."""

    k: Tensor  # one number for all rows, or one each
    how: str
    odds: Odds
    key: int | random.Stream
    size: int = -1  # k where it is one number
    slots: Callable[[int], Slots] | None = None  # of a policy that draws by itself, from the most self-loops of a row


class Fetched(NamedTuple):
    """Edges drawn elsewhere and looked up there; `pos` of `drawn` is what the sampler knows them by."""

    drawn: Drawn
    src: Tensor  # global ids
    e_id: Tensor
    weight: Tensor


def sample(sampler: Sampler, seeds: Seeds, numbering: Numbering | None = None) -> list[Block]:
    """Blocks for the seeds, input layer first. A layer of `skip` gets a block without edges, and nothing is drawn."""
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
            blocks.append(sampler.graph.described(block))
            dst = by.next(block)
            weigh = None if weigh is None else by.passed(block, weigh)
    finally:
        by.end(sampler)
    return blocks[::-1]


def drawn_from(sampler: Sampler, rows: Rows, found: Drawn | Draw | Fetched) -> Drawn:
    """What was drawn, made now where it was only described."""
    if isinstance(found, Fetched):
        return found.drawn
    if isinstance(found, Draw):
        drawn: Drawn = ops.draw(sampler.graph.edges, rows, found.k, found.how, found.odds, _now(found.key))
        return sampler.scaled(rows, drawn)
    return sampler.scaled(rows, found)


def _now(key: int | random.Stream) -> int:
    return key.now() if isinstance(key, random.Stream) else key


class Numbering:
    """How the nodes of a batch are numbered: the caller's choice, not the sampler's."""

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
        """The same where nothing was drawn."""
        return dst

    def passed(self, block: Block, weigh: Tensor) -> Tensor:
        """How much an error in each of the next targets counts for, see `Rows.weigh`."""
        return passed_down(block, weigh)

    def trees(self) -> Tensor:
        """Which seed each of the present targets was reached from; its time is theirs."""
        raise InputError("`disjoint` must be True where seeds have times, as a node may be reached at two, got False")

    def end(self, sampler: Sampler) -> None:
        """After the last layer."""


class Compact(Numbering):
    """Targets first, then each other node once, as it first appears."""

    def __init__(self) -> None:
        self.named: Tensor | None = None  # nodes whose numbers are kept in the scratch, for the next layer

    def number(self, sampler: Sampler, rows: Rows, found: Drawn | Draw | Fetched) -> Block:
        dst, edges = rows.targets, sampler.graph.edges
        if isinstance(found, Fetched):
            return fetched_block(rows, found, sampler._scratch)
        if not isinstance(found, Draw):
            drawn = sampler.scaled(rows, found)
            numbered = ops.number(dst, drawn, edges, rows.target, sampler._scratch, None)
            self.named = None
            return as_block(rows, edges.finished(rows, drawn, numbered), drawn)
        known = self.named is not None
        drawn, numbered = ops.hop(edges, rows, found.k, found.how, found.odds, _now(found.key), sampler._scratch, known)
        self.named = numbered.n_id
        return as_block(rows, edges.finished(rows, drawn, numbered), sampler.scaled(rows, drawn))

    def end(self, sampler: Sampler) -> None:
        if self.named is not None:
            ops.forget(self.named, sampler._scratch)


def fetched_block(rows: Rows, found: Fetched, scratch: Tensor) -> Block:
    n_id, src = ops.relabel(rows.targets, found.src, scratch)
    row = ops.segment_of(found.drawn.ptr, found.src.numel())
    edge_index = torch.stack([src, row if rows.target is None else rows.target[row]])
    return as_block(rows, ops.Numbered(n_id, edge_index, found.e_id, found.weight), found.drawn)


class Padded(Numbering):
    """As many slots for every target, sources not numbered anew: a shape that chance does not change, for a GPU.

    What is drawn is what the other blocks hold, slot by slot: self-loops first, then one slot per draw. Nodes repeat in
    `n_id`, and as a node's draws depend on the step and the node alone, its copies draw alike. Such a shape can be
    captured as a CUDA graph. With `bare`, blocks may leave the user's edge numbers out: training does not read them.
    """

    def __init__(self, loops: int, bare: bool = False):
        self.loops, self.bare = loops, bare
        self.layouts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @staticmethod
    def of(sampler: Sampler, bare: bool = False, seeds: Tensor | None = None) -> Padded | None:
        """For a sampler whose draws have a fixed size, on a device whose kernels are there; else None.

        In a typed graph, `seeds` are the nodes that batches are drawn for, which must be of one type.
        """
        found = Padded.fitted(sampler, bare, seeds) if ops.pads(sampler.graph.indptr) else None
        return None if isinstance(found, str) else found

    @staticmethod
    def fitted(sampler: Sampler, bare: bool = False, seeds: Tensor | None = None) -> Padded | str:
        """The same on any device; or why there is none."""
        g = sampler.graph
        if not sampler.fixed_size or g.num_edges == 0:
            return "its method has no fixed fan-out"
        many = g.first - g.indptr[:-1]
        loops = int(many.max())
        alike = loops == int(many.min()) or not sampler.rescales
        if not alike or loops > LOOPS:
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
        """(edge_index, ptr): a loop's source is its target's own row, a drawn slot's is a row of its own."""
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
    """The same for a typed graph: as many slots for every (target, relation), all rows of a hop drawn by one call.

    Targets have a row for every relation into their type, and empty slots hold a node of the relation's source type: so
    the types of a hop's nodes, and with them the relations of the next hop's rows, do not depend on chance.
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
    """One subgraph of all layers, each node expanded once, where it first appears: what PyG's models take.

    With `disjoint`, every seed has a tree of its own, and a node is known by its tree and its id. After the loop
    `n_id`, `tree` and the edges of each hop, topmost first, are in the numbers of the whole batch.
    """

    def __init__(self, disjoint: bool = False):
        super().__init__()
        self.disjoint = disjoint
        self.n_id = torch.zeros(0, dtype=torch.long)
        self.tree: Tensor | None = None
        self.start = 0  # the first of the present targets
        self.edges: list[Tensor] = []

    def by_type(self, types: Types, blocks: list[Block]) -> TypedBatch:
        """The drawn blocks of a typed graph as PyG has them: ids by type, edges by relation."""
        return types.batch(blocks, (self.n_id, self.edges, self.counts))

    def begin(self, sampler: Sampler, seeds: Tensor) -> Tensor:
        if self.disjoint and not sampler.per_node:
            raise InputError("`disjoint` must be False for a draw whose targets share their sources, got True")
        self.n_id, self.scratch, self.nodes = seeds, sampler._scratch, max(sampler.graph.num_nodes, 1)
        self.tree = torch.arange(seeds.numel(), device=seeds.device) if self.disjoint else None
        self.counts = [seeds.numel()]
        return seeds

    def number(self, sampler: Sampler, rows: Rows, found: Drawn | Draw | Fetched) -> Block:
        drawn = found if isinstance(found, Fetched) else drawn_from(sampler, rows, found)
        if isinstance(drawn, Fetched):
            block = fetched_block(rows, drawn, sampler._scratch)
        else:
            edges = sampler.graph.edges
            numbered = ops.number(rows.targets, drawn, edges, rows.target, sampler._scratch, None)
            block = as_block(rows, edges.finished(rows, drawn, numbered), drawn)
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
