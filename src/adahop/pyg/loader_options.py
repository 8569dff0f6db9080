"""The arguments of PyG's NeighborLoader, made a graph and a node-wise sampler; what is not supported is refused."""

from __future__ import annotations

import copy
import difflib
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NumNeighbors

from adahop.checks import (
    InputError,
    KindError,
    as_tensor,
    count,
    device_of,
    edge_weights,
    flag,
    node_ids,
    of_kind,
    one_of,
    tell,
)
from adahop.graph import Graph
from adahop.messages import energy
from adahop.methods import METHODS, OTHER, Method, make, node_wise
from adahop.policies import POLICIES
from adahop.pyg.align import plain
from adahop.pyg.cache import feature_tables, move_except
from adahop.pyg.hops import AnyData
from adahop.pyg.rows import row_dtype
from adahop.samplers import NeighborSampler, Sampler
from adahop.storage import storage_in
from adahop.typed import Relation, Types

ESTIMATORS = ("plain", "snapshot", "history")
SUBGRAPHS = ("directional", "bidirectional", "induced")
USER_SEEDS = 1 << 32  # seeds of users are below, as numpy takes no others; torch's own first one is random and above

# worker processes are not used, as what one learns does not reach the others
UNUSED = ("num_workers", "persistent_workers", "prefetch_factor", "worker_init_fn", "multiprocessing_context",
          "pin_memory_device", "timeout", "in_order")  # fmt: skip
IGNORED = ("is_sorted", "share_memory", "temporal_strategy", "dataset", "collate_fn")  # PyG drops the last two as well
REFUSED = {
    "time_attr": "temporal sampling is not supported yet",
    "input_time": "temporal sampling is not supported yet",
    "edge_label_index": "link-level loading is not supported yet",
    "edge_label": "link-level loading is not supported yet",
    "neg_sampling": "link-level loading is not supported yet",
    "custom_cls": "only a PyG Data is supported yet",
}


def pyg_options(options: dict[str, Any], owner: Callable[..., None]) -> dict[str, Any]:
    """The options for the sampler, after those of PyG's loader were refused or dropped.

    `owner` is the constructor whose own options a mistyped name is compared with.
    """
    for name, why in REFUSED.items():
        if options.get(name) is not None:
            raise InputError(f"`{name}` must be left out, got {type(options[name]).__name__}: {why}")
    unused = [name for name in UNUSED if options.get(name)]
    if unused:
        tell(f"`{unused[0]}` is not used: batches are drawn in threads, see `prefetch`")
    of_pyg = (*UNUSED, *IGNORED, *REFUSED)
    rest = {k: v for k, v in options.items() if k not in of_pyg}
    builders: tuple[Callable[..., Any], ...] = (owner, node_wise, *(kind.__init__ for kind in POLICIES.values()))
    known = {name for build in builders for name in inspect.signature(build).parameters}
    known = {*known, *of_pyg} - {"self", "graph", "layers", "sizes", "options", "given"}
    for name in rest:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise InputError(f"an option must be one that the loader or its method takes, got '{name}'{hint}")
    return rest


def seed_of(seed: int | None, generator: torch.Generator | None) -> int:
    """The seed of the draws: as given, else that of the generator, else that of `torch.manual_seed`, else 0."""
    if generator is not None:
        of_kind(generator, torch.Generator, "generator")
        if seed is not None:
            raise InputError(f"`generator` must be left out where `seed` is given, got both, with seed {seed}")
        return generator.initial_seed() % (1 << 63)
    if seed is not None:
        return seed
    return torch.initial_seed() if torch.initial_seed() < USER_SEEDS else 0


def data_and_graph(data: object, device: object = None, tables: bool = True) -> tuple[Data | HeteroData, Graph]:
    """A PyG Data or HeteroData to cut batches from, and its graph, whose edge weights are absolute values. Both lie on
    the `device`, but for features of nodes where not `tables`; without one the graph lies on the CPU and the data stays
    where it is.
    """
    if not isinstance(data, Data | HeteroData):
        raise KindError(f"`data` must be a PyG Data or HeteroData, got {type(data).__name__}")
    for store in data.edge_stores:
        if "adj_t" in store and ("edge_index" not in store or isinstance(store["adj_t"], Tensor)):
            raise InputError(
                "`data` must have its edges in `edge_index` alone, got an `adj_t`: leave ToSparseTensor out"
            )
    at = torch.device("cpu") if device is None else device_of(device)
    data, graph = without_graph(_plain_edges(data))
    if device is not None:
        data = move_except(data, at, {} if tables else feature_tables(data))
    if graph is None:
        return data, Graph.from_data(_absolute_weights(data), edge_attr=False).to(at)
    return data, graph.without_edge_features().to(at)


