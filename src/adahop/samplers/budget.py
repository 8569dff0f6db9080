"""Budget: a total number of draws per layer, spread over the targets so that the variance is lowest."""

from __future__ import annotations

import torch
from torch import Tensor

from adahop.block import Block
from adahop.ops import random, segment_sum

ROUNDS = 60  # of the bisection: enough for every bit that matters of a double


def spread(total: int, strength: Tensor, most: Tensor, key: int) -> Tensor:
    """How many each target draws: k_i in proportion to strength_i, at least 1 and at most most_i, `total` in all.

    With V_i = strength_i^2 the variance of one draw, k_i proportional to strength_i minimises sum V_i / k_i. What a
    target cannot use goes to the others. Fractions are rounded by one shared random offset: k_i is the floor or the
    ceiling of its share, and the sum is exact. Where `total` is less than the targets are, each still draws 1.

    >>> spread(7, torch.tensor([1.0, 5.0, 1.0]), torch.tensor([9, 4, 9]), key=0).tolist()
    [2, 4, 1]
    """
    if most.numel() == 0:
        return most
    most = most.double()
    least = most.clamp(max=1.0)
    share = strength.double().clamp(min=0.0).nan_to_num(0.0)
    share = share / share.max().clamp(min=1e-300) + 1e-9  # equal shares where all are 0
    low, high = torch.zeros_like(share[:1]), (most / share).max().reshape(1)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        enough = torch.minimum(torch.maximum(share * middle, least), most).sum() >= total
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    ideal = torch.minimum(torch.maximum(share * high, least), most)
    offset = random.unit(key, torch.zeros(1, dtype=torch.long, device=most.device), 0)
    ends = (ideal.cumsum(0) + offset).floor()
    many = torch.diff(ends, prepend=torch.zeros_like(ends[:1]))
    return torch.minimum(torch.maximum(many, least), most).long()


def passed_down(block: Block, weighs: Tensor) -> Tensor:
    """The weight of an error in each source: the root of the sum of its squared coefficients in the sums above.

    A target without a self-loop is assumed to reach its own next h directly, as in SAGE, with weight 1.
    """
    coef = block.weight * block.scale * weighs[block.dst]
    square = segment_sum(coef.square(), block.src, block.num_src)
    own = segment_sum(block.is_self().float(), block.dst, block.num_dst)  # self-loops are always drawn
    square[: block.num_dst] += torch.where(own == 0, weighs.square(), torch.zeros_like(weighs))
    return square.sqrt()
