"""HGT: attention over the neighbours of a target by all relations together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from adahop import ops
from adahop.block import Block
from adahop.checks import InputError, count
from adahop.features import Schema, TypedFeatures, Values, gather
from adahop.graph import Graph, OnGraph
from adahop.messages import Part, TypedMessages, by_edge
from adahop.models.base import State
from adahop.models.typed import TypedEncoder, TypedGNN, own_maps, per_type, sliced
from adahop.sum import (
    PLAIN,
    Conv,
    Estimate,
    Sum,
    Variate,
    checked_features,
    corrected,
    edge_map,
    relabelled,
    sqrt_scaled,
    zero_messages,
)
from adahop.typed import by_relation


class Sources(NamedTuple):
    """What nodes offer to targets of any relation: keys K_t h and values V_t h, [nodes, heads, width]."""

    key: Tensor
    value: Tensor


class RowBlock(NamedTuple):
    """A block row by row, a row being a relation and a target, so that maps of a relation apply to rows, not to edges.

    <k_j M_r, q_i> = <k_j, M_r q_i>, and sum_j a_ij v_j W_r = (sum_j a_ij v_j) W_r.
    """

    block: Block
    rows: Block  # the same edges, with rows for targets
    target: Tensor  # [T] of each row, among the block's
    of: tuple[Tensor, ...]  # the rows of each relation

    @classmethod
    def made(cls, block: Block, relations: int) -> RowBlock:
        assert block.relation is not None and block.row_ptr is not None, "rows have relations"
        order, ptr = by_relation(block.relation, relations)
        target = torch.searchsorted(block.ptr[1:], block.row_ptr[1:])
        return cls(block, block.by_row(), target, order.split(ptr.diff().tolist()))

    def mapped(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, heads, d] of every row, times its relation's weight [heads, d, e]."""
        parts = [torch.einsum("thd,hde->the", x.index_select(0, at), w) for at, w in zip(self.of, weight, strict=True)]
        done = torch.cat(parts)
        return torch.empty_like(done).index_copy(0, torch.cat(self.of), done)

    def total(self, sums: Tensor) -> Tensor:
        """[targets, heads, width] from the sums of rows."""
        return ops.segment_sum(sums, self.target, self.block.num_dst)

    def total_of(self, relation: int, sums: Tensor, places: Tensor) -> Tensor:
        """The part of one relation, for some of the targets."""
        at = self.of[relation]
        return ops.segment_sum(sums[at], self.target[at], self.block.num_dst)[places]


