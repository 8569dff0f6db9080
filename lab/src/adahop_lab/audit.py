"""The audit of PyG's layers: what happens to each on our batches, and how far it is from the whole graph.

    python -m adahop_lab.audit docs/pyg-layers.md [BATCHES]      writes the table

Every layer of torch_geometric.nn that can be built from a number of channels runs on batches whose rim was not
expanded. With every neighbour it must equal its reference: the layer on the whole graph, or, if it is left as it is,
the plain layer on the batch. With three neighbours its bias must not exceed that of plain PyG on uniform batches.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data

from adahop.pyg import AdaptiveNeighborLoader, inference, scale_messages
from adahop.pyg.wrap import layers_of, scale_of

NODES, EDGES, SEEDS, WIDTH, ROUNDS, K = 60, 540, 8, 6, 200, 3
Z = 4.0  # standard errors: one-sided, by chance once in 30,000; over 100 layers a family-wise error of .3 %


def graph(seed: int = 0) -> Data:
    """A directed graph without parallel edges, features of very different size, weights and attributes of edges."""
    g = torch.Generator().manual_seed(seed)
    edges = torch.unique(torch.randint(NODES, (2, EDGES), generator=g), dim=1)
    edges = edges[:, edges[0] != edges[1]]
    m = edges.shape[1]
    size = torch.randn(NODES, 1, generator=g).exp()
    return Data(
        x=torch.randn(NODES, WIDTH, generator=g) * size, edge_index=edges,
        edge_weight=torch.rand(m, generator=g) * 2 + 0.1,
        edge_attr=torch.rand(m, 3, generator=g), kind=torch.randint(2, (m,), generator=g),
        odds=size[edges[0], 0].sqrt() + 0.2, node_kind=torch.randint(2, (NODES,), generator=g),
        pos=torch.randn(NODES, 3, generator=g),
    )  # fmt: skip


class Case(NamedTuple):
    """A layer, how it is built and called, and how many hops a batch for it has."""

    name: str
    make: Callable[[], nn.Module]
    call: Callable[[Any, Any], Tensor]
    hops: int = 1


def _x(m: Any, d: Any) -> Tensor:
    return m(d.x, d.edge_index)


def _weighted(m: Any, d: Any) -> Tensor:
    return m(d.x, d.edge_index, d.edge_weight)


def _attr(m: Any, d: Any) -> Tensor:
    return m(d.x, d.edge_index, d.edge_attr)


def _named_attr(m: Any, d: Any) -> Tensor:
    return m(d.x, d.edge_index, edge_attr=d.edge_attr)


def _first(m: Any, d: Any) -> Tensor:
    return m(d.x, d.x, d.edge_index)


def _typed(m: Any, d: Any) -> Tensor:
    return m(d.x, d.edge_index, d.kind)


def _placed(m: Any, d: Any) -> Tensor:
    return m(d.x, d.pos, d.edge_index)


def _heat(m: Any, d: Any) -> Tensor:
    return m(d.x, d.edge_index, d.node_kind, d.kind, d.edge_attr)


def cases() -> list[Case]:
    w = WIDTH
    lin = lambda i=w, o=4: nn.Linear(i, o)  # noqa: E731
    pna: dict[str, Any] = {"aggregators": ["mean", "max"], "scalers": ["identity"]}
    deg = pna["deg"] = torch.bincount(torch.bincount(graph().edge_index[1], minlength=NODES))
    return [
        Case("AGNNConv", lambda: pyg.AGNNConv(), _x),
        Case("APPNP(K=2)", lambda: pyg.APPNP(2, 0.1), _x, 2),
        Case("ARMAConv", lambda: pyg.ARMAConv(w, 4), _x),
        Case("CGConv, edge_attr", lambda: pyg.CGConv(w, 3), _attr),
        Case("ChebConv(K=2)", lambda: pyg.ChebConv(w, 4, 2), _x),
        Case("ClusterGCNConv", lambda: pyg.ClusterGCNConv(w, 4), _x),
        Case("DirGNNConv(SAGEConv)", lambda: pyg.DirGNNConv(pyg.SAGEConv(w, 4)), _x),
        Case("EGConv", lambda: pyg.EGConv(w, 8), _x),
        Case("EdgeConv", lambda: pyg.EdgeConv(lin(2 * w)), _x),
        Case("EdgeConv(aggr='mean')", lambda: pyg.EdgeConv(lin(2 * w), aggr="mean"), _x),
        Case("FAConv", lambda: pyg.FAConv(w), _first),
        Case("FastRGCNConv", lambda: pyg.FastRGCNConv(w, 4, 2), _typed),
        Case("FeaStConv", lambda: pyg.FeaStConv(w, 4, heads=2), _x),
        Case("FiLMConv", lambda: pyg.FiLMConv(w, 4), _x),
        Case("GATConv", lambda: pyg.GATConv(w, 3, heads=2), _x),
        Case("GATConv, edge_attr", lambda: pyg.GATConv(w, 3, heads=2, edge_dim=3), _named_attr),
        Case("GATv2Conv", lambda: pyg.GATv2Conv(w, 3, heads=2), _x),
        Case("GATv2Conv, edge_attr", lambda: pyg.GATv2Conv(w, 3, heads=2, edge_dim=3), _named_attr),
        Case("GCN2Conv", lambda: pyg.GCN2Conv(w, 0.1), _first),
        Case("GCNConv", lambda: pyg.GCNConv(w, 4), _x),
        Case("GCNConv, edge_weight", lambda: pyg.GCNConv(w, 4), _weighted),
        Case("GCNConv(add_self_loops=False)", lambda: pyg.GCNConv(w, 4, add_self_loops=False), _x),
        Case("GCNConv(improved=True), edge_weight", lambda: pyg.GCNConv(w, 4, improved=True), _weighted),
        Case("GENConv", lambda: pyg.GENConv(w, 4), _x),
        Case("GINConv", lambda: pyg.GINConv(lin()), _x),
        Case("GINEConv, edge_attr", lambda: pyg.GINEConv(lin(), edge_dim=3), _attr),
        Case("GMMConv, edge_attr", lambda: pyg.GMMConv(w, 4, 3, 2), _attr),
        Case("GatedGraphConv", lambda: pyg.GatedGraphConv(w, 2), _x, 2),
        Case("GeneralConv", lambda: pyg.GeneralConv(w, 4), _x),
        Case("GeneralConv(attention=True)", lambda: pyg.GeneralConv(w, 4, attention=True), _x),
        Case("GraphConv", lambda: pyg.GraphConv(w, 4), _x),
        Case("GraphConv, edge_weight", lambda: pyg.GraphConv(w, 4), _weighted),
        Case("GraphConv(aggr='mean'), edge_weight", lambda: pyg.GraphConv(w, 4, aggr="mean"), _weighted),
        Case("HEATConv", lambda: pyg.HEATConv(w, 4, 2, 2, 4, 3, 4), _heat),
        Case("LEConv", lambda: pyg.LEConv(w, 4), _x),
        Case("LGConv", lambda: pyg.LGConv(), _x),
        Case("MFConv", lambda: pyg.MFConv(w, 4), _x),
        Case("MixHopConv", lambda: pyg.MixHopConv(w, 4), _x, 2),
        Case("NNConv, edge_attr", lambda: pyg.NNConv(w, 4, lin(3, 4 * w)), _attr),
        Case("PDNConv", lambda: pyg.PDNConv(w, 4, 3, 4), _attr),
        Case("PNAConv", lambda: pyg.PNAConv(w, 4, ["mean", "max", "std"], ["identity", "amplification"], deg), _x),
        Case("PointNetConv", lambda: pyg.PointNetConv(lin(w + 3)), _placed),
        Case("PointTransformerConv", lambda: pyg.PointTransformerConv(w, 4), _placed),
        Case("RGATConv", lambda: pyg.RGATConv(w, 4, 2), _typed),
        Case("RGCNConv", lambda: pyg.RGCNConv(w, 4, 2), _typed),
        Case("ResGatedGraphConv", lambda: pyg.ResGatedGraphConv(w, 4), _x),
        Case("SAGEConv", lambda: pyg.SAGEConv(w, 4), _x),
        Case("SAGEConv(aggr='max')", lambda: pyg.SAGEConv(w, 4, aggr="max"), _x),
        Case("SAGEConv(aggr='sum')", lambda: pyg.SAGEConv(w, 4, aggr="sum"), _x),
        Case("SGConv(K=2)", lambda: pyg.SGConv(w, 4, K=2), _x, 2),
        Case("SSGConv(K=2)", lambda: pyg.SSGConv(w, 4, 0.1, K=2), _x, 2),
        Case("SimpleConv", lambda: pyg.SimpleConv("mean"), _x),
        Case("SuperGATConv", lambda: pyg.SuperGATConv(w, 4), _x),
        Case("TAGConv(K=2)", lambda: pyg.TAGConv(w, 4, K=2), _x, 2),
        Case("TransformerConv", lambda: pyg.TransformerConv(w, 4, heads=2), _x),
        Case("TransformerConv, edge_attr", lambda: pyg.TransformerConv(w, 4, heads=2, edge_dim=3), _named_attr),
        Case("WLConvContinuous", lambda: pyg.WLConvContinuous(), _x),
        Case("GCN, 2 layers", lambda: pyg.GCN(w, 8, 2, 4), _x, 2),
        Case("GCN, 2 layers, edge_weight", lambda: pyg.GCN(w, 8, 2, 4), _weighted, 2),
        Case("GraphSAGE, 2 layers", lambda: pyg.GraphSAGE(w, 8, 2, 4), _x, 2),
        Case("GIN, 2 layers", lambda: pyg.GIN(w, 8, 2, 4), _x, 2),
        Case("GAT, 2 layers", lambda: pyg.GAT(w, 8, 2, 4), _x, 2),
        Case("GAT, 2 layers, edge_attr", lambda: pyg.GAT(w, 8, 2, 4, edge_dim=3), _named_attr, 2),
        Case("PNA, 2 layers", lambda: pyg.PNA(w, 8, 2, 4, **pna), _x, 2),
        Case("EdgeCNN, 2 layers", lambda: pyg.EdgeCNN(w, 8, 2, 4), _x, 2),
    ]  # fmt: skip


class Result(NamedTuple):
    """Relative distances; `bias` without what chance adds, `error` its standard error."""

    name: str
    reading: str
    scaled: bool
    exact: bool  # whether nothing was estimated
    all_neighbours: float  # with every neighbour, from the reference
    snapshot: float  # the same with the snapshot, right after a pass and parameters moved
    plain_all: float  # plain PyG with every neighbour, from the whole graph
    bias: float
    plain_bias: float
    error: float

    @property
    def holds(self) -> bool:
        """Whether the layer does what is promised."""
        if not self.scaled:
            return self.all_neighbours < 1e-5
        near = self.all_neighbours < 1e-5 or not self.exact
        return near and self.bias <= self.plain_bias + Z * self.error


def audit(case: Case, rounds: int = ROUNDS) -> Result:
    data = graph()
    model = _made(case)
    with torch.no_grad():
        _moved(model)
        whole = case.call(model, data)[:SEEDS]
        plain = copy.deepcopy(model)
        scale_messages(model)
        batch = next(iter(_loader(data, case, -1)))
        ours, theirs = (case.call(m, batch)[:SEEDS] for m in (model, plain))
        layers = [scale_of(m) for m in layers_of(model).values()]
        readings = [one.reading for one in layers if one is not None and one.reading is not None]
        left = [
            one.reading.left_alone or one.elsewhere for one in layers if one is not None and one.reading is not None
        ]
        said = sorted({"left as it is" if alone else str(r) for r, alone in zip(readings, left, strict=True)})
        scaled = not all(left)
        reference = whole if not any(left) else theirs
        if scaled and any(left):
            reference = ours  # a mixture is neither: only its bias is looked at
        exact = not any(r.estimated for r in readings)
        remembered = _snapshot(case, data)
        bias, error = _bias(case, data, model, whole, rounds, scaled)
        plain_bias, plain_error = _bias(case, data, plain, whole, rounds, False)
    return Result(case.name, ", ".join(said), scaled, exact, _far(ours, reference), remembered, _far(theirs, whole),
                  bias, plain_bias, math.hypot(error, plain_error))  # fmt: skip


def _made(case: Case) -> nn.Module:
    """In training, but with neither dropout nor the statistics of a batch."""
    torch.manual_seed(0)
    model = case.make()
    for m in model.modules():
        if isinstance(m, nn.Dropout | nn.BatchNorm1d | pyg.BatchNorm):
            m.eval()
    return model


def _loader(data: Data, case: Case, k: int, **more: Any) -> AdaptiveNeighborLoader:
    words = {"batch_size": SEEDS, "estimator": "plain", "seed": 1, **more}
    return AdaptiveNeighborLoader(data, [k] * case.hops, torch.arange(SEEDS), **words)


def _moved(model: nn.Module) -> None:
    g = torch.Generator().manual_seed(5)
    for p in model.parameters():
        p.add_(0.1 * torch.randn(p.shape, generator=g))


def _snapshot(case: Case, data: Data) -> float:
    """With every neighbour, after the parameters moved, a model with a snapshot gives what it gives without."""
    model, outs = _made(case), []
    for estimator in ("snapshot", "plain"):
        one = copy.deepcopy(model)
        loader = _loader(data, case, -1, estimator=estimator)
        loader.learn(one)
        batch = loader(torch.arange(SEEDS))
        case.call(one, batch)  # shows how it is called
        if estimator == "snapshot":
            inference(one, data)
        _moved(one)
        outs.append(case.call(one, batch)[:SEEDS])
        loader.learn(None)
    return _far(outs[0], outs[1])


def _bias(
    case: Case, data: Data, model: nn.Module, whole: Tensor, rounds: int, unequal: bool
) -> tuple[float, float]:  # fmt: skip
    """|mean over batches - whole| / |whole| less what chance adds to it, and its standard error.

    Learned draws are stood in for by draws in proportion to the size of the sources' features: unequal odds, fixed.
    """
    odds: dict[str, Any] = {"weight_attr": "odds"} if unequal else {"method": "graphsage"}
    loader = _loader(data, case, K, replace=False, **odds)
    outs = torch.stack([case.call(model, batch)[:SEEDS] for _ in range(rounds) for batch in loader])
    noise = outs.var(0).sum() / rounds
    distance = (outs.mean(0) - whole).square().sum()
    size = float(whole.norm())
    return float((distance - noise).clamp(min=0).sqrt()) / size, float(noise.sqrt()) / size


def _far(one: Tensor, two: Tensor) -> float:
    return float((one - two).norm() / two.norm())


def table(results: list[Result]) -> str:
    def number(v: float) -> str:
        return f"{v:.0e}" if v < 1e-3 else f"{v:.3f}"

    rows = [
        f"| `{r.name}` | {r.reading} | {number(r.all_neighbours)} | {number(r.plain_all)} | {r.bias:.3f} | "
        f"{r.plain_bias:.3f} | {r.error:.3f} |"
        for r in results
    ]
    head = ("| layer | what happens | all neighbours, off by | plain PyG, off by | bias at k = 3 | plain PyG's | ± |\n"
            "|---|---|---|---|---|---|---|\n")  # fmt: skip
    return head + "\n".join(rows) + "\n"


PAGE = """# What happens to each PyG layer

