"""Files of a run: config, metrics, the best model. They are written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from adahop.checks import InputError


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block ends: raised inside a write of `torch.save`, it would break or abort the process."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[Any] = []
    signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(*held[-1])


@uninterrupted()
def write_whole(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Writes a temporary file, then renames: a reader sees the old file or the new one, never a part."""
    beside = path.parent / f".{path.name}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as f:
            f.write(content) if isinstance(content, bytes) else content(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(beside, path)
        _sync(path.parent)
    except OSError as e:
        raise InputError(f"{path} must be writable, got {e.strerror or e}") from None
    finally:
        beside.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Syncs the directory entry, where the system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sweep(folder: Path) -> None:
    """Deletes temporary files of processes that have ended."""
    for part in [*folder.glob(".*.part"), *folder.glob(".probe.*")]:
        pid = part.name.removesuffix(".part").rpartition(".")[2]
        if pid.isdigit() and not alive(int(pid)):
            shutil.rmtree(part, ignore_errors=True) if part.is_dir() else part.unlink(missing_ok=True)


def alive(pid: int) -> bool:
    """Whether a process of this machine runs; a zombie, not yet waited for, has ended."""
    if Path("/proc/self/stat").exists():
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


class Records:
    """A folder for one command's runs."""

    writes = True

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not str(folder):
            raise InputError("`out` must be a folder that can be written, got ''")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
            sweep(self.folder)
        except OSError as e:
            raise InputError(f"`out` must be a folder that can be written, got {folder} ({e.strerror})") from None

    def json(self, name: str, value: Any) -> None:
        write_whole(self.folder / name, (json_text(value, indent=2) + "\n").encode())

    def row(self, name: str, value: dict[str, Any]) -> None:
        """Appends a line to a JSONL file, completely or not at all."""
        path, line = self.folder / name, (json_text(value) + "\n").encode()
        try:
            with open(path, "ab", buffering=0) as f:
                size = f.seek(0, os.SEEK_END)
                try:
                    if f.write(line) != len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(f.fileno())
                except OSError:
                    with contextlib.suppress(OSError):
                        f.truncate(size)
                    raise
        except OSError as e:
            raise InputError(f"{path} must be writable, got {e.strerror or e}") from None

    def keep(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Deletes the other rows of a JSONL file, and truncated lines."""
        path = self.folder / name
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        kept = [line for line in lines if line.endswith(b"\n") and (row := _row(line)) is not None and wanted(row)]
        if len(kept) < len(lines):
            write_whole(path, b"".join(kept))

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def fresh(self, *names: str) -> None:
        """Deletes files of an earlier command with these names."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def drop(self, name: str) -> None:
        """Deletes a folder."""
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def tensors(self, name: str, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        with uninterrupted():
            torch.save(state, buffer)
        write_whole(self.folder / name, buffer.getvalue())


class Read(Records):
    """Records of another process: nothing is written."""

    writes = False

    def json(self, name: str, value: Any) -> None: ...
    def row(self, name: str, value: dict[str, Any]) -> None: ...
    def keep(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None: ...
    def fresh(self, *names: str) -> None: ...
    def drop(self, name: str) -> None: ...
    def tensors(self, name: str, state: dict[str, Any]) -> None: ...


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def json_text(value: Any, **style: Any) -> str:
    """Strict JSON: nan and infinity become null."""
    return json.dumps(_finite(value), allow_nan=False, **style)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
