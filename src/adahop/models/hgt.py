"""HGT: attention over all neighbours of a target, whatever their relation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from adahop.sum import PLAIN, Conv, Formed, Sum, Variate, calmed, certain, checked_features, corrected, edge_map


class ScoredMessages(NamedTuple):
    """The scores of a block's edges and the messages of its sources, relation by relation."""

    block: Block
    score: Tensor  # [M, heads], in the order of the block's edges
    parts: list[tuple[Slice, Tensor]]  # with the messages W_r V_t h of the slice's sources, [sources, heads, width]

    def sum(self, coef: Tensor) -> Tensor:
        """sum of coef * message for every target: [targets, heads, width]."""
        heads, width = self.score.shape[1], self.parts[0][1].shape[-1]
        total = coef.new_zeros(self.block.num_dst, heads, width)
        for r, (part, _) in enumerate(self.parts):
            total = total.index_add(0, part.places, self.sum_of(r, coef))
        return total

    def sum_of(self, relation: int, coef: Tensor) -> Tensor:
        """The part that a relation has in it, for the targets of its type."""
        part, message = self.parts[relation]
        return gather(message, part.block, coef[part.edges])

    def known(self, relation: int, coef: Tensor) -> Callable[[Tensor | None], Tensor]:
        """The same as a sum that was formed already, whatever map is asked for."""
        return lambda kernel: self.sum_of(relation, coef)

    def per_edge(self, relation: int, coef: Tensor) -> Tensor:
        """[M, heads, width] coef * message of each edge of a relation."""
        part, message = self.parts[relation]
        return coef[part.edges].unsqueeze(-1) * message[part.block.src]


Weighed = tuple[ScoredMessages, Tensor]  # and a coefficient per edge and head


class HGTConv(Conv):
    """sum over all neighbours of a_ij W_r V_t h_j, a = softmax over them of p_r <K_t h_j M_r, Q_t h_i> / sqrt(d).

    Features of edges add U_r e_ij to the scores. From a sample, the normaliser is self-normalised (Hajek), over all
    relations together. The output passes a map of the target's type and is mixed with its own h by a learnt gate.
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

    def asked(self, own: Tensor, block: Block) -> Tensor:
        """[targets, heads, width]: Q_t h of the targets."""
        return per_type(self.query, own, self.schema.kind_of(block.targets)).unflatten(1, (self.heads, self.width))

    def scored(self, h: Tensor, query: Tensor, block: Block) -> ScoredMessages:
        """Scores and messages from sources with such h to targets with such queries."""
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
        """[M, heads] what the features of a relation's edges add to their scores."""
        if str(relation) not in self.of_edges:
            return None
        each = cast(nn.Linear, self.of_edges[str(relation)])
        return each(checked_features(None if block.attr is None else block.attr[0], each.in_features))

    def forward(self, h: Tensor | Values, own: Tensor | None, block: Block, how: Sum = PLAIN) -> Tensor:
        values = h if isinstance(h, Values) else Values(h)
        assert own is not None
        total = how(self, values, own, block) if isinstance(how, OverRelations) else self.plain(values, own, block)
        kinds = self.schema.kind_of(block.targets)
        new = per_type(self.out, gelu(total.flatten(1)), kinds)
        gate = torch.sigmoid(self.gate)[kinds].unsqueeze(1)
        return gate * new + (1 - gate) * own

    def plain(self, values: Values, own: Tensor, block: Block) -> Tensor:
        """The sum from the sample alone."""
        scored = self.scored(values.rows(), self.asked(own, block), block)
        coef = ops.softmax(scored.score, block.dst, block.num_dst, block.scale)
        noted = coef.detach()
        self.note(
            lambda: TypedMessages(
                block,
                [
                    Part(r, p.edges, Messages(p.block, noted[p.edges], Values(m)))
                    for r, (p, m) in enumerate(scored.parts)
                ],
            )
        )
        return scored.sum(coef)


class OverRelations(Sum):
    """A sum with attention over all relations of a target."""

    def forward(  # type: ignore[override]
        self, conv: HGTConv, values: Values, own: Tensor | None, block: Block, rest: Tensor | None = None
    ) -> Tensor:
        raise NotImplementedError


