"""The audit of PyG's layers: what happens to each on our batches, and how far it is from the whole graph.

    python -m adahop_lab.audit docs/pyg-layers.md [BATCHES]           writes the page
    python -m adahop_lab.audit docs/pyg-layers.md [BATCHES] typed     writes its part on typed graphs

Every layer of torch_geometric.nn that can be built from a number of channels, PyG's stacks of them and a few layers as
users write them run on batches whose rim was not expanded: without a snapshot, and with one that the parameters have
left since. With every neighbour a layer must equal its reference: itself on the whole graph, or, if it is left as it
is, the plain layer on the batch. With three neighbours, drawn as the sampler has learnt to, its bias must not exceed
that of plain PyG on uniform batches.

The graph is there many times, side by side: what is drawn in one copy is independent of the others, so that one batch
over all copies is as good as a batch per copy.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_self_loops, degree, softmax

from adahop.errors import InputError
from adahop.pyg import AdaptiveNeighborLoader, inference, scale_messages
from adahop.pyg.wrap import layers_of, propagate_of

NODES, EDGES, SEEDS, WIDTH, BATCHES, K = 60, 540, 8, 6, 2000, 3
COPIES = 200  # batches at once, at most
LESSONS = 8  # batches that the sampler learns from before it is judged
CLOSE = 1e-5
RELATIONS = [
    ("case", "near", "case"), ("case", "like", "case"), ("part", "of", "case"), ("place", "has", "case"),
    ("case", "rev_of", "part"), ("case", "rev_has", "place"),
]  # fmt: skip
ERROR = 0.01  # family-wise: chance that layers which do what they promise fail the audit, over all of them together


# --- the graph --------------------------------------------------------------------------------------------------------


def graph(copies: int = 1) -> Data:
    """A directed graph without parallel edges, features of very different size, weights and attributes of edges."""
    g = torch.Generator().manual_seed(0)
    edges = torch.unique(torch.randint(NODES, (2, EDGES), generator=g), dim=1)
    edges = edges[:, edges[0] != edges[1]]
    m = edges.shape[1]
    x = torch.randn(NODES, WIDTH, generator=g) * torch.randn(NODES, 1, generator=g).exp()
    values = {
        "x": x,
        "history": torch.stack([x, x.flip(1)], dim=1),  # of earlier layers
        "pos": torch.randn(NODES, 3, generator=g),
        "normal": nn.functional.normalize(torch.randn(NODES, 3, generator=g), dim=1),
        "node_kind": torch.randint(2, (NODES,), generator=g),
        "edge_weight": torch.rand(m, generator=g) * 2 + 0.1,
        "edge_attr": torch.rand(m, 3, generator=g),
        "kind": torch.randint(2, (m,), generator=g),
    }
    apart = NODES * torch.arange(copies).repeat_interleave(m)
    many = {name: v.repeat(copies, *[1] * (v.dim() - 1)) for name, v in values.items()}
    return Data(edge_index=edges.repeat(1, copies) + apart, **many)


def typed_graph(copies: int = 1) -> HeteroData:
    """Three types: two relations of cases among themselves, which share pairs of nodes, one from and one to each other
    type.
    """
    g = torch.Generator().manual_seed(0)
    data = HeteroData()
    for kind in ("case", "part", "place"):
        x = torch.randn(NODES, WIDTH, generator=g) * torch.randn(NODES, 1, generator=g).exp()
        data[kind].x = x.repeat(copies, 1)
    first: Tensor | None = None
    for relation in RELATIONS:
        edges = torch.randint(NODES, (2, EDGES), generator=g)
        if relation[0] == relation[2]:
            edges = edges[:, edges[0] != edges[1]]
            edges = edges if first is None else torch.cat([edges[:, : EDGES // 2], first[:, : EDGES // 2]], 1)
            first = edges
        edges = torch.unique(edges, dim=1)
        apart = NODES * torch.arange(copies).repeat_interleave(edges.shape[1])
        data[relation].edge_index = edges.repeat(1, copies) + apart
    return data


def seeds(copies: int = 1) -> Tensor:
    """The first nodes of each copy."""
    return (NODES * torch.arange(copies).unsqueeze(1) + torch.arange(SEEDS)).flatten()


# --- layers as users write them ---------------------------------------------------------------------------------------


class OwnSoftmax(MessagePassing):
    """Attention, normalised by `softmax`."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin, self.att = nn.Linear(WIDTH, 4), nn.Linear(8, 1)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, ptr: Tensor | None, size_i: int | None) -> Tensor:
        return softmax(self.att(torch.cat([x_i, x_j], -1)).tanh(), index, ptr, size_i) * x_j


