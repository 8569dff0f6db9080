"""A sum tree a node over the weights of its edges: 16 children an entry, each entry's children in one cache line.

The leaves are the weights themselves, in CSR order, in blocks of 16 that start at places divisible by 16. Above them
the sums of 16, of 256, ..., until TOP entries or fewer are left. A node of TOP edges or fewer keeps no sums at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adahop.ops import cpu_tree
from adahop.ops.cpu_tree import TOP, WIDE
from adahop.ops.threads import over


def lay_out(indptr: Tensor, first: Tensor) -> tuple[Tensor, int]:
    """([N] where a node's sums start, in lines of 16, or -1; lines in all)."""
    last = indptr[1:]
    blocks = torch.where(last > first, ((last - 1) // WIDE) - first // WIDE + 1, 0)
    size = torch.where(last - first > TOP, blocks, 0)
    lines = torch.zeros_like(size)
    while bool((size > 0).any()):
        lines += -(-size // WIDE)
        size = torch.where(size > TOP, -(-size // WIDE), 0)
    start = torch.where(lines > 0, lines.cumsum(0) - lines, -1)
    return start.int(), int(lines.sum())


def build(indptr: Tensor, first: Tensor, weight: Tensor, start: Tensor, sums: Tensor) -> None:
    """Fill the sums from the weights."""
    given = [t.numpy() for t in (indptr, first, weight, start, sums)]
    over(cpu_tree.build, first.numel(), *given, work=given[0])
