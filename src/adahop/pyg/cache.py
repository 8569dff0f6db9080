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


def move_except(data: Data | HeteroData, device: torch.device, tables: Container[Name]) -> Data | HeteroData:
    """The data on a device, except for these tables, which stay where they are."""
    out = copy.copy(data)
    for store in out.stores:
        names = [name for name in store.keys() if (store._key, name) not in tables]  # noqa: SIM118  a storage, no dict
        if names:
            store.apply(lambda value: value.to(device), *names)
    return out


class FeatureCache:
    """The tables of some data on the host, pinned where there is a GPU, and copies of some rows on a device.

    `cache` is the size of the copies, as a share of all features or in bytes. Rows are ranked by how probable it is
    that a batch reads them (`expected_reads`), per byte. Batches are the same as without a cache. `hit_rate()` is the
    share of rows that had a copy, since it was asked last.
    """

    def __init__(self, data: Data | HeteroData, cache: float | int, reads: Tensor, starts: dict[str | None, int]):
        """`reads` has the expected reads per node of the graph, where the nodes of a type begin at its `starts`."""
        device = reads.device
        self.tables = {name: ops.pinned(t.cpu().contiguous()) for name, t in feature_tables(data).items()}
        total = sum(t.nbytes for t in self.tables.values())
        size = int(cache * total) if isinstance(cache, float) else cache
        self.copies: dict[Name, tuple[Tensor, Tensor]] = {}  # rows on the device, and per node its row there or -1
        best = _most_read(self.tables, {n: reads[starts[n[0]] :][: len(t)].cpu() for n, t in self.tables.items()}, size)
        for name, table in self.tables.items():
            place = torch.full((len(table),), -1, dtype=torch.int32)
            place[best[name]] = torch.arange(best[name].numel(), dtype=torch.int32)
            self.copies[name] = table[best[name]].to(device), place.to(device)
        self.hits, self.reads = torch.zeros((), dtype=torch.long, device=device), 0

    @property
    def bytes(self) -> int:
        """Of the copies."""
        return sum(rows.nbytes for rows, _ in self.copies.values())

    def with_tables(self, data: Data | HeteroData) -> Data | HeteroData:
        """The data with the tables of this cache."""
        out = copy.copy(data)
        for (kind, name), table in self.tables.items():
            _store(out, kind)[name] = table
        return out

    def without_tables(self, data: Data | HeteroData) -> Data | HeteroData:
        """The data without its tables; `num_nodes` is set, which follows from them otherwise."""
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
            rows, place = self.copies[kind, name]
            self.hits += (place[ids] >= 0).sum()
            self.reads += ids.numel()
            _store(batch, kind)[name] = ops.fetch(ids, table, rows, place)

    def hit_rate(self) -> float:
        hits, reads = int(self.hits), self.reads
        self.hits.zero_()
        self.reads = 0
        return hits / reads if reads else 1.0


def _store(data: Data | HeteroData, kind: str | None) -> Data | HeteroData:
    return data if kind is None else data[kind]


def _most_read(tables: dict[Name, Tensor], reads: dict[Name, Tensor], most: int) -> dict[Name, Tensor]:
    """The rows of each table that are read most often per byte, at most so many bytes of them."""
    size = {name: t.nbytes // max(len(t), 1) for name, t in tables.items()}
    value = [reads[name] / max(size[name], 1) for name in tables]
    if not value:
        return {}
    order = torch.cat(value).argsort(descending=True, stable=True)
    bytes_ = torch.cat([torch.full((len(tables[name]),), size[name]) for name in tables])[order]
    best = order[bytes_.cumsum(0) <= most]
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
