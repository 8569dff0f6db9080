"""scaled(conv): one object in a PyG layer, which finds the batch that the layer is given and runs the layer on it."""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import is_sparse

from adahop.checks import InputError, KindError, one_of
from adahop.pyg import batches
from adahop.pyg.align import align, is_edge_index, plain
from adahop.pyg.arguments import Kwargs, tensors_in
from adahop.pyg.batches import DrawnBatch, Found
from adahop.pyg.call import Call, sparse_edges, strided
from adahop.pyg.readings import Copies, Reading
from adahop.pyg.whole_graph import ScaleOnlyGraph
from adahop.typed import Relation

if TYPE_CHECKING:
    from adahop.pyg.memory import ForwardRecorder, Memory

SUMS_AS_DRAWN = {"auto": None, "whole": False, "drawn": True}  # by the option `sums`
METHODS = ("propagate", "edge_updater", "aggregate")  # of a layer, replaced by those of a call


class AllRelations:
    """One forward of a layer that takes all relations of typed data as dictionaries: each `propagate` is over one of
    them, or over all of them joined, and `call_for` gives the call for its edges.
    """

    def __init__(self, layer: Propagate, reading: Reading, call_for: Callable[[Tensor], Call | ForwardRecorder | None]):
        self.layer, self.reading, self.call_for = layer, reading, call_for
        self.functions_called: set[str] = set()
        self.estimated = False
        self.edge_index: Tensor | None = None  # of the call under way

    def _call(self, edge_index: Any) -> Any:
        edge_index = strided(edge_index)
        if self.edge_index is not edge_index:
            self.edge_index, self.layer.call = edge_index, self.call_for(edge_index)
            if isinstance(self.layer.call, Call):
                self.layer.call.functions_called = self.functions_called
        return self.layer.call

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        call = self._call(edge_index)
        return (call.edge_updater if call else self.layer.original("edge_updater"))(edge_index, size=size, **kwargs)

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        call = self._call(edge_index)
        try:
            return (call.propagate if call else self.layer.original("propagate"))(edge_index, size=size, **kwargs)
        finally:
            if isinstance(call, Call):
                call.control = None  # which refers to the call
            self.edge_index = self.layer.call = None

    def aggregate(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call: Any = self.layer.call
        return (call.aggregate if call else self.layer.original("aggregate"))(inputs, *args, **kwargs)


def calls_on_batch(
    layer: Propagate, edges: dict[Relation, Tensor], values: tuple[Any, ...]
) -> Callable[[Tensor], Call | None]:
    """The call of each `propagate` of a layer that was given these dictionaries of a batch."""
    nodes = [v for v in values if isinstance(v, dict) and not any(isinstance(k, tuple) for k in v)]
    rows = {kind: x.shape[0] for v in nodes[:1] for kind, x in v.items() if isinstance(x, Tensor)}
    inputs = tuple(x for v in nodes for x in v.values())

    def call_for(edge_index: Tensor) -> Call | None:
        if not edge_index.numel():
            return None
        found = next((batches.find([e]) for e in edges.values() if e is edge_index), None)
        if found is not None:
            call = Call(layer, found)
        elif (stacked := batches.stack(edges, rows)) is not None and torch.equal(edge_index, stacked[0].edge_index):
            call = Call(layer, stacked[0])
            call.alignments.append((edge_index, stacked[1]))
        else:
            layer.uses_other_edges = True
            return None
        apply_memory(call, inputs, {})
        return call

    return call_for


def apply_memory(call: Call, args: tuple, kwargs: Kwargs) -> None:
    """The call's sums get a control variate, where the batch's loader has one for the layer."""
    ref = call.batch.root.memory
    memory = None if ref is None else ref()
    if memory is not None:
        call.control = memory.control_for(call, args, kwargs)


def relation_edges(values: tuple[Any, ...]) -> dict[Relation, Tensor] | None:
    """The edges of all relations, where a layer was given them as a dictionary."""
    for value in values:
        if isinstance(value, dict) and value and all(isinstance(k, tuple) and len(k) == 3 for k in value):
            edges = {k: strided(v) for k, v in value.items()}
            if all(is_edge_index(e) for e in edges.values()):
                return edges
    return None


class Propagate:
    """The one object of ours in a PyG layer; it stands where the layer's `forward` is found.

    When the layer is given tensors of a batch that a loader of ours handed out, each edge counts for the `scale` edges
    it stands for, by the reading that was found to be right for this layer; the energies of its messages are recorded,
    if a sampler learns from them; and the snapshot or history is applied, if there is one. Given other tensors, the
    layer does what it did before. Copies and saved models carry this object, and nothing of data, batches or snapshots.
    """

    def __init__(self, conv: MessagePassing, sums: str = "auto"):
        self.conv = conv
        self.sums_as_drawn = SUMS_AS_DRAWN[sums]  # whether plain sums keep the size of the drawn; None: not decided
        self.reading: Reading | None = None  # found at the first batch
        self._reset()

    def _reset(self) -> None:
        self.call: Any = None  # the forward under way: a Call, an AllRelations or a ForwardRecorder
        self.memory_ref: weakref.ref[Memory] | None = None
        self.uses_other_edges = False  # whether it passed messages over other edges than those of the batch
        self._copies: Copies | None = None
        self._originals: dict[str, Any] = {}  # methods to call in place of the class's

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("conv", "sums_as_drawn", "reading")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original_forward)

    @property
    def original_forward(self) -> Callable[..., Any]:
        return types.MethodType(type(self.conv).forward, self.conv)

    @property
    def memory(self) -> Memory | None:
        return None if self.memory_ref is None else self.memory_ref()

    @property
    def reduces_sums(self) -> bool:
        """Whether its sums are reduced to the size of the drawn."""
        return bool(self.sums_as_drawn) and self.reading is not None and self.reading.factor == "sum"

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="adahop finds a layer's batch by the memory of its tensors, outside of compiled code: "
        "pass torch.compile(model) without fullgraph=True"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        edge_weight = None
        if "edge_weight" in kwargs and "edge_weight" not in inspect.signature(self.original_forward).parameters:
            edge_weight = kwargs.pop("edge_weight")
        if self.conv.explain:
            return self.original_forward(*args, **kwargs)
        args, kwargs = tuple(plain(a) for a in args), {k: plain(v) for k, v in kwargs.items()}
        values = (*args, *kwargs.values())
        edges = relation_edges(values)
        if edges is not None:
            return self._over_relations(edges, args, kwargs)
        found = batches.find(values) or found_from_last(values)
        if found is None and edge_weight is not None:
            found = found_from_weight(values, edge_weight)
        if found is None:
            memory = self.memory
            if memory is not None and not self.conv.training:
                return memory.record_forward(self, args, kwargs)
            return self.original_forward(*args, **kwargs)
        if not found.batch.directional and edge_weight is None:
            return self.original_forward(*args, **kwargs)
        if edge_weight is not None:
            found = with_edge_weight(found, edge_weight)
        args, kwargs = self._without_sparse(args, kwargs)
        if self.reading is None:
            self._find_reading(found, args, kwargs)
        return self._on_batch(found, args, kwargs)

    def _over_relations(self, edges: dict[Relation, Tensor], args: tuple, kwargs: Kwargs) -> Any:
        """A forward of a layer that takes all relations as dictionaries."""
        found = batches.find(edges.values())
        if found is None or found.batch.root.typed is None:
            memory = self.memory
            if memory is None or self.conv.training:
                return self.original_forward(*args, **kwargs)
            return self.run_relations(AllRelations(self, Reading(), memory.recorders(self, edges)), args, kwargs)
        if not found.batch.directional:
            return self.original_forward(*args, **kwargs)
        if self.reading is None:
            self._find_reading(found, args, kwargs)
        assert self.reading is not None
        found.batch.root.cache["seen"] = True
        calls = calls_on_batch(self, edges, (*args, *kwargs.values()))
        return self.run_relations(AllRelations(self, self.reading, calls), args, kwargs)

    def run_relations(self, call: AllRelations, args: tuple, kwargs: Kwargs) -> Any:
        with self.installed(call):
            forward, self.call = self.forward, None
            return forward(*args, **kwargs)

    def _on_batch(self, found: Found, args: tuple, kwargs: Kwargs) -> Any:
        found.batch.root.cache["seen"] = True
        call = Call(self, found)
        for t in (*args, *kwargs.values()) if found.columns is None else ():
            if is_edge_index(t) and call.align(t) is not None:
                batches.alias(t, found)  # the next layer finds the batch by them
        args, kwargs = self._without_scale(call, args, kwargs)
        call.decide_sum_size((*args, *kwargs.values()))
        apply_memory(call, args, kwargs)
        try:
            with self.installed(call):
                return self.forward(*args, **kwargs)
        finally:
            call.control = None  # which refers to the call: a cycle would keep the batch until it is searched for

    @contextlib.contextmanager
    def installed(self, call: Call | AllRelations | ForwardRecorder) -> Iterator[None]:
        """Within, the layer's methods are those of the call."""
        conv = self.conv.__dict__
        places: list[tuple[dict[str, Any], str, Any]] = [(conv, name, getattr(call, name)) for name in METHODS]
        self._originals = {name: conv[name] for name in METHODS if name in conv}
        for module, name, copy in self.copies.methods if call.reading.functions else ():
            if module is self.conv and name == "aggregate":
                self._originals[name] = copy  # which ours calls
            elif module is not self.conv or name != "forward":
                places.append((module.__dict__, name, copy))
        previous = [(where, name, where.get(name, self)) for where, name, _ in places]
        outer, self.call = self.call, call
        for where, name, value in places:
            where[name] = value
        try:
            yield
        finally:
            self.call = outer
            for where, name, value in previous:
                if value is self:
                    where.pop(name, None)
                else:
                    where[name] = value

    def propagate_by(self, aggregate: Callable[..., Tensor], edge_index: Tensor, size: Any, kwargs: Kwargs) -> Tensor:
        """Within a call: the layer's `propagate`, with another `aggregate`."""
        conv = self.conv.__dict__
        conv["aggregate"], installed = aggregate, conv["aggregate"]
        try:
            return self.original("propagate")(edge_index, size=size, **kwargs)
        finally:
            conv["aggregate"] = installed

    def original(self, name: str) -> Callable[..., Any]:
        """The layer's method as it is without ours."""
        found = self._originals.get(name)
        return types.MethodType(getattr(type(self.conv), name), self.conv) if found is None else found

    @property
    def copies(self) -> Copies:
        if self._copies is None:
            self._copies = Copies(self.conv, lambda: self.call)
        return self._copies

    @property
    def forward(self) -> Callable[..., Any]:
        """The layer's forward, with the functions that the reading of the call under way replaces."""
        if self.call is not None and self.call.reading.functions:
            for module, name, copy in self.copies.methods:
                if module is self.conv and name == "forward":
                    return copy
        return self.original_forward

    def _without_sparse(self, args: tuple, kwargs: Kwargs) -> tuple[tuple, dict]:
        """A sparse matrix would be multiplied in one piece, without messages: the layer gets its edges instead."""
        if not any(is_sparse(a) for a in (*args, *kwargs.values())):
            return args, kwargs
        names = list(inspect.signature(self.original_forward).parameters)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, value in list(named.items()):
            if is_sparse(value):
                named[name], weight = sparse_edges(value)
                if "edge_weight" in names and named.get("edge_weight") is None and weight is not None:
                    named["edge_weight"] = weight
        return (), named

    def _without_scale(self, call: Call, args: tuple, kwargs: Kwargs) -> tuple[tuple, dict]:
        """A layer that was passed the batch's scale as its edge weight gets ones: the call scales."""
        edges = [aligned for t in (*args, *kwargs.values()) if is_edge_index(t) and (aligned := call.align(t))]

        def ones(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() != 1 or not value.is_floating_point() or not value.numel():
                return value
            known = batches.data_edge_attribute(call.batch, value) is not None
            if known or not any(_is_scale(value, aligned.take(call.scale)) for aligned in edges):
                return value
            call.unit_weights.append(torch.ones_like(value))
            return call.unit_weights[-1]

        return tuple(ones(a) for a in args), {k: ones(v) for k, v in kwargs.items()}

    def _find_reading(self, found: Found, args: tuple, kwargs: Kwargs) -> None:
        """Find the reading of this layer, by trying."""
        from adahop.pyg.probe import reading_of

        names = self.copies.names
        if found.batch.whole_graph.bipartite:  # a degree on both sides is of one type
            names = names - {"gcn_norm", "get_laplacian"}
        self.reading = reading_of(self.conv, names, args, kwargs, found)


# --- batches that no tensor of the layer's input belongs to -----------------------------------------------------------


def found_from_weight(values: tuple, scale: Tensor) -> Found:
    """A batch made from a scale that the user gave as `edge_weight` of a layer that takes none."""
    edge_index = next((t for t in values if is_edge_index(t)), None)
    if edge_index is None or scale.numel() != edge_index.shape[1]:
        raise InputError("`edge_weight` must hold one number per edge of `edge_index`")
    x = next(t for t in tensors_in(values) if t is not edge_index)
    n = max(x.shape[0], int(edge_index.max()) + 1 if edge_index.numel() else 0)
    graph = ScaleOnlyGraph(edge_index, scale, n)
    batch = DrawnBatch(torch.arange(n), torch.arange(scale.numel()), scale.view(-1), graph, blocks=[])
    return Found(batch, edge_index, slice(0, edge_index.shape[1]))


def found_from_last(values: tuple) -> Found | None:
    """The batch found last, for edges that are some of its own: a model may drop edges before each layer."""
    batch = batches.last_found()
    edges = next((v for v in values if is_edge_index(v)), None)
    drawn = None if batch is None or edges is None else batches.edges_in_use(batch)
    if batch is None or edges is None or drawn is None or drawn.device != edges.device:
        return None
    n = batch.n_id.numel()
    rows = [t.shape[0] for t in tensors_in(values) if t.dim() and t.is_floating_point()]
    if edges.shape[1] > drawn.shape[1] + n or not rows or max(rows[:2]) > n or edges.shape[1] == 0:
        return None
    aligned = align(drawn, edges, nodes=n)
    if aligned is None or (aligned.columns is not None and not bool((aligned.columns >= 0).any())):
        return None
    return Found(batch, drawn, None)


def with_edge_weight(found: Found, weight: Tensor) -> Found:
    """The batch with an edge weight in its scale, for a layer that takes none; the batch's own scale is in it already.

    An edge of weight w then counts for w edges, in the batch as in the whole graph.
    """
    batch, graph = found.batch, found.batch.whole_graph
    name, columns = batches.data_edge_attribute(batch, weight), found.columns or slice(0, batch.scale.numel())
    if graph.given_by_hand or (name is None and _is_scale(weight, batch.scale[columns])):
        return found
    scale = batch.scale.clone()
    scale[columns] = scale[columns] * weight.detach().view(-1).to(scale)
    return found._replace(batch=replace(batch, scale=scale, multiplicity=name, cache={}, _moved={}))


def _is_scale(weight: Tensor, scale: Tensor) -> bool:
    """Whether a weight that a layer was passed is the scale of the edges."""
    return weight.shape == scale.shape and torch.equal(weight.detach(), scale.to(weight))


# --- models -----------------------------------------------------------------------------------------------------------


def propagate_of(conv: nn.Module) -> Propagate | None:
    """Our object in a layer."""
    found = conv.__dict__.get("forward")
    return found if isinstance(found, Propagate) else None


def scaled(conv: MessagePassing, sums: str = "auto") -> MessagePassing:
    """The same layer, which now applies the scale of the batches of our loaders, if it can.

    A layer that takes no `edge_weight` then takes one, which is applied as a scale. A layer that can use no scale
    (a maximum, for instance) stays as it is; `reading` of it says so after the first batch. `sums` is about plain sums
    (GINConv): "whole" makes them those of the whole graph, "drawn" k / n of that, the size that they have over the
    drawn neighbours, and "auto" is "drawn", with a warning, where those of the whole graph would be many times larger.

    >>> from torch_geometric.nn import GINConv
    >>> conv = scaled(GINConv(nn.Identity()))
    >>> conv(torch.ones(2, 1), torch.tensor([[1], [0]]), edge_weight=torch.tensor([3.0])).tolist()
    [[4.0], [1.0]]
    """
    if not isinstance(conv, MessagePassing):
        raise KindError(f"`conv` must be a PyG layer that passes messages, got {type(conv).__name__}")
    one_of(sums, tuple(SUMS_AS_DRAWN), "sums")
    if getattr(conv, "cached", False) is True:  # it would use the edges of the first batch, or of a pass, from then on
        raise InputError(f"`cached` must be False in a layer that is given batches, got True in {type(conv).__name__}")
    ours = propagate_of(conv)
    if ours is None:
        conv.__dict__["forward"] = Propagate(conv, sums)
    elif sums != "auto":
        ours.sums_as_drawn = SUMS_AS_DRAWN[sums]
    return conv


def layers_of(model: nn.Module) -> dict[str, MessagePassing]:
    """A model's layers that pass messages, by name; wrappers (DDP, torch.compile) are looked through."""
    if not isinstance(model, nn.Module):
        raise KindError(f"`model` must be a torch module, got {type(model).__name__}")
    found = {name: m for name, m in unwrapped(model).named_modules() if isinstance(m, MessagePassing)}
    if not found:
        raise InputError(f"`model` must have PyG layers that pass messages, got {type(model).__name__} with none")
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel, AveragedModel, torch.compile, ..., which pass all arguments on."""
    while True:
        inner = model.__dict__.get("_modules", {})
        if "_orig_mod" in inner:
            model = inner["_orig_mod"]
        elif set(inner) == {"module"} and _passes_on(model):
            model = inner["module"]
        else:
            return model


def _passes_on(model: nn.Module) -> bool:
    """Whether a module's forward is (*args, **kwargs)."""
    kinds = [p.kind for p in inspect.signature(model.forward).parameters.values()]
    return kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


def scale_messages(model: nn.Module, sums: str = "auto") -> nn.Module:
    """`scaled` for every layer of a model. PyG's own models (GraphSAGE, GIN, GAT) then heed their `edge_weight`."""
    for m in layers_of(model).values():
        scaled(m, sums)
    for m in model.modules():
        if isinstance(m, BasicGNN):
            m.__dict__["supports_edge_weight"] = True
    return model


def remove_propagates(model: nn.Module) -> None:
    """Undo `scale_messages`."""
    for m in layers_of(model).values():
        if propagate_of(m) is not None:
            del m.__dict__["forward"]
    for m in model.modules():
        if isinstance(m, BasicGNN):
            m.__dict__.pop("supports_edge_weight", None)
