"""Memory used again: large arrays of batches that nobody holds any more, so that no fresh pages need be cleared.

What malloc takes from the system and gives back for every batch costs as much as the sampling itself.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

SMALL = 1 << 17  # bytes below which malloc asks the system for nothing
MOST = 64  # buffers known at once; one that is left out lives as long as its arrays do


def unused(buffers: Sequence[np.ndarray], size: int, references: int) -> np.ndarray | None:
    """A buffer for so many bytes that has no more references than it has here."""
    for buffer in buffers:
        if size <= buffer.nbytes <= 2 * size and sys.getrefcount(buffer) == references:
            return buffer
    return None


FREE = next(n for n in range(9) if unused([np.empty(1, np.uint8)], 1, n) is not None)  # this Python's count of them


class Pool(threading.local):
    """A thread's own buffers: others may drop what came from them, but nobody else takes from them."""

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
