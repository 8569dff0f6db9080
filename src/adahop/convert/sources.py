"""Where a graph comes from: tables, an OGB folder, a saved PyG Data. Each gives a `Raw`, checked against its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

from adahop.checks import InputError
from adahop.convert.tables import Field, Head, Table, Tell, read
from adahop.datasets.files import saved

ID = ("id", "node", "node_id")
PARTS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


@dataclass
class Raw:
    """A graph as its files have it; `splits` None where they have none, `names` None where ids are numbers."""

    src: np.ndarray
    dst: np.ndarray
    weight: np.ndarray | None
    x: Any  # an array or a scipy matrix
    y: np.ndarray
    splits: dict[str, np.ndarray] | None = None
    names: np.ndarray | None = None
    classes: list[str] = field(default_factory=list)


class Ids:
    """Node ids of files as places 0 .. n: numbers as they are, names by their order in the labels file."""

    def __init__(self, names: np.ndarray | None, n: int):
        self.names, self.n = names, n
        self.kind = "whole" if names is None else "text"
        self.place = {} if names is None else {name: i for i, name in enumerate(names.tolist())}

    def of(self, table: Table, column: np.ndarray) -> np.ndarray:
        """The places of a column; the error names the first line whose id is unknown."""
        if self.names is None:
            ids, known = column, f"in [0, {self.n}), one a row of features"
        else:
            ids = np.array([self.place.get(name, -1) for name in column.tolist()], np.int64)
            known = "one of those in the labels file"
        bad = (ids < 0) | (ids >= self.n)
        if bad.any():
            at = int(bad.argmax())
            raise InputError(f"{table.where(at)}: a node id must be {known}, got {column[at]}")
        return ids


def from_tables(
    edges: Path, features: Path, labels: Path, names: bool = False, tell: Tell | None = None
) -> tuple[Raw, Ids]:
    """An edge list, features and labels. Without `names`, ids count the rows of the features."""
    table, x = read_features(features, tell)
    n = x.shape[0]
    y, label_names, classes = read_labels(labels, names, n, tell)
    told = Ids(label_names, n)
    if table is not None and len(table.columns) > 1:  # it has an id column of its own
        x = _placed(told, table, table.columns[0][:, 0], x)
    src, dst, weight = read_edges(edges, told, tell)
    return Raw(src, dst, weight, x, y, None, label_names, classes), told


def read_edges(path: Path, ids: Ids, tell: Tell | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Columns src, dst and perhaps weight, by name or, without a header, by place."""

    def choose(head: Head) -> list[Field]:
        at = [head.find("src", "source", "from"), head.find("dst", "target", "to"), head.find("weight", "w")]
        if head.names is None:
            at = [0, 1, 2 if len(head.first) > 2 else None][: max(len(head.first), 1)]
        if len(at) < 2 or at[0] is None or at[1] is None:
            got = ", ".join(head.names or head.first)
            raise InputError(f"{path} must have the columns src and dst, and weight where there is one, got {got}")
        kinds = (ids.kind, ids.kind, "real")
        return [Field([c], kind) for c, kind in zip(at, kinds, strict=False) if c is not None]

    table = read(path, choose, ids.kind == "text", tell)
    src, dst = (ids.of(table, c[:, 0]) for c in table.columns[:2])
    weight = table.columns[2][:, 0] if len(table.columns) > 2 else None
    if weight is not None:
        _refuse(table, ~(np.isfinite(weight) & (weight >= 0)), "a weight must be finite and not negative", weight)
    return src, dst, weight


def read_features(path: Path, tell: Tell | None = None) -> tuple[Table | None, Any]:
    """A .npy array, a scipy .npz matrix, or a table with one row a node and perhaps a column id."""
    if path.suffix in (".npy", ".npz"):
        x = _array(path)
        values = x.data if sp.issparse(x) else x
        if x.ndim != 2 or values.dtype.kind not in "fiub" or not np.isfinite(values).all():
            raise InputError(f"{path} must hold finite numbers of shape [nodes, features], got shape {x.shape}")
        return None, x.astype(np.float32)

    def choose(head: Head) -> list[Field]:
        own = head.find(*ID)
        rest = [i for i in range(len(head.first)) if i != own]
        numbers = own is None or head.first[own].lstrip("-").isdigit()
        return [*([] if own is None else [Field([own], "whole" if numbers else "text")]), Field(rest, "real")]

    table = read(path, choose, False, tell)
    x = table.columns[-1]
    _refuse(table, ~np.isfinite(x).all(axis=1), "features must be finite", x)
    return table, x


def read_labels(
    path: Path, names: bool, n: int, tell: Tell | None = None
) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """(y, node names, class names). A table has a label a row, or id and label; a node without a row gets -1."""
    if path.suffix == ".npy":
        if names:
            raise InputError(f"{path} must be a table with the nodes' names when ids are names, got an array")
        return _rows(path, _array(path), n), None, []

    def choose(head: Head) -> list[Field]:
        columns = len(head.first)
        own = head.find(*ID)
        if own is None and (names or (head.names is None and columns == 2)):
            own = 0
        rest = [i for i in range(columns) if i != own]
        if not rest:
            raise InputError(f"{path} must have a label beside the id, got {', '.join(head.names or head.first)}")
        number = head.first[rest[0]].lstrip("-").isdigit() or len(rest) > 1
        ids = [] if own is None else [Field([own], "text" if names else "whole")]
        return [*ids, Field(rest, "whole" if number else "text")]

    table = read(path, choose, names, tell)
    y, classes = table.columns[-1], []
    if y.dtype == object:
        words, places = np.unique(y.astype(str), return_inverse=True)
        y, classes = places.reshape(-1, 1), words.tolist()
    y = y[:, 0] if y.shape[1] == 1 else y
    if len(table.columns) == 1:
        return _rows(path, y, n), None, classes
    own = table.columns[0][:, 0]
    if not names:
        return _placed(Ids(None, n), table, own, y, -1), None, classes
    _unique(table, own)
    return _rows(path, y, n), own, classes


