"""Models of typed graphs: a layer is a sum over relations, each with a convolution of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from adahop import ops
from adahop.block import Block, SlotLayout, Span
from adahop.checks import InputError, count, of_kind, one_of
from adahop.features import (
    Drop,
    Features,
    Schema,
    TableValues,
    TypedFeatures,
    TypedRows,
    Values,
    gather,
    join_each,
    mapped,
    padded_to,
    shares,
)
from adahop.graph import Graph
from adahop.history import History
from adahop.messages import Messages, Part, TypedMessages
from adahop.models.base import GNN, Parts
from adahop.models.full_graph import in_chunks
from adahop.models.gat import GATConv
from adahop.models.gcn import GCNConv, SAGEConv
from adahop.ops import pointer
from adahop.seams import NodeBatch
from adahop.sum import (
    PLAIN,
    ControlVariate,
    Conv,
    ExactEmbeddings,
    ExactSum,
    Sum,
    Variate,
    dropout_part,
    edge_map,
    make_exact,
    make_variate,
)
from adahop.typed import Relation, by_relation


class Slice(NamedTuple):
    """The part of a block that belongs to one relation: all targets of its type, and its edges."""

    block: Block
    places: Tensor  # of its targets among the block's
    edges: Tensor  # places of its edges among the block's


def sliced(block: Block, schema: Schema) -> list[Slice]:
    """A block relation by relation. Sources keep their places, so that all slices read the same values."""
    if block.layout is not None:
        return [_slice(block, *part) for part in block.layout.parts]
    kind = schema.kind_of(block.targets)
    assert block.relation is not None or block.num_edges == 0, "drawn edges have rows, and rows have relations"
    order, starts = by_relation(block.edge_relation(), len(schema.relations))
    targets = {t: (kind == i).nonzero().flatten() for i, t in enumerate(schema.counts)}
    local = torch.zeros(block.num_dst, dtype=torch.long, device=kind.device)
    for places in targets.values():
        local[places] = torch.arange(places.numel(), device=kind.device)
    out: list[Slice] = []
    for (_, _, to), edges in zip(schema.relations, order.split(starts.diff().tolist()), strict=True):
        places = targets[to]
        src, dst = block.src[edges], local[block.dst[edges]]
        ptr = pointer(torch.bincount(dst, minlength=places.numel()))
        attr = block.attr and (block.attr[len(out)],)
        out.append(_slice(block, places, edges, torch.stack([src, dst]), ptr, attr))
    return out


def _slice(
    block: Block, places: Tensor, edges: Tensor, edge_index: Tensor, ptr: Tensor, attr: tuple[Tensor, ...] | None = None
) -> Slice:
    e_id, weight, prob, scale, pos = (
        t.index_select(0, edges) for t in (block.e_id, block.weight, block.prob, block.scale, block.pos)
    )
    part = Block(block.n_id, places.numel(), edge_index, e_id, weight, prob, scale, ptr, pos)
    slots, target = block.slots if edges.numel() else 0, block.targets.index_select(0, places)
    return Slice(part._replace(slots=slots, target=target, attr=attr), places, edges)


class TypedEncoder(nn.Module):
    """E_t x + e_t for nodes of type t; a type without features has an embedding per node."""

    def __init__(self, schema: Schema, hidden: int):
        super().__init__()
        self.schema, self.hidden = schema, hidden
        self.each = nn.ModuleList(
            nn.Linear(schema.widths[t], hidden) if schema.widths[t] else nn.Embedding(n, hidden)
            for t, n in schema.counts.items()
        )
        for part in self.each:
            if isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=hidden**-0.5)

    def of(self, kind: str) -> nn.Linear | nn.Embedding:
        """The map of a type with features, the embeddings of one without."""
        return cast(nn.Linear | nn.Embedding, self.each[list(self.schema.counts).index(kind)])

    def linear(self, kind: str) -> nn.Linear | None:
        """The map of a type with features; None for a type without."""
        part = self.of(kind)
        return part if isinstance(part, nn.Linear) else None

    def forward(self, rows: TypedRows, share: float = 0.0) -> Tensor:
        """h of every row; a share of the raw features and of the embeddings is dropped."""
        kind = self.schema.kind_of(rows.n_id)
        parts, order = [], []
        for i, (name, each) in enumerate(zip(self.schema.counts, self.each, strict=True)):
            places = (kind == i).nonzero().flatten()
            ids = rows.n_id[places] - self.schema.starts[name]
            x = rows.features.tables[name]
            if x is None:
                parts.append(ops.dropout(each(ids), share) if share else each(ids))
            else:
                parts.append(Values(x.index_select(0, ids), cast(nn.Linear, each), share).rows())
            order.append(places)
        done = torch.cat(parts)
        return torch.empty_like(done).index_put((torch.cat(order),), done)


def by_span(maps: nn.ModuleList, h: Tensor, spans: Iterable[Span]) -> Tensor:
    """Every row through the map of its type, where rows of a type are contiguous."""
    return torch.cat([maps[kind](h[start:stop]) for kind, start, stop in spans])


def per_type(h: Tensor, kinds: Tensor, *maps: nn.ModuleList) -> tuple[Tensor, ...]:
    """Every row through the map of its type, by each of these sets of maps."""
    places = [(kinds == i).nonzero().flatten() for i in range(len(maps[0]))]
    order, parts = torch.cat(places), [h.index_select(0, p) for p in places]
    done = [torch.cat([each(part) for each, part in zip(of, parts, strict=True)]) for of in maps]
    return tuple(torch.empty_like(out).index_copy(0, order, out) for out in done)


class RowSums(NamedTuple):
    """Sums of a_ij h_j, or of raw features, for all rows of a padded block, the rows of a target contiguous.

    Where all relations have the same width, sum_r W_r s_r of a target is then one product, with [W_1 W_2 ...].
    """

    drawn: Sequence[Sequence[int]]  # for each span of targets the relations of a target's rows, in their order
    sums: Tensor  # [T, width]
    maps: Callable[[Sequence[Tensor], Sequence[int]], tuple[Tensor, Tensor | None]]  # see `Values.joined_each`
    messages: Callable[[], TypedMessages]
    weights: Callable[[], Tensor]  # [T] the sums of the coefficients

    def product(self, convs: Sequence[Conv], rest: Sequence[Tensor]) -> list[Tensor]:
        """rest + sum over the drawn relations of W_r times its sums, for each span of targets."""
        every = [r for drawn in self.drawn for r in drawn]
        if not every:
            return list(rest)
        w, b = self.maps([convs[r].kernel() for r in every], every)
        w, weights, out = ops.widened(w, self.sums), None if b is None else self.weights(), []
        first = row = 0
        for drawn, total in zip(self.drawn, rest, strict=True):
            these, rows = slice(first, first + len(drawn)), slice(row, row + len(total) * len(drawn))
            if drawn and b is not None and weights is not None:
                total = torch.addmm(total, weights[rows].view(-1, len(drawn)), b[these])
            if drawn:
                total = mapped(self.sums[rows].view(len(total), -1), w[these].transpose(0, 1).flatten(1), total)
            out.append(total)
            first, row = these.stop, rows.stop
        return out


class RelationalConv(Conv):
    """own_t(h_i) + sum over relations r of conv_r(neighbours of i by r).

    With `bases` (gcn), W_r = sum_b c_rb V_b: relations share V where they are many.
    """

    def __init__(self, schema: Schema, own: nn.ModuleList, convs: Sequence[Conv]):
        super().__init__()
        self.schema, self.own, self.convs = schema, own, nn.ModuleList(convs)

    def each(self) -> list[Conv]:
        return [cast(Conv, conv) for conv in self.convs]

    def forward(self, h: Tensor | Values, own: Tensor | None, block: Block, estimator: Sum = PLAIN) -> Tensor:
        values = h if isinstance(h, Values) else Values(h)
        assert own is not None
        if block.layout is None:
            (out,) = per_type(own, self.schema.kind_of(block.targets), self.own)
        else:
            sums = self.row_sums(values, block, estimator)
            if sums is not None:
                return self.from_row_sums(own, block.layout, sums)
            out = by_span(self.own, own, block.layout.targets)
        parts: list[Part] = []
        for r, (conv, part) in enumerate(zip(self.each(), sliced(block, self.schema), strict=True)):
            if part.places.numel() == 0:
                continue
            view = values.of_relation(r, self.schema.relations[r][0])
            told = [_append_to(parts, r, part.edges)] if self.listeners else []
            with conv.only(*told):
                new = conv(view, own[part.places], part.block, estimator.for_relation(r))
            out = out.index_add(0, part.places, new)
        self.notify(lambda: TypedMessages(block, parts))
        return out

    def row_sums(self, values: Values, block: Block, estimator: Sum) -> RowSums | None:
        """The sums of all rows of a padded block where one product can follow them; else None."""
        if not all(conv.is_linear and conv.edge is None for conv in self.each()):
            return None
        if estimator is PLAIN:
            return self.plain_rows(values, block)
        return cast(Relations, estimator).row_sums(self, values, block)

    def plain_rows(self, values: Values, block: Block) -> RowSums:
        """The plain sums of all rows of a padded block, and their messages."""
        rows, coef = block.by_row(), block.weight * block.scale
        assert block.layout is not None
        if self.listeners:
            values.rows()  # messages are measured from h
        return RowSums(
            block.layout.drawn,
            values.summed(rows, coef),
            lambda kernels, drawn: values.joined_each(kernels, [self.schema.relations[r][0] for r in drawn]),
            lambda: TypedMessages(block, self.messages(values, coef, block)),
            lambda: shares(rows, coef),
        )

    def from_row_sums(self, own: Tensor, layout: SlotLayout, sums: RowSums) -> Tensor:
        """The layer's output from the sums of all rows: one product for all relations into a type."""
        out = sums.product(self.each(), [self.without_sums(kind, own[a:b]) for kind, a, b in layout.targets])
        self.notify(sums.messages)
        return torch.cat(out)

    def without_sums(self, kind: int, own: Tensor) -> Tensor:
        """The part of a type's outputs that reads no neighbours: the type's own map, and the rest of each relation."""
        first = cast(nn.Linear, self.own[kind])
        rest: Tensor = first.bias
        for r in self.schema.into(kind):
            added = self.each()[r].rest(own)
            rest = rest if added is None else rest + added
        return mapped(own, first.weight, rest)

    def messages(self, values: Values, coef: Tensor, block: Block) -> list[Part]:
        """The messages of a plain sum, relation by relation."""
        out: list[Part] = []
        for r, (conv, part) in enumerate(zip(self.each(), sliced(block, self.schema), strict=True)):
            if part.edges.numel():
                kernel = conv.kernel() if conv.narrows() else None
                view = values.of_relation(r, self.schema.relations[r][0])
                sent = Messages(part.block, coef.index_select(0, part.edges), view, kernel)
                out.append(Part(r, part.edges, sent))
        return out


