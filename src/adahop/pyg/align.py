"""Which message belongs to which drawn edge, though layers add, remove, reorder and drop edges on the way."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


def is_edge_index(value: Any) -> bool:
    """Whether a value is a [2, M] tensor of ids."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return value.dim() == 2 and value.shape[0] == 2 and not value.is_floating_point()


class Aligned(NamedTuple):
    """For each edge that a layer uses, the column of the batch's `edge_index` that it is.

    The first `kept` edges are the columns from `start` on, or `at` where these are not consecutive; -1 in `at`, and all
    edges after the first `kept`, are self-loops that the layer added. `share` is the part of the batch's edges in use.
    """

    start: int
    kept: int
    edges: int  # in use
    at: Tensor | None
    share: float

    @property
    def unchanged(self) -> bool:
        """Whether the layer uses the batch's edges as they are: what follows from them is the same for all layers."""
        return self.at is None and self.kept == self.edges and self.share == 1.0

    def take(self, value: Tensor, fill: float = 1.0) -> Tensor:
        """[edges] the value of each edge in use; `fill` for added self-loops."""
        if self.at is not None:
            return torch.where(self.at < 0, fill, value[self.at.clamp(min=0)]) if value.numel() else value.new_full(
                (self.edges,), fill
            )  # fmt: skip
        first = value[self.start : self.start + self.kept]
        return first if self.kept == self.edges else torch.cat([first, value.new_full((self.edges - self.kept,), fill)])

    def put(self, value: Tensor, columns: int) -> Tensor:
        """[columns] the value of each edge of the batch; 0 for those that are not in use."""
        out = value.new_zeros(columns)
        if self.at is None:
            out[self.start : self.start + self.kept] = value[: self.kept]
            return out
        real = self.at >= 0
        return out.index_copy_(0, self.at[real], value[real])

    def subset(self, edges: Tensor) -> Aligned:
        """The same of some of the edges in use."""
        columns = self.at
        if columns is None:
            loops = edges.new_full((self.edges - self.kept,), -1)
            columns = torch.cat([torch.arange(self.start, self.start + self.kept, device=edges.device), loops])
        return Aligned(0, 0, edges.numel(), columns[edges], self.share)


def align(
    given: Tensor, used: Tensor, columns: slice | None = None, nodes: int | None = None, bipartite: bool = False
) -> Aligned | None:
    """Find the edges in `used` among those of the batch, `given`; None where one that is no self-loop is not there.

    `columns` are those of `given` that the layer was passed (`trim_to_layer` passes the first hops alone). Self-loops
    always have scale 1, so it does not matter which of two parallel ones is which; a `bipartite` relation has none.

    >>> given = torch.tensor([[1, 0, 2], [0, 0, 0]])
    >>> align(given, torch.tensor([[1, 2, 0], [0, 0, 0]])).take(torch.tensor([5.0, 6.0, 7.0])).tolist()
    [5.0, 7.0, 1.0]
    """
    start, stop = (0, given.shape[1]) if columns is None else (columns.start, columns.stop)
    passed, m = given[:, start:stop], used.shape[1]
    many = stop - start
    if many <= m and torch.equal(passed, used[:, :many]) and _loops(used[:, many:]):
        return Aligned(start, many, m, None, 1.0)
    true = (passed[0] != passed[1]).nonzero().flatten()
    if true.numel() <= m and torch.equal(passed[:, true], used[:, : true.numel()]) and _loops(used[:, true.numel() :]):
        at = torch.cat([true + start, true.new_full((m - true.numel(),), -1)])
        return Aligned(0, 0, m, at, 1.0)
    return _by_pair(given, used, nodes, many if bipartite else true.numel(), bipartite)


def _loops(edges: Tensor) -> bool:
    return edges.shape[1] == 0 or torch.equal(edges[0], edges[1])


def _by_pair(given: Tensor, used: Tensor, nodes: int | None, expected: int, bipartite: bool) -> Aligned | None:
    """Match edges by (source, target), for edges in any order or a part of them."""
    if nodes is None:
        nodes = 1 + max(int(e.max()) if e.numel() else 0 for e in (given, used))
    if used.numel() and int(used.max()) >= nodes:
        return None
    i, j = ((bipartite | (e[0] != e[1])).nonzero().flatten() for e in (given, used))
    a, b = (e[1, k] * nodes + e[0, k] for e, k in ((given, i), (used, j)))
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
    at = used.new_full((used.shape[1],), -1)
    at[j] = i[found]
    share = j.numel() / max(expected, 1)
    return Aligned(0, 0, used.shape[1], at, min(share, 1.0))
