"""Which reading is right for a layer, by trying: a scale of r must be as good as the edge taken r times.

The layer, as it is, runs on a closed graph in which each edge is there r times; with a reading, on a part of that graph
that was cut off as a loader cuts it, each edge once with scale r, its rim without neighbours. Where both agree at
the seeds the reading is right: for this very layer, its options and the arguments that it was called with.
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
from adahop.pyg.arguments import still
from adahop.pyg.batches import DrawnBatch, Found, Whole
from adahop.pyg.fused import candidate
from adahop.pyg.readings import Reading
from adahop.typed import Relation, TypedBatch

if TYPE_CHECKING:
    from adahop.pyg.wrap import Call, Propagate

SEEDS, FAN = 4, 3
WITHOUT_SCALE = {"degree", "scatter", "get_laplacian", "add_self_loops"}  # copies that know the whole graph alone
CLOSE = {torch.float64: 1e-7, torch.float32: 1e-4}


class Trial(NamedTuple):
    """A closed graph, the part of it that is cut off, and the arguments of the layer on both."""

    closed: dict[str, Any]
    cut: dict[str, Any]
    found: Found
    data: Data | HeteroData  # holds what names the batch
    wholes: dict[Relation | None, Whole] | None = None  # of typed data


def reading_of(conv: MessagePassing, names: set[str], args: tuple, kwargs: dict[str, Any], found: Found) -> Reading:
    """The first reading under which the layer passes the test; with none it is left as it is."""
    if conv.flow != "source_to_target":
        return Reading(why="it sums at the sources of edges, whose neighbours are not drawn", whole=False)
    words = dict(zip(inspect.signature(_plain(conv)).parameters, args, strict=False)) | kwargs
    at = next(conv.parameters(), found.edge_index)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), uncast(at):
        if any(nn.parameter.is_lazy(p) for p in conv.parameters()):
            with still(conv):  # once as it is, so that its parameters get their shapes
                _plain(conv)(**words)
        for dtype in (torch.float64, torch.float32):
            try:
                reading = _try(conv, names, words, found, dtype)
                if "softmax" in reading.functions and _by_kind(words, found):
                    return reading._replace(teaches=False, whole=False)
                return reading
            except Exception as e:  # a layer of the user's own may fail in any way on a small graph
                why = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
    return Reading(why=f"it could not be tried on a small graph ({why})", whole=False)


def _by_kind(words: dict[str, Any], found: Found) -> bool:
    """Whether edges are told apart by their kind alone. Which source has a target's attention is then a matter of the
    pair: one number per source says little of it, and an average that the sample normalises has more bias by odds that
    are unequal for no reason. Of typed data the kinds are the sampler's own relations, with a number each.
    """
    if found.batch.root.typed is not None:
        return False
    many = _sizes(words, found)[1]
    given = [v for v in words.values() if isinstance(v, Tensor) and v.dim() and len(v) == many]
    return bool(given) and not any(v.is_floating_point() for v in given)


def _try(conv: MessagePassing, names: set[str], words: dict[str, Any], found: Found, dtype: torch.dtype) -> Reading:
    typed = any(isinstance(value, dict) for value in words.values())
    make = _made_typed if typed else _made
    depth = 1 if typed else max(1, _passes(_clone(conv, dtype), make(words, found, dtype, 1, 1)))
    trial, once = make(words, found, dtype, depth, FAN), make(words, found, dtype, depth, 1)
    want = _out(_clone(conv, dtype)(**trial.closed))
    plain = _far(_out(_clone(conv, dtype)(**trial.cut)), want)
    best: tuple[float, Reading] | None = None
    for reading in _candidates(names):
        try:
            error, asked, estimated = _error(_clone(conv, dtype), reading, trial, want)
        except Exception:  # this reading does not fit the layer
            continue
        reading = reading._replace(functions=reading.functions & asked, estimated=estimated)
        if reading.factor == "one" and not reading.functions - WITHOUT_SCALE:
            continue  # nothing in it has the scale
        same = (error < CLOSE[dtype] or typed) and _same_sums(conv, reading, trial, dtype)
        if typed and same:  # what it does with its sums, such as a mean over the nodes at hand, is its own
            return reading
        if error < CLOSE[dtype]:
            return _traits(conv, reading, trial, dtype)._replace(whole=same)
        if estimated and error < 0.5 * plain and (best is None or error < best[0]):
            best = (error, reading)
    if best is not None:
        return _traits(conv, best[1], trial, dtype)
    alone = Reading(why=_why(conv))
    return alone._replace(whole=_same_sums(conv, alone, once, dtype))


def _same_sums(conv: MessagePassing, reading: Reading, trial: Trial, dtype: torch.dtype) -> bool:
    """Whether what is summed up for the seeds, before the layer goes on with it, is the same on the closed graph. It is
    not where a layer divides its sums by what the batch shows: a snapshot of the whole graph's sums is then of no use.
    """
    whole = _clone(conv, dtype)
    closed = _noted(whole, "aggregate")
    whole(**trial.closed)
    layer, call = _call(_clone(conv, dtype), reading, trial)
    here = _noted(call, "aggregate")
    _run(layer, call, trial)
    sums = [[out.movedim(conv.node_dim, 0)[:SEEDS].flatten() for _, _, out in of] for of in (here, closed)]
    return len(here) == len(closed) and _far(*sums) < CLOSE[dtype]


def _noted(owner: MessagePassing | Call, name: str) -> list[tuple[tuple, dict[str, Any], Any]]:
    """Arguments and result of each call of a method, from now on."""
    calls: list[tuple[tuple, dict[str, Any], Any]] = []
    own = getattr(type(owner), name)

    def method(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs, own(owner, *args, **kwargs)))
        return calls[-1][2]

    vars(owner)[name] = method
    return calls


def _traits(conv: MessagePassing, reading: Reading, trial: Trial, dtype: torch.dtype) -> Reading:
    """Whether the sum is linear in what nodes pass to `propagate`, and whether it depends on parameters."""
    lifted = {name[:-2] for name in conv._user_args if name.endswith(("_i", "_j"))}
    one, other = _clone(conv, dtype), _clone(conv, dtype)
    for p in other.parameters():
        p.mul_(1.2)
    calls = _noted(one, "propagate")
    one(**trial.cut)
    given, kwargs, _ = calls[0]

    def total(layer: MessagePassing, nodes: Callable[[Tensor], Tensor]) -> Tensor:
        parts = _noted(layer, "aggregate")
        new = {k: _map(v, nodes) if k in lifted else v for k, v in kwargs.items()}
        type(layer).propagate(layer, *given, **new)
        return torch.cat([out.flatten() for _, _, out in parts])

    try:
        now, flipped = total(one, lambda t: t), total(one, lambda t: t.flip(0))
        both = total(one, lambda t: 0.7 * t - 1.3 * t.flip(0))
        again = total(other, lambda t: t)
    except Exception:  # stays on the safe side
        return reading
    length = now.norm().clamp(min=1e-12)
    linear = float((0.7 * now - 1.3 * flipped - both).norm() / length) < CLOSE[dtype]
    reading = reading._replace(linear=linear, parametric=not torch.equal(again, now))
    return reading._replace(times=_times(conv, reading, trial, dtype, sorted(lifted)) if candidate(conv) else None)


def _times(conv: MessagePassing, reading: Reading, trial: Trial, dtype: torch.dtype, names: list[str]) -> str | None:
    """The argument that messages are, times a coefficient: summed with it alone, the layer gives the same.

    In training too: what is dropped must be dropped from coefficients, not from each entry of a message.
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
            got = [run(reading._replace(times=name), training) for training in (False, True)]
        except Exception:  # the layer does not run on ones
            continue
        if all(_far([a], [b]) < CLOSE[dtype] for a, b in zip(got, want, strict=True)):
            return name
    return None


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, tuple | list):
        return tuple(None if v is None else change(v) for v in value)
    return change(value) if isinstance(value, Tensor) else value