class HGTConv(Conv):
    """sum over all neighbours of a_ij W_r V_t h_j, a = softmax over them of p_r <K_t h_j M_r, Q_t h_i> / sqrt(d).

    Edge features add U_r e_ij to the scores. From a sample, the estimate is self-normalised (Hajek) over all relations
    together. The output passes a map of the target's type and is mixed with its own h by a learnt gate.
    """

    attends = True

    def __init__(self, schema: Schema, width: int, heads: int, edges: Sequence[int]):
        super().__init__()
        if width % heads:
            raise InputError(f"`hidden` must be divisible by the {heads} heads, got {width}")
        self.schema, self.heads, self.width, self.ends_width = schema, heads, width // heads, width
        self.key, self.query, self.value, self.out = (own_maps(schema, width, width) for _ in range(4))
        relations, d = len(schema.relations), self.width
        self.match, self.pass_on = (nn.Parameter(torch.empty(relations, heads, d, d)) for _ in range(2))
        self.prior = nn.Parameter(torch.ones(relations, heads))
        self.gate = nn.Parameter(torch.zeros(len(schema.counts)))
        for w in (self.match, self.pass_on):
            nn.init.normal_(w, std=d**-0.5)
        maps = {str(r): edge_map(features, heads) for r, features in enumerate(edges)}
        self.of_edges = nn.ModuleDict({r: each for r, each in maps.items() if each is not None})

    def in_heads(self, h: Tensor, n_id: Tensor, *maps: nn.ModuleList) -> list[Tensor]:
        """[nodes, heads, width]: h of some nodes through the map of their type, by each of these sets of maps."""
        return [out.unflatten(1, (self.heads, self.width)) for out in per_type(h, self.schema.kind_of(n_id), *maps)]

    def queries(self, own: Tensor, block: Block) -> Tensor:
        """Q_t h of the targets."""
        return self.in_heads(own, block.targets, self.query)[0]

    def sources(self, h: Tensor, n_id: Tensor) -> Sources:
        return Sources(*self.in_heads(h, n_id, self.key, self.value))

    def by_row(self, block: Block) -> RowBlock:
        return RowBlock.made(block, len(self.schema.relations))

    def passed(self, relation: int, value: Tensor) -> Tensor:
        """Messages W_r v from values v [.., heads, width]."""
        return torch.einsum("mhd,hde->mhe", value, self.pass_on[relation])

    def scores(self, sources: Sources, query: Tensor, by_row: RowBlock) -> Tensor:
        """[M, heads] of every edge."""
        match = self.match.mT * (self.prior * self.width**-0.5)[:, :, None, None]
        asked, rows = by_row.mapped(query.index_select(0, by_row.target), match), by_row.rows
        return self.with_features(ops.edge_dot(asked, sources.key, rows.dst, rows.src, rows.ptr), by_row.block)

    def with_features(self, score: Tensor, block: Block) -> Tensor:
        """The scores with what edge features add to them."""
        if len(self.of_edges) == 0:
            return score
        places, ptr = by_relation(block.edge_relation(), len(self.schema.relations))
        for r, edges in enumerate(places.split(ptr.diff().tolist())):
            if str(r) in self.of_edges:
                each = cast(nn.Linear, self.of_edges[str(r)])
                features = checked_features(None if block.attr is None else block.attr[r], each.in_features)
                score = score.index_add(0, edges, each(features))
        return score

    def row_sums(self, value: Tensor, coef: Tensor, by_row: RowBlock) -> Tensor:
        """[T, heads, width] the sum of coef v_j W_r of every row."""
        return by_row.mapped(gather(value, by_row.rows, coef), self.pass_on)

    def forward(self, h: Tensor | Values, own: Tensor | None, block: Block, estimator: Sum = PLAIN) -> Tensor:
        values = h if isinstance(h, Values) else Values(h)
        assert own is not None
        total = self.plain(values, own, block) if estimator is PLAIN else estimator(self, values, own, block)
        kinds = self.schema.kind_of(block.targets)
        (new,) = per_type(gelu(total.flatten(1)), kinds, self.out)
        gate = torch.sigmoid(self.gate)[kinds].unsqueeze(1)
        return gate * new + (1 - gate) * own

    def plain(self, values: Values, own: Tensor, block: Block) -> Tensor:
        """The sum from the sample alone."""
        by_row, sources = self.by_row(block), values.once("sources", lambda: self.sources(values.rows(), block.n_id))
        score = self.scores(sources, self.queries(own, block), by_row)
        coef = ops.softmax(score, block.dst, block.num_dst, block.scale)

        @torch.no_grad()
        def messages() -> TypedMessages:
            parts = []
            for r, p in enumerate(sliced(block, self.schema)):
                said = self.passed(r, sources.value.index_select(0, p.block.src))
                parts.append(Part(r, p.edges, by_edge(p.block, coef.index_select(0, p.edges), said)))
            return TypedMessages(block, parts)

        self.notify(messages)
        return by_row.total(self.row_sums(sources.value, coef, by_row))


class ExactRelations(OnGraph, Sum):
    """The first layer over all neighbours, from raw features and the present embeddings: nothing is drawn."""

    draws = fixed_shape = False

    def __init__(self, graph: Graph, x: TypedFeatures, encode: TypedEncoder):
        super().__init__()
        self.graph, self.x, self.encoders = graph, x, [encode]  # in a list: it is registered with the model
        self.scratch = ops.Scratch()

    def forward(self, conv: HGTConv, values: Values, own: Tensor | None, block: Block) -> Tensor:  # type: ignore[override]
        assert own is not None
        known = values if values.mean is None else values.mean  # a step with dropout calls this twice
        by_row = known.once("all neighbours", lambda: conv.by_row(self.full_block(block)))
        full = by_row.block
        h = self.encoders[0](self.x.index_select(0, full.n_id), values.share)
        sources = conv.sources(h, full.n_id)
        coef = ops.softmax(conv.scores(sources, conv.queries(own, block), by_row), full.dst, full.num_dst)
        sums = conv.row_sums(sources.value, coef, by_row)

        def messages() -> TypedMessages:
            parts = []
            for r, p in enumerate(sliced(block, conv.schema)):
                zero = coef.new_zeros(p.block.num_edges, coef.shape[1])
                total = partial(by_row.total_of, r, sums, p.places)
                parts.append(Part(r, p.edges, zero_messages(p.block, zero, total)))
            return TypedMessages(block, parts)

        conv.notify(messages)
        return by_row.total(sums)

    def full_block(self, block: Block) -> Block:
        """All in-edges of the targets."""
        full = self.graph.in_edges(block.targets)
        return relabelled(full.src[:0], full, self.scratch, self.graph.num_nodes, False)[1]


