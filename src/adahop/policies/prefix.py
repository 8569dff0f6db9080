"""Inclusion probabilities as they were a while ago, in the form that makes draws quick."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adahop import ops
from adahop.checks import one_of
from adahop.graph import Graph
from adahop.ops import Odds, Prefix
from adahop.storage import MEMORY, Storage

OFTEN = 2  # a row's sums are made again when, since the last time, 1/OFTEN as many edges were drawn as it has


WIDE = {"edges": 1, "blocks": 32}  # edges per sum


def empty_prefix(graph: Graph, storage: Storage, wide: int = 1) -> Prefix:
    """Sums that were made for no row: draws are even. Rows that never have any take no memory."""
    many = graph.num_edges if wide == 1 else graph.num_edges // wide + graph.num_rows + 1
    table = ops.large_pages(storage.sparse(many, dtype=torch.int32), now=False)
    return Prefix(table, storage.sparse(2 * graph.num_rows, dtype=torch.int32), wide)


def renew_all(graph: Graph, k: int, odds: Odds, prefix: Prefix) -> None:
    """New sums for all rows that leave anything to chance at k draws."""
    rows = (graph.edges.last - graph.edges.first > k).nonzero().flatten()
    ops.renew(rows, torch.full_like(rows, k), graph.edges, odds, prefix)


class PrefixSums(nn.Module):
    """Prefix sums of each row's inclusion probabilities per layer, from which k edges are drawn in O(k log n),
    with replacement or systematically.

    A row's sums are made again while learning, after n / (OFTEN k) visits: OFTEN k edges are read per visit, whatever
    the degree. Until its first time a row is drawn from evenly. Memory: 4 bytes per edge and 8 per node, per layer; a
    row that was never renewed, and a layer that is never drawn, take nothing but addresses, also in a checkpoint. On a
    GPU none are kept: there a scan of the row is quick.

    sums="blocks" keeps a sum for every 32 edges alone: 1/8 byte per edge and 12 per node, per layer. A draw then reads
    the odds of the 32 edges of its block again, which takes longer.
    """

    def __init__(self, graph: Graph, layers: int, storage: Storage = MEMORY, sums: str = "edges"):
        super().__init__()
        self.wide = WIDE[one_of(sums, WIDE, "sums")]
        self.graph, self.layers, self.storage = graph, layers, storage
        self.wanted, self.once = False, True
        self.fan_out: list[int] | None = None  # edges that a row draws per layer, where blocks may hold more
        for layer in range(layers):
            self.register_buffer(f"table{layer}", None)
            self.register_buffer(f"upto{layer}", None)

    def open(self, how: str) -> None:
        """Keep sums for such draws from now on, where this device goes by them."""
        self.once = how != "multinomial"  # no edge comes twice: probabilities are capped
        self._make()

    def _make(self) -> None:
        kept, self.wanted = self._buffers["upto0"] is not None, True
        if not kept and ops.goes_by_sums(self.graph.indptr):
            for layer in range(self.layers):
                table, upto, _ = empty_prefix(self.graph, self.storage, self.wide)
                setattr(self, f"table{layer}", table)
                setattr(self, f"upto{layer}", upto)

    def at(self, layer: int) -> Prefix | None:
        """The sums of a layer, or None where none are kept."""
        table: Tensor | None = getattr(self, f"table{layer}")
        return None if table is None else Prefix(table, getattr(self, f"upto{layer}"), self.wide)

    def visited(self, layer: int, row: Tensor, ptr: Tensor, odds: Odds) -> None:
        """The rows of a block were drawn from and have taught what they could: those due get new sums."""
        if (prefix := self.at(layer)) is not None:
            if self.fan_out is not None and self.fan_out[layer] >= 0:
                edges = self.graph.edges
                ptr = ops.pointer(torch.minimum(ptr.diff(), edges.first[row] - edges.begin[row] + self.fan_out[layer]))
            ops.visit(row, ptr, self.graph.edges, OFTEN, self.once, odds, prefix)

    def renew(self, layer: int, k: int, odds: Odds) -> None:
        """New sums for all rows that leave anything to chance at k draws."""
        if (prefix := self.at(layer)) is not None:
            renew_all(self.graph, k if self.once else 1, odds, prefix)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for layer in range(self.layers):
            upto: Tensor | None = getattr(self, f"upto{layer}")
            if upto is not None and not bool(upto[::2].any()):
                del destination[f"{prefix}table{layer}"]

    def _load_from_state_dict(self, state: Any, prefix: str, meta: Any, strict: bool, missing: list[str],
                              *more: Any) -> None:  # fmt: skip
        told: list[str] = []
        if f"{prefix}upto0" in state:
            self._make()
        super()._load_from_state_dict(state, prefix, meta, strict, told, *more)
        for layer in range(self.layers):
            if f"{prefix}upto{layer}" in told:  # written before sums were kept: every row begins anew
                getattr(self, f"upto{layer}").zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> PrefixSums:
        device = fn(torch.zeros(0)).device
        if device != self.graph.device:
            for name in self._buffers:
                setattr(self, name, None)
            self.graph = self.graph.to(device)
            if self.wanted:
                self._make()
            return self
        super()._apply(fn, recurse)
        return self
