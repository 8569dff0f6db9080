"""Prefix sums of each row's inclusion probabilities, renewed from time to time, for draws without a scan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adahop import ops
from adahop.checks import one_of
from adahop.graph import Graph
from adahop.ops import Odds, Prefix
from adahop.storage import MEMORY, Storage

OFTEN = 2  # a row's sums are renewed once 1/OFTEN as many edges were drawn from it as it has
WIDE = {"edges": 1, "blocks": 32}  # edges per sum


def empty_prefix(graph: Graph, storage: Storage, wide: int = 1) -> Prefix:
    """Sums of no row yet: draws are uniform. A row takes memory only once it has sums."""
    many = graph.num_edges if wide == 1 else graph.num_edges // wide + graph.num_rows + 1
    table = ops.large_pages(storage.sparse(many, dtype=torch.int32), now=False)
    return Prefix(table, storage.sparse(2 * graph.num_rows, dtype=torch.int32), wide)


def renew_all(graph: Graph, k: int, odds: Odds, prefix: Prefix) -> None:
    """Renew the sums of all rows with more than k neighbours: the others are taken whole."""
    rows = (graph.edges.last - graph.edges.first > k).nonzero().flatten()
    ops.renew(rows, torch.full_like(rows, k), graph.edges, odds, prefix)


class PrefixSums(nn.Module):
    """Prefix sums of each row's inclusion probabilities per layer, from which k edges are drawn in O(k log n),
    with replacement or systematically.

    While learning, a row's sums are renewed after n / (OFTEN k) visits, so that OFTEN k edges are read per visit
    whatever the degree. Before its first renewal, a row is drawn from uniformly. Memory: 4 bytes per edge and 8 per
    node, per layer; rows that were never renewed and layers that are never drawn take only address space, and nothing
    in a checkpoint. On a GPU there are none, as a scan of the row is fast there.

    sums="blocks" stores a sum for every 32 edges only: 1/8 byte per edge and 12 per node, per layer. A draw then reads
    the odds of the 32 edges of its block again, which takes longer.
    """

    def __init__(self, graph: Graph, layers: int, storage: Storage = MEMORY, sums: str = "edges"):
        super().__init__()
        self.wide = WIDE[one_of(sums, WIDE, "sums")]
        self.graph, self.layers, self.storage = graph, layers, storage
        self.enabled, self.without_replacement = False, True
        self.fan_out: list[int] | None = None  # edges that a row draws per layer, where blocks may hold more
        for layer in range(layers):
            self.register_buffer(f"table{layer}", None)
            self.register_buffer(f"upto{layer}", None)

    def enable(self, how: str) -> None:
        """Have sums for this kind of draw from now on, where this device uses them."""
        self.without_replacement = how != "multinomial"  # probabilities are then capped
        self._make()

    def _make(self) -> None:
        made, self.enabled = self._buffers["upto0"] is not None, True
        if not made and ops.goes_by_sums(self.graph.indptr):
            for layer in range(self.layers):
                table, upto, _ = empty_prefix(self.graph, self.storage, self.wide)
                setattr(self, f"table{layer}", table)
                setattr(self, f"upto{layer}", upto)

    def at(self, layer: int) -> Prefix | None:
        """The sums of a layer; None where there are none."""
        table: Tensor | None = getattr(self, f"table{layer}")
        return None if table is None else Prefix(table, getattr(self, f"upto{layer}"), self.wide)

    def visited(self, layer: int, row: Tensor, ptr: Tensor, odds: Odds) -> None:
        """Called after an update with a block's rows: renews the sums of those that are due."""
        if (prefix := self.at(layer)) is not None:
            if self.fan_out is not None and self.fan_out[layer] >= 0:
                edges = self.graph.edges
                ptr = ops.pointer(torch.minimum(ptr.diff(), edges.first[row] - edges.begin[row] + self.fan_out[layer]))
            ops.visit(row, ptr, self.graph.edges, OFTEN, self.without_replacement, odds, prefix)

    def renew(self, layer: int, k: int, odds: Odds) -> None:
        """Renew the sums of all rows with more than k neighbours."""
        if (prefix := self.at(layer)) is not None:
            renew_all(self.graph, k if self.without_replacement else 1, odds, prefix)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for layer in range(self.layers):
            upto: Tensor | None = getattr(self, f"upto{layer}")
            if upto is not None and not bool(upto[::2].any()):
                del destination[f"{prefix}table{layer}"]

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, strict: bool, missing: list[str],
                              *more: Any) -> None:  # fmt: skip
        absent: list[str] = []
        if f"{prefix}upto0" in state:
            self._make()
        super()._load_from_state_dict(state, prefix, meta, strict, absent, *more)
        for layer in range(self.layers):
            if f"{prefix}upto{layer}" in absent:  # a state of before there were sums: no row has any
                getattr(self, f"upto{layer}").zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> PrefixSums:
        device = fn(torch.zeros(0)).device
        if device != self.graph.device:
            for name in self._buffers:
                setattr(self, name, None)
            self.graph = self.graph.to(device)
            if self.enabled:
                self._make()
            return self
        super()._apply(fn, recurse)
        return self