Written by `python -m adahop_lab.audit docs/pyg-layers.md`, which runs every layer of `torch_geometric.nn` that can be
built from a number of channels on batches of {seeds} seeds whose outermost nodes were not expanded. Distances are
relative, at the seeds, from the layer on the whole graph.

- *all neighbours*: every neighbour is drawn. A layer that is scaled equals the whole graph; plain PyG does not where a
  layer normalises by the degrees that a batch shows. For a layer that is left as it is, the distance is from the plain
  layer on the same batch.
- *bias at k = 3*: of the mean over {rounds} batches with three neighbours per node, less what chance adds. Ours draws
  with unequal odds, plain PyG uniformly; ± is the standard error of the difference.
- *left as it is*: the scale has no meaning for the layer (a maximum), or none that was found. Its hop is drawn
  uniformly, and a warning names the layer and what would be understood.
- `PDNConv` computes its edge weights: the whole graph's degrees are then not known, and are estimated by the drawn
  edges of a node, and at the rim by its number of neighbours times the mean weight.

{share} of {many} are scaled.

{table}"""


def main(path: str, rounds: int = ROUNDS) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [audit(case, rounds) for case in cases()]
    share = sum(r.scaled for r in results)
    page = PAGE.format(seeds=SEEDS, rounds=rounds, share=share, many=len(results), table=table(results))
    Path(path).write_text(page)
    for r in results:
        if not r.holds:
            print(f"{r.name}: {r}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
