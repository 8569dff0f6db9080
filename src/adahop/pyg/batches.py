"""Batches in use: which batch a tensor belongs to, found by the memory it lies in, not by when it was handed out."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage

from adahop.block import Block
from adahop.graph import Graph
from adahop.typed import Relation, TypedBatch


class Whole:
    """What a layer may ask about the whole graph while it sees a batch: sums over all in-edges of a node.

    One per loader, or per relation of typed data, shared by its batches. Sums are formed when first asked for and kept.
    """

    bipartite = False  # whether sources and targets are of two types, so that equal numbers are no self-loop

    def __init__(self, data: Data | EdgeStorage, graph: Graph, relation: Relation | None = None):
        self.data, self.graph, self.relation = data, graph, relation
        self.num_nodes = graph.num_nodes, graph.num_nodes  # sources and targets
        if relation is not None:
            assert graph.types is not None
            many = graph.types.num_nodes
            self.num_nodes, self.bipartite = (many[relation[0]], many[relation[2]]), relation[0] != relation[2]
        self._sums: dict[tuple[str | None, int], tuple[Tensor, Tensor]] = {}
        self._loops: dict[str | None, Tensor] = {}

    @property
    def edge_index(self) -> Tensor:
        return self.data.edge_index

    @property
    def num_edges(self) -> int:
        return self.edge_index.shape[1]

    def sums(self, name: str | None = None, row: int = 1) -> tuple[Tensor, Tensor]:
        """[N] sums of the edge attribute `name` (None: of ones) over the in-edges (row 0: out-edges) of each node
        without its self-loops, and over its self-loops alone.
        """
        if (name, row) not in self._sums:
            at = self.edge_index[row]
            value = torch.ones_like(at, dtype=torch.float) if name is None else self.data[name].detach().view(-1)
            loop = self.is_loop(self.edge_index)
            none = value.new_zeros(self.num_nodes[row])
            self._sums[name, row] = (
                none.index_add(0, at, value.masked_fill(loop, 0)),
                none.index_add(0, at, value.masked_fill(~loop, 0)),
            )
        return self._sums[name, row]

    def is_loop(self, edges: Tensor) -> Tensor:
        """[M] whether each of some edges is a self-loop."""
        return torch.zeros_like(edges[0], dtype=torch.bool) if self.bipartite else edges[0] == edges[1]

    def loops(self, name: str | None = None) -> Tensor:
        """[N] the attribute of a node's last self-loop, which is the one that PyG keeps; NaN where it has none."""
        if name not in self._loops:
            dst = self.edge_index[1]
            loop = self.is_loop(self.edge_index).nonzero().flatten()
            value = torch.ones_like(dst, dtype=torch.float) if name is None else self.data[name].detach().view(-1)
            out = value.new_full((self.num_nodes[1],), float("nan"))
            out[dst[loop]] = value[loop]
            self._loops[name] = out
        return self._loops[name]


class Joint(Whole):
    """All relations as one, in the graph's own ids; its edges are put together when first asked for."""

    def __init__(self, graph: Graph, relations: dict[Relation, Whole]):
        super().__init__(Data(), graph)
        self.relations = relations

    @functools.cached_property
    def pairs(self) -> Pairs:
        return Pairs(self.graph, self.relations)

    @property
    def edge_index(self) -> Tensor:
        if self.data.edge_index is None:
            self.data.edge_index = self.graph.edge_index()
        return self.data.edge_index

    @property
    def num_edges(self) -> int:
        return self.graph.num_edges


class Pairs(Joint):
    """All relations side by side: a source is there once per relation that it has, as (relation, source)."""

    bipartite = True

    def __init__(self, graph: Graph, relations: dict[Relation, Whole]):
        super().__init__(graph, relations)
        assert graph.types is not None
        many = [graph.types.num_nodes[r[0]] for r in graph.relations]
        self.first = dict(zip(graph.relations, [0, *itertools.accumulate(many)], strict=False))  # of each relation
        self.num_nodes = sum(many), graph.num_nodes

    @property
    def edge_index(self) -> Tensor:
        if self.data.edge_index is None:
            types = self.graph.types
            assert types is not None
            edges, apart = self.graph.edge_index(), itertools.pairwise(types.starts)
            for relation, (start, stop) in zip(self.graph.relations, apart, strict=True):
                edges[0, start:stop] += self.first[relation] - types.nodes[relation[0]]
            self.data.edge_index = edges
        return self.data.edge_index


def wholes(data: Data | HeteroData, graph: Graph) -> dict[Relation | None, Whole]:
    """The whole graph, and each relation of typed data."""
    if not isinstance(data, HeteroData):
        return {None: Whole(data, graph)}
    each = {r: Whole(data[r], graph, r) for r in graph.relations}
    found: dict[Relation | None, Whole] = dict(each.items())
    return found | {None: Joint(graph, each)}


