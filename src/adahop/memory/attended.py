"""Memories for attention: an exact first layer in raw features, a control variate for scores and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from adahop import ops
from adahop.block import Block
from adahop.graph import Graph
from adahop.history import History
from adahop.memory.fixed import Drop, Memory, same
from adahop.ops import segment_max, segment_sum

LEAST = 0.3  # the corrected normaliser is kept above this share of the remembered one


class Everyone:
    """All in-edges of some nodes: row, source, and the pointer of each row."""

    def __init__(self, graph: Graph, nodes: Tensor):
        many = graph.indptr[nodes + 1] - graph.indptr[nodes]
        self.row, place = ops.spans(graph.indptr[nodes], many)
        self.src, self.rows = graph.indices[place].long(), nodes.numel()
        self.ptr = torch.cat([many.new_zeros(1), many.cumsum(0)])

    def gather(self, h: Tensor, coef: Tensor) -> Tensor:
        """[rows, heads, width] sums of coef[:, head] * h[source]."""
        heads = [ops.gather_sum(h, self.src, self.row, c, self.ptr) for c in coef.unbind(1)]
        return torch.stack(heads, 1)


def normalised(scores: tuple[Tensor, Tensor, Tensor], edges: Everyone, block: Block):
    """e^score of everyone as remembered, of the sample as it is and as remembered; and the normaliser made of them."""
    every, new, stale = scores
    n, row = block.num_dst, block.dst
    top = torch.maximum(segment_max(every.detach(), edges.row, n), segment_max(new.detach(), row, n))
    every, new, stale = (every - top[edges.row]).exp(), (new - top[row]).exp(), (stale - top[row]).exp()
    base = segment_sum(every, edges.row, n)
    den = base + segment_sum(block.scale.unsqueeze(1) * (new - stale), row, n)
    return every, new, stale, torch.maximum(den, LEAST * base)


class AttendedFirst(Memory):
    """The first layer exactly, for attention: scores need one number a node and head, and the sum is of raw features.

    a_ij over *all* neighbours from s_i + t_j, t = x (E' v) + b v; then sum a_ij (E x_j + b) = E (sum a_ij x_j) + b.
    Costs O(n F) a target instead of O(k H) but has no variance, forward or backward.
    """

    draws = False
    shaped = False
    x: Tensor

    def __init__(self, graph: Graph, x: Tensor):
        super().__init__()
        self.graph = graph
        self.register_buffer("x", x, persistent=False)

    def total(
        self, conv: Any, h: Tensor, own: Tensor, block: Block, encoder: nn.Linear | None, drop: Drop = same
    ) -> Tensor:
        edges = Everyone(self.graph, block.n_id[: block.num_dst])
        u, v = conv.directions()
        t = self.x @ v.t() if encoder is None else self.x @ (v @ encoder.weight).t() + v @ encoder.bias
        score = leaky_relu((own @ u.t())[edges.row] + t[edges.src], conv.slope)
        raw = (score - segment_max(score.detach(), edges.row, edges.rows)[edges.row]).exp()
        coef = raw / segment_sum(raw, edges.row, edges.rows)[edges.row]
        none = torch.zeros(block.num_edges, conv.heads, device=h.device)
        conv.tell(torch.zeros_like(block.scale), none, (none, none))
        sums = drop(edges.gather(self.x, coef))
        return sums if encoder is None else sums @ encoder.weight.t() + encoder.bias

    def _apply(self, fn: Any, recurse: bool = True) -> AttendedFirst:
        super()._apply(fn, recurse)
        self.graph = self.graph.to(fn(torch.zeros(0)).device)
        return self


class AttendedScores(Memory):
    """The normaliser over all neighbours, from one remembered number t_j a node and head; values from the sample alone.

    den = sum over all of w' + sum over S of scale (w - w'), w' from the t_j last seen; the output is
    sum over S of scale w h_j / den. 4 bytes a node and head where a history keeps 4 a unit of width.
    """

    def __init__(self, graph: Graph, heads: int):
        super().__init__()
        self.graph, self.history = graph, History(graph.num_nodes, heads)

    def total(
        self, conv: Any, h: Tensor, own: Tensor, block: Block, encoder: nn.Linear | None, drop: Drop = same
    ) -> Tensor:
        edges = Everyone(self.graph, block.n_id[: block.num_dst])
        u, v = conv.directions()
        s, t = own @ u.t(), h @ v.t()
        every = leaky_relu(s[edges.row] + self.history.value[edges.src], conv.slope)
        new = leaky_relu(s[block.dst] + t[block.src], conv.slope)
        stale = leaky_relu(s[block.dst] + self.history.pull(block.n_id)[block.src], conv.slope)
        _, new, _, den = normalised((every, new, stale), edges, block)
        coef = block.scale.unsqueeze(1) * new / den[block.dst]
        conv.speak(h.unsqueeze(1).expand(-1, conv.heads, -1), block, coef, (s[block.dst], t[block.src]))
        if self.training:
            self.history.push(block.n_id, t)
        sums = [ops.gather_sum(h, block.src, block.dst, c, block.ptr) for c in coef.unbind(1)]
        return torch.stack(sums, 1)

    @torch.no_grad()
    def refresh(self, h: Tensor, conv: Any, passed: bool) -> None:
        if not passed and len(h) == self.graph.num_nodes:
            self.history.value.copy_(h @ conv.directions()[1].t())

    def _apply(self, fn: Any, recurse: bool = True) -> AttendedScores:
        super()._apply(fn, recurse)
        self.graph = self.graph.to(fn(torch.zeros(0)).device)
        return self


class AttendedVariate(Memory):
    """A control variate for attention: numerator and normaliser over all neighbours from H, corrected by the sample.

    num = sum over all of w' H_j + sum over S of scale (w h_j - w' H_j), den likewise; the output is num / den, with
    w = e^score from h and w' from H. Scores take today's u and v, so that only H is old.
    """

    shaped = False

    def __init__(self, graph: Graph, width: int, kind: str = "history", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.graph, self.kind = graph, kind
        self.history = History(graph.num_nodes, width, dtype)
        self.waiting: tuple[Tensor, Tensor] | None = None

    def total(
        self, conv: Any, h: Tensor, own: Tensor, block: Block, encoder: nn.Linear | None, drop: Drop = same
    ) -> Tensor:
        self.settle()
        edges = Everyone(self.graph, block.n_id[: block.num_dst])
        u, v = conv.directions()
        old = self.history.pull(block.n_id)
        s, t = own @ u.t(), h @ v.t()
        every = leaky_relu(s[edges.row] + (self.history.value @ v.t().to(self.history.value))[edges.src], conv.slope)
        new = leaky_relu(s[block.dst] + t[block.src], conv.slope)
        stale = leaky_relu(s[block.dst] + (old @ v.t())[block.src], conv.slope)
        every, new, stale, den = normalised((every, new, stale), edges, block)
        scale = block.scale.unsqueeze(1)
        fresh = [ops.gather_sum(h, block.src, block.dst, c, block.ptr) for c in (scale * new).unbind(1)]
        gone = [ops.gather_sum(old, block.src, block.dst, c, block.ptr) for c in (scale * stale).unbind(1)]
        num = edges.gather(self.history.value.float(), every) + torch.stack(fresh, 1) - torch.stack(gone, 1)
        shares = scale * new / den[block.dst], scale * stale / den[block.dst]
        self._tell(conv, h, old, block, *shares, (s[block.dst], t[block.src]))
        if self.training and self.kind == "history":
            self.waiting = block.n_id, h.detach()
        return num / den.unsqueeze(-1)

    @torch.no_grad()
    def _tell(self, conv: Any, h: Tensor, old: Tensor, block: Block, new: Tensor, stale: Tensor, scores: Any) -> None:
        """Energy of what is left to chance: |new h - stale H|^2, heads summed, from three inner products a node."""
        hh, ho, oo = (h * h).sum(1), (h * old).sum(1), (old * old).sum(1)
        hh, ho, oo = (p[block.src].unsqueeze(1) for p in (hh, ho, oo))
        conv.tell((new * new * hh - 2 * new * stale * ho + stale * stale * oo).clamp(min=0).sum(1), new, scores)

    def settle(self) -> None:
        """Write what the last step saw: only now, as its backward pass still read the old rows."""
        if self.waiting is not None:
            self.history.push(*self.waiting)
            self.waiting = None

    @torch.no_grad()
    def refresh(self, h: Tensor, conv: Any, passed: bool) -> None:
        self.settle()
        if (passed and self.kind == "history") or len(h) != self.graph.num_nodes:
            return  # a history has newer rows, or it is another graph's pass
        self.history.value.copy_(h)

    def _apply(self, fn: Any, recurse: bool = True) -> AttendedVariate:
        super()._apply(fn, recurse)
        self.graph = self.graph.to(fn(torch.zeros(0)).device)
        return self
