"""LABOR: node-wise sampling whose targets share their random numbers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.checks import count
from adahop.graph import Graph
from adahop.samplers.base import Sampler
from adahop.storage import MEMORY, Storage


class Labor(Sampler):
    """Target i takes its neighbour j where r_j < pi_ij = min(1, c_i pi_j), with one r_j a source; scale = 1/pi_ij.

    refine=0 (LABOR-0): pi_ij = min(1, k/n), Poisson draws of k on average. refine=r (LABOR-r): r times over, pi_j is
    multiplied by the largest c_i of j's targets, with c_i such that each target keeps the variance of k uniform draws:
    sum_j 1/pi_ij = n^2/k. Fewer sources in all for the same variance; past r = 1 little is gained. Layer-neighbor
    sampling (Balin and Catalyurek 2023). Unbiased for any weights; no state.

    >>> sampler = Labor(Graph.from_edge_index([[2, 3, 4, 2, 3, 4], [0, 0, 0, 1, 1, 1]]), [2])
    >>> block = sampler.sample([0, 1])[0]
    >>> bool((block.src[block.dst == 0] == block.src[block.dst == 1]).all())
    True
    """

    def __init__(self, graph: Graph, sizes: Sequence[int], seed: int = 0, refine: int = 1, storage: Storage = MEMORY):
        super().__init__(graph, sizes, seed, storage)
        self.refine = count(refine, 0, "refine")

    @property
    def apart(self) -> bool:
        return self.graph.device.type == "cpu"

    def draw(self, seeds: Tensor) -> list[Block]:
        g, dst, blocks = self.graph, seeds, []
        for layer in reversed(range(len(self.sizes))):
            drawn = ops.labor(g.edges, g.rows(dst), self.sizes[layer], self.refine, g.num_nodes, self.key(layer))
            blocks.append(self.block(dst, drawn))
            dst = blocks[-1].n_id
        return blocks[::-1]
