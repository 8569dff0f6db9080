"""Run a nogil kernel over ranges in threads; every output has one writer, so results never depend on the count."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

_wanted: int | None = None
SMALL = 20_000  # edges to draw: below this much work a second thread costs more than it gives
LATE = 6_000  # and as many are drawn before another thread has begun


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


def over(kernel: Callable, n: int, *args, work: np.ndarray | int = 1, light: int = 1) -> None:
    """kernel(lo, hi, *args) over [0, n) in parts of equal time, see `cuts`."""
    at = cuts(n, work, light)
    begun = [_workers.begin(kernel, lo, hi, *args) for lo, hi in pairwise(at[1:]) if hi > lo]
    try:
        kernel(at[0], at[1], *args)
    finally:
        _workers.end_all(begun)


def parts(n: int, work: int, light: int = 1) -> int:
    """In how many parts n items are cut; `light` of their work take the time of drawing an edge."""
    return min(get_threads(), n, work // (SMALL * light) + 1)


def cuts(n: int, work: np.ndarray | int, light: int = 1) -> list[int]:
    """Where [0, n) is cut for the threads; the first part is longer, as the other threads must be woken.

    `work` is one number for every item, or the cumulative sums [n + 1] of them.
    """
    total = n * work if isinstance(work, int) else int(work[n]) if n else 0
    many = parts(n, total, light)
    if many <= 1:
        return [0, n]
    each = max(total - LATE * light, 0) / many
    upto = total - each * np.arange(many - 1, 0, -1)
    inner = upto / work if isinstance(work, int) else np.searchsorted(work[: n + 1], upto)
    return [0, *(min(int(at), n) for at in inner), n]


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
    others = [(lo, hi) for lo, hi in pairwise(cuts[1:]) if hi > lo]
    begun = [_workers.begin(make, *part) for part in others]
    try:
        here(cuts[0], cuts[1])
        for part in others:
            _workers.end(begun.pop(0))
            take(*part)
    finally:
        _workers.end_all(begun)


class Worker:
    """A thread that makes one call at a time. A hop waits for it: two locks take a third less time than a Future."""

    def __init__(self) -> None:
        self.call: tuple[Callable, tuple] | None = None
        self.error: BaseException | None = None
        self.go, self.done = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.done.acquire()
        threading.Thread(target=self._run, name="adahop", daemon=True).start()

    def begin(self, call: Callable, args: tuple) -> None:
        self.call = call, args
        self.go.release()

    def end(self) -> BaseException | None:
        """Wait for the call; what it raised."""
        self.done.acquire()
        error, self.error = self.error, None
        return error

    def _run(self) -> None:
        while True:
            self.go.acquire()
            assert self.call is not None
            call, args = self.call
            try:
                call(*args)
            except BaseException as e:
                self.error = e
            self.call = None
            del call, args  # what was handed over may be freed
            self.done.release()


class Workers:
    """Threads that wait for work; more are made as they are needed. A fork has none of its parent's."""

    def __init__(self) -> None:
        self.idle: list[Worker] = []
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.idle.clear)

    def begin(self, call: Callable, *args) -> Worker:
        """Make the call in another thread, now; `end` must be called for it."""
        worker = self.idle.pop() if self.idle else Worker()
        worker.begin(call, args)
        return worker

    def end(self, worker: Worker) -> None:
        error = worker.end()
        self.idle.append(worker)  # not where waiting was interrupted: it still works
        if error is not None:
            raise error

    def end_all(self, begun: Sequence[Worker]) -> None:
        """Wait for all, then raise the first error."""
        errors = []
        for worker in begun:
            try:
                self.end(worker)
            except BaseException as e:
                errors.append(e)
        if errors:
            raise errors[0]


_workers = Workers()