def _candidates(names: set[str]) -> Iterator[Reading]:
    sets = [frozenset(names)] if names else []
    sets += [frozenset({n}) for n in sorted(names) if len(names) > 1]
    for functions, factor in product(sets, ("one", "sum", "mean")):
        yield Reading(functions, factor)
    yield from (Reading(frozenset(), factor) for factor in ("sum", "mean"))


def _why(conv: MessagePassing) -> str:
    if isinstance(conv.aggr, str) and conv.aggr not in ("add", "sum", "mean"):
        return f"aggr={conv.aggr!r} has no use for a scale; aggr='mean' or 'sum' has"
    if isinstance(conv.aggr, list):
        return f"aggr={conv.aggr} has no use for a scale; aggr='mean' or 'sum' has"
    return "its normaliser is its own; torch_geometric.utils.softmax, degree and gcn_norm would be understood"


def _call(conv: MessagePassing, reading: Reading, trial: Trial) -> tuple[Propagate, Call]:
    """Of a layer on the part that is cut off."""
    from adahop.pyg.wrap import AllRelations, Call, Propagate, by_relation, drawn_parts

    layer = Propagate(conv)
    layer.reading, layer.small = reading, False
    conv.__dict__["forward"] = layer
    batch, words = trial.found.batch, tuple(trial.cut.values())
    if isinstance(trial.data, HeteroData) and trial.wholes is not None:
        batches.register_typed(trial.data, batch, trial.wholes)
        every: Any = AllRelations(layer, reading, drawn_parts(layer, by_relation(words) or {}, words))
        return layer, every
    batches.register(trial.data, batch)
    return layer, Call(layer, reading, trial.found)