@dataclass(eq=False)
class DrawnBatch:
    """What a loader knows about a batch that it handed out. It holds none of the tensors that name the batch.

    A typed batch has one for all relations together, numbered as PyG's `to_homogeneous` numbers them, which owns one
    per relation, in the ids of its types.
    """

    n_id: Tensor  # [S] global node ids, the seeds first; of a relation, those of its targets' type
    e_id: Tensor  # [M] places in the data's edge_index
    scale: Tensor  # [M] the factor that makes each target's sum unbiased
    whole: Whole
    num_nodes: list[int] | None = None  # found in each hop, the seeds first; None where edges have no hop
    num_edges: list[int] | None = None
    blocks: list[Block] | None = None  # one per hop, input layer first
    drawn: Tensor | None = None  # [2, M] the edges, where those of the batch are others (a transform)
    listens: bool = False  # whether layers that train on it should note their messages
    memory: weakref.ref[Any] | None = None  # the snapshot that layers apply on it
    expected: int | None = None  # how many rounds the last step had
    rounds: list[Any] = field(default_factory=list)  # what layers noted on it, in order
    calls: dict[Any, list[Tensor | None]] = field(default_factory=dict)  # per layer, some rows of its calls' inputs
    kept: dict[Any, Any] = field(default_factory=dict)  # what several layers compute alike
    sources: Tensor | None = None  # of a relation between two types, the ids of its sources' type
    relation: Relation | None = None
    owner: DrawnBatch | None = None  # of a relation, the batch that it is a part of
    typed: TypedBatch | None = None
    _moved: dict[torch.device, DrawnBatch] = field(default_factory=dict)

    @property
    def directional(self) -> bool:
        """Whether its edges were drawn per target, so that `scale` makes sums unbiased."""
        return self.blocks is not None

    @property
    def root(self) -> DrawnBatch:
        """The batch as a whole."""
        return self if self.owner is None else self.owner

    def side(self, row: int) -> str:
        """The name of the ids that the sources (0) or targets (1) of its edges have."""
        return "sources" if row == 0 and self.sources is not None else "n_id"

    def on(self, device: torch.device, name: str) -> Tensor:
        """One of its tensors on a device; copies are kept."""
        value = getattr(self, name)
        if value.device == device:
            return value
        kept = self._moved.setdefault(
            device, DrawnBatch(self.n_id, self.e_id, self.scale, self.whole, sources=self.sources)
        )
        if getattr(kept, name).device != device:
            setattr(kept, name, value.to(device))
        return getattr(kept, name)


class Found(NamedTuple):
    """A batch, its `edge_index` as it was handed out, and the columns of it that the found tensor shows."""

    batch: DrawnBatch
    edge_index: Tensor
    columns: slice | None  # None: the tensor found is no part of `edge_index`


class Side(NamedTuple):
    """All relations of a typed batch side by side, as a layer of dictionaries may join them."""

    batch: DrawnBatch  # its sources are (relation, source) pairs
    edge_index: Tensor  # [2, M] of the edges given
    columns: Tensor  # [M] their places among all edges of the batch


def side_by_side(edges: dict[Relation, Tensor], rows: dict[str, int]) -> Side | None:
    """Edges and numbers of rows by type, as a layer was given them; None where some are not of one batch."""
    found = {relation: find([e]) for relation, e in edges.items() if e.numel()}
    parts = [f for f in found.values() if f is not None and f.columns is not None]
    if len(parts) < len(found) or len({id(f.batch.root) for f in parts}) != 1:
        return None
    root = parts[0].batch.root
    typed, types, whole = root.typed, root.whole.graph.types, root.whole.pairs  # type: ignore[attr-defined]
    assert typed is not None and types is not None
    first, start = {}, 0
    for kind, many in rows.items():
        first[kind], start = start, start + many
    sources, both, columns, start = [], [], [], 0
    place = typed.span
    for relation, e in edges.items():
        sources.append(typed.n_id[relation[0]][: rows[relation[0]]] + whole.first[relation])
        both.append(e + torch.tensor([[start], [first[relation[2]]]], device=e.device))
        start += rows[relation[0]]
        at = found.get(relation)
        if at is not None and at.columns is not None:
            columns.append(torch.arange(at.columns.start, at.columns.stop) + place[relation].start)
    n_id = torch.cat([typed.n_id[kind][:many] + types.nodes[kind] for kind, many in rows.items()])
    batch = replace(root, n_id=n_id, sources=torch.cat(sources), whole=whole, owner=root, kept={}, _moved={})
    return Side(batch, torch.cat(both, 1), torch.cat(columns))


