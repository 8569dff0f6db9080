"""How the kernels are compiled: for types and constants, and not for a graph's sizes and addresses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton


def kernel(*known: str) -> Callable[[Callable[..., Any]], Any]:
    """`triton.jit`, whose binaries may assume something (a multiple of 16, or 1) of the arguments `known` alone.

    Triton assumes it of every argument by itself, so that a second graph, or the last batch of an epoch, would be
    compiled for again. It helps where rows are read in long words: known are the rows and their widths.
    """

    def jit(fn: Callable[..., Any]) -> Any:
        arguments = inspect.signature(fn).parameters.values()
        free = [p.name for p in arguments if p.name not in known and "constexpr" not in str(p.annotation)]
        assert set(known) <= {p.name for p in arguments}
        return triton.jit(fn, do_not_specialize=free)

    return jit
