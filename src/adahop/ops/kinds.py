"""What the operations speak of: the odds of a policy, the places drawn, the names of the draws."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

DRAWS = {"multinomial": 0, "systematic": 1, "depround": 2, "poisson": 3}
HIGH, LOW, SPAN = 16.0, -24.0, 16.0  # a log-weight outside [LOW, HIGH] has its segment centred again, to [-SPAN, 0]


class Odds(NamedTuple):
    """What a policy says: edge j of a node is drawn in proportion (1 - eta) w_j / sum w + eta / n.

    w = edge (or exp(edge) where `log`) times node[source]; what is None counts as 1, so `Odds()` is uniform.
    """

    edge: Tensor | None = None
    node: Tensor | None = None
    eta: float = 0.0
    log: bool = False


class Drawn(NamedTuple):
    """Places in the CSR, grouped by target, each with its probability and scale."""

    ptr: Tensor
    pos: Tensor
    prob: Tensor
    scale: Tensor


class Flat(NamedTuple):
    """Drawn edges in slots, `loops` + `most` a target: a shape that chance does not change.

    n_id is the targets, then the source of every drawn slot; the other tensors hold a number a slot. An empty slot has
    scale and weight 0, prob 1 and the target itself for its source.
    """

    n_id: Tensor
    pos: Tensor
    prob: Tensor
    scale: Tensor
    weight: Tensor
    rows: int
    loops: int
    most: int
