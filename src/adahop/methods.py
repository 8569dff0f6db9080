"""The one list: a method's name, and the sampler, policy, draw and estimator behind it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adahop.checks import InputError, one_of, room_for
from adahop.graph import Graph
from adahop.policies import POLICIES
from adahop.samplers import ASGCN, Bliss, ClusterGCN, FastGCN, GraphSAINT, Labor, Ladies, NeighborSampler, Sampler
from adahop.storage import MEMORY, Storage

Build = Callable[..., Sampler]


@dataclass(frozen=True)
class Method:
    """A named preset. `state` says what it keeps, in words and bytes; `models` which models it can serve."""

    name: str
    family: str  # node-wise, layer-wise or subgraph
    unbiased: bool
    state: str
    build: Build
    options: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ("gcn", "sage", "gat", "geniepath")
    why_not: str = ""  # one sentence for the models left out
    needs: tuple[str, ...] = ()  # options that come with the data: "features" is its x
    estimator: str = "plain"  # what the model remembers, see `adahop.sum`
    instead: dict[str, dict[str, Any]] = field(default_factory=dict)  # fields that differ for a model, by its name

    def on(self, model: str) -> Method:
        """The preset as it is for a model: what applies there."""
        return replace(self, **self.instead.get(model, {}))


def node_wise(graph: Graph, sizes: Sequence[int], seed: int = 0, policy: str = "uniform", draw: str = "multinomial",
              budget: bool = False, storage: Storage = MEMORY, **options: Any) -> NeighborSampler:  # fmt: skip
    """Any policy with any draw; what is left of the options is the policy's."""
    kind = POLICIES[one_of(policy, POLICIES, "policy")]
    takes = inspect.signature(kind.__init__).parameters
    known = [p for p in takes if p not in ("self", "graph", "layers", "storage")]
    for name in options:
        if name not in known:
            raise InputError(f"an option of policy '{policy}' must be one of {known or 'none'}, got '{name}'")
    sampler = NeighborSampler(graph, sizes, None, draw, seed, budget, storage)
    sampler.policy = kind(graph, len(sampler.sizes), **placed(storage, takes, f"policy '{policy}'"), **options)
    sampler.policy.prepare(draw, sampler.fan_out)
    return sampler


def placed(storage: Storage, takes: Mapping[str, Any], what: str) -> dict[str, Storage]:
    """The storage as an argument, where one is given; what does not take it keeps its state in memory."""
    if storage is MEMORY:
        return {}
    if "storage" not in takes:
        raise InputError(f"`state` must be left out for {what}, which keeps its own in memory, got a folder")
    return {"storage": storage}


OTHER = "other"  # a model that is not ours, such as one of PyG's layers
REMEMBERED = ("gcn", "sage", "gat")
WHY_NOT = "`model` must be gcn, sage or gat for {}: GeniePath's scores need both ends of every edge, got geniepath"

METHODS: dict[str, Method] = {
    m.name: m
    for m in [
        Method("adahop", "node-wise", True, "4 bytes per edge and 14 per node, per layer that is drawn (gat: 8 per "
               "node, plus 8 per head); 8 per node and hidden unit (gat: 4)", node_wise,
               {"policy": "tracked", "draw": "systematic"},
               estimator="exact+snapshot", instead={
                   "gat": {"options": {"policy": "attended", "draw": "systematic"}, "estimator": "exact+history"},
                   "geniepath": {"estimator": "plain"}, OTHER: {"estimator": "plain"}}),
        Method("graphsage", "node-wise", True, "none", node_wise, {"policy": "uniform"}),
        Method("bs", "node-wise", True, "4 bytes per edge and 8 per node, per layer", node_wise, {"policy": "exp3"}),
        Method("bs.m", "node-wise", True, "4 bytes per edge and 8 per node, per layer", node_wise,
               {"policy": "exp3m", "draw": "depround"}),
        Method("thanos", "node-wise", False, "4 bytes per edge and 12 per node, per layer", node_wise,
               {"policy": "thanos"}),
        Method("thanos.m", "node-wise", False, "4 bytes per edge and 12 per node, per layer", node_wise,
               {"policy": "thanosm", "draw": "depround"}),
        Method("s-gcn", "node-wise", True, "4 bytes per node and hidden unit", node_wise,
               {"policy": "uniform", "draw": "systematic"}, REMEMBERED, WHY_NOT.format("s-gcn"),
               estimator="exact+history"),
        Method("labor", "node-wise", True, "none", Labor),
        Method("cluster-gcn", "subgraph", False, "20 bytes per node", ClusterGCN),
        Method("graphsaint", "subgraph", False, "4 bytes per edge and 4 per node", GraphSAINT),
        Method("fastgcn", "layer-wise", True, "8 bytes per node", FastGCN),
        Method("ladies", "layer-wise", True, "none", Ladies),
        Method("pladies", "layer-wise", True, "none", Ladies, {"draw": "poisson"}),
        Method("as-gcn", "layer-wise", True, "one number per feature and layer", ASGCN, needs=("features",)),
        Method("bliss", "layer-wise", True, "4 bytes per edge and 8 per node, per layer", Bliss),
    ]
}  # fmt: skip


def make(
    method: str, graph: Graph, sizes: Sequence[int], seed: int = 0, storage: Storage = MEMORY, **options: Any
) -> Sampler:
    """A sampler by its method's name; options override the preset's, so that the parts combine freely.

    `storage` is where its state lies, see `adahop.storage`.

    >>> sampler = make("bs", Graph.from_edge_index([[1, 2, 3], [0, 0, 0]]), sizes=[2], draw="systematic")
    >>> [block.num_dst for block in sampler.sample([0])]
    [1]
    """
    preset = METHODS[one_of(method, METHODS, "method")]
    merged = {**preset.options, **options}
    known = inspect.signature(preset.build).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for name in options:
            one_of(name, [p for p in known if p not in ("graph", "sizes", "seed", "storage")], f"{method}'s option")
    merged.update(placed(storage, known, f"method '{method}'"))
    with room_for(f"the state of method '{method}'"):
        return preset.build(graph, sizes, seed=seed, **merged)
