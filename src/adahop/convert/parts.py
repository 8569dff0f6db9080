"""The parts of a graph, each from its file: edges, features, labels, splits. An error names file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adahop.checks import InputError, node_ids
from adahop.convert.tables import Columns, Field, Head, Tell, is_number, read
from adahop.datasets.files import dense

ID = ("id", "node", "node_id", "")  # pandas writes its index without a name
LABELS = "labels are one column, or several of 0 and 1"
ORDER = "the files are edges, features and labels, in this order"
PARTS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


class Ids:
    """Node ids of files as positions 0 .. n: numbers as they are, names by their order in the labels file."""

    def __init__(self, names: np.ndarray | None, n: int, known: str = ""):
        self.names, self.n = names, n
        default = f"in [0, {n}), one per row of features" if names is None else "one of those in the labels file"
        self.known = known or default
        self.kind = "whole" if names is None else "text"
        self.place = {} if names is None else {name: i for i, name in enumerate(names.tolist())}

    def of(self, table: Columns, column: np.ndarray) -> np.ndarray:
        """The positions of a column; the error names the first line with an unknown id."""
        ids = column
        if self.names is not None:
            ids = np.array([self.place.get(str(name), -1) for name in column.tolist()], np.int64)
        bad = (ids < 0) | (ids >= self.n)
        if bad.any():
            at = int(bad.argmax())
            raise InputError(f"{table.where(at)}: a node id must be {self.known}, got {column[at]}")
        return ids


class EdgeTable(NamedTuple):
    """The two ends of every edge as the file has them, its weight and its features where there are any."""

    table: Columns
    ends: tuple[np.ndarray, np.ndarray]
    weight: np.ndarray | None
    attr: np.ndarray | None

    def places(self, source: Ids, target: Ids) -> np.ndarray:
        """[2, E] the positions of both ends."""
        return np.stack([ids.of(self.table, end) for ids, end in zip((source, target), self.ends, strict=True)])


def edge_table(path: Path, kind: str, tell: Tell | None = None) -> EdgeTable:
    """Columns src, dst, optionally weight, by name or, without a header, by position; columns whose names begin with
    attr are the edge's features. Ids are of a `kind` of field."""
    weighted, described = False, False

    def choose(head: Head) -> list[Field]:
        nonlocal weighted, described
        at = [head.find("src", "source", "from"), head.find("dst", "target", "to"), head.find("weight", "w")]
        if head.names is None:
            at = [0, 1, 2 if len(head.first) > 2 else None][: max(len(head.first), 1)]
        if len(at) < 2 or at[0] is None or at[1] is None:
            got = ", ".join(head.names or head.first)
            raise InputError(f"{path} must have the columns src and dst, and weight where there is one, got {got}")
        features = [i for i, name in enumerate(head.names or ()) if name.startswith("attr")]
        weighted, described = len(at) > 2 and at[2] is not None, bool(features)
        hint = "with --ids names (in Python ids='names') ids may be words" if kind == "whole" else ""
        fields = [Field([c], k, hint) for c, k in zip(at, (kind, kind, "real"), strict=False) if c is not None]
        return [*fields, Field(features, "real")] if described else fields

    table = read(path, choose, kind == "text", tell)
    columns = table.columns
    weight, attr = columns[2][:, 0] if weighted else None, columns[-1] if described else None
    if weight is not None:
        bad = ~(np.isfinite(weight) & (weight >= 0))
        _refuse(table, bad, "a weight must be finite and not negative", weight)
    if attr is not None:
        _refuse(table, ~np.isfinite(attr), "features must be finite", attr)
    return EdgeTable(table, (columns[0][:, 0], columns[1][:, 0]), weight, attr)


