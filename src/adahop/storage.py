"""Storage: where state lies. Policies, samplers and histories are handed one when they are made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adahop.checks import InputError
from adahop.mapped.folder import scratch

LEAST = 1 << 20  # bytes; smaller tensors stay in memory
PER_NODE = 16  # bytes; so do those that have no more per node: every step reads and writes them at random
PIECE = 1 << 22  # entries filled at once


class Storage:
    """The memory of the device that is asked for.

    >>> Storage().full((2,), 1.5).tolist()
    [1.5, 1.5]
    """

    def full(
        self,
        shape: tuple[int, ...],
        value: float,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Room that is filled right after."""
        return torch.empty(shape, dtype=dtype, device=device)

    def sparse(self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """Zeros that take room only where they are written."""
        if torch.device(device).type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.from_numpy(np.zeros(shape, torch.empty(0, dtype=dtype).numpy().dtype))

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        return self.full(shape, 0, dtype, device)

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        return self.full(shape, 1, dtype, device)


class Files(Storage):
    """Nameless files of a folder, mapped: written out where memory is short, gone with the process.

    What is asked for on a GPU lies there, and what is smaller than `least` bytes in memory.

    >>> import tempfile
    >>> Files(tempfile.mkdtemp(), least=8).ones(2, 2).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """

    def __init__(self, folder: str | Path, least: int = LEAST):
        self.folder, self.least = Path(folder), least
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError(f"`state` must be a folder that can be written, got {folder} ({e.strerror})") from None

    def full(
        self,
        shape: tuple[int, ...],
        value: float,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        if not self._holds(shape, dtype, device):
            return super().full(shape, value, dtype, device)
        out = scratch(self.folder, tuple(shape), dtype)
        for rows in out.view(-1).split(PIECE) if value else ():  # a new file holds zeros, and takes no writing
            rows.fill_(value)
        return out

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        held = self._holds(shape, dtype, device)
        return scratch(self.folder, tuple(shape), dtype) if held else super().empty(shape, dtype, device)

    def sparse(self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        held = self._holds(shape, dtype, device)
        return scratch(self.folder, shape, dtype, False) if held else super().sparse(*shape, dtype=dtype, device=device)

    def _holds(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> bool:
        return torch.device(device).type == "cpu" and torch.Size(shape).numel() * dtype.itemsize >= self.least


MEMORY = Storage()


def storage_in(folder: str | Path | None, nodes: int = 0) -> Storage:
    """Files of a folder for the state of a graph with so many nodes, or memory where none is named."""
    return MEMORY if folder is None else Files(folder, max(LEAST, PER_NODE * nodes))
