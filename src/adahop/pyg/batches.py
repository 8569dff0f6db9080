"""Batches in use: which batch a tensor belongs to, found by the memory it lies in, not by when it was handed out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch_geometric.data import Data

from adahop.block import Block
from adahop.graph import Graph


class Whole:
    """What a layer may ask about the whole graph while it sees a batch: sums over all in-edges of a node.

    One per loader, shared by its batches. Sums are formed when first asked for, and kept.
    """

    def __init__(self, data: Data, graph: Graph):
        self.data, self.graph = data, graph
        self._sums: dict[str | None, tuple[Tensor, Tensor]] = {}

    def sums(self, name: str | None = None) -> tuple[Tensor, Tensor]:
        """[N] sums of the edge attribute `name` (None: of ones) over the in-edges of each node without its
        self-loops, and over its self-loops alone.
        """
        if name not in self._sums:
            src, dst = self.data.edge_index
            value = torch.ones_like(dst, dtype=torch.float) if name is None else self.data[name].view(-1)
            loop = src == dst
            none = value.new_zeros(self.graph.num_nodes)
            self._sums[name] = (
                none.index_add(0, dst, value.masked_fill(loop, 0)),
                none.index_add(0, dst, value.masked_fill(~loop, 0)),
            )
        return self._sums[name]


@dataclass(eq=False)
class DrawnBatch:
    """What a loader knows about a batch that it handed out. It holds none of the batch's own tensors."""

    n_id: Tensor  # [S] global node ids, the seeds first
    e_id: Tensor  # [M] places in the data's edge_index
    scale: Tensor  # [M] the factor that makes each target's sum unbiased
    whole: Whole
    num_nodes: list[int] | None = None  # found in each hop, the seeds first; None where edges have no hop
    num_edges: list[int] | None = None
    blocks: list[Block] | None = None  # one per hop, input layer first
    rounds: list[Any] = field(default_factory=list)  # messages that layers noted on this batch, in order
    calls: dict[Any, list[int]] = field(default_factory=dict)  # per layer, where the inputs of its calls lay
    taught: bool = False
    _moved: dict[torch.device, DrawnBatch] = field(default_factory=dict)

    @property
    def directional(self) -> bool:
        """Whether its edges were drawn per target, so that `scale` makes sums unbiased."""
        return self.blocks is not None

    def on(self, device: torch.device, name: str) -> Tensor:
        """One of its tensors on a device; copies are kept."""
        value = getattr(self, name)
        if value.device == device:
            return value
        kept = self._moved.setdefault(device, DrawnBatch(self.n_id, self.e_id, self.scale, self.whole))
        if getattr(kept, name).device != device:
            setattr(kept, name, value.to(device))
        return getattr(kept, name)


class Found(NamedTuple):
    """A batch, its `edge_index` as it was handed out, and the columns of it that the found tensor shows."""

    batch: DrawnBatch
    edge_index: Tensor
    columns: slice | None  # None: the tensor found is no part of `edge_index`


class _Entry(NamedTuple):
    alive: StorageWeakRef
    batch: DrawnBatch
    edge_index: Tensor | None  # None where the storage is that of `edge_index` itself
    layout: tuple[int, int, tuple[int, ...]]  # offset, edges and strides of `edge_index` in its storage


_entries: dict[int, _Entry] = {}  # by the address of a storage
_handed: list[tuple[weakref.ref[Any], DrawnBatch]] = []  # batches, whose tensors change with `batch.to(device)`
_last: weakref.ref[DrawnBatch] | None = None  # found last


def register(data: Any, batch: DrawnBatch) -> Any:
    """Make known what was handed out as `data`; it is forgotten when the tensors of `data` are gone."""
    forget_dead()
    _handed.append((weakref.ref(data), batch))
    _enter(data, batch)
    return data


def _enter(data: Any, batch: DrawnBatch) -> None:
    edge_index = given_edges(data)
    if edge_index is None:
        return
    _note(edge_index, batch)
    for name in ("x", "n_id"):  # what else names the batch, where a model changes its edges
        value = data.get(name) if hasattr(data, "get") else getattr(data, name, None)
        if isinstance(value, Tensor) and value.layout == torch.strided and value.numel():
            _note(value, batch, edge_index)


def _note(t: Tensor, batch: DrawnBatch, edge_index: Tensor | None = None) -> None:
    """`t` names the batch: it is its `edge_index`, or another tensor, which then keeps that one."""
    edges = t if edge_index is None else edge_index
    layout = (int(edges.storage_offset()), edges.shape[1], edges.stride())
    storage = t.untyped_storage()
    _entries[storage.data_ptr()] = _Entry(StorageWeakRef(storage), batch, edge_index, layout)


