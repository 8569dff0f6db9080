"""Batches in use: which batch a tensor belongs to, found by the memory it lies in, not by when it was handed out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage

from adahop.block import Block
from adahop.pyg.align import Aligned, is_edge_index
from adahop.pyg.arguments import state_of, tensors_in
from adahop.pyg.whole_graph import HomogeneousGraph, WholeGraph, offsets
from adahop.typed import Relation, TypedBatch

if TYPE_CHECKING:
    from adahop.pyg.call import MessageEnergies
    from adahop.pyg.memory import Memory
    from adahop.pyg.wrap import Propagate

# tensors as they were cut from the data, by name, and how to see whether they were changed since
AsCut = dict[str, tuple[weakref.ref[Tensor], tuple[int, int | None]]]


@dataclass(eq=False)
class DrawnBatch:
    """What a loader knows about a batch that it handed out. It holds none of the tensors by which a batch is found, so
    that these can be freed.

    A typed batch has one for all relations together, numbered as PyG's `to_homogeneous` numbers them, which owns one
    per relation, in the ids of its types.
    """

    n_id: Tensor  # [S] global node ids, the seeds first; of a relation, those of its targets' type
    e_id: Tensor  # [M] places in the data's edge_index
    scale: Tensor  # [M] the factor that makes each target's sum unbiased
    whole_graph: WholeGraph
    num_nodes: list[int] | None = None  # found in each hop, the seeds first; None where edges have no hop
    num_edges: list[int] | None = None
    blocks: list[Block] | None = None  # one per hop, input layer first
    drawn: Tensor | None = None  # [2, M] the drawn edges, where a transform gave the batch others
    records_energies: bool = False  # whether layers that train on it record the energies of their messages
    memory: weakref.ref[Memory] | None = None  # the snapshot or history that layers apply on it
    expected_propagates: int | None = None  # how many the last step had
    energies: list[MessageEnergies] = field(default_factory=list)  # recorded by layers, one per `propagate`, in order
    forward_inputs: dict[Propagate, list[Tensor | None]] = field(default_factory=dict)  # some rows, per forward
    cache: dict[Any, Any] = field(default_factory=dict)  # what several layers would compute alike
    as_cut: AsCut = field(default_factory=dict)
    sources: Tensor | None = None  # of a relation between two types, the ids of its sources' type
    relation: Relation | None = None
    owner: DrawnBatch | None = None  # of a relation, the batch that it is a part of
    typed: TypedBatch | None = None
    multiplicity: str | None = None  # the edge attribute that says for how many edges each edge counts
    _moved: dict[tuple[torch.device, str], Tensor] = field(default_factory=dict)

    @property
    def directional(self) -> bool:
        """Whether its edges were drawn per target, so that `scale` makes sums unbiased."""
        return self.blocks is not None

    @property
    def root(self) -> DrawnBatch:
        """The batch of all relations."""
        return self if self.owner is None else self.owner

    def ids(self, row: int, device: torch.device | None = None) -> Tensor:
        """Global ids of the nodes that the sources (0) or targets (1) of its edges are numbered by."""
        name = "sources" if row == 0 and self.sources is not None else "n_id"
        return getattr(self, name) if device is None else self.on(device, name)

    def on(self, device: torch.device, name: str) -> Tensor:
        """One of its tensors on a device; copies are kept."""
        value = getattr(self, name)
        if value.device == device:
            return value
        if (device, name) not in self._moved:
            self._moved[device, name] = value.to(device)
        return self._moved[device, name]


class Found(NamedTuple):
    """A batch, its `edge_index` as it was handed out, and the columns of it that the found tensor shows."""

    batch: DrawnBatch
    edge_index: Tensor
    columns: slice | None  # None: the tensor found is no part of `edge_index`

    @property
    def span(self) -> slice:
        """The columns that a layer is passed: all, unless it is passed a part."""
        return slice(0, self.edge_index.shape[1]) if self.columns is None else self.columns


def stack(edges: dict[Relation, Tensor], rows: dict[str, int]) -> tuple[Found, Aligned] | None:
    """The edges that a layer was given by relation, joined as `StackedRelations` joins those of the whole graph, and
    how they lie in the batch; None where they are not all of one batch. Types have so many `rows`.
    """
    found = {relation: find([e]) for relation, e in edges.items() if e.numel()}
    parts = [f for f in found.values() if f is not None and f.columns is not None]
    if len(parts) < len(found) or len({id(f.batch.root) for f in parts}) != 1:
        return None
    root = parts[0].batch.root
    typed, types = root.typed, root.whole_graph.graph.types
    assert typed is not None and types is not None and isinstance(root.whole_graph, HomogeneousGraph)
    stacked, first_target = root.whole_graph.stacked, offsets(rows)
    first_source = offsets({relation: rows[relation[0]] for relation in edges})
    sources, joined, columns = [], [], []
    for relation, e in edges.items():
        sources.append(typed.n_id[relation[0]][: rows[relation[0]]] + stacked.first[relation])
        joined.append(e + torch.tensor([[first_source[relation]], [first_target[relation[2]]]], device=e.device))
        at = found.get(relation)
        if at is not None and at.columns is not None:
            columns.append(
                torch.arange(at.columns.start, at.columns.stop, device=e.device) + typed.span[relation].start
            )
    n_id = torch.cat([typed.n_id[kind][:many] + types.nodes[kind] for kind, many in rows.items()])
    batch = replace(root, n_id=n_id, sources=torch.cat(sources), whole_graph=stacked, owner=root, cache={}, _moved={})
    edge_index = torch.cat(joined, 1)
    return Found(batch, edge_index, None), Aligned(0, 0, edge_index.shape[1], torch.cat(columns), 1.0)


# --- the registry -----------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    alive: StorageWeakRef
    batch: DrawnBatch
    edge_index: Tensor | None  # None where the storage is that of `edge_index` itself
    layout: tuple[int, int, tuple[int, ...]]  # offset, edges and strides of `edge_index` in its storage


_entries: dict[int, _Entry] = {}  # by the address of a storage
# batches, and stores of the relations of typed ones, whose tensors change with `batch.to(device)`
_handed_out: list[tuple[weakref.ref[Any], DrawnBatch]] = []
_lock = threading.RLock()  # batches may be drawn in a thread
_last: weakref.ref[DrawnBatch] | None = None  # found last


def register(data: Data | EdgeStorage, batch: DrawnBatch, drawn: Tensor | None = None) -> Data | EdgeStorage:
    """Make a batch known that was handed out as `data`; it is forgotten when the tensors of `data` are gone.

    `drawn` are the edges that were drawn, where `data` may have others by now (a transform).
    """
    with _lock:
        forget_dead()
        _handed_out.append((weakref.ref(data), batch))
        edges = edge_index_of(data)
        if drawn is not None and edges is not None and (edges.shape != drawn.shape or not torch.equal(edges, drawn)):
            batch.drawn = drawn
        _enter_tensors(data, batch)
    return data


def register_typed(data: HeteroData, batch: DrawnBatch, graphs: dict[Relation | None, WholeGraph]) -> HeteroData:
    """The same for a typed batch: each relation is found by its own edges."""
    typed = batch.typed
    assert typed is not None
    scales = batch.scale.split([ids.numel() for ids in typed.e_id.values()])
    with _lock:
        for scale, (relation, ids) in zip(scales, typed.e_id.items(), strict=True):
            if relation not in data.edge_types:
                continue
            part = DrawnBatch(
                typed.n_id[relation[2]], ids, scale, graphs[relation], num_edges=typed.num_edges[relation],
                blocks=batch.blocks, energies=batch.energies, relation=relation, owner=batch,
                sources=typed.n_id[relation[0]] if graphs[relation].bipartite else None,
            )  # fmt: skip
            register(data[relation], part, typed.edge_index[relation])
        _handed_out.append((weakref.ref(data), batch))
    return data


def _enter_tensors(data: Data | EdgeStorage, batch: DrawnBatch) -> None:
    edge_index = edge_index_of(data)
    if batch.drawn is not None:
        if edge_index is not None:
            batch.drawn = batch.drawn.to(edge_index.device)
            _enter(edge_index, batch, batch.drawn)
        edge_index = batch.drawn
    elif edge_index is not None:
        _enter(edge_index, batch)
    if edge_index is None:
        return
    x = getattr(data, "x", None)  # finds the batch too, where a model changes its edges
    if isinstance(x, Tensor) and x.layout == torch.strided and x.numel():
        _enter(x, batch, edge_index)


def _enter(t: Tensor, batch: DrawnBatch, edge_index: Tensor | None = None) -> None:
    """From now on the batch is found by `t`: its `edge_index`, or another tensor, which then keeps that one."""
    edges = t if edge_index is None else edge_index
    layout = (int(edges.storage_offset()), edges.shape[1], edges.stride())
    storage = t.untyped_storage()
    _entries[storage.data_ptr()] = _Entry(StorageWeakRef(storage), batch, edge_index, layout)


def alias(tensor: Tensor, found: Found) -> None:
    """From now on the batch is also found by `tensor`, edges that a model made from those of the batch."""
    _enter(tensor, found.batch, found.edge_index)


def edge_index_of(data: Data | EdgeStorage) -> Tensor | None:
    """The strided `edge_index` of a batch, where it has one."""
    edge_index = getattr(data, "edge_index", None)
    return edge_index if is_edge_index(edge_index) else None


def find(tensors: Iterable[Any]) -> Found | None:
    """The batch that some of these tensors belong to: by the storage of an `edge_index`, else of another tensor, else
    by equal edges (a copy on another device).
    """
    global _last
    given = [t for t in tensors_in(tensors) if t.layout == torch.strided and t.numel()]
    edges: list[Tensor] = []
    rest: list[Tensor] = []
    for t in given:
        (edges if is_edge_index(t) else rest).append(t)
    if not _handed_out and not _entries:
        return None
    lookups = [(_by_storage, edges), (_by_storage, rest), (_by_batch, edges), (_by_batch, rest), (_by_content, edges)]
    with _lock:
        for lookup, candidates in lookups:
            for t in candidates:
                found = lookup(t)
                if found is not None:
                    if found.batch.root.typed is None:  # edges that a model made may be of any relation
                        _last = weakref.ref(found.batch)
                    return found
    return None


def _by_storage(t: Tensor) -> Found | None:
    entry = _entries.get(t.untyped_storage().data_ptr())
    if entry is None or entry.alive.expired():
        return None
    if entry.edge_index is not None:
        return Found(entry.batch, entry.edge_index, None)
    offset, edges, strides = entry.layout
    edge_index = torch.as_strided(t, (2, edges), strides, offset)
    start = int(t.storage_offset()) - offset
    if t.dim() == 2 and t.shape[0] == 2 and t.stride() == strides and 0 <= start <= edges - t.shape[1]:
        return Found(entry.batch, edge_index, slice(start, start + t.shape[1]))
    return Found(entry.batch, edge_index, None)


def _by_batch(t: Tensor) -> Found | None:
    """Whether `t` lies in a batch whose tensors were replaced since (`batch.to(device)`)."""
    address = t.untyped_storage().data_ptr()
    for ref, batch in _handed_out:
        data = ref()
        edge_index = None if data is None else edge_index_of(data)
        if edge_index is None:
            continue
        x = getattr(data, "x", None)
        tensors = [edge_index, x] if isinstance(x, Tensor) and x.layout == torch.strided else [edge_index]
        if any(v.untyped_storage().data_ptr() == address for v in tensors):
            _enter_tensors(data, batch)
            return _by_storage(t)
    return None


def _by_content(t: Tensor) -> Found | None:
    for ref, batch in _handed_out:
        data = ref()
        edges = None
        if data is not None and batch.drawn is None:
            edges = edge_index_of(data)
        if data is not None and batch.typed is not None and batch.e_id.numel() == t.shape[1]:
            edges = homogeneous_edges(data, batch.typed)
        if edges is not None and edges.shape == t.shape and torch.equal(edges.to(t.device), t):
            _enter(t, batch)
            return Found(batch, t, slice(0, t.shape[1]))
    return None


def homogeneous_edges(data: HeteroData, typed: TypedBatch) -> Tensor | None:
    """[2, M] the edges of all relations as `data.to_homogeneous()` has them; None where `data` changed since."""
    if data.edge_types != list(typed.edge_index) or data.node_types != list(typed.n_id):
        return None
    first = offsets({kind: ids.numel() for kind, ids in typed.n_id.items()})
    ends = {r: torch.tensor([[first[r[0]]], [first[r[2]]]], device=e.device) for r, e in typed.edge_index.items()}
    return torch.cat([e + ends[r] for r, e in typed.edge_index.items()], 1)


def data_of(batch: DrawnBatch) -> Data | EdgeStorage | HeteroData | None:
    """What was handed out as this batch, if it is still in use."""
    return next((d for ref, one in _handed_out if one is batch and (d := ref()) is not None), None)


def batch_of(data: Data | HeteroData) -> DrawnBatch | None:
    """The batch that was handed out as `data`."""
    return next((one for ref, one in reversed(_handed_out) if ref() is data), None)


def last_found() -> DrawnBatch | None:
    """The batch found last, if it is still in use."""
    return None if _last is None else _last()


def edges_in_use(batch: DrawnBatch) -> Tensor | None:
    """The `edge_index` of a batch that is still in use."""
    if batch.drawn is not None:
        return batch.drawn
    data = data_of(batch)
    if data is not None:
        return edge_index_of(data)
    return next((e.edge_index for e in _entries.values() if e.batch is batch and e.edge_index is not None), None)


def is_in_use(batch: DrawnBatch) -> bool:
    """Whether one of the tensors by which the batch is found still exists."""
    return any(one.root is batch and ref() is not None for ref, one in _handed_out) or any(
        e.batch.root is batch and not e.alive.expired() for e in _entries.values()
    )


def forget_dead() -> None:
    """Let go of batches whose tensors are gone."""
    with _lock:
        while dead := [at for at, e in _entries.items() if e.alive.expired()]:
            for at in dead:  # an entry may hold the last reference to what another one is about
                del _entries[at]
        _handed_out[:] = [(ref, batch) for ref, batch in _handed_out if ref() is not None]


def in_use() -> int:
    """How many batches are known at present."""
    forget_dead()
    return len({id(batch.root) for _, batch in _handed_out} | {id(e.batch.root) for e in _entries.values()})


# --- which attribute of a batch a tensor is ---------------------------------------------------------------------------


def edge_attribute(batch: DrawnBatch, t: Tensor) -> str | None:
    """The name of the batch's edge attribute that `t` is, or a part of; None where it is none of them."""
    name, _ = _edge_match(batch, t)
    return name