def _run(layer: Propagate, call: Call, trial: Trial) -> Any:
    if isinstance(trial.data, HeteroData):
        return layer.joined(call, (), trial.cut)  # type: ignore[arg-type]
    with layer.within(call):
        return layer._forward(**trial.cut)


def _error(conv: MessagePassing, reading: Reading, trial: Trial, want: list[Tensor]) -> tuple[float, set[str], bool]:
    layer, call = _call(conv, reading, trial)
    got = _out(_run(layer, call, trial))
    return _far(got, want), call.asked, call.estimated


def _first(value: Any) -> Tensor:
    given = value if isinstance(value, tuple | list) else (value,)
    return next(v for v in given if isinstance(v, Tensor))


def _out(value: Any) -> list[Tensor]:
    """What a layer gives for the seeds, of each type where it has several."""
    first = value[0] if isinstance(value, tuple | list) and value and isinstance(value[0], dict) else value
    if isinstance(first, dict):
        return [v[:SEEDS] for v in first.values() if isinstance(v, Tensor)]
    return [_first(value)[:SEEDS]]


def _far(got: list[Tensor], want: list[Tensor]) -> float:
    a, b = (torch.cat([t.flatten() for t in ts]) for ts in (got, want))
    if a.shape != b.shape or not bool(torch.isfinite(a).all()):
        return float("inf")
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


# --- a small graph --------------------------------------------------------------------------------------------------


def _made(words: dict[str, Any], found: Found, dtype: torch.dtype, depth: int, most: int) -> Trial:
    """Levels of nodes, the seeds first: each has in-edges from the next level and from those above. The last level is
    outside of the cut, the one before it is the rim.
    """
    g = torch.Generator().manual_seed(0)
    n, inside = SEEDS * (depth + 2), SEEDS * (depth + 1)
    edges, times, cut = _levels(depth, most, g)
    nodes, many = _sizes(words, found)
    closed, small, kept = {}, {}, {}
    for name, value in words.items():
        one = _Rows(value, name, nodes, many, dtype, g)
        closed[name] = one.cut(torch.arange(n), edges.repeat_interleave(times, 1), times)
        small[name] = one.cut(torch.arange(inside), edges[:, cut], torch.ones_like(times[cut]), cut)
        if one.per_edge:
            kept[name] = closed[name]
    e = edges[:, cut].contiguous()
    small = {k: (e if v is _EDGES else v) for k, v in small.items()}
    closed = {k: (edges.repeat_interleave(times, 1) if v is _EDGES else v) for k, v in closed.items()}
    whole = Data(edge_index=edges.repeat_interleave(times, 1), num_nodes=n, **kept)
    graph = Graph.from_edge_index(whole.edge_index, num_nodes=n)
    batch = DrawnBatch(
        torch.arange(inside), torch.arange(int(cut.sum())), times[cut].to(dtype), Whole(whole, graph), blocks=[]
    )
    data = Data(edge_index=e, num_nodes=inside, **{k: small[k] for k in kept})
    return Trial(closed, small, Found(batch, e, slice(0, e.shape[1])), data)


