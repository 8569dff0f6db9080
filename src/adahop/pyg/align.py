"""Which message belongs to which drawn edge, though layers add, remove, reorder and drop edges on the way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex


def is_edge_index(value: Any) -> bool:
    """Whether a value is a [2, M] tensor of ids."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return value.dim() == 2 and value.shape[0] == 2 and not value.is_floating_point()


def plain(value: Any) -> Any:
    """The tensor of a PyG EdgeIndex, which has no memory of its own to be recognised by; others as they are."""
    return value.as_tensor() if isinstance(value, EdgeIndex) else value


class Aligned(NamedTuple):
    """For each edge that a layer uses, the column of the batch's `edge_index` that it is.

    The first `num_aligned` edges are the columns from `start` on, or `columns` where these are not consecutive; -1 in
    `columns`, and all edges after the first `num_aligned`, are self-loops that the layer added. `share` is the part of
    the batch's edges in use.
    """

    start: int
    num_aligned: int
    edges: int  # in use
    columns: Tensor | None
    share: float

    @property
    def unchanged(self) -> bool:
        """Whether the layer uses the batch's edges as they are: what follows from them is the same for all layers."""
        return self.columns is None and self.num_aligned == self.edges and self.share == 1.0

    def take(self, value: Tensor, fill: float = 1.0) -> Tensor:
        """[edges] the value of each edge in use; `fill` for added self-loops."""
        if self.columns is not None:
            if not value.numel():
                return value.new_full((self.edges,), fill)
            return torch.where(self.columns < 0, fill, value[self.columns.clamp(min=0)])
        first = value[self.start : self.start + self.num_aligned]
        if self.num_aligned == self.edges:
            return first
        return torch.cat([first, value.new_full((self.edges - self.num_aligned,), fill)])

    def put(self, value: Tensor, columns: int) -> Tensor:
        """[columns] the value of each edge of the batch; 0 for those that are not in use."""
        out = value.new_zeros(columns)
        if self.columns is None:
            out[self.start : self.start + self.num_aligned] = value[: self.num_aligned]
            return out
        drawn = self.columns >= 0
        return out.index_copy_(0, self.columns[drawn], value[drawn])

    def subset(self, edges: Tensor) -> Aligned:
        """The same of some of the edges in use."""
        columns = self.columns
        if columns is None:
            columns = torch.arange(self.start, self.start + self.num_aligned, device=edges.device)
            columns = torch.cat([columns, columns.new_full((self.edges - self.num_aligned,), -1)])
        return Aligned(0, 0, edges.numel(), columns[edges], self.share)


def align(
    batch_edges: Tensor, used: Tensor, passed: slice | None = None, nodes: int | None = None, bipartite: bool = False
) -> Aligned | None:
    """Find the edges in `used` among those of the batch; None where one that is no self-loop is not there.

    `passed` are the columns that the layer was passed (`trim_to_layer` passes the first hops alone). Self-loops always
    have scale 1, so it does not matter which of two parallel ones is which; a `bipartite` relation has none.

    >>> edges = torch.tensor([[1, 0, 2], [0, 0, 0]])
    >>> align(edges, torch.tensor([[1, 2, 0], [0, 0, 0]])).take(torch.tensor([5.0, 6.0, 7.0])).tolist()
    [5.0, 7.0, 1.0]
    """
    start, stop = (0, batch_edges.shape[1]) if passed is None else (passed.start, passed.stop)
    edges, m, n = batch_edges[:, start:stop], used.shape[1], stop - start
    if n <= m and torch.equal(edges, used[:, :n]) and _all_loops(used[:, n:]):
        return Aligned(start, n, m, None, 1.0)
    no_loop = (edges[0] != edges[1]).nonzero().flatten()
    k = no_loop.numel()
    if k <= m and torch.equal(edges[:, no_loop], used[:, :k]) and _all_loops(used[:, k:]):
        return Aligned(0, 0, m, torch.cat([no_loop + start, no_loop.new_full((m - k,), -1)]), 1.0)
    return _by_pair(batch_edges, used, nodes, n if bipartite else k, bipartite)


def _all_loops(edges: Tensor) -> bool:
    return edges.shape[1] == 0 or torch.equal(edges[0], edges[1])


def _by_pair(batch_edges: Tensor, used: Tensor, nodes: int | None, expected: int, bipartite: bool) -> Aligned | None:
    """Match edges by (source, target), for edges in any order or a part of them."""
    if nodes is None:
        nodes = 1 + max(int(e.max()) if e.numel() else 0 for e in (batch_edges, used))
    if used.numel() and int(used.max()) >= nodes:
        return None
    i, j = ((bipartite | (e[0] != e[1])).nonzero().flatten() for e in (batch_edges, used))
    a, b = (e[1, k] * nodes + e[0, k] for e, k in ((batch_edges, i), (used, j)))
    order = a.argsort(stable=True)
    sorted_a = a[order]
    if a.numel() == b.numel():  # parallel edges in their order
        again = b.argsort(stable=True)
        if not torch.equal(sorted_a, b[again]):
            return None
        found = torch.empty_like(order)
        found[again] = order
    else:
        if a.numel() == 0:
            return None
        place = torch.searchsorted(sorted_a, b).clamp(max=a.numel() - 1)
        if not torch.equal(sorted_a[place], b):
            return None
        found = order[place]
    columns = used.new_full((used.shape[1],), -1)
    columns[j] = i[found]
    return Aligned(0, 0, used.shape[1], columns, min(j.numel() / max(expected, 1), 1.0))
