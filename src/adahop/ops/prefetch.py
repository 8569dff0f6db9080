"""Memory ahead of its use: a prefetch instruction for kernels, and large pages for arrays that are read at random."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

LARGE = 2 << 20  # bytes from which on the pages matter
_HUGE, _COLLAPSE = 14, 25  # Linux's madvise: large pages from now on; make the present ones large


def _prefetch(write: int):
    @intrinsic
    def fetch(_, array, i):
        """Ask for the cache line of array[i], contiguous, i within it; a hint that changes nothing."""
        if not (isinstance(array, types.Array) and array.ndim == 1 and isinstance(i, types.Integer)):
            return None

        def codegen(context, builder, signature, args):
            of = context.make_array(signature.args[0])(context, builder, args[0])
            at = context.cast(builder, args[1], signature.args[1], types.intp)
            byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
            call = builder.module.declare_intrinsic("llvm.prefetch", (byte,), kind)
            line = builder.bitcast(builder.gep(of.data, [at]), byte)
            builder.call(call, [line, word(write), word(3), word(1)])
            return context.get_dummy_value()

        return types.void(array, i), codegen

    return fetch


prefetch, prefetch_write = _prefetch(0), _prefetch(1)  # of a line that will be read, and of one that will be written


def large_pages(t: Tensor) -> Tensor:
    """Ask the system to hold `t` in large pages, where it knows how: random reads then miss fewer page entries."""
    if t.device.type == "cpu" and t.nbytes >= LARGE and sys.platform == "linux":
        page = mmap.PAGESIZE
        start = -(-t.data_ptr() // page) * page
        size = (t.data_ptr() + t.nbytes - start) // page * page
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None, use_errno=True)
            for advice in (_HUGE, _COLLAPSE):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice)
    return t
