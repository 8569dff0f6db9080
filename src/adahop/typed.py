"""Types and relations: names and dictionaries for users, offsets in one range of ids inside."""

from __future__ import annotations

import difflib
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from adahop.block import Block
from adahop.checks import (
    InputError,
    KindError,
    count,
    edge_features,
    edge_pairs,
    edge_weights,
    in_range,
    node_ids,
    one_of,
)
from adahop.ops import pointer

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData

Relation = tuple[str, str, str]  # (source type, name, target type)


class Types(NamedTuple):
    """Nodes of several types, one after the other in one range of ids, and relations between them.

    A row is (relation, target): only rows with edges are stored, those of a target contiguous (with one type and one
    relation, all of them: a row is then a node, as in a graph without types).
    """

    nodes: dict[str, int]  # type -> its first id, in order
    relations: tuple[Relation, ...]  # (source type, name, target type)
    starts: tuple[int, ...]  # [relations + 1] edges are numbered relation after relation: the first of each
    ptr: Tensor  # [N + 1] target i's rows are ptr[i]:ptr[i + 1]
    relation: Tensor  # [R] of each row
    shift: Tensor  # [R] a source j of the row is state j + shift of the (relation, source) pairs
    sources: int  # how many such pairs there are

    @property
    def bounds(self) -> list[int]:
        """[types + 1] the first id of each type, and one past the last of all."""
        return [*self.nodes.values(), self.ptr.numel() - 1]

    @property
    def num_nodes(self) -> dict[str, int]:
        """How many nodes each type has."""
        ends = self.bounds[1:]
        return {name: end - start for (name, start), end in zip(self.nodes.items(), ends, strict=True)}

    @property
    def ends(self) -> list[tuple[int, int]]:
        """The place of each relation's source type and target type among the types."""
        place = {name: i for i, name in enumerate(self.nodes)}
        return [(place[source], place[target]) for source, _, target in self.relations]

    def number(self, relation: Relation | str, what: str = "relation") -> int:
        """The number of a relation, named in full or, where that is unambiguous, by its middle name alone."""
        if isinstance(relation, str):
            named = [i for i, known in enumerate(self.relations) if relation in (known[1], "__".join(known))]
            if len(named) > 1:
                both = " and ".join(str(self.relations[i]) for i in named[:2])
                raise InputError(f"`{what}` must be named in full where several share a name, {both}, got '{relation}'")
            if named:
                return named[0]
        elif isinstance(relation, Sequence) and tuple(relation) in self.relations:
            return self.relations.index(tuple(relation))  # type: ignore[arg-type]
        raise unknown(relation, self.relations, what)

    def type_of(self, ids: Tensor) -> Tensor:
        """The place of each node's type among the types, in `nodes`' order."""
        inner = torch.tensor(self.bounds[1:-1], device=ids.device)
        return torch.bucketize(ids, inner, right=True)

    def ids(self, values: Any, what: str = "seeds") -> Tensor:
        """The ids in the one range. `values`: {type: ids or mask}, (type, ids or mask), a type (all its nodes), or
        such ids already."""
        if isinstance(values, str):
            return torch.arange(*self.span(values, what))
        if isinstance(values, Mapping):
            parts = [self._of_type(name, some, what) for name, some in values.items()]
            return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)
        if isinstance(values, tuple) and len(values) == 2 and isinstance(values[0], str):
            return self._of_type(values[0], values[1], what)
        return node_ids(values, self.ptr.numel() - 1, what)

    def _of_type(self, name: str, some: Any, what: str) -> Tensor:
        start, end = self.span(name, what)
        if some is None:
            return torch.arange(start, end)
        return node_ids(some, end - start, f"{what}['{name}']").cpu() + start

    def span(self, name: str, what: str = "type") -> tuple[int, int]:
        """The first id of a type and one past its last."""
        bounds = self.bounds
        at = list(self.nodes).index(one_of(name, self.nodes, f"{what}'s node type"))
        return bounds[at], bounds[at + 1]

    def split(self, ids: Tensor) -> dict[str, Tensor]:
        """The same nodes by type, in ids of their types and in the order given; every type has an entry."""
        kind = self.type_of(ids)
        return {name: ids[kind == i] - start for i, (name, start) in enumerate(self.nodes.items())}

    def to(self, device: torch.device | str) -> Types:
        return self._replace(**{k: getattr(self, k).to(device) for k in ("ptr", "relation", "shift")})

    def batch(
        self, blocks: Sequence[Block], merged: tuple[Tensor, list[Tensor], list[int]] | None = None
    ) -> TypedBatch:
        """Some blocks, input layer first, as in PyG: ids by type, edges by relation.

        `merged` is given where a batch numbers its nodes as a whole: its n_id, the edges of each hop in these numbers,
        and the number of new nodes in each hop, from the seeds on.
        """
        hops = list(reversed(blocks))
        if merged is None:
            new = [hops[0].num_dst, *(b.num_src - b.num_dst for b in hops)]
            merged = blocks[0].n_id, [b.edge_index for b in hops], new
        nodes, edges, found = merged
        kind = self.type_of(nodes)
        many = len(self.nodes)
        order = torch.argsort(kind, stable=True)
        size = torch.bincount(kind, minlength=many)
        local = torch.empty_like(order)
        local[order] = torch.arange(order.numel(), device=order.device) - pointer(size)[kind[order]]
        by_type = order.split(size.tolist())
        of_node = [torch.bincount(k, minlength=many).tolist() for k in kind.split(found)]
        relation = [b.edge_relation() for b in hops]
        place, ptr = by_relation(torch.cat(relation), len(self.relations))
        both = torch.cat(edges, 1)[:, place]
        e_id = torch.cat([b.e_id for b in hops])[place]
        cut, of_edge = ptr.tolist(), [torch.bincount(r, minlength=len(self.relations)).tolist() for r in relation]
        span = [slice(a, b) for a, b in itertools.pairwise(cut)]
        return TypedBatch(
            n_id={t: nodes[at] - start for (t, start), at in zip(self.nodes.items(), by_type, strict=True)},
            edge_index={r: local[both[:, s]] for r, s in zip(self.relations, span, strict=True)},
            e_id={r: e_id[s] - first for r, s, first in zip(self.relations, span, self.starts, strict=False)},
            num_nodes={t: [hop[i] for hop in of_node] for i, t in enumerate(self.nodes)},
            num_edges={r: [hop[i] for hop in of_edge] for i, r in enumerate(self.relations)},
            node={t: at for t, at in zip(self.nodes, by_type, strict=True)},
            edge={r: place[s] for r, s in zip(self.relations, span, strict=True)},
        )


