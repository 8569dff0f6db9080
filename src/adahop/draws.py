"""Draws: pick k of n in each segment, for anyone with probabilities in hand.

Samplers draw straight from a policy's odds (`ops.draw`); these functions are the same kernels behind checks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adahop import ops
from adahop.checks import InputError, between, count, edge_weights, one_of, whole
from adahop.ops import Drawn, Edges, Odds, Rows


def draw(method: str, weight: Any, ptr: Any, k: int, seed: int = 0, eta: float = 0.0) -> Drawn:
    """Pick k items of each segment `ptr[i]:ptr[i + 1]` in proportion to `weight`.

    "multinomial": k draws with replacement, prob sums to 1. "systematic", "depround": a k-subset with exact inclusion
    probabilities. "poisson": each item on its own, size k on average. A segment of no more than k comes whole.

    >>> d = draw("systematic", [.7, .2, .1], [0, 3], k=2)
    >>> d.pos.numel(), [round(float(p), 3) for p in inclusion([.7, .2, .1], [0, 3], 2)]
    (2, [1.0, 0.667, 0.333])
    """
    one_of(method, ops.DRAWS, "method")
    count(k, 1, "k")
    count(seed, 0, "seed")
    ptr, weight = _segments(ptr, weight, eta)
    indices = torch.zeros(weight.numel(), dtype=torch.int32)
    dst = torch.arange(ptr.numel() - 1)
    edges = Edges(ptr[:-1], ptr[:-1], ptr[1:], indices)
    odds = Odds(edge=weight, eta=eta)
    return ops.draw(edges, Rows(dst), torch.tensor([k]), method, odds, ops.random.key(seed))


def inclusion(weight: Any, ptr: Any, k: int, eta: float = 0.0) -> Tensor:
    """Inclusion probabilities of a k-subset, none over 1 (water-filling): what is over goes to the rest of the segment.

    pi_j = k((1 - eta) w'_j / sum w' + eta / n), w' = min(w, cap).
    """
    count(k, 1, "k")
    ptr, weight = _segments(ptr, weight, eta)
    row = torch.repeat_interleave(torch.arange(ptr.numel() - 1), ptr.diff())
    possible = (weight > 0) | (eta > 0)
    many = torch.bincount(row[possible], minlength=ptr.numel() - 1)
    out = possible.double()
    chance = possible & (many > k)[row]
    if bool(chance.any()):
        rows = ptr.numel() - 1
        w = ops.lifted(weight[chance].double(), row[chance], rows)
        many = torch.full((rows,), float(k), dtype=torch.double)
        out[chance] = ops.inclusion(w, row[chance], rows, many, eta)
    return out


def _segments(ptr: Any, weight: Any, eta: float) -> tuple[Tensor, Tensor]:
    if between(eta, 0.0, 1.0, "eta") == 1.0:
        raise InputError("`eta` must be below 1, got 1.0 (equal weights give uniform draws)")
    ptr = whole(ptr, "ptr")
    if ptr.numel() == 0 or int(ptr[0]) != 0 or bool((ptr.diff() < 0).any()):
        raise InputError(f"`ptr` must start with 0 and not decrease, got {ptr[:5].tolist()}")
    return ptr, edge_weights(weight, int(ptr[-1]))
