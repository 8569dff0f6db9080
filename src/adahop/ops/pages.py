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
MANY = 16  # where a page in so many is wanted, those that are there already are looked up together
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
def mark(lo, hi, base, width, first, last, page, most, wanted):
    """wanted[p] = 1 for the pages, counted from the first one of `base`, of the rows first..last of each range."""
    start = base // page
    for i in range(lo, hi):
        a, b = (base + first[i] * width) // page - start, -(-(base + last[i] * width) // page) - start
        if b <= a + most:
            for p in range(a, b):
                wanted[p] = 1


@kernel
def ask(lo, hi, start, page, wanted):
    """Ask for the marked pages, those side by side together."""
    p = lo
    while p < hi:
        first = p
        while p < hi and wanted[p]:
            p += 1
        if p > first:
            _madvise(np.uintp((start + first) * page), np.uintp((p - first) * page), np.intc(WILL_NEED))
        else:
            p += 1


def ask_for(t: Tensor, first: Tensor, last: Tensor) -> None:
    """Rows first[i] up to last[i] of a tensor that is `in_file` will be read soon."""
    if not len(t) or not first.numel():
        return
    base, width = t.data_ptr(), t.stride(0) * t.element_size()
    start, end = base // PAGE, -(-(base + t.nbytes) // PAGE)
    wanted = np.zeros(end - start, np.uint8)
    mark(0, first.numel(), base, width, first.numpy(), last.numpy(), PAGE, MOST, wanted)
    if first.numel() > len(wanted) // MANY:
        here = np.empty(end - start, np.uint8)
        if ctypes.CDLL(None).mincore(*_extent(start, end), here.ctypes.data_as(ctypes.c_void_p)) == 0:
            wanted &= ~here
    over(ask, end - start, start, PAGE, wanted)


def _extent(start: int, end: int) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(start * PAGE), ctypes.c_size_t((end - start) * PAGE)


def no_more_than_asked(t: Tensor) -> Tensor:
    """Of a tensor in a file, only pages that are touched or asked for are read from now on, not those around them.

    Those around would drive out of a small memory what was asked for and has not been read yet.
    """
    if sys.platform == "linux":
        start, end = t.data_ptr() // PAGE, -(-(t.data_ptr() + t.nbytes) // PAGE)
        ctypes.CDLL(None).madvise(*_extent(start, end), RANDOM)
    return t
