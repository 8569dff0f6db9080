"""Run a nogil kernel over ranges in threads; every output has one writer, so results never depend on the count."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

_wanted: int | None = None
_pool: ThreadPoolExecutor | None = None
SMALL = 20_000  # below this much work a second thread costs more than it gives


def get_threads() -> int:
    return _wanted or torch.get_num_threads()


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
    """kernel(lo, hi, *args) over [0, n) in parts of equal work: a number an item, or its cumulative sum [n + 1]."""
    total = n * work if isinstance(work, int) else int(work[-1])
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


def relay(make: Callable, take: Callable, cuts: Sequence[int]) -> None:
    """make(lo, hi) for each part in any thread, take(lo, hi) here and in order, each as soon as its part is made."""
    parts = list(pairwise(cuts))
    helpers = min(get_threads(), len(parts)) - 1
    if helpers < 1:
        for part in parts:
            make(*part)
            take(*part)
        return
    todo, made = deque(range(len(parts))), [threading.Event() for _ in parts]

    def work() -> bool:
        try:
            i = todo.popleft()
        except IndexError:
            return False
        try:
            make(*parts[i])
        finally:
            made[i].set()  # a failure is told when the job is joined
        return True

    def help_out() -> None:
        while work():
            pass

    jobs = [pool().submit(help_out) for _ in range(helpers)]
    for i, part in enumerate(parts):
        while not made[i].is_set():
            if not work():
                made[i].wait()
        take(*part)
    for job in jobs:
        job.result()
