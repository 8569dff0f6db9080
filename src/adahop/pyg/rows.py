"""NodeRows: a row per node in single or half precision or in 8 bits, in memory or in files."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from adahop import ops
from adahop.checks import InputError
from adahop.storage import MEMORY, Storage

DTYPES = (torch.float32, torch.float16, torch.int8)
STEPS = 127.0  # of a row in 8 bits, from 0 to its largest number
PIECE = 1 << 16  # rows decoded at once


def row_dtype(dtype: object) -> torch.dtype:
    """The dtype, if rows can be stored in it."""
    if dtype not in DTYPES:
        names = ", ".join(str(d) for d in DTYPES)
        raise InputError(f"`history_dtype` must be one of {names}, got {dtype!r}")
    assert isinstance(dtype, torch.dtype)
    return dtype


class NodeRows:
    """Rows of any shape, one per node, zeros at first. In 8 bits a row has a scale of its own, its largest number.

    >>> rows = NodeRows(3, (2,), torch.int8)
    >>> rows.write(torch.tensor([1]), torch.tensor([[1.0, -4.0]])); rows.read(torch.tensor([0, 1]))[:, 1].tolist()
    [0.0, -4.0]
    """

    def __init__(
        self,
        nodes: int,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        storage: Storage = MEMORY,
        device: torch.device | str = "cpu",
    ):
        self.shape = tuple(shape)
        self.value = storage.zeros(nodes, math.prod(shape), dtype=dtype, device=device)
        self.scale = storage.zeros(nodes, device=device) if dtype == torch.int8 else None

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        return {"value": self.value} if self.scale is None else {"value": self.value, "scale": self.scale}

    def flat(self, nodes: Tensor) -> Tensor:
        """[nodes, width] in single precision."""
        value = self.value.index_select(0, nodes).float()
        return value if self.scale is None else value.mul_(self.scale[nodes].unsqueeze(1))

    def read(self, nodes: Tensor) -> Tensor:
        return self.flat(nodes).view(nodes.numel(), *self.shape)

    def write(self, nodes: Tensor, rows: Tensor, share: float = 1.0) -> None:
        """Move the rows of some nodes, each of which is there once, by `share` of the way to these."""
        rows = rows.detach().flatten(1).to(self.value.device, torch.float32)
        if share < 1.0:
            old = self.flat(nodes)
            rows = torch.where(
                old.any(1, keepdim=True), old.lerp(rows, share), rows
            )  # all the way where nothing was written
        if self.scale is not None:
            largest = rows.abs().amax(1) / STEPS if rows.shape[1] else rows.new_zeros(len(rows))
            self.scale.index_copy_(0, nodes, largest)
            rows = (rows / largest.clamp(min=1e-30).unsqueeze(1)).round_()
        self.value.index_copy_(0, nodes, rows.to(self.value.dtype))

    def sums(self, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor) -> Tensor:
        """[targets, width]: the sum over each target's edges, side by side, of coef times the source's row."""
        if self.value.dtype == torch.float32:
            return ops.gather_sum(self.value, src, dst, coef, ptr)
        out = coef.new_zeros(ptr.numel() - 1, self.value.shape[1], dtype=torch.float32)
        for lo in range(0, src.numel(), PIECE):
            part = slice(lo, lo + PIECE)
            out.index_add_(0, dst[part], self.flat(src[part]).mul_(coef[part].unsqueeze(1)))
        return out