def _levels(depth: int, most: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Edges, how often each is there, and whether it is inside of the cut."""
    levels = depth + 2
    level = torch.arange(levels).repeat_interleave(SEEDS)
    src, dst = [], []
    for v in range(level.numel()):
        deep = min(int(level[v]) + 1, levels - 1)
        near = torch.nonzero(level == deep).flatten()
        some = near[torch.randperm(near.numel(), generator=g)[: 2 + v % 2]]
        other = torch.randint(0, (deep + 1) * SEEDS, (2,), generator=g)
        for u in {int(u) for u in (*some, *other)} - {v}:
            src.append(u)
            dst.append(v)
    edges = torch.tensor([src, dst])
    order = level[edges[1]].argsort(stable=True)
    edges = edges[:, order]
    times = torch.randint(1, most + 1, (edges.shape[1],), generator=g)
    return edges, times, level[edges[1]] <= depth - 1


def _made_typed(words: dict[str, Any], found: Found, dtype: torch.dtype, depth: int, most: int) -> Trial:
    """The same for dictionaries: such edges for every relation, among as many nodes of every type."""
    from adahop.pyg.wrap import by_relation

    g = torch.Generator().manual_seed(0)
    n, inside = SEEDS * (depth + 2), SEEDS * (depth + 1)
    given = by_relation(tuple(words.values())) or {}
    made = {r: _levels(depth, most, g) for r in given}
    kinds = dict.fromkeys(t for w in words.values() if isinstance(w, dict) for t in w if isinstance(t, str))
    whole, data = HeteroData(), HeteroData()
    for kind in kinds:
        whole[kind].num_nodes, data[kind].num_nodes = n, inside
    for r, (edges, times, cut) in made.items():
        whole[r].edge_index, data[r].edge_index = edges.repeat_interleave(times, 1), edges[:, cut].contiguous()
    closed, small = {}, {}
    for name, value in words.items():
        if not isinstance(value, dict):
            closed[name] = small[name] = _as(value, dtype)
            continue
        rows = {k: _Rows(v, "", -1, -1, dtype, g) for k, v in value.items()}
        closed[name] = {k: whole[k].edge_index if k in made else r.of(n) for k, r in rows.items()}
        small[name] = {k: data[k].edge_index if k in made else r.of(inside) for k, r in rows.items()}
    wholes = batches.wholes(whole, Graph.from_data(whole))
    drawn = {r: data[r].edge_index.clone() for r in given}  # a batch holds none of the tensors that name it
    many = {r: e.shape[1] for r, e in drawn.items()}
    typed = TypedBatch(
        dict.fromkeys(kinds, torch.arange(inside)), drawn, {r: torch.arange(m) for r, m in many.items()},
        {t: [inside] for t in kinds}, {r: [m] for r, m in many.items()}, {}, {},
    )  # fmt: skip
    scale = torch.cat([times[cut].to(dtype) for _, times, cut in made.values()])
    batch = DrawnBatch(
        torch.arange(inside * len(kinds)), torch.arange(scale.numel()), scale, wholes[None], blocks=[],
        typed=typed,
    )  # fmt: skip
    return Trial(closed, small, Found(batch, next(iter(drawn.values())), None), data, wholes)


_EDGES = object()


class _Rows:
    """An argument of the layer for another graph: rows of what the user passed, no two alike."""

    def __init__(self, value: Any, name: str, nodes: int, edges: int, dtype: torch.dtype, g: torch.Generator):
        self.value, self.nodes, self.dtype, self.g = value, nodes, dtype, g
        tensor = isinstance(value, Tensor) and value.dim() > 0
        self.is_edges = tensor and value.dim() == 2 and value.shape[0] == 2 and not value.is_floating_point()
        rows = value.shape[0] if tensor else -1
        named = name.startswith("edge")
        self.per_edge = tensor and not self.is_edges and rows == edges and (named or rows != nodes)
        self.per_node = tensor and not self.is_edges and rows == nodes and not self.per_edge
        self.drawn: dict[int, Tensor] = {}

    def cut(self, at: Tensor, edges: Tensor, times: Tensor, which: Tensor | None = None) -> Any:
        if self.is_edges:
            return _EDGES
        if self.per_node:
            return self._rows(self.value, at, 0.5)
        if self.per_edge:
            if which is None:
                return self._rows(self.value, torch.arange(times.numel()), 0.0).repeat_interleave(times, 0)
            return self._rows(self.value, torch.arange(which.numel()), 0.0)[which]
        if isinstance(self.value, tuple | list) and any(isinstance(v, Tensor) for v in self.value):
            return tuple(self._rows(v, at, 0.5, i) if isinstance(v, Tensor) else v for i, v in enumerate(self.value))
        if isinstance(self.value, tuple | list) and self.value and all(isinstance(v, int) for v in self.value):
            return tuple(at.numel() for _ in self.value)  # sizes
        if isinstance(self.value, int) and not isinstance(self.value, bool) and self.value == self.nodes:
            return at.numel()
        return _as(self.value, self.dtype)

    def of(self, nodes: int) -> Any:
        """Of the first nodes."""
        return self._rows(self.value, torch.arange(nodes), 0.5) if isinstance(self.value, Tensor) else self.value

    def _rows(self, value: Tensor, at: Tensor, more: float, key: int = 0) -> Tensor:
        """Rows at random, each stretched by a factor of its own; the same ones for both graphs."""
        if key not in self.drawn:
            many = 512
            if value.shape[0] == 0:  # a type that the batch has no node of
                value = torch.randn(1, *value.shape[1:], generator=self.g)
            pick = torch.randint(0, max(value.shape[0], 1), (many,), generator=self.g)
            rows = _as(value.detach(), self.dtype)[pick.clamp(max=value.shape[0] - 1)]
            if rows.is_floating_point():
                factor = 0.5 + (0.5 + more) * torch.rand(many, generator=self.g, dtype=torch.float64)
                rows = rows * factor.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))
            self.drawn[key] = rows
        return self.drawn[key][at]


def _as(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return value.to(dtype) if value.is_floating_point() else value


def _sizes(words: dict[str, Any], found: Found) -> tuple[int, int]:
    """Nodes and edges of the user's call."""
    edges = next((v for v in words.values() if isinstance(v, Tensor) and v.dim() == 2 and v.shape[0] == 2
                  and not v.is_floating_point()), found.edge_index).shape[1]  # fmt: skip
    for name, value in words.items():
        for v in value if isinstance(value, tuple | list) else (value,):
            if isinstance(v, Tensor) and v.dim() > 0 and v.is_floating_point() and not name.startswith("edge"):
                return v.shape[0], edges
    return found.batch.n_id.numel(), edges


# --- a copy of the layer ----------------------------------------------------------------------------------------------


def _clone(module: nn.Module, dtype: torch.dtype) -> Any:
    """The module in evaluation, on the CPU, with parameters of its own; other attributes are shared."""
    new = object.__new__(type(module))
    new.__dict__ = {k: v for k, v in module.__dict__.items() if k not in ("forward", "propagate", "aggregate")}
    own: dict[str, Any] = {
        "_parameters": {k: None if p is None else _moved(p, dtype) for k, p in module._parameters.items()},
        "_buffers": {k: None if b is None else _as(b, dtype).clone() for k, b in module._buffers.items()},
        "_modules": {k: None if m is None else _clone(m, dtype) for k, m in module._modules.items()},
        "training": False,
    }  # fmt: skip
    new.__dict__.update(own)
    for name in ("_forward_hooks", "_forward_pre_hooks"):  # those of a user are not for a trial
        if isinstance(module, MessagePassing) and name in new.__dict__:
            new.__dict__[name] = type(new.__dict__[name])()
    return new


def _moved(p: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter somewhat changed: a reading must hold wherever training leads."""
    value = _as(p, dtype)
    return nn.Parameter(value * 1.1 + 0.05 if value.is_floating_point() else value, requires_grad=False)


def _passes(conv: MessagePassing, trial: Trial) -> int:
    """How often a layer passes messages in one forward."""
    calls = _noted(conv, "propagate")
    conv(**trial.closed)
    return min(len(calls), 16)


def _plain(conv: MessagePassing) -> Any:
    return type(conv).forward.__get__(conv)
