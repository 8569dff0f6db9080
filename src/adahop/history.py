"""History: the latest embedding seen of every node. `pull` reads rows, `push` writes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adahop import ops
from adahop.checks import InputError, count, in_range, of_kind
from adahop.graph import Graph
from adahop.storage import MEMORY, Storage


class Seen(nn.Module):
    """The row of each node in a table that is filled as nodes are first seen; row 0 is that of all others.

    >>> seen = Seen(5)
    >>> seen.add(torch.tensor([3, 1])).tolist(), seen.row.tolist()
    ([1, 2], [0, 2, 0, 1, 0])
    """

    row: Tensor

    def __init__(self, num_nodes: int, storage: Storage = MEMORY, device: torch.device | str = "cpu"):
        super().__init__()
        self.many = 1  # rows that are taken
        self.register_buffer("row", storage.sparse(num_nodes, dtype=torch.int32, device=device), persistent=False)

    def new(self, nodes: Tensor) -> Tensor:
        """Those that were not seen before, each once, in order."""
        new = nodes[self.row.index_select(0, nodes) == 0]
        return new.unique() if new.numel() else new

    def add(self, nodes: Tensor) -> Tensor:
        """The rows of nodes that are new, no two alike."""
        rows = torch.arange(self.many, self.many + nodes.numel(), device=nodes.device)
        self.row[nodes] = rows.int()
        self.many += nodes.numel()
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
        self.seen: list[tuple[Tensor, Tensor]] | None = None  # where it is a list, it gets what is pushed
        of_kind(storage, Storage, "storage")
        self.register_buffer("value", storage.zeros(num_nodes, width, dtype=dtype), persistent=False)

    @torch.no_grad()
    def pull(self, n_id: Tensor) -> Tensor:
        try:
            return self.value.index_select(0, n_id).float()
        except IndexError:  # the CPU notices; a look beforehand would make the host wait for a GPU
            in_range(n_id, len(self.value), "n_id")
            raise

    def change(self, n_id: Tensor, h: Tensor, keep: Tensor) -> tuple[Tensor, Tensor | None]:
        """h less `keep` of its rows, and the squared length of what is left, where that is found on the way."""
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
        if self.seen is not None:
            self.seen.append((n_id, h.detach().to(self.value.dtype)))

    @torch.no_grad()
    def sums(self, graph: Graph, nodes: Tensor) -> Tensor:
        """sum over *all* in-neighbours of weight * row, for each of the nodes: O(degree * width) a node."""
        graph.soon(nodes)
        return ops.full_sum(self.value, graph.edges, nodes)

    def remembered(self, name: str) -> dict[str, Tensor]:
        """What a checkpoint keeps of it under its name."""
        return {name: self.value}

    def resize(self, rows: int) -> None:
        """So many rows will be taken from a checkpoint."""

    def _apply(self, fn, recurse: bool = True) -> History:
        kept = self.value.dtype  # .half() and .float() of a model are not meant for its memory
        super()._apply(fn, recurse)
        self.value = self.value.to(kept)
        return self


class SeenHistory(History):
    """The same without a pass over the graph before: a node that was never seen has zeros, and takes no room.

    Rows lie in the order in which nodes were first seen, so that few pages are written.

    >>> history = SeenHistory(3, 2)
    >>> history.push(torch.tensor([1]), torch.ones(1, 2)); history.pull(torch.tensor([0, 1])).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self, num_nodes: int, width: int, dtype: torch.dtype = torch.float32, storage: Storage = MEMORY):
        super().__init__(0, width, dtype)
        self.nodes = Seen(num_nodes, storage)
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
        graph.soon(nodes)
        edges = graph.edges
        target, place = ops.spans(edges.begin[nodes], edges.last[nodes] - edges.begin[nodes])
        row = self.nodes.row[edges.indices[place].long()]
        met = row.nonzero().flatten()
        target, row = target[met], row[met].long()
        weight = edges.weights(nodes[target], place[met])
        return ops.segment_sum(weight.unsqueeze(1) * self.value[row].float(), target, nodes.numel())

    def remembered(self, name: str) -> dict[str, Tensor]:
        return {name: self.value[: self.nodes.many], f"{name}.row": self.nodes.row}

    def resize(self, rows: int) -> None:
        self.nodes.many = rows
