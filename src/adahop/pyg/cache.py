"""FeatureCache: tables of features that stay on the host, with copies of the rows that batches read most."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Container

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from adahop import ops
from adahop.checks import InputError, between, count
from adahop.samplers import NeighborSampler
from adahop.samplers.reach import expected_reads

Name = tuple[str | None, str]  # (node type, attribute)


def cache_of(cache: object, device: object) -> float | int | None:
    """A share of all features in [0, 1], or a number of bytes; None keeps all of them on the device."""
    if cache is None:
        return None
    if device is None:
        raise InputError(f"`cache` must be left out where no `device` is given, got {cache!r}")
    if isinstance(cache, float):
        return between(cache, 0.0, 1.0, "cache")
    return count(cache, 0, "cache")


def feature_tables(data: Data | HeteroData) -> dict[Name, Tensor]:
    """Those of the nodes: real numbers, a row of them per node. Labels, masks and attributes of edges are none."""
    found: dict[Name, Tensor] = {}
    for store in data.node_stores:
        for name, value in store.items():
            if isinstance(value, Tensor) and store.is_node_attr(name) and value.dim() > 1 and value.is_floating_point():
                found[store._key, name] = value
    return found


def moved_but(data: Data | HeteroData, device: torch.device, tables: Container[Name]) -> Data | HeteroData:
    """The data on a device, but for these tables, which stay where they are."""
    out = copy.copy(data)
    for store in out.stores:
        names = [name for name in store.keys() if (store._key, name) not in tables]  # noqa: SIM118  a storage, no dict
        if names:
            store.apply(lambda value: value.to(device), *names)
    return out


class FeatureCache:
    """The tables of some data on the host, pinned where there is a GPU, and copies of some rows on a device.

    `cache` is the room for copies, as a share of all features or in bytes. Rows are ranked by how probable it is that a
    batch reads them (`expected_reads`), per byte. A batch has the same rows as without. `hit_rate()` says what share of
    the rows had a copy since it was asked last.
    """

    def __init__(self, data: Data | HeteroData, cache: float | int, often: Tensor, starts: dict[str | None, int]):
        """`often` has a number per node of the graph, where the nodes of a type begin at its `starts`."""
        device = often.device
        self.tables = {name: ops.pinned(t.cpu().contiguous()) for name, t in feature_tables(data).items()}
        total = sum(t.nbytes for t in self.tables.values())
        room = int(cache * total) if isinstance(cache, float) else cache
        self.near: dict[Name, tuple[Tensor, Tensor]] = {}
        kept = _best(self.tables, {n: often[starts[n[0]] :][: len(t)].cpu() for n, t in self.tables.items()}, room)
        for name, table in self.tables.items():
            place = torch.full((len(table),), -1, dtype=torch.int32)
            place[kept[name]] = torch.arange(kept[name].numel(), dtype=torch.int32)
            self.near[name] = table[kept[name]].to(device), place.to(device)
        self.hits, self.reads = torch.zeros((), dtype=torch.long, device=device), 0

    @property
    def bytes(self) -> int:
        """Of the copies."""
        return sum(near.nbytes for near, _ in self.near.values())

    def whole(self, data: Data | HeteroData) -> Data | HeteroData:
        """The data with its tables as they lie here."""
        out = copy.copy(data)
        for (kind, name), table in self.tables.items():
            _store(out, kind)[name] = table
        return out

    def rest(self, data: Data | HeteroData) -> Data | HeteroData:
        """The data without its tables; how many nodes it has is said in their place."""
        out = copy.copy(data)
        for kind, name in self.tables:
            store, many = _store(out, kind), _store(data, kind).num_nodes
            del store[name]
            store.num_nodes = many
        return out

    def fill(self, batch: Data | HeteroData, nodes: Tensor | dict[str, Tensor]) -> None:
        """Add the rows of some nodes, by type where there are types."""
        for (kind, name), table in self.tables.items():
            ids = nodes if isinstance(nodes, Tensor) else nodes[str(kind)]
            near, place = self.near[kind, name]
            self.hits += (place[ids] >= 0).sum()
            self.reads += ids.numel()
            _store(batch, kind)[name] = ops.fetch(ids, table, near, place)

    def hit_rate(self) -> float:
        hits, reads = int(self.hits), self.reads
        self.hits.zero_()
        self.reads = 0
        return hits / reads if reads else 1.0


def _store(data: Data | HeteroData, kind: str | None) -> Data | HeteroData:
    return data if kind is None else data[kind]


def _best(tables: dict[Name, Tensor], often: dict[Name, Tensor], room: int) -> dict[Name, Tensor]:
    """The rows of each table that are read most often per byte, as many as there is room for."""
    size = {name: t.nbytes // max(len(t), 1) for name, t in tables.items()}
    value = [often[name] / max(size[name], 1) for name in tables]
    if not value:
        return {}
    order = torch.cat(value).argsort(descending=True, stable=True)
    bytes_ = torch.cat([torch.full((len(tables[name]),), size[name]) for name in tables])[order]
    best = order[bytes_.cumsum(0) <= room]
    ends = itertools.accumulate((len(t) for t in tables.values()), initial=0)
    return {
        n: best[(best >= lo) & (best < hi)] - lo for n, (lo, hi) in zip(tables, itertools.pairwise(ends), strict=True)
    }


def cached(
    data: Data | HeteroData, cache: float | int, sampler: NeighborSampler, nodes: Tensor, batch_size: int
) -> FeatureCache:
    """The cache for batches of some nodes."""
    types = sampler.graph.types
    starts: dict[str | None, int] = {None: 0} if types is None else dict(types.nodes.items())
    return FeatureCache(data, cache, expected_reads(sampler, nodes, batch_size), starts)
