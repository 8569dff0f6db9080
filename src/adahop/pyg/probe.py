"""Which reading is right for a layer, found by trying: an edge of scale r must have the effect of r such edges.

The layer, as it is, runs on a small whole graph in which each edge is there r times; with a reading, on a batch of that
graph as a loader draws it, each edge once with scale r, the nodes of the last hop without neighbours. Where both agree
at the seeds the reading is right: for this very layer, its options and the arguments that it was called with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import MessagePassing

from adahop.graph import Graph
from adahop.ops import uncast
from adahop.pyg import batches
from adahop.pyg.align import is_edge_index
from adahop.pyg.arguments import Kwargs, as_tuple, eval_mode, map_tensors, node_arguments, read_whole, tensors_in
from adahop.pyg.batches import DrawnBatch, Found
from adahop.pyg.fused import candidate
from adahop.pyg.readings import Reading
from adahop.pyg.whole_graph import WholeGraph, whole_graphs
from adahop.typed import Relation, TypedBatch

if TYPE_CHECKING:
    from adahop.pyg.call import Call
    from adahop.pyg.wrap import Propagate

SEEDS, MAX_SCALE = 4, 3
WITHOUT_SCALE = {"degree", "scatter", "get_laplacian", "add_self_loops"}  # these use the whole graph, and no scale
CLOSE = {torch.float64: 1e-7, torch.float32: 1e-4}


class Trial(NamedTuple):
    """The arguments of the layer on a small whole graph and on a batch of it."""

    whole: dict[str, Any]
    batch: dict[str, Any]
    found: Found
    data: Data | HeteroData  # holds the tensors by which the batch is found
    whole_graphs: dict[Relation | None, WholeGraph] | None = None  # of typed data


def reading_of(conv: MessagePassing, names: set[str], args: tuple, kwargs: Kwargs, found: Found) -> Reading:
    """The first reading under which the layer passes the test; with none it is left as it is."""
    if conv.flow != "source_to_target":
        return Reading(why="it sums at the sources of edges, whose neighbours are not drawn", sums_match=False)
    named = dict(zip(inspect.signature(_plain(conv)).parameters, args, strict=False)) | kwargs
    at = next(conv.parameters(), found.edge_index)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), uncast(at):
        if any(nn.parameter.is_lazy(p) for p in conv.parameters()):
            with eval_mode(conv):  # once as it is, so that its parameters get their shapes
                _plain(conv)(**named)
        for dtype in (torch.float64, torch.float32):
            try:
                reading = _try(conv, names, named, found, dtype)
                if "softmax" in reading.functions and _only_edge_types(named, found):
                    return reading._replace(teaches=False, sums_match=False)
                return reading
            except Exception as e:  # a layer of the user's own may fail in any way on a small graph
                why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
    return Reading(why=f"it could not be tried on a small graph ({why})", sums_match=False)


def _only_edge_types(named: Kwargs, found: Found) -> bool:
    """Whether the layer is given an edge type and no other edge values. Its attention then depends on the pair of nodes
    far more than on the source, so that odds learnt per source say little, and an average that the sample normalises
    has more bias by odds that are unequal for no reason. Of typed data the sampler has odds for each relation.
    """
    if found.batch.root.typed is not None:
        return False
    many = _sizes(named, found)[1]
    given = [v for v in named.values() if isinstance(v, Tensor) and v.dim() and len(v) == many]
    return bool(given) and not any(v.is_floating_point() for v in given)


def _try(conv: MessagePassing, names: set[str], named: Kwargs, found: Found, dtype: torch.dtype) -> Reading:
    typed = any(isinstance(value, dict) for value in named.values())
    make = _typed_trial if typed else _trial
    depth = 1 if typed else max(1, _num_propagates(_clone(conv, dtype), make(named, found, dtype, 1, 1)))
    trial, unscaled = make(named, found, dtype, depth, MAX_SCALE), make(named, found, dtype, depth, 1)
    want = _out(_clone(conv, dtype)(**trial.whole))
    plain = _distance(_out(_clone(conv, dtype)(**trial.batch)), want)
    best: tuple[float, Reading] | None = None
    for reading in _candidates(names):
        try:
            layer, call = _call(_clone(conv, dtype), reading, trial)
            error = _distance(_out(_run(layer, call, trial)), want)
        except Exception:  # this reading does not fit the layer
            continue
        estimated = call.estimated
        reading = reading._replace(functions=reading.functions & call.functions_called, estimated=estimated)
        if reading.factor == "one" and not reading.functions - WITHOUT_SCALE:
            continue  # nothing in it has the scale
        same = (error < CLOSE[dtype] or typed) and _same_sums(conv, reading, trial, dtype)
        if typed and same:  # what it does with its sums, such as a mean over the batch's nodes, is its own
            return reading
        if error < CLOSE[dtype]:
            return _traits(conv, reading, trial, dtype)._replace(sums_match=same)
        if estimated and error < 0.5 * plain and (best is None or error < best[0]):
            best = (error, reading)
    if best is not None:
        return _traits(conv, best[1], trial, dtype)
    alone = Reading(why=_why(conv))
    return alone._replace(sums_match=_same_sums(conv, alone, unscaled, dtype))


def _same_sums(conv: MessagePassing, reading: Reading, trial: Trial, dtype: torch.dtype) -> bool:
    """Whether what `aggregate` gives for the seeds is the same on the whole graph. It is not where a layer divides its
    sums afterwards by what the batch shows: a snapshot of the whole graph's sums is then of no use.
    """
    original = _clone(conv, dtype)
    on_whole = _recorded(original, "aggregate")
    original(**trial.whole)
    layer, call = _call(_clone(conv, dtype), reading, trial)
    on_batch = _recorded(call, "aggregate")
    _run(layer, call, trial)
    sums = [[out.movedim(conv.node_dim, 0)[:SEEDS].flatten() for _, _, out in of] for of in (on_batch, on_whole)]
    return len(on_batch) == len(on_whole) and _distance(*sums) < CLOSE[dtype]


def _recorded(owner: MessagePassing | Call, name: str) -> list[tuple[tuple, dict[str, Any], Any]]:
    """Arguments and result of each call of a method, from now on."""
    calls: list[tuple[tuple, dict[str, Any], Any]] = []
    original = getattr(type(owner), name)

    def method(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs, original(owner, *args, **kwargs)))
        return calls[-1][2]

    vars(owner)[name] = method
    return calls


def _traits(conv: MessagePassing, reading: Reading, trial: Trial, dtype: torch.dtype) -> Reading:
    """Whether the sum is linear in what nodes pass to `propagate`, whether it depends on parameters, and whether it can
    be formed without messages.
    """
    node = node_arguments(conv)
    one, other = _clone(conv, dtype), _clone(conv, dtype)
    for p in other.parameters():
        p.mul_(1.2)
    calls = _recorded(one, "propagate")
    one(**trial.batch)
    args, kwargs, _ = calls[0]

    def total(layer: MessagePassing, change: Callable[[Tensor], Tensor]) -> Tensor:
        parts = _recorded(layer, "aggregate")
        changed = {k: map_tensors(v, change) if k in node else v for k, v in kwargs.items()}
        type(layer).propagate(layer, *args, **changed)
        return torch.cat([out.flatten() for _, _, out in parts])

    try:
        now, flipped = total(one, lambda t: t), total(one, lambda t: t.flip(0))
        both = total(one, lambda t: 0.7 * t - 1.3 * t.flip(0))
        again = total(other, lambda t: t)
    except Exception:  # the defaults hold for any layer
        return reading
    length = now.norm().clamp(min=1e-12)
    by_edge = not node.keys() & read_whole(conv, "message", "aggregate", "update")  # `update` must not see a difference
    linear = by_edge and float((0.7 * now - 1.3 * flipped - both).norm() / length) < CLOSE[dtype]
    reading = reading._replace(linear=linear, parametric=not torch.equal(again, now))
    name = _row_argument(conv, reading, trial, dtype, sorted(node)) if candidate(conv) else None
    return reading._replace(row_argument=name)


def _row_argument(
    conv: MessagePassing, reading: Reading, trial: Trial, dtype: torch.dtype, names: list[str]
) -> str | None:
    """The argument whose rows messages are, times a coefficient: summed without messages, the layer gives the same.

    In training too: dropout must act on coefficients, not on each entry of a message.
    """

    def run(one: Reading, training: bool) -> Tensor:
        layer = _clone(conv, dtype)
        for m in layer.modules():
            m.training = training
        torch.manual_seed(0)
        ours, call = _call(layer, one, trial)
        return _first(_run(ours, call, trial))

    want = [run(reading, training) for training in (False, True)]
    for name in names:
        try:
            got = [run(reading._replace(row_argument=name), training) for training in (False, True)]
        except Exception:  # the layer does not run on ones
            continue
        if all(_distance([a], [b]) < CLOSE[dtype] for a, b in zip(got, want, strict=True)):
            return name
    return None


def _candidates(names: set[str]) -> Iterator[Reading]:
    sets = [frozenset(names)] if names else []
    sets += [frozenset({n}) for n in sorted(names) if len(names) > 1]
    for functions, factor in product(sets, ("one", "sum", "mean")):
        yield Reading(functions, factor)
    yield from (Reading(frozenset(), factor) for factor in ("sum", "mean"))


def _why(conv: MessagePassing) -> str:
    if isinstance(conv.aggr, list) or (isinstance(conv.aggr, str) and conv.aggr not in ("add", "sum", "mean")):
        return f"aggr={conv.aggr!r} has no use for a scale; aggr='mean' or 'sum' has"
    return "its normaliser is its own; torch_geometric.utils.softmax, degree and gcn_norm would be understood"


def _call(conv: MessagePassing, reading: Reading, trial: Trial) -> tuple[Propagate, Call]:
    """That of a layer on the batch."""
    from adahop.pyg.call import Call
    from adahop.pyg.wrap import AllRelations, Propagate, calls_on_batch, relation_edges

    layer = Propagate(conv)
    layer.reading, layer.sums_as_drawn = reading, False
    conv.__dict__["forward"] = layer
    batch, values = trial.found.batch, tuple(trial.batch.values())
    if isinstance(trial.data, HeteroData) and trial.whole_graphs is not None:
        batches.register_typed(trial.data, batch, trial.whole_graphs)
        every: Any = AllRelations(layer, reading, calls_on_batch(layer, relation_edges(values) or {}, values))
        return layer, every
    batches.register(trial.data, batch)
    return layer, Call(layer, trial.found)


def _run(layer: Propagate, call: Call, trial: Trial) -> Any:
    if isinstance(trial.data, HeteroData):
        return layer.run_relations(call, (), trial.batch)  # type: ignore[arg-type]
    with layer.installed(call):
        return layer.forward(**trial.batch)


def _first(value: Any) -> Tensor:
    return next(v for v in as_tuple(value) if isinstance(v, Tensor))


def _out(value: Any) -> list[Tensor]:
    """What a layer gives for the seeds, of each type where it has several."""
    first = value[0] if isinstance(value, tuple | list) and value and isinstance(value[0], dict) else value
    if isinstance(first, dict):
        return [v[:SEEDS] for v in first.values() if isinstance(v, Tensor)]
    return [_first(value)[:SEEDS]]


def _distance(got: list[Tensor], want: list[Tensor]) -> float:
    """Relative to what is wanted; infinite where shapes differ."""
    a, b = (torch.cat([t.flatten() for t in ts]) for ts in (got, want))
    if a.shape != b.shape or not bool(torch.isfinite(a).all()):
        return float("inf")
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


# --- a small graph --------------------------------------------------------------------------------------------------


def _trial(named: Kwargs, found: Found, dtype: torch.dtype, depth: int, most: int) -> Trial:
    """Levels of nodes, the seeds first: each has in-edges from the next level and from those above. The last level is
    outside of the batch, the one before it is the last hop.
    """
    g = torch.Generator().manual_seed(0)
    n, inside = SEEDS * (depth + 2), SEEDS * (depth + 1)
    edges, times, drawn = _levels(depth, most, g)
    repeated, e = edges.repeat_interleave(times, 1), edges[:, drawn].contiguous()
    nodes, many = _sizes(named, found)
    on_whole, on_batch, edge_names = {}, {}, []
    for name, value in named.items():
        one = _Rows(value, name, nodes, many, dtype, g)
        on_whole[name] = one.on_graph(n, repeated, times)
        on_batch[name] = one.on_graph(inside, e, drawn)
        edge_names += [name] if one.per_edge else []
    whole = Data(edge_index=repeated, num_nodes=n, **{name: on_whole[name] for name in edge_names})
    graph = Graph.from_edge_index(whole.edge_index, num_nodes=n)
    e_id = (times.cumsum(0) - times)[drawn]  # where each edge comes first in the whole graph
    batch = DrawnBatch(torch.arange(inside), e_id, times[drawn].to(dtype), WholeGraph(whole, graph), blocks=[])
    data = Data(edge_index=e, num_nodes=inside, **{name: on_batch[name] for name in edge_names})
    return Trial(on_whole, on_batch, Found(batch, e, slice(0, e.shape[1])), data)


def _levels(depth: int, most: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Edges, how often each is there in the whole graph, and whether it is drawn."""
    levels = depth + 2
    level = torch.arange(levels).repeat_interleave(SEEDS)
    src, dst = [], []
    for v in range(level.numel()):
        deep = min(int(level[v]) + 1, levels - 1)
        near = torch.nonzero(level == deep).flatten()
        deeper = near[torch.randperm(near.numel(), generator=g)[: 2 + v % 2]]
        other = torch.randint(0, (deep + 1) * SEEDS, (2,), generator=g)
        for u in {int(u) for u in (*deeper, *other)} - {v}:
            src.append(u)
            dst.append(v)
    edges = torch.tensor([src, dst])
    order = level[edges[1]].argsort(stable=True)
    edges = edges[:, order]
    times = torch.randint(1, most + 1, (edges.shape[1],), generator=g)
    return edges, times, level[edges[1]] <= depth - 1