def _plain_edges(data: AnyData) -> AnyData:
    """The data with tensors in place of PyG's EdgeIndex, which a layer takes as well."""
    out = data
    for store in data.edge_stores:
        if isinstance(store.get("edge_index"), EdgeIndex):
            out = copy.copy(data) if out is data else out
            (out if store._key is None else out[store._key]).edge_index = plain(store.edge_index)
    return out


def without_graph(data: AnyData) -> tuple[AnyData, Graph | None]:
    """Data without the Graph that our data sets carry, which must not travel with batches; and that graph."""
    stores = data.to_dict()
    graph = (stores["_global_store"] if isinstance(data, HeteroData) else stores).get("graph")
    if not isinstance(graph, Graph):
        return data, None
    if isinstance(data, HeteroData):
        return HeteroData.from_dict({k: v for k, v in stores.items() if k != "_global_store"}), graph
    kept = {k: v for k, v in stores.items() if k not in ("graph", "edge_index")}
    return Data(edge_index=data.edge_index, **kept), graph


def _absolute_weights(data: Data | HeteroData) -> Data | HeteroData:
    """With absolute edge weights where some are negative: a sign changes no odds."""
    out = data
    for store in data.edge_stores:
        weight = store.get("edge_weight")
        if isinstance(weight, Tensor) and bool((weight < 0).any()):
            out = copy.copy(data) if out is data else out
            (out if store._key is None else out[store._key]).edge_weight = weight.detach().abs()
    return out


def sizes_of(num_neighbors: object, types: Types | None) -> tuple[Any, frozenset[int]]:
    """(sizes, skip) of a sampler: sizes input layer first, by relation where they are a dict, and the layers that draw
    nothing."""
    if types is None:
        hops = fan_outs(num_neighbors)[::-1]
        return [k or 1 for k in hops], frozenset(layer for layer, k in enumerate(hops) if k == 0)
    wrapped = isinstance(num_neighbors, NumNeighbors)
    given = num_neighbors.values if wrapped else num_neighbors  # type: ignore[union-attr,attr-defined]
    if not isinstance(given, dict):
        return sizes_of(given, None)
    rest = num_neighbors.default if wrapped else given.get("default")  # type: ignore[attr-defined]
    each_named = ((key, hops) for key, hops in given.items() if wrapped or key != "default")
    named = {types.number(key, "num_neighbors"): fan_outs(hops)[::-1] for key, hops in each_named}
    if rest is not None:
        named = {r: named.get(r, fan_outs(rest)[::-1]) for r in range(len(types.relations))}
    for r, relation in enumerate(types.relations):
        if r not in named:
            raise InputError(
                f"`num_neighbors` must have a list for every edge type, or one for 'default', got none for {relation}"
            )
    if len({len(hops) for hops in named.values()}) > 1:
        raise InputError(
            f"`num_neighbors` must hold lists of one length, got {sorted({len(hops) for hops in named.values()})}"
        )
    each = [named[r] for r in range(len(types.relations))]
    skip = frozenset(layer for layer, ks in enumerate(zip(*each, strict=True)) if not any(ks))
    return {
        relation: [1 if layer in skip else k for layer, k in enumerate(hops)]
        for relation, hops in zip(types.relations, each, strict=True)
    }, skip


def fan_outs(num_neighbors: object) -> list[int]:
    """PyG's `num_neighbors`: one number per hop from the seeds outwards, -1 for all, 0 for none."""
    given = num_neighbors.values if isinstance(num_neighbors, NumNeighbors) else num_neighbors
    if isinstance(given, dict):
        raise InputError("`num_neighbors` must be a list, as the data has no edge types, got a dict")
    if isinstance(given, Tensor | np.ndarray):
        given = as_tensor(given, "num_neighbors").tolist()
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise InputError(f"`num_neighbors` must be a list with one number per hop, got {num_neighbors!r}")
    if not all(isinstance(k, int | np.integer) and not isinstance(k, bool) and k >= -1 for k in given):
        raise InputError(f"`num_neighbors` must hold whole numbers of at least -1, got {list(given)}")
    return [int(k) for k in given]