class RelationsVariate(Variate):
    """A control variate: numerator and normaliser over all neighbours from H, corrected by the sample.

    num = sum over all of w' m' + sum over S of scale (w m - w' m'), den likewise; the output is num / den, with
    w = e^score and the message m from h, w' = (1 - noise) e^score and m' from H. All maps are current, only H is old.
    """

    fixed_shape = False

    def forward(self, conv: HGTConv, values: Values, own: Tensor | None, block: Block) -> Tensor:  # type: ignore[override]
        return self.total(conv, values, own, block)

    def estimated(self, conv: HGTConv, values: Values, own: Tensor | None, block: Block) -> Estimate:  # type: ignore[override]
        assert own is not None
        self.flush()
        ids, full = relabelled(block.n_id, self.graph.in_edges(block.targets), self.scratch, self.nodes, False)
        query, drawn, every = conv.queries(own, block), conv.by_row(block), conv.by_row(full)
        new = values.once("sources", lambda: conv.sources(values.rows(), block.n_id))
        full_old = conv.sources(self.history.pull(ids), ids)
        old = Sources(*(each[: block.num_src] for each in full_old))
        full_score, new_score, old_score = (
            conv.scores(each, query, rows) for each, rows in ((full_old, every), (new, drawn), (old, drawn))
        )
        w_full, w_new, w_old, den = corrected(full_score, new_score, old_score, full, block, self.trust)
        if self.training and self.kind == "history":
            self.history.push_later(block.n_id, values.rows().detach())  # the backward pass still reads the old rows
        known = conv.row_sums(full_old.value, w_full, every)
        change = conv.row_sums(new.value, w_new, drawn) - conv.row_sums(old.value, w_old, drawn)
        coef = w_new / den[block.dst]

        @torch.no_grad()
        def messages(_: Values) -> TypedMessages:
            """The random part, which is the change of every message; and the sums of each relation."""
            old_coef, parts = w_old / den[block.dst], []
            for r, p in enumerate(sliced(block, conv.schema)):
                changed = [
                    c.index_select(0, p.edges).unsqueeze(-1) * each.value.index_select(0, p.block.src)
                    for c, each in ((coef, new), (old_coef, old))
                ]
                one = block.scale.new_ones(len(p.edges))
                m = by_edge(p.block, one, conv.passed(r, changed[0] - changed[1]).flatten(1))

                def total(r: int = r, places: Tensor = p.places) -> Tensor:
                    parts = (rows.total_of(r, sums, places) for rows, sums in ((every, known), (drawn, change)))
                    return sum(parts) / den[places].unsqueeze(-1)

                parts.append(Part(r, p.edges, m._replace(total=total)))
            return TypedMessages(block, parts)

        return Estimate((every.total(known) + drawn.total(change)) / den.unsqueeze(-1), coef, messages)

    def dropout_sum(self, conv: HGTConv, values: Values, block: Block, coef: Tensor) -> Tensor:  # type: ignore[override]
        assert values.mean is not None
        added = conv.in_heads(values.rows(), block.n_id, conv.value)[0] - values.mean.cached["sources"].value
        by_row = conv.by_row(block)
        return by_row.total(conv.row_sums(added, sqrt_scaled(block, coef), by_row))


class HGT(TypedGNN):
    """Heterogeneous graph transformer (Hu et al. 2020), any number of heads."""

    weights = "relations"
    takes_padded = False
    estimators = ("plain", "history", "snapshot", "exact", "exact+history", "exact+snapshot")

    def __init__(self, inputs: Schema, hidden: int, outputs: int, heads: int = 4, **options: Any):
        self.heads = count(heads, 1, "heads")
        super().__init__(inputs, hidden, outputs, **options)

    def wraps(self) -> bool:
        return True

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        return HGTConv(self.schema, outputs, self.heads, self.edge_widths)

    def act(self, layer: int, out: Tensor, state: State) -> Tensor:
        return self.activate(out + state["z"]) if "z" in state else out

    def views(self, graph: Graph) -> list[Graph]:
        return [graph]

    def exact(self, views: list[Graph], x: TypedFeatures) -> Sum:  # type: ignore[override]
        return ExactRelations(views[0], x, self.encode)

    def variate(self, views: list[Graph], width: int, kind: str, noise: float, dtype: torch.dtype) -> Sum:
        return RelationsVariate(views[0], width, kind, dtype, noise, self.storage)
