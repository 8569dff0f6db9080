"""Readings: the few ways in which a layer can be made to count each drawn edge for the `scale` edges it stands for.

A layer sums its messages, or averages them, or normalises them itself: by softmax, by degrees, by `gcn_norm`. For the
first two a factor on the messages is enough. For the others, that layer's own functions are copied with a `softmax`,
`degree`, `gcn_norm`, ... that knows the scale and the whole graph; nothing outside of the layer is touched.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric import utils
from torch_geometric.nn import Aggregation, MessagePassing
from torch_geometric.nn.conv.gcn_conv import gcn_norm as pyg_gcn_norm

from adahop import ops
from adahop.ops import segment_sum
from adahop.pyg.align import Aligned
from adahop.pyg.whole_graph import HomogeneousGraph, offsets

if TYPE_CHECKING:
    from adahop.pyg.call import Call


class Reading(NamedTuple):
    """How a layer applies the scale: by which of its functions, replaced by ours, and by which factor on its messages.

    factor: "one" (a replaced function has the scale in it), "sum" (scale), "mean" (scale k / n, with k the target's
    messages here and n those in the whole graph), or "none": the layer is left as it is.
    """

    functions: frozenset[str] = frozenset()
    factor: str = "none"
    why: str = ""  # of a layer that is left as it is
    sums_match: bool = True  # whether with all neighbours a batch's sums are the whole graph's, as a memory needs
    estimated: bool = False  # whether degrees are estimated from the batch (learned edge weights)
    linear: bool = False  # whether messages are linear in what nodes pass to `propagate`
    parametric: bool = True  # whether messages depend on the layer's parameters
    teaches: bool = True  # whether odds are learnt from its messages; where not, they stay uniform
    row_argument: str | None = None  # of `propagate`: a message is the source's row of it, times a coefficient

    @property
    def left_alone(self) -> bool:
        return self.factor == "none"

    def __str__(self) -> str:
        if self.left_alone:
            return "left as it is"
        degrees = sorted(self.functions & {"gcn_norm", "degree", "scatter", "get_laplacian"})
        name = "softmax" if "softmax" in self.functions else self.factor.replace("one", "sum")
        return f"{name}, whole-graph degrees" if degrees else name


# --- in place of PyG's functions --------------------------------------------------------------------------------------


def softmax(
    call: Call,
    src: Tensor,
    index: Tensor | None = None,
    ptr: Tensor | None = None,
    num_nodes: int | None = None,
    dim: int = 0,
) -> Tensor:
    """exp(a) scale / sum of exp(a) scale: each drawn edge counts for the edges it stands for."""
    scale = call.scale_of(src.shape[dim])
    if scale is None:
        return utils.softmax(src, index, ptr, num_nodes, dim)
    if dim == 0 and ptr is None and index is not None and src.dim() <= 2:
        out = ops.softmax(src, index, call.batch.n_id.numel() if num_nodes is None else num_nodes, scale.to(src.dtype))
    else:
        shape = [1] * src.dim()
        shape[dim] = -1
        out = utils.softmax(src + scale.clamp(min=1e-30).log().to(src.dtype).view(shape), index, ptr, num_nodes, dim)
    call.alpha = out.detach()
    if call.used is None:  # outside of `propagate`, which is passed it
        call.add_scaled(out, fixed=False)
    return out


def degree(call: Call, index: Tensor, num_nodes: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """That of the whole graph: the edges of a node that the batch does not show are added."""
    out = utils.degree(index, num_nodes, dtype)
    row, n = call.row_of(index), out.numel()
    if row is None or n > call.batch.ids(row).numel():
        return out
    edges = call.edge_index
    loop = call.batch.whole_graph.is_loop(edges)
    inward, loops = call.sums(None, n, row)
    missing = inward * call.share - torch.bincount(edges[row][~loop], minlength=n)[:n]
    if index.numel() >= edges.shape[1]:  # the data's self-loops are counted
        missing = missing + loops - torch.bincount(edges[row][loop], minlength=n)[:n]
    return out + missing.to(out.dtype)


def gcn_norm(
    call: Call,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = "source_to_target",
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """scale a_ij (d_i d_j)^(-1/2) with d of the whole graph, as nodes of the last hop have no edges in the batch."""
    aligned = call.align(edge_index)
    if aligned is None or flow != "source_to_target":
        return pyg_gcn_norm(edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype)
    fill, name = 2.0 if improved and edge_weight is not None else 1.0, call.attribute(edge_weight)
    column = edge_weight is not None and edge_weight.dim() == 2 and edge_weight.shape[1] == 1
    edge_weight = edge_weight[:, 0] if column and edge_weight is not None else edge_weight
    n = call.batch.n_id.numel() if num_nodes is None else num_nodes
    form = edge_weight is None, column
    key = ("gcn_norm", name, fill, add_self_loops, n, dtype, form, *aligned[:3], call.device)
    shared = add_self_loops and aligned.unchanged  # the same for all layers
    shared = shared and name != call.LEARNED and (edge_weight is None or not edge_weight.requires_grad)
    if shared and key in call.batch.cache:
        edge_index, aligned, out, call.target_factor = call.batch.cache[key]
        call.alignments.append((edge_index, aligned))
        call.add_scaled(out, fixed=True)
        return edge_index, out
    inward, loops = call.degrees(name, edge_weight, aligned, edge_index, n)
    if add_self_loops:
        total = inward + call.loops(name, loops, n).nan_to_num(fill)
        edge_index, edge_weight = utils.add_remaining_self_loops(edge_index, edge_weight, fill, n)
        aligned = call.align(edge_index)
        assert aligned is not None
    else:
        total = inward + loops
    value = _cast(aligned.take(call.scale), dtype if edge_weight is None else edge_weight.dtype)
    value = value if edge_weight is None else value * edge_weight
    root = total.to(torch.promote_types(total.dtype, value.dtype)).rsqrt().masked_fill(total <= 0, 0.0).to(value.dtype)
    call.target_factor = root.detach()
    out = root[edge_index[0]] * value * root[edge_index[1]]
    out = out.unsqueeze(1) if column else out
    call.add_scaled(out, fixed=name != call.LEARNED)
    if shared:
        call.batch.cache[key] = edge_index, aligned, out, call.target_factor
    return edge_index, out


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value if dtype is None else value.to(dtype)


def scatter(
    call: Call, src: Tensor, index: Tensor, dim: int = 0, dim_size: int | None = None, reduce: str = "sum"
) -> Tensor:
    """A sum of edge weights per node is a degree: that of the whole graph. Other sums stay as they are."""
    flat = src.dim() == 1 and reduce in ("sum", "add") and src.numel() == index.numel()
    row = call.row_of(index) if flat else None
    aligned = call.align(call.edge_index) if row is not None and src.numel() == call.edge_index.shape[1] else None
    out = utils.scatter(src, index, dim, dim_size, reduce)
    n = out.numel()
    if aligned is None or row is None or n > call.batch.n_id.numel():
        return out
    name = None if bool((src == 1).all()) else call.attribute(src)
    if name == call.LEARNED and row == 0:
        return out
    inward, loops = call.degrees(name, src, aligned, call.edge_index, n) if row else call.sums(name, n, 0)
    return (inward + loops).to(out.dtype)


def get_laplacian(
    call: Call,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    normalization: str | None = None,
    dtype: torch.dtype | None = None,
    num_nodes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """With the degrees of the whole graph; PyG takes those by source."""
    name = call.attribute(edge_weight)
    edge_index, edge_weight = utils.remove_self_loops(edge_index, edge_weight)
    aligned = call.align(edge_index)
    if aligned is None:
        return utils.get_laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
    n = call.batch.n_id.numel() if num_nodes is None else num_nodes
    if name == call.LEARNED:
        call.estimated = True
        total = segment_sum(edge_weight, edge_index[0], n)
    else:
        total = call.sums(name, n, 0)[0] * call.share
    weight = torch.ones(edge_index.shape[1], device=edge_index.device) if edge_weight is None else edge_weight
    weight, total = _cast(weight, dtype), _cast(total, dtype)
    if normalization is None:
        both, _ = utils.add_self_loops(edge_index, num_nodes=n)
        return both, torch.cat([-weight, total])
    if normalization == "sym":
        root = total.rsqrt().masked_fill(total <= 0, 0.0)
        weight = root[edge_index[0]] * weight * root[edge_index[1]]
    else:
        weight = (1.0 / total).masked_fill(total <= 0, 0.0)[edge_index[0]] * weight
    return utils.add_self_loops(edge_index, -weight, fill_value=1.0, num_nodes=n)


def add_self_loops(
    call: Call, edge_index: Tensor, edge_attr: Any = None, fill_value: Any = None, num_nodes: Any = None
) -> tuple[Tensor, Any]:
    """A self-loop whose attribute is the mean (or sum) of the node's edges: of all that the drawn ones stand for."""
    edges, attr = utils.add_self_loops(edge_index, edge_attr, fill_value, num_nodes)
    aligned = call.align(edge_index) if isinstance(attr, Tensor) and fill_value in ("mean", "add", "sum") else None
    if aligned is None:
        return edges, attr
    m, n = edge_index.shape[1], edges.shape[1] - edge_index.shape[1]
    scale = aligned.take(call.scale).to(attr.dtype)
    total = segment_sum((attr[:m] * scale.view(-1, *[1] * (attr.dim() - 1))).flatten(1), edge_index[1], n)
    if fill_value == "mean":
        total = total / segment_sum(scale, edge_index[1], n).clamp(min=1e-30).unsqueeze(1)
    return edges, torch.cat([attr[:m], total.view(n, *attr.shape[1:])])


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    utils.softmax: softmax,
    utils.degree: degree,
    utils.scatter: scatter,
    pyg_gcn_norm: gcn_norm,
    utils.get_laplacian: get_laplacian,
    utils.add_self_loops: add_self_loops,
}


