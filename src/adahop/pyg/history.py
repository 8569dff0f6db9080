"""Histories: what each layer was last sent by every node, kept up to date without a pass over the graph.

A layer's sum on a batch is f(x) + c (F(x') - f(x')): f over the drawn edges, F over all, x' the rows kept. Both are
formed now, from the same rows and the same parameters, so that whatever x' holds the mean is right. F reads the rows of
all neighbours of the targets that the seeds' results depend on; that costs their degrees. Rows are renewed by the
training batches, and the oldest by batches of nodes without edges, whose sums are all F.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from adahop.pyg import batches
from adahop.pyg.arguments import (
    CLOSE,
    Kwargs,
    NodeArguments,
    as_tuple,
    eval_mode,
    first_of_each,
    node_arguments,
    read_whole,
    sources_of,
    state_of,
)
from adahop.pyg.batches import DrawnBatch
from adahop.pyg.call import Call, in_backward
from adahop.pyg.history_sum import HistorySum
from adahop.pyg.hops import Hops, add_scale, cut
from adahop.pyg.inference import arguments_of
from adahop.pyg.memory import ForwardRecorder, Memory
from adahop.pyg.neighbours import AllNeighbours, ForwardHistory, NoHistory, PassHistory
from adahop.pyg.root import Root
from adahop.pyg.rows import NodeRows
from adahop.pyg.whole_graph import WholeGraph
from adahop.pyg.wrap import Propagate, unwrapped
from adahop.storage import MEMORY, Storage

log = logging.getLogger("adahop")
DROPOUT_SHARE = 0.3  # of the way that a row moves to a new one that dropout has changed
DECAY = 0.9  # of the dot products of earlier batches
NUMBERS = ("steps", "cursor", "round", "refresh")  # of a state


class LayerHistories(Memory):
    """Those of a model's layers, in place of `Snapshots`."""

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        noise: float = 0.0,
        dtype: torch.dtype = torch.float32,
        storage: Storage = MEMORY,
        refresh: int = 0,
        disjoint: bool = False,
        transform: Callable[[Data], Data] | None = None,
        device: torch.device | str = "cpu",
    ):
        """`device` is where batches are drawn: rows lie there too."""
        super().__init__(model, data, noise)
        self.device = torch.device(device)
        self.disjoint, self.transform = disjoint, transform
        self.dtype, self.storage, self.refresh = dtype, storage, refresh
        self.num_nodes = int(data.num_nodes or 0)
        self.whole_graph: WholeGraph | None = None
        self.renewing = False  # the oldest rows
        self.steps, self.cursor, self.round = 0, 0, 0
        self.stamp = torch.zeros(self.num_nodes, dtype=torch.int32, device=device)  # the step that renewed a row last
        self._generators = _generator_states()  # at the start of the model's forward
        self.spent = {"read": 0.0, "renew": 0.0}
        self._first_inputs: dict[Propagate, list[Tensor | None]] | None = None  # of the batch that shows the layers
        self._levels: dict[Any, int] = {}  # of that batch: how many sums lie before a result, by its gradient function
        self._num_passes = 0  # of that batch so far
        self._pending: list[Callable[[], Any]] = []

    def close(self) -> None:
        super().close()
        self._pending.clear()

    def begin_forward(self) -> None:
        """Rows that the forward before has sent are written now, when nothing computes with them any more."""
        super().begin_forward()
        self.write_pending()
        self._generators = _generator_states()

    def write_pending(self) -> None:
        for write in self._pending:
            write()
        self._pending.clear()

    def begin_epoch(self) -> None:
        """What the last epoch cost is written to the log."""
        if self.steps:
            log.info("%s", self)

    def begin_batch(self, whole_graph: WholeGraph) -> None:
        """The oldest rows are renewed."""
        self.whole_graph = whole_graph
        self.write_pending()
        if not self.forwards:
            return
        if self._first_inputs is not None and self.steps == 0:
            self._first_inputs, self._levels = None, {}
            for history in self._passes:
                history.spare = {}
                if history.data_name is None:
                    history.sums = history.filled = None
            log.info("%s", self)
        self.steps += 1
        self._forget_sums_of_changed_data()
        began = time.perf_counter()
        if self.refresh:
            self._renew_oldest()
        self.spent["renew"] += time.perf_counter() - began

    def _forget_sums_of_changed_data(self) -> None:
        """The sums of the data's own rows hold as long as a script does not change these."""
        for history in self._passes:
            table = self.data.get(history.data_name) if history.data_name else None
            if isinstance(table, Tensor) and history.filled is not None and history.state != state_of(table):
                if history.state is not None:
                    history.filled.zero_()
                history.state = state_of(table)

    @property
    def _passes(self) -> list[PassHistory]:
        """Those of all layers and forwards."""
        return [p for forwards in self.forwards.values() for f in forwards for p in f.passes]

    @property
    def bytes(self) -> int:
        every = (p for fs in self.forwards.values() for f in fs for p in (*f.passes, *f.updates))
        return sum(t.bytes for p in every for t in p.tables())

    def cost(self) -> dict[str, float]:
        """Bytes, and milliseconds per step for reading all neighbours' rows and for renewing the oldest."""
        steps = max(self.steps, 1)
        return {"bytes": float(self.bytes), **{f"{k}_ms": 1e3 * v / steps for k, v in self.spent.items()}}

    def __str__(self) -> str:
        kind, cost = str(self.dtype).removeprefix("torch."), self.cost()
        where = "memory" if self.storage is MEMORY else "files"
        without = [name for name, layer in self.layers.items() if any(f.why for f in self.forwards.get(layer, []))]
        return (
            f"history, without a pass over the graph: {self.bytes / 2**20:.1f} MiB of {kind} rows in {where}"
            + (f", none for layers {', '.join(without)}" if without else "")
            + f"; per step {cost['read_ms']:.1f} ms to read all neighbours' rows"
            + (f", {cost['renew_ms']:.1f} ms to renew the {self.refresh} oldest" if self.refresh else "")
        )

    # --- called by `Propagate` ----------------------------------------------------------------------------------------

    def recorder(self, layer: Propagate, tensors: list[Tensor]) -> HistoryRecorder | None:
        at, forwards = self._next_forward(layer), self.forwards.get(layer, [])
        edges = self.data.edge_index
        every = any(t.shape == edges.shape and torch.equal(t, edges.to(t.device)) for t in tensors)
        if at >= len(forwards) or forwards[at].why or not every:
            return None
        self.stamp.fill_(self.steps)
        return HistoryRecorder(layer, forwards[at], self.num_nodes)

    def control_for(self, call: Call, args: tuple, kwargs: Kwargs) -> HistorySum | None:
        if call.batch.num_edges is None or call.scale.numel() != call.batch.e_id.numel():
            return None
        forward = self._forward_of(call, args, kwargs)
        if forward is None:
            return None
        random = call.layer.conv.training and not all(map(torch.equal, _generator_states(), self._generators))
        neighbours = missing = None
        if not self.is_first_batch(call) and not forward.why and forward.passes:
            began = time.perf_counter()
            try:
                neighbours, missing = self._all_neighbours(call, forward, args, kwargs)
            except NoHistory as e:
                self._do_without(call.layer, forward, str(e))
            self.spent["read"] += time.perf_counter() - began
        return HistorySum(self, call, forward, neighbours, missing, random)

    def _forward_of(self, call: Call, args: tuple, kwargs: Kwargs) -> ForwardHistory | None:
        n = call.forward_number(args, kwargs)
        forwards = self.forwards.setdefault(call.layer, [])
        if self._first_inputs is None and not any(self.forwards.values()):
            self._first_inputs = call.batch.forward_inputs
        if self.is_first_batch(call) and n == len(forwards) and not in_backward():
            forwards.append(ForwardHistory())
        forward = forwards[n % len(forwards)] if forwards else None
        if forward is not None and not forward.why:
            self._check_layer(call, forward, (*args, *kwargs.values()))
        return forward

    def _check_layer(self, call: Call, forward: ForwardHistory, values: tuple) -> None:
        if call.reading.left_alone:
            forward.why = "it stays as PyG has it"  # of which `Root` warns
        elif call.reading.estimated:
            self._do_without(call.layer, forward, "its degrees are estimated from the drawn edges")
        elif call.layer.reduces_sums:
            self._do_without(call.layer, forward, "its sums are kept at the size of the drawn neighbours")
        elif (why := call.why_no_control(values)) is not None:
            self._do_without(call.layer, forward, why)

    def _all_neighbours(
        self, call: Call, forward: ForwardHistory, args: tuple, kwargs: Kwargs
    ) -> tuple[AllNeighbours | None, Tensor | None]:
        """The neighbours of all targets. Where sums never change: those of the targets whose sums are missing,
        and which targets these are.
        """
        targets = max(self.needed_nodes(call, p.level)[0] for p in forward.passes)
        nodes, missing = call.batch.n_id[:targets], None
        if len(forward.passes) == 1 and (history := forward.passes[0]).data_name is not None:
            assert history.filled is not None
            missing = (~history.filled[nodes]).nonzero().flatten()
            nodes = nodes[missing]
        elif not self.renewing and not any(p.cv_weight for p in forward.passes):
            return None, None
        if not nodes.numel():
            return None, None
        neighbours = AllNeighbours(call, nodes, forward)
        neighbours.run(args, kwargs, call)
        if not forward.tried:  # edge values that follow from the graph alone stay the same with other rows of nodes
            on_zeros = neighbours.passes
            neighbours.run(args, kwargs, call, random=True)
            for history, a, b in zip(forward.passes, on_zeros, neighbours.passes, strict=True):
                history.complete = a.aligned.share == 1.0
                if any(not torch.allclose(a.edge[k], b.edge[k], rtol=CLOSE, atol=CLOSE) for k in a.edge):
                    raise NoHistory("it makes edge values from nodes before it passes messages")
            forward.tried = True
        return neighbours, missing

    def _do_without(self, layer: Propagate, forward: ForwardHistory, why: str) -> None:
        forward.why = why
        name = next((n for n, one in self.layers.items() if one is layer), "?")
        Root.of(self.model).warn_once(f"layer '{name}' ({type(layer.conv).__name__}) goes without a history: {why}")

    # --- called by `HistorySum` ---------------------------------------------------------------------------------------

    def is_first_batch(self, call: Call) -> bool:
        """Whether this is the batch that shows which layers there are."""
        return self._first_inputs is not None and call.batch.forward_inputs is self._first_inputs

    def needed_nodes(self, call: Call, level: int) -> tuple[int, int]:
        """How many of the batch's first nodes have sums, and rows, that the seeds' results depend on."""
        many = call.batch.num_nodes or [0]
        if self.renewing:
            return many[0], many[0]
        edges = call.batch.num_edges or []
        hops = next((h for h, m in enumerate(edges) if m == 0), len(edges))  # a hop of none estimates nothing
        return sum(many[: max(hops - level, 0)]), sum(many[: max(hops - level + 1, 0)])

    def add_pass(self, call: Call, forward: ForwardHistory, kwargs: Kwargs, out: Tensor) -> None:
        """A history for a `propagate` of the first batch."""
        node = node_arguments(call.layer.conv)
        level = self._level(kwargs)
        if isinstance(out, Tensor) and out.grad_fn is not None:
            self._levels[out.grad_fn] = level + 1
        self._num_passes += 1
        if forward.why:
            return
        history = self.new_pass(kwargs, node)
        history.level, history.shape = level, tuple(out.shape[1:]) if isinstance(out, Tensor) else ()
        for update in forward.updates[len(forward.passes) :]:
            update.level = level
        data_name = self._data_name(call, kwargs, node) if not forward.passes else None
        for other in forward.passes:  # the sums of several are formed together, so those of the first are not kept
            other.data_name, other.rows = None, {**other.rows, **other.spare}
        if data_name is not None and call.reading.linear and not call.reading.parametric:
            history.data_name, history.rows, history.spare = data_name, {}, history.rows
            history.filled = torch.zeros(self.num_nodes, dtype=torch.bool, device=self.device)
        rows = {v.shape[0] for k in node for v in as_tuple(kwargs.get(k)) if isinstance(v, Tensor)}
        edges = 0 if call.aligned is None else call.aligned.edges
        for name in read_whole(call.layer.conv, "message", "aggregate"):
            value = kwargs.get(name)
            if isinstance(value, Tensor) and value.dim() and value.shape[0] in rows - {edges}:
                self._do_without(call.layer, forward, f"its messages read all rows of `{name}`")
        dims = {v.dim() for k in node for v in as_tuple(kwargs.get(k)) if isinstance(v, Tensor)}
        if call.layer.conv.node_dim % max(dims, default=1) != 0:
            self._do_without(call.layer, forward, "its nodes are not the first dimension of what it sums")
        forward.passes.append(history)

    def new_pass(self, kwargs: Kwargs, node: NodeArguments) -> PassHistory:
        """A history with room for the sources' rows of some arguments."""
        history = PassHistory()
        for name, sides in node.items():
            current = sources_of(kwargs.get(name))
            if "j" in sides and current is not None and current.is_floating_point():
                shape = tuple(current.shape[1:])
                history.rows[name] = self.new_rows(shape, self.dtype)
        return history

    def new_rows(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> NodeRows:
        return NodeRows(self.num_nodes, shape, dtype, self.storage, self.device)

    def _data_name(self, call: Call, kwargs: Kwargs, node: NodeArguments) -> str | None:
        """The attribute of the data that all node-level arguments are, with the values that it has in the data."""
        names = set()
        for name in node:
            value = sources_of(kwargs.get(name))
            if value is None or value.requires_grad or node[name] != {"j"}:
                return None
            names.add(batches.data_node_attribute(call.batch, value))
        return names.pop() if len(names) == 1 else None

    def _level(self, kwargs: Kwargs) -> int:
        """How many sums lie between the features and these arguments, found from their gradient functions."""
        start = [v.grad_fn for a in kwargs.values() for v in as_tuple(a) if isinstance(v, Tensor)]
        if len(self._levels) < self._num_passes or not torch.is_grad_enabled():
            return self._num_passes  # one after the other, where results have no gradient
        level, seen, stack = 0, set(), [f for f in start if f is not None]
        while stack:
            f = stack.pop()
            if f in seen:
                continue
            seen.add(f)
            if f in self._levels:
                level = max(level, self._levels[f])
                continue
            stack += [g for g, _ in f.next_functions if g is not None]
        return level

    def renew_rows(
        self,
        control: HistorySum,
        history: PassHistory,
        kwargs: Kwargs,
        previous: Kwargs | None,
        sources: int,
    ) -> None:
        """The current rows of the first `sources` nodes replace those kept, once this step's forward is over."""
        call, forward = control.call, control.forward
        if in_backward() or not sources:
            return
        renewed = [(history, kwargs)]
        if call.propagates == len(forward.passes) - 1:
            renewed += [(u, k) for u, (_, k) in zip(forward.updates, control.updates, strict=False)]
        n_id = call.batch.n_id[:sources]
        at = first_of_each(n_id) if self.disjoint else None
        n_id = n_id if at is None else n_id[at]
        history.random = control.random
        share = DROPOUT_SHARE if control.random else 1.0
        for one, inputs in renewed:
            for name, rows in one.rows.items():
                current = sources_of(inputs[name]).detach()[:sources]
                current = current if at is None else current[at]
                self._pending.append(lambda rows=rows, new=current: rows.write(n_id, new, share))  # type: ignore[misc]
        if not self.renewing and previous is not None:
            dots = self._dots(history, kwargs, previous, sources)
            self._pending.append(lambda: self._add_dots(history, dots))
        if history.level == max(p.level for p in self._passes):
            self._pending.append(lambda: self.stamp.index_fill_(0, n_id, self.steps))

    def _dots(self, history: PassHistory, kwargs: Kwargs, previous: Kwargs, sources: int) -> list[Tensor]:
        """<x, x'> and <x', x'>"""
        pairs = [
            tuple(sources_of(inputs[k]).detach()[:sources].flatten().float() for inputs in (kwargs, previous))
            for k in history.rows
        ]
        return [torch.stack([x @ old for x, old in pairs]).sum(), torch.stack([old @ old for _, old in pairs]).sum()]

    def _add_dots(self, history: PassHistory, dots: list[Tensor]) -> None:
        history.dots = [DECAY * a + float(b) for a, b in zip(history.dots, dots, strict=True)]

    # --- the oldest rows ----------------------------------------------------------------------------------------------

    def _oldest(self) -> Tensor:
        """The next nodes, in a round over all, that nothing has renewed since the round before."""
        found, left = [], self.refresh
        for _ in range(-(-self.num_nodes // self.refresh)):
            stop = min(self.cursor + self.refresh, self.num_nodes)
            part = torch.arange(self.cursor, stop, device=self.device)
            part = part[self.stamp[self.cursor : stop] <= self.round][:left]
            last = int(part[-1]) + 1 if part.numel() == left else stop
            found.append(part)
            left -= part.numel()
            self.cursor = last % self.num_nodes
            if self.cursor == 0:
                self.round = self.steps - 1
            if left == 0 or self.cursor == 0:
                break
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.long, device=self.device)

    def _renew_oldest(self) -> None:
        if any(f.why for fs in self.forwards.values() for f in fs):
            self.refresh = 0  # a layer without a history gives a node without edges a wrong sum
            return
        nodes = self._oldest()
        if nodes.numel() == 0:
            return
        root, model = Root.of(self.model), unwrapped(self.model)
        arguments, self.renewing = root.arguments, True
        try:
            with torch.no_grad(), eval_mode(model):
                model.eval()
                self._run(nodes)
            self.write_pending()
        except Exception as e:
            self.refresh = 0
            self._pending.clear()
            Root.of(self.model).warn_once(
                f"the oldest rows of {type(model).__name__} are not renewed ({' '.join(str(e).split())}), "
                "only those of nodes in training batches"
            )
        finally:
            self.renewing, root.arguments = False, arguments

    def _run(self, nodes: Tensor) -> None:
        """The model on some nodes; one edge is there so that layers find the batch, and counts for nothing."""
        one = torch.zeros(1, dtype=torch.long, device=self.device)
        scale = torch.ones(1, device=self.device)
        hops = Hops(nodes, torch.stack([one, one]), one, scale, None, [nodes.numel()], [1], [])
        batch = add_scale(cut(self.data, hops.output(nodes)), hops)
        batch = batch if self.transform is None else self.transform(batch)
        model = unwrapped(self.model)
        device = next((p.device for p in model.parameters()), batch.edge_index.device)
        batch = batch.to(device)
        assert self.whole_graph is not None
        drawn = DrawnBatch(nodes, one, hops.scale, self.whole_graph, hops.num_nodes, hops.num_edges, [])
        drawn.memory = weakref.ref(self)
        batches.register(batch, drawn)
        model(**arguments_of(model, batch, device, {}))

    # --- a checkpoint -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        self.write_pending()

        def leaf(value: Any) -> Any:
            return (value.shape, value.tensors()) if isinstance(value, NodeRows) else value

        return {"history": self._serialized(leaf), "stamp": self.stamp, "arguments": Root.of(self.model).arguments,
                **{k: getattr(self, k) for k in NUMBERS}}  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        layers = state.get("history", {})
        if layers.keys() != self.layers.keys() or state["stamp"].numel() != self.num_nodes:
            return

        def table(stored: Any, dtype: torch.dtype) -> NodeRows:
            shape, tensors = stored
            rows = self.new_rows(shape, dtype)
            if tensors.keys() == rows.tensors().keys() and tensors["value"].dtype == dtype:
                for k, tensor in rows.tensors().items():
                    tensor.copy_(tensors[k])
            else:  # stored in another precision
                value = tensors["value"].float()
                value = value * tensors["scale"].unsqueeze(1) if "scale" in tensors else value
                rows.write(torch.arange(self.num_nodes, device=self.device), value)
            return rows

        def history(stored: dict[str, Any]) -> PassHistory:
            made = PassHistory(**{**stored, "dots": list(stored["dots"]), "shape": tuple(stored["shape"])})
            made.rows = {name: table(rows, self.dtype) for name, rows in stored["rows"].items()}
            made.sums = None if stored["sums"] is None else table(stored["sums"], torch.float32)
            made.filled = None if stored["filled"] is None else stored["filled"].to(self.device, copy=True)
            return made

        self._restore_forwards(layers, ForwardHistory, history)
        self.stamp = state["stamp"].to(self.device, copy=True)
        for k in NUMBERS:
            setattr(self, k, state[k])
        root = Root.of(self.model)
        root.arguments = state["arguments"] if root.arguments is None else root.arguments


def _generator_states() -> list[Tensor]:
    """Of torch's generators. They change where a model draws random numbers, as for dropout."""
    of_device = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *of_device]


class HistoryRecorder(ForwardRecorder):
    """A forward of a layer over the whole graph, which renews all rows."""

    def __init__(self, layer: Propagate, forward: ForwardHistory, nodes: int):
        super().__init__(layer)
        self.num_nodes = nodes
        self.passes, self.updates = iter(forward.passes), iter(forward.updates)

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        self._renew(next(self.updates, None), kwargs)
        return super().edge_updater(edge_index, size=size, **kwargs)

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        history = next(self.passes, None)
        if self._renew(history, kwargs) and history is not None and not history.dots[1]:
            history.dots = [1.0, 1.0]  # as no batch has compared them yet
        return super().propagate(edge_index, size=size, **kwargs)

    def _renew(self, history: PassHistory | None, kwargs: Kwargs) -> bool:
        """Write all nodes' rows; whether there were any."""
        renewed = False
        for name, rows in () if history is None else history.rows.items():
            current = sources_of(kwargs.get(name))
            if current is not None and current.shape[0] == self.num_nodes and tuple(current.shape[1:]) == rows.shape:
                rows.write(torch.arange(self.num_nodes, device=rows.value.device), current.detach())
                renewed = True
        return renewed
