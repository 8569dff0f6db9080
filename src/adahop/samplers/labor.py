"""LABOR: node-wise sampling whose targets share their random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adahop import ops
from adahop.checks import count
from adahop.graph import Graph
from adahop.ops import Drawn, Rows, random
from adahop.samplers.base import Sampler
from adahop.samplers.neighbor import NeighborSampler


class Labor(Sampler):
    """Target i takes its neighbour j where r_j < pi_ij = min(1, c_i pi_j), with one r_j per source; scale = 1/pi_ij.

    refine=0 (LABOR-0): pi_ij = min(1, k/n), Poisson draws of k on average. refine=r (LABOR-r): r times over, pi_j is
    multiplied by the largest c_i of j's targets, with c_i such that each target keeps the variance of k uniform draws:
    sum_j 1/pi_ij = n^2/k. Fewer sources in all for the same variance; past r = 1 little is gained. Layer-neighbor
    sampling (Balin and Catalyurek 2023). Unbiased for any weights; no state. In a typed graph all relations share the
    r_j of a source. dependent=d: so do d steps in a row, whose batches then have more nodes in common (dependent
    batches): less to read where rows are cached.

    >>> sampler = Labor(Graph.from_edge_index([[2, 3, 4, 2, 3, 4], [0, 0, 0, 1, 1, 1]]), [2])
    >>> block = sampler.sample([0, 1])[0]
    >>> bool((block.src[block.dst == 0] == block.src[block.dst == 1]).all())
    True
    """

    per_node = True
    sized_by = ("relation",)

    def __init__(
        self, graph: Graph, sizes: Sequence[int], seed: int = 0, *, refine: int = 1, dependent: int = 1, **options: Any
    ):
        super().__init__(graph, sizes, seed, **options)
        self.refine, self.dependent = count(refine, 0, "refine"), count(dependent, 1, "dependent")

    def by_target(self) -> NeighborSampler:
        other = NeighborSampler(self.graph, self.sizes, None, "poisson")
        other.seed, other.skip = self.seed, self.skip
        return other

    def key(self, layer: int) -> int:
        return random.key(self.seed, int(self.step) // self.dependent, layer, *self.salt)

    def expand(self, layer: int, rows: Rows, key: int | random.Stream) -> Drawn:
        assert isinstance(key, int)
        k = self.sized.of(layer, rows)
        return ops.labor(self.graph.edges, rows, k, self.refine, self.graph.num_nodes, key)
