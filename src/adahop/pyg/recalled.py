"""Recalled: the history of a layer in one forward on a batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from adahop import ops
from adahop.pyg import batches
from adahop.pyg.arguments import (
    close,
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
from adahop.pyg.neighbours import AllNeighbours, ForwardHistory, PassHistory, Sent
from adahop.pyg.wrap import Call, backward

if TYPE_CHECKING:
    from adahop.pyg.history import LayerHistories


class Recalled:
    """The history of a layer in one forward on a batch."""

    def __init__(
        self, memory: LayerHistories, forward: ForwardHistory, full: AllNeighbours | None, missing: Tensor | None
    ):
        self.memory, self.forward, self.full, self.missing = memory, forward, full, missing
        self.mode, self.trust = "plain", 0.0
        self.past: PassHistory | None = None
        self.at = 0  # edge updates so far
        self.updated_: list[tuple[Tensor, dict[str, Any]]] = []  # what edge updates gave, and from what
        self.total: Tensor | None = None
        self.old: Tensor | None = None
        self.old_messages: tuple[Tensor, Tensor, Tensor | slice] | None = None

    # --- called by `Call` ---------------------------------------------------------------------------------------------

    def updated(self, call: Call, edge_index: Tensor, size: Any, kwargs: dict[str, Any], out: Tensor) -> None:
        at, self.at = self.at, self.at + 1
        self.updated_.append((out, kwargs))
        if self.memory.noting(call) and not self.forward.why and not backward():
            self.forward.updates.append(self.memory.new(call, kwargs, lifted(call.layer.conv, "_edge_user_args")))
            self.forward.updates[at].shape = tuple(out.shape[1:])

    def propagate(
        self, call: Call, own: Callable[..., Tensor], edge_index: Tensor, size: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        self.mode, self.past, self.total, self.old = "plain", None, None, None
        memory, node = self.memory, lifted(call.layer.conv)
        if memory.noting(call):
            out = own(edge_index, size=size, **kwargs)
            if backward():
                return out
            memory.note(call, self.forward, kwargs, out)
            if not self.forward.why and (past := self.forward.passes[-1]).rows:
                sources = memory.counting(call, past.level)[1]
                memory.learn(call, self.forward, past, kwargs, None, sources, self.updated_)
            return out
        if self.forward.why or call.passes >= len(self.forward.passes):
            return own(edge_index, size=size, **kwargs)
        past = self.past = self.forward.passes[call.passes]
        targets, sources = memory.counting(call, past.level)
        began = time.perf_counter()
        known = past.own is not None and self._still_own(call, kwargs, past)
        if past.own is not None and not known:
            return own(edge_index, size=size, **kwargs)
        self.trust = 1.0 if memory.renewing else past.trust * (1.0 - memory.noise)
        if targets and self.trust:
            self.total = self._total(call, own, past, kwargs, node, targets)
        memory.spent["read"] += time.perf_counter() - began
        then = kwargs if known else self._then(call, past, kwargs, node)
        if not known:
            memory.learn(call, self.forward, past, kwargs, then, sources, self.updated_)
        if self.total is None:
            return own(edge_index, size=size, **kwargs)
        if memory.renewing:
            self.mode = "total"
            return own(edge_index, size=size, **kwargs)
        if known and self.trust == 1.0:
            self.mode = "known"
            return own(edge_index[:, :0], size=size, **no_edges(kwargs, edge_index.shape[1], node))
        return self._with(call, own, edge_index, size, kwargs, then, targets)

    def aggregate(self, call: Call, own: Callable[..., Tensor], inputs: Tensor, args: tuple, kwargs: dict) -> Tensor:
        if self.mode in ("read", "coefs"):
            assert self.full is not None
            inputs = self.full.scaled(inputs) if self.full.weighted else inputs
            self.total = own(inputs, *args, **kwargs) if self.mode == "read" else inputs
            return self.total if self.mode == "read" else own(inputs, *args, **kwargs)
        if self.mode in ("total", "known"):
            shape = own(inputs, *args, **kwargs)
            assert self.total is not None
            if call.round is not None:
                call.round.known = True  # nothing is left to chance, so that there is nothing to learn
            return self._joined(torch.zeros_like(shape), self.total.to(shape))
        if self.mode == "old":
            factor = call.scaled(inputs)
            self.old, self.old_messages = own(factor, *args, **kwargs), (inputs, factor, slice(0, 0))
            return self.old
        scaled = call.scaled(inputs)
        self._note(call, inputs, scaled)
        out = own(scaled, *args, **kwargs)
        if self.total is not None:
            change = self.total.to(out) if self.old is None else self.total.to(out) - self.old[: len(self.total)]
            out = self._joined(out, self.trust * change)
        call.watch(out)
        self.old = self.old_messages = None
        return out

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _with(
        self,
        call: Call,
        own: Callable[..., Tensor],
        edge_index: Tensor,
        size: Any,
        kwargs: dict[str, Any],
        then: dict[str, Any],
        targets: int,
    ) -> Tensor:
        """f(x) - trust f(x') over the edges of the targets that count, to which `aggregate` adds trust F(x')."""
        node, past = lifted(call.layer.conv), self.past
        assert past is not None
        at = (edge_index[1] < targets).nonzero().flatten()
        whole, reading = at.numel() == edge_index.shape[1], call.reading
        fixed = not any(v.requires_grad for k, v in kwargs.items() if k not in node and isinstance(v, Tensor))
        one_sided = all(sides == {"j"} for sides in node.values())
        if whole and fixed and one_sided and reading.linear and not reading.parametric and not self.updated_:
            self.mode = "linear"
            return own(edge_index, size=size, **{k: less(kwargs[k], then[k], self.trust) if k in node else v
                                                 for k, v in kwargs.items()})  # fmt: skip
        alpha, used, place = call.alpha, call.used, call.place
        assert place is not None
        self.mode, cut = "old", kwargs
        if not whole:
            call.used, call.place = edge_index[:, at], some(place, at)
            cut = {k: v[at] if per_edge(v, edge_index.shape[1]) and k not in node else v for k, v in kwargs.items()}
        with torch.no_grad(), still(call.layer.conv):
            call.alpha = None
            before = {k: then[k] if k in node else v for k, v in cut.items()}
            for name, value in kwargs.items():
                for i, (given, given_from) in enumerate(self.updated_):
                    if value is given:
                        before[name] = self._update(call, i, given_from, call.used, None if whole else at)
            own(call.used, size=size, **before)
        call.alpha, call.used, call.place, self.mode = alpha, used, place, "both"
        assert self.old_messages is not None
        self.old_messages = (*self.old_messages[:2], slice(None) if whole else at)
        return own(edge_index, size=size, **kwargs)

    def _update(self, call: Call, i: int, kwargs: dict[str, Any], used: Any, at: Tensor | None) -> Tensor:
        """What an edge update would have given from the rows kept."""
        node = lifted(call.layer.conv, "_edge_user_args")
        then = self._then(call, self.forward.updates[i], kwargs, node)
        if at is not None:
            many = self.updated_[i][0].shape[0]
            then = {k: v[at] if per_edge(v, many) and k not in node else v for k, v in then.items()}
        return call.layer.own("edge_updater")(used, **then)

    def _then(self, call: Call, past: PassHistory, kwargs: dict[str, Any], node: dict[str, set[str]]) -> dict[str, Any]:
        """The arguments with the sources' rows as they are kept; a target's own are those of now."""
        then = dict(kwargs)
        for name, rows in past.rows.items():
            now = sources_of(kwargs[name])
            kept = rows.read(call.batch.n_id[: now.shape[0]]).to(now.device, now.dtype)
            then[name] = paired(kept, kwargs[name], node[name])
        for name, value in then.items():
            if name in node and name not in past.rows:
                then[name] = detached(value)
        return then

    def _total(
        self,
        call: Call,
        own: Callable[..., Tensor],
        past: PassHistory,
        kwargs: dict[str, Any],
        node: dict[str, set[str]],
        targets: int,
    ) -> Tensor:
        """F(x') of the first `targets` nodes of the batch."""
        n_id = call.batch.n_id[:targets]
        if past.own is None:
            assert self.full is not None
            return self._sum(call, own, past, kwargs, node, self.full.targets_)[:targets]
        assert past.sums is not None and past.filled is not None
        if self.full is not None and self.missing is not None:
            part = {k: rows_at(v, self.missing) if k in node else v for k, v in kwargs.items()}
            some_ = self._sum(call, own, past, part, node, self.missing.numel())
            past.sums.write(n_id[self.missing], some_)
            past.filled[n_id[self.missing]] = True
        return past.sums.read(n_id).to(call.device)

    @torch.no_grad()
    def _sum(
        self,
        call: Call,
        own: Callable[..., Tensor],
        past: PassHistory,
        kwargs: dict[str, Any],
        node: dict[str, set[str]],
        targets: int,
    ) -> Tensor:
        full = self.full
        assert full is not None
        sent = full.sent[call.passes]
        rows = {k: _Own(call.batch.whole.data[past.own]) for k in node if past.own} or past.rows
        layer, alpha = call.layer, call.alpha
        layer.call = full
        try:
            with still(layer.conv):
                full.put(sent)
                if past.coefs is not False and len(rows) == 1:
                    total = self._by_coefs(call, own, sent, rows, kwargs)
                    if past.coefs is None:  # the first time, both ways
                        whole = self._by_messages(call, own, sent, rows, kwargs, node, targets)
                        past.coefs = total is not None and close(total, whole)
                        total = whole
                    assert total is not None
                    return total
                return self._by_messages(call, own, sent, rows, kwargs, node, targets)
        finally:
            layer.call, call.alpha, self.mode = call, alpha, "plain"

    def _by_messages(
        self,
        call: Call,
        own: Callable[..., Tensor],
        sent: Sent,
        rows: dict[str, Any],
        kwargs: dict[str, Any],
        node: dict[str, set[str]],
        targets: int,
    ) -> Tensor:
        """As the layer has it: a message per neighbour."""
        full = self.full
        assert full is not None
        given = self._sources(rows, kwargs, node, targets) | sent.edge
        for name, i in sent.updated.items():
            update = full.updates[i]
            sides = lifted(call.layer.conv, "_edge_user_args")
            more = self._sources(self.forward.updates[i].rows, self.updated_[i][1], sides, targets)
            full.put(update)
            given[name] = call.layer.own("edge_updater")(update.used, **more, **update.edge)
            full.used, full.place = sent.used, sent.place
        self.mode = "read"
        own(sent.used, size=(full.nodes, targets), **given)
        assert self.total is not None
        return self.total

    def _sources(
        self, rows: dict[str, Any], kwargs: dict[str, Any], node: dict[str, set[str]], targets: int
    ) -> dict[str, Any]:
        """All neighbours' rows as they are kept, and the targets' own of now."""
        full = self.full
        assert full is not None
        out: dict[str, Any] = {k: v for k, v in kwargs.items() if not isinstance(v, Tensor | tuple | list)}
        for name in node:
            value = kwargs.get(name)
            now = targets_of(value)
            mine = None if now is None else now[:targets].detach()
            if name in rows:
                kept = rows[name].read(full.batch.n_id).to(full.device, sources_of(value).dtype)
                out[name] = (kept, mine) if "i" in node[name] else (kept, None)
            elif value is not None:
                out[name] = (None, mine)
        return out

    def _by_coefs(
        self, call: Call, own: Callable[..., Tensor], sent: Sent, rows: dict[str, Any], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """Of layers that send one number per edge times the source's row: rows are summed where they lie."""
        full, conv = self.full, call.layer.conv
        (name, table), reading = next(iter(rows.items())), call.reading
        assert full is not None
        plain = type(conv).aggregate is MessagePassing.aggregate and conv.aggr in ("add", "sum", "mean")
        if not (plain and reading.linear and lifted(conv)[name] == {"j"} and len(table.shape) == 1):
            return None
        self.mode = "coefs"
        ones = torch.ones(1, 1, device=full.device).expand(full.nodes, 1)
        rest = {k: v for k, v in kwargs.items() if not isinstance(v, Tensor | tuple | list)}
        try:
            own(sent.used, size=(full.nodes, full.targets_), **{**rest, name: (ones, None)}, **sent.edge)
        except RuntimeError:  # a message that needs all of a row
            return None
        if self.total is None or self.total.shape != (sent.used.shape[1], 1):
            return None
        n_id = full.batch.n_id
        coef, (src, dst) = self.total[:, 0].to(n_id.device, torch.float32), sent.used.to(n_id.device)
        if conv.aggr == "mean":
            coef = coef / torch.bincount(dst, minlength=full.targets_).clamp(min=1)[dst]
        many = int((torch.diff(dst) < 0).nonzero()[0]) + 1 if bool((torch.diff(dst) < 0).any()) else dst.numel()
        first, rest_ = slice(0, many), slice(many, None)  # loops that the layer added come last
        ptr = ops.pointer(torch.bincount(dst[first], minlength=full.targets_))
        total = table.sums(n_id[src[first]], dst[first], coef[first], ptr)
        if many < dst.numel():
            total.index_add_(0, dst[rest_], table.flat(n_id[src[rest_]]) * coef[rest_].unsqueeze(1))
        return total.view(full.targets_, *table.shape).to(full.device)

    def _still_own(self, call: Call, kwargs: dict[str, Any], past: PassHistory) -> bool:
        now = [sources_of(kwargs[k]) for k in lifted(call.layer.conv) if k in kwargs]
        return all(not v.requires_grad and batches.node_attribute(call.batch, v) == past.own for v in now)

    def _note(self, call: Call, inputs: Tensor, scaled: Tensor) -> None:
        if self.mode != "both" or "softmax" in call.reading.functions or not call.listens:
            call.note(inputs, scaled)
            return
        assert self.old_messages is not None
        *old, at = self.old_messages
        now = [t.detach().clone() for t in (inputs, scaled)]
        for t, o in zip(now, old, strict=True):
            t[at] -= self.trust * o
        call.note(*now)

    def _joined(self, out: Tensor, change: Tensor) -> Tensor:
        """`change` is that of the first nodes."""
        t = change.shape[0]
        return out + change if t == out.shape[0] else torch.cat([out[:t] + change, out[t:]])


class _Own:
    """An attribute of the data, read as if it were kept; it may lie on the host while nodes do not."""

    def __init__(self, value: Tensor):
        self.value, self.shape = value, tuple(value.shape[1:])

    def flat(self, nodes: Tensor) -> Tensor:
        return self.read(nodes).float().flatten(1)

    def read(self, nodes: Tensor) -> Tensor:
        return self.value[nodes.to(self.value.device)].to(nodes.device)

    def sums(self, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor) -> Tensor:
        if self.value.device == src.device:
            return ops.gather_sum(self.value.float(), src, dst, coef, ptr)
        nodes, at = src.unique(return_inverse=True)
        return ops.gather_sum(self.flat(nodes), at, dst, coef, ptr)
