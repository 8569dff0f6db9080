"""convert(): an edge list, features and labels, an OGB folder or a saved PyG Data as one `.npz` that `load` takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adahop.checks import InputError, KindError, count, flag, one_of
from adahop.convert.parts import PARTS, Ids, read_splits
from adahop.convert.sources import Raw, from_ogb, from_saved, from_tables
from adahop.convert.tables import Tell
from adahop.convert.typed import (
    by_name,
    from_saved_typed,
    from_typed_tables,
    is_named,
    packed,
    typed_meta,
    with_reverse_edges,
)
from adahop.datasets import load
from adahop.datasets.base import Dataset, finite, make, prepare
from adahop.datasets.files import is_hetero, typed_npz
from adahop.graph import Graph
from adahop.mapped import save
from adahop.ops import random
from adahop.records import write_whole

__all__ = ["convert"]

RANDOM = "random:60,20,20"  # the split of a source without one
SPARSE = 0.1  # features with a smaller share of entries that are not 0 are written as a sparse matrix


def convert(
    source: str | Path | Sequence[str | Path] | Mapping[str, str | Path | int],
    out: str | Path,
    *,
    split: str | None = None,
    seed: int = 0,
    ids: str = "numbers",
    undirected: bool = False,
    name: str | None = None,
    tell: Tell | None = None,
    mmap: bool = False,
    loops: bool = False,
) -> dict[str, Any]:
    """Check the files of a graph and write them as one `.npz`; returns what was written, in numbers.

    `source` is (edges, features, labels), an OGB folder, or a saved PyG Data or HeteroData. A typed graph is a dict, or
    words with = between: edge__SRC__REL__DST, x__TYPE and y__TYPE name the table of a relation, a type's features and
    its labels, n__TYPE how many nodes a type has where nothing else tells. `split` is "random:60,20,20" (shares of
    the labelled nodes, drawn with `seed`) or a folder with train.csv, val.csv and test.csv; None takes the source's
    own split, else that random one. ids="names" takes any words for ids: those of the labels file, in its order.
    `undirected` adds every edge's reverse, an edge given twice counting once, with the larger weight. The file is
    written whole or not at all. `mmap` writes a folder instead, whose arrays `load` maps instead of reading them, with
    the features prepared as "auto" says; `source` may then be a .npz, too. With `loops` its rows begin with the node's
    own loop, so that models which add one (gcn, gat) need no second graph beside it.
    """
    typed = is_named(source) or _is_typed(source)
    out = _check([] if typed else source, out, undirected=undirected, mmap=mmap)
    if flag(loops, "loops") and not mmap:
        raise InputError("`loops` must be False without `mmap`, got True")
    if mmap and isinstance(source, str | Path) and Path(source).suffix == ".npz":
        data = load(Path(source))
        if not isinstance(data, Dataset):
            raise InputError("`mmap` must be False for a typed graph, got True")
        return _mapped(data, out, loops)
    count(seed, 0, "seed")
    if typed:
        if mmap:
            raise InputError("`mmap` must be False for a typed graph, got True")
        one_of(ids, ("numbers", "names"), "ids")
        return _typed(source, out, split, seed, ids == "names", undirected, name or out.stem, tell)
    raw, known = _source(source, one_of(ids, ("numbers", "names"), "ids") == "names", tell)
    if split is not None or raw.splits is None:
        raw.splits = _split(raw.y, known, split or RANDOM, seed)
    elif len(raw.splits) < len(PARTS):
        raise InputError(f"`split` must be given for a Data with some masks only, got one with {', '.join(raw.splits)}")
    arrays, checked = _pack(raw, undirected, name or out.stem)
    meta = {**in_numbers(checked), **({"class_names": raw.classes} if raw.classes else {})}
    if mmap:
        return {**_mapped(prepare(checked, "auto"), out, loops), **meta}
    arrays["meta"] = np.array(json.dumps(meta))
    write_whole(out, lambda f: np.savez_compressed(f, **arrays))  # type: ignore[arg-type]
    return meta


def _mapped(data: Dataset, out: Path, loops: bool) -> dict[str, Any]:
    save(data, out, loops=loops)
    return in_numbers(data)


def in_numbers(data: Dataset) -> dict[str, Any]:
    """What a data set holds."""
    split = [int(data[f"{part}_mask"].sum()) for part in PARTS]
    return {
        "name": data.name, "nodes": data.num_nodes, "edges": data.graph.num_edges, "features": data.x.shape[1],
        "classes": data.classes, "task": data.task, "split": split,
    }  # fmt: skip


def _is_typed(source: Any) -> bool:
    """Whether a source is a saved HeteroData."""
    path = source if isinstance(source, str | Path) else None
    return path is not None and Path(path).suffix == ".pt" and Path(path).is_file() and is_hetero(Path(path))


def _typed(
    source: Any, out: Path, split: str | None, seed: int, names: bool, undirected: bool, name: str, tell: Tell | None
) -> dict[str, Any]:
    splits: dict[str, np.ndarray] | None = None
    if is_named(source):
        table = from_typed_tables(by_name(source), names, tell)
    else:
        table, splits = from_saved_typed(Path(source))
    a = with_reverse_edges(table.arrays) if undirected else table.arrays
    if table.target is None:
        if split is not None:
            raise InputError(f"`split` must be left out where no type has labels, got '{split}'")
        splits = {}
    elif split is not None or splits is None:
        splits = _split(a[f"y__{table.target}"], table.ids[table.target], split or RANDOM, seed)
    meta = typed_meta(name, table, a, splits)
    arrays = packed(meta, a, splits)
    typed_npz(name, arrays, None)  # what is written is what loads
    write_whole(out, lambda f: np.savez_compressed(f, **arrays))  # type: ignore[arg-type]
    return meta


def _check(source: Any, out: Any, mmap: bool, undirected: bool) -> Path:
    """`out` as a path that can be written to, once all are of their kind."""
    for path in (out, *(source if isinstance(source, Sequence) and not isinstance(source, str) else [source])):
        if not isinstance(path, str | Path):
            raise KindError(f"`source` and `out` must be paths, got {type(path).__name__}")
    flag(undirected, "undirected")
    path, there = Path(out), Path(out).parent.is_dir()
    if flag(mmap, "mmap") and (not path.name or path.exists() or not there):
        raise InputError(f"`out` must be a new folder in an existing one, got {out}")
    if not mmap and (path.suffix != ".npz" or not there):
        raise InputError(f"`out` must be a .npz file in an existing folder, got {out}")
    return path


def _source(source: Any, names: bool, tell: Tell | None) -> tuple[Raw, Ids]:
    paths = [Path(source)] if isinstance(source, str | Path) else [Path(p) for p in source]
    for path in paths:
        if not path.exists():
            raise InputError(f"`source` must name existing files, got {path}")
    if len(paths) == 3:
        return from_tables(paths[0], paths[1], paths[2], names, tell)
    if len(paths) == 1 and not names:
        if paths[0].is_dir():
            return from_ogb(paths[0], tell)
        if paths[0].suffix == ".pt":
            return from_saved(paths[0])
    what = "edges, features and labels, or one OGB folder or .pt file with numbers for ids"
    raise InputError(f"`source` must be {what}, got {', '.join(map(str, paths))}")


def _split(y: np.ndarray, ids: Ids, how: str, seed: int) -> dict[str, np.ndarray]:
    """From the files of a folder, or at random among the labelled nodes."""
    if Path(how).is_dir():
        return read_splits(Path(how), ids)
    if not how.startswith("random:"):
        raise InputError(f"`split` must be like random:60,20,20 or a folder with train.csv and so on, got '{how}'")
    try:
        shares = np.array([float(s) for s in how.removeprefix("random:").split(",")])
    except ValueError:
        shares = np.zeros(0)
    if len(shares) != 3 or not (np.isfinite(shares) & (shares >= 0)).all() or shares[0] == 0:
        raise InputError(f"`split` must be random: and three shares, the first above 0, got '{how}'")
    labelled = np.flatnonzero(y >= 0 if y.ndim == 1 else (y >= 0).any(1))
    if not labelled.size:
        raise InputError("the labels must name at least one node's class to be split at random, got none")
    order = random.shuffled(torch.from_numpy(labelled), random.key(seed)).numpy()
    cuts = np.round(np.cumsum(shares / shares.sum())[:2] * len(order)).astype(int)
    return dict(zip(PARTS, np.split(order, cuts), strict=True))


def _pack(raw: Raw, undirected: bool, name: str) -> tuple[dict[str, np.ndarray], Dataset]:
    n = raw.x.shape[0]
    order, src, dst = _ordered(raw, undirected)
    weight, attr = (None if t is None else t[order] for t in (raw.weight, raw.attr))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(dst, minlength=n))]).astype(np.int64)
    a: dict[str, np.ndarray] = {"indptr": indptr, "indices": src.astype(np.int32 if n < 2**31 else np.int64)}
    a |= {k: t for k, t in (("weight", weight), ("edge_attr", attr)) if t is not None}
    assert raw.splits is not None
    checked = make(name, Graph.from_csr(indptr, src, weight, attr), raw.x, raw.y, raw.splits, len(raw.classes) or None)
    finite(checked.x, "`x`")
    a |= _features(raw.x) | _labels(checked.y.numpy())
    a |= {f"{part}_idx": np.sort(ids).astype(np.int64) for part, ids in raw.splits.items()}
    if raw.names is not None:
        a["names"] = raw.names.astype(str)
    return a, checked


def _ordered(raw: Raw, undirected: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(which of the source's edges, src, dst) of the edges by target, then source."""
    src, dst, edge = raw.src, raw.dst, np.arange(len(raw.src))
    if undirected:
        src, dst, edge = np.concatenate([src, dst]), np.concatenate([dst, src]), np.concatenate([edge, edge])
    keys = (src, dst) if raw.weight is None or not undirected else (-raw.weight[edge], src, dst)
    order = np.lexsort(keys)
    if undirected and len(src):
        fresh = (src[order][1:] != src[order][:-1]) | (dst[order][1:] != dst[order][:-1])
        order = order[np.concatenate([[True], fresh])]
    return edge[order], src[order], dst[order]


def _features(x: np.ndarray) -> dict[str, np.ndarray]:
    if np.count_nonzero(x) >= SPARSE * max(x.size, 1):
        return {"x": x.astype(np.float32)}
    row, column = x.nonzero()
    indptr, values = np.searchsorted(row, np.arange(len(x) + 1)), x[row, column].astype(np.float32)
    out: dict[str, np.ndarray] = {
        "x_indptr": indptr,
        "x_indices": column.astype(np.int32),
        "x_shape": np.array(x.shape),
    }
    return out if (values == 1).all() else {**out, "x_data": values}


def _labels(y: np.ndarray) -> dict[str, np.ndarray]:
    if y.ndim == 2 and y.min(initial=0) < 0:
        return {"y": y.astype(np.int8)}  # an unlabelled node has -1 in every column
    if y.ndim == 2:
        return {"y_packed": np.packbits(y.astype(bool), axis=1), "y_shape": np.array(y.shape)}
    return {"y": y.astype(np.int16 if y.max(initial=0) < 2**15 else np.int64)}