def read_features(path: Path, tell: Tell | None = None) -> tuple[Columns | None, Any]:
    """A .npy array, a scipy .npz matrix, or a table with one row per node and optionally a column id."""
    if path.suffix in (".npy", ".npz"):
        x = _array(path)
        if x.ndim != 2 or x.dtype.kind not in "fiub":
            got = f"shape {x.shape} and dtype {x.dtype}"
            raise InputError(f"{path} must hold real numbers of shape [nodes, features], got {got}")
        _refuse(Columns(path, [x], 0), ~np.isfinite(x), "features must be finite", x)
        return None, x.astype(np.float32)

    def choose(head: Head) -> list[Field]:
        own = head.find(*ID)
        rest = [i for i in range(len(head.first)) if i != own]
        numbers = own is None or head.first[own].lstrip("-").isdigit()
        return [*([] if own is None else [Field([own], "whole" if numbers else "text")]), Field(rest, "real", ORDER)]

    table = read(path, choose, False, tell)
    x = table.columns[-1]
    _refuse(table, ~np.isfinite(x), "features must be finite", x)
    return table, x


def read_labels(
    path: Path, names: bool, n: int, tell: Tell | None = None
) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """(y, node names, class names). A table has one label per row, or id and label; a node without a row gets -1."""
    if path.suffix == ".npy":
        if names:
            raise InputError(f"{path} must be a table with the nodes' names when ids are names, got an array")
        y, classes = classes_of(label_table(path, names, tell))
        return rows_of(path, y, n), None, classes
    table = label_table(path, names, tell)
    y, classes = classes_of(table)
    if not names or len(table.columns) == 1:
        return in_order(path, Ids(None, n), table, y, -1), None, classes
    own = table.columns[0][:, 0]
    _unique(table, own)
    return rows_of(path, y, n), own, classes


def label_table(path: Path, names: bool, tell: Tell | None = None) -> Columns:
    """A table with one label per row, or id and label; of an array, one label per row."""
    if path.suffix == ".npy":
        y = _array(path)
        y = y[:, None] if y.ndim == 1 else y
        words = y.dtype.kind == "U"
        if y.ndim != 2 or y.dtype.kind not in "fiubU" or (words and y.shape[1] > 1):
            got = f"shape {y.shape} and dtype {y.dtype}"
            raise InputError(f"{path} must hold labels, numbers or words, one per node, got {got}")
        return Columns(path, [y.astype(object if words else np.float64)], 0)

    def choose(head: Head) -> list[Field]:
        columns = len(head.first)
        own = head.find(*ID)
        if own is None and (names or (head.names is None and columns == 2)):
            own = 0
        rest = [i for i in range(columns) if i != own]
        if not rest:
            raise InputError(f"{path} must have a label beside the id, got {', '.join(head.names or head.first)}")
        number = is_number(head.first[rest[0]]) or len(rest) > 1
        ids = [] if own is None else [Field([own], "text" if names else "whole")]
        return [*ids, Field(rest, "real" if number else "text", LABELS)]

    return read(path, choose, names, tell)


def classes_of(table: Columns) -> tuple[np.ndarray, list[str]]:
    """Labels as whole numbers, and the classes' names where they are words; nan or an empty cell is no label."""
    y = table.columns[-1]
    if y.dtype == object:
        words = y[:, 0].astype(str)
        known = (words != "") & (words != "nan")
        if not all(map(is_number, words[known])):
            out = np.full(len(words), -1)
            names, out[known] = np.unique(words[known], return_inverse=True)
            return out, names.tolist()
        y = np.where(known, words, "nan").astype(np.float64)[:, None]
    if y.shape[1] > 1:
        _refuse(table, ~np.isin(y, (0, 1)), "several labels a node must be 0 or 1", y)
        return y.astype(np.int64), []
    y = np.nan_to_num(y[:, 0], nan=-1.0)
    _refuse(table, (y != np.round(y)) | (y < -1), "a label must be a whole number from 0 (-1 or nan: none)", y)
    return y.astype(np.int64), []


