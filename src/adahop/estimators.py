"""Estimators: how the sum over all neighbours is formed from the sampled ones. They know nothing of who drew."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from adahop import ops
from adahop.block import Block, Ungathered
from adahop.ops import segment_max, segment_sum

ATTENTION = ("self-normalised", "paper", "softmax")


def gather(h: Tensor | Ungathered, block: Block, coef: Tensor) -> Tensor:
    """sum over a target's edges of coef * h[src]; h [S, C] with coef [M], or [S, H, C] with [M, H]."""
    if isinstance(h, Ungathered):
        return ops.gather_sum(h.table, h.n_id.index_select(0, block.src), block.dst, coef, block.ptr)
    return ops.gather_sum(h, block.src, block.dst, coef, block.ptr)


def plain(h: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Horvitz-Thompson: sum of weight * scale * h. Returns the sum and the coefficients."""
    coef = block.weight * block.scale
    return gather(h, block, coef), coef


def attention(score: Tensor, block: Block, form: str = "self-normalised") -> Tensor:
    """Coefficients a * scale of attention weights a = softmax(score), from the scores [M, H] of the sample alone.

    "self-normalised" (Hajek): e^score scale / sum e^score scale, consistent for any draw.
    "paper": a' = (sum over S of q) softmax over S (Sec. 5.3), with q summing to 1 for every draw, times scale. A
    target's own edge is known exactly, so it joins the normaliser instead of the sample.
    "softmax": over the sample as if it were everyone; biased.
    """
    n, row = block.num_dst, block.dst
    if form != "paper":
        return ops.softmax(score, row, n, block.scale if form == "self-normalised" else None)
    raw = (score - segment_max(score.detach(), row, n)[row]).exp()
    scale = block.scale.unsqueeze(-1)
    own = block.is_self() | (block.scale == 0)
    others = raw.masked_fill(own.unsqueeze(-1), 0.0)
    k = segment_sum((~own).to(raw.dtype), row, n)
    q = torch.where(own, torch.zeros_like(block.scale), 1.0 / (k[row] * block.scale).clamp(min=1e-30))
    share = segment_sum(q, row, n).clamp(min=1e-30).unsqueeze(-1)  # stands for the sampled part of the full normaliser
    total = segment_sum(raw - others, row, n) + segment_sum(others, row, n) / share
    return raw * scale / total.clamp(min=1e-30)[row]


def attended(s: Tensor, t: Tensor, block: Block, slope: float, form: str, by_edge: bool = False) -> Tensor:
    """Coefficients from both ends' scores, s a target and t a source (or an edge), through a leaky relu."""
    if form == "self-normalised":
        return ops.attend(s, t, block.src, block.dst, block.ptr, block.scale, slope, block.slots, by_edge)
    return attention(leaky_relu(s[block.dst] + (t if by_edge else t[block.src]), slope), block, form)


def energies(h: Tensor, block: Block, coef: Tensor) -> Tensor:
    """|coef h[src]|^2 of every edge, heads summed."""
    return ops.energies(h, block.src, coef)


@torch.no_grad()
def alignments(h: Tensor, block: Block, coef: Tensor) -> Tensor:
    """2 <m_ij, mean of i's other messages> - |m_ij|^2: how near a message is to the mean, up to a constant a target.

    A target's own message is left out of the mean; with a single neighbour there is no mean to know of, and 0 is said.
    """
    others = (~block.is_self()).to(coef.dtype)
    k = segment_sum(others, block.dst, block.num_dst)[block.dst]
    coef = coef.detach() * (others if coef.dim() == 1 else others.unsqueeze(-1))
    h = h.detach()
    inner = coef * (h[block.src] * gather(h, block, coef)[block.dst]).sum(-1)
    square = energies(h, block, coef)
    inner = inner if inner.dim() == 1 else inner.sum(-1)
    return (2.0 * (inner - square) / (k - 1.0).clamp(min=1.0) - square) * (k > 1)


@torch.no_grad()
def scored(energy: Tensor, coef: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """[M, 1 + 2 H]: of every edge |h|^2, its message's energy without the coefficients, and both ends' scores."""
    norm = energy / coef.square().sum(1).clamp(min=1e-30)
    return torch.cat([norm.unsqueeze(1), s, t], 1).detach()


FEEDBACK = {"energy": energies, "alignment": alignments}
