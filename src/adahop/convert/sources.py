"""Sources of a graph: tables, an OGB folder, a saved PyG Data. Each is read into a `Raw`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data

from adahop.checks import InputError, as_tensor, edge_features, edge_pairs, edge_weights, in_range
from adahop.convert.parts import (
    PARTS,
    Ids,
    classes_of,
    edge_table,
    in_order,
    read_features,
    read_labels,
    read_splits,
    rows_of,
)  # fmt: skip
from adahop.convert.tables import Field, Tell, read
from adahop.datasets.files import saved
from adahop.datasets.typed import first_mask


@dataclass
class Raw:
    """A graph as its files have it; `splits` None where they have none, `names` None where ids are numbers."""

    src: np.ndarray
    dst: np.ndarray
    weight: np.ndarray | None
    x: np.ndarray
    y: np.ndarray
    splits: dict[str, np.ndarray] | None = None
    names: np.ndarray | None = None
    classes: list[str] = field(default_factory=list)
    attr: np.ndarray | None = None


def from_tables(
    edges: Path, features: Path, labels: Path, names: bool = False, tell: Tell | None = None
) -> tuple[Raw, Ids]:
    """An edge list, features and labels. Without `names`, ids count the rows of the features."""
    found = edge_table(edges, "text" if names else "whole", tell)
    table, x = read_features(features, tell)
    y, label_names, classes = read_labels(labels, names, len(x), tell)
    ids = Ids(label_names, len(x))
    x = in_order(features, ids, table, x)
    src, dst = found.places(ids, ids)
    return Raw(src, dst, found.weight, x, y, None, label_names, classes, found.attr), ids


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
    y = rows_of(files["node-label"], classes_of(table)[0], len(x))
    src, dst = edge_table(files["edge"], ids.kind, tell).places(ids, ids)
    schemes = sorted(p for p in (folder / "split").glob("*") if p.is_dir())
    if len(schemes) > 1:
        raise InputError(f"{folder / 'split'} must hold one split, got {', '.join(p.name for p in schemes)}")
    return Raw(src, dst, None, x, y, read_splits(schemes[0], ids) if schemes else None), ids


def from_saved(path: Path) -> tuple[Raw, Ids]:
    """A PyG Data saved with `torch.save`; its masks, where it has some, are the splits."""
    try:
        return _of_data(path)
    except InputError as e:
        raise type(e)(f"in {path}, {e}") from None


def _of_data(path: Path) -> tuple[Raw, Ids]:
    data = saved(path)
    assert isinstance(data, Data)
    for name in ("x", "y", "edge_index"):
        if not torch.is_tensor(getattr(data, name, None)):
            raise InputError(f"the Data must have the tensors x, y and edge_index, got {', '.join(data.to_dict())}")
    masks = {part: data.get(f"{part}_mask") for part in PARTS}
    splits = {p: first_mask(m).nonzero().flatten().numpy() for p, m in masks.items() if torch.is_tensor(m)}
    x, y = as_tensor(data.x, "x"), as_tensor(data.y, "y")
    if x.dim() != 2:
        raise InputError(f"`x` must have shape [nodes, features], got shape {tuple(x.shape)}")
    n = len(x)
    src, dst = (in_range(end, n, f"edge_index[{i}]").numpy() for i, end in enumerate(edge_pairs(data.edge_index)))
    weight, attr = data.get("edge_weight"), data.get("edge_attr")
    weight = None if weight is None else edge_weights(weight, src.size).numpy()
    attr = None if attr is None else edge_features(attr, src.size).numpy()
    y = y[:, 0] if y.dim() == 2 and y.shape[1] == 1 else torch.atleast_1d(y)
    labels = rows_of("`y`", y.numpy(), n)
    return Raw(src, dst, weight, x.float().numpy(), labels, splits or None, attr=attr), Ids(None, n)
