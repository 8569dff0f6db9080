"""A heartbeat: a rank that dies or stops ends the job, with a sentence that names it, instead of leaving it to wait."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from adahop.distributed.peers import Peers, join, launched, leave, meeting

BEAT = 1.0  # seconds between two beats
LOST = 20.0  # without a beat for so long, a rank is lost
DONE = "done"


class Heart:
    """A thread that says `here` at the meeting point every second, and listens for the others."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store = meeting(timedelta(seconds=LOST))  # a line of its own
        self.store.set(f"who/{self.rank}", f"{socket.gethostname()} {os.getpid()}")
        self.store.set(self._beat(self.rank), "0")
        others = [r for r in range(self.size) if r != self.rank]
        found = [self.store.get(f"who/{r}").decode().split() for r in others]  # waits for them
        self.who = {r: (host, int(pid)) for r, (host, pid) in zip(others, found, strict=True)}
        self.heard: dict[int, tuple[str, float]] = {r: ("", time.monotonic()) for r in others}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._go, name="adahop-heart", daemon=True)
        self.thread.start()

    def _beat(self, rank: int) -> str:
        return f"beat/{rank}"

    def _go(self) -> None:
        beats = 0
        while not self.over.wait(BEAT):
            beats += 1
            try:
                self.store.set(self._beat(self.rank), str(beats))
                self.listen()
            except RuntimeError:  # the meeting point itself is gone
                if not self.over.is_set():
                    _end("the process that started the job, or rank 0, cannot be reached any more")
            lost = [r for r, (said, when) in self.heard.items() if said != DONE and time.monotonic() - when > LOST]
            if lost and not self.over.is_set():
                _end(f"{self.named(lost[0])} has not been heard of for {LOST:.0f} s")

    def listen(self) -> None:
        for r in self.heard:
            said = self.store.get(self._beat(r)).decode()
            if said != self.heard[r][0]:
                self.heard[r] = said, time.monotonic()

    def named(self, rank: int) -> str:
        host, pid = self.who[rank]
        return f"rank {rank} (process {pid} on {host})"

    def dead(self) -> str | None:
        """A rank of this machine whose process is no more."""
        for r, (host, pid) in self.who.items():
            if host == socket.gethostname() and not _alive(pid):
                return self.named(r)
        return None

    def blame(self, error: Exception) -> NoReturn:
        """A call failed: say who is gone. On other machines silence must tell, and the thread then ends the process."""
        until = time.monotonic() + LOST + 5
        while time.monotonic() < until:
            name = self.dead()
            if name is not None:
                _end(f"{name} died")
            time.sleep(0.2)
        raise error

    def stop(self) -> None:
        self.over.set()
        self.thread.join()
        with contextlib.suppress(RuntimeError):
            self.store.set(self._beat(self.rank), DONE)


def _alive(pid: int) -> bool:
    """A process that ended but was not waited for yet is a zombie, and dead."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        with contextlib.suppress(OSError):
            return stat.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _end(sentence: str) -> NoReturn:
    goes_on = "the job ends, and --resume goes on from its last checkpoint"
    print(f"adahop: {sentence}; {goes_on}", file=sys.__stderr__, flush=True)
    os._exit(1)


@contextlib.contextmanager
def session(device: str = "cpu") -> Iterator[bool]:
    """Inside, this process is one of several where torchrun started several; yields whether it is the first.

    The first alone prints and writes. A rank that dies inside is named by the others, which end. A process group that
    was there before is left as it is, and to its maker to watch over.
    """
    if not launched():
        yield True
        return
    if not join(device):
        first = dist.get_rank() == 0
        with contextlib.nullcontext() if first else _quiet():
            yield first
        return
    heart = Heart()
    try:
        with contextlib.nullcontext() if heart.rank == 0 else _quiet():
            yield heart.rank == 0
    except RuntimeError as error:
        if not _of_a_peer(error):
            raise
        heart.blame(error)
    heart.stop()
    Peers().wait()  # the first may keep the meeting point: it stays until all have turned away from it
    leave()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def _of_a_peer(error: RuntimeError) -> bool:
    """Whether it came from a call to others that was not answered."""
    words = ("closed by peer", "reset by peer", "broken pipe", "gloo", "nccl", "timed out", "connection")
    return isinstance(error, dist.DistError) or any(w in str(error).lower() for w in words)
