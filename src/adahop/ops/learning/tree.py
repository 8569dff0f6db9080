"""A sum tree per row over the weights of its edges: 16 children an entry, each entry's children in one cache line.

The leaves are the weights themselves, in the order of the places, in blocks of 16 that start at places divisible by 16.
Above them the sums of 16, of 256, ..., until TOP entries or fewer are left. A row of TOP edges or fewer keeps no sums.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from adahop.ops.simd import kernel, part, sum16, sum_part
from adahop.ops.threads import over
from adahop.ops.types import Tree

WIDE = 16  # children an entry: a cache line of float32
TOP = 128  # entries that the highest level may have, and leaves up to which a node keeps no sums at all


@part
def blocks(a, b):
    """How many blocks of leaves the segment a..b touches."""
    return (b - 1) // WIDE - a // WIDE + 1


@part
def highest(a, b, line):
    """(number, place, size) of the highest level of a segment's tree, and the place of the one below it."""
    top, o, n, below = 1, np.int64(line) * WIDE, blocks(a, b), 0
    while n > TOP:
        lines = (n + WIDE - 1) // WIDE
        top, o, n, below = top + 1, o + lines * WIDE, lines, o
    return top, o, n, below


@part
def level(number, a, b, line):
    """(place, size) of a level of a segment's tree, and the place of the one below it; the sums' lowest is 1."""
    o, n, below = np.int64(line) * WIDE, blocks(a, b), 0
    for _ in range(number - 1):
        lines = (n + WIDE - 1) // WIDE
        o, n, below = o + lines * WIDE, lines, o
    return o, n, below


@part
def block_sum(w, a, b, i):
    """The sum of what the segment a..b has of the i-th line of leaves."""
    o = i * WIDE
    return sum_part(w, o, a - o, b - o)


@part
def build_one(a, b, line, w, sums):
    first, top = a // WIDE, highest(a, b, line)[0]
    o, n, _ = level(1, a, b, line)
    for i in range(n):
        sums[o + i] = block_sum(w, a, b, first + i)
    for l in range(2, top + 1):
        o, n, below = level(l, a, b, line)
        for i in range(n):
            sums[o + i] = sum16(sums, below + i * WIDE)


@kernel
def build_rows(lo, hi, first, last, w, start, sums):
    for v in range(lo, hi):
        if start[v] >= 0:
            build_one(first[v], last[v], start[v], w, sums)


def lay_out(first: Tensor, last: Tensor) -> tuple[Tensor, int]:
    """([R] where a row's sums start, in lines of 16, or -1; lines in all)."""
    blocks_of = torch.where(last > first, ((last - 1) // WIDE) - first // WIDE + 1, 0)
    size = torch.where(last - first > TOP, blocks_of, 0)
    lines = torch.zeros_like(size)
    while bool((size > 0).any()):
        lines += -(-size // WIDE)
        size = torch.where(size > TOP, -(-size // WIDE), 0)
    start = torch.where(lines > 0, lines.cumsum(0) - lines, -1)
    return start.int(), int(lines.sum())


def build(first: Tensor, last: Tensor, weight: Tensor, tree: Tree) -> None:
    """Fill the sums from the weights; only the CPU draws by them."""
    if weight.is_cpu:
        given = [t.numpy() for t in (first, last, weight, *tree)]
        work = np.concatenate([given[0][:1], given[1]])
        over(build_rows, first.numel(), *given, work=work)
