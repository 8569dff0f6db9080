"""Dataset: a PyG Data with its graph, splits and metric; and how features are prepared."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from adahop.checks import InputError, as_tensor, node_ids, real
from adahop.graph import Graph
from adahop.mapped.data import SPLITS
from adahop.ops import in_file

Shared = TypeVar("Shared", bound=Data | HeteroData)
FEATURES = ("auto", "row", "standard", "raw")
WIDE = 100  # more columns than this, none negative: words or counts


class Dataset(Data):
    """A graph with features x, labels y, three masks, and the metric to report.

    `graph` is raw: not normalised, no self-loops added. `edge_index` is built from it at first access, so a large
    graph does not pay for it. `task` is "multiclass" or "multilabel", `metric` "accuracy", "micro-f1" or "roc-auc",
    `classes` the number of outputs, `note` what a reader of scores must know.
    """

    @property
    def edge_index(self) -> Tensor:
        if "edge_index" not in self._store:
            self._store.edge_index = self.graph.edge_index()
        return self._store["edge_index"]

    @edge_index.setter
    def edge_index(self, edge_index: Tensor | None) -> None:
        self._store.edge_index = edge_index

    @property
    def edge_stores(self) -> list[Any]:
        """PyG's own edge functions read the store, so it must hold `edge_index` by then."""
        assert self.edge_index is not None
        return super().edge_stores

    @property
    def num_edges(self) -> int:
        return self.graph.num_edges

    @property
    def train_idx(self) -> Tensor:
        return self.train_mask.nonzero().flatten()

    @property
    def val_idx(self) -> Tensor:
        return self.val_mask.nonzero().flatten()

    @property
    def test_idx(self) -> Tensor:
        return self.test_mask.nonzero().flatten()

    def __contains__(self, key: str) -> bool:
        return key == "edge_index" or super().__contains__(key)

    def cpu(self, *args: str) -> Dataset:
        return self.to("cpu", *args)

    def cuda(self, device: int | str | None = None, *args: str, non_blocking: bool = False) -> Dataset:
        return self.to("cuda" if device is None else device, *args, non_blocking=non_blocking)

    def subgraph(self, subset: Tensor) -> Dataset:
        """The induced subgraph, `graph` included."""
        out = super().subgraph(subset)
        out.graph = Graph.from_edge_index(out.edge_index, out.edge_weight, out.x.shape[0], out.edge_attr)
        return out


def make(
    name: str,
    graph: Graph,
    x: Any,
    y: Any,
    splits: Mapping[str, Any],
    classes: int | None = None,
    metric: str | None = None,
    note: str = "",
) -> Dataset:
    """A checked Dataset; `splits` has ids or masks under "train", "val" and "test"."""
    n = graph.num_nodes
    x = real(as_tensor(x, "x"), "x")
    if x.dim() != 2 or x.shape[0] != n or x.shape[1] == 0:
        raise InputError(f"`x` must have one row per node, {n} in all, and some columns, got shape {tuple(x.shape)}")
    masks = masks_of(splits, n)
    y, classes = labels_of(y, n, classes, torch.stack(list(masks.values())).any(0))
    task = "multilabel" if y.dim() == 2 else "multiclass"
    return Dataset(
        x=x if in_file(x) else x.float().contiguous(),
        y=y,
        graph=graph,
        **masks,
        name=name,
        task=task,
        metric=metric or ("micro-f1" if task == "multilabel" else "accuracy"),
        classes=classes,
        note=note,
        **({} if graph.attr is None else {"edge_attr": graph.attr.tables[0]}),
    )


def masks_of(splits: Mapping[str, Any], n: int) -> dict[str, Tensor]:
    if any(part not in splits for part in SPLITS):
        raise InputError(f"`splits` must have {', '.join(SPLITS)}, got {', '.join(splits) or 'none'}")
    masks, taken = {}, torch.zeros(n, dtype=torch.bool)
    for part in SPLITS:
        mask = torch.zeros(n, dtype=torch.bool)
        mask[node_ids(splits[part], n, f"{part}_idx")] = True
        if bool((mask & taken).any()):
            at = int((mask & taken).nonzero()[0])
            raise InputError(f"`{part}_idx` must not overlap the splits before it, got node {at} twice")
        masks[f"{part}_mask"], taken = mask, taken | mask
    if not bool(masks["train_mask"].any()):
        raise InputError("`train_idx` must name at least one node, got none")
    return masks


def labels_of(values: Any, n: int, classes: int | None, used: Tensor) -> tuple[Tensor, int]:
    """int64 [N] or float32 [N, C], and the number of outputs; a node outside every split may be unlabelled, -1 or nan.

    An unlabelled node has -1 afterwards, in every column.
    """
    y = real(as_tensor(values, "y"), "y")
    y = y[:, 0] if y.dim() == 2 and y.shape[1] == 1 else y
    if y.dim() not in (1, 2) or y.shape[0] != n:
        raise InputError(f"`y` must have one row per node, {n} in all, got shape {tuple(y.shape)}")
    y = torch.where(y.isnan(), -1.0, y) if y.is_floating_point() else y
    unlabelled = (y < 0) & (y == -1)  # 255 of uint8 equals -1
    unlabelled = unlabelled if y.dim() == 1 else unlabelled.all(1)
    if bool((unlabelled & used).any()):
        at = int((unlabelled & used).nonzero()[0])
        raise InputError(
            f"`y` must have a label for every node of a split, got y[{at}] without one; leave it out of them"
        )
    if y.dim() == 2:
        if not bool(((y == 0) | (y == 1) | unlabelled[:, None]).all()):
            raise InputError("`y` with more than one column must hold 0 and 1 only, got other numbers")
        return y.float(), y.shape[1]
    if y.is_floating_point() and not bool((y == y.round()).all()):
        raise InputError("`y` with one column must hold whole numbers, got fractions")
    y = y.long()
    classes = int(y.max()) + 1 if classes is None else classes
    bad = (y >= classes) | (y < -1)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise InputError(f"`y` must be in [0, {classes}), got y[{at}] = {int(y[at])}")
    return y, classes


def with_own_features(data: Shared) -> Shared:
    """A copy whose features may be changed in place; the rest is shared."""
    out = copy.copy(data)
    for store in out.node_stores:
        if store.get("x") is not None:
            store.x = store.x.clone()
    return out


def prepare(data: Dataset, kind: str) -> Dataset:
    """Features by row, standardised or raw, in place; "auto" decides by the data (see `load`)."""
    scale_features(data.x, kind, data.train_mask, f"`x` of {data.name}")
    return data


def finite(x: Tensor, what: str) -> float:
    """The smallest entry, once all are finite."""
    low, high = x.aminmax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        raise InputError(f"{what} must be finite, got nan or infinity")
    return float(low)


def scale_features(x: Tensor, kind: str, train: Tensor | slice, what: str) -> None:
    """Prepare one table, in place; columns are standardised by the mean and deviation of the rows `train`."""
    low = finite(x, what)
    if kind == "auto":
        kind = "row" if low >= 0 and x.shape[1] > WIDE else "standard"
    if kind == "row":
        total = torch.linalg.vector_norm(x, ord=1, dim=1, keepdim=True)
        x.div_(total.masked_fill_(total == 0, 1.0))
    elif kind == "standard":
        std, mean = torch.std_mean(x[train], dim=0, correction=0)
        x.sub_(mean).div_(std.masked_fill_(std <= 1e-6 * mean.abs(), 1.0))  # a constant column stays near zero