def node_sampler(
    data: Data | HeteroData,
    graph: Graph,
    num_neighbors: object,
    method: str,
    seed: int,
    replace: bool | None = None,
    weight_attr: str | None = None,
    given: object = None,
    device: object = None,
    **options: Any,
) -> NeighborSampler:
    """The user's own sampler, or a method's; `num_neighbors` counts from the seeds outwards, `sizes` inwards.

    Where a `device` was asked for, the graph lies there, and a sampler of the user's goes there.
    """
    if given is not None:
        theirs = checked(given, graph)
        return theirs if device is None else theirs.to(graph.device)
    sizes, skip = sizes_of(num_neighbors, graph.types)
    preset = METHODS[one_of(method, METHODS, "method")].on(OTHER)
    if weight_attr is not None:
        preset, method = METHODS["graphsage"], "graphsage"
        options = {
            "policy": "static",
            "weight": _weights(data, weight_attr).to(graph.device),
            "draw": "systematic",
            **options,
        }
    if not is_supported(preset):
        names = [m.name for m in METHODS.values() if is_supported(m.on(OTHER))]
        raise InputError(
            f"`method` must be one of {', '.join(names)} in this loader, got '{method}'; see adahop.Loader"
        )
    if replace is not None:
        flag(replace, "replace")
        draw = str(options.get("draw", preset.options.get("draw", "multinomial")))
        options["draw"] = "multinomial" if replace else ("systematic" if draw == "multinomial" else draw)
    sampler = checked(make(method, graph, sizes, seed=seed, **options), graph).to(graph.device)
    sampler.skip = skip
    return sampler


def _weights(data: Data | HeteroData, name: str) -> Tensor:
    """One weight per edge, relation after relation."""
    stores = data.edge_stores
    of_kind(name, str, "weight_attr")
    for store in stores:
        if name not in store:
            what = f"every relation, {store._key} included" if isinstance(data, HeteroData) else "the data"
            raise InputError(f"`weight_attr` must name an attribute of {what}, got '{name}'")
    each = (("weight" if store._key is None else f"weight[{store._key}]", store) for store in stores)
    return torch.cat([edge_weights(store[name], store.edge_index.shape[1], what) for what, store in each])


def num_neighbors_of(sampler: NeighborSampler) -> list[int] | dict[Relation, list[int]]:
    """`num_neighbors` of a sampler."""
    if sampler.sized.relation is not None:
        each = sampler.sized.relation.clone()
        each[sorted(sampler.skip)] = 0
        return {r: hops.flip(0).tolist() for r, hops in zip(sampler.graph.relations, each.t(), strict=True)}
    return [0 if layer in sampler.skip else k for layer, k in enumerate(sampler.sizes)][::-1]


def is_supported(preset: Method) -> bool:
    """Whether PyG's layers can work with a method: it draws node by node, learns from energies, and has no memory."""
    kind = POLICIES.get(preset.options.get("policy", ""))
    return kind is not None and kind.reads is energy and preset.estimator == "plain"


def checked(sampler: object, graph: Graph) -> NeighborSampler:
    """The sampler, if PyG's models can learn with it over this graph."""
    if not isinstance(sampler, NeighborSampler):
        raise KindError(
            f"`sampler` must be an adahop NeighborSampler, or a torch sampler of positions in `input_nodes`, got "
            f"{type(sampler).__name__}"
        )
    if sampler.reads is not energy:
        reads = sampler.reads.__name__
        raise InputError(
            f"`policy` must learn from the squared norms of messages in PyG models, got one that reads {reads}"
        )
    if (sampler.graph.num_nodes, sampler.graph.num_edges) != (graph.num_nodes, graph.num_edges):
        theirs = f"{sampler.graph.num_nodes} nodes and {sampler.graph.num_edges} edges"
        raise InputError(
            f"`sampler` must be over the graph of the data, {graph.num_nodes} nodes and {graph.num_edges} edges, "
            f"got {theirs}"
        )
    return sampler


def split_samplers(sampler: object, neighbor_sampler: object) -> tuple[object, Iterable[int] | None]:
    """(our sampler, the order of seeds): `sampler` may be one of ours, or as in PyG one of torch's, which gives
    positions.
    """
    if neighbor_sampler is not None:
        ours = getattr(neighbor_sampler, "sampler", neighbor_sampler)  # of an AdaptiveSampler
        if not isinstance(ours, Sampler):
            raise KindError(
                "`neighbor_sampler` must be an adahop NeighborSampler or AdaptiveSampler, got "
                f"{type(neighbor_sampler).__module__}.{type(neighbor_sampler).__name__}; choose a `method` instead"
            )
        if isinstance(sampler, Sampler):
            raise InputError("`neighbor_sampler` must be left out where `sampler` is one of adahop, got both")
        return ours, _order(sampler)
    if sampler is None or isinstance(sampler, Sampler) or not isinstance(sampler, Iterable) or isinstance(sampler, str):
        return sampler, None
    return None, _order(sampler)


