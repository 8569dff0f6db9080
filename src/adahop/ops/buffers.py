"""Memory: large arrays used again from batch to batch, and large pages for arrays that are read at random.

What malloc takes from the system and gives back for every batch costs as much as the sampling itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

SMALL = 1 << 17  # bytes below which malloc asks the system for nothing
LARGE = 2 << 20  # bytes from which on the pages matter
_HUGE, _COLLAPSE = 14, 25  # Linux's madvise: large pages from now on; make the present ones large
MOST = 64  # buffers known at once; one that is left out lives as long as its arrays do


def unused(buffers: Sequence[np.ndarray], size: int, references: int) -> np.ndarray | None:
    """A buffer for so many bytes that has no more references than it has here."""
    for buffer in buffers:
        if size <= buffer.nbytes <= 2 * size and sys.getrefcount(buffer) == references:
            return buffer
    return None


FREE = next(n for n in range(9) if unused([np.empty(1, np.uint8)], 1, n) is not None)  # this Python's count of them


class Pool(threading.local):
    """A thread's own buffers: other threads may release what came from them, but do not take from them."""

    def __init__(self) -> None:
        self.buffers: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """As np.empty. A buffer counts as used while any array, tensor or view of it is alive."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size < SMALL:
            return np.empty(shape, dtype)
        buffer = unused(self.buffers, size, FREE)
        if buffer is None:
            buffer = np.empty(size + size // 8, np.uint8)  # the next batch may be a little larger
            self.buffers = [*self.buffers[1 - MOST :], buffer]
        return buffer[:size].view(dtype).reshape(shape)


empty = Pool().empty


def large_pages(t: Tensor, now: bool = True) -> Tensor:
    """Ask the system to hold `t` in large pages, where it knows how: random reads then miss fewer page entries.

    With now=False only what is written later comes in large pages: memory that was never touched stays free.
    """
    if t.device.type == "cpu" and t.nbytes >= LARGE and sys.platform == "linux":
        page = mmap.PAGESIZE
        start = -(-t.data_ptr() // page) * page
        size = (t.data_ptr() + t.nbytes - start) // page * page
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None, use_errno=True)
            for advice in (_HUGE, _COLLAPSE) if now else (_HUGE,):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
    return t


def pinned(t: Tensor) -> Tensor:
    """The same in page-locked memory, from which a GPU reads over the bus; as it is where there is no use for that."""
    return t.pin_memory() if t.is_cpu and torch.cuda.is_available() else t


class Scratch:
    """Tensors that kernels write to and leave as they found them, kept by an owner from call to call."""

    def __init__(self, full: Callable[..., Tensor] = torch.full):
        """`full(shape, value, dtype=, device=)` allocates them."""
        self._full = full
        self._held: dict[tuple, Tensor] = {}

    def tensor(self, name: str, size: int, fill: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (name, size, dtype, device)
        if key not in self._held:
            self._held[key] = self._full((size,), fill, dtype=dtype, device=device)
        return self._held[key]

    def marks(self, size: int, device: torch.device) -> Tensor:
        """[size] int32, -1 at rest."""
        return self.tensor("marks", size, -1, torch.int32, device)