class EdgeFeatures(NamedTuple):
    """Features of edges in the user's own order: a table per relation, of no columns where it has none.

    >>> EdgeFeatures((torch.ones(2, 3),), (0,)).rows(0, torch.tensor([1, 2]))
    tensor([[1., 1., 1.],
            [0., 0., 0.]])
    """

    tables: tuple[Tensor, ...]
    starts: tuple[int, ...]  # the number of each relation's first edge

    @property
    def widths(self) -> tuple[int, ...]:
        """How many features an edge of each relation has."""
        return tuple(table.shape[1] for table in self.tables)

    def rows(self, relation: int, e_id: Tensor) -> Tensor:
        """Those of some edges of a relation; self-loops that a normalised graph adds have zeros."""
        table, at = self.tables[relation], e_id.long() - self.starts[relation]
        if not len(table):
            return table.new_zeros(at.numel(), table.shape[1])
        return table[at.clamp(max=len(table) - 1)] * (at < len(table)).unsqueeze(1)

    def of_relation(self, relation: int) -> EdgeFeatures:
        """The table of one relation; its edges keep their numbers."""
        return EdgeFeatures((self.tables[relation],), (self.starts[relation],))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> EdgeFeatures:
        return self._replace(tables=tuple(t.to(device, non_blocking=non_blocking) for t in self.tables))


class TypedBatch(NamedTuple):
    """A batch by type and relation, nodes and edges in the order of the hops that found them.

    Every type and relation has an entry, an empty one where nothing was drawn. `node` and `edge` are places in the
    batch: `rows[batch.node[type]]` selects the nodes of a type from a tensor with a row per node of the batch, and
    `entries[batch.edge[relation]]` the edges of a relation from one with an entry per drawn edge, hop after hop from
    the seeds on.
    """

    n_id: dict[str, Tensor]  # ids in the type's own range
    edge_index: dict[Relation, Tensor]  # [2, M] places in the n_id of the source type and of the target type
    e_id: dict[Relation, Tensor]  # the edge in the user's own order of that relation
    num_nodes: dict[str, list[int]]  # found in each hop, the seeds first
    num_edges: dict[Relation, list[int]]  # drawn in each hop, that of the seeds first
    node: dict[str, Tensor]
    edge: dict[Relation, Tensor]

    @property
    def span(self) -> dict[Relation, slice]:
        """Where the edges of each relation lie among all of them, relation after relation."""
        ends = [0, *itertools.accumulate(ids.numel() for ids in self.e_id.values())]
        return {r: slice(*pair) for r, pair in zip(self.e_id, itertools.pairwise(ends), strict=True)}

    def by_relation(self, values: Sequence[Tensor]) -> dict[Relation, Tensor]:
        """From one tensor per block, input layer first, such as `[b.scale for b in blocks]`, to one per relation."""
        joined = torch.cat(list(reversed(values)))
        return {r: joined[at] for r, at in self.edge.items()}


def by_relation(relation: Tensor, relations: int) -> tuple[Tensor, Tensor]:
    """(order, ptr): places sorted by relation, stable, and where each relation starts."""
    return torch.argsort(relation, stable=True), pointer(torch.bincount(relation, minlength=relations))


@functools.cache
def most_into(relations: tuple[Relation, ...]) -> int:
    """The most rows that a target can have: relations into one type."""
    return max(Counter(target for _, _, target in relations).values(), default=0)


