"""Graph: in-edges as CSR, checked once when it is made."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from adahop.block import Block, as_block
from adahop.checks import (
    InputError,
    KindError,
    count,
    device_of,
    edge_features,
    edge_pairs,
    edge_weights,
    flag,
    in_range,
    node_ids,
    one_of,
    room_for,
    whole,
)
from adahop.ops import (
    Drawn,
    Edges,
    Numbered,
    Rows,
    large_pages,
    lower_bound,
    normalise,
    pointer,
    prepend,
    segment_of,
    spans,
    target_rows,
)
from adahop.typed import EdgeFeatures, Relation, Types, by_relation, check_relations, most_into, of_hetero

if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData


class Graph:
    """In-edges in CSR. Node i's neighbours are `indices[indptr[i]:indptr[i + 1]]`, each an edge j -> i.

    Within a node's segment its self-loops come first and `first[i]` is the place of its first true neighbour.
    `eid` maps a place in the CSR to the user's own edge order (None: they are the same). `weight` None: all ones.

    What is drawn from is a row. With one relation a row is a node. With several (`types`), `indptr`, `first` and `last`
    go by row, (relation, target). A row may have space to grow: `last[r]` is then before `indptr[r + 1]`. Where edges
    have a `time`, they lie in its order within a row. Features of edges (`attr`) lie in the user's own edge order.

    >>> g = Graph.from_edge_index([[0, 1, 2], [2, 2, 0]])
    >>> g.num_nodes, g.num_edges, g.degree().tolist()
    (3, 3, [1, 0, 2])
    """

    attr: EdgeFeatures | None = None  # here too: graphs that earlier versions saved have none

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        weight: Tensor | None,
        eid: Tensor | None,
        first: Tensor,
        last: Tensor | None = None,
        time: Tensor | None = None,
        types: Types | None = None,
        attr: EdgeFeatures | None = None,
    ):
        self.indptr, self.indices, self.weight, self.eid, self.first = indptr, indices, weight, eid, first
        self.ends, self.time, self.types, self.attr = last, time, types, attr

    # --- from and to other forms -------------------------------------------------------------------------------------

    @classmethod
    def from_csr(cls, indptr: Any, indices: Any, weight: Any = None, edge_attr: Any = None) -> Graph:
        """Rows are targets: `indices[indptr[i]:indptr[i + 1]]` are the sources of node i's in-edges. `edge_attr` has a
        row of features per edge."""
        indptr, indices = whole(indptr, "indptr"), whole(indices, "indices")
        if indptr.numel() == 0 or int(indptr[0]) != 0:
            raise InputError(f"`indptr` must start with 0, got {indptr[:1].tolist()}")
        if bool((indptr[1:] < indptr[:-1]).any()):
            at = int((indptr[1:] < indptr[:-1]).nonzero()[0]) + 1
            raise InputError(
                f"`indptr` must not decrease, got indptr[{at}] = {int(indptr[at])} after {int(indptr[at - 1])}"
            )
        if int(indptr[-1]) != indices.numel():
            raise InputError(f"`indptr` must end with the number of edges, {indices.numel()}, got {int(indptr[-1])}")
        n = indptr.numel() - 1
        in_range(indices, n, "indices")
        weight = None if weight is None else edge_weights(weight, indices.numel())
        dst = torch.repeat_interleave(torch.arange(n, device=indptr.device), indptr.diff())
        return cls._build(n, indices, dst, weight, ordered=True)._with_attr(edge_attr)

    @classmethod
    def from_edge_index(
        cls, edge_index: Any, weight: Any = None, num_nodes: int | None = None, edge_attr: Any = None
    ) -> Graph:
        """`edge_index` [2, E] as in PyG: row 0 sources, row 1 targets, in any order, parallel edges allowed.

        `edge_attr` has a row of features per edge.
        """
        src, dst = edge_pairs(edge_index)
        if num_nodes is None:
            num_nodes = int(torch.maximum(src, dst).max()) + 1 if src.numel() else 0
        n = count(num_nodes, 0, "num_nodes")
        in_range(src, n, "edge_index[0]")
        in_range(dst, n, "edge_index[1]")
        weight = None if weight is None else edge_weights(weight, src.numel())
        return cls._build(n, src, dst, weight, ordered=False)._with_attr(edge_attr)

    @classmethod
    def from_scipy(cls, matrix: Any) -> Graph:
        """A square scipy matrix A with A[i, j] the weight of edge j -> i, so that `A @ h` is the full sum."""
        if getattr(matrix, "ndim", 0) != 2 or matrix.shape[0] != matrix.shape[1] or not hasattr(matrix, "tocsr"):
            raise InputError(f"`matrix` must be a square scipy sparse matrix, got {getattr(matrix, 'shape', matrix)}")
        a = matrix.tocsr()
        return cls.from_csr(a.indptr, a.indices, a.data)

    @classmethod
    def from_data(cls, data: Data | HeteroData, edge_attr: bool = True) -> Graph:
        """The graph of a PyG `Data` or `HeteroData`, with its `edge_weight` where it has one, and its `edge_attr` too
        unless that is False."""
        if hasattr(data, "edge_types") and hasattr(data, "node_types"):
            return cls._typed(*of_hetero(data, flag(edge_attr, "edge_attr")))
        if getattr(data, "edge_index", None) is None:
            raise InputError("`data` must have an `edge_index`, got none")
        weight, attr = getattr(data, "edge_weight", None), getattr(data, "edge_attr", None)
        return cls.from_edge_index(
            data.edge_index, weight, data.num_nodes, attr if flag(edge_attr, "edge_attr") else None
        )

    @classmethod
    def from_relations(
        cls,
        num_nodes: Mapping[str, int],
        edge_index: Mapping[Relation, Any],
        weight: Mapping[Relation, Any] | None = None,
        edge_attr: Mapping[Relation, Any] | None = None,
    ) -> Graph:
        """Nodes of several types, and for each relation (source type, name, target type) an `edge_index` [2, E] in the
        ids of its two types. `weight` names all relations, `edge_attr` those whose edges have features.

        >>> g = Graph.from_relations({"user": 2, "item": 3}, {("user", "rates", "item"): [[0, 1, 1], [2, 2, 0]]})
        >>> g.types.nodes, g.relations, g.degree().tolist()
        ({'user': 0, 'item': 2}, (('user', 'rates', 'item'),), [0, 0, 1, 0, 2])
        """
        return cls._typed(*check_relations(num_nodes, edge_index, weight, edge_attr))

    def to_data(self) -> Data | HeteroData:
        """The graph as a PyG `Data`, or as a `HeteroData` where it has types, in the user's own edge order."""
        from torch_geometric.data import Data, HeteroData

        edge_index, weight = self.edge_index(), None
        if self.weight is not None:
            weight = self.weight if self.eid is None else torch.empty_like(self.weight)
            if self.eid is not None:
                weight[self.eid.long()] = self.weight
        if self.types is None:
            attr = None if self.attr is None else self.attr.tables[0]
            return Data(edge_index=edge_index, edge_weight=weight, edge_attr=attr, num_nodes=self.num_nodes)
        data = HeteroData()
        for name, many in self.types.num_nodes.items():
            data[name].num_nodes = many
        for i, (source, name, target) in enumerate(self.relations):
            of = slice(self.types.starts[i], self.types.starts[i + 1])
            first = torch.tensor([[self.types.nodes[source]], [self.types.nodes[target]]], device=self.device)
            data[source, name, target].edge_index = edge_index[:, of] - first
            if weight is not None:
                data[source, name, target].edge_weight = weight[of]
            if self.attr is not None and self.attr.widths[i]:
                data[source, name, target].edge_attr = self.attr.tables[i]
        return data

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """`indptr`, `indices` and, where present, `weight` and `edge_attr` of a `.npz` file."""
        try:
            with np.load(path, allow_pickle=False) as z:
                arrays = {k: z[k] for k in ("indptr", "indices", "weight", "edge_attr") if k in z.files}
        except FileNotFoundError:
            raise InputError(f"`path` must be an existing .npz file, got {path}") from None
        except Exception as e:
            raise InputError(f"`path` must be a readable .npz file, got {path} ({type(e).__name__}: {e})") from None
        if "indptr" not in arrays or "indices" not in arrays:
            raise InputError(f"{path} must hold the arrays indptr and indices, got {sorted(arrays)}")
        return cls.from_csr(arrays["indptr"], arrays["indices"], arrays.get("weight"), arrays.get("edge_attr"))

    @classmethod
    def _typed(
        cls,
        num_nodes: dict[str, int],
        edges: dict[tuple[str, str, str], Tensor],
        weight: dict[tuple[str, str, str], Tensor] | None = None,
        attr: EdgeFeatures | None = None,
    ) -> Graph:
        """A graph of several relations, each with its [2, E] in the ids of its own types. Nothing is checked."""
        start = dict(zip(num_nodes, [0, *torch.tensor(list(num_nodes.values())).cumsum(0).tolist()], strict=False))
        kinds, n, device = tuple(edges), sum(num_nodes.values()), next(iter(edges.values())).device
        src = torch.cat([edges[k][0] + start[k[0]] for k in kinds])
        dst = torch.cat([edges[k][1] + start[k[2]] for k in kinds])
        many = [edges[k].shape[1] for k in kinds]
        relation = torch.arange(len(kinds), device=device).repeat_interleave(torch.tensor(many, device=device))
        key = (dst * len(kinds) + relation) * 2 + (src != dst)
        order = torch.argsort(key, stable=True)
        if len(num_nodes) == len(kinds) == 1:  # every node has its row, as in a graph without types
            row, row_of, size = torch.arange(n, device=device), dst[order], torch.bincount(dst, minlength=n)
        else:
            row, row_of, size = torch.unique_consecutive(key[order] // 2, return_inverse=True, return_counts=True)
        indptr, loop = pointer(size), src == dst
        first = indptr[:-1]  # the same memory without self-loops: one cache line less to read
        if bool(loop.any()):
            first = first + torch.zeros_like(size).index_add_(0, row_of, loop[order].long())
        sources = pointer(torch.tensor([num_nodes[k[0]] for k in kinds]))
        own = row % len(kinds)
        shift = (sources[:-1] - torch.tensor([start[k[0]] for k in kinds])).to(device)[own]
        ptr = pointer(torch.bincount(row // len(kinds), minlength=n))
        types = Types(start, kinds, tuple(pointer(torch.tensor(many)).tolist()), ptr, own, shift, int(sources[-1]))
        w = None if weight is None else torch.cat([weight[k] for k in kinds])[order]
        eid = _small(order, order.numel())
        built = cls(indptr, _small(src[order], n), w, eid, first, types=types, attr=attr)
        for t in (*(t for _, t in built._tensors()), types.ptr, types.relation, types.shift):
            large_pages(t)
        return built

    @classmethod
    def _build(cls, n: int, src: Tensor, dst: Tensor, weight: Tensor | None, ordered: bool) -> Graph:
        """Group by target (stable), self-loops first in each group."""
        loop = src == dst
        order = None
        if bool(loop.any()) or not (ordered or bool((dst[1:] >= dst[:-1]).all())):
            order = torch.argsort(2 * dst + (~loop), stable=True)
            src, weight = src[order], None if weight is None else weight[order]
        none = torch.zeros(n, dtype=torch.long, device=dst.device)
        degree = torch.bincount(dst, minlength=n) if dst.numel() else none
        loops = torch.bincount(dst[loop], minlength=n) if dst.numel() else none
        indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        eid = None if order is None else _small(order, src.numel())
        first = indptr[:-1] + loops if bool(loops.any()) else indptr[:-1]  # the same memory, as in `_typed`
        built = cls(indptr, _small(src, n), weight, eid, first)
        for _, t in built._tensors():
            large_pages(t)
        return built

    def _with_attr(self, edge_attr: Any) -> Graph:
        """The graph with these edge features, in the user's own order."""
        if edge_attr is None:
            return self
        return self.replace(attr=EdgeFeatures((edge_features(edge_attr, self.num_edges),), (0,)))

    # --- nodes, rows and edges -------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        return self.num_rows if self.types is None else self.types.ptr.numel() - 1

    @property
    def relations(self) -> tuple[Relation, ...]:
        """(source type, name, target type) of each relation; none in a graph without types."""
        return () if self.types is None else self.types.relations

    def ids(self, values: Any, what: str = "seeds") -> Tensor:
        """The ids of some nodes, given as ids or a mask, and in a typed graph also {type: ids}, (type, ids) or a
        type, for all its nodes. Ids of a type count from its first node."""
        if self.types is not None:
            return self.types.ids(values, what)
        if isinstance(values, str | Mapping) or (isinstance(values, tuple) and any(isinstance(v, str) for v in values)):
            raise KindError(f"`{what}` must be ids or a mask, as the graph has no node types, got {values!r}")
        return node_ids(values, self.num_nodes, what)

    @property
    def num_rows(self) -> int:
        """The number of rows: (relation, target) pairs that have edges; without types, the nodes."""
        return self.first.numel()

    @property
    def num_sources(self) -> int:
        """The number of (relation, source) pairs, which have a state each; without types, the nodes."""
        return self.num_nodes if self.types is None else self.types.sources

    @property
    def shift(self) -> Tensor | None:
        """[R] the state of a row's source j is entry j + shift of the (relation, source) pairs."""
        return None if self.types is None else self.types.shift

    @property
    def num_edges(self) -> int:
        """Places for edges in the CSR, including those that rows may grow into."""
        return self.indices.numel()

    @property
    def device(self) -> torch.device:
        return self.indptr.device

    @property
    def last(self) -> Tensor:
        """[R] one past the last place of each row."""
        return self.indptr[1:] if self.ends is None else self.ends

    @functools.cached_property
    def edges(self) -> Edges:
        """The stored edges as the operations read them, row after row."""
        return Edges(self.indptr[:-1], self.first, self.last, self.indices, self.weight, self.eid)

    def rows(
        self, nodes: Tensor, since: Tensor | None = None, until: Tensor | None = None, only: Tensor | None = None
    ) -> Rows:
        """The rows of some targets, which draws are made from. Times, one per target, exclude edges before `since` and
        from `until` on; `only` is a mask of the relations to take."""
        rows = Rows(nodes)
        if self.types is not None:
            rows = target_rows(*self._rows_of, nodes, only, most_into(self.types.relations))
        self.prefetch(rows.row)
        if since is not None:
            rows = rows._replace(since=self._clip(rows, since))
        return rows if until is None else rows._replace(until=self._clip(rows, until))

    def prefetch(self, rows: Tensor) -> None:
        """Start reading these rows from the disk, where the graph is in files."""

    def sources_of(self, rows: Tensor) -> Tensor:
        """The sources of all edges of some rows, one after the other."""
        edges = self.edges
        _, place = spans(edges.begin[rows], edges.last[rows] - edges.begin[rows])
        return edges.indices[place].long()

    @functools.cached_property
    def _rows_of(self) -> tuple[Tensor, Tensor]:
        """The pointer from targets to rows, and the relation of each row, in small types: they are read at random."""
        assert self.types is not None
        ptr, relation = _small(self.types.ptr, self.num_rows + 1), self.types.relation
        return large_pages(ptr), large_pages(relation.to(torch.int16 if len(self.relations) < 2**15 else torch.int64))

    def _clip(self, rows: Rows, time: Tensor) -> Tensor:
        if self.time is None:
            raise InputError("`graph` must have a time per edge to be clipped by one, got none")
        each = time if rows.target is None else time[rows.target]
        return lower_bound(self.time, self.first[rows.row], self.last[rows.row], each)

    def with_edge_features(self, block: Block) -> Block:
        """The block with the features of its edges, where the graph has edge features."""
        if self.attr is None:
            return block
        if block.relation is None or block.row_ptr is None:
            return block._replace(attr=tuple(self.attr.rows(r, block.e_id) for r in range(len(self.attr.tables))))
        place, ptr = by_relation(block.edge_relation(), len(self.relations))
        parts = enumerate(block.e_id[place].split(ptr.diff().tolist()))
        return block._replace(attr=tuple(self.attr.rows(r, e_id) for r, e_id in parts))

    def without_edge_features(self) -> Graph:
        """The same graph without edge features."""
        plain = copy.copy(self)
        plain.attr = None
        return plain

    @functools.cached_property
    def attr_sums(self) -> Tensor | None:
        """[R, D] sum over a row of weight * features of the edge, for a graph of one relation; None without any."""
        if self.attr is None:
            return None
        out = torch.zeros(self.num_rows, *self.attr.widths, device=self.device)
        for pos in torch.arange(self.num_edges, device=self.device).split(1 << 20):
            _, e_id, weight = self.at(pos)
            row = torch.searchsorted(self.indptr, pos, right=True) - 1
            out.index_add_(0, row, weight.unsqueeze(1) * self.attr.rows(0, e_id))
        return out

    def at(self, pos: Tensor, span: slice | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(source, edge id in the user's own order, weight) of the edges at some places of the CSR; `span` where these
        are contiguous."""
        of = pos if span is None else span
        weight = torch.ones(pos.numel(), device=self.device) if self.weight is None else self.weight[of]
        return self.indices[of].long(), pos if self.eid is None else self.eid[of].long(), weight

    def begin(self, nodes: Tensor | list[int] | slice) -> Tensor:
        """Where the in-edges of some nodes begin in the CSR; those of a node past the last begin where all end."""
        return self.indptr[nodes if self.types is None else self.types.ptr[nodes]]

    def in_edges(self, nodes: Tensor | range, compact: bool = False) -> Block:
        """All in-edges of some nodes, a row per relation and node where there are types; a range is read as one piece.

        Sources keep the graph's ids, for values of all nodes; with `compact` they are numbered, and `n_id` has those
        that occur.
        """
        piece, span = isinstance(nodes, range), None
        if isinstance(nodes, range):
            low, high = nodes.start, nodes.stop
            nodes = torch.arange(low, high, device=self.device)
            span = slice(*self.begin([low, high]).tolist()) if self.ends is None else None
        rows = self.rows(nodes)
        start = self.indptr[rows.row]
        ptr = pointer(self.last[rows.row] - start)
        row = segment_of(ptr, int(ptr[-1]))
        pos = torch.arange(row.numel(), device=self.device)
        pos = pos + (start - ptr[:-1])[row] if span is None else pos + span.start
        src, e_id, weight = self.at(pos, span)
        n_id = torch.arange(self.num_nodes, device=self.device) if piece else nodes
        if compact:
            n_id, src = src.unique(return_inverse=True)
        found = Numbered(n_id, torch.stack([src, row if rows.target is None else rows.target[row]]), e_id, weight)
        one = torch.ones(pos.numel(), device=self.device)
        return self.with_edge_features(as_block(rows, found, Drawn(ptr, pos, one, one))._replace(target=nodes))

    def in_edges_within(self, nodes: Tensor, capacity: int) -> Block:
        """All in-edges of some nodes, padded to `capacity` edges: the shape depends on the number of nodes alone.

        Padding comes after the edges of `ptr` and has scale 0; it repeats the last edge of some of the nodes, so that
        no node's largest score changes. Edges beyond the capacity would be left out. No size is read by the host.
        """
        many, start, last = nodes.numel(), self.indptr[nodes], self.last[nodes]
        ptr, place = pointer(last - start), torch.arange(capacity, device=self.device)
        real = place < ptr[-1]
        row = torch.where(real, (torch.searchsorted(ptr, place, right=True) - 1).clamp(max=many - 1), place % many)
        pos = torch.where(real, start[row] + place - ptr[row], (last[row] - 1).clamp(min=0))
        src, e_id, weight = self.at(pos)
        ends, one, ptr = torch.stack([src, row]), torch.ones(capacity, device=self.device), ptr.clamp(max=capacity)
        return self.with_edge_features(
            Block(nodes, many, ends, e_id, weight, one, real.float(), ptr, pos, target=nodes)
        )

    def of_relation(self, relation: int) -> Graph:
        """The edges of one relation: a row per node of its target type, in order. Sources keep their ids."""
        assert self.types is not None
        t, sizes = self.types, self.last - self.indptr[:-1]
        low, high = t.span(t.relations[relation][2])
        mine = (t.relation == relation).nonzero().flatten()
        target = segment_of(t.ptr, self.num_rows)[mine] - low
        many = torch.zeros(high - low, dtype=torch.long, device=self.device).index_add_(0, target, sizes[mine])
        _, pos = spans(self.indptr[mine], sizes[mine])
        indptr, loops = pointer(many), torch.zeros_like(many)
        loops.index_add_(0, target, self.first[mine] - self.indptr[mine])
        eid = pos if self.eid is None else self.eid[pos]
        weight, time = (None if t is None else t[pos] for t in (self.weight, self.time))
        attr = None if self.attr is None else self.attr.of_relation(relation)
        return Graph(indptr, self.indices[pos], weight, eid, indptr[:-1] + loops, time=time, attr=attr)

    def degree(self) -> Tensor:
        """In-degree, self-loops and parallel edges counted."""
        size = self.last - self.indptr[:-1]
        if self.types is None:
            return size
        target = segment_of(self.types.ptr, self.num_rows)
        return torch.zeros(self.num_nodes, dtype=torch.long, device=self.device).index_add_(0, target, size)

    def row(self) -> Tensor:
        """The row of every place in the CSR."""
        return segment_of(self.indptr, self.num_edges)

    def dst(self) -> Tensor:
        """The target of every place in the CSR."""
        row = self.row()
        return row if self.types is None else segment_of(self.types.ptr, self.num_rows)[row]

    def edge_index(self) -> Tensor:
        """[2, E] in the user's own edge order (self-loops added by `normalized` last)."""
        ours = torch.stack([self.indices.long(), self.dst()])
        if self.eid is None:
            return ours
        out = torch.empty_like(ours)
        out[:, self.eid.long()] = ours
        return out

    @property
    def relative(self) -> Tensor | None:
        """Weights per place up to a factor per row, which draws do not depend on; None: all equal."""
        return self.weight

    def edge_weight(self) -> Tensor:
        """One weight per position in the CSR."""
        return self.weight if self.weight is not None else torch.ones(self.num_edges, device=self.device)

    @room_for("the weights of a normalised graph")
    def normalized(self, kind: str | None = "row", self_loops: bool = True) -> Graph:
        """Weights of A + I (or A), divided by the row sums ("row"), by both roots ("sym"), or left (None).

        The self-loop added to node i has edge id E + i, as if appended to the user's list.
        """
        if kind is not None:
            one_of(kind, ("row", "sym"), "kind")
        if self.types is not None and kind == "sym":
            raise InputError("`kind` must be row or None for a graph with several relations, got sym")
        if self.types is not None and self_loops:
            raise InputError("`self_loops` must be False for a graph with several relations, got True")
        g = self._with_loops() if flag(self_loops, "self_loops") else self
        if kind is None:
            return g
        return g.replace(weight=normalise(g.indptr, g.indices, g.weight, kind == "sym"))

    def _with_loops(self) -> Graph:
        n, m, device = self.num_nodes, self.num_edges, self.device
        nodes, steps = torch.arange(n, device=device), torch.arange(n + 1, device=device)

        def before(values: Tensor, own: Tensor) -> Tensor:
            return prepend(values, self.indptr, own.to(values.dtype))

        word = torch.int32 if m + n < 2**31 else torch.int64
        eid = torch.arange(m, dtype=word, device=device) if self.eid is None else self.eid.to(word)
        indices, eid = before(self.indices, nodes), before(eid, m + nodes)
        weight = None if self.weight is None else before(self.weight, torch.ones(n, device=device))
        time = None if self.time is None else before(self.time, torch.zeros(n, device=device))
        last = None if self.ends is None else self.ends + nodes + 1
        return Graph(self.indptr + steps, indices, weight, eid, self.first + nodes + 1, last, time, attr=self.attr)

    def hash(self) -> str:
        """A hash of the content."""
        h = hashlib.blake2b(digest_size=16)
        for name, t in self._tensors():
            h.update(f"{name}:{t.dtype}:{tuple(t.shape)}".encode())
            h.update(t.detach().cpu().contiguous().numpy().data)
        for t in () if self.attr is None else self.attr.tables:
            h.update(f"attr:{tuple(t.shape)}".encode() + t.cpu().contiguous().numpy().tobytes())
        if self.types is not None:
            h.update(repr((self.types.nodes, self.types.relations, self.types.starts)).encode())
            h.update(self.types.ptr.cpu().numpy().tobytes() + self.types.relation.cpu().numpy().tobytes())
        return h.hexdigest()

    def replace(self, **changes: Any) -> Graph:
        """The same graph with other arrays."""
        names = ("indptr", "indices", "weight", "eid", "first", "time", "types", "attr")
        return Graph(**{**{k: getattr(self, k) for k in names}, "last": self.ends, **changes})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Graph:
        device = device_of(device)
        moved: dict[str, Any] = {k: t.to(device, non_blocking=non_blocking) for k, t in self._tensors()}
        if self.types is not None:
            moved["types"] = self.types.to(device)
        if self.attr is not None:
            moved["attr"] = self.attr.to(device, non_blocking)
        return self.replace(**moved)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("indptr", "indices", "weight", "eid", "first", "time"):
            t = getattr(self, name)
            if t is not None:
                yield name, t
        if self.ends is not None:
            yield "last", self.ends

    def __repr__(self) -> str:
        kinds = "" if self.types is None else f", types={list(self.types.nodes)}, relations={len(self.relations)}"
        weighted = self.weight is not None
        return f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges}, weighted={weighted}{kinds})"


class OnGraph(nn.Module):
    """A module with a graph, which is moved along with the module's buffers."""

    graph: Graph

    def _apply(self, fn: Any, recurse: bool = True) -> OnGraph:
        super()._apply(fn, recurse)
        device = fn(torch.zeros(0, device=self.graph.device)).device
        if device != self.graph.device:
            self.graph = self.graph.to(device)
        self.moved()
        return self

    def moved(self) -> None:
        """Rebuild what depends on the device of the state."""


def _small(ids: Tensor, n: int) -> Tensor:
    """int32 where ids below n fit."""
    return ids.to(torch.int32 if n < 2**31 else torch.int64)