def _typed_trial(named: Kwargs, found: Found, dtype: torch.dtype, depth: int, most: int) -> Trial:
    """The same for dictionaries: such edges for every relation, among as many nodes of every type."""
    from adahop.pyg.wrap import relation_edges

    g = torch.Generator().manual_seed(0)
    n, inside = SEEDS * (depth + 2), SEEDS * (depth + 1)
    relations = list(relation_edges(tuple(named.values())) or {})
    made = {r: _levels(depth, most, g) for r in relations}
    kinds = dict.fromkeys(t for v in named.values() if isinstance(v, dict) for t in v if isinstance(t, str))
    whole, data = HeteroData(), HeteroData()
    for kind in kinds:
        whole[kind].num_nodes, data[kind].num_nodes = n, inside
    for r, (edges, times, drawn) in made.items():
        whole[r].edge_index, data[r].edge_index = edges.repeat_interleave(times, 1), edges[:, drawn].contiguous()
    on_whole, on_batch = {}, {}
    for name, value in named.items():
        if not isinstance(value, dict):
            on_whole[name] = on_batch[name] = _as(value, dtype)
            continue
        rows = {k: _Rows(v, "", -1, -1, dtype, g) for k, v in value.items()}
        on_whole[name] = {k: whole[k].edge_index if k in made else r.of_nodes(n) for k, r in rows.items()}
        on_batch[name] = {k: data[k].edge_index if k in made else r.of_nodes(inside) for k, r in rows.items()}
    graphs = whole_graphs(whole, Graph.from_data(whole))
    batch_edges = {r: data[r].edge_index.clone() for r in relations}  # a batch holds no tensor by which it is found
    many = {r: e.shape[1] for r, e in batch_edges.items()}
    typed = TypedBatch(
        dict.fromkeys(kinds, torch.arange(inside)), batch_edges, {r: torch.arange(m) for r, m in many.items()},
        {t: [inside] for t in kinds}, {r: [m] for r, m in many.items()}, {}, {},
    )  # fmt: skip
    scale = torch.cat([times[drawn].to(dtype) for _, times, drawn in made.values()])
    n_id = torch.arange(inside * len(kinds))
    batch = DrawnBatch(n_id, torch.arange(scale.numel()), scale, graphs[None], blocks=[], typed=typed)
    return Trial(on_whole, on_batch, Found(batch, next(iter(batch_edges.values())), None), data, graphs)