def read_splits(where: Path, ids: Ids) -> dict[str, np.ndarray]:
    """Ids in a folder's train, val (or valid) and test files: .csv, .tsv, .txt, also with .gz, or .npy."""
    out = {}
    for part, words in PARTS.items():
        found = [p for w in words for p in sorted(where.glob(f"{w}.*")) if p.suffix in (".csv", ".tsv", ".txt", ".npy")
                 or p.name.endswith(".csv.gz")]  # fmt: skip
        if not found:
            raise InputError(f"{where} must hold train.csv, val.csv (or valid.csv) and test.csv, got no {part}")
        if found[0].suffix == ".npy":
            own = _array(found[0])
            if own.dtype == bool or own.size == 0:
                out[part] = node_ids(own, ids.n, str(found[0])).numpy()
                continue
            if own.ndim != 1 or own.dtype.kind not in ("iu" if ids.names is None else "iuU"):
                got = f"shape {own.shape} and dtype {own.dtype}"
                raise InputError(f"{found[0]} must hold node ids or a mask of shape [nodes], got {got}")
            table = Columns(found[0], [own[:, None]], 0)
        else:
            table = read(found[0], lambda head: [Field([0], ids.kind)], ids.kind == "text")
        out[part] = ids.of(table, table.columns[0][:, 0])
    return out


def _array(path: Path) -> np.ndarray:
    try:
        found = _matrix(path) if path.suffix == ".npz" else np.load(path, allow_pickle=False)
    except Exception as e:
        raise InputError(f"{path} must be a readable {path.suffix} file, got {type(e).__name__}: {e}") from None
    if path.suffix == ".npy" and not isinstance(found, np.ndarray):
        raise InputError(f"{path} must hold one array, got an archive of several")
    return found


def _matrix(path: Path) -> np.ndarray:
    """What `scipy.sparse.save_npz` wrote, as an array: rows (csr), columns (csc) or entries (coo)."""
    with np.load(path, allow_pickle=False) as z:
        a = {name: z[name] for name in z.files}
    form = a["format"].item() if "format" in a else b""
    form = form.decode() if isinstance(form, bytes) else form
    if form not in ("csr", "csc", "coo"):
        raise ValueError(f"a matrix of format '{form}', not csr, csc or coo")
    rows, columns = (int(s) for s in a["shape"])
    if form == "coo":
        order = np.argsort(a["row"], kind="stable")
        indptr = np.searchsorted(a["row"][order], np.arange(rows + 1))
        if rows and (a["row"].min(initial=0) < 0 or indptr[-1] != order.size):
            raise ValueError(f"a row outside [0, {rows})")
        return dense(indptr, a["col"][order], a["data"][order], rows, columns)
    if form == "csc":
        return dense(a["indptr"], a["indices"], a["data"], columns, rows).T
    return dense(a["indptr"], a["indices"], a["data"], rows, columns)


def rows_of(path: Path | str, values: np.ndarray, n: int) -> np.ndarray:
    if len(values) != n:
        raise InputError(f"{path} must have one row for each of the {n} rows of features, got {len(values)}")
    return values


def in_order(path: Path, ids: Ids, table: Columns | None, values: np.ndarray, gap: int | None = None) -> np.ndarray:
    """Rows in the order of a table's id column, or as they are where it has none. Missing rows are an error, or hold
    `gap` where it is a number."""
    if table is None or len(table.columns) == 1:
        return rows_of(path, values, ids.n)
    own = table.columns[0][:, 0]
    if ids.names is not None and own.dtype != object:
        own = own.astype(str).astype(object)
    if ids.names is None and own.dtype == object:
        raise InputError(f"{table.path} must have numbers for ids (or set ids to names), got '{own[0]}'")
    place = ids.of(table, own)
    _unique(table, place)
    if gap is None:
        rows_of(table.path, place, ids.n)
    out = np.full((ids.n, *values.shape[1:]), 0 if gap is None or values.ndim > 1 else gap, values.dtype)
    out[place] = values
    return out


def _unique(table: Columns, own: np.ndarray) -> None:
    _, first = np.unique(own.astype(str) if own.dtype == object else own, return_index=True)
    if len(first) < len(own):
        again = np.ones(len(own), bool)
        again[first] = False
        _refuse(table, again, "an id must come once", own)


def _refuse(table: Columns, bad: np.ndarray, rule: str, values: np.ndarray) -> None:
    """An error for the first bad value, by rows; `bad` has the shape of `values`."""
    if bad.any():
        at = np.argwhere(bad)[0]
        raise InputError(f"{table.where(int(at[0]))}: {rule}, got {values[tuple(at)]}")
