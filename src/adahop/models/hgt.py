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
from adahop.messages import Messages, Part, TypedMessages, by_edge
from adahop.models.base import State
from adahop.models.typed import Slice, TypedEncoder, TypedGNN, own_maps, per_type, sliced
from adahop.sum import (
    PLAIN,
    Conv,
    Estimate,
    Sum,
    Variate,
    checked_features,
    corrected,
    edge_map,
    sqrt_scaled,
    zero_messages,
)


class ScoredMessages(NamedTuple):
    """The scores of a block's edges and the messages of its sources, relation by relation."""

    block: Block
    score: Tensor  # [M, heads], in the order of the block's edges
    parts: list[tuple[Slice, Tensor]]  # with the messages W_r V_t h of the slice's sources, [sources, heads, width]

    def sum(self, coef: Tensor) -> Tensor:
        """sum of coef * message of every target: [targets, heads, width]."""
        heads, width = self.score.shape[1], self.parts[0][1].shape[-1]
        total = coef.new_zeros(self.block.num_dst, heads, width)
        for r, (part, _) in enumerate(self.parts):
            total = total.index_add(0, part.places, self.sum_of(r, coef))
        return total

    def sum_of(self, relation: int, coef: Tensor) -> Tensor:
        """The part of one relation, for the targets of its type."""
        part, message = self.parts[relation]
        return gather(message, part.block, coef[part.edges])

    def per_edge(self, relation: int, coef: Tensor) -> Tensor:
        """[M, heads, width] coef * message of each edge of a relation."""
        part, message = self.parts[relation]
        return coef[part.edges].unsqueeze(-1) * message[part.block.src]


Weighted = tuple[ScoredMessages, Tensor]  # with a coefficient per edge and head


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

    def queries(self, own: Tensor, block: Block) -> Tensor:
        """[targets, heads, width]: Q_t h of the targets."""
        return per_type(self.query, own, self.schema.kind_of(block.targets)).unflatten(1, (self.heads, self.width))

    def scored(self, h: Tensor, query: Tensor, block: Block) -> ScoredMessages:
        """Scores and messages from the sources' h and the targets' queries."""
        heads, types = (self.heads, self.width), list(self.schema.counts)
        kinds = self.schema.kind_of(block.n_id)
        places = {t: (kinds == i).nonzero().flatten() for i, t in enumerate(types)}
        local = torch.zeros(block.num_src, dtype=torch.long, device=h.device)
        for t in types:
            local[places[t]] = torch.arange(places[t].numel(), device=h.device)
        key, value = (
            {t: each(h[places[t]]).unflatten(1, heads) for t, each in zip(types, maps, strict=True)}
            for maps in (self.key, self.value)
        )
        parts, scores = [], []
        for r, part in enumerate(sliced(block, self.schema)):
            source, dst = self.schema.relations[r][0], part.block.dst
            edge_index = torch.stack([local[part.block.src], dst])
            part = part._replace(block=part.block._replace(n_id=block.n_id[places[source]], edge_index=edge_index))
            k = torch.einsum("shd,hde->she", key[source], self.match[r])
            score = (k[part.block.src] * query[part.places][dst]).sum(-1) * self.prior[r] * self.width**-0.5
            features = self.features_of(r, part.block)
            scores.append(score if features is None else score + features)
            parts.append((part, torch.einsum("shd,hde->she", value[source], self.pass_on[r])))
        edges = torch.cat([part.edges for part, _ in parts])
        return ScoredMessages(block, torch.cat(scores)[edges.argsort()], parts)

    def features_of(self, relation: int, block: Block) -> Tensor | None:
        """[M, heads] what the edge features of a relation add to its scores."""
        if str(relation) not in self.of_edges:
            return None
        each = cast(nn.Linear, self.of_edges[str(relation)])
        return each(checked_features(None if block.attr is None else block.attr[0], each.in_features))

    def forward(self, h: Tensor | Values, own: Tensor | None, block: Block, estimator: Sum = PLAIN) -> Tensor:
        values = h if isinstance(h, Values) else Values(h)
        assert own is not None
        total = self.plain(values, own, block) if estimator is PLAIN else estimator(self, values, own, block)
        kinds = self.schema.kind_of(block.targets)
        new = per_type(self.out, gelu(total.flatten(1)), kinds)
        gate = torch.sigmoid(self.gate)[kinds].unsqueeze(1)
        return gate * new + (1 - gate) * own

    def plain(self, values: Values, own: Tensor, block: Block) -> Tensor:
        """The sum from the sample alone."""
        scored = self.scored(values.rows(), self.queries(own, block), block)
        coef = ops.softmax(scored.score, block.dst, block.num_dst, block.scale)

        def messages() -> TypedMessages:
            sent = [(p, Messages(p.block, coef.detach()[p.edges], Values(m))) for p, m in scored.parts]
            return TypedMessages(block, [Part(r, p.edges, m) for r, (p, m) in enumerate(sent)])

        self.notify(messages)
        return scored.sum(coef)