# --- copies -----------------------------------------------------------------------------------------------------------


class _ModuleProxy:
    """A module of PyG in which some functions are replaced by ours."""

    def __init__(self, module: types.ModuleType, swap: Callable[[Any], Any]):
        self._module, self._swap = module, swap

    def __getattr__(self, name: str) -> Any:
        return self._swap(getattr(self._module, name))


class Copies:
    """Copies of a layer's own functions, in which PyG's `softmax`, `gcn_norm`, ... are those above.

    `current()` is the call under way. A copy differs from the original in its global names alone; nothing outside of
    the layer is touched.
    """

    def __init__(self, conv: MessagePassing, current: Callable[[], Any]):
        self.current = current
        self.names: set[str] = set()  # of the functions that are replaced
        self.methods: list[tuple[nn.Module, str, Callable[..., Any]]] = []
        for module in (conv, *(m for m in (conv.aggr_module,) if m is not None)):
            for name, function in _functions(type(module)):
                copy = self._copy(function, 2)
                if copy is not function:
                    self.methods.append((module, name, types.MethodType(copy, module)))

    def _swap(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return _ModuleProxy(value, self._swap)
        ours = REPLACEMENTS.get(value) if isinstance(value, types.FunctionType) else None
        if ours is None:
            return value
        self.names.add(ours.__name__)

        def function(*args: Any, **kwargs: Any) -> Any:
            call = self.current()
            if call is None or ours.__name__ not in call.reading.functions:
                return value(*args, **kwargs)
            call.functions_called.add(ours.__name__)
            return ours(call, *args, **kwargs)

        return function

    def _copy(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        """The function with ours in its globals, and in those of helpers of the same file; the function itself where
        it calls none of them.
        """
        names, replaced = set(_names(function.__code__)), {}
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType) and value.__name__.split(".")[0] == "torch_geometric":
                if _reaches(value, names, 3):
                    self.names |= {ours.__name__ for f, ours in REPLACEMENTS.items() if f.__name__ in names}
                    replaced[name] = _ModuleProxy(value, self._swap)
            elif isinstance(value, types.FunctionType):
                other = self._swap(value)
                if other is value and depth and value.__module__ == function.__module__:
                    other = self._copy(value, depth - 1)
                if other is not value:
                    replaced[name] = other
        if not replaced:
            return function
        copy = types.FunctionType(
            function.__code__, {**function.__globals__, **replaced}, function.__name__, function.__defaults__,
            function.__closure__,
        )  # fmt: skip
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy


def _functions(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions of a class, as an instance finds them; those of the bases of all layers are left out."""
    seen = set()
    for base in kind.__mro__:
        if base in (MessagePassing, Aggregation, nn.Module, object):
            continue
        for name, value in vars(base).items():
            if isinstance(value, types.FunctionType) and name not in seen and name not in ("__init__", "propagate"):
                seen.add(name)
                yield name, value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _reaches(module: types.ModuleType, names: set[str], depth: int) -> bool:
    """Whether one of the functions that are replaced is called by way of a module's name."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, types.FunctionType) and value in REPLACEMENTS:
            return True
        if depth and isinstance(value, types.ModuleType) and _reaches(value, names, depth - 1):
            return True
    return False


def shares(call: Call, aligned: Aligned, used: Tensor) -> Tensor:
    """[nodes] k / n of each target: its messages here over those of the whole graph.

    n is known where the target's drawn edges are all in use, or all of a relation of typed data; of another part, the
    sum of scale stands in for it.
    """
    row = used[1]
    n = int(call.batch.n_id.numel())
    here = torch.bincount(row, minlength=n).to(call.scale.dtype)
    if aligned.share < 1.0:
        known = _relation_counts(call, aligned, used, n)
        total = segment_sum(aligned.take(call.scale), row, n) if known is None else known.to(here.dtype)
    else:
        loop = call.batch.whole_graph.is_loop(used)
        total = call.sums(None, n)[0].to(here.dtype) + torch.bincount(row[loop], minlength=n)
    return here / total.clamp(min=1e-30)


def _relation_counts(call: Call, aligned: Aligned, used: Tensor, nodes: int) -> Tensor | None:
    """[nodes] edges of one relation in the whole graph, where those in use are all of one that were drawn; typed nodes
    lie type after type.
    """
    typed, whole_graph = call.batch.typed, call.batch.whole_graph
    spans = {} if typed is None or aligned.columns is not None else typed.span
    columns = slice(aligned.start, aligned.start + aligned.num_aligned)
    relation = next((r for r, span in spans.items() if span == columns), None)
    if typed is None or relation is None:
        return None
    assert isinstance(whole_graph, HomogeneousGraph)
    start = offsets({kind: ids.numel() for kind, ids in typed.n_id.items()})[relation[2]]
    ids = typed.n_id[relation[2]]
    total = torch.bincount(used[1, used[0] == used[1]], minlength=nodes).float()
    inward = whole_graph.relations[relation].sums(None)[0]
    total[start : start + ids.numel()] += inward[ids.to(inward.device)].to(total.device)
    return total
