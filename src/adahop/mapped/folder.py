"""Arrays on disk: a folder of .npy files with a manifest, mapped into memory."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from adahop.checks import InputError
from adahop.ops import no_more_than_asked
from adahop.records import write_whole

MANIFEST = "manifest.json"
FORMATS = ("adahop folder 1", "adahop folder 2")  # in the second, rows begin with an added self-loop
PIECE = 1 << 24  # bytes read at once
Arrays = dict[str, np.ndarray]


class Folder:
    """Writes a folder of arrays, completely or not at all: under a temporary name, renamed when it is complete.

    `save` writes an array; `array` returns one to fill piece by piece, which need not fit into memory.

    >>> import tempfile; home = Path(tempfile.mkdtemp()) / "graph"
    >>> with Folder(home, {"name": "two"}) as folder: folder.save("x", np.ones(2))
    >>> read(home)[0]["x"].tolist()
    [1.0, 1.0]
    """

    def __init__(self, path: str | Path, meta: dict[str, Any] | None = None):
        self.path, self.meta = Path(path), dict(meta or {})
        self.part = self.path.parent / f".{self.path.name}.{os.getpid()}.part"
        self.names: list[str] = []

    def __enter__(self) -> Folder:
        if not self.path.name or self.path.exists():
            raise InputError(f"`out` must be a folder that does not exist yet, got {self.path}")
        try:
            shutil.rmtree(self.part, ignore_errors=True)
            self.part.mkdir(parents=True)
        except OSError as e:
            raise InputError(f"`out` must be a folder that can be written, got {self.path} ({e.strerror})") from None
        return self

    def array(self, name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """A mapped array of zeros in a file of its own."""
        path, kind = self.part / f"{name}.npy", np.dtype(dtype)
        self.names.append(name)
        try:
            with open(path, "wb") as f:
                head = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(f, head)
                _reserve(f, f.tell() + math.prod(shape) * kind.itemsize)
        except OSError as e:
            raise InputError(f"{self.path} must have room for {name}, got {e.strerror or e}") from None
        return np.load(path, mmap_mode="r+", allow_pickle=False) if math.prod(shape) else np.zeros(shape, kind)

    def save(self, name: str, values: Any) -> None:
        values = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
        out = self.array(name, values.dtype, values.shape)
        out[...] = values

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._close()
        finally:
            shutil.rmtree(self.part, ignore_errors=True)

    def _close(self) -> None:
        arrays = {}
        for name in self.names:
            path = self.part / f"{name}.npy"
            with open(path, "r+b") as f:
                os.fsync(f.fileno())
            arrays[name] = {"bytes": path.stat().st_size, "crc32": _crc(path)}
        text = json.dumps(
            {"format": FORMATS[bool(self.meta.get("loops"))], "arrays": arrays, "meta": self.meta}, indent=1
        )
        (self.part / MANIFEST).write_text(text)
        try:
            os.rename(self.part, self.path)
        except OSError as e:
            if not (self.path / MANIFEST).is_file():  # unless another process has written the same folder meanwhile
                raise InputError(f"{self.path} must be writable, got {e.strerror or e}") from None


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The arrays of a folder, mapped, and its meta; every file is checked against the manifest's checksum first.

    The check reads each file once, at the disk's speed; ADAHOP_TRUST=1 leaves it out (sizes are still compared).
    """
    arrays, meta = manifest(path)
    out = {}
    for name, known in arrays.items():
        file = path / f"{name}.npy"
        if not file.is_file() or file.stat().st_size != known["bytes"]:
            got = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
            raise InputError(f"{file} must have the {known['bytes']} bytes that {MANIFEST} names, got {got}")
        if not os.environ.get("ADAHOP_TRUST") and _crc(file) != known["crc32"]:
            raise InputError(f"{file} must be as it was written, got another checksum than that in {MANIFEST}")
        out[name] = open_array(file)
    return out, meta


def manifest(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, meta) of a folder's manifest."""
    try:
        found = json.loads((path / MANIFEST).read_text())
        arrays, meta = found["arrays"], found["meta"]
        fine = found["format"] in FORMATS and isinstance(meta, dict)
        fine = fine and all(n.isidentifier() and {"bytes", "crc32"} <= set(a) for n, a in arrays.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        fine = False
    if not fine:
        raise InputError(f"{path} must be a folder of `adahop convert --mmap`, got no readable {MANIFEST}")
    return arrays, meta


def open_array(path: Path) -> Tensor:
    """The array of a .npy file, mapped: pages are read on access. Writes change this process's copy only."""
    try:
        with open(path, "rb") as f:
            version = np.lib.format.read_magic(f)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = header(f)
            many, start = math.prod(shape), f.tell()
            if fortran or dtype.hasobject or os.fstat(f.fileno()).st_size < start + many * dtype.itemsize:
                raise ValueError("truncated, in Fortran order or not numbers")
            if many == 0:
                return torch.from_numpy(np.zeros(shape, dtype))
            return torch.from_numpy(np.frombuffer(_private(f), dtype, many, start).reshape(shape))
    except (OSError, ValueError, TypeError) as e:
        raise InputError(f"{path} must be a .npy file of numbers, got {type(e).__name__}: {e}") from None


def scratch(folder: str | Path, shape: tuple[int, ...], dtype: torch.dtype, reserve: bool = True) -> Tensor:
    """Zeros in a nameless file of the folder: written to the disk when memory is short, deleted with the process.

    Without `reserve`, only what is written takes space on the disk.
    """
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    size = math.prod(shape) * kind.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    try:
        with tempfile.TemporaryFile(dir=folder) as f:
            if reserve:
                _reserve(f, size)
            else:
                os.ftruncate(f.fileno(), size)
            pages = mmap.mmap(f.fileno(), size)
    except OSError as e:
        raise InputError(f"`state` must be a folder with room for {size} bytes, got {folder} ({e.strerror})") from None
    return no_more_than_asked(torch.from_numpy(np.frombuffer(pages, kind).reshape(shape)))


def cache_path(*names: str) -> Path:
    """A path in the cache: below ADAHOP_CACHE, or ~/.cache/adahop."""
    return Path(os.environ.get("ADAHOP_CACHE") or Path.home() / ".cache" / "adahop").joinpath(*names)


def cached_arrays(path: Path, fits: Callable[[Arrays], bool], make: Callable[[], Arrays]) -> Arrays:
    """The arrays of a .npz file. If it cannot be read or does not `fit`, they are made, and written if possible."""
    with contextlib.suppress(Exception), np.load(path, allow_pickle=False) as z:  # missing, truncated, of another kind
        found = {name: z[name] for name in z.files}
        if fits(found):
            return found
    made = make()
    with contextlib.suppress(OSError, InputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda f: np.savez(f, **made))  # type: ignore[arg-type]
    return made


def _private(f: BinaryIO) -> mmap.mmap:
    """Copy on write, so that the file cannot be changed; no memory is reserved for the copies."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return mmap.mmap(f.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _reserve(f: Any, size: int) -> None:
    """Reserve space on the disk: a mapped page that finds none later would kill the process."""
    f.flush()
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(f.fileno(), 0, size)
    else:
        os.ftruncate(f.fileno(), size)


def _crc(path: Path) -> int:
    value = 0
    with open(path, "rb") as f:
        while piece := f.read(PIECE):
            value = zlib.crc32(piece, value)
    return value
