"""Copied: numbers of nodes as they were a while ago, with what makes draws by them quick."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adahop import ops
from adahop.graph import Graph, OnGraph
from adahop.ops import Bound, Odds
from adahop.storage import MEMORY, Storage

OFTEN = 8  # a copy is renewed when an eighth as many edges were learned from as the graph has


class Copied(OnGraph):
    """A copy of one number per node and layer, each node's sum over its neighbours and how far the largest stands out.

    Draws with replacement go by the copy: their probabilities are exactly known, though a little old, and nothing is
    scanned. It is renewed in one pass over the edges whenever enough was learned since; the count of edges decides, so
    runs with equal seeds stay equal. Memory: 10 bytes per node and layer, from `open` on.
    """

    node: Tensor
    total: Tensor
    reach: Tensor
    since: Tensor

    def __init__(self, graph: Graph, storage: Storage = MEMORY):
        super().__init__()
        self.graph, self.storage = graph, storage
        for name in ("node", "total", "reach", "since"):
            self.register_buffer(name, None, persistent=name in ("node", "since"))

    @property
    def is_open(self) -> bool:
        return self.node is not None

    def open(self, square: Tensor) -> None:
        """Keep a copy of the roots of `square` [layers, N] from now on."""
        if self.is_open:
            return
        shape, device = (len(square), self.graph.num_rows), square.device
        self.node = torch.sqrt(square, out=self.storage.zeros(*square.shape, device=device))
        self.total = self.storage.zeros(*shape, device=device)
        self.reach = self.storage.zeros(*shape, dtype=torch.int16, device=device)
        self.since = torch.zeros(len(square), dtype=torch.int64, device=device)
        self.sum_up()

    def odds(self, layer: int, eta: float) -> Odds:
        bound = Bound(self.total[layer], self.reach[layer])
        return Odds(edge=self.graph.weight, node=self.node[layer], eta=eta, bound=bound, shift=self.graph.shift)

    def learned(self, layer: int, edges: int, square: Tensor) -> None:
        """So many edges taught something; the roots of `square` are copied when it is time."""
        if not self.is_open:
            return
        self.since[layer] += edges
        if OFTEN * int(self.since[layer]) >= self.graph.num_edges:
            self.since[layer] = 0
            self.node[layer] = square.sqrt()
            self.sum_up(layer)

    def sum_up(self, layer: int | None = None) -> None:
        """Sums and reaches again from the copy."""
        for i in range(len(self.node) if self.is_open else 0) if layer is None else (layer,):
            ops.bound(self.graph.edges, self.node[i], self.graph.shift, Bound(self.total[i], self.reach[i]))

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        if f"{prefix}node" in state:
            self.open(torch.ones_like(state[f"{prefix}node"], device=self.graph.device))
        super()._load_from_state_dict(state, prefix, *more)
        self.sum_up()

    def moved(self) -> None:
        self.sum_up()
