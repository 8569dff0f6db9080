"""Run what is to be done, here or in processes, with a display of what is done, running and left."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from adahop.checks import InputError
from adahop_lab.experiments.find import fetch
from adahop_lab.experiments.plan import Job, after_search, alone, finish
from adahop_lab.experiments.store import Store
from adahop_lab.experiments.work import Piece, Setting, one_thread, settle, work


class Progress:
    """What a person sees meanwhile."""

    def __init__(self, jobs: list[Job], workers: int):
        self.jobs, self.workers = jobs, workers
        self.running: dict[int, tuple[Job, Piece, float]] = {}
        self.spent: dict[str, list[float]] = {}  # seconds of the pieces that are done, by data set
        self.screen = Console(stderr=True)

    def counts(self) -> tuple[int, int, int]:
        """Cells done, running, left."""
        own = [job for job in self.jobs if not job.reason]
        busy = {id(job) for job, _, _ in self.running.values()}
        done = sum(not job.left for job in own)
        return done, len(busy), len(own) - done - len(busy)

    def line(self) -> str:
        done, running, left = self.counts()
        need = self.need()
        when = f"about {max(1, math.ceil(need / 60))} min still needed" if need else ""
        return ", ".join(filter(None, [f"{done} cells done", f"{running} running", f"{left} left", when]))

    def need(self) -> float:
        """Seconds still needed, judged by the pieces of the same data set, or by all where there is none yet."""
        every = [seconds for some in self.spent.values() for seconds in some]
        if not every:
            return 0.0
        left: dict[str, int] = {}
        for job in self.jobs:
            left[job.cell.dataset] = left.get(job.cell.dataset, 0) + job.left
        return sum(n * statistics.fmean(self.spent.get(name, every)) for name, n in left.items()) / self.workers

    def table(self) -> Table:
        table = Table("running", "", "seconds", title=self.line(), title_justify="left", box=None)
        for job, piece, began in list(self.running.values()):
            table.add_row(str(job.cell.place), piece.name, f"{time.perf_counter() - began:.0f}")
        return table

    def note(self, job: Job, piece: Piece, said: dict[str, Any]) -> None:
        """A line where there is no terminal, or when something failed."""
        what = f"{job.cell.place} {piece.name}"
        if "failed" in said:
            job.failed.append(f"{piece.name}: {said['failed']}")
            self.screen.print(f"{what} failed: {said['failed']}", highlight=False, markup=False, soft_wrap=True)
            print(said["traceback"], file=sys.stderr)
            return
        self.spent.setdefault(job.cell.dataset, []).append(said["seconds"])
        if not self.screen.is_terminal:
            scores = "".join(f" {key} {said[key]:.4f}" for key in ("test", "val") if key in said)
            print(f"{what}:{scores} in {said['seconds']:.1f} s; {self.line()}", file=sys.stderr, flush=True)


def run_all(jobs: list[Job], setting: Setting, renew: bool) -> None:
    """Every piece that waits. A piece that fails is told, the others go on; a cell's file is there once it is done."""
    store, board = Store(setting.out), Progress(jobs, setting.jobs)
    for name in {job.cell.dataset for job in jobs if job.waiting} if setting.download else ():
        fetch(name, list(setting.folders), download=True)  # once, not by every worker
    live = Live(get_renderable=board.table, console=board.screen, refresh_per_second=2, transient=True)
    with live if board.screen.is_terminal else contextlib.nullcontext():
        for job in jobs:
            finish(job, store)  # killed between its last run and its file
        together = [job for job in jobs if not alone(job)]
        if setting.jobs > 1 and any(job.waiting for job in together):
            _in_processes(together, setting, board, renew)
        board.workers = 1
        with one_thread():
            for job in jobs:
                for piece in _pieces(job, store, renew):
                    _start(board, job, piece)
                    _ended(board, job, piece, work(piece, setting), store)


def _pieces(job: Job, store: Store, renew: bool) -> Iterator[Piece]:
    """Those that wait, and after a search those that it made possible."""
    while job.waiting:
        yield job.waiting[0]
        _searched(job, store, renew)


def _start(board: Progress, job: Job, piece: Piece) -> None:
    job.waiting.remove(piece)
    job.out += 1
    board.running[id(piece)] = (job, piece, time.perf_counter())


def _ended(board: Progress, job: Job, piece: Piece, said: dict[str, Any], store: Store) -> None:
    job.out -= 1
    del board.running[id(piece)]
    board.note(job, piece, said)
    finish(job, store)


def _searched(job: Job, store: Store, renew: bool) -> None:
    if job.search and job.grid is None and job.over and not job.failed:
        after_search(job, store, renew)


def _in_processes(jobs: list[Job], setting: Setting, board: Progress, renew: bool) -> None:
    """As many at a time as there are workers; a cell's seeds go out side by side."""
    store, context = Store(setting.out), multiprocessing.get_context("spawn")
    out: dict[Future[Any], tuple[Job, Piece]] = {}
    pool = ProcessPoolExecutor(setting.jobs, mp_context=context, initializer=settle)
    try:
        while True:
            for job in jobs:
                while job.waiting and len(out) < setting.jobs:
                    piece = job.waiting[0]
                    future = pool.submit(work, piece, setting)
                    _start(board, job, piece)
                    out[future] = (job, piece)
            if not out:
                return
            for future in wait(out, return_when=FIRST_COMPLETED).done:
                job, piece = out.pop(future)
                _ended(board, job, piece, future.result(), store)
                _searched(job, store, renew)
    except BrokenProcessPool:
        lost = ", ".join(f"{job.cell.place} {piece.name}" for job, piece in out.values())
        raise InputError(f"every worker must live to the end, got one killed (out of memory?) with {lost}") from None
    finally:
        for child in multiprocessing.active_children() if out else ():  # left in a hurry
            child.kill()
        pool.shutdown(wait=True, cancel_futures=True)
