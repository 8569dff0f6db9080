"""Other libraries' samplers, as they come: what can be imported takes part, what cannot says why."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from adahop.checks import one_of
from adahop.graph import Graph
from adahop_lab.bench.clock import Runner

DGLGraph: TypeAlias = Any  # DGL is not typed, and not always installed
DGLBlock: TypeAlias = Any


class Absent(Exception):
    """A peer that cannot take part here; the message says why."""


class DGL:
    """Classic DGL 2.1: neighbours drawn and relabelled into its blocks.

    Ids are int64 as in our blocks, which is DGL's default; any kind followed by `:ids=int32` is the same with int32.
    """

    kinds = ("uniform", "uniform:replace=false", "weighted", "weighted:replace=false", "labor", "labor:refine=1",
             "uniform:ids=int32")  # fmt: skip
    more = tuple(f"{kind}:ids=int32" for kind in kinds[:-1])

    def __init__(self, graph: Graph):
        self.dgl, self.own = import_dgl(), graph
        self.graphs: dict[torch.dtype, Any] = {}

    def graph(self, ids: torch.dtype) -> Any:
        """The same graph with ids of this kind, made when it is first asked for."""
        if ids not in self.graphs:
            if self.own.types is None:
                places = tuple(t.to(ids) for t in (self.own.indptr, self.own.indices))
                csc = ("csc", (*places, torch.empty(0, dtype=ids)))
                self.graphs[ids] = self.dgl.graph(csc, num_nodes=self.own.num_nodes)
            else:
                data, many = self.own.to_data(), self.own.types.num_nodes
                edges = {r: tuple(data[r].edge_index.to(ids)) for r in data.edge_types}
                self.graphs[ids] = self.dgl.heterograph(edges, num_nodes_dict=many).formats("csc")
        return self.graphs[ids]

    def set_threads(self, n: int) -> None:
        self.dgl.utils.set_num_threads(n)

    def sampler(self, kind: str, graph: DGLGraph, sizes: Sequence[int]) -> Any:
        name, *parts = kind.split(":")
        if name == "labor":
            return self.dgl.dataloading.LaborSampler(list(sizes), importance_sampling=int("refine=1" in parts))
        prob = None if name == "uniform" else "w"
        if prob and "w" not in graph.edata:
            chance = torch.Generator().manual_seed(0)
            graph.edata["w"] = torch.rand(graph.num_edges(), generator=chance) + 0.01
        return self.dgl.dataloading.NeighborSampler(list(sizes), prob=prob, replace="replace=false" not in parts)

    def runner(self, kind: str, sizes: Sequence[int]) -> Runner:
        ids = torch.int32 if kind.endswith("ids=int32") else torch.int64
        graph = self.graph(ids)
        sampler = self.sampler(kind, graph, sizes)

        types = self.own.types

        def work(seeds: Tensor) -> int:
            given = seeds.to(ids)
            by_type = given if types is None else {t: some for t, some in types.split(given).items() if some.numel()}
            return sum(block.num_edges() for block in sampler.sample_blocks(graph, by_type)[2])

        return Runner(f"dgl:{kind}", work, peer=True)


class PyG:
    """PyG's NeighborSampler over pyg-lib or torch-sparse: one subgraph a batch, relabelled."""

    kinds = ("uniform", "uniform:replace=false", "weighted")
    more = ()

    def __init__(self, graph: Graph):
        from torch_geometric import typing
        from torch_geometric.data import Data

        if not (typing.WITH_PYG_LIB or typing.WITH_TORCH_SPARSE):
            raise Absent("PyG samples only with pyg-lib or torch-sparse, and neither is installed")
        if graph.types is not None:
            raise Absent("typed graphs are measured beside DGL alone")
        chance = torch.Generator().manual_seed(0)
        weight = torch.rand(graph.num_edges, generator=chance) + 0.01
        self.data = Data(edge_index=graph.edge_index(), num_nodes=graph.num_nodes, weight=weight)

    def set_threads(self, n: int) -> None:
        pass  # it follows torch

    def runner(self, kind: str, sizes: Sequence[int]) -> Runner:
        from torch_geometric.sampler import NeighborSampler, NodeSamplerInput

        name, _, without = kind.partition(":")
        weighted: dict[str, Any] = {"weight_attr": "weight"} if name == "weighted" else {}
        hops = list(sizes)[::-1]  # it counts from the seeds
        sampler = NeighborSampler(self.data, hops, replace=not without, **weighted)

        def work(seeds: Tensor) -> int:
            return int(sampler.sample_from_nodes(NodeSamplerInput(None, seeds)).row.numel())

        return Runner(f"pyg:{kind}", work, peer=True)


PEERS: dict[str, Callable[[Graph], Any]] = {"dgl": DGL, "pyg": PyG}


def import_dgl() -> Any:
    """DGL without its GraphBolt, whose library is built for one version of torch alone and stops the import.

    Nothing of GraphBolt is measured here: an empty module in its place lets the rest of DGL come in.
    """
    os.environ.setdefault("DGLBACKEND", "pytorch")  # else it writes a file into the user's home to say so
    if "dgl" not in sys.modules:
        sys.modules.setdefault("dgl.graphbolt", types.ModuleType("dgl.graphbolt"))
    try:
        import dgl
    except Exception as e:  # a binary for another torch fails in many ways
        sys.modules.pop("dgl.graphbolt", None)
        raise Absent(f"DGL cannot be imported ({type(e).__name__}: {e}); pip install adahop-lab[peers]") from None
    return dgl


def find(names: Sequence[str], graph: Graph) -> tuple[dict[str, Any], dict[str, str]]:
    """(the peers that are here, why the others are not). A name is a library's, or library:kind."""
    present: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for name in dict.fromkeys(part.partition(":")[0] for part in names):
        try:
            present[name] = PEERS[one_of(name, PEERS, "peers")](graph)
        except Absent as e:
            absent[name] = str(e)
    return present, absent


def runners(names: Sequence[str], present: dict[str, Any], sizes: Sequence[int]) -> list[Runner]:
    """One runner for each library:kind that was asked for; a library's name alone asks for all its kinds."""
    found = []
    for text in names:
        name, _, kind = text.partition(":")
        if name in present:
            kinds = present[name].kinds
            kinds = [one_of(kind, kinds + present[name].more, f"peers of {name}")] if kind else kinds
            found += [present[name].runner(k, sizes) for k in kinds]
    return found
