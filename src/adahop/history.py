"""History: the latest embedding seen of every node. `pull` reads rows, `push` writes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adahop import ops
from adahop.checks import InputError, count, in_range, of_kind
from adahop.graph import Graph
from adahop.storage import MEMORY, Storage


class LazyRows(nn.Module):
    """The row of each node in a table whose rows are taken in the order in which nodes are first seen.

    Row 0 belongs to all nodes that were not seen yet.

    >>> rows = LazyRows(5)
    >>> rows.add(torch.tensor([3, 1])).tolist(), rows.row.tolist()
    ([1, 2], [0, 2, 0, 1, 0])
    """

    row: Tensor

    def __init__(self, num_nodes: int, storage: Storage = MEMORY, device: torch.device | str = "cpu"):
        super().__init__()
        self.used = 1  # rows that are taken
        self.register_buffer("row", storage.sparse(num_nodes, dtype=torch.int32, device=device), persistent=False)

    def new(self, nodes: Tensor) -> Tensor:
        """The nodes that were not seen before, each once, sorted."""
        new = nodes[self.row.index_select(0, nodes) == 0]
        return new.unique() if new.numel() else new

    def add(self, nodes: Tensor) -> Tensor:
        """Rows for nodes that were not seen before, each given once."""
        rows = torch.arange(self.used, self.used + nodes.numel(), device=nodes.device)
        self.row[nodes] = rows.int()
        self.used += nodes.numel()
        return rows


class History(nn.Module):
    """One row per node, in float32 or float16, on the device it is moved to. Not part of a model's state_dict.

    >>> history = History(3, 2)
    >>> history.push(torch.tensor([1]), torch.ones(1, 2)); history.pull(torch.tensor([0, 1])).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """

    value: Tensor

    def __init__(self, num_nodes: int, width: int, dtype: torch.dtype = torch.float32, storage: Storage = MEMORY):
        super().__init__()
        count(num_nodes, 0, "num_nodes")
        count(width, 1, "width")
        if dtype not in (torch.float32, torch.float16):
            raise InputError(f"`dtype` must be float32 or float16, got {dtype}")
        self.scratch = ops.Scratch()
        self.log: list[tuple[Tensor, Tensor]] | None = None  # if a list, `push` appends its arguments
        self.pending: tuple[Tensor, Tensor] | None = None  # see `push_later`
        of_kind(storage, Storage, "storage")
        self.register_buffer("value", storage.zeros(num_nodes, width, dtype=dtype), persistent=False)

    @torch.no_grad()
    def pull(self, n_id: Tensor) -> Tensor:
        try:
            return self.value.index_select(0, n_id).float()
        except IndexError:  # raised on the CPU; a check beforehand would make the host wait for a GPU
            in_range(n_id, len(self.value), "n_id")
            raise

    def change(self, n_id: Tensor, h: Tensor, keep: Tensor) -> tuple[Tensor, Tensor | None]:
        """h - keep * its rows, and the squared norms of that where the kernel computes them anyway."""
        try:
            return ops.change(h, self.value, n_id, keep, measured=False)
        except IndexError:
            in_range(n_id, len(self.value), "n_id")
            raise

    @torch.no_grad()
    def push(self, n_id: Tensor, h: Tensor) -> None:
        if h.shape != (n_id.numel(), self.value.shape[1]):
            raise InputError(f"`h` must have shape {(n_id.numel(), self.value.shape[1])}, got {tuple(h.shape)}")
        ops.push(self.value, n_id, h.detach(), self.scratch)
        if self.log is not None:
            self.log.append((n_id, h.detach().to(self.value.dtype)))

    def push_later(self, n_id: Tensor, h: Tensor) -> None:
        """`push` at the next `flush`: the present step still reads the old rows."""
        self.pending = n_id, h

    def flush(self) -> None:
        if self.pending is not None:
            self.push(*self.pending)
            self.pending = None

    @torch.no_grad()
    def sums(self, graph: Graph, nodes: Tensor) -> Tensor:
        """sum over *all* in-neighbours of weight * row, for each of the nodes: O(degree * width) per node."""
        graph.prefetch(nodes)
        return ops.full_sum(self.value, graph.edges, nodes)

    def stored(self, name: str) -> dict[str, Tensor]:
        """What a checkpoint holds of it, by name."""
        return {name: self.value}

    def resize(self, rows: int) -> None:
        """Make space for this number of rows, to be copied from a checkpoint."""

    def _apply(self, fn, recurse: bool = True) -> History:
        dtype = self.value.dtype  # .half() and .float() of a model do not apply to its history
        super()._apply(fn, recurse)
        self.value = self.value.to(dtype)
        return self


class LazyHistory(History):
    """A history that starts empty: a node that was never seen reads as zeros and takes no memory.

    Rows lie in the order in which nodes were first seen (`LazyRows`), so that few pages are written.

    >>> history = LazyHistory(3, 2)
    >>> history.push(torch.tensor([1]), torch.ones(1, 2)); history.pull(torch.tensor([0, 1])).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self, num_nodes: int, width: int, dtype: torch.dtype = torch.float32, storage: Storage = MEMORY):
        super().__init__(0, width, dtype)
        self.nodes = LazyRows(num_nodes, storage)
        self.value = storage.sparse(num_nodes + 1, width, dtype=dtype)

    @torch.no_grad()
    def pull(self, n_id: Tensor) -> Tensor:
        in_range(n_id, self.nodes.row.numel(), "n_id")
        return super().pull(self.nodes.row[n_id].long())

    def change(self, n_id: Tensor, h: Tensor, keep: Tensor) -> tuple[Tensor, Tensor | None]:
        in_range(n_id, self.nodes.row.numel(), "n_id")
        return super().change(self.nodes.row[n_id].long(), h, keep)

    @torch.no_grad()
    def push(self, n_id: Tensor, h: Tensor) -> None:
        self.nodes.add(self.nodes.new(n_id))
        super().push(self.nodes.row[n_id].long(), h)

    @torch.no_grad()
    def sums(self, graph: Graph, nodes: Tensor) -> Tensor:
        graph.prefetch(nodes)
        edges = graph.edges
        target, place = ops.spans(edges.begin[nodes], edges.last[nodes] - edges.begin[nodes])
        row = self.nodes.row[edges.indices[place].long()]
        seen = row.nonzero().flatten()
        target, row = target[seen], row[seen].long()
        weight = edges.weights(nodes[target], place[seen])
        return ops.segment_sum(weight.unsqueeze(1) * self.value[row].float(), target, nodes.numel())

    def stored(self, name: str) -> dict[str, Tensor]:
        return {name: self.value[: self.nodes.used], f"{name}.row": self.nodes.row}

    def resize(self, rows: int) -> None:
        self.nodes.used = rows
