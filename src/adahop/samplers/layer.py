"""Layer-wise sampling: all targets of a layer share one draw of source nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adahop import ops
from adahop.checks import between, flag, one_of
from adahop.graph import Graph
from adahop.ops import Drawn, Near, Rows, random, segment_sum
from adahop.samplers.base import Sampler
from adahop.storage import MEMORY, Storage


class LayerSampler(Sampler):
    """s source nodes per layer; a target keeps all its edges from them, and itself exactly.

    `sizes` holds s, input layer first. scale = count_j / (s q_j) with replacement and 1 / pi_j without, so that
    sum weight * scale * h[src] has the full sum as its mean. Where a layer has no more than s candidates, all come
    exactly. `inner`: a layer's targets are sources too, so edges between targets cost nothing and are taken exactly,
    and only new nodes are drawn; False draws them all, as in the papers.

    With `per_target`, sizes are sources per target of the layer: s grows with the batch, and is what k draws for each
    target would give at most, but every target uses all of them that it is connected to.

    In a typed graph all relations share the draw; sizes may be a dict by node type, a draw each, as HGTLoader's are.

    A new sampler implements `odds(layer, dst, near)`, one number per candidate.
    """

    sized_by = ("type",)

    def __init__(
        self,
        graph: Graph,
        sizes: Sequence[int],
        seed: int = 0,
        draw: str = "systematic",
        inner: bool = True,
        per_target: bool = False,
        storage: Storage = MEMORY,
    ):
        super().__init__(graph, sizes, seed, storage)
        self.how, self.inner = one_of(draw, ops.DRAWS, "draw"), flag(inner, "inner")
        self.per_target = flag(per_target, "per_target")

    def odds(self, layer: int, dst: Tensor, near: Near) -> Tensor:
        raise NotImplementedError

    def uniform(self) -> LayerSampler:
        return UniformLayer(self.graph, self.sizes, draw="multinomial", inner=self.inner, per_target=self.per_target)

    def near(self, rows: Rows) -> Near:
        """The rows' edges to true neighbours, and the candidates."""
        return ops.near(self.graph.edges, rows, rows.targets, self.inner, self._scratch)

    def chances(self, layer: int, dst: Tensor, near: Near, key: int) -> tuple[Tensor, Tensor]:
        """(prob, scale) of every candidate, scale 0 where it was not drawn."""
        return self.pick(layer, dst, self.odds(layer, dst, near), near.nodes, key)

    def pick(self, layer: int, dst: Tensor, odds: Tensor, nodes: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """The layer's size of some nodes, or of those of each type, by their odds."""
        times = dst.numel() if self.per_target else 1
        if self.sized.source is None or self.graph.types is None:
            return ops.pick(odds, multiple(self.sizes[layer], times), self.how, key)
        kind = self.graph.types.type_of(nodes)
        prob, scale = (torch.zeros(nodes.numel(), device=nodes.device) for _ in range(2))
        for t, size in enumerate(self.sized.source[layer].tolist()):
            own = kind == t
            if size != 0:
                prob[own], scale[own] = ops.pick(odds[own], multiple(size, times), self.how, random.key(key, t))
        return prob, scale

    def expand(self, layer: int, rows: Rows, key: int | random.Stream) -> Drawn:
        assert isinstance(key, int)
        near = self.near(rows)
        return ops.keep(self.graph.edges, rows, near, *self.chances(layer, rows.targets, near, key))

    def weight(self, place: Tensor) -> Tensor:
        """The weights at some places of the CSR, as float64."""
        w = self.graph.weight
        return torch.ones(place.numel(), dtype=torch.double, device=place.device) if w is None else w[place].double()


def multiple(size: int, times: int) -> int:
    """size * times; -1, which means all, stays."""
    return size if size < 0 else size * times


class UniformLayer(LayerSampler):
    """Equal odds for all candidates: the baseline of the layer-wise samplers."""

    def odds(self, layer: int, dst: Tensor, near: Near) -> Tensor:
        return torch.ones(near.nodes.numel(), dtype=torch.double, device=dst.device)


class FastGCN(LayerSampler):
    """q_j in proportion to (sum over all i of a_ij^2)^power, over the whole graph, the same for every layer and batch.

    From Chen, Ma, Xiao, "FastGCN" (2018), Algorithm 1, whose power is 1 and whose draw is "multinomial"; 1/2 minimises
    the variance when all |h| are equal. Self-loops are exact here and do not enter q. Few of the drawn nodes may be
    neighbours of the targets: this is how the method works, and it is still unbiased. Memory: 8 bytes per node.

    >>> sampler = FastGCN(Graph.from_edge_index([[1, 2, 2], [0, 0, 1]]), [1])
    >>> sampler.importance.tolist()
    [0.0, 1.0, 2.0]
    """

    importance: Tensor

    def __init__(self, graph: Graph, sizes: Sequence[int], seed: int = 0, *, power: float = 1.0, **options: Any):
        super().__init__(graph, sizes, seed, **options)
        src = graph.indices.long()
        square = self.weight(torch.arange(graph.num_edges, device=graph.device)).square()
        square = square.masked_fill(src == graph.dst(), 0.0)
        column = segment_sum(square, src, graph.num_nodes)
        self.register_buffer("importance", column.pow(between(power, 0.01, 4.0, "power")), persistent=False)

    def chances(self, layer: int, dst: Tensor, near: Near, key: int) -> tuple[Tensor, Tensor]:
        everyone = torch.arange(self.graph.num_nodes, device=near.nodes.device)
        prob, scale = self.pick(layer, dst, self.importance, everyone, key)
        return prob[near.nodes], scale[near.nodes]


class Ladies(LayerSampler):
    """q_j in proportion to (sum over the targets i of a_ij^2)^power: only neighbours of the layer above can come.

    From Zou et al., "LADIES" (2019), Algorithm 1, whose power is 1 and whose draw is "multinomial". draw="poisson",
    where candidates are drawn independently with pi_j = min(1, c q_j), c such that sum pi = s, is PLADIES (Balin and
    Catalyurek 2023, Sec. 3.1). 1/2 minimises the variance sum_j sum_i a_ij^2 |h_j|^2 / pi_j when all |h| are equal.
    The original divides each row by its sum afterwards, which is biased and left out.

    >>> sampler = Ladies(Graph.from_edge_index([[1, 2, 3, 3], [0, 0, 0, 4]]), [2])
    >>> block = sampler.sample([0, 4])[0]
    >>> block.num_src - block.num_dst, bool((block.n_id == 3).any())
    (2, True)
    """

    def __init__(self, graph: Graph, sizes: Sequence[int], seed: int = 0, *, power: float = 1.0, **options: Any):
        super().__init__(graph, sizes, seed, **options)
        self.power = between(power, 0.01, 4.0, "power")

    def odds(self, layer: int, dst: Tensor, near: Near) -> Tensor:
        return near.total(self.weight(near.place).square()).pow(self.power)
