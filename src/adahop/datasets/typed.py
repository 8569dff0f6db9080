"""Typed data sets: a HeteroData with its graph, its labelled type and splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from adahop.checks import InputError, as_tensor, one_of, real
from adahop.datasets.base import labels_of, masks_of, scale_features
from adahop.features import TypedFeatures
from adahop.graph import Graph
from adahop.mapped.data import SPLITS
from adahop.ops import random

REVERSE = "rev_"  # before the name of a relation: the same edges the other way


class TypedDataset(HeteroData):
    """A HeteroData with features, labels of one node type, three masks, and the metric to report.

    Of a store per type, `x` is there where the type has features. `graph` is the graph of all relations, `target` the
    type with `y`, `train_mask`, `val_mask` and `test_mask` in its store (None where a data set has no labels). `y`,
    `train_idx`, `val_idx` and `test_idx` here go by the graph's own ids, all types in one range; nodes of other types
    have the label -1. `name`, `task`, `metric`, `classes` and `note` are those of `Dataset`.
    """

    @property
    def target(self) -> str | None:
        """The type with labels; None where a data set has none."""
        return self._global_store.get("labelled")

    @property
    def y(self) -> Tensor:
        """[N] or [N, C] the labels by the graph's own ids."""
        kind = self._labelled()
        own = self[kind].y
        out = own.new_full((self.graph.num_nodes, *own.shape[1:]), -1)
        out[slice(*self.graph.types.span(kind))] = own
        return out

    @property
    def x(self) -> TypedFeatures:
        """The features of all types, as models read them."""
        types = self.graph.types
        return TypedFeatures({k: self[k].get("x") for k in types.nodes}, types.num_nodes, types.relations)

    def __setattr__(self, key: str, value: Any) -> None:
        if key != "x":
            super().__setattr__(key, value)
            return
        for kind, table in value.tables.items():  # a HeteroData knows no setters of properties
            if table is not None:
                self[kind].x = table

    @property
    def train_mask(self) -> Tensor:
        """[N] by the graph's own ids, as are the others."""
        return self._mask("train")

    @property
    def val_mask(self) -> Tensor:
        return self._mask("val")

    @property
    def test_mask(self) -> Tensor:
        return self._mask("test")

    def _mask(self, part: str) -> Tensor:
        ids = self._part(part)
        mask = torch.zeros(self.graph.num_nodes, dtype=torch.bool, device=ids.device)
        mask[ids] = True
        return mask

    @property
    def train_idx(self) -> Tensor:
        return self._part("train")

    @property
    def val_idx(self) -> Tensor:
        return self._part("val")

    @property
    def test_idx(self) -> Tensor:
        return self._part("test")

    def _part(self, part: str) -> Tensor:
        kind = self._labelled()
        return self[kind][f"{part}_mask"].nonzero().flatten() + self.graph.types.nodes[kind]

    def _labelled(self) -> str:
        if self.target is None:
            raise InputError(f"data set '{self.name}' must have labels for this, got a graph without")
        return self.target


def make_typed(
    name: str,
    data: HeteroData,
    target: str | None,
    splits: Mapping[str, Any] | None = None,
    classes: int | None = None,
    metric: str | None = None,
    note: str = "",
) -> TypedDataset:
    """A checked data set from the stores of a HeteroData; `splits` has ids or masks of the labelled type."""
    out = TypedDataset()
    graph = Graph.from_data(data)
    assert graph.types is not None
    for kind, n in graph.types.num_nodes.items():
        out[kind].num_nodes = n
        x = data[kind].get("x") if kind in data.node_types else None
        if x is not None:
            out[kind].x = features_of(x, n, f"data['{kind}'].x")
    for relation in data.edge_types:
        for key, value in data[relation].items():
            out[relation][key] = value
    out.graph, out.name, out.note, out.labelled = graph, name, note, target
    out.task, out.classes, out.metric = "none", 0, metric or "none"
    if target is not None:
        n = graph.types.num_nodes[one_of(target, graph.types.nodes, "target")]
        masks = masks_of(splits or {}, n)
        y, out.classes = labels_of(data[target].y, n, classes, torch.stack(list(masks.values())).any(0))
        out[target].y = y
        for part, mask in masks.items():
            out[target][part] = mask
        out.task = "multilabel" if y.dim() == 2 else "multiclass"
        out.metric = metric or ("micro-f1" if y.dim() == 2 else "accuracy")
    return out