def unknown(relation: Any, relations: Iterable[Relation], what: str) -> InputError:
    """The error for a relation that is not among those of the graph."""
    known = {"__".join(r): r for r in relations}
    given = relation if isinstance(relation, str) else "__".join(map(str, relation)) if _named(relation) else ""
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5) or [
        full for full, r in known.items() if difflib.SequenceMatcher(None, given, r[1]).ratio() > 0.6
    ]
    hint = f"; did you mean {known[near[0]]}?" if near else ""
    return InputError(f"`{what}` must be one of {', '.join(map(str, known.values()))}, got {relation!r}{hint}")


def _named(relation: Any) -> bool:
    return isinstance(relation, Sequence) and not isinstance(relation, str)


# --- from other forms ------------------------------------------------------------------------------------------------


class Edged(NamedTuple):
    """Checked edges by relation, in the ids of their types."""

    num_nodes: dict[str, int]
    edge_index: dict[Relation, Tensor]
    weight: dict[Relation, Tensor] | None
    attr: EdgeFeatures | None


def check_relations(num_nodes: Any, edge_index: Any, weight: Any = None, edge_attr: Any = None) -> Edged:
    """The user's dictionaries, checked."""
    if not isinstance(num_nodes, Mapping) or not num_nodes or not all(isinstance(t, str) for t in num_nodes):
        raise KindError(f"`num_nodes` must be a dict from node types to counts, got {type(num_nodes).__name__}")
    if not isinstance(edge_index, Mapping) or not edge_index:
        raise KindError(f"`edge_index` must be a dict with at least one relation, got {_kind(edge_index)}")
    sizes = {t: count(n, 0, f"num_nodes['{t}']") for t, n in num_nodes.items()}
    edges: dict[Relation, Tensor] = {}
    for key, pairs in edge_index.items():
        if not isinstance(key, tuple) or len(key) != 3 or not all(isinstance(part, str) for part in key):
            raise InputError(f"a relation must be (source type, name, target type), got {key!r}")
        for part in (key[0], key[2]):
            one_of(part, sizes, f"edge_index[{key}]'s node type")
        edges[key] = edge_pairs(pairs, what := f"edge_index[{key}]")
        for side, kind in enumerate((key[0], key[2])):
            in_range(edges[key][side], sizes[kind], f"{what}[{side}]")
    each = None
    if weight is not None:
        _by_relation(weight, edges, "weight")
        for key in edges:
            if key not in weight:
                raise InputError(f"`weight` must have an entry for every relation, got none for {key}")
        each = {k: edge_weights(weight[k], e.shape[1], f"weight[{k}]") for k, e in edges.items()}
    return Edged(sizes, edges, each, _features(edge_attr, edges))


def _features(edge_attr: Any, edges: dict[Relation, Tensor]) -> EdgeFeatures | None:
    """Tables of edge features, of no columns for relations that are left out."""
    if edge_attr is None:
        return None
    _by_relation(edge_attr, edges, "edge_attr")
    tables = [
        edge_features(edge_attr[k], e.shape[1], f"edge_attr[{k}]") if k in edge_attr else torch.zeros(e.shape[1], 0)
        for k, e in edges.items()
    ]
    return EdgeFeatures(tuple(tables), tuple(itertools.accumulate((len(t) for t in tables[:-1]), initial=0)))


def _by_relation(values: Any, edges: dict[Relation, Tensor], what: str) -> None:
    if not isinstance(values, Mapping):
        raise KindError(f"`{what}` must be a dict from relations to values, got {type(values).__name__}")
    for key in values:
        if key not in edges:
            raise unknown(key, edges, what)


def _kind(value: Any) -> str:
    return "an empty one" if isinstance(value, Mapping) else type(value).__name__


def of_hetero(data: HeteroData, edge_attr: bool = True) -> Edged:
    """The types, edges, weights and features of edges (`edge_attr`) of a PyG HeteroData; where some relations have an
    `edge_weight`, others count 1."""
    if not data.edge_types:
        raise InputError("`data` must have at least one relation with an `edge_index`, got none")
    names = [*data.node_types, *(part for a, _, b in data.edge_types for part in (a, b))]
    sizes: dict[str, int] = {}
    for name in names:
        if name not in sizes:
            many = data[name].num_nodes if name in data.node_types and len(data[name]) else None
            if many is None:
                raise InputError(f"`data['{name}']` must have features or `num_nodes`, got neither")
            rows = getattr(data[name].get("x"), "shape", (many,))[0]
            if rows != many:
                raise InputError(f"`data['{name}'].x` must have a row per node of its type, {many} in all, got {rows}")
            sizes[name] = int(many)
    edges, weight, attr = {}, {}, {}
    for relation in data.edge_types:
        pairs = data[relation].get("edge_index")
        if pairs is None:
            raise InputError(f"`data[{relation}]` must have an `edge_index`, got none")
        edges[relation] = pairs
        if data[relation].get("edge_weight") is not None:
            weight[relation] = data[relation].edge_weight
        if edge_attr and data[relation].get("edge_attr") is not None:
            attr[relation] = data[relation].edge_attr
    if weight:
        weight = {k: weight.get(k, torch.ones(e.shape[1], device=e.device)) for k, e in edges.items()}
    return check_relations(sizes, edges, weight or None, attr or None)
