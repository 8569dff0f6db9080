"""Tracked norms: one running average per node, shared by all its targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.checks import between
from adahop.graph import Graph
from adahop.ops import Odds, Prefix, Scratch, TrackRule
from adahop.policies.base import Policy, sight
from adahop.policies.prefix import PrefixSums
from adahop.storage import MEMORY, Storage

MOST = 32_000  # visits are counted up to here
LEVEL = 256  # nodes whose mean is taken as the level of a step; fewer are averaged with earlier steps


class Tracked(Policy):
    """q_ij in proportion to a_ij sqrt(v_j), v_j an exponential average of |m_j|^2 / level, mixed with `eta` uniform.

    |m_j|^2 = energy / (weight scale)^2 belongs to node j, not to the edge: what one target observes serves all, and the
    learned state takes 6 bytes per node and layer (in a typed graph per relation and source). For draws with
    replacement and systematic ones on the CPU, prefix sums take 8 more per node and 4 per edge, or with sums="blocks"
    12 per node and 1/8 per edge (`PrefixSums`). The average of squares minimises the variance when h_j itself is noisy
    (sampled below, dropout). `level` is the current mean |m|^2: as a model learns, all norms grow together, and a node
    seen long ago must not look small for that reason. v starts at 1, the typical node, which counts as one visit.

    >>> policy = Tracked(Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), layers=1)
    >>> policy.odds(0).node.tolist()
    [1.0, 1.0, 1.0, 1.0]
    """

    learns = True
    square: Tensor
    visits: Tensor
    level: Tensor

    def __init__(
        self,
        graph: Graph,
        layers: int,
        eta: float = 0.05,
        memory: float = 0.2,
        sums: str = "edges",
        storage: Storage = MEMORY,
    ):
        super().__init__(graph, layers, storage)
        self.eta, self.memory = between(eta, 0.0, 0.999, "eta"), between(memory, 0.0, 1.0, "memory")
        n, device = graph.num_sources, graph.device
        self.register_buffer("square", storage.ones(layers, n, device=device))
        self.register_buffer("visits", storage.zeros(layers, n, dtype=torch.int16, device=device))
        self.register_buffer("level", torch.zeros(layers, device=device))  # 0: nothing seen yet
        self.prefix = PrefixSums(graph, layers, storage, sums)
        self.scratch = Scratch(storage.full)

    @property
    def root(self) -> Tensor:
        """[layers, N] the current norms."""
        return self.square.sqrt()

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        for name in ("node", "since"):  # of an earlier form of the sums, which are rebuilt
            state.pop(f"{prefix}copied.{name}", None)
        super()._load_from_state_dict(state, prefix, *more)

    def odds(self, layer: int) -> Odds:
        return Odds(edge=self.graph.relative, node=self.square[layer].sqrt(), eta=self.eta, shift=self.graph.shift)

    def prepare(self, how: str, sizes: Sequence[int]) -> None:
        """With "auto" draws are systematic or shared, and a shared one takes more than k edges of a row."""
        if how in ("systematic", "multinomial", "auto") and self.eta > 0:
            self.prefix.enable(how)
            self.prefix.fan_out = list(sizes) if how == "auto" else None

    def odds_for(self, layer: int, how: str) -> Odds:
        """On the CPU, draws with replacement and systematic ones use prefix sums of somewhat older norms instead of a
        scan; other draws use the current norms."""
        sums = self.prefix.at(layer) if how in ("systematic", "multinomial") else None
        return self.odds(layer) if sums is None else self._squares(self.square[layer], sums)

    def _squares(self, square: Tensor, sums: Prefix | None = None) -> Odds:
        """`odds` with squared norms, for kernels that take the roots of the few that they read."""
        g = self.graph
        return Odds(edge=g.relative, node=square, eta=self.eta, shift=g.shift, root=True, prefix=sums)

    def update(self, layer: int, block: Block, energy: Tensor) -> None:
        state = self.square[layer], self.visits[layer], self.level[layer : layer + 1]
        rule = TrackRule(self.memory, LEVEL, MOST)
        ends, energy = self._ends(block, energy)
        seen = sight(block)
        if ops.track(ends, seen, energy, block.weight, state, rule, self.scratch, self.graph.num_rows):
            self.prefix.visited(layer, seen.row, seen.ptr, self._squares(state[0]))

    def _ends(self, block: Block, energy: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """(n_id, src, dst) as the update takes them, where n_id is the entry of the state of each source."""
        if block.row is None or block.row_ptr is None or self.graph.types is None:
            return (block.n_id, block.src, block.dst), energy
        row = ops.segment_of(block.row_ptr, block.num_edges)
        pair = block.n_id[block.src] + self.graph.types.shift[block.row][row]
        if block.slots:  # pairs in empty slots are ignored, and pairs may repeat
            pair, src = pair.masked_fill(block.scale == 0, 0), torch.arange(block.num_edges, device=pair.device)
        else:
            src, first = ops.in_order(pair)
            pair = pair[first]
        n_id = torch.cat([pair, pair.new_full((1,), -1)])  # no pair is a target
        return (n_id, src, torch.full_like(src, n_id.numel() - 1)), energy.masked_fill(block.is_self(), torch.inf)