def from_ogb(folder: Path, tell: Tell | None = None) -> tuple[Raw, Ids]:
    """The raw csv.gz files of the Open Graph Benchmark, and its split where there is exactly one."""
    raw = folder / "raw" if (folder / "raw").is_dir() else folder
    files = {name: raw / f"{name}.csv.gz" for name in ("edge", "node-feat", "node-label")}
    for path in files.values():
        if not path.is_file():
            raise InputError(f"an OGB folder must hold edge, node-feat and node-label.csv.gz, got no {path}")
    _, x = read_features(files["node-feat"], tell)
    ids = Ids(None, len(x))
    table = read(files["node-label"], lambda head: [Field(list(range(len(head.first))), "real")], False, tell)
    y = np.nan_to_num(table.columns[0], nan=-1.0)
    y = _rows(files["node-label"], (y[:, 0] if y.shape[1] == 1 else y).astype(np.int64), len(x))
    src, dst, _ = read_edges(files["edge"], ids, tell)
    schemes = sorted(p for p in (folder / "split").glob("*") if p.is_dir())
    if len(schemes) > 1:
        raise InputError(f"{folder / 'split'} must hold one split, got {', '.join(p.name for p in schemes)}")
    return Raw(src, dst, None, x, y, read_splits(schemes[0], ids) if schemes else None), ids


def from_saved(path: Path) -> tuple[Raw, Ids]:
    """A PyG Data saved with `torch.save`; its masks, where it has all three, are the splits."""
    data = saved(path)
    for name in ("x", "y", "edge_index"):
        if not torch.is_tensor(getattr(data, name, None)):
            raise InputError(f"{path} must hold a Data with x, y and edge_index, got {', '.join(data.keys())}")
    masks: dict[str, Any] = {part: getattr(data, f"{part}_mask", None) for part in PARTS}
    splits = None
    if all(torch.is_tensor(m) for m in masks.values()):
        first = {part: m[:, 0] if m.dim() == 2 else m for part, m in masks.items()}
        splits = {part: m.bool().nonzero().flatten().numpy() for part, m in first.items()}
    edges, weight = data.edge_index.numpy(), getattr(data, "edge_weight", None)
    bad = (edges < 0) | (edges >= len(data.x))
    if bad.any():
        raise InputError(f"{path}: edge_index must be in [0, {len(data.x)}), got {int(edges[bad][0])}")
    y = data.y[:, 0] if data.y.dim() == 2 and data.y.shape[1] == 1 else data.y
    y = torch.nan_to_num(y, nan=-1.0).long() if y.is_floating_point() else y.long()
    weight = None if weight is None else weight.detach().numpy().reshape(-1).astype(np.float32)
    x = data.x.detach().float().numpy()
    return Raw(edges[0], edges[1], weight, x, _rows(path, y.numpy(), len(x)), splits), Ids(None, len(x))


def read_splits(where: Path, ids: Ids) -> dict[str, np.ndarray]:
    """Ids in a folder's train, val (or valid) and test files: .csv, .tsv, .txt, also with .gz, or .npy."""
    out = {}
    for part, words in PARTS.items():
        found = [p for w in words for p in sorted(where.glob(f"{w}.*")) if p.suffix in (".csv", ".tsv", ".txt", ".npy")
                 or p.name.endswith(".csv.gz")]  # fmt: skip
        if not found:
            raise InputError(f"{where} must hold train.csv, val.csv (or valid.csv) and test.csv, got no {part}")
        table = (
            Table(found[0], [_array(found[0]).reshape(-1, 1)], 0)
            if found[0].suffix == ".npy"
            else read(found[0], lambda head: [Field([0], ids.kind)], ids.kind == "text")
        )
        out[part] = ids.of(table, table.columns[0][:, 0])
    return out


def _array(path: Path) -> Any:
    try:
        return sp.load_npz(path).tocsr() if path.suffix == ".npz" else np.load(path, allow_pickle=False)
    except Exception as e:
        raise InputError(f"{path} must be a readable {path.suffix} file, got {type(e).__name__}: {e}") from None


def _rows(path: Path, values: np.ndarray, n: int) -> np.ndarray:
    if len(values) != n:
        raise InputError(f"{path} must have one row for each of the {n} rows of features, got {len(values)}")
    return values


def _placed(ids: Ids, table: Table, own: np.ndarray, values: np.ndarray, gap: int | None = None) -> np.ndarray:
    """Rows in the order of their ids; where `gap` is a number, it stands for rows that are not there."""
    if ids.names is not None and own.dtype != object:
        own = own.astype(str).astype(object)
    place = ids.of(table, own)
    _unique(table, place)
    if gap is None:
        _rows(table.path, place, ids.n)
    out = np.full((ids.n, *values.shape[1:]), 0 if gap is None or values.ndim > 1 else gap, values.dtype)
    out[place] = values
    return out


def _unique(table: Table, own: np.ndarray) -> None:
    _, first = np.unique(own.astype(str) if own.dtype == object else own, return_index=True)
    if len(first) < len(own):
        again = np.ones(len(own), bool)
        again[first] = False
        _refuse(table, again, "an id must come once", own)


def _refuse(table: Table, bad: np.ndarray, rule: str, values: np.ndarray) -> None:
    if bad.any():
        at = int(bad.argmax())
        got = values[at] if values.ndim == 1 else values[at][~np.isfinite(values[at])][0]
        raise InputError(f"{table.where(at)}: {rule}, got {got}")
