"""Tables from CSV, TSV and Parquet files, in chunks; errors name the line."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adahop.checks import InputError

CHUNK = 1 << 17  # lines parsed at a time
TEXT = (".csv", ".tsv", ".txt", ".edges")
KINDS: dict[str, Any] = {"whole": np.int64, "real": np.float32, "text": object}
KNOWN = {"src", "dst", "source", "target", "from", "to", "weight", "id", "node", "node_id", "label", "y"}
BAD = (ValueError, IndexError, OverflowError, DeprecationWarning)
Tell = Callable[[Path, int, int], None]  # called with the file, the bytes read and the total bytes


class Field(NamedTuple):
    """Columns that are read as one array: which, and as whole numbers, real ones or text."""

    at: list[int]
    kind: str
    hint: str = ""  # what a user may have meant who put something else there


class Head(NamedTuple):
    """The head of a table: the columns' names in lower case (None: no header), the first row, the separator."""

    names: list[str] | None
    first: list[str]
    sep: str | None
    skip: int

    def find(self, *words: str) -> int | None:
        """The first column with one of these names."""
        return next((i for i, name in enumerate(self.names or ()) if name in words), None)


class Columns(NamedTuple):
    """The arrays of the fields asked for, [rows, columns] each."""

    path: Path
    columns: list[np.ndarray]
    skip: int

    def where(self, row: int) -> str:
        """The line of a row, for an error: counted again, since blank lines and comments are not rows."""
        if self.path.suffix in (".parquet", ".npy", ".npz"):
            return f"{self.path}, row {row}"
        with opened(self.path) as (lines, _):
            data = (n for n, line in enumerate(lines, 1) if n > self.skip and is_row(line))
            return f"{self.path}, line {next(itertools.islice(data, row, None))}"


