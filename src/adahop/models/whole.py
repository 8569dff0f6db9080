"""What a pass over the whole graph makes per node, a piece at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adahop import ops
from adahop.storage import MEMORY, Storage


class Filled:
    """A row per node, filled a piece at a time: no piece is held twice, and the whole may lie on disk."""

    all: Tensor

    def __init__(self, n: int, storage: Storage = MEMORY):
        self.n, self.storage = n, storage

    def put(self, a: int, part: Tensor) -> None:
        if not hasattr(self, "all"):
            self.all = self.storage.empty((self.n, *part.shape[1:]), part.dtype, part.device)
        self.all[a : a + len(part)] = part


def in_pieces(h: Tensor, f: Callable[[Tensor], Tensor], storage: Storage = MEMORY, rows: int = 1 << 14) -> Tensor:
    """f of some rows at a time."""
    out, far = Filled(len(h), storage), ops.in_file(h)
    for a in range(0, max(len(h), 1), rows):
        if far:
            here = torch.arange(a, min(a + rows, len(h)))
            ops.ask_for(h, here, here + 1)
        out.put(a, f(h[a : a + rows]))
    return out.all