def features_of(values: Any, n: int, what: str) -> Tensor:
    x = real(as_tensor(values, what), what)
    if x.dim() != 2 or x.shape[0] != n or x.shape[1] == 0:
        raise InputError(
            f"`{what}` must have one row per node of its type, {n} in all, and some columns, got shape {tuple(x.shape)}"
        )
    return x.float().contiguous()


def prepare_typed(data: TypedDataset, kind: str) -> TypedDataset:
    """The features of each type by row, standardised or raw, in place; "auto" decides by the data of each type.

    The labelled type is standardised on its training nodes, the others on all of theirs.
    """
    for name in data.node_types:
        x = data[name].get("x")
        if x is not None and x.numel():
            own = data[name].train_mask if name == data.target else slice(None)
            scale_features(x, kind, own, f"`x` of {data.name}'s {name}")
    return data


def with_reverses(data: HeteroData) -> HeteroData:
    """Add a reverse relation, named `rev_` and the name, for every relation whose reverse edges are not there yet."""
    for source, name, target in list(data.edge_types):
        store = data[source, name, target]
        if not _reversed(data, source, target, store.edge_index):
            back = data[target, f"{REVERSE}{name}", source]
            back.edge_index = store.edge_index.flip(0)
            for name in ("edge_weight", "edge_attr"):
                if store.get(name) is not None:
                    back[name] = store[name]
    return data


def _reversed(data: HeteroData, source: str, target: str, edges: Tensor) -> bool:
    """Whether a relation from `target` to `source` has these edges the other way."""
    most = int(edges.max()) + 1 if edges.numel() else 1
    wanted = None
    for a, name, b in data.edge_types:
        other = data[a, name, b].edge_index
        if (a, b) != (target, source) or other.shape != edges.shape:
            continue
        if wanted is None:
            wanted = (edges[1].long() * most + edges[0].long()).sort().values
        fits = int(other.max() if other.numel() else 0) < most
        if fits and torch.equal((other[0].long() * most + other[1].long()).sort().values, wanted):
            return True
    return False


def first_mask(mask: Tensor) -> Tensor:
    """The first of several splits, as booleans."""
    return (mask[:, 0] if mask.dim() == 2 else mask).bool()


def labelled_type(data: HeteroData) -> tuple[str | None, dict[str, Tensor]]:
    """The type with labels, and its splits. Missing ones are made: a fifth of the training nodes to validate on, or all
    labelled nodes split 60/20/20 where there is no split at all."""
    kind = next((kind for kind in data.node_types if torch.is_tensor(data[kind].get("y"))), None)
    if kind is None:
        return None, {}
    store = data[kind]
    given = {part: store[f"{part}_mask"] for part in SPLITS if torch.is_tensor(store.get(f"{part}_mask"))}
    splits = {part: first_mask(mask) for part, mask in given.items()}
    if "train" not in splits:
        labelled = (store.y.reshape(len(store.y), -1) >= 0).all(1).nonzero().flatten()
        order = random.shuffled(labelled, random.key(0))
        cuts = [round(share * order.numel()) for share in (0.6, 0.8)]
        return kind, dict(zip(SPLITS, order.tensor_split(cuts), strict=True))
    if "val" not in splits:
        order = random.shuffled(splits["train"].nonzero().flatten(), random.key(0))
        splits["val"], splits["train"] = order.tensor_split([order.numel() // 5])
    return kind, {"test": torch.zeros(0, dtype=torch.long), **splits}