class _Entry(NamedTuple):
    alive: StorageWeakRef
    batch: DrawnBatch
    edge_index: Tensor | None  # None where the storage is that of `edge_index` itself
    layout: tuple[int, int, tuple[int, ...]]  # offset, edges and strides of `edge_index` in its storage


_entries: dict[int, _Entry] = {}  # by the address of a storage
# batches, and stores of the relations of typed ones, whose tensors change with `batch.to(device)`
_handed: list[tuple[weakref.ref[Any], DrawnBatch]] = []
_lock = threading.RLock()  # batches may be drawn in a thread
_last: weakref.ref[DrawnBatch] | None = None  # found last


def register_typed(data: HeteroData, batch: DrawnBatch, whole: dict[Relation | None, Whole]) -> HeteroData:
    """The same for a typed batch: each relation is known by its own edges."""
    typed = batch.typed
    assert typed is not None
    scale = batch.scale.split([ids.numel() for ids in typed.e_id.values()])
    with _lock:
        for of, (relation, ids) in zip(scale, typed.e_id.items(), strict=True):
            if relation not in data.edge_types:
                continue
            part = DrawnBatch(
                typed.n_id[relation[2]], ids, of, whole[relation], num_edges=typed.num_edges[relation],
                blocks=batch.blocks, rounds=batch.rounds, relation=relation, owner=batch,
                sources=typed.n_id[relation[0]] if whole[relation].bipartite else None,
            )  # fmt: skip
            register(data[relation], part, typed.edge_index[relation])
        _handed.append((weakref.ref(data), batch))
    return data


def register(data: Data | EdgeStorage, batch: DrawnBatch, drawn: Tensor | None = None) -> Data | EdgeStorage:
    """Make known what was handed out as `data`; it is forgotten when the tensors of `data` are gone.

    `drawn` are the edges that were drawn, where `data` may have others by now (a transform).
    """
    with _lock:
        forget_dead()
        _handed.append((weakref.ref(data), batch))
        edges = given_edges(data)
        if drawn is not None and edges is not None and (edges.shape != drawn.shape or not torch.equal(edges, drawn)):
            batch.drawn = drawn
        _enter(data, batch)
    return data


def _enter(data: Data | EdgeStorage, batch: DrawnBatch) -> None:
    edge_index = given_edges(data)
    if batch.drawn is not None:
        if edge_index is not None:
            batch.drawn = batch.drawn.to(edge_index.device)
            _note(edge_index, batch, batch.drawn)
        edge_index = batch.drawn
    elif edge_index is not None:
        _note(edge_index, batch)
    if edge_index is None:
        return
    x = getattr(data, "x", None)  # names the batch too, where a model changes its edges
    if isinstance(x, Tensor) and x.layout == torch.strided and x.numel():
        _note(x, batch, edge_index)


def _note(t: Tensor, batch: DrawnBatch, edge_index: Tensor | None = None) -> None:
    """`t` names the batch: it is its `edge_index`, or another tensor, which then keeps that one."""
    edges = t if edge_index is None else edge_index
    layout = (int(edges.storage_offset()), edges.shape[1], edges.stride())
    storage = t.untyped_storage()
    _entries[storage.data_ptr()] = _Entry(StorageWeakRef(storage), batch, edge_index, layout)


def alias(tensor: Tensor, found: Found) -> None:
    """From now on `tensor`, edges that a model made from those of the batch, names the batch too."""
    _note(tensor, found.batch, found.edge_index)


def given_edges(data: Data | EdgeStorage) -> Tensor | None:
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
    if not _handed and not _entries:
        return None
    tries = [(_by_storage, edges), (_by_storage, rest), (_by_batch, edges), (_by_batch, rest), (_by_content, edges)]
    with _lock:
        for lookup, some in tries:
            for t in some:
                found = lookup(t)
                if found is not None:
                    if found.batch.root.typed is None:  # edges that a model made may be of any relation
                        _last = weakref.ref(found.batch)
                    return found
    return None


def owner(values: Iterable[Any]) -> DrawnBatch | None:
    """The batch as a whole that one of some values was handed out with: by its memory alone, ids before numbers."""
    global _last
    given = [v for v in values if isinstance(v, Tensor) and v.layout == torch.strided and v.numel()]
    with _lock:
        for t in sorted(given, key=Tensor.is_floating_point):
            entry = _entries.get(t.untyped_storage().data_ptr())
            if entry is not None and not entry.alive.expired():
                if entry.batch.root.typed is None:
                    _last = weakref.ref(entry.batch)
                return entry.batch.root
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
        if edge_index is not None and edge_index.shape == t.shape and batch.drawn is None:
            here = edge_index.to(t.device)
            if torch.equal(here, t):
                _note(t, batch)
                return Found(batch, t, slice(0, t.shape[1]))
        if data is not None and batch.typed is not None and batch.e_id.numel() == t.shape[1]:
            joined = joint(data, batch.typed)
            if joined is not None and torch.equal(joined.to(t.device), t):
                _note(t, batch)
                return Found(batch, t, slice(0, t.shape[1]))
    return None