class _Rows:
    """An argument of the layer for another graph: rows of what the user passed, no two alike."""

    def __init__(self, value: Any, name: str, nodes: int, edges: int, dtype: torch.dtype, g: torch.Generator):
        self.value, self.nodes, self.dtype, self.g = value, nodes, dtype, g
        tensor = isinstance(value, Tensor) and value.dim() > 0
        self.is_edges = is_edge_index(value)
        rows = value.shape[0] if tensor else -1
        named = name.startswith("edge")
        self.per_edge = tensor and not self.is_edges and rows == edges and (named or rows != nodes)
        self.per_node = tensor and not self.is_edges and rows == nodes and not self.per_edge
        self.rows: dict[int, Tensor] = {}

    def on_graph(self, nodes: int, edge_index: Tensor, times: Tensor) -> Any:
        """The argument for the first nodes and these edges, in which each edge is there so many `times`."""
        if self.is_edges:
            return edge_index
        if self.per_node:
            return self.of_nodes(nodes)
        if self.per_edge:
            return self._rows(self.value, times.numel(), 0.0).repeat_interleave(times.long(), 0)
        if isinstance(self.value, tuple | list) and any(isinstance(v, Tensor) for v in self.value):
            return tuple(self._rows(v, nodes, 0.5, i) if isinstance(v, Tensor) else v for i, v in enumerate(self.value))
        if isinstance(self.value, tuple | list) and self.value and all(isinstance(v, int) for v in self.value):
            return tuple(nodes for _ in self.value)  # sizes
        if isinstance(self.value, int) and not isinstance(self.value, bool) and self.value == self.nodes:
            return nodes
        return _as(self.value, self.dtype)

    def of_nodes(self, nodes: int) -> Any:
        return self._rows(self.value, nodes, 0.5) if isinstance(self.value, Tensor) else self.value

    def _rows(self, value: Tensor, count: int, more: float, key: int = 0) -> Tensor:
        """Rows of the value at random, each times a factor of its own; the first ones are the same for both graphs."""
        if key not in self.rows:
            many = 512
            if value.shape[0] == 0:  # a type that the batch has no node of
                value = torch.randn(1, *value.shape[1:], generator=self.g)
            pick = torch.randint(0, max(value.shape[0], 1), (many,), generator=self.g)
            rows = _as(value.detach(), self.dtype)[pick.clamp(max=value.shape[0] - 1)]
            if rows.is_floating_point():
                factor = 0.5 + (0.5 + more) * torch.rand(many, generator=self.g, dtype=torch.float64)
                rows = rows * factor.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))
            self.rows[key] = rows
        return self.rows[key][:count]