class OwnMean(MessagePassing):
    """A sum, divided by `degree`."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x)) / degree(edge_index[1], len(x)).clamp(min=1)[:, None]


class TutorialGCN(MessagePassing):
    """The GCN of PyG's tutorial on layers of one's own."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        row, col = edge_index
        root = degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
        root[root == float("inf")] = 0
        return self.propagate(edge_index, x=self.lin(x), norm=root[row] * root[col])

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class OwnAggregate(MessagePassing):
    """An overridden `aggregate`, which takes the maximum."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin, self.most = nn.Linear(WIDTH, 4), pyg.MaxAggregation()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
        return self.most(inputs, index, dim_size=dim_size)


class TwoPropagates(MessagePassing):
    """Two propagates in one forward."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.one, self.two = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.one(x)) + self.propagate(edge_index, x=self.two(x)).tanh()


class SharedLayer(nn.Module):
    """One layer, used twice."""

    def __init__(self, conv: MessagePassing | None = None) -> None:
        super().__init__()
        self.conv = pyg.GCNConv(WIDTH, WIDTH) if conv is None else conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(self.conv(x, edge_index).tanh(), edge_index)


class Mixed(nn.Module):
    """A mean, then a maximum."""

    def __init__(self, aggr: str = "max") -> None:
        super().__init__()
        self.one, self.two = pyg.SAGEConv(WIDTH, WIDTH), pyg.SAGEConv(WIDTH, 4, aggr=aggr)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.two(self.one(x, edge_index).relu(), edge_index)


# --- what is tried ----------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A layer, how it is built and called, and how many hops a batch for it has."""

    name: str
    make: Callable[[], nn.Module]
    call: Callable[[Any, Any], Tensor]
    hops: int = 1
    typed: bool = False
    of_batch: bool = False  # whether what it makes of its sums depends on which nodes a batch has

    def graph(self, copies: int = 1) -> Data | HeteroData:
        return typed_graph(copies) if self.typed else graph(copies)


def _x(m: Any, d: Data, **more: Any) -> Tensor:
    return m(d.x, d.edge_index, **more)


def _attr(m: Any, d: Data) -> Tensor:
    return m(d.x, d.edge_index, edge_attr=d.edge_attr)


def _second(m: Any, d: Data, **more: Any) -> Tensor:
    return m(d.x, d.x, d.edge_index, **more)


def _typed(m: Any, d: Data, **more: Any) -> Tensor:
    return m(d.x, d.edge_index, d.kind, **more)


def _placed(m: Any, d: Data) -> Tensor:
    return m(d.x, d.pos, d.edge_index)


def _signed(m: Any, d: Data) -> Tensor:
    return m(d.x, d.edge_index[:, d.kind == 0], d.edge_index[:, d.kind == 1])


def _layer(
    name: str, make: Callable[..., nn.Module], call: Callable[..., Tensor] = _x, hops: int = 1
) -> Iterator[Case]:  # fmt: skip
    """A layer as it is, and with edge weights or attributes where it can take them."""
    yield Case(name, make, call, hops)
    kind = getattr(pyg, name.split("(")[0].split(",")[0])
    if "edge_weight" in inspect.signature(kind.forward).parameters and getattr(kind, "supports_edge_weight", True):
        yield Case(f"{name}, edge_weight", make, lambda m, d: call(m, d, edge_weight=d.edge_weight), hops)
    if "edge_dim" in inspect.signature(kind).parameters or getattr(kind, "supports_edge_attr", False):
        with_attr = lambda: make(edge_dim=3)  # noqa: E731
        yield Case(f"{name}, edge_attr", with_attr, lambda m, d: call(m, d, edge_attr=d.edge_attr), hops)


