"""What the operations speak of: the odds of a policy, the places drawn, the names of the draws."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

DRAWS = {"multinomial": 0, "systematic": 1, "depround": 2, "poisson": 3}
HIGH, LOW, SPAN = 16.0, -24.0, 16.0  # a weight outside e^[LOW, HIGH] has its segment divided, to e^[-SPAN, 0]


class Tree(NamedTuple):
    """Sums over a node's weights, see `adahop.ops.tree`; they spare the CPU the scan of a neighbourhood."""

    start: Tensor  # [N] int32, the line where a node's sums start, or -1
    sums: Tensor  # [lines * 16]


class Bound(NamedTuple):
    """What draws by rejection need of x = edge * node[source], see `adahop.ops.cpu_reject`."""

    total: Tensor  # [N] sum of x over a node's neighbours
    reach: Tensor  # [N] int16: n max x / sum x


class Odds(NamedTuple):
    """What a policy says: edge j of a node is drawn in proportion (1 - eta) w_j / sum w + eta / n.

    w = edge (or exp(edge) where `log`) times node[source]; what is None counts as 1, so `Odds()` is uniform.
    """

    edge: Tensor | None = None
    node: Tensor | None = None
    eta: float = 0.0
    log: bool = False
    bound: Bound | None = None  # sums and maxima of `edge` times `node`, where they are kept
    tree: Tree | None = None  # the sums of `edge`, where they are kept; the weights are then positive


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


class Hop(NamedTuple):
    """One layer of drawn edges with its nodes numbered, targets first, then sources as they first appear."""

    drawn: Drawn
    n_id: Tensor
    edge_index: Tensor
    e_id: Tensor
    weight: Tensor