def is_row(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


class opened:
    """A text file, gzip or not, and the raw file below it, whose position is the reading progress."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> tuple[io.TextIOWrapper, Any]:
        try:
            self.raw = open(self.path, "rb")
        except OSError as e:
            raise InputError(f"{self.path} must be a readable file, got {e.strerror}") from None
        plain: Any = gzip.GzipFile(fileobj=self.raw) if self.path.suffix == ".gz" else self.raw
        return io.TextIOWrapper(plain, encoding="utf-8-sig"), self.raw

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.raw.close()
        if isinstance(error, UnicodeDecodeError | EOFError | zlib.error | gzip.BadGzipFile):
            raise InputError(f"{self.path} must be whole text in UTF-8, got {type(error).__name__}: {error}") from None


def read(path: Path, choose: Callable[[Head], list[Field]], words: bool = False, tell: Tell | None = None) -> Columns:
    """The table at `path`; `choose` sees its head and names the fields. `words`: cells may be text, so that a header
    is known by its words alone."""
    if path.suffix == ".parquet":
        return _parquet(path, choose)
    if path.with_suffix("" if path.suffix == ".gz" else path.suffix).suffix not in TEXT:
        raise InputError(f"a table must be one of {', '.join(TEXT)}, each also with .gz, or .parquet, got {path}")
    head = _head(path, words)
    fields = choose(head)
    parts: list[list[np.ndarray]] = []
    with opened(path) as (lines, raw):
        total = path.stat().st_size
        for _ in range(head.skip):
            next(lines)
        for start in itertools.count(head.skip + 1, CHUNK):
            chunk = list(itertools.islice(lines, CHUNK))
            if not chunk:
                break
            parts.append(_parsed(path, chunk, start, head, fields))
            if tell is not None:
                tell(path, raw.tell(), total)
    return Columns(path, [np.concatenate(c) for c in zip(*parts, strict=True)], head.skip)


def _head(path: Path, words: bool) -> Head:
    with opened(path) as (lines, _):
        rows = ((n, line.strip()) for n, line in enumerate(lines, 1) if is_row(line))
        n, line = next(rows, (0, ""))
        sep = next((s for s in "\t,;" if s in line), None)
        if sep is None and len(line.split()) == 1:
            sep = ","  # one column, whose cells may be several words
        cells = _cells([line], sep)[0] if line else []
        if not cells:
            raise InputError(f"{path} must have at least one row, got none")
        after = next(rows, None)
        below = _cells([after[1]], sep)[0] if after else []
        if not _is_header(cells, below, words):
            return Head(None, cells, sep, n - 1)
        if after is None:
            raise InputError(f"{path} must have at least one row below its header, got none")
        return Head([c.lower() for c in cells], below, sep, n)


def _is_header(cells: list[str], below: list[str], words: bool) -> bool:
    """A known word, or (where ids are numbers) a word above a number."""
    if {c.lower() for c in cells} & KNOWN:
        return True
    return not words and any(is_number(b) and not is_number(c) for c, b in zip(cells, below, strict=False))


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _cells(lines: list[str], sep: str | None) -> list[list[str]]:
    if sep is None:
        return [line.split() for line in lines]
    return [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=sep)]


def _parsed(path: Path, chunk: list[str], start: int, head: Head, fields: list[Field]) -> list[np.ndarray]:
    """The chunk's arrays; where it cannot be parsed, its lines one by one, until the first bad one is found."""
    try:
        return _parse(chunk, head, fields)
    except BAD:
        for n, line in enumerate(chunk, start):
            try:
                _parse([line], head, fields)
            except BAD:
                columns = f"{len(head.first)} column{'s' if len(head.first) > 1 else ''}"
                wanted = f"{columns}, " + " and ".join(map(_wanted, fields))
                hint = next((f"; {f.hint}" for f in fields if f.hint), "")
                raise InputError(f"{path}, line {n} must hold {wanted}, got '{line.strip()[:60]}'{hint}") from None
        raise


def _even(lines: list[str], head: Head) -> None:
    """Every row must be as wide as the first: a longer one would be truncated silently."""
    sep, width = head.sep, len(head.first)
    for line in lines:
        if (len(line.split()) if sep is None else line.count(sep) + 1) != width and is_row(line):
            if sep is not None and '"' in line and len(_cells([line], sep)[0]) == width:
                continue  # a separator within quotes
            raise ValueError("columns")


def _wanted(field: Field) -> str:
    columns = f"column {field.at[0] + 1}" if len(field.at) == 1 else f"{len(field.at)} of them"
    return f"{'text' if field.kind == 'text' else field.kind + ' numbers'} in {columns}"


def _parse(lines: list[str], head: Head, fields: list[Field]) -> list[np.ndarray]:
    """The arrays of these lines; an empty cell is no number, nan, where there may be such."""
    _even(lines, head)
    if all(f.kind != "text" for f in fields):
        with contextlib.suppress(*BAD):  # an empty cell, or a bad one: cell by cell
            return _numbers(lines, head, fields)
    rows = _cells([line for line in lines if is_row(line)], head.sep)
    gap = {"real": "nan"}
    cut = [[[row[c] or gap.get(f.kind, "") for c in f.at] for row in rows] for f in fields]
    return [np.array(c, KINDS[f.kind]).reshape(len(rows), len(f.at)) for c, f in zip(cut, fields, strict=True)]


def _numbers(lines: list[str], head: Head, fields: list[Field]) -> list[np.ndarray]:
    columns = [c for f in fields for c in f.at]
    dtype = np.dtype([(str(i), KINDS[f.kind], (len(f.at),)) for i, f in enumerate(fields)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a chunk of blank lines is valid
        warnings.simplefilter("error", DeprecationWarning)  # 3.7 is no whole number, though numpy would still take it
        out = np.loadtxt(lines, dtype, delimiter=head.sep, usecols=columns, quotechar='"', ndmin=1)
    return [out[str(i)].reshape(len(out), len(f.at)) for i, f in enumerate(fields)]


def _parquet(path: Path, choose: Callable[[Head], list[Field]]) -> Columns:
    try:
        import pandas as pd
        import pyarrow  # noqa: F401
    except ImportError as e:
        raise InputError(f"{path} must have {e.name} to be read: pip install adahop[parquet], got none") from None
    try:
        frame = pd.read_parquet(path)
    except Exception as e:
        raise InputError(f"{path} must be a readable Parquet file, got {type(e).__name__}: {str(e)[:100]}") from None
    if frame.empty:
        raise InputError(f"{path} must have at least one row, got none")
    names = [str(c).lower() for c in frame.columns]
    fields = choose(Head(names, [str(v) for v in frame.iloc[0]], None, 0))
    return Columns(path, [_frame_columns(path, frame, f) for f in fields], 0)


def _frame_columns(path: Path, frame: Any, field: Field) -> np.ndarray:
    part = frame.iloc[:, field.at]
    if bool(part.isna().to_numpy().any()) and field.kind != "real":
        raise InputError(f"{path}, row {int(part.isna().any(axis=1).to_numpy().argmax())} must hold no gaps, got one")
    try:
        return part.astype(str).to_numpy(object) if field.kind == "text" else part.to_numpy(KINDS[field.kind])
    except (ValueError, TypeError, OverflowError) as e:
        raise InputError(f"{path} must hold {field.kind} values in {list(part.columns)}, got {str(e)[:80]}") from None