def _as(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return value.to(dtype) if value.is_floating_point() else value


def _sizes(named: Kwargs, found: Found) -> tuple[int, int]:
    """Nodes and edges of the user's call."""
    edges = next((v for v in named.values() if is_edge_index(v)), found.edge_index).shape[1]
    nodes = (v for k, v in named.items() if not k.startswith("edge"))
    rows = next((t.shape[0] for t in tensors_in(nodes) if t.dim() > 0 and t.is_floating_point()), None)
    return found.batch.n_id.numel() if rows is None else rows, edges


# --- a copy of the layer ----------------------------------------------------------------------------------------------


def _clone(module: nn.Module, dtype: torch.dtype) -> Any:
    """The module in evaluation mode, on the CPU, with its own parameters; other attributes are shared."""
    new = object.__new__(type(module))
    new.__dict__ = {k: v for k, v in module.__dict__.items() if k not in ("forward", "propagate", "aggregate")}
    copied: dict[str, Any] = {
        "_parameters": {k: None if p is None else _moved(p, dtype) for k, p in module._parameters.items()},
        "_buffers": {k: None if b is None else _as(b, dtype).clone() for k, b in module._buffers.items()},
        "_modules": {k: None if m is None else _clone(m, dtype) for k, m in module._modules.items()},
        "training": False,
    }  # fmt: skip
    new.__dict__.update(copied)
    for name in ("_forward_hooks", "_forward_pre_hooks"):  # those of a user would run in a trial
        if isinstance(module, MessagePassing) and name in new.__dict__:
            new.__dict__[name] = type(new.__dict__[name])()
    return new


def _moved(p: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter somewhat changed: a reading must hold for any parameters."""
    value = _as(p, dtype)
    return nn.Parameter(value * 1.1 + 0.05 if value.is_floating_point() else value, requires_grad=False)


def _num_propagates(conv: MessagePassing, trial: Trial) -> int:
    """How often a layer passes messages in one forward."""
    calls = _recorded(conv, "propagate")
    conv(**trial.whole)
    return min(len(calls), 16)


def _plain(conv: MessagePassing) -> Any:
    return type(conv).forward.__get__(conv)
