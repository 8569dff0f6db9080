"""Sources of a graph: tables, an OGB folder, a saved PyG Data. Each is read into a `Raw`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from adahop.checks import InputError, edge_features
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
    table, x = read_features(features, tell)
    y, label_names, classes = read_labels(labels, names, len(x), tell)
    ids = Ids(label_names, len(x))
    x = in_order(features, ids, table, x)
    found = edge_table(edges, ids.kind, tell)
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
    """A PyG Data saved with `torch.save`; its masks, where it has all three, are the splits."""
    data = saved(path)
    assert isinstance(data, Data)
    for name in ("x", "y", "edge_index"):
        if not torch.is_tensor(getattr(data, name, None)):
            raise InputError(f"{path} must hold a Data with x, y and edge_index, got {', '.join(data.keys())}")
    masks: dict[str, Any] = {part: getattr(data, f"{part}_mask", None) for part in PARTS}
    splits = None
    if all(torch.is_tensor(m) for m in masks.values()):
        splits = {part: first_mask(m).nonzero().flatten().numpy() for part, m in masks.items()}
    edges, weight = data.edge_index.numpy(), getattr(data, "edge_weight", None)
    bad = (edges < 0) | (edges >= len(data.x))
    if bad.any():
        raise InputError(f"{path}: edge_index must be in [0, {len(data.x)}), got {int(edges[bad][0])}")
    y = data.y[:, 0] if data.y.dim() == 2 and data.y.shape[1] == 1 else data.y
    y = torch.nan_to_num(y, nan=-1.0).long() if y.is_floating_point() else y.long()
    weight = None if weight is None else weight.detach().numpy().reshape(-1).astype(np.float32)
    x, attr = data.x.detach().float().numpy(), getattr(data, "edge_attr", None)
    attr = None if attr is None else edge_features(attr.detach(), edges.shape[1]).numpy()
    y = rows_of(path, y.numpy(), len(x))
    return Raw(edges[0], edges[1], weight, x, y, splits, attr=attr), Ids(None, len(x))