def _edge_match(batch: DrawnBatch, t: Tensor) -> tuple[str | None, Tensor]:
    """The same, and all rows of the attribute."""
    data = data_of(batch)
    if data is None:
        return None, t
    address, edges, width = t.untyped_storage().data_ptr(), batch.e_id.numel(), t.shape[1:].numel()
    every = data.to_dict() if batch.typed is None else {"scale": batch.scale}
    tensors = {k: v for k, v in every.items() if isinstance(v, Tensor) and v.dim()}
    values = {k: v for k, v in tensors.items() if v.shape[0] == edges and v.shape[1:].numel() == width}
    for name, value in values.items():
        if value.numel() and value.untyped_storage().data_ptr() == address:
            return name, value
    for name, value in values.items():  # a copy on another device
        if value.numel() == t.numel() and value.dtype == t.dtype and torch.equal(value.to(t.device).view_as(t), t):
            return name, value
    return None, t


def attributes(data: Data | HeteroData) -> dict[str, Tensor]:
    """All tensors of the data by name; those of typed data by type or relation and name."""
    if isinstance(data, HeteroData):
        named = {f"{store._key}.{name}": v for store in data.stores for name, v in store.items()}
    else:
        named = data.to_dict()
    return {name: v for name, v in named.items() if isinstance(v, Tensor)}


