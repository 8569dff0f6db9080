"""History: the latest embedding seen of every node. `pull` reads rows, `push` writes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adahop import ops
from adahop.checks import InputError, count, in_range, of_kind
from adahop.graph import Graph
from adahop.storage import MEMORY, Storage


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

    def _apply(self, fn, recurse: bool = True) -> History:
        kept = self.value.dtype  # .half() and .float() of a model are not meant for its memory
        super()._apply(fn, recurse)
        self.value = self.value.to(kept)
        return self