def alias(tensor: Tensor, found: Found) -> None:
    """From now on `tensor`, edges that a model made from those of the batch, names the batch too."""
    _note(tensor, found.batch, found.edge_index)


def given_edges(data: Any) -> Tensor | None:
    """The strided `edge_index` of a batch, where it has one."""
    edge_index = getattr(data, "edge_index", None)
    if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided and edge_index.dim() == 2:
        return edge_index if edge_index.shape[0] == 2 else None
    return None


def find(tensors: Iterable[Any]) -> Found | None:
    """The batch that some of these tensors belong to: by the storage of an `edge_index`, else of another tensor, else
    by equal edges (a copy on another device).
    """
    global _last
    given = list(_flat(tensors))
    edges = [t for t in given if not t.is_floating_point() and t.dim() == 2 and t.shape[0] == 2]
    rest = [t for t in given if not any(t is e for e in edges)]
    if not _handed or not (edges or rest):
        return None
    for lookup in (_by_storage, _by_batch):
        for t in (*edges, *rest):
            found = lookup(t)
            if found is not None:
                _last = weakref.ref(found.batch)
                return found
    for t in edges:
        found = _by_content(t)
        if found is not None:
            _last = weakref.ref(found.batch)
            return found
    return None


def _flat(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.layout == torch.strided and value.numel():
                yield value
        elif isinstance(value, tuple | list):
            yield from _flat(value)


def _by_storage(t: Tensor) -> Found | None:
    entry = _entries.get(t.untyped_storage().data_ptr())
    if entry is None or entry.alive.expired():
        return None
    if entry.edge_index is not None:
        return Found(entry.batch, entry.edge_index, None)
    offset, edges, strides = entry.layout
    whole = torch.as_strided(t, (2, edges), strides, offset)
    start = int(t.storage_offset()) - offset
    if t.dim() == 2 and t.shape[0] == 2 and t.stride() == strides and 0 <= start <= edges - t.shape[1]:
        return Found(entry.batch, whole, slice(start, start + t.shape[1]))
    return Found(entry.batch, whole, None)


def _by_batch(t: Tensor) -> Found | None:
    """Whether `t` lies in a batch whose tensors were replaced since (`batch.to(device)`)."""
    at = t.untyped_storage().data_ptr()
    for ref, batch in _handed:
        data = ref()
        edge_index = None if data is None else given_edges(data)
        if edge_index is None:
            continue
        x = getattr(data, "x", None)
        own = [edge_index, x] if isinstance(x, Tensor) and x.layout == torch.strided else [edge_index]
        if any(v.untyped_storage().data_ptr() == at for v in own):
            _enter(data, batch)
            return _by_storage(t)
    return None


def _by_content(t: Tensor) -> Found | None:
    for ref, batch in _handed:
        data = ref()
        edge_index = None if data is None else given_edges(data)
        if edge_index is not None and edge_index.shape == t.shape:
            here = edge_index.to(t.device)
            if torch.equal(here, t):
                _note(t, batch)
                return Found(batch, t, slice(0, t.shape[1]))
    return None


def last() -> DrawnBatch | None:
    """The batch found last, if it is still in use."""
    return None if _last is None else _last()


def known(batch: DrawnBatch) -> Tensor | None:
    """The `edge_index` of a batch that is still in use."""
    for ref, one in _handed:
        if one is batch and (data := ref()) is not None:
            return given_edges(data)
    return next((e.edge_index for e in _entries.values() if e.batch is batch and e.edge_index is not None), None)


def alive(batch: DrawnBatch) -> bool:
    """Whether a tensor that names the batch is still in use."""
    return any(one is batch and ref() is not None for ref, one in _handed) or any(
        e.batch is batch and not e.alive.expired() for e in _entries.values()
    )


def forget_dead() -> None:
    """Let go of batches whose tensors are gone."""
    while dead := [at for at, e in _entries.items() if e.alive.expired()]:
        for at in dead:  # an entry may hold the last reference to what another one is about
            del _entries[at]
    _handed[:] = [(ref, batch) for ref, batch in _handed if ref() is not None]


def in_use() -> int:
    """How many batches are known at present."""
    forget_dead()
    return len({id(batch) for _, batch in _handed} | {id(e.batch) for e in _entries.values()})
