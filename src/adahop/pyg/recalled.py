"""Recalled: the history of a layer in one forward on a batch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch_geometric.nn.aggr import MeanAggregation

from adahop import ops
from adahop.pyg import batches, fused
from adahop.pyg.arguments import (
    detached,
    less,
    lifted,
    no_edges,
    paired,
    per_edge,
    rows_at,
    some,
    sources_of,
    still,
    targets_of,
)
from adahop.pyg.memory import Remembered
from adahop.pyg.neighbours import AllNeighbours, ForwardHistory, PassHistory, Sent
from adahop.pyg.rows import NodeRows
from adahop.pyg.wrap import Call, backward

if TYPE_CHECKING:
    from adahop.pyg.history import LayerHistories


class Recalled(Remembered):
    """The history of a layer in one forward on a batch: x' are the sources' rows as they are kept and the targets' own
    of now, and F(x') is summed now, for the targets that count.
    """

    def __init__(
        self,
        memory: LayerHistories,
        call: Call,
        forward: ForwardHistory,
        full: AllNeighbours | None,
        missing: Tensor | None,
    ):
        super().__init__(call)
        self.memory, self.forward, self.full, self.missing = memory, forward, full, missing
        self.node = lifted(call.layer.conv)
        self.given: list[tuple[Tensor, dict[str, Any]]] = []  # what edge updates gave, and from what

    def updated(self, edge_index: Tensor, size: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        self.given.append((out, kwargs))
        if self.memory.noting(self.call) and not self.forward.why and not backward():
            update = self.memory.new(kwargs, lifted(self.call.layer.conv, "_edge_user_args"))
            update.shape = tuple(out.shape[1:])
            self.forward.updates.append(update)

    def propagate(self, edge_index: Tensor, size: Any, kwargs: dict[str, Any]) -> Tensor:
        self.mode, self.total, self.old = "plain", None, None
        memory, call, own = self.memory, self.call, self.call.layer.own("propagate")
        if memory.noting(call):
            return self._note_first(own(edge_index, size=size, **kwargs), kwargs)
        if self.forward.why or call.passes >= len(self.forward.passes):
            return own(edge_index, size=size, **kwargs)
        past = self.forward.passes[call.passes]
        targets, sources = memory.counting(call, past.level)
        began = time.perf_counter()
        known = past.own is not None and self._still_own(kwargs, past)
        if past.own is not None and not known:
            return own(edge_index, size=size, **kwargs)
        self.trust = 1.0 if memory.renewing else past.trust * (1.0 - memory.noise)
        if targets and self.trust:
            self.total = self._all(past, kwargs, targets)
        memory.spent["read"] += time.perf_counter() - began
        then = kwargs if known else self._then(past, kwargs, self.node)
        if not known:
            memory.learn(self, past, kwargs, then, sources)
        if self.total is None:
            return own(edge_index, size=size, **kwargs)
        if memory.renewing:
            self.mode = "known"
            return own(edge_index, size=size, **kwargs)
        if known and self.trust == 1.0:
            self.mode = "known"
            return own(edge_index[:, :0], size=size, **no_edges(kwargs, edge_index.shape[1], self.node))
        return self._with(edge_index, size, kwargs, then, targets)

    def aggregate(self, inputs: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        if self.mode not in ("read", "coefs"):
            return super().aggregate(inputs, args, kwargs)
        assert self.full is not None
        inputs = self.full.scaled(inputs) if self.full.weighted else inputs
        out = self.call.layer.own("aggregate")(inputs, *args, **kwargs)
        self.total = out if self.mode == "read" else inputs
        return out

    # --- f(x) and f(x') -----------------------------------------------------------------------------------------------

    def _note_first(self, out: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """A `propagate` is seen for the first time."""
        if not backward():
            self.memory.note(self.call, self.forward, kwargs, out)
            if not self.forward.why and (past := self.forward.passes[-1]).rows:
                self.memory.learn(self, past, kwargs, None, self.memory.counting(self.call, past.level)[1])
        return out

    def _with(
        self, edge_index: Tensor, size: Any, kwargs: dict[str, Any], then: dict[str, Any], targets: int
    ) -> Tensor:
        """f(x) - trust f(x') over the edges of the targets that count, to which `aggregate` adds trust F(x')."""
        call, node, own, reading = self.call, self.node, self.call.layer.own("propagate"), self.call.reading
        at, many = (edge_index[1] < targets).nonzero().flatten(), edge_index.shape[1]
        fixed = not any(v.requires_grad for k, v in kwargs.items() if k not in node and isinstance(v, Tensor))
        one_sided = all(sides == {"j"} for sides in node.values())
        if at.numel() == many and fixed and one_sided and reading.linear and not reading.parametric and not self.given:
            self.mode = "linear"
            change = {k: less(v, _sources_alone(then[k]), self.trust) for k, v in kwargs.items() if k in node}
            return own(edge_index, size=size, **{**kwargs, **change})
        with self.past():
            assert call.place is not None
            before, self.some = {k: then[k] if k in node else v for k, v in kwargs.items()}, None
            if at.numel() < many:
                call.used, call.place, self.some = edge_index[:, at], some(call.place, at), at
                before = _at(before, at, many, node)
            for name, value in kwargs.items():
                for i, (given, given_from) in enumerate(self.given):
                    if value is given:
                        before[name] = self._update(i, given_from)
            own(call.used, size=size, **before)
        self.mode = "both"
        return own(edge_index, size=size, **kwargs)

    def _update(self, i: int, kwargs: dict[str, Any]) -> Tensor:
        """What an edge update would have given from the rows kept."""
        node = lifted(self.call.layer.conv, "_edge_user_args")
        then = self._then(self.forward.updates[i], kwargs, node)
        then = then if self.some is None else _at(then, self.some, self.given[i][0].shape[0], node)
        return self.call.layer.own("edge_updater")(self.call.used, **then)

    def _then(self, past: PassHistory, kwargs: dict[str, Any], node: dict[str, set[str]]) -> dict[str, Any]:
        """The arguments with the sources' rows as they are kept; a target's own are those of now."""
        then = {k: detached(v) if k in node else v for k, v in kwargs.items()}
        for name, rows in past.rows.items():
            now = sources_of(kwargs[name])
            kept = rows.read(self.call.batch.n_id[: now.shape[0]]).to(now.device, now.dtype)
            then[name] = paired(kept, kwargs[name], node[name])
        return then

    def _still_own(self, kwargs: dict[str, Any], past: PassHistory) -> bool:
        now = [sources_of(kwargs[k]) for k in self.node if k in kwargs]
        return all(not v.requires_grad and batches.node_attribute(self.call.batch, v) == past.own for v in now)

    # --- F(x') --------------------------------------------------------------------------------------------------------

    def _all(self, past: PassHistory, kwargs: dict[str, Any], targets: int) -> Tensor:
        """F(x') of the first `targets` nodes of the batch."""
        n_id = self.call.batch.n_id[:targets]
        if past.own is None:
            return self._sum(past, kwargs)[:targets]
        assert past.sums is not None and past.filled is not None
        if self.full is not None and self.missing is not None:
            part = {k: rows_at(v, self.missing) if k in self.node else v for k, v in kwargs.items()}
            new = n_id[self.missing]
            past.sums.write(new, self._sum(past, part))
            past.filled[new] = True
        return past.sums.read(n_id).to(self.call.device)

    @torch.no_grad()
    def _sum(self, past: PassHistory, kwargs: dict[str, Any]) -> Tensor:
        """F(x') of the targets of `full`."""
        full, layer, alpha = self.full, self.call.layer, self.call.alpha
        assert full is not None
        sent = full.sent[self.call.passes]
        whole, rows = self.call.batch.whole.data, cast(dict[str, Any], past.rows)
        if past.own is not None:
            rows = {k: _Own(whole[past.own]) for k in self.node}
        layer.call = full
        try:
            with still(layer.conv):
                full.put(sent)
                name = self.call.reading.times or ""
                wide = fused.rows_of(self.call, kwargs)
                if wide is not None and wide.dim() == 2 and rows.keys() == {name} and self.node[name] == {"j"}:
                    return self._by_coefs(sent, name, rows[name], kwargs)
                return self._by_messages(sent, rows, kwargs)
        finally:
            layer.call, self.call.alpha, self.mode = self.call, alpha, "plain"

    def _by_messages(self, sent: Sent, rows: dict[str, Any], kwargs: dict[str, Any]) -> Tensor:
        """As the layer has it: a message per neighbour."""
        full, layer = self.full, self.call.layer
        assert full is not None
        given = self._sources(rows, kwargs, self.node) | sent.edge
        for name, i in sent.updated.items():
            update, sides = full.updates[i], lifted(layer.conv, "_edge_user_args")
            full.put(update)
            more = self._sources(self.forward.updates[i].rows, self.given[i][1], sides)
            given[name] = layer.own("edge_updater")(update.used, **more, **update.edge)
            full.used, full.place = sent.used, sent.place
        self.mode = "read"
        layer.own("propagate")(sent.used, size=(full.nodes, full.targets_), **given)
        assert self.total is not None
        return self.total

    def _sources(self, rows: dict[str, Any], kwargs: dict[str, Any], node: dict[str, set[str]]) -> dict[str, Any]:
        """All neighbours' rows as they are kept, and the targets' own of now."""
        full = self.full
        assert full is not None
        out = _neither(kwargs)
        for name in node:
            value = kwargs.get(name)
            now = targets_of(value)
            mine = None if now is None else now[: full.targets_].detach()
            if name in rows:
                kept = rows[name].read(full.batch.n_id).to(full.device, sources_of(value).dtype)
                out[name] = (kept, mine) if "i" in node[name] else (kept, None)
            elif value is not None:
                out[name] = (None, mine)
        return out

    def _by_coefs(self, sent: Sent, name: str, table: NodeRows | _Own, kwargs: dict[str, Any]) -> Tensor:
        """Where a message is the source's row times a coefficient: rows are summed where they lie."""
        full, layer = self.full, self.call.layer
        assert full is not None
        self.mode = "coefs"
        ones = torch.ones(1, 1, device=full.device).expand(full.nodes, 1)
        given = {**_neither(kwargs), name: (ones, None), **sent.edge}
        layer.own("propagate")(sent.used, size=(full.nodes, full.targets_), **given)
        assert self.total is not None
        n_id = full.batch.n_id
        at = fused.by_target(sent.used.to(n_id.device), full.targets_)
        coef = at.sorted(self.total[:, 0].to(n_id.device, torch.float32))
        if type(layer.conv.aggr_module) is MeanAggregation:
            coef = coef / at.ptr.diff()[at.dst]
        return table.sums(n_id[at.src], at.dst, coef, at.ptr).view(full.targets_, *table.shape).to(full.device)


def _at(kwargs: dict[str, Any], at: Tensor, edges: int, node: dict[str, set[str]]) -> dict[str, Any]:
    """The arguments for some of the edges."""
    return {k: v[at] if per_edge(v, edges) and k not in node else v for k, v in kwargs.items()}


def _neither(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that neither nodes nor edges have."""
    return {k: v for k, v in kwargs.items() if not isinstance(v, Tensor | tuple | list)}


def _sources_alone(value: Any) -> Any:
    return (value[0], None) if isinstance(value, tuple | list) else value


class _Own:
    """An attribute of the data, read as if it were kept; it may lie on the host while nodes do not."""

    def __init__(self, value: Tensor):
        self.value, self.shape = value, tuple(value.shape[1:])

    def read(self, nodes: Tensor) -> Tensor:
        return self.value[nodes.to(self.value.device)].to(nodes.device)

    def sums(self, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor) -> Tensor:
        if self.value.device == src.device:
            return ops.gather_sum(self.value.float(), src, dst, coef, ptr)
        nodes, at = src.unique(return_inverse=True)
        return ops.gather_sum(self.read(nodes).float(), at, dst, coef, ptr)
