"""Snapshots: what each layer sent and summed for every node at the last pass over the graph; on a batch, only what
changed since is sampled.
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
from adahop.pyg.arguments import Kwargs, as_tuple, at_edges, close, node_sides, read_whole, state_of, subtract
from adahop.pyg.call import Call
from adahop.pyg.fused import Operand, with_ones
from adahop.pyg.inference import inference, value_of
from adahop.pyg.memory import ControlledSum, ForwardRecorder, Memory
from adahop.pyg.root import Root
from adahop.pyg.whole_graph import HomogeneousGraph, WholeGraph
from adahop.pyg.wrap import Propagate, unwrapped
from adahop.typed import Relation

log = logging.getLogger("adahop")
EDGE_ATTRIBUTES = ("edge_weight", "edge_attr")


@dataclass
class PropagateRecord:
    """The arguments of one `propagate` (or `edge_updater`) at the last pass, and what it summed up."""

    node: dict[str, Any] = field(default_factory=dict)  # rows per node; a pair for sources and targets
    edge: dict[str, Tensor] = field(default_factory=dict)  # rows per edge in use
    data_names: dict[str, str] = field(default_factory=dict)  # of attributes of the data
    used: Tensor | None = None  # the edges in use, while `edge` is not empty
    total: Tensor | None = None  # what `aggregate` gave
    complete: bool = False  # whether all edges were in use
    side: dict[str, int] = field(default_factory=dict)  # whether a tensor's rows are of sources (0) or targets (1)
    _places: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def drop_edge_arguments(self, names: set[str]) -> None:
        """Forget arguments that follow from the graph alone: they are the same now."""
        self.edge = {name: rows for name, rows in self.edge.items() if name not in names}
        self.used = self.used if self.edge else None

    def places(self, whole_graph: WholeGraph) -> tuple[Tensor, Tensor]:
        """Where the edges of the data, and the self-loops of its nodes, lie among the edges in use; -1: nowhere."""
        if self._places is None:
            assert self.used is not None
            edges, used = whole_graph.edge_index.to(self.used.device), self.used
            aligned = align(edges, used, nodes=max(whole_graph.num_nodes), bipartite=whole_graph.bipartite)
            edge, loop = (used.new_full((n,), -1) for n in (edges.shape[1], whole_graph.num_nodes[1]))
            if aligned is not None:
                which, loops = torch.arange(used.shape[1], device=used.device), whole_graph.is_loop(used)
                edge = aligned.put(which + 1, edges.shape[1]) - 1
                loop[used[0, loops]] = which[loops]
            self._places = edge, loop
        return self._places


@dataclass
class ForwardRecord:
    """One forward of a layer over the whole graph."""

    passes: list[PropagateRecord] = field(default_factory=list)
    updates: list[PropagateRecord] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)  # and buffers, at the pass
    relation: Relation | None = None  # of typed data, where it was one


class SnapshotRecorder(ForwardRecorder):
    """A forward of a layer over the whole graph, while it is recorded."""

    def __init__(self, layer: Propagate, memory: Snapshots, whole_graph: WholeGraph):
        super().__init__(layer)
        self.memory, self.whole_graph = memory, whole_graph
        self.record = ForwardRecord(parameters={k: v.detach().clone() for k, v in layer.conv.state_dict().items()})
        self.record.relation = whole_graph.relation
        self.parts: list[Tensor] = []  # what `aggregate` gave; in several parts within `inference`
        self.last_update: Tensor | None = None  # what `edge_updater` gave

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        out = super().edge_updater(edge_index, size=size, **kwargs)
        record = self._record(edge_index, kwargs, "_edge_user_args")
        if record is not None:
            self.record.updates.append(record)
            self.last_update = out
        return out

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        self.parts = []
        out = super().propagate(edge_index, size=size, **kwargs)
        record = self._record(edge_index, kwargs)
        if record is not None and self.parts:
            record.total = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
            self.record.passes.append(record)
        return out

    def aggregate(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = super().aggregate(inputs, *args, **kwargs)
        self.parts.append(out.detach().clone())  # layers go on to change it in place
        return out

    def _record(self, edge_index: Any, kwargs: Kwargs, which: str = "_user_args") -> PropagateRecord | None:
        """The arguments; None where one is of an unknown kind, which may have changed when a batch is drawn."""
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            return None
        record, many = PropagateRecord(side=node_sides(self.layer.conv, which)), self.whole_graph.num_nodes
        used, every = (int((~self.whole_graph.is_loop(e)).sum()) for e in (edge_index, self.whole_graph.edge_index))
        record.complete = used >= every
        for name, value in kwargs.items():
            parts = as_tuple(value)
            rows = [v.shape[0] for v in parts if isinstance(v, Tensor) and v.dim()]
            if not rows:
                continue
            data_name = None if len(parts) > 1 else self.memory.data_name(value)
            if data_name is not None:
                self.memory.note(data_name)
                record.data_names[name] = data_name
            if value is self.last_update:
                continue  # computed again from the arguments of the edge update
            if _is_per_node(parts, many, record.side.get(name, 0)):
                one = None if parts[0] is None else self.memory.keep(parts[0])
                rest = [one if v is parts[0] else None if v is None else self.memory.keep(v) for v in parts[1:]]
                record.node[name] = (one, *rest) if rest else one
            elif data_name is None and rows == [edge_index.shape[1]]:
                record.edge[name] = self.memory.keep(value)
                record.used = edge_index
            elif data_name is None:
                return None
        return record


def _is_per_node(parts: tuple[Any, ...], many: tuple[int, int], side: int) -> bool:
    """Whether an argument has a row per node of the whole graph, sources' and targets' where it is a pair."""
    sizes = many if len(parts) == 2 else (many[side],) * len(parts)
    return all(not isinstance(v, Tensor) or v.shape[:1] == (n,) for v, n in zip(parts, sizes, strict=True))


class SnapshotSum(ControlledSum):
    """The sum of a layer in one forward on a batch, where x' and F(x') are those of the last pass, by the parameters
    that the layer had then.
    """

    def __init__(self, memory: Snapshots, call: Call, record: ForwardRecord):
        super().__init__(call)
        self.memory, self.record, self.cv_weight = memory, record, 1.0 - memory.noise
        self.updates = 0
        self.edge_update: tuple[Tensor, Tensor] | None = None  # what `edge_updater` gives now, and gave at the pass

    def after_edge_update(self, edge_index: Tensor, size: Any, kwargs: Kwargs, out: Tensor) -> None:
        at, self.updates = self.updates, self.updates + 1
        previous = self._previous_inputs(self.record.updates[at], kwargs)[0] if at < len(self.record.updates) else None
        if previous is not None:
            with self.on_previous(), self._previous_parameters():
                self.edge_update = out, self.call.layer.original("edge_updater")(edge_index, size=size, **previous)

    def propagate(self, edge_index: Tensor, size: Any, kwargs: Kwargs) -> Tensor:
        self.total = None
        call, original, reading = self.call, self.call.layer.original("propagate"), self.call.reading
        assert call.aligned is not None
        rows, passes = fused.source_rows(call, kwargs), self.record.passes
        record = passes[call.propagates] if call.propagates < len(passes) else None
        if record is None or (record.complete and call.aligned.share < 1.0):  # or the layer dropped some
            return call.propagate_rows(rows, edge_index, size, kwargs)
        record.drop_edge_arguments({name for name, v in kwargs.items() if self._unchanged(record, name, v)})
        table = None if rows is None else self._previous_table(record, rows)
        previous, edges_same = self._previous_inputs(record, kwargs, None if table is None else reading.row_argument)
        if previous is None:
            return call.propagate_rows(rows, edge_index, size, kwargs)
        self.total = record.total
        if edges_same and reading.linear and not reading.parametric:
            if self.cv_weight == 1.0 and self._inputs_same(record, kwargs):
                kwargs = at_edges(kwargs, slice(0), edge_index.shape[1], record.node)
                return call.layer.propagate_by(self.aggregate_exact, edge_index[:, :0], size, kwargs)
            if rows is not None and table is not None:
                return call.without_messages(self._changed_rows(rows, table), edge_index, size, kwargs)
            own = record.node.keys() - record.side.keys()  # read whole
            if not own & read_whole(call.layer.conv, "message", "aggregate"):
                change = {k: subtract(kwargs[k], previous[k], self.cv_weight) for k in record.node.keys() - own}
                return original(edge_index, size=size, **{**kwargs, **change})
        if rows is not None and table is not None:
            operand = self._corrected_total(edge_index, size, previous, rows, table)
            return call.without_messages(operand, edge_index, size, kwargs)
        with self.on_previous(), self._previous_parameters(reading.parametric):
            call.layer.propagate_by(self.aggregate_previous, edge_index, size, previous)
        return original(edge_index, size=size, **kwargs)

    @contextlib.contextmanager
    def _previous_parameters(self, parametric: bool = True) -> Iterator[None]:
        """Within, the layer has the parameters and buffers of the pass."""
        saved: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for path, value in self.record.parameters.items() if parametric else ():
                where, _, name = path.rpartition(".")
                module = self.call.layer.conv.get_submodule(where)
                held: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
                if name in held:
                    saved.append((held, name, held[name]))
                    held[name] = value
            yield
        finally:
            for held, name, value in saved:
                held[name] = value

    # --- sums without messages ----------------------------------------------------------------------------------------

    def _previous_table(self, record: PropagateRecord, rows: Tensor) -> Tensor | None:
        """All nodes' rows at the pass, where a sum without messages can read them in place."""
        call, reading = self.call, self.call.reading
        assert reading.row_argument is not None
        table, total, linear = as_tuple(record.node.get(reading.row_argument))[0], record.total, reading.linear
        if table is None or total is None or (linear and not reading.parametric and len(record.node) > 1):
            return None
        if "softmax" not in reading.functions and (reading.parametric or not linear or record.edge):
            return None  # what changed of a message is recorded message by message
        kind = rows.dtype, rows.device, rows.shape[1:]
        fits = all((t.dtype, t.device, t.shape[1:]) == kind for t in (table, total))
        return table if fits and table.is_contiguous() and len(rows) <= call.batch.ids(0).numel() else None

    def _changed_rows(self, rows: Tensor, table: Tensor) -> Operand:
        """Linear messages: what changed since the pass, on top of the sums of the pass."""
        assert self.total is not None
        batch, device = self.call.batch, rows.device
        change, norm = ops.change(rows, table, batch.ids(0, device), self.cv_weight)
        return Operand(change, norm, (self.total, batch.ids(1, device), self.cv_weight))

    def _corrected_total(self, edge_index: Tensor, size: Any, previous: Kwargs, rows: Tensor, table: Tensor) -> Operand:
        """Messages now, on top of the sums of the pass less those of the drawn edges at the pass."""
        assert self.total is not None
        call, found = self.call, []
        sources, targets = call.batch.ids(0, rows.device), call.batch.ids(1, rows.device)
        base = (self.total, targets, self.cv_weight)

        def aggregate(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            many = fused.num_targets(*args, **kwargs)
            _, coef, layout = fused.coefficients(call, rows, inputs, many)
            coef = layout.sorted(coef * -self.cv_weight)
            found.append(ops.gather_sum(table, sources[layout.src], layout.dst, coef, layout.ptr, base))
            return inputs.new_zeros(many, *inputs.shape[1:])

        with self.on_previous(), self._previous_parameters(call.reading.parametric):
            call.layer.propagate_by(aggregate, edge_index, size, previous)
        return Operand(rows, None, (found[0], None, 1.0))

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _total(self, out: Tensor) -> Tensor:
        assert self.total is not None
        dim = self.call.layer.conv.node_dim
        rows = self.call.batch.on(self.total.device, "n_id")[: out.shape[dim]]
        return self.total.index_select(dim, rows).to(out)

    def _previous_inputs(
        self, record: PropagateRecord, kwargs: Kwargs, ones: str | None = None
    ) -> tuple[dict[str, Any] | None, bool]:
        """The arguments as they were at the pass, and whether those of edges are the same now; (None, False) where
        they are not known.

        `ones` names an argument whose rows are read in the table: it gets ones instead.
        """
        previous, edges_same = dict(kwargs) if ones is None else with_ones(ones, kwargs), True
        if any(kwargs.get(name) is None for name in (*record.node, *record.edge, *record.data_names)):
            return None, False
        for name, value in kwargs.items():
            if not isinstance(value, Tensor | tuple | list) or name == ones:
                continue
            if self.edge_update is not None and value is self.edge_update[0]:
                previous[name], edges_same = self.edge_update[1], False
            elif name in record.node:
                previous[name] = self._previous_rows(record.node[name], value, record.side.get(name, 0))
                if previous[name] is None:
                    return None, False
            elif name in record.edge and isinstance(value, Tensor):
                previous[name], edges_same = self._previous_edges(record, name, value), False
                if previous[name] is None:
                    return None, False
            elif not (
                any(value is f for f in self.call.graph_values)
                or self._is_attribute(record.data_names.get(name), value)
                or not any(isinstance(v, Tensor) and v.dim() for v in as_tuple(value))
            ):
                return None, False
        return previous, edges_same

    def _previous_rows(self, rows: Any, value: Any, side: int) -> Any:
        """A node-level argument at the pass, for the batch's nodes; None where it has another form now."""
        if isinstance(rows, tuple) != isinstance(value, tuple | list):
            return None
        found: list[Tensor | None] = []
        sides = (0, 1) if isinstance(rows, tuple) else (side,)
        for row, current, end in zip(as_tuple(rows), as_tuple(value), sides, strict=True):
            if (row is None) != (current is None):
                return None
            if row is None:
                found.append(None)
                continue
            ids = self.call.batch.ids(end, row.device)
            if current.shape[0] > ids.numel() or current.shape[1:] != row.shape[1:]:
                return None
            found.append(row[ids[: current.shape[0]]].to(current.device, current.dtype))
        return tuple(found) if isinstance(rows, tuple) else found[0]

    def _unchanged(self, record: PropagateRecord, name: str, value: Any) -> bool:
        """Whether an edge-level argument follows from the graph alone, and was the same at the pass."""
        if name not in record.edge or not any(value is f for f in self.call.graph_values):
            return False
        previous = self._previous_edges(record, name, value)
        return previous is not None and close(previous, value)

    def _previous_edges(self, record: PropagateRecord, name: str, value: Tensor) -> Tensor | None:
        """An edge-level argument at the pass, for the edges in use; None where it may have the scale in it."""
        call = self.call
        scaled = any(value is v for v in call.scaled_values)
        if call.scaled_values and not scaled:
            return None
        edge, loop = record.places(call.batch.whole_graph)
        assert call.aligned is not None and call.used is not None
        e_id, n_id = (call.batch.on(edge.device, k) for k in ("e_id", "n_id"))
        at = call.aligned.take(e_id, -1)
        target = n_id[call.used[1].to(n_id.device)]
        place = torch.where(at >= 0, edge[at.clamp(min=0)], -1)
        place = torch.where(place >= 0, place, loop[target])
        rows = record.edge[name][place.clamp(min=0)].to(value.device, value.dtype)
        return rows * call.aligned.take(call.scale).to(rows).view(-1, *[1] * (rows.dim() - 1)) if scaled else rows

    def _is_attribute(self, name: str | None, value: Any) -> bool:
        """Whether an argument is the attribute of the batch that it was of the data at the pass."""
        if name is None or not isinstance(value, Tensor):
            return False
        batch = self.call.batch
        found = batches.data_edge_attribute(batch, value) or batches.data_node_attribute(batch, value)
        return found is not None and found.rpartition(".")[2] == name.rpartition(".")[2]

    def _inputs_same(self, record: PropagateRecord, kwargs: Kwargs) -> bool:
        """Whether the node-level arguments are attributes of the data, now as at the pass."""
        for name, rows in record.node.items():
            values = [v for v in as_tuple(kwargs[name]) if v is not None]
            if any(v.requires_grad or not isinstance(v, Tensor) for v in values):
                return False
            names = {batches.data_node_attribute(self.call.batch, v) for v in values}
            if None in names or names != {self.memory.data_name(v) for v in as_tuple(rows) if v is not None}:
                return False
        return bool(record.node)


class Snapshots(Memory):
    """Those of a model's layers. They are taken when the model, in evaluation, runs over the whole data."""

    def __init__(
        self,
        model: nn.Module,
        data: Data | HeteroData,
        whole_graphs: dict[Relation | None, WholeGraph],
        noise: float = 0.0,
    ):
        super().__init__(model, data, noise)
        self.whole_graphs = whole_graphs
        self.fresh = False  # whether there was a pass since the last step
        self.warned = False
        self.pass_seconds = 0.0  # that the last pass made by the loader took
        self.awaits_step = False  # the model's first step shows how it is called
        self.data_unchanged = True  # what the records refer to, since the pass
        self._look_at_data()

    def _look_at_data(self) -> None:
        """What the data has at a pass; a script may change it while it trains."""
        self._attributes = batches.attributes(self.data)
        self._names = {_memory_key(v): k for k, v in self._attributes.items()}
        self._states: dict[str, tuple[int, int | None]] = {}  # of the attributes that records refer to

    @property
    def _unusable(self) -> bool:
        """Whether a layer's sums on batches have another size than in a pass."""
        return any(layer.reduces_sums for layer in self.layers.values())

    def begin_epoch(self) -> None:
        """A pass over the data, unless there was one since the last step; a model that cannot make it goes without.

        Where it is not clear which attributes of the data the model takes, the pass waits for its first step.
        """
        if self.fresh or self._unusable:
            return
        root = Root.of(self.model)
        self.awaits_step = root.arguments is None and self._call_unclear()
        if self.awaits_step:
            return
        began = time.perf_counter()
        try:
            inference(self.model, self.data)
            self.pass_seconds = time.perf_counter() - began
            log.info("%s", self)
        except Exception as e:
            self.awaits_step = root.arguments is None
            if not self.awaits_step and not self.warned:
                self.warned = True
                name = type(unwrapped(self.model)).__name__
                tell(
                    f"no snapshot can be taken of {name} ({e}); run adahop.inference on the part of it that takes x "
                    "and edge_index once an epoch, or pass estimator='plain'"
                )

    def begin_batch(self, whole_graph: WholeGraph) -> None:
        """The pass that waited for the model's first step is made; one over data that was changed since is not used."""
        now = batches.attributes(self.data) if self._states else {}
        self.data_unchanged = all(k in now and state_of(now[k]) == state for k, state in self._states.items())
        if self.awaits_step and Root.of(self.model).arguments is not None:
            self.begin_epoch()

    def _call_unclear(self) -> bool:
        """Whether the model may or may not take an edge attribute that the data has."""
        takes = inspect.signature(unwrapped(self.model).forward).parameters
        optional = {name for name, p in takes.items() if p.default is not p.empty}
        return any(
            name.removesuffix("_dict") in EDGE_ATTRIBUTES and value_of(self.data, name) is not None for name in optional
        )

    def cost(self) -> dict[str, float]:
        """Bytes, and milliseconds of a pass."""
        records = [t for forwards in self.forwards.values() for r in forwards for t in (*r.passes, *r.updates)]
        rows = [v for t in records for a in t.node.values() for v in as_tuple(a) if v is not None]
        rows = [v for v in rows if not self.data_name(v)]
        rows += [v for t in records for v in (*t.edge.values(), t.total) if v is not None]
        many = {v.data_ptr(): v.nbytes for v in rows}
        return {"bytes": float(sum(many.values())), "pass_ms": 1e3 * self.pass_seconds}

    def __str__(self) -> str:
        return (
            f"snapshot, a pass over the graph per epoch: {self.cost()['bytes'] / 2**20:.1f} MiB, the pass took "
            f"{self.pass_seconds:.2f} s"
            + ("" if isinstance(self.data, HeteroData) else "; estimator='history' needs none")
        )

    # --- called by `Propagate` ----------------------------------------------------------------------------------------

    def recorder(self, layer: Propagate, tensors: list[Tensor]) -> SnapshotRecorder | None:
        whole_graph = self._whole_graph_of(tensors)
        if whole_graph is None:
            return None
        recorder = self._recorder(layer, whole_graph)
        for name in {self.data_name(t) for t in tensors} - {None}:
            self.note(str(name))  # what the layer makes of it, such as degrees, is in the record
        return recorder

    def _recorder(self, layer: Propagate, whole_graph: WholeGraph) -> SnapshotRecorder:
        """For the next forward of a layer in the pass under way."""
        if not self.forward_counts:
            self._look_at_data()
        recorder, at = SnapshotRecorder(layer, self, whole_graph), self._next_forward(layer)
        self.forwards[layer] = [*self.forwards.get(layer, [])[:at], recorder.record]
        self.fresh = True
        return recorder

    def recorders(self, layer: Propagate, edges: dict[Relation, Tensor]) -> Callable[[Tensor], SnapshotRecorder | None]:
        every = self.whole_graphs[None]

        def recorder_for(edge_index: Tensor) -> SnapshotRecorder | None:
            relation = next((r for r, e in edges.items() if e is edge_index), None)
            graph = self.whole_graphs.get(relation)
            if relation is None:
                graph = every.stacked if isinstance(every, HomogeneousGraph) else None
            return self._recorder(layer, graph) if graph is not None and _has_edges(graph, edge_index) else None

        return recorder_for

    def _whole_graph_of(self, tensors: list[Tensor]) -> WholeGraph | None:
        """The whole graph, or the relation, whose edges are among some tensors, with rows for all its sources."""
        return next(
            (
                graph
                for graph in self.whole_graphs.values()
                for edges in tensors
                if any(t.shape[:1] == graph.num_nodes[:1] for t in tensors) and _has_edges(graph, edges)
            ),
            None,
        )

    def control_for(self, call: Call, args: tuple, kwargs: Kwargs) -> SnapshotSum | None:
        layer = call.layer
        self.forward_counts.clear()
        self.fresh = self.fresh and not layer.conv.training
        records = [r for r in self.forwards.get(layer, ()) if r.relation == call.batch.relation]
        if not records or not self.data_unchanged or self._unusable:
            return None
        if call.scale.numel() != call.batch.e_id.numel():
            return None
        if call.why_no_control((*args, *kwargs.values())) is not None:
            return None
        return SnapshotSum(self, call, records[call.forward_number(args, kwargs) % len(records)])

    def keep(self, value: Tensor) -> Tensor:
        """The data's own tensor where it is one, which does not change; else a copy."""
        value = value.detach()
        name = self.data_name(value)
        if name is None:
            return value.clone()
        self.note(name)
        return self._attributes[name]

    def note(self, name: str) -> None:
        """A record refers to an attribute of the data."""
        self._states[name] = state_of(self._attributes[name])

    def data_name(self, value: Any) -> str | None:
        """The attribute of the data that a tensor is."""
        return self._names.get(_memory_key(value)) if isinstance(value, Tensor) else None

    # --- a checkpoint -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What later steps depend on; tensors of the data itself are stored by name."""

        def named(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(named(v) for v in value)
            return self.data_name(value) or value

        return {"fresh": self.fresh, "layers": self._serialized(named)}

    def restore(self, state: dict[str, Any]) -> None:
        layers = state.get("layers", {})
        if layers.keys() != self.layers.keys() or not all(isinstance(f, list) for f in layers.values()):
            return  # of a version that kept something else: the next pass decides

        def tensors(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return tuple(tensors(v) for v in value)
            return self._attributes[value] if isinstance(value, str) else value

        def record(stored: dict[str, Any]) -> PropagateRecord:
            return PropagateRecord(**{**stored, "node": {k: tensors(v) for k, v in stored["node"].items()}})

        self.fresh = state["fresh"]
        self._restore_forwards(layers, ForwardRecord, record)


def _has_edges(graph: WholeGraph, edges: Tensor) -> bool:
    """Whether these are the edges of the graph, in its order; another graph may have as many."""
    if tuple(edges.shape) != (2, graph.num_edges):
        return False
    own = graph.edge_index
    return _memory_key(own) == _memory_key(edges) or torch.equal(own.to(edges.device), edges)


def _memory_key(t: Tensor) -> tuple:
    """Two tensors with the same key share memory and are the same numbers."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype
