"""Data sets from files: `.npz` arrays and saved PyG Data."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

from adahop.checks import InputError, count
from adahop.datasets.base import Dataset, make
from adahop.graph import Graph

SPLITS = ("train", "val", "test")
ARRAYS = (
    *("indptr", "indices", "weight", "x", "x_indptr", "x_indices", "x_data", "x_shape", "y", "y_packed", "y_shape"),
    *("train_idx", "val_idx", "test_idx", "meta"),
)
PLAIN = [Data, DataEdgeAttr, DataTensorAttr, BaseStorage, NodeStorage, EdgeStorage, GlobalStorage, Dataset, Graph]


def read(path: Path) -> tuple[Dataset, str]:
    """The data set in a `.npz` or `.pt` file; an error names the file."""
    if path.suffix not in READERS or not path.is_file():
        raise InputError(f"`dataset` must be a known name or an existing .npz or .pt file, got {path}")
    try:
        return READERS[path.suffix](path)
    except InputError as e:
        raise type(e)(f"in {path}, {e}") from None


def _allow(types: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """These types may be unpickled by `torch.load`; before torch 2.5 there is nothing to allow."""
    allow = getattr(torch.serialization, "safe_globals", None)
    if allow is None:
        return contextlib.nullcontext()
    known = torch.serialization.get_safe_globals()  # on leaving, torch forgets what was listed, PyG's own types too
    return allow([t for t in types if t not in known])


# --- .npz ----------------------------------------------------------------------------------------------------------


def _npz(path: Path) -> tuple[Dataset, str]:
    a = _arrays(path)
    meta = _meta(a)
    graph = Graph.from_csr(a["indptr"], a["indices"], a.get("weight"))
    splits = {part: a[f"{part}_idx"] for part in SPLITS}
    note = "rebuilt labels" if "rebuilt" in str(meta.get("note", "")) else ""
    classes = None if meta.get("classes") is None else count(meta["classes"], 1, "classes")
    name = str(meta.get("name", path.stem))
    return make(name, graph, _features(a), _targets(a), splits, classes, note=note), "auto"


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as z:
            a = {k: z[k] for k in ARRAYS if k in z.files}
    except Exception as e:
        raise InputError(f"the arrays must be readable, got {type(e).__name__}: {_line(e)}") from None
    for names in ("indptr", "indices", "x|x_indptr x_indices x_shape", "y|y_packed y_shape", *ARRAYS[-4:-1]):
        if not any(all(k in a for k in way.split()) for way in names.split("|")):
            raise InputError(f"the arrays must include {names.replace('|', ' or ')}, got {', '.join(a) or 'none'}")
    return a


def _meta(a: dict[str, np.ndarray]) -> dict[str, Any]:
    try:
        meta = json.loads(str(a.get("meta", "{}")))
    except ValueError:
        meta = None
    if not isinstance(meta, dict):
        raise InputError(f"`meta` must be a JSON object, got {str(a['meta'])[:40]!r}")
    return meta


def _features(a: dict[str, np.ndarray]) -> np.ndarray:
    """Dense x as it is; sparse x with `x_data` absent is all ones."""
    if "x" in a:
        return a["x"]
    ones = np.ones(a["x_indices"].size, np.float32)
    try:
        values = a.get("x_data", ones).astype(np.float32)
        rows, columns = (int(s) for s in a["x_shape"])
        return dense(a["x_indptr"], a["x_indices"], values, rows, columns)
    except (ValueError, TypeError, IndexError, MemoryError) as e:
        raise InputError(f"x_indptr, x_indices, x_data and x_shape must form a CSR matrix, got {_line(e)}") from None


def dense(indptr: np.ndarray, indices: np.ndarray, values: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """A CSR matrix as an array, entries given twice added up; ValueError where the arrays are none."""
    if indptr.ndim != 1 or indptr.dtype.kind not in "iu" or indptr.size != rows + 1:
        raise ValueError(f"indptr of shape {indptr.shape} and dtype {indptr.dtype} for {rows} rows")
    if indptr[0] != 0 or indptr[-1] > indices.size or (np.diff(indptr.astype(np.int64)) < 0).any():
        raise ValueError(f"indptr that does not grow from 0 to at most {indices.size}")
    used = int(indptr[-1])
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or values.shape != indices.shape:
        raise ValueError(f"{indices.size} indices of dtype {indices.dtype} and {values.size} values")
    if used and not 0 <= indices[:used].min() <= indices[:used].max() < columns:
        raise ValueError(f"an index outside [0, {columns})")
    out = np.zeros((rows, columns), values.dtype)
    np.add.at(out, (np.repeat(np.arange(rows), np.diff(indptr)), indices[:used]), values[:used])
    return out


def _targets(a: dict[str, np.ndarray]) -> np.ndarray:
    if "y" in a:
        return a["y"]
    packed, shape = a["y_packed"], tuple(a["y_shape"].ravel().tolist())
    if len(shape) != 2 or packed.dtype != np.uint8 or packed.shape != (shape[0], (shape[1] + 7) // 8):
        raise InputError(f"`y_packed` must be the packed bits of `y_shape` {shape}, got shape {packed.shape}")
    return np.unpackbits(packed, axis=1, count=shape[1])


# --- .pt -----------------------------------------------------------------------------------------------------------


def saved(path: Path) -> Data:
    """A PyG Data written by `torch.save`; only plain types are unpickled."""
    try:
        with _allow(PLAIN):
            data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        why = _line(e).split(". ")[0]
        raise InputError(f"the saved Data must be readable, got {type(e).__name__}: {why}") from None
    if not isinstance(data, Data):
        raise InputError(f"the saved object must be a PyG Data, got {type(data).__name__}")
    return data


def _pt(path: Path) -> tuple[Dataset, str]:
    data = saved(path)
    if isinstance(data, Dataset):  # a saved Dataset: its features are prepared already
        return data, "raw"
    wanted = ("x", "y", "edge_index", *(f"{part}_mask" for part in SPLITS))
    lacking = [k for k in wanted if not torch.is_tensor(getattr(data, k, None))]
    if lacking:
        raise InputError(f"the saved Data must have the tensors {', '.join(lacking)}, got {', '.join(data.keys())}")
    splits = {part: _mask(data[f"{part}_mask"]) for part in SPLITS}
    weight = getattr(data, "edge_weight", None)
    graph = Graph.from_edge_index(data.edge_index, weight, num_nodes=data.x.shape[0])
    out = make(path.stem, graph, data.x, data.y, splits)
    if weight is not None:
        out.edge_weight = weight
    return out, "auto"


def _mask(mask: Tensor) -> Tensor:
    """The first of several splits; masks of numbers count as masks."""
    return (mask[:, 0] if mask.dim() == 2 else mask).bool()


def _line(e: Exception) -> str:
    """The first 200 characters of an error, on one line."""
    return " ".join(str(e).split())[:200]


READERS = {".npz": _npz, ".pt": _pt}