def node_attribute(batch: DrawnBatch, t: Tensor) -> str | None:
    """The name of the batch's attribute that `t` is, all rows of it."""
    data = data_of(batch.root)
    for name, value in {} if data is None else attributes(data).items():
        if value.layout != torch.strided or value.shape != t.shape:
            continue
        if value.data_ptr() == t.data_ptr() and value.stride() == t.stride():
            return name
    return None


def data_edge_attribute(batch: DrawnBatch, t: Tensor) -> str | None:
    """The name of the data's edge attribute that `t` is, or a part of. None where the batch's has other values than the
    data's by now: a transform or the training loop may have changed them.
    """
    name, value = _edge_match(batch, t)
    table = None if name is None else batch.whole_graph.data.to_dict().get(name)
    if name is None or not isinstance(table, Tensor):
        return None
    key = name if batch.relation is None else f"{batch.relation}.{name}"
    return name if _has_values(batch, key, value, table, batch.e_id) else None


def data_node_attribute(batch: DrawnBatch, t: Tensor) -> str | None:
    """The same of the attributes of nodes, all rows of them; those of typed data by type and name."""
    name, root = node_attribute(batch, t), batch.root
    table = None if name is None else attributes(root.whole_graph.source).get(name)
    if name is None or table is None:
        return None
    ids = root.n_id if root.typed is None else root.typed.n_id.get(name.rpartition(".")[0])
    return name if _has_values(root, name, t, table, ids) else None


