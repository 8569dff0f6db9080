"""A typed graph from tables: one of edges per relation, one of features and one of labels per type, as one `.npz`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch_geometric.data import HeteroData

from adahop.checks import InputError, count, one_of
from adahop.convert.parts import (
    PARTS,
    EdgeTable,
    Ids,
    classes_of,
    edge_table,
    in_order,
    label_table,
    read_features,
)
from adahop.convert.tables import Columns, Tell
from adahop.datasets.base import finite
from adahop.datasets.files import SPLITS, saved
from adahop.datasets.typed import labelled_type, make_typed
from adahop.typed import Relation

KINDS = ("edge__", "x__", "y__", "n__")


class NamedFiles(NamedTuple):
    """The files of a typed graph by what they hold, and numbers of nodes that a user gives."""

    edges: dict[Relation, Path]
    x: dict[str, Path]
    y: dict[str, Path]
    nodes: dict[str, int]


def is_named(source: Any) -> bool:
    """Whether files come with names: a mapping, or words like x__paper=papers.csv."""
    words = [source] if isinstance(source, str) else source
    return isinstance(source, Mapping) or (
        isinstance(words, list | tuple) and all(isinstance(w, str) and w.startswith(KINDS) and "=" in w for w in words)
    )


def by_name(source: Any) -> NamedFiles:
    """{"edge__SRC__REL__DST": path, "x__TYPE": path, "y__TYPE": path, "n__TYPE": count}, or such words with =."""
    words = [source] if isinstance(source, str) else source
    pairs = dict(source) if isinstance(source, Mapping) else dict(w.partition("=")[::2] for w in words)
    found = NamedFiles({}, {}, {}, {})
    for name, value in pairs.items():
        head = next((kind for kind in KINDS if str(name).startswith(kind)), None)
        parts = str(name).split("__")
        if head is None or (head == "edge__") != (len(parts) == 4) or not all(parts):
            raise InputError(f"`source` must be named edge__SRC__REL__DST, x__TYPE, y__TYPE or n__TYPE, got {name!r}")
        if head == "n__":
            whole = int(value) if str(value).isdecimal() else value
            found.nodes[parts[1]] = count(whole, 0, str(name))
            continue
        path = Path(str(value))
        if not path.is_file():
            raise InputError(f"`source` must name existing files, got {path} for {name}")
        if head == "edge__":
            found.edges[parts[1], parts[2], parts[3]] = path
        else:
            (found.x if head == "x__" else found.y)["__".join(parts[1:])] = path
    if not found.edges:
        raise InputError("`source` must have the edges of a relation, edge__SRC__REL__DST, got none")
    if len(found.y) > 1:
        raise InputError(f"`source` must have the labels of one type, got {', '.join(found.y)}")
    kinds = list(dict.fromkeys(part for a, _, b in found.edges for part in (a, b)))
    for kind in (*found.x, *found.y, *found.nodes):
        one_of(kind, kinds, "source's node type")
    return found


class Tabled(NamedTuple):
    """What the tables hold: arrays as the typed `.npz` has them, and its `meta`."""

    arrays: dict[str, np.ndarray]
    nodes: dict[str, int]
    target: str | None
    ids: dict[str, Ids]
    classes: list[str]


def from_typed_tables(given: NamedFiles, names: bool, tell: Tell | None = None) -> Tabled:
    """Edges, features and labels, every id checked. Without `names`, ids count the rows of a type's features."""
    features = {kind: read_features(path, tell) for kind, path in given.x.items()}
    labels = {kind: label_table(path, names, tell) for kind, path in given.y.items()}
    edges = {relation: edge_table(path, "text" if names else "whole", tell) for relation, path in given.edges.items()}
    kinds = list(dict.fromkeys(part for a, _, b in edges for part in (a, b)))
    ids = {kind: _ids(kind, given, features, labels, edges, names) for kind in kinds}
    a: dict[str, np.ndarray] = {}
    for relation, found in edges.items():
        name = "__".join(relation)
        a[f"edge__{name}"] = found.places(ids[relation[0]], ids[relation[2]])
        a |= {f"{k}__{name}": t for k, t in (("weight", found.weight), ("attr", found.attr)) if t is not None}
    for kind, (head, x) in features.items():
        a[f"x__{kind}"] = in_order(given.x[kind], ids[kind], head, x)
    classes: list[str] = []
    for kind, table in labels.items():
        y, classes = classes_of(table)
        a[f"y__{kind}"] = in_order(given.y[kind], ids[kind], table, y, -1)
    nodes = {kind: ids[kind].n for kind in kinds}
    return Tabled(a, nodes, next(iter(labels), None), ids, classes)