class ExactRelations(OnGraph, Sum):
    """The first layer over all neighbours, from raw features and the present embeddings: nothing is drawn."""

    draws = fixed_shape = False

    def __init__(self, graph: Graph, x: TypedFeatures, encode: TypedEncoder):
        super().__init__()
        self.graph, self.x, self.encoders = graph, x, [encode]  # in a list: it is registered with the model

    def forward(self, conv: HGTConv, values: Values, own: Tensor | None, block: Block) -> Tensor:  # type: ignore[override]
        assert own is not None
        full = self.graph.in_edges(block.targets, compact=True)
        h = self.encoders[0](self.x.index_select(0, full.n_id), values.share)
        scored = conv.scored(h, conv.queries(own, block), full)
        coef = ops.softmax(scored.score, full.dst, full.num_dst, full.scale)

        def messages() -> TypedMessages:
            parts = []
            for r, p in enumerate(sliced(block, conv.schema)):
                zero = coef.new_zeros(p.block.num_edges, coef.shape[1])
                parts.append(Part(r, p.edges, zero_messages(p.block, zero, partial(scored.sum_of, r, coef))))
            return TypedMessages(block, parts)

        conv.notify(messages)
        return scored.sum(coef)


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
        query, full = conv.queries(own, block), self.graph.in_edges(block.targets, compact=True)
        new = values.once("scored", lambda: conv.scored(values.rows(), query, block))
        old = conv.scored(self.history.pull(block.n_id), query, block)
        full_old = conv.scored(self.history.pull(full.n_id), query, full)
        w_full, w_new, w_old, den = corrected(full_old.score, new.score, old.score, full, block, self.trust)
        if self.training and self.kind == "history":
            self.history.push_later(block.n_id, values.rows().detach())  # the backward pass still reads the old rows
        total = (full_old.sum(w_full) + new.sum(w_new) - old.sum(w_old)) / den.unsqueeze(-1)
        pairs = (new, w_new), (old, w_old), (full_old, w_full)
        return Estimate(total, w_new / den[block.dst], lambda: self._messages(block, *pairs, den))

    def dropout_sum(self, conv: HGTConv, values: Values, block: Block, coef: Tensor) -> Tensor:  # type: ignore[override]
        assert values.mean is not None
        coef, mean = sqrt_scaled(block, coef), values.mean
        scored = conv.scored(values.rows(), conv.queries(values.rows(block.num_dst), block), block)
        return scored.sum(coef) - mean.cached["scored"].sum(coef)

    @torch.no_grad()
    def _messages(self, block: Block, new: Weighted, old: Weighted, full: Weighted, den: Tensor) -> TypedMessages:
        """The random part, which is the change of every message; and the sums of each relation."""
        parts = []
        for r, (part, _) in enumerate(new[0].parts):
            change = new[0].per_edge(r, new[1]) - old[0].per_edge(r, old[1])
            change = change / den[block.dst[part.edges]].unsqueeze(-1)
            m = by_edge(part.block, block.scale.new_ones(len(part.edges)), change.flatten(1))

            def total(r: int = r, places: Tensor = part.places) -> Tensor:
                stale, drawn, known = (scored.sum_of(r, coef) for scored, coef in (old, new, full))
                return (known + drawn - stale) / den[places].unsqueeze(-1)

            parts.append(Part(r, part.edges, m._replace(total=total)))
        return TypedMessages(block, parts)


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