def _has_values(batch: DrawnBatch, key: str, value: Tensor, table: Tensor, ids: Tensor | None) -> bool:
    """Whether an attribute of the batch has the rows `ids` of the data's `table`."""
    as_cut = batch.root.as_cut.get(key)
    if as_cut is not None and as_cut[0]() is value and as_cut[1] == state_of(value):
        return True
    known = ("has values", key, state_of(value), state_of(table))
    if value.is_inference() or known not in batch.root.cache:
        per_row = ids is not None and ids.numel() == value.shape[0] and table.shape[1:] == value.shape[1:]
        rows = table[ids.to(table.device)] if ids is not None and per_row else table
        batch.root.cache[known] = rows.shape == value.shape and torch.equal(rows.to(value), value)
    return batch.root.cache[known]


def as_cut(data: Data | HeteroData) -> AsCut:
    """Those of a batch that nothing but the loader has touched."""
    return {name: (weakref.ref(v), state_of(v)) for name, v in attributes(data).items() if not v.is_inference()}


def attribute_name(batch: DrawnBatch, t: Tensor) -> str | None:
    """The name of the batch's attribute that `t` is, of nodes, of edges or `edge_index`."""
    found = find([t]) if is_edge_index(t) else None
    if found is not None and found.batch is batch:
        return "edge_index"
    return node_attribute(batch, t) or (edge_attribute(batch, t) if t.dim() else None)
