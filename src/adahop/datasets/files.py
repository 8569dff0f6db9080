"""Data sets from files: `.npz` arrays, folders of mapped arrays, saved PyG Data."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

from adahop import mapped
from adahop.checks import InputError, count, one_of
from adahop.datasets.base import Dataset, make
from adahop.datasets.typed import TypedDataset, first_mask, labelled_type, make_typed, with_reverses
from adahop.graph import Graph
from adahop.mapped.data import SPLITS
from adahop.mapped.folder import MANIFEST
from adahop.typed import EdgeFeatures, Relation, Types

PARTS = ("", "_indptr", "_indices", "_data", "_shape")  # endings of a matrix's arrays, dense or sparse
SPLIT_ARRAYS = tuple(f"{part}_idx" for part in SPLITS)
ARRAYS = (
    *("indptr", "indices", "weight", "edge_attr", *(f"x{part}" for part in PARTS), "y", "y_packed", "y_shape"),
    *(*SPLIT_ARRAYS, "meta"),
)
TYPED = ("edge__", "weight__", "attr__", "x__", "y__", *(f"{part}_" for part in SPLITS))  # prefixes, of a typed graph
PLAIN = [
    *(Data, DataEdgeAttr, DataTensorAttr, BaseStorage, NodeStorage, EdgeStorage, GlobalStorage, Dataset, Graph),
    *(HeteroData, TypedDataset, Types, EdgeFeatures),
]


def read(path: Path, split: str | None = None) -> tuple[Dataset | TypedDataset, str]:
    """The data set in a `.npz` or `.pt` file, and how its features are prepared by default; an error names the file."""
    if path.suffix not in READERS or not path.is_file():
        raise InputError(f"`dataset` must be a known name or an existing .npz or .pt file, got {path}")
    try:
        return READERS[path.suffix](path, split)
    except InputError as e:
        raise type(e)(f"in {path}, {e}") from None


def _allow(types: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """These types may be unpickled by `torch.load`; before torch 2.5 there is nothing to allow."""
    allow = getattr(torch.serialization, "safe_globals", None)
    if allow is None:
        return contextlib.nullcontext()
    known = torch.serialization.get_safe_globals()  # on exit torch removes all that were listed here, PyG's own too
    return allow([t for t in types if t not in known])


# --- .npz ----------------------------------------------------------------------------------------------------------


def _npz(path: Path, split: str | None) -> tuple[Dataset | TypedDataset, str]:
    a, names = _arrays(path)
    if any(name.startswith("edge__") for name in a):
        return typed_npz(path.stem, a, split), "auto"
    if split is not None:
        raise InputError(f"a split must be left out, as the file has one, got '{split}'")
    a = _plain(a, names)
    meta = _meta(a)
    graph = Graph.from_csr(a["indptr"], a["indices"], a.get("weight"), a.get("edge_attr"))
    note = "rebuilt labels" if "rebuilt" in str(meta.get("note", "")) else ""
    return _made(path, graph, features_in(a), _targets(a), a, meta, note=note), "auto"


def _made(path: Path, graph: Graph, x: Any, y: Any, a: Mapping[str, Any], meta: dict[str, Any], **more: Any) -> Dataset:
    """The data set of arrays and their meta data."""
    splits = {part: a[f"{part}_idx"] for part in SPLITS}
    return make(str(meta.get("name", path.stem)), graph, x, y, splits, _classes(meta), **more)


def _classes(meta: dict[str, Any]) -> int | None:
    return None if meta.get("classes") is None else count(meta["classes"], 1, "classes")


def _arrays(path: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Those of a data set, and the names of all that are there."""
    try:
        with np.load(path, allow_pickle=False) as z:
            return {k: z[k] for k in z.files if k in ARRAYS or k.startswith(TYPED)}, z.files
    except Exception as e:
        raise InputError(f"the arrays must be readable, got {type(e).__name__}: {_line(e)}") from None


