"""Storage: allocates the state of policies, samplers and histories, in memory or in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adahop.checks import InputError
from adahop.mapped.folder import scratch

LEAST = 1 << 20  # bytes; smaller tensors stay in memory
PER_NODE = 16  # bytes; so do tensors with at most this much per node, which every step accesses at random
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
        out = self._in_file(shape, dtype, device)
        if out is None:
            return torch.full(shape, value, dtype=dtype, device=device)
        for rows in out.view(-1).split(PIECE) if value else ():  # a new file holds zeros, which need not be written
            rows.fill_(value)
        return out

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """A tensor whose entries the caller writes before they are read."""
        out = self._in_file(shape, dtype, device)
        return torch.empty(shape, dtype=dtype, device=device) if out is None else out

    def sparse(self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """Zeros that take memory, or space on the disk, only where they are written."""
        out = self._in_file(shape, dtype, device, reserve=False)
        if out is not None:
            return out
        if torch.device(device).type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.from_numpy(np.zeros(shape, torch.empty(0, dtype=dtype).numpy().dtype))

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        return self.full(shape, 0, dtype, device)

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        return self.full(shape, 1, dtype, device)

    def _in_file(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, reserve: bool = True
    ) -> Tensor | None:
        """Zeros in a file; None where the tensor lies in memory."""
        return None


class Files(Storage):
    """Nameless files of a folder, mapped: written to the disk when memory is short, deleted with the process.

    Tensors on a GPU, and those of fewer than `least` bytes, lie in memory.

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

    def _in_file(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, reserve: bool = True
    ) -> Tensor | None:
        if torch.device(device).type != "cpu" or torch.Size(shape).numel() * dtype.itemsize < self.least:
            return None
        return scratch(self.folder, tuple(shape), dtype, reserve)


MEMORY = Storage()


def storage_in(folder: str | Path | None, nodes: int = 0) -> Storage:
    """Files of a folder, for the state of a graph with this many nodes; memory without a folder."""
    return MEMORY if folder is None else Files(folder, max(LEAST, PER_NODE * nodes))
