"""HGT: attention over all neighbours of a target, whatever their relation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from adahop import ops
from adahop.block import Block
from adahop.checks import InputError, count
from adahop.features import Schema, Values, gather
from adahop.messages import Messages, TypedMessages
from adahop.models.base import State
from adahop.models.typed import TypedGNN, own_maps, per_type, sliced
from adahop.sum import PLAIN, Conv, Sum


class HGTConv(Conv):
    """sum over all neighbours of a_ij W_r V_t h_j, a = softmax over them of p_r <K_t h_j M_r, Q_t h_i> / sqrt(d).

    From a sample, the normaliser is self-normalised (Hajek), over all relations together. The output passes a map of
    the target's type and is mixed with its own h by a learnt gate.
    """

    def __init__(self, schema: Schema, width: int, heads: int):
        super().__init__()
        if width % heads:
            raise InputError(f"`hidden` must be divisible by the {heads} heads, got {width}")
        self.schema, self.heads, self.width = schema, heads, width // heads
        self.key, self.query, self.value, self.out = (own_maps(schema, width, width) for _ in range(4))
        relations, d = len(schema.relations), self.width
        self.match, self.pass_on = (nn.Parameter(torch.empty(relations, heads, d, d)) for _ in range(2))
        self.prior = nn.Parameter(torch.ones(relations, heads))
        self.gate = nn.Parameter(torch.zeros(len(schema.counts)))
        for w in (self.match, self.pass_on):
            nn.init.normal_(w, std=d**-0.5)

    def forward(self, h: Tensor | Values, own: Tensor | None, block: Block, how: Sum = PLAIN) -> Tensor:
        h, kinds = h.rows() if isinstance(h, Values) else h, self.schema.kind_of(block.targets)
        assert own is not None
        heads = (self.heads, self.width)
        query = per_type(self.query, own, kinds).unflatten(1, heads)
        of_source = self.schema.kind_of(block.n_id)
        types = list(self.schema.counts)
        places = {t: (of_source == i).nonzero().flatten() for i, t in enumerate(types)}
        local = torch.zeros(block.num_src, dtype=torch.long, device=h.device)
        for t in types:
            local[places[t]] = torch.arange(places[t].numel(), device=h.device)
        key, value = (
            {t: each(h[places[t]]).unflatten(1, heads) for t, each in zip(types, maps, strict=True)}
            for maps in (self.key, self.value)
        )
        parts, scores = sliced(block, self.schema), []
        for r, part in enumerate(parts):
            k = torch.einsum("shd,hde->she", key[self.schema.relations[r][0]], self.match[r])
            met = (k[local[part.block.src]] * query[part.places][part.block.dst]).sum(-1)
            scores.append(met * self.prior[r] * self.width**-0.5)
        edges = torch.cat([part.edges for part in parts])
        score = torch.cat(scores)[edges.argsort()]
        coef = ops.softmax(score, block.dst, block.num_dst, block.scale)
        total = h.new_zeros(block.num_dst, *heads)
        noted: list[tuple[Tensor, Messages]] = []
        for r, part in enumerate(parts):
            said = Values(torch.einsum("shd,hde->she", value[self.schema.relations[r][0]], self.pass_on[r]))
            mine = part.block._replace(edge_index=torch.stack([local[part.block.src], part.block.dst]))
            total = total.index_add(0, part.places, gather(said.rows(), mine, coef[part.edges]))
            if self.listeners:
                noted.append((part.edges, Messages(mine, coef[part.edges].detach(), said)))
        self.note(lambda: TypedMessages(block, noted))
        new = per_type(self.out, gelu(total.flatten(1)), kinds)
        gate = torch.sigmoid(self.gate)[kinds].unsqueeze(1)
        return gate * new + (1 - gate) * own


class HGT(TypedGNN):
    """Heterogeneous graph transformer (Hu et al. 2020), any number of heads."""

    weights = "pairs"
    estimators = ("plain",)  # a softmax over all relations has no memory of its own yet

    def __init__(self, inputs: Schema, hidden: int, outputs: int, heads: int = 4, **options: Any):
        self.heads = count(heads, 1, "heads")
        super().__init__(inputs, hidden, outputs, **options)
        self.edge_width = hidden

    def wraps(self) -> bool:
        return True

    def conv(self, inputs: int, outputs: int, last: bool, **options: Any) -> Conv:
        return HGTConv(self.schema, outputs, self.heads)

    def act(self, layer: int, out: Tensor, state: State) -> Tensor:
        return self.bend(out + state["z"]) if "z" in state else out