class ExactRelations(OnGraph, OverRelations):
    """The first layer over all neighbours, from raw features and learnt rows as they are now: nothing is drawn."""

    draws = shaped = False

    def __init__(self, graph: Graph, x: TypedFeatures, encode: TypedEncoder):
        super().__init__()
        self.graph, self.x, self.encoders = graph, x, [encode]  # in a list: the model's own part, not this one's

    def forward(  # type: ignore[override]
        self, conv: HGTConv, values: Values, own: Tensor | None, block: Block, rest: Tensor | None = None
    ) -> Tensor:
        assert own is not None
        every = self.graph.in_edges(block.targets, compact=True)
        h = self.encoders[0](self.x.index_select(0, every.n_id), values.share)
        scored = conv.scored(h, conv.asked(own, block), every)
        coef = ops.softmax(scored.score, every.dst, every.num_dst, every.scale)
        conv.note(lambda: self._messages(conv, block, scored, coef))
        return scored.sum(coef)

    @staticmethod
    def _messages(conv: HGTConv, block: Block, scored: ScoredMessages, coef: Tensor) -> TypedMessages:
        """Messages of nothing, and sums that are known."""
        parts = []
        for r, p in enumerate(sliced(block, conv.schema)):
            nothing = coef.new_zeros(p.block.num_edges, coef.shape[1])
            parts.append(Part(r, p.edges, certain(p.block, nothing, scored.known(r, coef))))
        return TypedMessages(block, parts)


class RelationsVariate(OverRelations, Variate):
    """A control variate: numerator and normaliser over all neighbours from H, corrected by the sample.

    num = sum over all of w' m' + sum over S of scale (w m - w' m'), den likewise; the output is num / den, with
    w = e^score and the message m from h, w' = (1 - noise) e^score and m' from H. Maps are today's, only H is old.
    """

    shaped = False

    def forward(  # type: ignore[override]
        self, conv: HGTConv, values: Values, own: Tensor | None, block: Block, rest: Tensor | None = None
    ) -> Tensor:
        return self.total(conv, values, own, block)

    def formed(self, conv: HGTConv, values: Values, own: Tensor | None, block: Block) -> Formed:  # type: ignore[override]
        assert own is not None
        self.settle()
        query, every = conv.asked(own, block), self.graph.in_edges(block.targets, compact=True)
        new = values.once("scored", lambda: conv.scored(values.rows(), query, block))
        gone = conv.scored(self.history.pull(block.n_id), query, block)
        whole = conv.scored(self.history.pull(every.n_id), query, every)
        all_of, now, then, den = corrected(whole.score, new.score, gone.score, every, block, self.trust)
        if self.training and self.kind == "history":
            self.waiting = block.n_id, values.rows().detach()
        total = (whole.sum(all_of) + new.sum(now) - gone.sum(then)) / den.unsqueeze(-1)
        return Formed(
            total, now / den[block.dst], lambda: self._messages(block, (new, now), (gone, then), (whole, all_of), den)
        )

    def dropped(self, conv: HGTConv, values: Values, block: Block, coef: Tensor) -> Tensor:  # type: ignore[override]
        assert values.mean is not None
        coef, mean = calmed(block, coef), values.mean
        scored = conv.scored(values.rows(), conv.asked(values.rows(block.num_dst), block), block)
        return scored.sum(coef) - mean.kept["scored"].sum(coef)

    @torch.no_grad()
    def _messages(self, block: Block, new: Weighed, gone: Weighed, whole: Weighed, den: Tensor) -> TypedMessages:
        """What is left to chance, the change of every message; and the sums of each relation."""
        parts = []
        for r, (part, _) in enumerate(new[0].parts):
            change = new[0].per_edge(r, new[1]) - gone[0].per_edge(r, gone[1])
            change = change / den[block.dst[part.edges]].unsqueeze(-1)
            m = by_edge(part.block, block.scale.new_ones(len(part.edges)), change.flatten(1))

            def total(r: int = r, places: Tensor = part.places) -> Tensor:
                old, drawn, known = (scored.sum_of(r, coef) for scored, coef in (gone, new, whole))
                return (known + drawn - old) / den[places].unsqueeze(-1)

            parts.append(Part(r, part.edges, m._replace(total=total)))
        return TypedMessages(block, parts)


class HGT(TypedGNN):
    """Heterogeneous graph transformer (Hu et al. 2020), any number of heads."""

    weights = "relations"
    pads = False
    estimators = ("plain", "history", "snapshot", "exact", "exact+history", "exact+snapshot")

    def __init__(self, inputs: Schema, hidden: int, outputs: int, heads: int = 4, **options: Any):
        self.heads = count(heads, 1, "heads")
        super().__init__(inputs, hidden, outputs, **options)

    def wraps(self) -> bool:
        return True

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        return HGTConv(self.schema, outputs, self.heads, self.edge_widths)

    def act(self, layer: int, out: Tensor, state: State) -> Tensor:
        return self.bend(out + state["z"]) if "z" in state else out

    def views(self, graph: Graph) -> list[Graph]:
        return [graph]

    def exact(self, views: list[Graph], x: TypedFeatures) -> Sum:  # type: ignore[override]
        return ExactRelations(views[0], x, self.encode)

    def variate(self, views: list[Graph], width: int, kind: str, noise: float, dtype: torch.dtype) -> Sum:
        return RelationsVariate(views[0], width, kind, dtype, noise, self.storage)
