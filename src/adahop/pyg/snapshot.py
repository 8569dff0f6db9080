"""Snapshots: what each layer sent and summed for every node at the last pass over the graph; a batch then draws what
changed since.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import MessagePassing

from adahop import ops
from adahop.checks import tell
from adahop.pyg import batches, fused
from adahop.pyg.align import align
from adahop.pyg.arguments import ends, still
from adahop.pyg.batches import Joint, Whole
from adahop.pyg.fused import Operand, on_ones
from adahop.pyg.inference import inference, value_of
from adahop.pyg.readings import Reading
from adahop.pyg.root import Root
from adahop.pyg.wrap import Call, Propagate, bare, layers_of, scale_of, targets_of
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
    _places: tuple[Tensor, Tensor] | None = None

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
        self.done, self.parts = Recorded(relation=whole.relation), []  # type: ignore[var-annotated]

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        out = self.layer.own("edge_updater")(edge_index, size=size, **kwargs)
        table = self._table(edge_index, kwargs, "_edge_user_args")
        if table is not None:
            self.done.updates.append(table)
            self.memory.updated_last = (out, len(self.done.updates) - 1)
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
        last = self.memory.updated_last
        for name, value in kwargs.items():
            pair = _pair(value)
            rows = [v.shape[0] for v in pair if isinstance(v, Tensor) and v.dim()]
            if not rows:
                continue
            own = None if len(pair) > 1 else self.memory.own_name(value)
            if own is not None:
                table.own[name] = own
            if isinstance(value, Tensor) and last is not None and value is last[0]:
                continue  # what the edge update gave is found again from its own arguments
            if _fits(pair, many, table.side.get(name, 0)):
                one = None if pair[0] is None else self.memory.keep(pair[0])
                rest = [one if v is pair[0] else None if v is None else self.memory.keep(v) for v in pair[1:]]
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


class Applied:
    """The snapshot of a layer in one forward on a batch.

    The layer sums f(x) + (1 - noise) (F' - f(x')): f over the drawn edges, F over all, ' at the last pass. Right on
    average wherever f is, and left to chance is only what changed since. Where messages are linear in x and nothing
    else of them changes, that is f(x - x') + F': no message is computed twice. Where x is as it was, it is F'.
    """

    def __init__(self, memory: Snapshots, recorded: Recorded):
        self.memory, self.recorded = memory, recorded
        self.keep = 1.0 - memory.noise
        self.mode = "new"
        self.table: Table | None = None
        self.updates = 0
        self.then: tuple[Tensor, Tensor] | None = None  # what the edge update gives, and would have given
        self.old: Tensor | None = None
        self.old_messages: tuple[Tensor, Tensor] | None = None

    # --- called by `Call` ---------------------------------------------------------------------------------------------

    def updated(self, call: Call, edge_index: Tensor, size: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        at, self.updates = self.updates, self.updates + 1
        if at >= len(self.recorded.updates):
            return
        then, _ = self._then(call, self.recorded.updates[at], kwargs)
        if then is None:
            return
        alpha = call.alpha
        old = self._at_the_pass(call, lambda: call.layer.own("edge_updater")(edge_index, size=size, **then))
        self.then, call.alpha = (out, old), alpha

    def propagate(
        self, call: Call, own: Callable[..., Tensor], edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        self.mode, self.table = "new", None
        passes, reading = self.recorded.passes, call.reading
        table = passes[call.passes] if call.passes < len(passes) else None
        for given in [] if table is None else [name for name, v in kwargs.items() if any(v is f for f in call.fixed)]:
            table.edge.pop(given, None)  # type: ignore[union-attr]  # the graph alone decides it
        rows = call.rows_of(kwargs)
        old = None if rows is None or table is None else self._beside(call, table, rows, kwargs)
        name = None if old is None else reading.times
        then, fixed = (None, False) if table is None else self._then(call, table, kwargs, name)
        if then is None:
            if rows is None:
                return own(edge_index, size=size, **kwargs)
            return call.without_messages(Operand(rows), own, edge_index, size, kwargs)
        self.table = table
        if fixed and reading.linear and not reading.parametric:
            if self.keep == 1.0 and self._known(call, kwargs):
                self.mode = "known"
                return own(edge_index[:, :0], size=size, **self._no_edges(kwargs, edge_index.shape[1]))
            self.mode = "linear"
            if rows is not None and old is not None:
                return call.without_messages(self._changed(call, rows, old), own, edge_index, size, kwargs)
            return own(edge_index, size=size, **self._less(kwargs, then))
        if rows is not None and old is not None:
            operand = self._corrected(call, own, edge_index, size, then, rows, old)
            return call.without_messages(operand, own, edge_index, size, kwargs)
        self.mode = "old"
        alpha, call.alpha = call.alpha, None
        self._at_the_pass(call, lambda: own(edge_index, size=size, **then), reading.parametric)
        call.alpha, self.mode = alpha, "both"
        return own(edge_index, size=size, **kwargs)

    def aggregate(
        self, call: Call, own: Callable[..., Tensor], inputs: Tensor, args: tuple, kwargs: dict
    ) -> Tensor:  # fmt: skip
        if self.mode == "known":
            shape = own(inputs, *args, **kwargs)
            self._note_known(call)
            return shape + self._total(call, shape)
        scaled = call.scaled(inputs)
        if self.mode == "old":
            self.old, self.old_messages = own(scaled, *args, **kwargs), (inputs, scaled)
            return self.old
        if self.mode == "both" and "softmax" not in call.reading.functions:
            assert self.old_messages is not None
            then = [self.keep * t for t in self.old_messages]
            call.note(inputs.detach() - then[0], scaled.detach() - then[1])
        else:
            call.note(inputs, scaled)
        out = own(scaled, *args, **kwargs)
        if self.table is not None:
            change = self._total(call, out)
            out = out + self.keep * (change if self.old is None else change - self.old)
        self.old = self.old_messages = None
        call.watch(out)
        return out

    # --- sums without messages ----------------------------------------------------------------------------------------

    def _beside(self, call: Call, table: Table, rows: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The table of what the sources passed on at the pass, where a sum without messages can read it."""
        name = call.reading.times
        assert name is not None
        old, total = _pair(table.node.get(name))[0], table.total
        if (
            old is None
            or total is None
            or (call.reading.linear and not call.reading.parametric and len(table.node) > 1)
        ):
            return None
        softmax = "softmax" in call.reading.functions
        if not softmax and (call.reading.parametric or not call.reading.linear or table.edge):
            return None  # what changed of a message is noted message by message
        fits = (old.dtype, old.device, old.shape[1:]) == (rows.dtype, rows.device, rows.shape[1:])
        same = (total.dtype, total.device, total.shape[1:]) == (rows.dtype, rows.device, rows.shape[1:])
        few = len(rows) <= getattr(call.batch, call.batch.side(0)).numel()
        return old if fits and same and old.is_contiguous() and few else None

    def _changed(self, call: Call, rows: Tensor, old: Tensor) -> Operand:
        """Linear messages: what changed since the pass, on top of the sums of the pass."""
        assert self.table is not None and self.table.total is not None
        sources, n_id = (call.batch.on(rows.device, call.batch.side(row)) for row in (0, 1))
        change, norm = ops.change(rows, old, sources, self.keep)
        return Operand(change, norm, (self.table.total, n_id, self.keep))

    def _corrected(
        self, call: Call, own: Callable[..., Tensor], edge_index: Tensor, size: Any, then: dict[str, Any],
        rows: Tensor, old: Tensor,
    ) -> Operand:  # fmt: skip
        """Messages now, on top of the sums of the pass less those of the drawn edges then."""
        assert self.table is not None and self.table.total is not None
        alpha, call.alpha = call.alpha, None
        found: list[Tensor] = []

        def aggregate(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            sources, n_id = (call.batch.on(rows.device, call.batch.side(row)) for row in (0, 1))
            targets = targets_of(*args, **kwargs)
            _, coef, at = fused.coefficients(call, rows, inputs, targets)
            base = (self.table.total, n_id, self.keep)  # type: ignore[union-attr]
            found.append(ops.gather_sum(old, sources[at.src], at.dst, at.sorted(coef * -self.keep), at.ptr, base))
            return inputs.new_zeros(targets, *inputs.shape[1:])

        call.layer.conv.__dict__["aggregate"], before = aggregate, call.layer.conv.__dict__["aggregate"]
        try:
            self._at_the_pass(call, lambda: own(edge_index, size=size, **then), call.reading.parametric)
        finally:
            call.layer.conv.__dict__["aggregate"] = before
        call.alpha = alpha
        return Operand(rows, None, (found[0], None, 1.0))

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _total(self, call: Call, out: Tensor) -> Tensor:
        assert self.table is not None and self.table.total is not None
        total = self.table.total
        rows = call.batch.on(total.device, "n_id")[: out.shape[call.layer.conv.node_dim]]
        return total.index_select(call.layer.conv.node_dim, rows).to(out.device, out.dtype)

    def _then(
        self, call: Call, table: Table, kwargs: dict[str, Any], ones: str | None = None
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
                then[name] = self._rows(call, table.node[name], value, table.side.get(name, 0))
                if then[name] is None:
                    return None, False
            elif (
                any(value is f for f in call.fixed)
                or name in table.own
                or not any(isinstance(v, Tensor) and v.dim() for v in _pair(value))
            ):
                continue
            elif name in table.edge and isinstance(value, Tensor):
                then[name], fixed = self._edges(call, table, name, value), False
            else:
                return None, False
        return then, fixed

    def _rows(self, call: Call, rows: Any, value: Any, side: int) -> Any:
        """Rows of the batch's nodes, of sources and targets where there are two."""
        if isinstance(rows, tuple) != isinstance(value, tuple | list):
            return None
        found: list[Tensor | None] = []
        sides = (0, 1) if isinstance(rows, tuple) else (side,)
        for row, now, end in zip(_pair(rows), _pair(value), sides, strict=True):
            if (row is None) != (now is None):
                return None
            if row is None:
                found.append(None)
                continue
            n_id = call.batch.on(row.device, call.batch.side(end))
            if now.shape[0] > n_id.numel() or now.shape[1:] != row.shape[1:]:
                return None
            found.append(row[n_id[: now.shape[0]]].to(now.device, now.dtype))
        return tuple(found) if isinstance(rows, tuple) else found[0]

    def _edges(self, call: Call, table: Table, name: str, value: Tensor) -> Tensor:
        edge, loop = table.places(call.batch.whole)
        assert call.place is not None and call.used is not None
        e_id, n_id = (call.batch.on(edge.device, k) for k in ("e_id", "n_id"))
        at = call.place.take(e_id, -1)
        target = n_id[call.used[1].to(n_id.device)]
        place = torch.where(at >= 0, edge[at.clamp(min=0)], -1)
        place = torch.where(place >= 0, place, loop[target])
        return table.edge[name][place.clamp(min=0)].to(value.device, value.dtype)

    def _known(self, call: Call, kwargs: dict[str, Any]) -> bool:
        """Whether the nodes' arguments are attributes of the data, now as then."""
        assert self.table is not None
        for name in self.table.node:
            value = kwargs[name]
            pair = _pair(value)
            if any(v is not None and (v.requires_grad or not isinstance(v, Tensor)) for v in pair):
                return False
            names = {batches.node_attribute(call.batch, v) for v in pair if v is not None}
            then = self.memory.own_names(self.table.node[name])
            if names != then or None in names:
                return False
        return bool(self.table.node)

    def _note_known(self, call: Call) -> None:
        """Nothing is left to chance, so that there is nothing to learn."""
        if call.round is not None:
            call.round.known = True

    def _no_edges(self, kwargs: dict[str, Any], edges: int) -> dict[str, Any]:
        assert self.table is not None
        node = self.table.node
        return {
            k: v[:0] if isinstance(v, Tensor) and v.dim() and v.shape[0] == edges and k not in node else v
            for k, v in kwargs.items()
        }

    def _less(self, kwargs: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
        """Nodes' arguments less what they were."""
        assert self.table is not None
        out = dict(kwargs)
        for name in self.table.node:
            now, before = _pair(kwargs[name]), _pair(then[name])
            one = [None if a is None else a - self.keep * b for a, b in zip(now, before, strict=True)]
            if len(now) == 2 and now[0] is now[1]:
                one[1] = one[0]
            out[name] = tuple(one) if isinstance(kwargs[name], tuple | list) else one[0]
        return out

    def _at_the_pass(self, call: Call, run: Callable[[], Tensor], parametric: bool = True) -> Tensor:
        """`run` with the layer's parameters of the pass, without dropout and without a gradient."""
        conv = call.layer.conv
        with torch.no_grad(), still(conv):
            if not parametric:
                return run()
            with _with_parameters(conv, self.recorded.old):
                return run()


@contextlib.contextmanager
def _with_parameters(conv: MessagePassing, values: dict[str, Tensor]) -> Iterator[None]:
    """Within, a layer has other parameters and buffers."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, value in values.items():
            where, _, name = path.rpartition(".")
            module = conv.get_submodule(where)
            held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
            if name in held:
                before.append((held, name, held[name]))
                held[name] = value
        yield
    finally:
        for held, name, value in before:
            held[name] = value


class Snapshots:
    """Those of a model's layers. They are taken when the model, in evaluation, runs over the whole data."""

    def __init__(
        self, model: nn.Module, data: Data | HeteroData, wholes: dict[Relation | None, Whole], noise: float = 0.0
    ):
        self.model, self.data, self.wholes, self.noise = model, data, wholes, noise
        self.layers = {name: scale_of(m) for name, m in layers_of(model).items()}
        self.kept: dict[Propagate, list[Recorded]] = {}
        self.counts: dict[Propagate, int] = {}  # forwards in the pass under way
        self.updated_last: tuple[Tensor, int] | None = None
        self.fresh = False  # whether there was a pass since the last step
        self.warned = False
        self.passed = 0.0  # seconds that the last pass of its own took
        self.waiting = False  # for the model's first step, which shows how it is called
        self._named = batches.attributes(data)
        self._own = {_place(v): k for k, v in self._named.items()}
        for layer in self.layers.values():
            assert layer is not None
            layer._memory = weakref.ref(self)

    def close(self) -> None:
        for layer in self.layers.values():
            if layer is not None and layer.memory is self:
                layer._memory = None
        self.kept.clear()

    def begin(self) -> None:
        """A forward of the model begins."""
        self.counts.clear()

    @property
    def apart(self) -> bool:
        """Whether a layer's sums on batches have another size than in a pass: what was passed on is then of no use."""
        return any(layer is not None and layer.shrinks for layer in self.layers.values())

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
        rows = [v for t in tables for a in t.node.values() for v in _pair(a) if v is not None and not self.own_name(v)]
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

    def listen(self, layer: Propagate, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A forward in evaluation on something that is no batch: recorded where it is the whole graph."""
        whole = self._whole_of([v for a in (*args, *kwargs.values()) for v in _pair(a) if isinstance(v, Tensor)])
        if whole is None:
            return layer._plain(*args, **kwargs)
        recording: Any = self._record(layer, whole)
        with layer.within(recording):
            out = layer._forward(*args, **kwargs)
        self.updated_last = None
        return out

    def _record(self, layer: Propagate, whole: Whole) -> Recording:
        """The next forward of a layer in the pass under way."""
        recording = Recording(layer, self, whole)
        recording.done.old = {k: v.detach().clone() for k, v in layer.conv.state_dict().items()}
        at = self.counts.get(layer, 0)
        self.counts[layer] = at + 1
        self.kept[layer] = [*self.kept.get(layer, [])[:at], recording.done]
        self.updated_last, self.fresh = None, True
        return recording

    def parts(self, layer: Propagate, edges: dict[Relation, Tensor]) -> Callable[[Tensor], Recording | None]:
        """What records each `propagate` of a layer that takes all relations as dictionaries, on no batch."""
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
        """The snapshot for this forward of a layer on a batch; a layer that is used n times has n."""
        self.counts.clear()
        self.fresh = self.fresh and not layer.conv.training
        kept = [r for r in self.kept.get(layer, ()) if r.relation == call.batch.relation]
        if not kept or self.apart or call.scale.numel() != call.batch.e_id.numel():
            return None
        return Applied(self, kept[call.number(args, kwargs) % len(kept)])

    def keep(self, value: Tensor) -> Tensor:
        """A table: the data's own tensor where it is one, which stays as it is; else a copy."""
        value = value.detach()
        own = self._own.get(_place(value))
        return self._named[own] if own is not None else value.clone()

    def own_name(self, value: Any) -> str | None:
        return self._own.get(_place(value)) if isinstance(value, Tensor) else None

    def own_names(self, rows: Any) -> set[str | None]:
        return {self.own_name(v) for v in _pair(rows) if v is not None}

    # --- a checkpoint -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What later steps depend on; tensors of the data itself are named, not kept."""

        def plain(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(plain(v) for v in value)
            name = self.own_name(value)
            return value if name is None else name

        def table(t: Table) -> dict[str, Any]:
            node = {k: plain(v) for k, v in t.node.items()}
            return {"node": node, "edge": t.edge, "own": t.own, "used": t.used if t.edge else None, "total": t.total,
                    "side": t.side}  # fmt: skip

        layers = {
            name: [
                {"passes": [table(t) for t in r.passes], "updates": [table(t) for t in r.updates], "old": r.old,
                 "relation": r.relation}
                for r in self.kept.get(layer, [])
            ]
            for name, layer in self.layers.items()
            if layer is not None
        }  # fmt: skip
        return {"fresh": self.fresh, "layers": layers}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a `state`; that of a model with other layers is of no use and left alone."""
        if state["layers"].keys() != self.layers.keys():
            return
        if not all(isinstance(forwards, list) for forwards in state["layers"].values()):
            return  # of a version that kept something else: the next pass decides

        def full(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return tuple(full(v) for v in value)
            return self._named[value] if isinstance(value, str) else value

        def table(t: dict[str, Any]) -> Table:
            node = {k: full(v) for k, v in t["node"].items()}
            return Table(node, dict(t["edge"]), dict(t["own"]), t["used"], t["total"], dict(t.get("side", {})))

        self.fresh = state["fresh"]
        for name, layer in self.layers.items():
            if layer is not None and state["layers"][name]:
                self.kept[layer] = [
                    Recorded(
                        [table(t) for t in r["passes"]], [table(t) for t in r["updates"]], dict(r["old"]),
                        None if r.get("relation") is None else tuple(r["relation"]),
                    )
                    for r in state["layers"][name]
                ]  # fmt: skip


def _pair(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _place(t: Tensor) -> tuple:
    """Two tensors with the same are the same numbers."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype
