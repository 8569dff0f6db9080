"""Run a nogil kernel over ranges in threads; every output has one writer, so results never depend on the count."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

_wanted: int | None = None
_pool: ThreadPoolExecutor | None = None
SMALL = 20_000  # below this much work a second thread costs more than it gives


_here = threading.local()  # `most`: of the kernels called from this thread, see `alone`


def get_threads(of: Tensor | None = None) -> int:
    """How many threads work on the CPU's tensors; one gives orders to a GPU, if `of` lies there."""
    if of is not None and not of.is_cpu:
        return 1
    return getattr(_here, "most", None) or _wanted or torch.get_num_threads()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Kernels called from this thread keep to it: the others have work of their own."""
    _here.most = 1
    try:
        yield
    finally:
        _here.most = None


def set_threads(n: int | None) -> None:
    """How many threads the kernels use; None follows torch."""
    global _wanted
    _wanted = n


@contextlib.contextmanager
def threads(n: int) -> Iterator[None]:
    before = _wanted
    set_threads(n)
    try:
        yield
    finally:
        set_threads(before)


def over(kernel: Callable, n: int, *args, work: np.ndarray | int = 1) -> None:
    """kernel(lo, hi, *args) over [0, n) in parts of equal work: one number, or cumulative sums [n + 1] of the items."""
    total = n * work if isinstance(work, int) else int(work[-1]) if n else 0
    parts = min(get_threads(), n, total // SMALL + 1)
    if parts <= 1:
        kernel(0, n, *args)
        return
    if isinstance(work, int):
        cuts = np.linspace(0, n, parts + 1).astype(np.int64)
    else:
        cuts = np.searchsorted(work, np.linspace(0, total, parts + 1)).astype(np.int64)
        cuts[0], cuts[-1] = 0, n
    jobs = [pool().submit(kernel, int(a), int(b), *args) for a, b in pairwise(cuts[1:]) if b > a]
    kernel(int(cuts[0]), int(cuts[1]), *args)
    for job in jobs:
        job.result()


def pool() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(64, thread_name_prefix="adahop")
    return _pool


class InTurn(Executor):
    """What is submitted runs at once, in the caller's thread."""

    def submit(self, fn: Callable, /, *args: Any, **options: Any) -> Future:
        done: Future = Future()
        try:
            done.set_result(fn(*args, **options))
        except Exception as e:
            done.set_exception(e)
        return done


def helper(of: Tensor) -> Executor:
    """A thread that works ahead on the CPU's tensors. Work on a GPU's is queued there in any case, and belongs on the
    stream of the caller."""
    return ThreadPoolExecutor(1, thread_name_prefix="adahop-prefetch") if of.is_cpu else InTurn()


def relay(here: Callable, make: Callable, take: Callable, cuts: Sequence[int]) -> None:
    """here(lo, hi) for the first part while threads make(lo, hi) the others; then take(lo, hi) for these, in order.

    One hand-over a thread: to wake one costs as much as thousands of edges do.
    """
    first, *others = pairwise(cuts)
    if not others:
        return here(*first)
    jobs = [pool().submit(make, *part) for part in others]
    try:
        here(*first)
        for job, part in zip(jobs, others, strict=True):
            job.result()
            take(*part)
    finally:
        wait(jobs)
