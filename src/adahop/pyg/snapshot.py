"""Snapshots: what each layer sent and summed for every node at the last pass over the graph; a batch then draws what
changed since.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from adahop import ops
from adahop.checks import tell
from adahop.pyg import batches, fused
from adahop.pyg.align import align
from adahop.pyg.arguments import ends, less, no_edges, pair
from adahop.pyg.batches import Joint, Whole
from adahop.pyg.fused import Operand, on_ones
from adahop.pyg.inference import inference, value_of
from adahop.pyg.memory import Memory, Remembered
from adahop.pyg.readings import Reading
from adahop.pyg.root import Root
from adahop.pyg.wrap import Call, Propagate, bare
from adahop.typed import Relation

log = logging.getLogger("adahop")
EDGE = ("edge_weight", "edge_attr")


@dataclass
class Table:
    """The arguments of one `propagate` (or `edge_updater`) at the last pass, and what it summed up."""

    node: dict[str, Any] = field(default_factory=dict)  # rows per node; a pair for sources and targets
    edge: dict[str, Tensor] = field(default_factory=dict)  # rows per edge in use
    own: dict[str, str] = field(default_factory=dict)  # arguments that are an attribute of the data
    used: Tensor | None = None  # the edges in use, while `edge` is not empty
    total: Tensor | None = None  # what `aggregate` gave
    side: dict[str, int] = field(default_factory=dict)  # whether a tensor's rows are of sources (0) or targets (1)
    _places: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def leave_out(self, names: set[str]) -> None:
        """These are of no use: the graph alone decides them."""
        self.edge = {name: rows for name, rows in self.edge.items() if name not in names}
        self.used = self.used if self.edge else None

    def places(self, whole: Whole) -> tuple[Tensor, Tensor]:
        """Where the edges of the data, and the self-loops of its nodes, lie among the edges in use; -1: nowhere."""
        if self._places is None:
            assert self.used is not None
            given, used = whole.edge_index.to(self.used.device), self.used
            place = align(given, used, nodes=max(whole.num_nodes), bipartite=whole.bipartite)
            edge = used.new_full((given.shape[1],), -1)
            loop = used.new_full((whole.num_nodes[1],), -1)
            if place is not None:
                which, loops = torch.arange(used.shape[1], device=used.device), whole.is_loop(used)
                loop[used[0, loops]] = which[loops]
                if place.at is None:
                    edge[place.start : place.start + place.kept] = which[: place.kept]
                else:
                    edge[place.at[place.at >= 0]] = which[place.at >= 0]
            self._places = edge, loop
        return self._places


@dataclass
class Recorded:
    """One forward of a layer over the whole graph."""

    passes: list[Table] = field(default_factory=list)
    updates: list[Table] = field(default_factory=list)
    old: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers then
    relation: Relation | None = None  # of typed data, where it was one


class Recording:
    """A forward of a layer over the whole graph, while it is recorded."""

    reading = Reading()

    def __init__(self, layer: Propagate, memory: Snapshots, whole: Whole):
        self.layer, self.memory, self.whole = layer, memory, whole
        self.done = Recorded(old={k: v.detach().clone() for k, v in layer.conv.state_dict().items()})
        self.done.relation = whole.relation
        self.parts: list[Tensor] = []  # what `aggregate` gave
        self.last: Tensor | None = None  # what the edge update gave

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        out = self.layer.own("edge_updater")(edge_index, size=size, **kwargs)
        table = self._table(edge_index, kwargs, "_edge_user_args")
        if table is not None:
            self.done.updates.append(table)
            self.last = out
        return out

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        self.parts = []
        out = self.layer.own("propagate")(edge_index, size=size, **kwargs)
        table = self._table(edge_index, kwargs)
        if table is not None and self.parts:
            table.total = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
            self.done.passes.append(table)
        return out

    def aggregate(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = self.layer.own("aggregate")(inputs, *args, **kwargs)
        self.parts.append(out.detach().clone())  # layers go on to change it in place
        return out

    def _table(self, edge_index: Any, kwargs: dict[str, Any], which: str = "_user_args") -> Table | None:
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            return None
        table, many = Table(side=ends(self.layer.conv, which)), self.whole.num_nodes
        for name, value in kwargs.items():
            parts = pair(value)
            rows = [v.shape[0] for v in parts if isinstance(v, Tensor) and v.dim()]
            if not rows:
                continue
            own = None if len(parts) > 1 else self.memory.own_name(value)
            if own is not None:
                table.own[name] = own
            if value is self.last:
                continue  # what the edge update gave is found again from its own arguments
            if _fits(parts, many, table.side.get(name, 0)):
                one = None if parts[0] is None else self.memory.keep(parts[0])
                rest = [one if v is parts[0] else None if v is None else self.memory.keep(v) for v in parts[1:]]
                table.node[name] = (one, *rest) if rest else one
            elif own is None and rows == [edge_index.shape[1]]:
                table.edge[name] = self.memory.keep(value)
                table.used = edge_index
            elif own is None:
                return None  # an argument of another kind, which may have changed
        return table


def _fits(parts: tuple[Any, ...], many: tuple[int, int], side: int) -> bool:
    """Whether an argument has a row per node of the whole graph, sources' and targets' where it is a pair."""
    sizes = many if len(parts) == 2 else (many[side],) * len(parts)
    return all(not isinstance(v, Tensor) or v.shape[:1] == (n,) for v, n in zip(parts, sizes, strict=True))


class Applied(Remembered):
    """The snapshot of a layer in one forward on a batch: x' and F(x') are those of the last pass, by the parameters
    that the layer had then.
    """

    def __init__(self, memory: Snapshots, call: Call, recorded: Recorded):
        super().__init__(call)
        self.memory, self.recorded, self.trust = memory, recorded, 1.0 - memory.noise
        self.updates = 0
        self.then: tuple[Tensor, Tensor] | None = None  # what the edge update gives, and would have given

    def updated(self, edge_index: Tensor, size: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        at, self.updates = self.updates, self.updates + 1
        then, _ = (None, False) if at >= len(self.recorded.updates) else self._then(self.recorded.updates[at], kwargs)
        if then is not None:
            with self.past(), self._parameters():
                self.then = out, self.call.layer.own("edge_updater")(edge_index, size=size, **then)

    def propagate(self, edge_index: Tensor, size: Any, kwargs: dict[str, Any]) -> Tensor:
        self.mode, self.total = "plain", None
        call, own, reading = self.call, self.call.layer.own("propagate"), self.call.reading
        rows, passes = fused.rows_of(call, kwargs), self.recorded.passes
        table = passes[call.passes] if call.passes < len(passes) else None
        if table is None:
            return call.summed(rows, edge_index, size, kwargs)
        table.leave_out({name for name, v in kwargs.items() if any(v is f for f in call.fixed)})
        old = None if rows is None else self._beside(table, rows)
        then, fixed = self._then(table, kwargs, None if old is None else reading.times)
        if then is None:
            return call.summed(rows, edge_index, size, kwargs)
        self.total = table.total
        if fixed and reading.linear and not reading.parametric:
            if self.trust == 1.0 and self._known(table, kwargs):
                self.mode = "known"
                return own(edge_index[:, :0], size=size, **no_edges(kwargs, edge_index.shape[1], table.node))
            self.mode = "linear"
            if rows is not None and old is not None:
                return call.without_messages(self._changed(rows, old), edge_index, size, kwargs)
            change = {k: less(kwargs[k], then[k], self.trust) for k in table.node}
            return own(edge_index, size=size, **{**kwargs, **change})
        if rows is not None and old is not None:
            operand = self._corrected(edge_index, size, then, rows, old)
            return call.without_messages(operand, edge_index, size, kwargs)
        with self.past(), self._parameters(reading.parametric):
            own(edge_index, size=size, **then)
        self.mode = "both"
        return own(edge_index, size=size, **kwargs)

    @contextlib.contextmanager
    def _parameters(self, parametric: bool = True) -> Iterator[None]:
        """Within, the layer has the parameters and buffers of the pass."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for path, value in self.recorded.old.items() if parametric else ():
                where, _, name = path.rpartition(".")
                module = self.call.layer.conv.get_submodule(where)
                held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
                if name in held:
                    before.append((held, name, held[name]))
                    held[name] = value
            yield
        finally:
            for held, name, value in before:
                held[name] = value

    # --- sums without messages ----------------------------------------------------------------------------------------

    def _beside(self, table: Table, rows: Tensor) -> Tensor | None:
        """The table of what the sources passed on at the pass, where a sum without messages can read it."""
        call, reading = self.call, self.call.reading
        assert reading.times is not None
        old, total, linear = pair(table.node.get(reading.times))[0], table.total, reading.linear
        if old is None or total is None or (linear and not reading.parametric and len(table.node) > 1):
            return None
        if "softmax" not in reading.functions and (reading.parametric or not linear or table.edge):
            return None  # what changed of a message is noted message by message
        kind = rows.dtype, rows.device, rows.shape[1:]
        fits = all((t.dtype, t.device, t.shape[1:]) == kind for t in (old, total))
        few = len(rows) <= getattr(call.batch, call.batch.side(0)).numel()
        return old if fits and old.is_contiguous() and few else None

    def _ends(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of the batch's sources and targets, where some rows lie."""
        batch = self.call.batch
        return batch.on(rows.device, batch.side(0)), batch.on(rows.device, batch.side(1))

    def _changed(self, rows: Tensor, old: Tensor) -> Operand:
        """Linear messages: what changed since the pass, on top of the sums of the pass."""
        assert self.total is not None
        sources, targets = self._ends(rows)
        change, norm = ops.change(rows, old, sources, self.trust)
        return Operand(change, norm, (self.total, targets, self.trust))

    def _corrected(self, edge_index: Tensor, size: Any, then: dict[str, Any], rows: Tensor, old: Tensor) -> Operand:
        """Messages now, on top of the sums of the pass less those of the drawn edges then."""
        assert self.total is not None
        call, found, conv = self.call, [], self.call.layer.conv.__dict__
        sources, targets = self._ends(rows)
        base = (self.total, targets, self.trust)

        def aggregate(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            many = fused.num_targets(*args, **kwargs)
            _, coef, at = fused.coefficients(call, rows, inputs, many)
            found.append(ops.gather_sum(old, sources[at.src], at.dst, at.sorted(coef * -self.trust), at.ptr, base))
            return inputs.new_zeros(many, *inputs.shape[1:])

        conv["aggregate"], before = aggregate, conv["aggregate"]
        try:
            with self.past(), self._parameters(call.reading.parametric):
                call.layer.own("propagate")(edge_index, size=size, **then)
        finally:
            conv["aggregate"] = before
        return Operand(rows, None, (found[0], None, 1.0))

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _total(self, out: Tensor) -> Tensor:
        assert self.total is not None
        dim = self.call.layer.conv.node_dim
        rows = self.call.batch.on(self.total.device, "n_id")[: out.shape[dim]]
        return self.total.index_select(dim, rows).to(out)

    def _then(
        self, table: Table, kwargs: dict[str, Any], ones: str | None = None
    ) -> tuple[dict[str, Any] | None, bool]:
        """The arguments as they were at the pass, and whether those of edges are as they are now.

        `ones` names one that is read where it lies: it gets ones instead.
        """
        then, fixed = dict(kwargs) if ones is None else on_ones(ones, kwargs), True
        for name, value in kwargs.items():
            if not isinstance(value, Tensor | tuple | list) or name == ones:
                continue
            if self.then is not None and value is self.then[0]:
                then[name], fixed = self.then[1], False
            elif name in table.node:
                then[name] = self._rows(table.node[name], value, table.side.get(name, 0))
                if then[name] is None:
                    return None, False
            elif (
                any(value is f for f in self.call.fixed)
                or name in table.own
                or not any(isinstance(v, Tensor) and v.dim() for v in pair(value))
            ):
                continue
            elif name in table.edge and isinstance(value, Tensor):
                then[name], fixed = self._edges(table, name, value), False
            else:
                return None, False
        return then, fixed

    def _rows(self, rows: Any, value: Any, side: int) -> Any:
        """Rows of the batch's nodes, of sources and targets where there are two."""
        if isinstance(rows, tuple) != isinstance(value, tuple | list):
            return None
        found: list[Tensor | None] = []
        batch = self.call.batch
        sides = (0, 1) if isinstance(rows, tuple) else (side,)
        for row, now, end in zip(pair(rows), pair(value), sides, strict=True):
            if (row is None) != (now is None):
                return None
            if row is None:
                found.append(None)
                continue
            n_id = batch.on(row.device, batch.side(end))
            if now.shape[0] > n_id.numel() or now.shape[1:] != row.shape[1:]:
                return None
            found.append(row[n_id[: now.shape[0]]].to(now.device, now.dtype))
        return tuple(found) if isinstance(rows, tuple) else found[0]

    def _edges(self, table: Table, name: str, value: Tensor) -> Tensor:
        call = self.call
        edge, loop = table.places(call.batch.whole)
        assert call.place is not None and call.used is not None
        e_id, n_id = (call.batch.on(edge.device, k) for k in ("e_id", "n_id"))
        at = call.place.take(e_id, -1)
        target = n_id[call.used[1].to(n_id.device)]
        place = torch.where(at >= 0, edge[at.clamp(min=0)], -1)
        place = torch.where(place >= 0, place, loop[target])
        return table.edge[name][place.clamp(min=0)].to(value.device, value.dtype)

    def _known(self, table: Table, kwargs: dict[str, Any]) -> bool:
        """Whether the nodes' arguments are attributes of the data, now as then."""
        for name, rows in table.node.items():
            values = [v for v in pair(kwargs[name]) if v is not None]
            if any(v.requires_grad or not isinstance(v, Tensor) for v in values):
                return False
            names = {batches.node_attribute(self.call.batch, v) for v in values}
            if None in names or names != {self.memory.own_name(v) for v in pair(rows) if v is not None}:
                return False
        return bool(table.node)


class Snapshots(Memory):
    """Those of a model's layers. They are taken when the model, in evaluation, runs over the whole data."""

    def __init__(
        self, model: nn.Module, data: Data | HeteroData, wholes: dict[Relation | None, Whole], noise: float = 0.0
    ):
        super().__init__(model, data, noise)
        self.wholes = wholes
        self.fresh = False  # whether there was a pass since the last step
        self.warned = False
        self.passed = 0.0  # seconds that the last pass of its own took
        self.waiting = False  # for the model's first step, which shows how it is called
        self._named = batches.attributes(data)
        self._own = {_place(v): k for k, v in self._named.items()}

    @property
    def apart(self) -> bool:
        """Whether a layer's sums on batches have another size than in a pass: what was passed on is then of no use."""
        return any(layer.shrinks for layer in self.layers.values())

    def renew(self) -> None:
        """A pass over the data, unless there was one since the last step; a model that cannot make it goes without.

        A model that may or may not take what the data has is waited for: its first step shows which.
        """
        if self.fresh or self.apart:
            return
        root = Root.of(self.model)
        self.waiting = root.form is None and self._unclear()
        if self.waiting:
            return
        began = time.perf_counter()
        try:
            inference(self.model, self.data)
            self.passed = time.perf_counter() - began
            log.info("%s", self)
        except Exception as e:
            self.waiting = root.form is None
            if not self.waiting and not self.warned:
                self.warned = True
                tell(
                    f"no snapshot can be taken of {type(bare(self.model)).__name__} ({e}); run adahop.inference on the "
                    "part of it that takes x and edge_index once an epoch, or pass estimator='plain'"
                )

    def cost(self) -> dict[str, float]:
        """Bytes, and milliseconds of a pass."""
        tables = [t for forwards in self.kept.values() for r in forwards for t in (*r.passes, *r.updates)]
        rows = [v for t in tables for a in t.node.values() for v in pair(a) if v is not None and not self.own_name(v)]
        more = [v for t in tables for v in (*t.edge.values(), t.total) if v is not None]
        many = {v.data_ptr(): v.nbytes for v in (*rows, *more)}
        return {"bytes": float(sum(many.values())), "pass_ms": 1e3 * self.passed}

    def __str__(self) -> str:
        return (
            f"snapshot, a pass over the graph per epoch: {self.cost()['bytes'] / 2**20:.1f} MiB, the pass took "
            f"{self.passed:.2f} s" + ("" if isinstance(self.data, HeteroData) else "; estimator='history' needs none")
        )

    def before_batch(self, whole: Whole) -> None:
        """A batch is about to be handed out: the pass that waited for the model's first step is made."""
        if self.waiting and Root.of(self.model).form is not None:
            self.renew()

    def _unclear(self) -> bool:
        model = bare(self.model)
        takes = inspect.signature(model.forward).parameters
        optional = {name for name, p in takes.items() if p.default is not p.empty}
        return any(name.removesuffix("_dict") in EDGE and value_of(self.data, name) is not None for name in optional)

    # --- called by `Propagate` ----------------------------------------------------------------------------------------

    def heard(self, layer: Propagate, given: list[Tensor]) -> Recording | None:
        whole = self._whole_of(given)
        return None if whole is None else self._record(layer, whole)

    def _record(self, layer: Propagate, whole: Whole) -> Recording:
        """The next forward of a layer in the pass under way."""
        recording, at = Recording(layer, self, whole), self._next(layer)
        self.kept[layer] = [*self.kept.get(layer, [])[:at], recording.done]
        self.fresh = True
        return recording

    def parts(self, layer: Propagate, edges: dict[Relation, Tensor]) -> Callable[[Tensor], Recording | None]:
        joint = self.wholes[None]

        def part(edge_index: Tensor) -> Recording | None:
            one = next((r for r, e in edges.items() if e is edge_index), None)
            whole = self.wholes.get(one) if one is not None else joint.pairs if isinstance(joint, Joint) else None
            if whole is None or edge_index.shape[1] != whole.num_edges:
                return None
            same = torch.equal(whole.edge_index.to(edge_index.device), edge_index)
            return self._record(layer, whole) if same else None

        return part

    def _whole_of(self, tensors: list[Tensor]) -> Whole | None:
        """The whole graph, or the relation, whose edges are among some tensors, with rows for all its sources."""
        found = [
            (whole, edges)
            for whole in self.wholes.values()
            for edges in tensors
            if tuple(edges.shape) == (2, whole.num_edges) and any(t.shape[:1] == whole.num_nodes[:1] for t in tensors)
        ]
        if len(found) > 1:  # relations of the same size
            found = [(w, e) for w, e in found if torch.equal(w.edge_index.to(e.device), e)]
        return found[0][0] if found else None

    def of(self, layer: Propagate, call: Call, args: tuple, kwargs: dict[str, Any]) -> Applied | None:
        self.counts.clear()
        self.fresh = self.fresh and not layer.conv.training
        kept = [r for r in self.kept.get(layer, ()) if r.relation == call.batch.relation]
        if not kept or self.apart or call.scale.numel() != call.batch.e_id.numel():
            return None
        return Applied(self, call, kept[call.number(args, kwargs) % len(kept)])

    def keep(self, value: Tensor) -> Tensor:
        """A table: the data's own tensor where it is one, which stays as it is; else a copy."""
        value = value.detach()
        own = self._own.get(_place(value))
        return self._named[own] if own is not None else value.clone()

    def own_name(self, value: Any) -> str | None:
        return self._own.get(_place(value)) if isinstance(value, Tensor) else None

    # --- a checkpoint -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What later steps depend on; tensors of the data itself are named, not kept."""

        def named(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(named(v) for v in value)
            return self.own_name(value) or value

        return {"fresh": self.fresh, "layers": self._forwards(named)}

    def restore(self, state: dict[str, Any]) -> None:
        layers = state.get("layers", {})
        if layers.keys() != self.layers.keys() or not all(isinstance(f, list) for f in layers.values()):
            return  # of a version that kept something else: the next pass decides

        def full(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return tuple(full(v) for v in value)
            return self._named[value] if isinstance(value, str) else value

        def tables(kept: list[dict[str, Any]]) -> list[Table]:
            return [Table(**{**t, "node": {k: full(v) for k, v in t["node"].items()}}) for t in kept]

        self.fresh = state["fresh"]
        for name, layer in self.layers.items():
            self.kept[layer] = [
                Recorded(**{**r, "passes": tables(r["passes"]), "updates": tables(r["updates"])}) for r in layers[name]
            ]


def _place(t: Tensor) -> tuple:
    """Two tensors with the same are the same numbers."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype
