"""Heartbeat: when a rank dies or hangs, the others name it and end instead of waiting for ever."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from adahop.distributed.peers import Peers, join, launched, leave, shared_store
from adahop.records import alive

BEAT = 1.0  # seconds between two beats
LOST = 20.0  # seconds without a beat after which a rank counts as lost
DONE = "done"


class Heartbeat:
    """A thread that writes a beat to the shared store every second and reads those of the other ranks."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store = shared_store(timedelta(seconds=LOST))  # a connection of its own
        self.store.set(f"who/{self.rank}", f"{socket.gethostname()} {os.getpid()}")
        self.store.set(self._beat(self.rank), "0")
        others = [r for r in range(self.size) if r != self.rank]
        found = [self.store.get(f"who/{r}").decode().split() for r in others]  # waits for them
        self.who = {r: (host, int(pid)) for r, (host, pid) in zip(others, found, strict=True)}
        self.seen: dict[int, tuple[str, float]] = {r: ("", time.monotonic()) for r in others}
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name="adahop-heartbeat", daemon=True)
        self.thread.start()

    def _beat(self, rank: int) -> str:
        return f"beat/{rank}"

    def _run(self) -> None:
        beats = 0
        while not self.stopped.wait(BEAT):
            beats += 1
            try:
                self.store.set(self._beat(self.rank), str(beats))
                self.read_beats()
            except RuntimeError:  # the store itself is gone
                if not self.stopped.is_set():
                    _end("the process that started the job, or rank 0, cannot be reached")
            lost = [r for r, (beat, when) in self.seen.items() if beat != DONE and time.monotonic() - when > LOST]
            if lost and not self.stopped.is_set():
                _end(f"{self.named(lost[0])} has sent no heartbeat for {LOST:.0f} s")

    def read_beats(self) -> None:
        for r in self.seen:
            beat = self.store.get(self._beat(r)).decode()
            if beat != self.seen[r][0]:
                self.seen[r] = beat, time.monotonic()

    def named(self, rank: int) -> str:
        host, pid = self.who[rank]
        return f"rank {rank} (process {pid} on {host})"

    def dead(self) -> str | None:
        """A rank on this machine whose process has ended."""
        for r, (host, pid) in self.who.items():
            if host == socket.gethostname() and not alive(pid):
                return self.named(r)
        return None

    def end_naming_dead(self, error: Exception) -> NoReturn:
        """A collective call failed: name the rank that died. Elsewhere the missing heartbeat ends this process."""
        until = time.monotonic() + LOST + 5
        while time.monotonic() < until:
            name = self.dead()
            if name is not None:
                _end(f"{name} died")
            time.sleep(0.2)
        raise error

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()
        with contextlib.suppress(RuntimeError):
            self.store.set(self._beat(self.rank), DONE)


def _end(sentence: str) -> NoReturn:
    then = "the job ends, and --resume continues from its last checkpoint"
    print(f"adahop: {sentence}; {then}", file=sys.__stderr__, flush=True)
    os._exit(1)


@contextlib.contextmanager
def session(device: str = "cpu") -> Iterator[bool]:
    """Joins the processes that torchrun started; yields whether this is rank 0, which alone prints and writes.

    If a rank dies inside, the others name it and end. A process group that exists already is used and left open, and
    watching its ranks is left to its owner.
    """
    if not launched():
        yield True
        return
    if not join(device):
        first = dist.get_rank() == 0
        with contextlib.nullcontext() if first else _quiet():
            yield first
        return
    heartbeat = Heartbeat()
    try:
        with contextlib.nullcontext() if heartbeat.rank == 0 else _quiet():
            yield heartbeat.rank == 0
    except RuntimeError as error:
        if not _of_a_peer(error):
            raise
        heartbeat.end_naming_dead(error)
    heartbeat.stop()
    Peers().barrier()  # rank 0 may host the store: it stays until all are done with it
    leave()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def _of_a_peer(error: RuntimeError) -> bool:
    """Whether the error came from a collective call that another rank did not answer."""
    words = ("closed by peer", "reset by peer", "broken pipe", "gloo", "nccl", "timed out", "connection")
    return isinstance(error, dist.DistError) or any(w in str(error).lower() for w in words)
