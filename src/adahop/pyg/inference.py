"""inference(model, data): every neighbour of every node, layer by layer, without all messages in memory at once."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import MessagePassing

from adahop.checks import InputError, KindError, count, device_of, fields
from adahop.graph import Graph
from adahop.pyg import batches
from adahop.pyg.align import plain
from adahop.pyg.arguments import Kwargs, eval_mode, is_per_edge, node_arguments, node_sides
from adahop.pyg.call import Call
from adahop.pyg.root import Root, parameter_names
from adahop.pyg.wrap import propagate_of, unwrapped
from adahop.typed import of_hetero

KNOWN = ("x", "n_id", "edge_index", "edge_weight", "edge_attr")
ALWAYS = ("x", "n_id", "edge_index", "edge_type", "node_type")  # given from the data even where training computed them


@torch.no_grad()
def inference(
    model: nn.Module, data: Data | HeteroData, batch_size: int = 4096, device: Any = None, **arguments: Any
) -> Any:
    """The model's output for all nodes, as of `model(data.x, data.edge_index)` in evaluation mode; of a HeteroData,
    as of `model(data.x_dict, data.edge_index_dict)`.

    Each layer runs over the whole graph before the next, its messages for `batch_size` targets at a time, so memory
    is that of the hidden layers (and of attention's one number per edge and head), not of the messages. The model is
    any stack of PyG layers whose forward takes x and edge_index: PyG's own models, torch_geometric.nn.Sequential,
    your own modules; or one of adahop.models. A model of learned embeddings may take `n_id` in place of x. What it
    takes besides is given as it was in training, if it has been called on a batch of our loaders. Before that it gets
    the data's edge_weight and edge_attr where it insists on them, and an edge_attr where its layers were built for
    one (`edge_dim`): that the data has one changes nothing by itself. `arguments` are passed as they are. Of a
    HeteroData, a model that takes `edge_type` (RGCNConv) gets the tensors of `data.to_homogeneous()`, and one that
    takes the data itself finds an `n_id` in every type.

    >>> from torch_geometric.data import Data; from torch_geometric.nn import GraphSAGE
    >>> data = Data(x=torch.ones(3, 4), edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]))
    >>> inference(GraphSAGE(4, 8, 2, 5), data).shape
    torch.Size([3, 5])
    """
    if isinstance(data, HeteroData):
        of_hetero(data)
    else:
        fields(data, ("edge_index",), "data")
    count(batch_size, 1, "batch_size")
    if device is not None:
        device_of(device)
    if isinstance(getattr(model, "graph", None), tuple) and hasattr(model, "inference"):  # of adahop.models
        graph = (
            data.graph if isinstance(getattr(data, "graph", None), Graph) else Graph.from_data(data, edge_attr=False)
        )
        ours: Any = model
        return ours.inference(graph.normalized(*ours.graph), data.x)
    if not isinstance(model, nn.Module) or not any(isinstance(m, MessagePassing) for m in model.modules()):
        raise KindError(f"`model` must be stacked of PyG layers that pass messages, got {type(model).__name__}")
    if device is None:
        edges = next(store.edge_index for store in data.edge_stores)
        device = next((p.device for p in model.parameters()), edges.device)
    model = unwrapped(model)
    with eval_mode(model), _in_parts(model, batch_size):
        model.eval()  # a method that the user may have overridden
        return model(**arguments_of(model, data, torch.device(device), arguments))


def arguments_of(model: nn.Module, data: Data | HeteroData, device: torch.device, more: Kwargs) -> dict[str, Any]:
    """The model's arguments by name; an edge weight it insists on is 1 where the data has none."""
    params = [
        p
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    names = parameter_names(model) or [p.name for p in params]
    required = parameter_names(model) or [p.name for p in params if p.default is p.empty]
    root = Root.find(model)
    seen = {} if root is None or root.arguments is None else root.arguments
    usual: tuple[str, ...] = KNOWN
    if isinstance(data, HeteroData) and "edge_type" in names:
        data, usual = _joined(data), (*KNOWN, "edge_type", "node_type")
    else:
        data = _numbered(data)
    called = {n: data if attr == "" else value_of(data, attr) for n, attr in seen.items() if attr is not None}
    for name, attr in seen.items():
        if attr is None and name.removesuffix("_dict") not in ALWAYS and name not in more:
            raise InputError(f"`{name}` must be given by name, as training computed it and the data does not have it")
    for name, keys in () if root is None else root.argument_keys.items():
        called[name] = {k: v for k, v in (called[name] or {}).items() if k in keys}
    known = [name for name in names if name.removesuffix("_dict") in usual]
    unknown = [name for name in required if name not in known and name not in more and called.get(name) is None]
    usual_names = {name.removesuffix("_dict") for name in known}
    given_both = "edge_index" in usual_names and bool({"x", "n_id"} & usual_names)
    if unknown or not ("" in seen.values() or given_both or "edge_index" in seen.values()):
        raise InputError(
            f"`model` must take x (or n_id) and edge_index, and what else it needs must be given by name, got "
            f"{type(model).__name__} with ({', '.join(required)})"
        )
    wanted = [name for name in known if name in required or name.removesuffix("_dict") in ALWAYS]
    if not seen and any(getattr(m, "edge_dim", None) for m in model.modules()):
        wanted += [name for name in known if name.startswith("edge_attr")]
    given = {name: value_of(data, name) for name in wanted} | called | more
    if given.get("edge_weight") is None and "edge_weight" in required and isinstance(data, Data):
        given["edge_weight"] = torch.ones(data.edge_index.shape[1])
    missing = [name for name in required if given.get(name) is None]
    if missing:
        raise InputError(f"`data` must have `{missing[0]}`, which the model takes, got none")
    moved = {k: _moved(v, device) for k, v in given.items()}
    return {name: value for name, value in moved.items() if value is not None}


def value_of(data: Data | HeteroData, name: str) -> Any:
    """An attribute of the data; of typed data, by type or relation. A model may call it `name_dict`."""
    if not isinstance(data, HeteroData):
        return getattr(data, name, None)
    if name in (named := batches.attributes(data)):
        return named[name]
    name = name.removesuffix("_dict")
    return {store._key: store[name] for store in (*data.node_stores, *data.edge_stores) if name in store} or None


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return {k: _moved(v, device) for k, v in value.items()}
    return plain(value).to(device) if isinstance(value, Tensor | Data | HeteroData) else value


def _joined(data: HeteroData) -> Data:
    """All types as one, where their features are of one width."""
    same = data.to_homogeneous()
    if getattr(same, "x", None) is None:
        raise InputError("`data` must have an `x` of one width in every type for a model of joint edges, got others")
    return same


def _numbered(data: Data | HeteroData) -> Data | HeteroData:
    """The data with `n_id`, of typed data in every type, as batches have it."""
    data = copy.copy(data)
    for store in data.node_stores:
        if "n_id" not in store:
            store.n_id = torch.arange(int(store.num_nodes or 0))
    return data


@contextlib.contextmanager
def _in_parts(model: nn.Module, size: int) -> Iterator[None]:
    """Within, layers pass their messages for `size` targets at a time."""
    layers = [m for m in model.modules() if isinstance(m, MessagePassing) and m.flow == "source_to_target"]
    own = [m.__dict__.get("propagate") for m in layers]  # a layer with decomposed_layers has one
    for m in layers:
        m.__dict__["propagate"] = _parted(m, m.propagate, size)
    try:
        yield
    finally:
        for m, previous in zip(layers, own, strict=True):
            del m.__dict__["propagate"]
            if previous is not None:
                m.__dict__["propagate"] = previous


def _parted(conv: MessagePassing, original: Callable[..., Tensor], size: int) -> Callable[..., Tensor]:
    sides, side = node_arguments(conv), node_sides(conv)

    def propagate(edge_index: Any, size_: Any = None, **kwargs: Any) -> Tensor:
        given = kwargs.pop("size", size_)
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            return original(edge_index, size=given, **kwargs)  # a sparse product makes no messages
        if conv.decomposed_layers > 1:
            return original(edge_index, size=given, **kwargs)  # it takes no pairs of sources and targets
        n_src, n_dst = _sizes(given, kwargs, side)
        ours = propagate_of(conv)
        if n_dst <= size or (ours is not None and isinstance(ours.call, Call)):  # a scale given by hand: in one piece
            return original(edge_index, size=given, **kwargs)
        order = edge_index[1].argsort(stable=True)
        dst = edge_index[1, order].contiguous()
        out = []
        for start in range(0, n_dst, size):
            stop = min(start + size, n_dst)
            lo, hi = torch.searchsorted(dst, dst.new_tensor([start, stop])).tolist()
            at = order[lo:hi]
            part = {k: _cut(v, sides.get(k), at, start, stop, len(order)) for k, v in kwargs.items()}
            local = torch.stack([edge_index[0, at], edge_index[1, at] - start])
            out.append(original(local, size=(n_src, stop - start), **part))
        return torch.cat(out)

    return propagate


def _sizes(given: Any, kwargs: Kwargs, side: dict[str, int]) -> tuple[int, int]:
    """Sources and targets of a layer, from what it passes on."""
    many = list(given if given is not None else (None, None))
    for name in side.keys() & kwargs.keys():
        value = kwargs[name]
        rows = enumerate(value) if isinstance(value, tuple | list) else ((side[name], value),)
        for row, part in rows:
            many[row] = part.shape[0] if many[row] is None and isinstance(part, Tensor) else many[row]
    src, dst = many
    src = dst if src is None else src
    return int(src or 0), int(src or 0) if dst is None else int(dst)


def _cut(value: Any, sides: set[str] | None, at: Tensor, start: int, stop: int, edges: int) -> Any:
    """A layer's argument for targets start .. stop and the edges `at`."""
    if sides and isinstance(value, tuple | list):
        return value[0], None if value[1] is None else value[1][start:stop]
    if sides and isinstance(value, Tensor):
        return value if sides == {"j"} else value[start:stop] if sides == {"i"} else (value, value[start:stop])
    return value[at] if is_per_edge(value, edges) else value