def _append_to(parts: list[Part], relation: int, edges: Tensor) -> Callable[[Messages], None]:
    return lambda messages: parts.append(Part(relation, edges, messages))


class BasisConv(GCNConv):
    """A convolution whose W is a mixture of bases that all relations of the layer share."""

    def __init__(self, bases: nn.Parameter, outputs: int, edges: int = 0):
        Conv.__init__(self)
        self.bases, self.edge = bases, edge_map(edges, outputs)
        self.mix = nn.Parameter(torch.empty(len(bases)).uniform_(-1, 1).mul_((3 / len(bases)) ** 0.5))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def kernel(self) -> Tensor:
        return torch.einsum("b,boi->oi", self.mix, self.bases)

    def rest(self, own: Tensor | None) -> Tensor:
        return self.bias


class BlockConv(GCNConv):
    """A convolution whose W is block-diagonal: each part of h is mapped on its own, for 1 / blocks of the numbers."""

    def __init__(self, inputs: int, outputs: int, blocks: int, edges: int = 0):
        Conv.__init__(self)
        if inputs % blocks or outputs % blocks:
            raise InputError(f"`blocks` must divide the widths of every layer, {inputs} and {outputs}, got {blocks}")
        self.blocks = nn.Parameter(torch.empty(blocks, outputs // blocks, inputs // blocks))
        nn.init.kaiming_uniform_(self.blocks.view(-1, inputs // blocks), a=5**0.5)
        self.bias, self.edge = nn.Parameter(torch.zeros(outputs)), edge_map(edges, outputs)

    def kernel(self) -> Tensor:
        return torch.block_diag(*self.blocks)

    def rest(self, own: Tensor | None) -> Tensor:
        return self.bias


class EncodedRows:
    """h of nodes of several types, encoded once: what typed values and their views by relation share.

    `make` gives the first n rows (None: all, of which there are `total`).
    """

    def __init__(self, make: Callable[[int | None], Tensor], total: int | None = None):
        self.make, self.total = make, total
        self.h: Tensor | None = None

    def __call__(self, n: int | None = None) -> Tensor:
        if self.h is None and n is not None and n != self.total:
            return self.make(n)
        if self.h is None:
            self.h = self.make(None)
        return self.h[:n]


class TypedValues(Values):
    """Values of nodes of several types for the first layer: encoded only where h itself is read."""

    def __init__(self, rows: TypedRows, encode: TypedEncoder, share: float = 0.0):
        self.encode = encode
        self.h = EncodedRows(lambda n: encode(rows if n is None else rows[:n], share))
        super().__init__(torch.zeros(rows.n_id.numel(), 0, device=rows.n_id.device), share=share)

    def _for_source(self, source: str) -> Values:
        return _OneType(self, self.encode.linear(source))

    def raw(self, n: int | None = None) -> Tensor:
        return self.h(n)


class _OneType(Values):
    """The values of all nodes, with the encoder of one type, which an exact sum applies to its sums of raw features."""

    def __init__(self, values: TypedValues, linear: nn.Linear | None):
        super().__init__(values.x, linear, values.share)
        self.h, self.hidden = values.h, values.encode.hidden

    def rows(self, n: int | None = None) -> Tensor:
        return self.h(n)

    def _has_rows(self) -> bool:
        return True

    def _width(self) -> int:
        return self.hidden

    def summed(self, block: Block, coef: Tensor) -> Tensor:
        return gather(self.rows(), block, coef)


class TypedTableValues(TableValues):
    """The same over one table of all types' features: raw features are summed in place, and the encoder is joined with
    the map of each relation, unless h itself is read."""

    def __init__(self, table: Features, block: Block, encode: TypedEncoder, share: float = 0.0):
        super().__init__(table, block.n_id, share=share)
        assert block.layout is not None
        self.encode = encode
        self.h = EncodedRows(_read_from(table, block.n_id, self.drop, block.layout.sources, encode), len(block.n_id))

    def _for_source(self, source: str) -> Values:
        return _OneTypeOfTable(self, self.encode.linear(source))

    def raw(self, n: int | None = None) -> Tensor:
        return self.rows(n)

    def rows(self, n: int | None = None) -> Tensor:
        return self.h(n)

    def _has_rows(self) -> bool:
        return self.h.h is not None

    def joined_each(self, kernels: Sequence[Tensor], sources: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        if self._has_rows():
            return super().joined_each(kernels, sources)
        return join_each(kernels, [cast(nn.Linear, self.encode.linear(kind)) for kind in sources], self._width())


class _OneTypeOfTable(TableValues):
    """The values of all nodes, with the encoder of one type."""

    def __init__(self, values: TypedTableValues, linear: nn.Linear | None):
        super().__init__(values.table, values.n_id, linear)
        self.h, self.share, self.drop = values.h, values.share, values.drop

    def rows(self, n: int | None = None) -> Tensor:
        return self.h(n)

    def _has_rows(self) -> bool:
        return self.h.h is not None

    def joined(self, kernel: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        w, bias = super().joined(kernel)
        return (w if w is None or self._has_rows() else padded_to(self._width(), w)), bias

    @torch.no_grad()
    def energies(self, block: Block, coef: Tensor, kernel: Tensor | None = None) -> Tensor:
        return Values(self.rows()).energies(block, coef, kernel)


def _read_from(
    table: Features, n_id: Tensor, drop: Drop, spans: Sequence[Span], encode: TypedEncoder
) -> Callable[[int | None], Tensor]:
    """How h of the first nodes is made from a table of all types' features, wider than those of some."""

    def read(n: int | None) -> Tensor:
        n, width = n_id.numel() if n is None else n, table.value.shape[1]
        x, out = table.rows(n_id[:n], drop), []
        for kind, start, stop in spans:
            if start < n:
                encoder = cast(nn.Linear, encode.each[kind])
                out.append(mapped(x[start : min(stop, n)], padded_to(width, encoder.weight), encoder.bias))
        return torch.cat(out)

    return read


class Relations(Sum):
    """A sum for each relation of a layer; control variates share their `noise`."""

    noise: Tensor

    def __init__(self, parts: Sequence[Sum], noise: float, device: torch.device):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.draws, self.fixed_shape = any(p.draws for p in parts), all(p.fixed_shape for p in parts)
        self.separates_dropout = any(p.separates_dropout for p in parts)
        self.register_buffer("noise", torch.tensor(noise, device=device), persistent=False)

    @property
    def dial(self) -> Tensor | None:
        return self.noise if self.separates_dropout else None

    def for_relation(self, relation: int) -> Sum:
        part = cast(Sum, self.parts[relation])
        if isinstance(part, Variate):
            part.noise = self.noise
        return part

    def row_sums(self, conv: RelationalConv, values: Values, block: Block) -> RowSums | None:
        """The sums of all rows of a padded block, where they can be formed together; None: relation by relation."""
        return None

    def refresh(self, h: Tensor, conv: RelationalConv, snapshots_only: bool) -> None:  # type: ignore[override]
        for part, each in zip(self.parts, conv.each(), strict=True):
            cast(Sum, part).refresh(h, each, snapshots_only)

    def _stored(self) -> dict[str, Tensor]:
        return {**super()._stored(), "noise": self.noise}


class RelationsExact(Relations):
    """The first layer's sums over all neighbours, of fixed weights and raw features, for each relation."""

    def row_sums(self, conv: RelationalConv, values: Values, block: Block) -> RowSums | None:
        parts, schema, layout = [cast(ExactSum, p) for p in self.parts], conv.schema, block.layout
        assert layout is not None
        if any(p.lazy is not None for p in parts):  # on the CPU rows are formed on demand
            return None
        some = [[r for r in schema.into(kind) if parts[r].graph.num_edges] for kind, _, _ in layout.targets]
        known, weights = [], []
        for span, relations in zip(layout.targets, some, strict=True):
            nodes = block.targets[span.start : span.stop] - schema.first(span.kind)
            for r in relations:
                known.append(parts[r].sums_at(nodes, values.share))
                weights.append(parts[r].weights.index_select(0, nodes))
        if not known:  # no edge leads to these types
            return None
        wide = max(x.shape[1] for x in known)
        known = [padded_to(wide, x) for x in known]

        def maps(kernels: Sequence[Tensor], drawn: Sequence[int]) -> tuple[Tensor, Tensor]:
            of = [values.of_relation(r, schema.relations[r][0]).encoder for r in drawn]
            return join_each(kernels, [encoder for encoder in of if encoder is not None], wide)

        sums, shared = (_side_by_side(each, some) for each in (known, weights))
        return RowSums(some, sums, maps, lambda: TypedMessages(block, []), lambda: shared.squeeze(1))


class RelationsSnapshot(Relations):
    """Control variates from one snapshot H for all relations, each with its own sums of it."""

    def row_sums(self, conv: RelationalConv, values: Values, block: Block) -> RowSums | None:
        parts, schema, layout = [cast(ControlVariate, p) for p in self.parts], conv.schema, block.layout
        assert layout is not None
        if any(p.missing is not None for p in parts):
            return None
        mean = values if values.mean is None else values.mean
        rows, coef, trust = block.by_row(), block.weight * block.scale, 1.0 - self.noise
        known = []
        for span, relations in zip(layout.targets, layout.drawn, strict=True):
            nodes = block.targets[span.start : span.stop] - schema.first(span.kind)
            known += [cast(History, parts[r].sums).value.index_select(0, nodes) for r in relations]
        if not known:
            return None

        def estimated() -> tuple[Tensor, Values]:
            change, square = parts[0].history.change(block.n_id, mean.rows(), trust)
            base = _side_by_side(known, layout.drawn)
            return gather(change, rows, coef, (base, None, trust)), Values(change, square=square)

        sums, changed = mean.once("row estimates", estimated)  # once, see `Variate.total`
        if mean is not values:
            sums = sums + dropout_part(values, rows, coef)

        def messages() -> TypedMessages:
            found = [(r, part) for r, part in enumerate(sliced(block, schema)) if part.edges.numel()]
            sent = [(r, p, coef.index_select(0, p.edges)) for r, p in found]
            return TypedMessages(block, [Part(r, p.edges, Messages(p.block, c, changed)) for r, p, c in sent])

        return RowSums(
            layout.drawn, sums, lambda kernels, _: (torch.stack(list(kernels)), None), messages, lambda: coef
        )


def _side_by_side(each: Sequence[Tensor], drawn: Sequence[Sequence[int]]) -> Tensor:
    """From rows grouped by relation to rows grouped by target, span by span."""
    left, out = list(each), []
    for relations in drawn:
        if relations:
            here, left = left[: len(relations)], left[len(relations) :]
            out.append(torch.stack(here, 1).flatten(0, 1))
    return torch.cat(out)


class TypedGNN(GNN):
    """What models of typed graphs share: an encoder per node type, and layers over all relations.

    `inputs` is a `Schema`: the types with their numbers of nodes and features, and the relations; `edges` is the number
    of edge features of each relation, or one number for all, 0 by default.
    """

    graph = ("row", False)
    typed = True

    def __init__(self, inputs: Schema, hidden: int, outputs: int, edges: int | Sequence[int] = 0, **options: Any):
        self.schema = of_kind(inputs, Schema, "inputs")
        many = len(self.schema.relations)
        self.edge_widths = [count(e, 0, "edges") for e in edges] if isinstance(edges, Sequence) else [edges] * many
        if len(self.edge_widths) != many:
            raise InputError(f"`edges` must have a number per relation, {many} in all, got {len(self.edge_widths)}")
        super().__init__(count(hidden, 1, "hidden"), hidden, outputs, **options)
        self.encoder = None
        self.encode = TypedEncoder(self.schema, hidden)

    @classmethod
    def smallest(cls) -> Schema:
        return Schema({"node": 1}, {"node": 1}, (("node", "to", "node"),))

    def read(self, batch: NodeBatch, share: float) -> Values:
        table = getattr(batch, "features", None)
        if table is not None:
            return TypedTableValues(table, batch.blocks[0], self.encode, share)
        return TypedValues(batch.x, self.encode, share)

    def renew(self, table: Features) -> None:
        """Nothing to renew: messages are measured from h."""

    def learn_by_rows(self) -> None:
        for part in self.encode.each:
            if isinstance(part, nn.Embedding):
                part.sparse = True

    def views(self, graph: Graph) -> list[Graph]:
        return [graph.of_relation(r) for r in range(len(self.schema.relations))]

    def exact(self, views: list[Graph], x: TypedFeatures) -> Sum:  # type: ignore[override]
        """Sums over all neighbours of each relation, from the features or the embeddings of its source type."""
        parts: list[Sum] = []
        for view, conv, (source, _, target) in self._relations(views):
            own = view.replace(indices=view.indices - self.schema.starts[source])
            table, encode = x.tables[source], self.encode.of(source)
            if isinstance(encode, nn.Embedding):
                parts.append(ExactEmbeddings(own, encode))
            else:
                assert table is not None
                parts.append(make_exact(conv, own, table, self.storage, self.dropout > 0))
            parts[-1].row_offset = self.schema.starts[target]
        form = RelationsExact if all(isinstance(p, ExactSum) for p in parts) else Relations
        return form(parts, 0.0, views[0].device)

    def variate(self, views: list[Graph], width: int, kind: str, noise: float, dtype: torch.dtype) -> Sum:
        """A control variate per relation; all snapshots share one H."""
        parts: list[Variate] = []
        for view, conv, (_, _, target) in self._relations(views):
            made = make_variate(conv, view, width, kind, dtype, noise, self.storage, sum(self.schema.counts.values()))
            made.row_offset = self.schema.starts[target]
            if kind == "snapshot" and parts:
                made.history = parts[0].history
            parts.append(made)
        form = RelationsSnapshot if all(p.sums is not None for p in parts) else Relations
        return form(parts, noise, views[0].device)

    def _relations(self, views: list[Graph]) -> Iterable[tuple[Graph, Conv, Relation]]:
        first = cast(RelationalConv, self.convs[0])
        return zip(views, first.each(), self.schema.relations, strict=True)

    def check(  # type: ignore[override]
        self, graph: Graph, x: TypedFeatures, edges: int = 0, parts: Parts | None = None
    ) -> None:
        """Refuse what is not a typed graph with features by its types."""
        if parts is not None:
            raise InputError("a typed graph must be on one process, got several")
        count(edges, 0, "edges")
        of_kind(x, TypedFeatures, "x")
        if of_kind(graph, Graph, "graph").types is None or len(x) != graph.num_nodes:
            raise InputError(f"`graph` must have the {len(x)} nodes of `x`, by type, got {graph}")

    def encoded(self, x: TypedFeatures, low: int, high: int) -> Tensor:  # type: ignore[override]
        nodes = torch.arange(low, high, device=next(self.parameters()).device)
        return in_chunks(nodes, lambda ids: self.encode(x.index_select(0, ids)), self.storage)


class RGCN(TypedGNN):
    """Relational GCN (Schlichtkrull et al. 2018): own_t(h_i) + sum_r W_r mean of i's neighbours by r.

    conv="gcn" (default) or "sage", which also maps the target's own h per relation; with attention it is model rgat.
    For many relations: `bases` > 0, W_r = sum_b c_rb V_b; or `blocks` > 0, W_r block-diagonal.
    """

    def __init__(
        self,
        inputs: Schema,
        hidden: int,
        outputs: int,
        conv: str = "gcn",
        bases: int = 0,
        blocks: int = 0,
        **options: Any,
    ):
        if conv == "gat":
            raise InputError("`conv` must be gcn or sage, as attention within relations is model rgat, got gat")
        self.kind = one_of(conv, ("gcn", "sage"), "conv")
        self.bases, self.blocks = count(bases, 0, "bases"), count(blocks, 0, "blocks")
        if bases and blocks:
            raise InputError(f"`blocks` must be 0 with `bases`, got {blocks} and {bases}")
        if (bases or blocks) and conv != "gcn":
            raise InputError(f"`conv` must be gcn with `{'bases' if bases else 'blocks'}`, got {conv}")
        super().__init__(inputs, hidden, outputs, **options)

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        if self.bases:
            bases = nn.Parameter(torch.empty(self.bases, outputs, inputs))
            nn.init.kaiming_uniform_(bases.view(-1, inputs), a=5**0.5)
            convs: list[Conv] = [BasisConv(bases, outputs, edges) for edges in self.edge_widths]
        elif self.blocks:
            convs = [BlockConv(inputs, outputs, self.blocks, edges) for edges in self.edge_widths]
        else:
            kind = GCNConv if self.kind == "gcn" else SAGEConv
            convs = [kind(inputs, outputs, edges) for edges in self.edge_widths]
        return RelationalConv(self.schema, own_maps(self.schema, inputs, outputs), convs)


class RGAT(TypedGNN):
    """own_t(h_i) + sum_r of graph attention over i's neighbours by r, four heads by default."""

    activation = "elu"
    weights = "relations"
    estimators = ("plain", "history", "snapshot", "exact", "exact+history", "exact+snapshot")

    def __init__(
        self,
        inputs: Schema,
        hidden: int,
        outputs: int,
        heads: int = 4,
        attention: str = "self-normalised",
        **options: Any,
    ):
        super().__init__(inputs, hidden, outputs, heads=count(heads, 1, "heads"), form=attention, **options)

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        convs = [GATConv(inputs, outputs, mean=last, edges=edges, **options) for edges in self.edge_widths]
        return RelationalConv(self.schema, own_maps(self.schema, inputs, outputs), convs)


def own_maps(schema: Schema, inputs: int, outputs: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(inputs, outputs) for _ in schema.counts)
