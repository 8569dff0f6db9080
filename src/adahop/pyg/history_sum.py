"""HistorySum: the sum of a layer in one forward on a batch, with its history as the control variate."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.nn.aggr import MeanAggregation

from adahop import ops
from adahop.pyg import batches, fused
from adahop.pyg.arguments import (
    Kwargs,
    NodeArguments,
    at_edges,
    eval_mode,
    map_tensors,
    node_arguments,
    replace_sources,
    sources_of,
    subtract,
    target_rows,
    targets_of,
)
from adahop.pyg.call import Call, in_backward
from adahop.pyg.memory import ControlledSum
from adahop.pyg.neighbours import AllNeighbours, EdgeArguments, ForwardHistory, PassHistory
from adahop.pyg.rows import NodeRows

if TYPE_CHECKING:
    from adahop.pyg.history import LayerHistories


class HistorySum(ControlledSum):
    """The sum of a layer in one forward on a batch. x' are the sources' rows as they are kept and the targets' current
    ones, and F(x') is summed now, for the targets that the seeds' results depend on.
    """

    def __init__(
        self,
        memory: LayerHistories,
        call: Call,
        forward: ForwardHistory,
        neighbours: AllNeighbours | None,
        missing: Tensor | None,
        random: bool,
    ):
        """`neighbours` are those of all targets, or of the `missing` ones, whose sums are not kept yet. `random`: the
        layer's input has dropout in it."""
        super().__init__(call)
        self.memory, self.forward, self.neighbours, self.missing = memory, forward, neighbours, missing
        self.random = random
        self.node = node_arguments(call.layer.conv)
        self.updates: list[tuple[Tensor, dict[str, Any]]] = []  # what edge updates gave, and from what

    def after_edge_update(self, edge_index: Tensor, size: Any, kwargs: Kwargs, out: Tensor) -> None:
        self.updates.append((out, kwargs))
        if self.memory.is_first_batch(self.call) and not self.forward.why and not in_backward():
            update = self.memory.new_pass(kwargs, node_arguments(self.call.layer.conv, "_edge_user_args"))
            update.shape = tuple(out.shape[1:])
            self.forward.updates.append(update)

    def propagate(self, edge_index: Tensor, size: Any, kwargs: Kwargs) -> Tensor:
        self.total = self.previous = None
        memory, call, original = self.memory, self.call, self.call.layer.original("propagate")
        if memory.is_first_batch(call):
            return self._first_propagate(original(edge_index, size=size, **kwargs), kwargs)
        if self.forward.why or call.propagates >= len(self.forward.passes):
            return original(edge_index, size=size, **kwargs)
        history = self.forward.passes[call.propagates]
        assert call.aligned is not None
        if history.complete and call.aligned.share < 1.0:  # the layer dropped some edges
            return original(edge_index, size=size, **kwargs)
        targets, sources = memory.needed_nodes(call, history.level)
        began = time.perf_counter()
        constant = history.data_name is not None  # the sums are those of the data's own rows
        if constant and not self._is_data(kwargs, history):
            return original(edge_index, size=size, **kwargs)
        self.cv_weight = 1.0 if memory.renewing else history.cv_weight * (1.0 - memory.noise)
        if targets and self.cv_weight:
            self.total = self._all_sums(history, kwargs, targets)
        memory.spent["read"] += time.perf_counter() - began
        previous = kwargs if constant else self._previous_inputs(history, kwargs, self.node)
        if not constant:
            memory.renew_rows(self, history, kwargs, previous, sources)
        if self.total is None:
            return original(edge_index, size=size, **kwargs)
        if memory.renewing:
            return call.layer.propagate_by(self.aggregate_exact, edge_index, size, kwargs)
        if constant and self.cv_weight == 1.0:
            kwargs = at_edges(kwargs, slice(0), edge_index.shape[1], self.node)
            return call.layer.propagate_by(self.aggregate_exact, edge_index[:, :0], size, kwargs)
        return self._difference(edge_index, size, kwargs, previous, targets)

    # --- f(x) and f(x') -----------------------------------------------------------------------------------------------

    def _first_propagate(self, out: Tensor, kwargs: Kwargs) -> Tensor:
        if not in_backward():
            self.memory.add_pass(self.call, self.forward, kwargs, out)
            if not self.forward.why and (history := self.forward.passes[-1]).rows:
                sources = self.memory.needed_nodes(self.call, history.level)[1]
                self.memory.renew_rows(self, history, kwargs, None, sources)
        return out

    def _difference(self, edge_index: Tensor, size: Any, kwargs: Kwargs, previous: Kwargs, targets: int) -> Tensor:
        """f(x) - c f(x') over the edges of the first `targets` nodes, to which `aggregate` adds c F(x')."""
        call, node, original, reading = self.call, self.node, self.call.layer.original("propagate"), self.call.reading
        at, many = (edge_index[1] < targets).nonzero().flatten(), edge_index.shape[1]
        fixed = not any(v.requires_grad for k, v in kwargs.items() if k not in node and isinstance(v, Tensor))
        by_source = all(sides == {"j"} for sides in node.values()) and not self.updates
        if at.numel() == many and fixed and by_source and reading.linear and not reading.parametric:
            change = {
                k: subtract(v, _without_targets(previous[k]), self.cv_weight) for k, v in kwargs.items() if k in node
            }
            return original(edge_index, size=size, **{**kwargs, **change})
        with self.on_previous():
            assert call.aligned is not None
            inputs, self.subset = {k: previous[k] if k in node else v for k, v in kwargs.items()}, None
            if at.numel() < many:
                call.used, call.aligned, self.subset = edge_index[:, at], call.aligned.subset(at), at
                inputs = at_edges(inputs, at, many, node)
            for name, value in kwargs.items():
                for i, (out, update_kwargs) in enumerate(self.updates):
                    if value is out:
                        inputs[name] = self._previous_update(i, update_kwargs)
            assert call.used is not None
            call.layer.propagate_by(self.aggregate_previous, call.used, size, inputs)
        return original(edge_index, size=size, **kwargs)

    def _previous_update(self, i: int, kwargs: Kwargs) -> Tensor:
        """What an edge update would have given from the rows kept."""
        node = node_arguments(self.call.layer.conv, "_edge_user_args")
        previous = self._previous_inputs(self.forward.updates[i], kwargs, node)
        if self.subset is not None:
            previous = at_edges(previous, self.subset, self.updates[i][0].shape[0], node)
        return self.call.layer.original("edge_updater")(self.call.used, **previous)

    def _previous_inputs(self, history: PassHistory, kwargs: Kwargs, node: NodeArguments) -> Kwargs:
        """The arguments with the sources' rows as they are kept; those of targets are the current ones."""
        previous = {k: map_tensors(v, Tensor.detach) if k in node else v for k, v in kwargs.items()}
        for name, rows in history.rows.items():
            current = sources_of(kwargs[name])
            kept = rows.read(self.call.batch.n_id[: current.shape[0]]).to(current.device, current.dtype)
            previous[name] = replace_sources(kwargs[name], kept, node[name])
        return previous

    def _is_data(self, kwargs: Kwargs, history: PassHistory) -> bool:
        """Whether the arguments are still the attribute of the data whose sums are kept."""
        rows = [sources_of(kwargs[k]) for k in self.node if k in kwargs]
        names = {None if v.requires_grad else batches.data_node_attribute(self.call.batch, v) for v in rows}
        return names <= {history.data_name}

    # --- F(x') --------------------------------------------------------------------------------------------------------

    def _all_sums(self, history: PassHistory, kwargs: Kwargs, targets: int) -> Tensor:
        """F(x') of the first `targets` nodes of the batch."""
        n_id = self.call.batch.n_id[:targets]
        if history.data_name is None:
            return self._sum_neighbours(history, kwargs)[:targets]
        assert history.filled is not None
        if self.neighbours is not None and self.missing is not None:
            part = {k: target_rows(v, self.missing) if k in self.node else v for k, v in kwargs.items()}
            new, sums = n_id[self.missing], self._sum_neighbours(history, part)
            if history.sums is None:
                history.sums = self.memory.new_rows(tuple(sums.shape[1:]))
            history.sums.write(new, sums)
            history.filled[new] = True
        assert history.sums is not None
        return history.sums.read(n_id).to(self.call.device)

    @torch.no_grad()
    def _sum_neighbours(self, history: PassHistory, kwargs: Kwargs) -> Tensor:
        """F(x') of the targets of `neighbours`."""
        neighbours, layer, alpha = self.neighbours, self.call.layer, self.call.alpha
        assert neighbours is not None
        arguments, tables = neighbours.passes[self.call.propagates], dict[str, Any](history.rows)
        if history.data_name is not None:
            tables = {k: _DataRows(self.call.batch.whole_graph.data[history.data_name]) for k in self.node}
        name, rows = self.call.reading.row_argument or "", fused.source_rows(self.call, kwargs)
        layer.call = neighbours
        try:
            with eval_mode(layer.conv):
                if rows is not None and rows.dim() == 2 and tables.keys() == {name} and self.node[name] == {"j"}:
                    return _sum_rows(neighbours, arguments, name, tables[name], kwargs)
                return self._sum_messages(neighbours, arguments, tables, kwargs)
        finally:
            layer.call, self.call.alpha = self.call, alpha

    def _sum_messages(
        self, neighbours: AllNeighbours, arguments: EdgeArguments, tables: dict[str, Any], kwargs: Kwargs
    ) -> Tensor:
        """As the layer does it: a message per neighbour."""
        inputs = kwargs | _neighbour_inputs(neighbours, tables, kwargs, self.node) | arguments.edge
        for name, i in arguments.updated.items():
            update, node = neighbours.updates[i], node_arguments(self.call.layer.conv, "_edge_user_args")
            rows = _neighbour_inputs(neighbours, self.forward.updates[i].rows, self.updates[i][1], node)
            neighbours.use(update)
            inputs[name] = self.call.layer.original("edge_updater")(
                update.used, **(self.updates[i][1] | rows | update.edge)
            )
        return neighbours.aggregated(arguments, inputs)[1]


def _sum_rows(
    neighbours: AllNeighbours, arguments: EdgeArguments, name: str, table: NodeRows | _DataRows, kwargs: Kwargs
) -> Tensor:
    """Where a message is the source's row times a coefficient: rows are summed where they lie."""
    ones = torch.ones(1, 1, device=neighbours.device).expand(neighbours.num_nodes, 1)
    coef, _ = neighbours.aggregated(arguments, {**kwargs, name: (ones, None), **arguments.edge})
    n_id = neighbours.batch.n_id
    layout = fused.by_target(arguments.used.to(n_id.device), neighbours.num_targets)
    coef = layout.sorted(coef[:, 0].to(n_id.device, torch.float32))
    if type(neighbours.layer.conv.aggr_module) is MeanAggregation:
        coef = coef / layout.ptr.diff()[layout.dst]
    sums = table.sums(n_id[layout.src], layout.dst, coef, layout.ptr)
    return sums.view(neighbours.num_targets, *table.shape).to(neighbours.device)


def _neighbour_inputs(
    neighbours: AllNeighbours, tables: dict[str, Any], kwargs: Kwargs, node: NodeArguments
) -> dict[str, Any]:
    """All neighbours' rows as they are kept, and the targets' current ones."""
    out: dict[str, Any] = {}
    for name in node:
        value = kwargs.get(name)
        current = targets_of(value)
        targets = None if current is None else current[: neighbours.num_targets].detach()
        if name in tables:
            kept = tables[name].read(neighbours.batch.n_id).to(neighbours.device, sources_of(value).dtype)
            out[name] = (kept, targets if "i" in node[name] else None)
        elif value is not None:
            out[name] = (None, targets)
    return out


def _without_targets(value: Any) -> Any:
    return (value[0], None) if isinstance(value, tuple | list) else value


class _DataRows:
    """An attribute of the data, read as `NodeRows` are; it may lie on the host while nodes do not."""

    def __init__(self, value: Tensor):
        self.value, self.shape = value, tuple(value.shape[1:])

    def read(self, nodes: Tensor) -> Tensor:
        return self.value[nodes.to(self.value.device)].to(nodes.device)

    def sums(self, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor) -> Tensor:
        if self.value.device == src.device:
            return ops.gather_sum(self.value.float(), src, dst, coef, ptr)
        nodes, at = src.unique(return_inverse=True)
        return ops.gather_sum(self.read(nodes).float(), at, dst, coef, ptr)
