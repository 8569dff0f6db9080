"""Pages of mapped files: what a batch will read is asked for at once, and the disk serves it side by side.

Without that every page is waited for when it is first touched, one after another, together with its neighbours on the
disk, which random reads have no use for.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numba.core import types
from torch import Tensor

from adahop.ops.simd import kernel
from adahop.ops.threads import over

PAGE = mmap.PAGESIZE
MOST = 64  # pages; a longer range is left to chance, as a draw reads a few of them
RANDOM, WILL_NEED = 1, 3  # madvise: read nothing around; begin to read, do not wait
_madvise: Any = types.ExternalFunction("madvise", types.intc(types.uintp, types.uintp, types.intc))


def in_file(t: Tensor) -> bool:
    """Whether a tensor lies in a mapped file, so that reading it may mean reading the disk. Known on Linux only."""
    if not t.is_cpu or sys.platform != "linux":
        return False
    at = t.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split(maxsplit=1)[0].partition("-")
        if int(first, 16) <= at < int(last, 16):
            return line.split()[4] != "0"  # the file's number; memory has none
    return False


@kernel
def ask(lo, hi, base, width, first, last, page, most):
    start, end = 0, 0  # pages that are asked for next: ranges that meet go together
    for i in range(lo, hi):
        a, b = (base + first[i] * width) // page, -(-(base + last[i] * width) // page)
        if b <= a or b > a + most:
            continue
        if start <= a <= end and b - start <= most:
            end = max(end, b)
            continue
        if end > start:
            _madvise(np.uintp(start * page), np.uintp((end - start) * page), np.intc(WILL_NEED))
        start, end = a, b
    if end > start:
        _madvise(np.uintp(start * page), np.uintp((end - start) * page), np.intc(WILL_NEED))


def ask_for(t: Tensor, first: Tensor, last: Tensor) -> None:
    """Rows first[i] up to last[i] of a tensor that is `in_file` will be read soon."""
    if len(t) and first.numel():
        width = t.stride(0) * t.element_size()
        over(ask, first.numel(), t.data_ptr(), width, first.numpy(), last.numpy(), PAGE, MOST)


def no_more_than_asked(t: Tensor) -> Tensor:
    """Of a tensor in a file, only pages that are touched or asked for are read from now on, not those around them.

    Those around would drive out of a small memory what was asked for and has not been read yet.
    """
    if sys.platform == "linux":
        start = t.data_ptr() // PAGE * PAGE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(t.data_ptr() + t.nbytes - start), RANDOM)
    return t
