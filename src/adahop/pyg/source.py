"""From the words of PyG's NeighborLoader to a graph and a node-wise sampler of ours; what cannot be done says so."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch_geometric.data import Data

from adahop.checks import InputError, KindError, flag, one_of
from adahop.graph import Graph
from adahop.methods import METHODS, OTHER, Method, make
from adahop.policies import POLICIES
from adahop.samplers import NeighborSampler

# worker processes learn nothing that the others know of, so their options have no use here
UNUSED = ("filter_per_worker", "num_workers", "persistent_workers", "prefetch_factor", "pin_memory", "worker_init_fn",
          "multiprocessing_context", "pin_memory_device", "timeout", "generator", "in_order")  # fmt: skip
HARMLESS = ("is_sorted", "share_memory", "temporal_strategy")
REFUSED = {
    "time_attr": "temporal sampling is not supported yet",
    "input_time": "temporal sampling is not supported yet",
    "edge_label_index": "link-level loading is not supported yet",
    "edge_label": "link-level loading is not supported yet",
    "neg_sampling": "link-level loading is not supported yet",
    "transform_sampler_output": "use `transform`, which sees the whole batch",
    "neighbor_sampler": "pass an adahop sampler as `sampler`",
    "custom_cls": "only a PyG Data is supported yet",
    "input_id": "it is the position in `input_nodes`",
}


def pyg_options(options: dict[str, Any]) -> dict[str, Any]:
    """What is left for the sampler, after the options of PyG's loader were refused or passed over."""
    for name, why in REFUSED.items():
        if options.get(name) is not None:
            raise InputError(f"`{name}` must be left out, got {type(options[name]).__name__}: {why}")
    unused = [name for name in UNUSED if options.get(name)]
    if unused:
        warnings.warn(f"`{unused[0]}` is not used: batches are drawn in threads, see `prefetch`", stacklevel=4)
    known = (*UNUSED, *HARMLESS, *REFUSED)
    return {k: v for k, v in options.items() if k not in known}


def source(data: Any) -> tuple[Data, Graph]:
    """A PyG Data to cut batches from, and its graph."""
    if type(data).__name__ == "HeteroData":
        raise InputError("`data` must be a homogeneous PyG Data, got HeteroData, which is not supported yet")
    if not isinstance(data, Data):
        raise KindError(f"`data` must be a homogeneous PyG Data, got {type(data).__name__}")
    if isinstance(data.to_dict().get("graph"), Graph):  # our own data sets; their graph must not travel with batches
        kept = {k: v for k, v in data.to_dict().items() if k not in ("graph", "edge_index")}
        return Data(edge_index=data.edge_index, **kept), data.graph
    graph = Graph.from_data(data)
    return data, graph.to("cpu")


def node_sampler(
    data: Data,
    graph: Graph,
    num_neighbors: Any,
    method: str,
    seed: int,
    replace: bool | None = None,
    weight_attr: str | None = None,
    given: NeighborSampler | None = None,
    **options: Any,
) -> NeighborSampler:
    """The user's own sampler, or a method's; `num_neighbors` counts from the seeds outwards, `sizes` inwards."""
    if given is not None:
        return fitting(given, graph)
    if isinstance(num_neighbors, dict):
        raise InputError("`num_neighbors` must be a list, got a dict: edge types are not supported yet")
    if torch.is_tensor(num_neighbors):
        num_neighbors = num_neighbors.tolist()
    if not isinstance(num_neighbors, Sequence) or isinstance(num_neighbors, str):
        raise InputError(f"`num_neighbors` must be a list with one number a hop, got {num_neighbors!r}")
    preset = METHODS[one_of(method, METHODS, "method")].on(OTHER)
    if weight_attr is not None:
        if weight_attr not in data:
            raise InputError(f"`weight_attr` must name an attribute of the data, got '{weight_attr}'")
        preset, method = METHODS["graphsage"], "graphsage"
        options = {"policy": "static", "weight": data[weight_attr].cpu(), "draw": "systematic", **options}
    if not serves(preset):
        fit = [m.name for m in METHODS.values() if serves(m.on(OTHER))]
        raise InputError(f"`method` must be one of {', '.join(fit)} in this loader, got '{method}'; see adahop.Loader")
    if replace is not None:
        flag(replace, "replace")
        own = str(options.get("draw", preset.options.get("draw", "multinomial")))
        options["draw"] = "multinomial" if replace else ("systematic" if own == "multinomial" else own)
    sampler = make(method, graph, list(num_neighbors)[::-1], seed=seed, **options)
    return fitting(sampler, graph)


def serves(preset: Method) -> bool:
    """Whether PyG's layers can work with a method: drawn node by node, learning from energies, nothing remembered."""
    kind = POLICIES.get(preset.options.get("policy", ""))
    return kind is not None and kind.feedback == "energy" and preset.estimator == "plain"


def fitting(sampler: Any, graph: Graph) -> NeighborSampler:
    """A sampler that can serve PyG's models over this graph."""
    if not isinstance(sampler, NeighborSampler):
        raise KindError(f"`sampler` must be an adahop NeighborSampler, got {type(sampler).__name__}")
    if sampler.feedback != "energy":
        raise InputError(f"`method` must learn from energies here, got one that learns from {sampler.feedback}")
    if (sampler.graph.num_nodes, sampler.graph.num_edges) != (graph.num_nodes, graph.num_edges):
        theirs = f"{sampler.graph.num_nodes} nodes and {sampler.graph.num_edges} edges"
        raise InputError(
            f"`sampler` must be over the graph of the data, {graph.num_nodes} nodes and {graph.num_edges} edges, "
            f"got {theirs}"
        )
    return sampler
