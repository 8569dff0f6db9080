"""Pages of mapped files: what a batch will read is asked for at once, and the disk serves it side by side.

Without that every page is waited for when it is first touched, one after another, together with its neighbours on the
disk, which random reads have no use for.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
from numba.core import types
from torch import Tensor

from adahop.ops.simd import kernel
from adahop.ops.threads import over

PAGE = mmap.PAGESIZE
MOST = 64  # pages; a longer range is left to chance, as a draw reads a few of them
WILL_NEED = 3  # madvise: begin to read, do not wait
_madvise = types.ExternalFunction("madvise", types.intc(types.uintp, types.uintp, types.intc))


def in_file(t: Tensor) -> bool:
    """Whether a tensor lies in a mapped file, so that reading it may mean reading the disk. Only Linux says so."""
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
    before = -1, -1
    for i in range(lo, hi):
        a, b = base + first[i] * width, base + last[i] * width
        a, b = a // page, -(-b // page)
        if a < b <= a + most and (a, b) != before:
            _madvise(np.uintp(a * page), np.uintp((b - a) * page), np.intc(WILL_NEED))
            before = a, b


def ask_for(t: Tensor, first: Tensor, last: Tensor) -> None:
    """Rows first[i] up to last[i] of a tensor that is `in_file` will be read soon."""
    if len(t) and first.numel():
        width = t.stride(0) * t.element_size()
        over(ask, first.numel(), t.data_ptr(), width, first.numpy(), last.numpy(), PAGE, MOST)
