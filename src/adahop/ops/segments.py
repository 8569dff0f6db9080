"""Sums, maxima and places by segment, in plain torch on any device."""

from __future__ import annotations

from itertools import pairwise

import numba as nb
import torch
from torch import Tensor

from adahop.ops.registry import register


def segment_sum(x: Tensor, row: Tensor, n: int) -> Tensor:
    return torch.zeros((n, *x.shape[1:]), dtype=x.dtype, device=x.device).index_add_(0, row, x)


def segment_max(x: Tensor, row: Tensor, n: int) -> Tensor:
    low = torch.full((n, *x.shape[1:]), -torch.inf, dtype=x.dtype, device=x.device)
    index = row.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    return low.scatter_reduce_(0, index, x, "amax")


def plain_spans(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """(row, place) of every item of the spans start[i] .. start[i] + length[i]."""
    row = torch.repeat_interleave(torch.arange(len(start), device=start.device), length)
    before = length.cumsum(0) - length
    return row, torch.arange(row.numel(), device=start.device) - before[row] + start[row]


@nb.njit(nogil=True, cache=True)
def fill_spans(start, length, row, place):
    at = 0
    for i in range(start.shape[0]):
        for j in range(length[i]):
            row[at], place[at] = i, start[i] + j
            at += 1


def fast_spans(start: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    if not len(start) or int(length.min()) < 0:
        return NotImplemented  # type: ignore[return-value]
    row, place = torch.empty(2, int(length.sum()), dtype=torch.long).unbind()
    fill_spans(start.long().contiguous().numpy(), length.long().contiguous().numpy(), row.numpy(), place.numpy())
    return row, place


spans = register("spans", reference=plain_spans, cpu=fast_spans)


def lower_bound(value: Tensor, start: Tensor, end: Tensor, x: Tensor) -> Tensor:
    """The first place in each sorted span start[i] .. end[i] whose value is not below x[i]; end[i] where none is."""
    lo, hi = start.clone(), end.clone()
    while bool((lo < hi).any()):
        middle = (lo + hi) // 2
        below = (lo < hi) & (value[middle.clamp(max=max(value.numel() - 1, 0))] < x)
        lo, hi = torch.where(below, middle + 1, lo), torch.where(below | (lo >= hi), hi, middle)
    return lo


def pointer(count: Tensor) -> Tensor:
    """[n + 1] where each of n segments starts, from how many items each has."""
    return torch.cat([count.new_zeros(1), count.cumsum(0)])


def ranges(ptr: Tensor, items: int, low: int = 0, high: int | None = None) -> list[tuple[int, int]]:
    """Ranges of the segments low..high (all) with about so many items, and no more segments than that, each."""
    n = ptr.numel() - 1 if high is None else high
    cost = ptr[low : n + 1] + torch.arange(low, n + 1, device=ptr.device)
    marks = torch.arange(int(cost[0]), int(cost[-1]) + items, items, device=ptr.device)
    cuts = sorted({*(torch.searchsorted(cost, marks) + low).clamp(max=n).tolist(), low, n})
    return list(pairwise(cuts)) or [(low, low)]


def segment_of(ptr: Tensor, items: int) -> Tensor:
    """[items] the segment of every item, from the segments' pointer."""
    rows = torch.arange(ptr.numel() - 1, device=ptr.device)
    return torch.repeat_interleave(rows, ptr.diff(), output_size=items)
