"""Messages: what a layer passed along its edges; energy, alignment and scores are functions of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.checks import InputError
from adahop.features import Values, gather
from adahop.ops import segment_sum


class Ends(NamedTuple):
    """The two terms of an edge's attention score: s per target, t per source (or per edge)."""

    s: Tensor
    t: Tensor
    by_edge: bool = False

    def over(self, block: Block) -> tuple[Tensor, Tensor]:
        """Both, edge by edge."""
        return self.s[block.dst], self.t if self.by_edge else self.t[block.src]

    def added(self, block: Block) -> Tensor:
        """Their sum, edge by edge."""
        return self.s[block.dst] + self.t if self.by_edge else ops.add_ends(self.s, self.t, block.src, block.dst)


class Messages(NamedTuple):
    """m_ij = coef_ij W h_j; with a control variate, minus its stored value (`old`: stored coefficients and h).

    A layer hands it to its listeners while it runs; they must read it at once, before the weights change.
    """

    block: Block
    coef: Tensor  # [M], or with heads [M, heads]; the scale is in it
    values: Values
    kernel: Tensor | None = None  # W where messages are measured after it, the narrower side; None: before
    ends: Ends | None = None  # of attention
    old: tuple[Tensor, Tensor] | None = None
    edge: Tensor | None = None  # [M, out] what an edge's own features add to W h before the coefficient
    total: Callable[[], Tensor] | None = None  # the layer's sum where it is not just that of these messages

    def value(self, mapped: bool = True) -> Tensor:
        """What the coefficients are multiplied with: [S, width], or [S, heads, width]."""
        h = self.values.rows() if self.kernel is None or not mapped else self.values.mapped(self.kernel)
        return _for_heads(h.detach(), self.coef)

    def per_edge(self) -> Messages:
        """The same messages with a value per edge, where edge features are part of it."""
        if self.edge is None:
            return self
        assert self.kernel is not None, "features of edges join h after W"
        return by_edge(self.block, self.coef, self.values.mapped(self.kernel)[self.block.src].detach() + self.edge)

    def by_relation(self) -> list[tuple[int, Messages]]:
        """The messages by relation; this is the only one."""
        return [(0, self)]

    def read(self, reading: Reading) -> Tensor:
        """The reading of every edge."""
        return reading(self.per_edge())


def by_edge(block: Block, coef: Tensor, value: Tensor) -> Messages:
    """Messages coef * value, with a value per edge instead of one per source."""
    each = torch.arange(block.num_edges, device=value.device)
    own = block._replace(n_id=block.n_id[block.src], edge_index=torch.stack([each, block.dst]), target=block.targets)
    return Messages(own, coef, Values(value))


class Part(NamedTuple):
    """The messages of one relation, and its edges as places in the block."""

    relation: int
    edges: Tensor
    messages: Messages


class TypedMessages(NamedTuple):
    """The messages of a layer over several relations."""

    block: Block
    parts: list[Part]

    def by_relation(self) -> list[tuple[int, Messages]]:
        """The messages of each relation."""
        return [(part.relation, part.messages) for part in self.parts]

    def read(self, reading: Reading) -> Tensor:
        found = [(part.edges, part.messages.read(reading)) for part in self.parts]
        out = self.block.scale.new_zeros(self.block.num_edges, *(found[0][1].shape[1:] if found else ()))
        for edges, value in found:
            out[edges] = value
        return out


Reading = Callable[[Messages], Tensor]  # of every edge a number, or a row of them


class HasListeners(Protocol):
    """A layer that hands its messages to listeners."""

    listeners: list[Callable[[Messages], None]]


@torch.no_grad()
def energy(m: Messages) -> Tensor:
    """|m_ij|^2, heads summed."""
    coef = m.coef.detach()
    if m.block.num_edges == 0:
        return m.block.scale.new_zeros(0)
    if m.old is None:
        return m.values.energies(m.block, coef, m.kernel)
    h, (gone, was) = m.values.rows(), m.old
    products = ((h * h).sum(1), (h * was).sum(1), (was * was).sum(1))  # one each per node, not per edge
    hh, ho, oo = (p[m.block.src].unsqueeze(1) for p in products)
    return (coef * coef * hh - 2 * coef * gone * ho + gone * gone * oo).clamp(min=0).sum(1)


@torch.no_grad()
def alignment(m: Messages) -> Tensor:
    """2 <m_ij, mean of i's other messages> - |m_ij|^2: how near a message is to the mean, up to a constant per target.

    A target's own message is left out of the mean; with a single neighbour there is no mean, and it is 0.
    """
    block = m.block
    others = (~block.is_self()).to(m.coef.dtype)
    k = segment_sum(others, block.dst, block.num_dst)[block.dst]
    parts = [(m.coef.detach(), m.value())]
    if m.old is not None:
        parts.append((-m.old[0], _for_heads(m.old[1], m.coef)))
    parts = [(c * (others if c.dim() == 1 else others.unsqueeze(-1)), h) for c, h in parts]
    total = torch.stack([gather(h, block, c) for c, h in parts]).sum(0)[block.dst]
    inner = _per_edge(torch.stack([c * (h[block.src] * total).sum(-1) for c, h in parts]).sum(0))
    square = energy(m) * others
    return (2.0 * (inner - square) / (k - 1.0).clamp(min=1.0) - square) * (k > 1)


@torch.no_grad()
def scores(m: Messages) -> Tensor:
    """[M, 1 + 2 width]: of every edge |h|^2, its message's energy without the coefficients, and both ends' scores."""
    if m.ends is None:
        raise InputError("a policy that learns from attention scores must have a model with them, got one without")
    norm = energy(m) / m.coef.detach().square().sum(1).clamp(min=1e-30)
    return torch.cat([norm.unsqueeze(1), *m.ends.over(m.block)], 1).detach()


def estimate(m: Messages, mapped: bool = True) -> Tensor:
    """The sum that the layer formed for its targets; without `mapped`, before W."""
    if m.total is not None:
        return m.total().detach()
    m = m.per_edge() if mapped else m
    return gather(m.value(mapped), m.block, m.coef.detach())


def _for_heads(h: Tensor, coef: Tensor) -> Tensor:
    """h [S, C] expanded to [S, heads, C] where the coefficients have heads."""
    return h.unsqueeze(1).expand(-1, coef.shape[1], -1) if coef.dim() == h.dim() == 2 else h


def _per_edge(value: Tensor) -> Tensor:
    return value if value.dim() == 1 else value.sum(-1)