def _order(sampler: object) -> Iterable[int] | None:
    if sampler is not None and not (isinstance(sampler, Iterable) and hasattr(sampler, "__len__")):
        raise KindError(
            f"`sampler` must give positions in `input_nodes` and have a length, got {type(sampler).__name__}"
        )
    return sampler


def positions(values: Iterable[int], n: int, what: str) -> Tensor:
    """The positions that a torch sampler gives, of a list of n."""
    try:
        listed = as_tensor(values, what) if isinstance(values, Tensor) else values
        return node_ids([operator.index(i) for i in listed], n, what)
    except TypeError:
        raise KindError(f"`{what}` must give positions in `input_nodes`, got {type(values).__name__}") from None


def inputs_of_type(input_nodes: object, types: Types, input_id: object = None) -> tuple[Tensor, Tensor, str]:
    """(nodes, their ids, their type) of PyG's "type" or ("type", ids or mask); nodes in ids of all types."""
    kind, chosen = input_nodes if isinstance(input_nodes, tuple) and len(input_nodes) == 2 else (input_nodes, None)
    if not isinstance(kind, str):
        raise InputError(
            "`input_nodes` must be a node type, or (node type, ids or a mask), where the data is a HeteroData, got "
            f"{type(input_nodes).__name__}"
        )
    start, end = types.span(kind, "input_nodes")
    nodes, ids = inputs(chosen, end - start, input_id)
    return nodes + start, ids, kind


def inputs(input_nodes: object, n: int, input_id: object = None) -> tuple[Tensor, Tensor]:
    """The nodes, and the `input_id` of each: as in PyG, its position in a mask or in the list, unless given."""
    if isinstance(input_nodes, str) or (
        isinstance(input_nodes, tuple) and len(input_nodes) and isinstance(input_nodes[0], str)
    ):
        raise InputError("`input_nodes` must be ids or a mask, as the data has no node types, got a node type")
    nodes = torch.arange(n) if input_nodes is None else node_ids(input_nodes, n, "input_nodes").cpu()
    masked = getattr(input_nodes, "dtype", None) in (torch.bool, np.dtype(bool))
    if input_id is None:
        return nodes, nodes if masked else torch.arange(nodes.numel())
    ids = as_tensor(input_id, "input_id").cpu()
    if ids.shape != nodes.shape:
        raise InputError(f"`input_id` must have one id per input node, {nodes.numel()} in all, got {tuple(ids.shape)}")
    return nodes, ids


def subgraph_of(kind: object, disjoint: bool, types: Types | None = None) -> str:
    """The kind of subgraph by its name or PyG's SubgraphType."""
    name = one_of(str(getattr(kind, "value", kind)), SUBGRAPHS, "subgraph_type")
    if types is not None and name != "directional":
        raise InputError(f"`subgraph_type` must be directional where the data is a HeteroData, got {name}")
    if name == "induced" and disjoint:
        raise InputError("`disjoint` must be False for induced subgraphs, got True")
    return name


def history_options(
    estimator: str, dtype: torch.dtype | None, folder: str | Path | None, refresh: int | None, batch_size: int
) -> dict[str, Any]:
    """Options of `LayerHistories`: how rows are stored, where, and how many of the oldest are renewed per batch."""
    given = {"history_dtype": dtype, "history_dir": folder, "history_refresh": refresh}
    if estimator != "history":
        for name in (name for name, value in given.items() if value is not None):
            raise InputError(f"`{name}` must be left out unless estimator='history', got {given[name]!r}")
        return {}
    if folder is not None and not isinstance(folder, str | Path):
        raise KindError(f"`history_dir` must be a folder, got {type(folder).__name__}")
    many = batch_size if refresh is None else count(refresh, 0, "history_refresh")
    return {
        "dtype": row_dtype(torch.float32 if dtype is None else dtype),
        "storage": storage_in(folder),
        "refresh": many,
    }


def estimator_of(
    estimator: str | None, method: str, weight_attr: str | None, own: object, types: Types | None = None
) -> str:
    """As given; else a snapshot for the default method, and none where a user chose the odds or the sampler."""
    if types is not None and estimator == "history":
        raise InputError("`estimator` must be plain or snapshot where the data is a HeteroData, got history")
    if estimator is None:
        return "plain" if method != "adahop" or weight_attr is not None or own is not None else "snapshot"
    return one_of(estimator, ESTIMATORS, "estimator")
