"""The memory of a process, and processes that print a line of JSON at their end, within a limit where one is asked."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GROUPS = Path("/sys/fs/cgroup")


def memory(word: str = "VmRSS") -> int:
    """A line of /proc/self/status in bytes: VmRSS is what is in memory, RssAnon that without files, VmHWM the most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(word + ":"):
            return int(line.split()[1]) * 1024
    return 0


class Peak:
    """The largest anonymous memory seen, looked at twenty times a second."""

    def __enter__(self) -> Peak:
        self.value, self.done = 0, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        return self

    def _look(self) -> None:
        while not self.done.wait(0.05):
            self.value = max(self.value, memory("RssAnon"))

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()


def printed(command: list[str], **options: Any) -> dict[str, Any]:
    """What a command prints last."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, **options)
    return json.loads(done.stdout.splitlines()[-1])


def limited(command: list[str], mib: int) -> dict[str, Any] | None:
    """The same in a memory control group of this limit, and what the limit was; None where no group can be made."""
    with _group(mib * 2**20) as home:
        if home is None:
            return None
        out = printed(command, preexec_fn=lambda: (home / "cgroup.procs").write_text(str(os.getpid())))
        peak = next((home / k for k in ("memory.peak", "memory.max_usage_in_bytes") if (home / k).is_file()), None)
        out["limit"] = f"memory control group, {mib} MiB, page cache counted"
        return {**out, "group_peak_mib": int(peak.read_text()) / 2**20 if peak else None}


@contextlib.contextmanager
def _group(limit: int) -> Iterator[Path | None]:
    """A memory control group, v2 or v1."""
    v2 = (GROUPS / "cgroup.controllers").is_file()
    home = (GROUPS if v2 else GROUPS / "memory") / f"adahop-bench-{os.getpid()}"
    try:
        home.mkdir()
        (home / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(limit))
    except OSError:
        with contextlib.suppress(OSError):
            home.rmdir()
        yield None
        return
    try:
        yield home
    finally:
        for _ in range(50):
            with contextlib.suppress(OSError):
                home.rmdir()
                break
            time.sleep(0.1)


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Inside, no other process measures that asks for its turn: $ADAHOP_TURN names the file that they share."""
    name = os.environ.get("ADAHOP_TURN")
    with open(name or os.devnull, "w") as held:
        if name:
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def forget(folder: str | Path) -> None:
    """Out of the page cache: what another process read does not count for the limited one, and would help it."""
    for path in Path(folder).rglob("*.npy"):
        with open(path, "rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
