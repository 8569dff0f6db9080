"""Arms: the weights of bandits whose arms are a node's neighbours, and sums of them for fast draws."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adahop import ops
from adahop.graph import Graph, OnGraph
from adahop.ops import Odds, Scratch, Sight, Tree, Weights
from adahop.ops.learning import tree
from adahop.policies.prefix import PrefixSums
from adahop.storage import MEMORY, Storage


class Arms(OnGraph):
    """One weight per edge and state, 1 at first. Memory: 4 bytes per edge and about 0.3 for the sums, per state; with
    systematic draws 4 (or 1/8) for prefix sums instead, see `PrefixSums`.

    >>> arms = Arms(Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), states=1)
    >>> arms.odds(0, eta=0.1).edge.tolist()
    [1.0, 1.0, 1.0]
    """

    weight: Tensor
    start: Tensor
    sums: Tensor

    def __init__(self, graph: Graph, states: int, storage: Storage = MEMORY, sums: str = "edges"):
        super().__init__()
        self.graph, self.storage = graph, storage
        start, lines = tree.lay_out(graph.edges.first, graph.edges.last)
        self.register_buffer("weight", ops.large_pages(self._padded_ones(states)))
        self.register_buffer("start", start, persistent=False)
        trees = storage.zeros(states, lines * tree.WIDE, device=graph.device)
        self.register_buffer("sums", ops.large_pages(trees), persistent=False)
        self.scratch, self.prefix = Scratch(storage.full), PrefixSums(graph, states, storage, sums)
        self.sum_up()

    def _padded_ones(self, states: int) -> Tensor:
        """Weights of 1, each state followed by a cache line or more: kernels read whole lines."""
        line, edges = tree.WIDE, self.graph.num_edges
        return self.storage.ones(states, (edges // line + 2) * line, device=self.graph.device)[:, :edges]

    def use_prefix_sums(self, how: str) -> None:
        """Draw by prefix sums where this device uses them; the sum trees are then not updated any more."""
        self.prefix.enable(how)
        if self.prefix.at(0) is not None:
            self.start.fill_(-1)
            self.sums = self.sums.new_zeros(len(self.sums), 0)

    def odds(self, state: int, eta: float) -> Odds:
        weight, sums = self.weights(state)
        return Odds(edge=weight, eta=eta, tree=sums if self.prefix.at(state) is None else None)

    def odds_for(self, state: int, eta: float, how: str) -> Odds:
        """On the CPU, systematic draws use prefix sums of somewhat older weights, without a scan of the row."""
        return self.odds(state, eta)._replace(prefix=self.prefix.at(state) if how == "systematic" else None)

    def visited(self, state: int, row: Tensor, ptr: Tensor, eta: float) -> None:
        """Called after an update of the weights of a block's rows."""
        self.prefix.visited(state, row, ptr, Odds(edge=self.weight[state], eta=eta))

    def weights(self, state: int) -> Weights:
        return Weights(self.weight[state], Tree(self.start, self.sums[state]))

    def grow(self, state: int, sight: Sight, gain: Tensor) -> None:
        """weight *= exp(gain) at some places, grouped by row."""
        ops.grow(sight, gain, self.graph.edges, self.weights(state), self.scratch)

    def put(self, state: int | slice, weight: Tensor | float) -> None:
        """Set the weights of all edges of a state, in the order of the CSR."""
        self.weight[state] = weight
        self.sum_up()

    def sum_up(self) -> None:
        """Rebuild the sum trees after weights were written from outside."""
        edges = self.graph.edges
        for s in range(len(self.weight)):
            tree.build(edges.first, edges.last, self.weight[s], Tree(self.start, self.sums[s]))

    def _load_from_state_dict(self, *given: Any, **more: Any) -> None:
        super()._load_from_state_dict(*given, **more)
        self.sum_up()

    def moved(self) -> None:
        if self.weight.stride(0) < self.graph.num_edges + tree.WIDE:  # moving a tensor drops its padding
            self.weight = self._padded_ones(len(self.weight)).copy_(self.weight)
        self.sum_up()
