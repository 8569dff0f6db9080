"""The whole graph beside a batch: degrees and other sums over all edges of a node, which a batch does not show."""

from __future__ import annotations

import functools
import itertools
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage

from adahop.graph import Graph
from adahop.pyg.arguments import state_of
from adahop.typed import Relation

Key = TypeVar("Key")


class WholeGraph:
    """Sums over all in-edges of a node, for a layer that sees a batch.

    One per loader, or per relation of typed data, shared by its batches. Sums are formed when first asked for and kept.
    """

    bipartite = False  # sources and targets are of two node types, so that equal ids are no self-loop
    given_by_hand = False  # nothing is known but an edge weight that the user passed

    def __init__(self, data: Data | EdgeStorage, graph: Graph, relation: Relation | None = None):
        self.data, self.graph, self.relation = data, graph, relation
        self.source: Any = data  # what batches are cut from, with all node types
        self.num_nodes = graph.num_nodes, graph.num_nodes  # sources and targets
        if relation is not None:
            assert graph.types is not None
            many = graph.types.num_nodes
            self.num_nodes, self.bipartite = (many[relation[0]], many[relation[2]]), relation[0] != relation[2]
        # with the state of the attribute: the data may be changed while it is in use
        self._sums: dict[tuple[str | None, int], tuple[Any, tuple[Tensor, Tensor]]] = {}
        self._loops: dict[str | None, tuple[Any, Tensor]] = {}

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
        state = self._state(name)
        if self._sums.get((name, row), (0,))[0] != state:
            self._sums[name, row] = state, self._summed(self.edge_index, self._values(name), row)
        return self._sums[name, row][1]

    def _state(self, name: str | None) -> tuple[int, int | None] | None:
        return None if name is None else state_of(self.data[name])

    def _values(self, name: str | None) -> Tensor:
        """[M] an edge attribute, or ones."""
        if name is None:
            return torch.ones_like(self.edge_index[0], dtype=torch.float)
        return self.data[name].detach().view(-1)

    def _summed(self, edge_index: Tensor, value: Tensor, row: int) -> tuple[Tensor, Tensor]:
        loop, zeros = self.is_loop(edge_index), value.new_zeros(self.num_nodes[row])
        return (
            zeros.index_add(0, edge_index[row], value.masked_fill(loop, 0)),
            zeros.index_add(0, edge_index[row], value.masked_fill(~loop, 0)),
        )

    def is_loop(self, edges: Tensor) -> Tensor:
        """[M] whether each of some edges is a self-loop."""
        return torch.zeros_like(edges[0], dtype=torch.bool) if self.bipartite else edges[0] == edges[1]

    def loops(self, name: str | None = None) -> Tensor:
        """[N] the attribute of a node's last self-loop, which is the one that PyG keeps; NaN where it has none."""
        state = self._state(name)
        if self._loops.get(name, (0,))[0] != state:
            loop, value = self.is_loop(self.edge_index), self._values(name)
            out = value.new_full((self.num_nodes[1],), float("nan"))
            out[self.edge_index[1, loop]] = value[loop]
            self._loops[name] = state, out
        return self._loops[name][1]


class HomogeneousGraph(WholeGraph):
    """All relations as one, in the graph's own ids; its edges are put together when first asked for."""

    def __init__(self, graph: Graph, relations: dict[Relation, WholeGraph], source: Data | HeteroData):
        super().__init__(Data(), graph)
        self.relations, self.source = relations, source

    @functools.cached_property
    def stacked(self) -> StackedRelations:
        return StackedRelations(self.graph, self.relations, self.source)

    @functools.cached_property
    def edge_index(self) -> Tensor:  # type: ignore[override]
        return self.graph.edge_index()

    @property
    def num_edges(self) -> int:
        return self.graph.num_edges


class StackedRelations(HomogeneousGraph):
    """All relations as one, where a source is there once per relation that it has: its id is that of (relation,
    source), as in the layers that compute keys and values per relation before they join all edges (HGTConv).
    """

    bipartite = True

    def __init__(self, graph: Graph, relations: dict[Relation, WholeGraph], source: Data | HeteroData):
        super().__init__(graph, relations, source)
        assert graph.types is not None
        sizes = {r: graph.types.num_nodes[r[0]] for r in graph.relations}
        self.first = offsets(sizes)  # id of each relation's first source
        self.num_nodes = sum(sizes.values()), graph.num_nodes

    @functools.cached_property
    def edge_index(self) -> Tensor:
        types, edges = self.graph.types, self.graph.edge_index()
        assert types is not None
        for relation, (start, stop) in zip(self.graph.relations, itertools.pairwise(types.starts), strict=True):
            edges[0, start:stop] += self.first[relation] - types.nodes[relation[0]]
        return edges


class ScaleOnlyGraph(WholeGraph):
    """A whole graph of which only some edges and their scale are known: each stands for `scale` edges."""

    given_by_hand = True

    def __init__(self, edge_index: Tensor, scale: Tensor, nodes: int):
        self.data = self.source = Data()
        self.scale = scale.detach().view(-1).float()
        self.edges, self.num_nodes = edge_index, (nodes, nodes)

    def loops(self, name: str | None = None) -> Tensor:
        out = self.scale.new_full((self.num_nodes[1],), float("nan"))
        out[self.edges[1, self.is_loop(self.edges)]] = 1.0
        return out

    def sums(self, name: str | None = None, row: int = 1) -> tuple[Tensor, Tensor]:
        return self._summed(self.edges, self.scale, row)


def whole_graphs(data: Data | HeteroData, graph: Graph) -> dict[Relation | None, WholeGraph]:
    """The whole graph, under None, and each relation of typed data."""
    if not isinstance(data, HeteroData):
        return {None: WholeGraph(data, graph)}
    each = {r: WholeGraph(data[r], graph, r) for r in graph.relations}
    found: dict[Relation | None, WholeGraph] = dict(each.items())
    return found | {None: HomogeneousGraph(graph, each, data)}


def offsets(sizes: dict[Key, int]) -> dict[Key, int]:
    """Where each key's ids begin when those of all keys are numbered one after the other."""
    return dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
