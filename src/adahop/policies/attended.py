"""Odds from attention over all neighbours, whose scores are computed from stored numbers per node and head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from adahop import ops
from adahop.block import Block
from adahop.checks import InputError, between, count
from adahop.graph import Graph
from adahop.messages import scores
from adahop.ops import Drawn, Edges, Near, Odds, Rows, Slots, random, spans
from adahop.policies.tracked import Tracked
from adahop.storage import MEMORY, Storage


class Attended(Tracked):
    """q_ij in proportion to a_ij sqrt(v_j), for GAT: a_ij = softmax over all neighbours of act(s_i + t_j).

    s and t, as they were when a node was last a target or a source, are kept beside the norm v of `Tracked`: 8 bytes
    per node and layer, and 8 per head. A node never seen has the mean of the others. A draw reads n numbers per target.

    >>> policy = Attended(Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), layers=1)
    >>> policy.chances(0, torch.tensor([0]))[2].tolist()
    [0.3333333432674408, 0.3333333432674408, 0.3333333432674408]
    """

    has_slots = True
    reads = staticmethod(scores)
    needs = ("heads", "slope")
    scores: Tensor
    known: Tensor
    typical: Tensor

    def __init__(self, graph: Graph, layers: int, heads: int = 1, slope: float = 0.2, eta: float = 0.05,
                 memory: float = 0.2, storage: Storage = MEMORY):  # fmt: skip
        if graph.types is not None and heads:
            kinds = len(graph.types.relations)
            raise InputError(f"`policy` must be another than attended for a graph with several relations, got {kinds}")
        super().__init__(graph, layers, eta, memory, storage=storage)
        self.heads, self.slope = count(heads, 0, "heads"), between(slope, 0.0, 1.0, "slope")
        if heads == 0:  # a model without attention scores: a_ij is the graph's weight
            self.reads, self.own_draw = Tracked.reads, False  # type: ignore[assignment]
        n, device = graph.num_nodes, graph.device
        self.register_buffer("scores", storage.zeros(2, layers, n, heads, device=device))  # s, then t
        self.register_buffer("known", storage.zeros(2, layers, n, dtype=torch.bool, device=device))
        self.register_buffer("typical", torch.zeros(2, layers, heads, device=device))

    def prepare(self, how: str, sizes: Sequence[int]) -> None:
        """Nothing to prepare where it has heads, as it draws by itself."""
        if self.heads == 0:
            super().prepare(how, sizes)

    def places(self, layer: int, rows: Rows, k: Tensor, how: str, key: int | random.Stream) -> Drawn | None:
        """Copy the targets' edges into one array, and draw from it by the odds of each edge."""
        if self.heads == 0:
            return super().places(layer, rows, k, how, key)
        edges, laid, chance, place = self._laid(layer, rows.row)
        drawn = ops.draw(edges, laid, k, how, Odds(edge=chance, eta=self.eta), key)
        return drawn._replace(pos=place[drawn.pos])

    def inclusion(self, layer: int, rows: Rows, near: Near, k: Tensor) -> Tensor:
        if self.heads == 0:
            return super().inclusion(layer, rows, near, k)
        edges, laid, chance, _ = self._laid(layer, rows.row)
        _, place = spans(edges.first, edges.last - edges.first)
        return ops.chances(edges, laid, near._replace(place=place), k, Odds(edge=chance, eta=self.eta))

    def slots(self, layer: int, rows: Rows, k: int, how: str, key: random.Stream, loops: int) -> Slots:
        edges, laid, chance, place = self._laid(layer, rows.row)
        one = torch.zeros(1, dtype=torch.long, device=place.device)  # a place for empty slots, even without edges
        edges = edges._replace(indices=torch.cat([edges.indices, one.to(edges.indices.dtype)]))
        odds = Odds(edge=torch.cat([chance, chance.new_ones(1)]), eta=self.eta)
        found: Slots = ops.padded(edges, laid, rows.row, k, loops, how, odds, key)
        pos = torch.cat([place, one])[found.pos]
        weight = found.weight if self.graph.weight is None else self.graph.weight[pos] * (found.scale > 0)
        return found._replace(pos=pos, weight=weight)

    def _laid(self, layer: int, dst: Tensor) -> tuple[Edges, Rows, Tensor, Tensor]:
        """The targets' edges in one array, their rows, the odds of each edge and its place in the graph."""
        g = self.graph
        _, place, chance = self.chances(layer, dst)
        ptr = ops.pointer(g.indptr[dst + 1] - g.indptr[dst])
        after = ptr[:-1] + (g.first[dst] - g.indptr[dst])
        edges = Edges(ptr[:-1], after, ptr[1:], g.indices[place])
        return edges, Rows(torch.arange(dst.numel(), device=dst.device)), chance, place

    def chances(self, layer: int, dst: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(row, place, odds) of every edge of the targets; the odds are those of its attention times its norm."""
        g = self.graph
        row, place = spans(g.indptr[dst], g.indptr[dst + 1] - g.indptr[dst])
        src = g.indices[place].long()
        score = leaky_relu(self._score(0, layer, dst)[row] + self._score(1, layer, src), self.slope)
        share = ops.softmax(score, row, dst.numel())
        return row, place, share.square().sum(1).sqrt() * self.square[layer][src].sqrt()

    def _score(self, end: int, layer: int, node: Tensor) -> Tensor:
        known = self.known[end, layer][node].unsqueeze(1)
        return torch.where(known, self.scores[end, layer][node], self.typical[end, layer])

    @torch.no_grad()
    def update(self, layer: int, block: Block, energy: Tensor) -> None:
        if energy.numel() == 0:
            return
        if self.heads == 0:
            return super().update(layer, block, energy)
        norm, s, t = energy[:, 0], energy[:, 1 : 1 + self.heads], energy[:, 1 + self.heads :]
        for end, node, score in ((0, block.n_id[block.dst], s), (1, block.n_id[block.src], t)):
            self.scores[end, layer, node] = score
            self.known[end, layer].index_fill_(0, node, True)  # an assigned number would come from the host's memory
            self.typical[end, layer].lerp_(_mean(score, block), 0.1)
        super().update(layer, block, norm * (block.weight * block.scale).square())


def _mean(score: Tensor, block: Block) -> Tensor:
    """[H] the mean over the edges of a block, without empty slots."""
    if not block.slots:
        return score.mean(0)
    used = (block.scale > 0).unsqueeze(1)
    return (score * used).sum(0) / used.sum().clamp(min=1)
