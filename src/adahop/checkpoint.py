"""Checkpoints: the last two states of a run in a folder, each with a checksum; the newest intact one is used."""

from __future__ import annotations

import contextlib
import hashlib
import io
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from adahop.checks import InputError, KindError, function
from adahop.features import SparseFeatures, TypedFeatures
from adahop.records import write_whole
from adahop.seams import NodeData

MARK = b"adahop checkpoint 1\n"  # the end of every file; before it come what torch saved and the checksum
DIGEST = 32
KEEP = 2  # the previous one is kept in case the newest is damaged
SHARE = 20  # every="auto": writing takes at most 1 / SHARE of the time


class Checkpoints:
    """The states of one run, in files `<name>-<number>.ckpt` of a folder; `fit(..., checkpoint=...)` writes and reads.

    `every` says how often, besides the end of each epoch: a number of steps, "30s" for seconds, or "auto" for at most a
    twentieth of the time (ends of epochs included). `say` is called with a sentence about each damaged file.

    >>> Checkpoints("runs/a", every="30s").pace
    ('seconds', 30.0)
    """

    def __init__(
        self,
        folder: str | Path,
        every: int | str = "auto",
        name: str = "run",
        say: Callable[[str], None] | None = None,
    ):
        if not isinstance(folder, str | Path) or not str(folder):
            raise KindError(f"`checkpoint` must be a folder, got {folder!r}")
        self.folder, self.name, self.pace = Path(folder), name, pace(every)
        self.say = function(say, "say") or _warn
        self.writes = True  # only one of several processes writes
        self._wrote, self._cost = time.monotonic(), 0.0
        self._found: dict[str, Any] | None = None

    @staticmethod
    def of(given: Checkpoints | str | Path) -> Checkpoints:
        return given if isinstance(given, Checkpoints) else Checkpoints(given)

    # --- writing ---------------------------------------------------------------------------------------------------

    def due(self, step: int, end: bool = False) -> bool:
        """Whether to write a state after this step, or at an epoch's `end`."""
        kind, many = self.pace
        if not self.writes:
            return False
        if kind == "auto":
            return time.monotonic() - self._wrote >= SHARE * self._cost
        return end or (step % many == 0 if kind == "steps" else time.monotonic() - self._wrote >= many)

    def save(self, state: dict[str, Any]) -> Path:
        """Writes one more file and deletes all but the last two."""
        began = time.monotonic()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise InputError(
                f"`checkpoint` must be a folder that can be written, got {self.folder} ({e.strerror})"
            ) from None
        files = self.files()
        path = self.folder / f"{self.name}-{self._number(files[-1]) + 1 if files else 1:08d}.ckpt"
        write_whole(path, lambda f: _fill(f, state))
        for old in files[: 1 - KEEP or None]:
            old.unlink(missing_ok=True)
        self._wrote = time.monotonic()
        self._cost = self._wrote - began
        return path

    # --- reading ---------------------------------------------------------------------------------------------------

    def files(self) -> list[Path]:
        """Existing files, oldest first."""
        found = self.folder.glob(f"{self.name}-*.ckpt")
        return sorted((p for p in found if self._number(p) >= 0), key=self._number)

    def _number(self, path: Path) -> int:
        tail = path.stem.removeprefix(f"{self.name}-")
        return int(tail) if tail.isascii() and tail.isdigit() else -1

    def last(self) -> dict[str, Any] | None:
        """The newest intact state, read once; None if there is no file. Damaged files are reported."""
        if self._found is None:
            files = self.files()
            for path in reversed(files):
                try:
                    self._found = read(path)
                    break
                except InputError as e:
                    more = path != files[0]
                    self.say(f"{e}; {'the previous one is used' if more else 'none is left'}")
            if files and self._found is None:
                many = f"{len(files)} damaged" if len(files) > 1 else "a damaged one"
                raise InputError(
                    f"{self.folder} must hold an intact checkpoint, got {many}; delete the files to start again"
                )
        return self._found

    def until(self, step: int) -> dict[str, Any] | None:
        """The newest intact state with at most `step` steps."""
        for path in reversed(self.files()):
            with contextlib.suppress(InputError):
                state = read(path)
                if state["result"]["steps"] <= step:
                    return state
        return None

    def take(self) -> dict[str, Any] | None:
        """`last()`, without keeping a reference."""
        state, self._found = self.last(), None
        return state


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=2)


def pace(every: Any) -> tuple[str, float]:
    """("steps", n), ("seconds", s) or ("auto", 0)."""
    text = str(every)
    try:
        if text == "auto":
            return "auto", 0
        kind, many = ("seconds", float(text[:-1])) if text.endswith("s") else ("steps", int(text))
        if not isinstance(every, bool) and 0 < many < float("inf"):
            return kind, many
    except ValueError:
        pass
    raise InputError(f"`checkpoint_every` must be a number of steps, seconds like 30s, or auto, got {every!r}")


class _Tee:
    """Writes and hashes. An error is kept until torch's writer is done, since it does not handle one."""

    def __init__(self, f: BinaryIO):
        self.f, self.hash = f, hashlib.blake2b(digest_size=DIGEST)
        self.error: OSError | None = None

    def write(self, part: Any) -> int:
        if self.error is None:
            try:
                self.f.write(part)
                self.hash.update(part)
            except OSError as e:
                self.error = e
        return memoryview(part).nbytes

    def flush(self) -> None: ...


def _fill(f: BinaryIO, state: dict[str, Any]) -> None:
    tee = _Tee(f)
    torch.save(state, tee)  # type: ignore[arg-type]
    if tee.error is not None:
        raise tee.error
    f.write(tee.hash.digest() + MARK)


def read(path: Path) -> dict[str, Any]:
    """The state in a file; InputError if it is truncated, changed or not a checkpoint."""
    try:
        content = memoryview(path.read_bytes())
    except OSError as e:
        raise InputError(f"{path} must be a readable checkpoint, got {e.strerror or e}") from None
    if bytes(content[-len(MARK) :]) != MARK:
        raise InputError(f"{path} must be a complete checkpoint, got a file that is truncated or of another kind")
    payload, digest = content[: -len(MARK) - DIGEST], content[-len(MARK) - DIGEST : -len(MARK)]
    if hashlib.blake2b(payload, digest_size=DIGEST).digest() != bytes(digest):
        raise InputError(f"{path} must be as it was written, got another checksum")
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as e:
        raise InputError(f"{path} must be a readable checkpoint, got {type(e).__name__}") from None
    if not isinstance(state, dict) or "identity" not in state:
        raise InputError(f"{path} must hold the state of a run, got {type(state).__name__}")
    return state


def content_hash(data: NodeData) -> str:
    """Identifies the data of a run: graph, features, labels and splits."""
    h = hashlib.blake2b(data.graph.hash().encode(), digest_size=16)
    for part in ("x", "y", "train_mask", "val_mask", "test_mask"):
        for name, t in _tensors(part, getattr(data, part)):
            h.update(f"{name}:{t.dtype}:{tuple(t.shape)}".encode())
            h.update(t.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return h.hexdigest()


def _tensors(name: str, found: Any) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or those that features by type or sparse features consist of, by name."""
    if isinstance(found, TypedFeatures | SparseFeatures):
        for part, table in found.tables.items():
            yield from _tensors(name + part, table)
    elif found is not None:
        yield name, found


def agree(mine: dict[str, Any], saved: dict[str, Any]) -> None:
    """InputError unless a resumed run has the settings and data it started with."""
    for field in {**mine, **saved}:
        if mine.get(field) != saved.get(field):
            what = "the data's content" if field == "data" else f"`{field}`"
            raise InputError(f"{what} must be {saved.get(field)!r} as in the checkpoint, got {mine.get(field)!r}")