def joint(data: HeteroData, typed: TypedBatch) -> Tensor | None:
    """[2, M] the edges of all relations as `data.to_homogeneous()` has them; None where `data` changed since."""
    if data.edge_types != list(typed.edge_index) or data.node_types != list(typed.n_id):
        return None
    start, first = 0, {}
    for name, ids in typed.n_id.items():
        first[name], start = start, start + ids.numel()
    ends = {r: torch.tensor([[first[r[0]]], [first[r[2]]]], device=e.device) for r, e in typed.edge_index.items()}
    return torch.cat([e + ends[r] for r, e in typed.edge_index.items()], 1)


def data_of(batch: DrawnBatch) -> Data | EdgeStorage | HeteroData | None:
    """What was handed out as this batch, if it is still in use."""
    return next((d for ref, one in _handed if one is batch and (d := ref()) is not None), None)


def attribute(batch: DrawnBatch, t: Tensor) -> str | None:
    """The name of the batch's edge attribute that `t` is, or a part of; None where it is none of them."""
    data = data_of(batch)
    if data is None:
        return None
    at, edges = t.untyped_storage().data_ptr(), batch.e_id.numel()
    own = data.to_dict() if batch.typed is None else {"scale": batch.scale}
    values = {k: v for k, v in own.items() if isinstance(v, Tensor) and v.dim() and v.shape[0] == edges}
    for name, value in values.items():
        if value.numel() and value.untyped_storage().data_ptr() == at:
            return name
    for name, value in values.items():  # a copy on another device
        if value.numel() == t.numel() and value.dtype == t.dtype and torch.equal(value.to(t.device).view_as(t), t):
            return name
    return None


def attributes(data: Data | HeteroData) -> dict[str, Tensor]:
    """All tensors of the data by name; those of typed data by type or relation and name."""
    if isinstance(data, HeteroData):
        named = {f"{store._key}.{name}": v for store in data.stores for name, v in store.items()}
    else:
        named = data.to_dict()
    return {name: v for name, v in named.items() if isinstance(v, Tensor)}


def node_attribute(batch: DrawnBatch, t: Tensor) -> str | None:
    """The name of the batch's node attribute that `t` is, as a whole."""
    data = data_of(batch.root)
    for name, value in {} if data is None else attributes(data).items():
        if value.layout != torch.strided or value.shape != t.shape:
            continue
        if value.data_ptr() == t.data_ptr() and value.stride() == t.stride():
            return name
    return None


def name_of(batch: DrawnBatch, t: Tensor) -> str | None:
    """The name of the batch's attribute that `t` is, of nodes, of edges or `edge_index`."""
    found = find([t]) if t.dim() == 2 and t.shape[0] == 2 and not t.is_floating_point() else None
    if found is not None and found.batch is batch:
        return "edge_index"
    return node_attribute(batch, t) or (attribute(batch, t) if t.dim() else None)


def of(data: Data | HeteroData) -> DrawnBatch | None:
    """What is known of a batch by itself."""
    return next((one for ref, one in reversed(_handed) if ref() is data), None)


def last() -> DrawnBatch | None:
    """The batch found last, if it is still in use."""
    return None if _last is None else _last()


def known(batch: DrawnBatch) -> Tensor | None:
    """The `edge_index` of a batch that is still in use."""
    if batch.drawn is not None:
        return batch.drawn
    data = data_of(batch)
    if data is not None:
        return given_edges(data)
    return next((e.edge_index for e in _entries.values() if e.batch is batch and e.edge_index is not None), None)


def alive(batch: DrawnBatch) -> bool:
    """Whether a tensor that names the batch is still in use."""
    return any(one.root is batch and ref() is not None for ref, one in _handed) or any(
        e.batch.root is batch and not e.alive.expired() for e in _entries.values()
    )


def forget_dead() -> None:
    """Let go of batches whose tensors are gone."""
    with _lock:
        _forget_dead()


def _forget_dead() -> None:
    while dead := [at for at, e in _entries.items() if e.alive.expired()]:
        for at in dead:  # an entry may hold the last reference to what another one is about
            del _entries[at]
    _handed[:] = [(ref, batch) for ref, batch in _handed if ref() is not None]


def in_use() -> int:
    """How many batches are known at present."""
    forget_dead()
    return len({id(batch.root) for _, batch in _handed} | {id(e.batch.root) for e in _entries.values()})