def _ids(
    kind: str,
    given: NamedFiles,
    features: Mapping[str, tuple[Columns | None, np.ndarray]],
    labels: Mapping[str, Columns],
    edges: Mapping[Relation, EdgeTable],
    names: bool,
) -> Ids:
    """The ids of a type: those of its features, else of its labels, else those that its edges have."""
    table, x = features.get(kind, (None, None))
    own = [t for t in (table, labels.get(kind)) if t is not None and len(t.columns) > 1]
    ends = [t.ends[i] for r, t in edges.items() for i, part in enumerate(r[::2]) if part == kind]
    if names:
        found = own[0].columns[0][:, 0] if own else np.concatenate(ends)
        unique = np.array(list(dict.fromkeys(map(str, found.tolist()))), object)
        return Ids(unique, len(unique), f"one of the {len(unique)} of {kind}")
    if kind in given.nodes:
        n, known = given.nodes[kind], f"n__{kind}={given.nodes[kind]}"
    elif x is not None:
        n, known = len(x), f"the rows of x__{kind}"
    elif kind in labels and not own:
        n, known = len(labels[kind].columns[-1]), f"the rows of y__{kind}"
    else:
        listed = [*ends, *(t.columns[0][:, 0] for t in own)]
        n, known = max((int(e.max()) + 1 for e in listed if len(e)), default=0), "what a whole number can be"
    return Ids(None, n, f"in [0, {n}), {known}")


def from_saved_typed(path: Path) -> tuple[Tabled, dict[str, np.ndarray] | None]:
    """A HeteroData saved with `torch.save`, and its splits."""
    data = saved(path)
    assert isinstance(data, HeteroData)
    target, splits = labelled_type(data)
    checked = make_typed(path.stem, data, target, splits)
    a: dict[str, np.ndarray] = {}
    for relation in checked.edge_types:
        name = "__".join(relation)
        a[f"edge__{name}"] = checked[relation].edge_index.numpy()
        if checked[relation].get("edge_weight") is not None:
            a[f"weight__{name}"] = checked[relation].edge_weight.detach().numpy().reshape(-1)
        if checked[relation].get("edge_attr") is not None:
            a[f"attr__{name}"] = checked[relation].edge_attr.detach().numpy()
    for kind in checked.node_types:
        if checked[kind].get("x") is not None:
            finite(checked[kind].x, f"`x` of {kind}")
            a[f"x__{kind}"] = checked[kind].x.detach().numpy()
    if target is not None:
        a[f"y__{target}"] = checked[target].y.numpy()
    nodes = checked.graph.types.num_nodes
    ids = {kind: Ids(None, n) for kind, n in nodes.items()}
    parts = None if target is None else {part: checked[target][f"{part}_mask"].nonzero().flatten().numpy()
                                         for part in SPLITS}  # fmt: skip
    return Tabled(a, nodes, target, ids, []), parts


def with_reverse_edges(a: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every relation also the other way, `rev_` before its name."""
    back = {}
    for name, pairs in a.items():
        if name.startswith("edge__"):
            _, source, relation, target = name.split("__")
            back[f"edge__{target}__rev_{relation}__{source}"] = pairs[::-1].copy()
            for head in ("weight", "attr"):
                if (values := a.get(f"{head}__{name[6:]}")) is not None:
                    back[f"{head}__{target}__rev_{relation}__{source}"] = values
    return {**a, **back}


def typed_meta(name: str, table: Tabled, a: dict[str, np.ndarray], splits: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What was written, in numbers; "directed", as relations are those that the user has, and no more."""
    y = a.get(f"y__{table.target}")
    many = {k.split("__", 1)[1]: int(v.shape[1]) for k, v in a.items() if k.startswith("edge__")}
    classes = 0 if y is None else y.shape[1] if y.ndim == 2 else len(table.classes) or int(y.max(initial=0)) + 1
    return {
        "kind": "hetero", "name": name, "nodes": table.nodes, "edges": many, "directed": True,
        **({"target": table.target} if table.target else {}), **({"classes": classes} if classes else {}),
        "features": {k[3:]: int(v.shape[1]) for k, v in a.items() if k.startswith("x__")},
        "split": [len(splits.get(part, ())) for part in PARTS],
        **({"class_names": table.classes} if table.classes else {}),
    }  # fmt: skip


def packed(meta: dict[str, Any], a: dict[str, np.ndarray], splits: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of the file."""
    parts = {f"{part}_idx": np.sort(ids).astype(np.int64) for part, ids in splits.items()}
    return {**a, **parts, "meta": np.array(json.dumps(meta))}