def _plain(found: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    """The arrays of a graph without types, once all that are needed are there."""
    a = {k: found[k] for k in ARRAYS if k in found}
    for ways in ("indptr", "indices", "x|x_indptr x_indices x_shape", "y|y_packed y_shape", *SPLIT_ARRAYS):
        if not any(all(k in a for k in way.split()) for way in ways.split("|")):
            raise InputError(f"the arrays must include {ways.replace('|', ' or ')}, got {', '.join(names) or 'none'}")
    return a


def _meta(a: dict[str, np.ndarray]) -> dict[str, Any]:
    try:
        meta = json.loads(str(a.get("meta", "{}")))
    except ValueError:
        meta = None
    if not isinstance(meta, dict):
        raise InputError(f"`meta` must be a JSON object, got {str(a['meta'])[:40]!r}")
    return meta


def features_in(a: dict[str, np.ndarray]) -> np.ndarray:
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


# --- .npz of a typed graph -----------------------------------------------------------------------------------------


def typed_npz(name: str, a: dict[str, np.ndarray], split: str | None) -> TypedDataset:
    """Arrays edge__SRC__REL__DST [2, E], perhaps weight__ and attr__ of the same name; x__TYPE, or sparse
    x__TYPE_indptr and so on; y__TYPE; train_idx, or train_SPLIT of several. `meta` has the number of `nodes` of each
    type, and may name `target`.

    Every relation that is not there both ways gets its reverse, unless `meta` has "directed".
    """
    meta = _meta(a)
    nodes = meta.get("nodes")
    if not isinstance(nodes, dict) or not nodes:
        raise InputError("`meta` must have nodes, the number of nodes of each type, got none")
    data = HeteroData()
    for kind, n in nodes.items():
        data[kind].num_nodes = count(n, 0, f"meta's nodes['{kind}']")
    for key in a:
        if key.startswith("edge__"):
            store = data[_relation(key, nodes)]
            store.edge_index = torch.as_tensor(a[key])
            for head in ("weight", "attr"):
                if f"{head}__{key[6:]}" in a:
                    store[f"edge_{head}"] = torch.as_tensor(a[f"{head}__{key[6:]}"])
        elif key.startswith(("x__", "y__")):
            kind, part = _part(key, nodes)
            if key.startswith("x__") and part in ("", "_indptr"):
                given = {f"x{end}": a[f"x__{kind}{end}"] for end in PARTS if f"x__{kind}{end}" in a}
                data[kind].x = torch.as_tensor(features_in(given))
    Graph.from_data(data)  # checks the user's relations before reverse ones are added: an error names the user's own
    for store in data.edge_stores:
        store.edge_index = store.edge_index.long()  # as PyG's layers want it
    if not meta.get("directed"):
        with_reverses(data)
    target = meta.get("target", next((key[3:] for key in a if key.startswith("y__")), None))
    name = str(meta.get("name", name))
    if target is None:
        return make_typed(name, data, None)
    if f"y__{one_of(target, nodes, 'target')}" not in a:
        raise InputError(f"the arrays must include y__{target}, got {', '.join(a)}")
    data[target].y = torch.as_tensor(a[f"y__{target}"])
    return make_typed(name, data, target, _split(a, split), _classes(meta))


def _relation(key: str, nodes: dict[str, int]) -> Relation:
    parts = key.split("__")
    if len(parts) != 4:
        raise InputError(f"an array of edges must be named edge__SRC__REL__DST, got {key}")
    for part in (parts[1], parts[3]):
        one_of(part, nodes, f"{key}'s node type")
    return parts[1], parts[2], parts[3]


def _part(key: str, nodes: dict[str, int]) -> tuple[str, str]:
    """(type, which part of its matrix) of an array x__TYPE, x__TYPE_indptr, ..., y__TYPE."""
    for part in PARTS[1:]:
        if key.endswith(part) and key[3:].removesuffix(part) in nodes:
            return key[3:].removesuffix(part), part
    return one_of(key[3:], nodes, f"{key}'s node type"), ""


def _split(a: dict[str, np.ndarray], split: str | None) -> dict[str, np.ndarray]:
    """Of several splits the one that is named, else that with the most training nodes."""
    found = {k.removeprefix("train_"): len(v) for k, v in a.items() if k.startswith("train_")}
    known = {name: n for name, n in found.items() if all(f"{part}_{name}" in a for part in SPLITS)}
    if not known:
        raise InputError(f"the arrays must include train_idx, val_idx and test_idx, got {', '.join(a)}")
    chosen = max(known, key=lambda name: known[name]) if split is None else one_of(split, known, "split")
    return {part: a[f"{part}_{chosen}"] for part in SPLITS}


# --- a folder ------------------------------------------------------------------------------------------------------


def is_folder(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def open_folder(path: Path) -> Dataset:
    """Graph and features mapped, labels and splits in memory."""
    arrays, meta = mapped.read(path)
    lacking = [k for k in ("x", "y", *SPLIT_ARRAYS) if k not in arrays]
    if lacking:
        raise InputError(f"{path} must hold the array {lacking[0]}, got {', '.join(arrays)}")
    if arrays["x"].dtype not in (torch.float32, torch.float16):
        raise InputError(f"`x` of {path} must be float32 or float16, to be mapped, got {arrays['x'].dtype}")
    more = {"metric": meta.get("metric"), "note": str(meta.get("note", ""))}
    return _made(path, mapped.graph_of(path, arrays, meta), arrays["x"], arrays["y"], arrays, meta, **more)


# --- .pt -----------------------------------------------------------------------------------------------------------


def saved(path: Path) -> Data | HeteroData:
    """A PyG Data or HeteroData written by `torch.save`; only plain types are unpickled."""
    try:
        with _allow(PLAIN):
            data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        why = _line(e).split(". ")[0]
        raise InputError(f"the saved Data must be readable, got {type(e).__name__}: {why}") from None
    if not isinstance(data, Data | HeteroData):
        raise InputError(f"the saved object must be a PyG Data, got {type(data).__name__}")
    return data


def is_hetero(path: Path) -> bool:
    """Whether a saved file holds a HeteroData."""
    return isinstance(saved(path), HeteroData)


def _pt(path: Path, split: str | None) -> tuple[Dataset | TypedDataset, str]:
    if split is not None:
        raise InputError(f"a split must be left out, as the file has one, got '{split}'")
    return of_pyg(saved(path), path.stem)


def of_pyg(data: Data | HeteroData, name: str) -> tuple[Dataset | TypedDataset, str]:
    """The data set of a PyG Data or HeteroData, and how its features are prepared by default."""
    if isinstance(data, Dataset | TypedDataset):  # its features are prepared already
        return data, "raw"
    if isinstance(data, HeteroData):
        return make_typed(name, data, *labelled_type(data)), "auto"
    wanted = ("x", "y", "edge_index", *(f"{part}_mask" for part in SPLITS))
    lacking = [k for k in wanted if not torch.is_tensor(getattr(data, k, None))]
    if lacking:
        raise InputError(f"the Data must have the tensors {', '.join(lacking)}, got {', '.join(data.to_dict())}")
    splits = {part: first_mask(data[f"{part}_mask"]) for part in SPLITS}
    weight, attr = (getattr(data, name, None) for name in ("edge_weight", "edge_attr"))
    graph = Graph.from_edge_index(data.edge_index, weight, data.x.shape[0], attr)
    out = make(name, graph, data.x, data.y, splits)
    if weight is not None:
        out.edge_weight = weight
    return out, "auto"


def _line(e: Exception) -> str:
    """The first 200 characters of an error, on one line."""
    return " ".join(str(e).split())[:200]


READERS = {".npz": _npz, ".pt": _pt}