def cases() -> list[Case]:
    w = WIDTH
    lin = lambda i=w, o=4: nn.Linear(i, o)  # noqa: E731
    deg = torch.bincount(torch.bincount(graph().edge_index[1], minlength=NODES))
    pna: dict[str, Any] = {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": deg}
    found = [
        *_layer("AGNNConv", lambda: pyg.AGNNConv()),
        *_layer("APPNP(K=2)", lambda: pyg.APPNP(2, 0.1), hops=2),
        *_layer("ARMAConv", lambda: pyg.ARMAConv(w, 4)),
        Case("CGConv, edge_attr", lambda: pyg.CGConv(w, 3), _attr),
        *_layer("ChebConv(K=2)", lambda: pyg.ChebConv(w, 4, 2)),
        *_layer("ClusterGCNConv", lambda: pyg.ClusterGCNConv(w, 4)),
        *_layer("DNAConv", lambda: pyg.DNAConv(w), lambda m, d, **more: m(d.history, d.edge_index, **more)),
        *_layer("DirGNNConv(SAGEConv)", lambda: pyg.DirGNNConv(pyg.SAGEConv(w, 4))),
        *_layer("EGConv", lambda: pyg.EGConv(w, 8)),
        *_layer("EdgeConv", lambda: pyg.EdgeConv(lin(2 * w))),
        *_layer("EdgeConv(aggr='mean')", lambda: pyg.EdgeConv(lin(2 * w), aggr="mean")),
        Case("FAConv", lambda: pyg.FAConv(w), _second),
        Case("FAConv(normalize=False), edge_weight", lambda: pyg.FAConv(w, normalize=False),
             lambda m, d: m(d.x, d.x, d.edge_index, d.edge_weight)),
        *_layer("FastRGCNConv", lambda: pyg.FastRGCNConv(w, 4, 2), _typed),
        *_layer("FeaStConv", lambda: pyg.FeaStConv(w, 4, heads=2)),
        *_layer("FiLMConv", lambda: pyg.FiLMConv(w, 4)),
        *_layer("GATConv", lambda **o: pyg.GATConv(w, 3, heads=2, **o)),
        *_layer("GATv2Conv", lambda **o: pyg.GATv2Conv(w, 3, heads=2, **o)),
        *_layer("GCN2Conv", lambda: pyg.GCN2Conv(w, 0.1), _second),
        *_layer("GCNConv", lambda: pyg.GCNConv(w, 4)),
        *_layer("GCNConv(add_self_loops=False)", lambda: pyg.GCNConv(w, 4, add_self_loops=False)),
        *_layer("GCNConv(improved=True)", lambda: pyg.GCNConv(w, 4, improved=True)),
        *_layer("GENConv", lambda **o: pyg.GENConv(w, 4, **o)),
        *_layer("GINConv", lambda: pyg.GINConv(lin())),
        Case("GINEConv, edge_attr", lambda: pyg.GINEConv(lin(), edge_dim=3), _attr),
        Case("GMMConv, edge_attr", lambda: pyg.GMMConv(w, 4, 3, 2), _attr),
        *_layer("GatedGraphConv", lambda: pyg.GatedGraphConv(w, 2), hops=2),
        *_layer("GeneralConv", lambda: pyg.GeneralConv(w, 4)),
        Case("GeneralConv, edge_attr", lambda: pyg.GeneralConv(w, 4, 3), _attr),
        *_layer("GeneralConv(attention=True)", lambda: pyg.GeneralConv(w, 4, attention=True)),
        *_layer("GraphConv", lambda: pyg.GraphConv(w, 4)),
        *_layer("GraphConv(aggr='mean')", lambda: pyg.GraphConv(w, 4, aggr="mean")),
        Case("HEATConv, edge_attr", lambda: pyg.HEATConv(w, 4, 2, 2, 4, 3, 4),
             lambda m, d: m(d.x, d.edge_index, d.node_kind, d.kind, d.edge_attr)),
        *_layer("LEConv", lambda: pyg.LEConv(w, 4)),
        *_layer("LGConv", lambda: pyg.LGConv()),
        *_layer("LabelPropagation", lambda: pyg.LabelPropagation(2, 0.5), lambda m, d, **more: m(
            d.x.softmax(1), d.edge_index, **more), hops=2),
        *_layer("MFConv", lambda: pyg.MFConv(w, 4)),
        *_layer("MixHopConv", lambda: pyg.MixHopConv(w, 4), hops=2),
        Case("NNConv, edge_attr", lambda: pyg.NNConv(w, 4, lin(3, 4 * w)), _attr),
        Case("PDNConv, edge_attr", lambda: pyg.PDNConv(w, 4, 3, 4), _attr),
        *_layer("PNAConv", lambda **o: pyg.PNAConv(w, 4, ["mean", "max", "std"], ["identity", "amplification"], deg,
                                                   **o)),
        *_layer("PPFConv", lambda: pyg.PPFConv(lin(w + 4)), lambda m, d: m(d.x, d.pos, d.normal, d.edge_index)),
        *_layer("PointGNNConv", lambda: pyg.PointGNNConv(lin(w, 3), lin(w + 3), lin(4, w)), _placed),
        *_layer("PointNetConv", lambda: pyg.PointNetConv(lin(w + 3)), _placed),
        *_layer("PointTransformerConv", lambda: pyg.PointTransformerConv(w, 4), _placed),
        *_layer("RGATConv", lambda **o: pyg.RGATConv(w, 4, 2, **o), _typed),
        *_layer("RGCNConv", lambda: pyg.RGCNConv(w, 4, 2), _typed),
        *_layer("ResGatedGraphConv", lambda **o: pyg.ResGatedGraphConv(w, 4, **o)),
        *_layer("SAGEConv", lambda: pyg.SAGEConv(w, 4)),
        *_layer("SAGEConv(aggr='max')", lambda: pyg.SAGEConv(w, 4, aggr="max")),
        *_layer("SAGEConv(aggr='sum')", lambda: pyg.SAGEConv(w, 4, aggr="sum")),
        *_layer("SGConv(K=2)", lambda: pyg.SGConv(w, 4, K=2), hops=2),
        *_layer("SSGConv(K=2)", lambda: pyg.SSGConv(w, 4, 0.1, K=2), hops=2),
        *_layer("SignedConv", lambda: pyg.SignedConv(w, 4, True), _signed),
        *_layer("SimpleConv", lambda: pyg.SimpleConv("mean")),
        *_layer("SuperGATConv", lambda: pyg.SuperGATConv(w, 4)),
        *_layer("TAGConv(K=2)", lambda: pyg.TAGConv(w, 4, K=2), hops=2),
        *_layer("TransformerConv", lambda **o: pyg.TransformerConv(w, 4, heads=2, **o)),
        *_layer("WLConvContinuous", lambda: pyg.WLConvContinuous()),
        *_layer("GCN, 2 layers", lambda: pyg.GCN(w, 8, 2, 4), hops=2),
        *_layer("GraphSAGE, 2 layers", lambda: pyg.GraphSAGE(w, 8, 2, 4), hops=2),
        *_layer("GIN, 2 layers", lambda: pyg.GIN(w, 8, 2, 4), hops=2),
        *_layer("GAT, 2 layers", lambda **o: pyg.GAT(w, 8, 2, 4, **o), hops=2),
        *_layer("PNA, 2 layers", lambda **o: pyg.PNA(w, 8, 2, 4, **pna, **o), hops=2),
        *_layer("EdgeCNN, 2 layers", lambda: pyg.EdgeCNN(w, 8, 2, 4), hops=2),
        Case("own: softmax attention", OwnSoftmax, _x),
        Case("own: mean by degree", OwnMean, _x),
        Case("own: the tutorial's GCN", TutorialGCN, _x),
        Case("own: overridden aggregate", OwnAggregate, _x),
        Case("own: two propagates", TwoPropagates, _x),
        Case("own: a layer used twice", SharedLayer, _x, 2),
        Case("own: a mean, then a maximum", Mixed, _x, 2),
    ]  # fmt: skip
    return found


class Stack(nn.Module):
    """Two layers of one kind, to be made heterogeneous."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.one, self.two = make(WIDTH), make(4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.two(self.one(x, edge_index).tanh(), edge_index)


class Hetero(nn.Module):
    """A layer of another kind per relation."""

    def __init__(self, aggr: str) -> None:
        super().__init__()
        w, two = WIDTH, (WIDTH, WIDTH)
        kinds = [
            pyg.GCNConv(w, w), pyg.SAGEConv(two, w), pyg.GATConv(two, w, add_self_loops=False), pyg.GraphConv(two, w),
            pyg.SAGEConv(two, w, aggr="sum"), pyg.GraphConv(two, w, aggr="mean"),
        ]  # fmt: skip
        self.conv = pyg.HeteroConv(dict(zip(RELATIONS, kinds, strict=True)), aggr=aggr)

    def forward(self, x: dict[str, Tensor], edge_index: dict[Any, Tensor]) -> dict[str, Tensor]:
        return self.conv(x, edge_index)


def _heterogeneous(make: Callable[[int], nn.Module], metadata: tuple[Any, Any]) -> nn.Module:
    return pyg.to_hetero(Stack(make), metadata)


def _by_type(m: Any, d: HeteroData) -> Tensor:
    return m(d.x_dict, d.edge_index_dict)["case"]


def _one_each(m: Any, d: HeteroData) -> Tensor:
    """One relation into each type."""
    return m(d.x_dict, {r: d[r].edge_index for r in ONE_EACH})["case"]


def _as_one(m: Any, d: HeteroData) -> Tensor:
    one = d.to_homogeneous()
    return m(one.x, one.edge_index, one.edge_type)


ONE_EACH = [RELATIONS[2], *RELATIONS[4:]]


def typed_cases() -> list[Case]:
    w, many = WIDTH, len(RELATIONS)
    both = (["case", "part", "place"], RELATIONS)
    kinds: dict[str, Callable[[int], nn.Module]] = {
        "SAGEConv": lambda out: pyg.SAGEConv((w, w), out),
        "GraphConv": lambda out: pyg.GraphConv((w, w), out),
        "GATConv": lambda out: pyg.GATConv((w, w), out, add_self_loops=False),
    }
    found = [
        Case(f"to_hetero({name}), 2 layers", partial(_heterogeneous, make, both), _by_type, 2)
        for name, make in kinds.items()
    ]
    found += [Case(f"HeteroConv(aggr='{aggr}')", partial(Hetero, aggr), _by_type) for aggr in ("sum", "mean")]
    found += [
        Case("RGCNConv", lambda: pyg.RGCNConv(w, 4, many), _as_one),
        Case("RGCNConv(aggr='sum')", lambda: pyg.RGCNConv(w, 4, many, aggr="sum"), _as_one),
        Case("FastRGCNConv", lambda: pyg.FastRGCNConv(w, 4, many), _as_one),
        Case("RGATConv", lambda: pyg.RGATConv(w, 4, many), _as_one),
        Case("HGTConv", lambda: pyg.HGTConv(w, w, both, heads=2), _by_type),
        Case("HANConv", lambda: pyg.HANConv(w, w, both, heads=2), _by_type, of_batch=True),
        Case("HANConv, one relation per type",
             lambda: pyg.HANConv(w, w, (both[0], ONE_EACH), heads=2), _one_each),
    ]  # fmt: skip
    return [case._replace(typed=True) for case in found]


NOT_TRIED = {
    "DynamicEdgeConv": "makes its own edges",
    "FusedGATConv": "needs dgNN",
    "GravNetConv": "makes its own edges",
    "HANConv": "takes typed graphs, see below",
    "HGTConv": "takes typed graphs, see below",
    "HypergraphConv": "takes hyperedges",
    "MeshCNNConv": "takes meshes",
    "PANConv": "multiplies by powers of the adjacency matrix",
    "SplineConv": "needs torch-spline-conv",
}


# --- what is found ----------------------------------------------------------------------------------------------------


class Bias(NamedTuple):
    """Relative to the whole graph's output; between `low` and `high` but for a chance that `ERROR` bounds."""

    value: float
    low: float
    high: float


NONE = Bias(0.0, 0.0, 0.0)  # not looked at


class LayerResult(NamedTuple):
    """Relative distances: with every neighbour from the reference, with three between means and the whole graph."""

    name: str
    reading: str
    scaled: bool
    estimated: bool  # whether degrees are estimated from the batch
    exact: float  # with every neighbour
    exact_snapshot: float  # the same with a snapshot that the parameters have left
    exact_pyg: float  # plain PyG with every neighbour, from the whole graph
    bias: Bias = NONE
    bias_snapshot: Bias = NONE
    bias_pyg: Bias = NONE
    of_batch: bool = False  # compared with the plain layer on the batch, and with a snapshot no farther than that is

    @property
    def breaches(self) -> list[str]:
        """What is promised and not kept."""
        close = 0.5 * self.exact_pyg if self.estimated else CLOSE
        found = []
        for which, exact, most, bias in (
            ("", self.exact, close, self.bias),
            (" with a snapshot", self.exact_snapshot, self.exact_pyg if self.of_batch else close, self.bias_snapshot),
        ):
            if not exact <= most:
                found.append(f"with every neighbour{which} off by {exact:.2g}")
            if not bias.low <= self.bias_pyg.high:
                found.append(f"bias{which} of {bias.value:.2f}, plain PyG's is {self.bias_pyg.value:.2f}")
        return found

    @property
    def holds(self) -> bool:
        return not self.breaches


def audit(case: Case, batches: int = BATCHES) -> LayerResult:
    found = exactly(case)
    with torch.no_grad():
        model = _made(case)
        _move(model)
        whole = case.call(model, case.graph())[:SEEDS]
        ours, remembered, theirs = (_bias(case, whole, batches, which) for which in ("plain", "snapshot", None))
    return found._replace(bias=ours, bias_snapshot=remembered, bias_pyg=theirs)


@torch.no_grad()
def exactly(case: Case) -> LayerResult:
    """With every neighbour alone."""
    data, model = case.graph(), _made(case)
    _move(model)
    whole = case.call(model, data)[:SEEDS]
    plain = copy.deepcopy(model)
    scale_messages(model)
    batch = next(iter(_loader(data, case, -1)))
    ours, theirs = (case.call(m, batch)[:SEEDS] for m in (model, plain))
    layers = [
        (one, one.reading) for m in layers_of(model).values()
        if (one := propagate_of(m)) is not None and one.reading is not None
    ]  # fmt: skip
    left = [one.uses_other_edges or reading.left_alone for one, reading in layers]
    said = {"left as it is" if alone else str(reading) for (_, reading), alone in zip(layers, left, strict=True)}
    mixed = any(left) and not all(left)
    reference = theirs if all(left) or case.of_batch else whole
    return LayerResult(
        case.name, ", ".join(sorted(said)), not all(left), any(reading.estimated for _, reading in layers),
        _layer_by_layer(case, data, model, plain) if mixed else _far(ours, reference),
        _snapshot(case, data, None if mixed else whole if case.of_batch else reference), _far(theirs, whole),
        of_batch=case.of_batch,
    )  # fmt: skip


def _made(case: Case) -> nn.Module:
    """In training, but with neither dropout nor the statistics of a batch."""
    torch.manual_seed(0)
    model = case.make()
    for m in model.modules():
        if isinstance(m, nn.Dropout | nn.BatchNorm1d | pyg.BatchNorm):
            m.eval()
    return model


def _move(model: nn.Module) -> None:
    """As if trained a little."""
    g = torch.Generator().manual_seed(5)
    for p in model.parameters():
        p.add_(0.1 * torch.randn(p.shape, generator=g))


def _loader(data: Data | HeteroData, case: Case, k: int, copies: int = 1, **more: Any) -> AdaptiveNeighborLoader:
    words = {"batch_size": SEEDS * copies, "estimator": "plain", "seed": 1, **more}
    at = ("case", seeds(copies)) if case.typed else seeds(copies)
    return AdaptiveNeighborLoader(data, [k] * case.hops, at, **words)


def _learnt(case: Case, loader: AdaptiveNeighborLoader, data: Data | HeteroData, at: Tensor, lessons: int) -> nn.Module:
    """A model that has moved since its snapshot, and whose messages the loader has learnt from."""
    model = _made(case)
    loader.learn(model)
    case.call(model, loader(at))  # shows how it is called
    try:
        inference(model, data)
    except InputError:  # not called by attributes of the data alone: its own evaluation is heard
        case.call(model.eval(), data)
        model.train()
    _move(model)
    for _ in range(lessons):
        case.call(model, loader(at))
        loader._update_from_open()
    return model


def _snapshot(case: Case, data: Data | HeteroData, reference: Tensor | None) -> float:
    """With every neighbour: how far from the reference; None: from the same without a snapshot."""
    outs, at = [], torch.arange(SEEDS)
    for estimator in ("snapshot", "plain")[: 1 if reference is not None else 2]:
        loader = _loader(data, case, -1, estimator=estimator)
        model = _learnt(case, loader, data, at, 0)
        outs.append(case.call(model, loader(at))[:SEEDS])
        loader.learn(None)
    return _far(outs[0], outs[1] if reference is None else reference)


def _layer_by_layer(case: Case, data: Data, model: nn.Module, plain: nn.Module) -> float:
    """Where some layers are scaled and some are left as they are: the farthest that one of them is from its reference,
    given its inputs. That of a scaled one is the layer on the whole graph, at the nodes whose neighbours were drawn.
    """
    batch = next(iter(_loader(data, case, -1)))
    inner, apart, handles = sum(batch.num_sampled_nodes[:-1]), [], []

    def whole(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple(whole(v) for v in value)
        if not isinstance(value, Tensor):
            return value
        if value.shape == batch.edge_index.shape and torch.equal(value, batch.edge_index):
            return data.edge_index
        if value.shape[0] == batch.num_nodes:
            return value.new_zeros(NODES, *value.shape[1:]).index_copy(0, batch.n_id, value)
        raise NotImplementedError("an argument of another kind")

    def check(name: str) -> Callable[..., None]:
        def hook(conv: nn.Module, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
            ours, own = propagate_of(conv), layers_of(plain)[name]
            assert ours is not None and ours.reading is not None
            if ours.uses_other_edges or ours.reading.left_alone:
                apart.append(_far(out, own(*args, **kwargs)))
                return
            full = own(*whole(args), **{k: whole(v) for k, v in kwargs.items()})
            apart.append(_far(out[:inner], full[batch.n_id[:inner]]))

        return hook

    for name, conv in layers_of(model).items():
        handles.append(conv.register_forward_hook(check(name), with_kwargs=True))
    case.call(model, batch)
    for handle in handles:
        handle.remove()
    return max(apart)


def _bias(case: Case, whole: Tensor, batches: int, estimator: str | None) -> Bias:
    """|mean over batches - whole| / |whole| of an estimator of ours, or of plain PyG on uniform batches (None)."""
    copies = min(COPIES, batches)
    data, at = case.graph(copies), torch.arange(SEEDS * copies)
    if estimator is None:
        loader = _loader(data, case, K, copies, method="graphsage", replace=False)
        model = _made(case)
        _move(model)
    else:
        loader = _loader(data, case, K, copies, estimator=estimator)
        model = _learnt(case, loader, data, at, LESSONS)
    outs = [case.call(model, loader(at))[: SEEDS * copies].view(copies, -1) for _ in range(-(-batches // copies))]
    loader.learn(None)
    return bias(torch.cat(outs), whole.flatten(), ERROR / (4 * len(typed_cases() if case.typed else cases())))


def bias(outs: Tensor, whole: Tensor, error: float) -> Bias:
    """Of the mean of independent rows of `outs`, less what chance adds to it, within bounds that fail with probability
    `error` on either side.

    The length of a Gaussian vector with covariance V lies within sqrt(2 |V| log(1/error)) of its mean, and the square
    of that mean between |m|^2 + tr V - |V| and |m|^2 + tr V.
    """
    outs, whole = outs.double(), whole.double()
    apart = outs - outs.mean(0)
    noise = float(apart.square().sum()) / len(outs) / (len(outs) - 1)  # tr V of the mean
    most = float(torch.linalg.matrix_norm(apart, 2)) ** 2 / len(outs) / (len(outs) - 1)  # |V|
    length, size = float((outs.mean(0) - whole).norm()), float(whole.norm())
    reach = math.sqrt(2 * most * math.log(1 / error))
    low, high = max(length - reach, 0.0) ** 2 - noise, (length + reach) ** 2 - noise + most
    return Bias(*(math.sqrt(max(v, 0.0)) / size for v in (length**2 - noise, low, high)))


def _far(one: Tensor, two: Tensor) -> float:
    return float((one - two).norm() / two.norm())


# --- the page ---------------------------------------------------------------------------------------------------------


def table(results: list[LayerResult]) -> str:
    def number(v: float) -> str:
        return "0" if v == 0 else f"{v:.0e}" if v < 1e-3 else f"{v:.2f}"

    rows = []
    for r in results:
        name = f"`{r.name}`" if not r.name.startswith("own: ") else r.name
        columns = (r.bias, r.bias_snapshot, r.bias_pyg)
        biases = " | ".join(f"{b.value:.2f} ({b.low:.2f}–{b.high:.2f})" for b in columns)
        exact = " | ".join(number(v) for v in (r.exact, r.exact_snapshot, r.exact_pyg))
        rows.append(f"| {name} | {r.reading} | {exact} | {biases} |")
    head = (
        "| layer | what happens | all neighbours | with a snapshot | plain PyG | bias at k = 3 | with a snapshot | "
        "plain PyG |\n|---|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"


PAGE = """# What happens to each PyG layer

How each layer of `torch_geometric.nn` behaves on batches of `AdaptiveNeighborLoader`, and how far its output is from
that on the whole graph. "sum", "mean", "softmax" and "whole-graph degrees" in the second column say how the layer uses
the scale of sampled edges ([what that means](migration.md#what-happens-to-which-layer)); "left as it is" means that it
does not.

- *all neighbours*, *with a snapshot*, *plain PyG*: all neighbours are in the batch. Relative distance of the seeds'
  outputs from the whole graph; with a snapshot, after the parameters have changed since. Plain PyG differs where a
  layer normalises by degrees, because nodes have other degrees in a batch.
- *bias at k = 3*, *with a snapshot*, *plain PyG*: three neighbours per node. Relative distance of the mean over
  {batches} batches from the whole graph, minus what chance adds. In brackets, bounds that all hold together in
  {sure:.0%} of audits. adahop samples as it has learned from {lessons} batches before, plain PyG uniformly.

What must hold, and is checked:

- A scaled layer with all neighbours equals itself on the whole graph to {close:g}. A layer that is left as it is equals
  the plain layer on the same batch. In a model with both kinds, each layer is compared by itself.
- The lower bound of adahop's bias is not above the upper bound of plain PyG's. The remaining bias comes from nonlinear
  functions: an activation between two layers, attention.

Special cases:

- *Left as it is*: the scale has no meaning for the layer (a maximum), or none was found. Its hop is sampled uniformly,
  and a warning names the layer and an alternative.
- Attention in which edges differ only by their relation (`RGATConv` without `edge_attr`) is scaled, but its hop is
  sampled uniformly and it has no snapshot. One number per source says little about the attention of a pair, and
  sampling by it gave more bias than uniform sampling.
- `PDNConv` computes its edge weights, so the degrees of the whole graph are unknown. They are estimated from the
  sampled edges of a node, and for nodes that were not expanded from the number of neighbours and the mean weight. Its
  distance must be less than half of plain PyG's.

The page is written by `python -m adahop_lab.audit docs/pyg-layers.md {batches}`. It runs every layer that can be built
from a number of channels, with and without edge weights and attributes, PyG's models, and a few layers as users write
them ("own"), on batches of {seeds} seeds whose outermost nodes were not expanded.

{share} of {many} are scaled. {kept}

{table}
Not tried: {others}.
"""


TYPED = """## Typed graphs

The same on a heterogeneous graph with three types and six relations, two of which share pairs of nodes, with three
neighbours per relation (`python -m adahop_lab.audit docs/pyg-layers.md {batches} typed`). `RGCNConv`, `FastRGCNConv`
and `RGATConv` run on `batch.to_homogeneous()`. Bounds hold together within this table.

`HANConv` weights the relations into a type by a mean over the nodes at hand, and a batch has others than the whole
graph. With all neighbours it must therefore equal the plain layer on the same batch, and with a snapshot be no farther
from the whole graph than that. Where one relation goes into each type, it must equal the whole graph.

{share} of {many} are scaled. {kept}

{table}"""


def typed_page(results: list[LayerResult], batches: int) -> str:
    return TYPED.format(
        batches=batches, many=len(results), kept=_kept(results), share=sum(r.scaled for r in results),
        table=table(results),
    )  # fmt: skip


def _kept(results: list[LayerResult]) -> str:
    broken = [r for r in results if not r.holds]
    return "All do what is promised." if not broken else "Promises not kept: " + "; ".join(
        f"`{r.name}` ({', '.join(r.breaches)})" for r in broken) + "."  # fmt: skip


def page(results: list[LayerResult], batches: int) -> str:
    kept = _kept(results)
    others = ", ".join(f"`{name}` ({why})" for name, why in NOT_TRIED.items())
    return PAGE.format(
        batches=batches, seeds=SEEDS, close=CLOSE, lessons=LESSONS, sure=1 - ERROR, many=len(results), kept=kept,
        share=sum(r.scaled for r in results), table=table(results), others=others,
    )  # fmt: skip


def main(path: str, batches: int = BATCHES, part: str = "") -> int:
    """Writes the page, or its part on typed graphs; 1 where a promise is not kept."""
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in typed_cases() if part else cases():
            results.append(audit(case, batches))
            print(f"{case.name}: {', '.join(results[-1].breaches) or 'holds'}", file=sys.stderr, flush=True)
    mark = "## Typed graphs"
    layers, found, typed = Path(path).read_text().partition(mark)
    new = (layers, typed_page(results, batches)) if part else (page(results, batches) + "\n", found + typed)
    Path(path).write_text("".join(new))
    return int(not all(r.holds for r in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else BATCHES, *sys.argv[3:4]))
