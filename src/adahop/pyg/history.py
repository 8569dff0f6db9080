"""Histories: what each layer was last sent by every node, kept up without a pass over the graph.

A layer's sum on a batch is f(x) + trust (F(x') - f(x')): f over the drawn edges, F over all, x' the rows kept. Both are
formed now, from the same rows and the same parameters, so that whatever x' holds the mean is right. F reads the rows of
all neighbours of the targets that count, those whose own neighbours were drawn; that costs their degrees. Rows are
renewed by the batches that pass, and the oldest by batches of nodes without edges, whose sums are all F.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader.utils import filter_data
from torch_geometric.nn import MessagePassing

from adahop import ops
from adahop.pyg import batches
from adahop.pyg.align import Aligned
from adahop.pyg.batches import DrawnBatch, Found, Whole
from adahop.pyg.hops import Hops, weigh
from adahop.pyg.inference import arguments_of
from adahop.pyg.root import Root
from adahop.pyg.rows import NodeRows
from adahop.pyg.wrap import Call, Named, Propagate, backward, bare, layers_of, scale_of
from adahop.storage import MEMORY, Storage

log = logging.getLogger("adahop")
MIXED = 0.3  # of the way that a row moves to one that dropout has changed
MEMORY_OF_TRUST = 0.9  # of what earlier batches said of a row's worth
CLOSE = 1e-4


class Unknown(Exception):
    """Why a layer's sums over all neighbours cannot be formed."""


@dataclass
class PassHistory:
    """Of one `propagate` (or `edge_updater`) of a layer: the sources' rows, by argument."""

    level: int = 0  # how many sums lie before it
    rows: dict[str, NodeRows] = field(default_factory=dict)
    own: str | None = None  # the attribute of the data that its only argument is; its sums never change
    sums: NodeRows | None = None  # those sums, where `filled`
    spare: dict[str, NodeRows] = field(default_factory=dict)  # rows that it would need if they did
    filled: Tensor | None = None
    shape: tuple[int, ...] = ()  # of what it gives, per node or edge
    random: bool = False  # whether rows differ from one forward to the next (dropout)
    coefs: bool | None = None  # whether its sum is of rows times one number per edge; None: not tried yet
    dots: list[float] = field(default_factory=lambda: [0.0, 0.0])  # <x, x'> and <x', x'> of late

    @property
    def trust(self) -> float:
        """The share of x' that was in x of late: what is left of x has the least variance then."""
        return 1.0 if self.own else min(max(self.dots[0] / self.dots[1], 0.0), 1.0) if self.dots[1] > 0 else 0.0

    def tables(self) -> Iterator[NodeRows]:
        yield from self.rows.values()
        if self.own is not None and self.sums is not None:
            yield self.sums


@dataclass
class ForwardHistory:
    """Of one forward of a layer; a layer that is used n times has n."""

    passes: list[PassHistory] = field(default_factory=list)
    updates: list[PassHistory] = field(default_factory=list)
    why: str = ""  # why there is none
    tried: bool = False  # whether edge values were found to depend on the graph alone

    def every(self) -> Iterator[PassHistory]:
        yield from self.passes
        yield from self.updates


class Sent(NamedTuple):
    """The edges of one `propagate` over all neighbours, and what the layer sends along with them."""

    used: Tensor
    place: Aligned
    edge: dict[str, Tensor]
    updated: dict[str, int]  # arguments that an edge update gave


class _Enough(Exception):
    """All edge values of a layer are known, its sums are not wanted."""


class AllNeighbours(Call):
    """A forward of a layer on all in-edges of some nodes, each edge with a source of its own, for its edge values."""

    def __init__(self, call: Call, nodes: Tensor, forward: ForwardHistory):
        whole, edges = call.batch.whole, call.batch.whole.graph.edges
        row, place = ops.spans(edges.begin[nodes], edges.last[nodes] - edges.begin[nodes])
        src, t = edges.indices[place].long(), nodes.numel()
        local = torch.where(src == nodes[row], row, torch.arange(t, t + src.numel()))
        e_id = place if edges.eid is None else edges.eid[place].long()
        self.weighted = isinstance(whole, Named)
        scale = whole.data[whole.name][e_id].view(-1) if isinstance(whole, Named) else torch.ones(src.numel())
        batch = DrawnBatch(torch.cat([nodes, src]), e_id, scale, whole, blocks=[])
        edge_index = torch.stack([local, row]).to(call.device)
        super().__init__(call.layer, call.reading, Found(batch, edge_index, slice(0, src.numel())))
        self.targets_, self.forward = t, forward
        self.names: dict[str, Tensor] = {}
        self.sent: list[Sent] = []
        self.updates: list[Sent] = []
        self._given: list[Tensor] = []  # what stands for the edge updates

    @property
    def nodes(self) -> int:
        return self.batch.n_id.numel()

    def run(self, args: tuple, kwargs: dict[str, Any], call: Call, random: bool = False) -> None:
        """The layer's forward up to its last `propagate`; nodes have rows that are all alike, or random ones."""
        words = dict(zip(inspect.signature(self.layer._plain).parameters, args, strict=False)) | kwargs
        given = {name: self._widened(name, value, call, random) for name, value in words.items()}
        self.sent, self.updates, self._given, self.known = [], [], [], []
        with torch.no_grad(), self.layer.within(self), _alike(self.layer.conv), contextlib.suppress(_Enough):
            self.layer._forward(**given)
        if len(self.sent) < len(self.forward.passes):
            raise Unknown("it passes messages another number of times than before")

    def _widened(self, name: str, value: Any, call: Call, random: bool) -> Any:
        """An argument of the layer for all neighbours."""
        if are_edges(value):
            return self.edge_index
        if isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value):
            return tuple(self._widened(name, v, call, random) for v in value)
        if isinstance(value, tuple | list) and value and all(isinstance(v, int) for v in value):
            return tuple(self.nodes for _ in value)  # sizes
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if any(value is one for one in call.ones):
            ones = torch.ones(self.scale.numel(), device=self.device, dtype=value.dtype)
            self.ones.append(ones)
            return ones
        data, many = call.batch.whole.data, call.found.columns or slice(0, call.edge_index.shape[1])
        if value.shape[0] == many.stop - many.start:
            found = batches.attribute(call.batch, value)
            if found is not None and _per_edge(data.to_dict().get(found), data.edge_index.shape[1]):
                self.names[found] = data[found][self.batch.e_id].to(value.device)
                return self.names[found]
            if name.startswith("edge") or value.shape[0] > call.batch.n_id.numel():
                raise Unknown(f"its `{name}` is made by the model, and known for drawn edges only")
        if not value.is_floating_point():
            found = batches.node_attribute(call.batch, value)
            if found is None or found not in data:
                raise Unknown(f"its `{name}` is made by the model, and known for the batch's nodes only")
            return data[found][self.batch.n_id].to(value.device)
        if random:
            g = torch.Generator().manual_seed(0)
            return torch.randn(self.nodes, *value.shape[1:], generator=g).to(value)
        return torch.zeros_like(value[:1]).expand(self.nodes, *value.shape[1:])

    def attribute(self, value: Tensor | None) -> str | None:
        if value is None or any(value is one for one in self.ones):
            return None
        return next((name for name, own in self.names.items() if own is value), self.LEARNED)

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        self.updates.append(self._sent(edge_index, kwargs, lifted(self.layer.conv, "_edge_user_args")))
        past = self.forward.updates[len(self.updates) - 1]
        self._given.append(torch.zeros(1, device=self.device).expand(edge_index.shape[1], *past.shape))
        return self._given[-1]

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        self.sent.append(self._sent(edge_index, kwargs, lifted(self.layer.conv)))
        if len(self.sent) == len(self.forward.passes):
            raise _Enough
        past = self.forward.passes[len(self.sent) - 1]
        return torch.zeros(1, device=self.device).expand(self.nodes, *past.shape)

    def _sent(self, edge_index: Any, kwargs: dict[str, Any], node: dict[str, set[str]]) -> Sent:
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            raise Unknown("it passes messages by a sparse matrix")
        place, many = self.aligned(edge_index), edge_index.shape[1]
        if place is None:
            raise Unknown("it passes messages over other edges than those of the batch")
        updated = {k: i for k, v in kwargs.items() for i, given in enumerate(self._given) if v is given}
        edge = {k: v for k, v in kwargs.items() if _per_edge(v, many) and k not in node and k not in updated}
        at = (edge_index[1] < self.targets_).nonzero().flatten()  # loops that the layer added to sources as well
        if at.numel() < many:
            edge_index, place, edge = edge_index[:, at], some(place, at), {k: v[at] for k, v in edge.items()}
        return Sent(edge_index, place, edge, updated)

    def put(self, sent: Sent) -> None:
        """From now on these are the edges in use."""
        self.used, self.place, self.alpha = sent.used, sent.place, None


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
            return own(edge_index[:, :0], size=size, **_no_edges(kwargs, edge_index.shape[1], node))
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
        if self.mode == "plain":
            call.check_size(inputs, out, lambda: own(inputs, *args, **kwargs))
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
            return own(edge_index, size=size, **{k: _less(kwargs[k], then[k], self.trust) if k in node else v
                                                 for k, v in kwargs.items()})  # fmt: skip
        alpha, used, place = call.alpha, call.used, call.place
        assert place is not None
        self.mode, cut = "old", kwargs
        if not whole:
            call.used, call.place = edge_index[:, at], some(place, at)
            cut = {k: v[at] if _per_edge(v, edge_index.shape[1]) and k not in node else v for k, v in kwargs.items()}
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
            then = {k: v[at] if _per_edge(v, many) and k not in node else v for k, v in then.items()}
        return call.layer.own("edge_updater")(used, **then)

    def _then(self, call: Call, past: PassHistory, kwargs: dict[str, Any], node: dict[str, set[str]]) -> dict[str, Any]:
        """The arguments with the sources' rows as they are kept; a target's own are those of now."""
        then = dict(kwargs)
        for name, rows in past.rows.items():
            now = sources_of(kwargs[name])
            kept = rows.read(call.batch.n_id[: now.shape[0]]).to(now.device, now.dtype)
            then[name] = _paired(kept, kwargs[name], node[name])
        for name, value in then.items():
            if name in node and name not in past.rows:
                then[name] = _detached(value)
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
            part = {k: _rows_of(v, self.missing) if k in node else v for k, v in kwargs.items()}
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
                        past.coefs = total is not None and _alike_sums(total, whole)
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
        coef, (src, dst) = self.total[:, 0].to("cpu", torch.float32), sent.used.cpu()
        if conv.aggr == "mean":
            coef = coef / torch.bincount(dst, minlength=full.targets_).clamp(min=1)[dst]
        many = int((torch.diff(dst) < 0).nonzero()[0]) + 1 if bool((torch.diff(dst) < 0).any()) else dst.numel()
        first, rest_ = slice(0, many), slice(many, None)  # loops that the layer added come last
        ptr = ops.pointer(torch.bincount(dst[first], minlength=full.targets_))
        n_id = full.batch.n_id
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
    """An attribute of the data, read as if it were kept."""

    def __init__(self, value: Tensor):
        self.value, self.shape = value, tuple(value.shape[1:])

    def flat(self, nodes: Tensor) -> Tensor:
        return self.value[nodes].float().flatten(1)

    def read(self, nodes: Tensor) -> Tensor:
        return self.value[nodes]

    def sums(self, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor) -> Tensor:
        return ops.gather_sum(self.value.float(), src, dst, coef, ptr)


class LayerHistories:
    """Those of a model's layers, in place of `Snapshots`."""

    waiting = False

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
    ):
        self.model, self.data, self.noise, self.disjoint, self.transform = model, data, noise, disjoint, transform
        self.dtype, self.storage, self.refresh = dtype, storage, refresh
        self.nodes = int(data.num_nodes or 0)
        self.layers = {name: scale_of(m) for name, m in layers_of(model).items()}
        self.kept: dict[Propagate, list[ForwardHistory]] = {}
        self.whole: Whole | None = None
        self.renewing = False
        self.trying: dict[tuple[int, str], Tensor] | None = None  # while it is tried whether rows are random
        self.steps, self.cursor, self.round, self.stamp = 0, 0, 0, torch.zeros(self.nodes, dtype=torch.int32)
        self.tried = False
        self.spent = {"read": 0.0, "renew": 0.0}
        self._first: dict[Any, list[int]] | None = None  # the calls of the batch on which layers are seen first
        self._tags: dict[Any, int] = {}  # of that batch: how many sums lie before a result, by its gradient
        self._serial = 0
        self._pending: list[Callable[[], Any]] = []
        self._said: set[str] = set()
        self._counts: dict[Propagate, int] = {}
        for layer in self.layers.values():
            assert layer is not None
            layer._memory = weakref.ref(self)

    def close(self) -> None:
        for layer in self.layers.values():
            if layer is not None and layer.memory is self:
                layer._memory = None
        self.kept.clear()
        self._pending.clear()

    def begin(self) -> None:
        """A forward of the model begins: what the one before has sent is written now, when nobody computes with it."""
        self.settle()
        self._counts.clear()

    def settle(self) -> None:
        for write in self._pending:
            write()
        self._pending.clear()

    def renew(self) -> None:
        """An epoch begins: what the last one cost is written to the log."""
        if self.steps:
            log.info("%s", self)

    def before_batch(self, whole: Whole) -> None:
        """A batch is about to be handed out: the oldest rows are renewed."""
        self.whole = whole
        self.settle()
        if not self.kept:
            return
        if self._first is not None and self.steps == 0:
            self._first, self._tags = None, {}
            for past in (p for fs in self.kept.values() for f in fs for p in f.passes):
                past.spare = {}
                past.sums, past.filled = (None, None) if past.own is None else (past.sums, past.filled)
            log.info("%s", self)
        self.steps += 1
        began = time.perf_counter()
        if self.refresh:
            self._renew_oldest()
        self.spent["renew"] += time.perf_counter() - began

    @property
    def bytes(self) -> int:
        return sum(t.bytes for fs in self.kept.values() for f in fs for p in f.every() for t in p.tables())

    def cost(self) -> dict[str, float]:
        """Bytes, and milliseconds per step for reading all neighbours' rows and for renewing the oldest."""
        steps = max(self.steps, 1)
        return {"bytes": float(self.bytes), **{f"{k}_ms": 1e3 * v / steps for k, v in self.spent.items()}}

    def __str__(self) -> str:
        kind, cost = str(self.dtype).removeprefix("torch."), self.cost()
        where = "memory" if self.storage is MEMORY else "files"
        without = [name for name, layer in self.layers.items() if any(f.why for f in self.kept.get(layer, []))]  # type: ignore[arg-type]
        return (
            f"history, without a pass over the graph: {self.bytes / 2**20:.1f} MiB of {kind} rows in {where}"
            + (f", none for layers {', '.join(without)}" if without else "")
            + f"; per step {cost['read_ms']:.1f} ms to read all neighbours' rows"
            + (f", {cost['renew_ms']:.1f} ms to renew the {self.refresh} oldest" if self.refresh else "")
        )

    # --- called by `Propagate` and `Recalled` -------------------------------------------------------------------------

    def listen(self, layer: Propagate, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A forward in evaluation on something that is no batch: where it is the whole graph, all rows are taken."""
        at = self._counts.get(layer, 0)
        self._counts[layer] = at + 1
        forwards = self.kept.get(layer, [])
        tensors = [v for a in (*args, *kwargs.values()) for v in _pair(a) if isinstance(v, Tensor)]
        size = (2, self.data.edge_index.shape[1])
        if at >= len(forwards) or forwards[at].why or not any(tuple(t.shape) == size for t in tensors):
            return layer._plain(*args, **kwargs)
        heard: Any = _Heard(layer, forwards[at], self.nodes)
        with layer.within(heard):
            out = layer._forward(*args, **kwargs)
        self.stamp.fill_(self.steps)
        return out

    def of(self, layer: Propagate, call: Call, args: tuple, kwargs: dict[str, Any]) -> Recalled | None:
        if call.batch.num_edges is None or call.scale.numel() != call.batch.e_id.numel():
            return None
        forward = self._forward_of(layer, call, args, kwargs)
        if forward is None:
            return None
        full = missing = None
        if not self.noting(call) and not forward.why and forward.passes:
            began = time.perf_counter()
            try:
                full, missing = self._all_neighbours(call, forward, args, kwargs)
            except Unknown as e:
                self._do_without(layer, forward, str(e))
            self.spent["read"] += time.perf_counter() - began
        return Recalled(self, forward, full, missing)

    def _forward_of(self, layer: Propagate, call: Call, args: tuple, kwargs: dict[str, Any]) -> ForwardHistory | None:
        first = next((v for a in (*args, *kwargs.values()) for v in _pair(a) if isinstance(v, Tensor)), None)
        at, calls = 0 if first is None else first.data_ptr(), call.batch.calls.setdefault(layer, [])
        if not (backward() and at in calls):  # a checkpointed part runs again
            calls.append(at)
        n = calls.index(at) if backward() else len(calls) - 1
        forwards = self.kept.setdefault(layer, [])
        if self._first is None and not any(self.kept.values()):
            self._first = call.batch.calls
        if self.noting(call) and n == len(forwards) and not backward():
            forwards.append(ForwardHistory())
            self._ask(layer, call, forwards[-1])
        return forwards[n % len(forwards)] if forwards else None

    def _ask(self, layer: Propagate, call: Call, forward: ForwardHistory) -> None:
        if call.reading.left_alone:
            forward.why = "it stays as PyG has it"  # which is said elsewhere
        elif call.reading.estimated:
            self._do_without(layer, forward, "its degrees are estimated from the drawn edges")
        elif layer.sums == "drawn" and call.reading.factor == "sum":
            self._do_without(layer, forward, "its sums are kept at the size of the drawn neighbours")

    def _all_neighbours(
        self, call: Call, forward: ForwardHistory, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[AllNeighbours | None, Tensor | None]:
        targets = max(self.counting(call, p.level)[0] for p in forward.passes)
        nodes, missing = call.batch.n_id[:targets], None
        if len(forward.passes) == 1 and (past := forward.passes[0]).own is not None:
            assert past.filled is not None
            missing = (~past.filled[nodes]).nonzero().flatten()
            nodes = nodes[missing]
        elif not self.renewing and not any(p.trust for p in forward.passes):
            return None, None
        if not nodes.numel():
            return None, None
        full = AllNeighbours(call, nodes, forward)
        full.run(args, kwargs, call)
        if not forward.tried:  # whether edge values are the graph's alone: with other rows of nodes they stay
            alike, full.sent = full.sent, []
            full.run(args, kwargs, call, random=True)
            for a, b in zip(alike, full.sent, strict=True):
                if any(not torch.allclose(a.edge[k], b.edge[k], rtol=CLOSE, atol=CLOSE) for k in a.edge):
                    raise Unknown("it makes edge values from nodes before it passes messages")
            forward.tried = True
        return full, missing

    def _do_without(self, layer: Propagate, forward: ForwardHistory, why: str) -> None:
        forward.why = why
        name = next((n for n, one in self.layers.items() if one is layer), "?")
        self.say(f"layer '{name}' ({type(layer.conv).__name__}) goes without a history: {why}")

    def say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text, stacklevel=4)

    def noting(self, call: Call) -> bool:
        """Whether this is the batch on which the layers are seen for the first time."""
        return self._first is not None and call.batch.calls is self._first

    def counting(self, call: Call, level: int) -> tuple[int, int]:
        """How many of the batch's first nodes have sums, and rows, that the seeds' results depend on."""
        many = call.batch.num_nodes or [0]
        if self.renewing:
            return many[0], many[0]
        edges = call.batch.num_edges or []
        hops = next((h for h, m in enumerate(edges) if m == 0), len(edges))  # a hop of none estimates nothing
        return sum(many[: max(hops - level, 0)]), sum(many[: max(hops - level + 1, 0)])

    def note(self, call: Call, forward: ForwardHistory, kwargs: dict[str, Any], out: Tensor) -> None:
        """The first sight of a `propagate`: what nodes send there, and how many sums lie before it."""
        node = lifted(call.layer.conv)
        level = self._level(kwargs)
        if isinstance(out, Tensor) and out.grad_fn is not None:
            self._tags[out.grad_fn] = level + 1
        self._serial += 1
        if forward.why:
            return
        past = self.new(call, kwargs, node)
        past.level, past.shape = level, tuple(out.shape[1:]) if isinstance(out, Tensor) else ()
        for update in forward.updates[len(forward.passes) :]:
            update.level = level
        own = self._own(call, kwargs, node) if not forward.passes else None
        for other in forward.passes:  # of several, the first is not known either: they are formed together
            other.own, other.rows = None, {**other.rows, **other.spare}
        if own is not None and call.reading.linear and not call.reading.parametric:
            past.own, past.rows, past.spare = own, {}, past.rows
            past.sums = NodeRows(self.nodes, past.shape, storage=self.storage)
            past.filled = torch.zeros(self.nodes, dtype=torch.bool)
        dims = {v.dim() for k in node for v in _pair(kwargs.get(k)) if isinstance(v, Tensor)}
        if call.layer.conv.node_dim % max(dims, default=1) != 0:
            self._do_without(call.layer, forward, "its nodes are not the first dimension of what it sums")
        forward.passes.append(past)

    def new(self, call: Call, kwargs: dict[str, Any], node: dict[str, set[str]]) -> PassHistory:
        """Room for the sources' rows of some arguments."""
        past = PassHistory()
        for name, sides in node.items():
            now = sources_of(kwargs.get(name))
            if "j" in sides and now is not None and now.is_floating_point():
                past.rows[name] = NodeRows(self.nodes, tuple(now.shape[1:]), self.dtype, self.storage)
        return past

    def _own(self, call: Call, kwargs: dict[str, Any], node: dict[str, set[str]]) -> str | None:
        """The data's attribute that all nodes' arguments are, as it is in the data."""
        names = set()
        for name in node:
            value = sources_of(kwargs.get(name))
            if value is None or value.requires_grad or node[name] != {"j"}:
                return None
            names.add(batches.node_attribute(call.batch, value))
        found = names.pop() if len(names) == 1 else None
        if found is None or not isinstance(self.data[found], Tensor):
            return None
        same = torch.equal(self.data[found][call.batch.n_id[:64]], value[:64].to(self.data[found].device))
        return found if same else None  # a transform may have changed it

    def _level(self, kwargs: dict[str, Any]) -> int:
        """How many sums lie between the features and these arguments: found from the gradient's graph."""
        start = [v.grad_fn for a in kwargs.values() for v in _pair(a) if isinstance(v, Tensor)]
        if len(self._tags) < self._serial or not torch.is_grad_enabled():
            return self._serial  # one after the other, where results have no gradient
        level, seen, stack = 0, set(), [f for f in start if f is not None]
        while stack:
            f = stack.pop()
            if f in seen:
                continue
            seen.add(f)
            if f in self._tags:
                level = max(level, self._tags[f])
                continue
            stack += [g for g, _ in f.next_functions if g is not None]
        return level

    def learn(
        self,
        call: Call,
        forward: ForwardHistory,
        past: PassHistory,
        kwargs: dict[str, Any],
        then: dict[str, Any] | None,
        sources: int,
        updated: list[tuple[Tensor, dict[str, Any]]],
    ) -> None:
        """Rows of now take the place of those kept, once this step's forward is over."""
        if self.trying is not None:
            self.trying.update({(id(past), name): sources_of(kwargs[name]).detach() for name in past.rows})
            return
        if backward() or not sources:
            return
        given = [(past, kwargs)]
        if call.passes == len(forward.passes) - 1:
            given += [(u, k) for u, (_, k) in zip(forward.updates, updated, strict=False)]
        n_id = call.batch.n_id[:sources]
        at = _first_of_each(n_id) if self.disjoint else None
        n_id = n_id if at is None else n_id[at]
        share = MIXED if past.random and call.layer.conv.training and not self.renewing else 1.0
        for one, words in given:
            for name, rows in one.rows.items():
                now = sources_of(words[name]).detach()[:sources]
                now = now if at is None else now[at]
                self._pending.append(lambda rows=rows, now=now: rows.write(n_id, now, share))  # type: ignore[misc]
        if not self.renewing and then is not None:
            dots = self._dots(past, kwargs, then, sources)
            self._pending.append(lambda: self._weigh(past, dots))
        if past.level == max(p.level for fs in self.kept.values() for f in fs for p in f.passes):
            self._pending.append(lambda: self.stamp.index_fill_(0, n_id, self.steps))

    def _dots(self, past: PassHistory, kwargs: dict[str, Any], then: dict[str, Any], sources: int) -> list[Tensor]:
        both = [(sources_of(w[k]).detach()[:sources].flatten().float() for w in (kwargs, then)) for k in past.rows]
        pairs = [tuple(b) for b in both]
        return [torch.stack([now @ old for now, old in pairs]).sum(), torch.stack([o @ o for _, o in pairs]).sum()]

    def _weigh(self, past: PassHistory, dots: list[Tensor]) -> None:
        past.dots = [MEMORY_OF_TRUST * a + float(b) for a, b in zip(past.dots, dots, strict=True)]

    # --- the oldest rows ----------------------------------------------------------------------------------------------

    def _oldest(self) -> Tensor:
        """The next nodes, in a round over all, that nothing has renewed since the round before."""
        found, left = [], self.refresh
        for _ in range(-(-self.nodes // self.refresh)):
            stop = min(self.cursor + self.refresh, self.nodes)
            part = torch.arange(self.cursor, stop)
            part = part[self.stamp[self.cursor : stop] <= self.round][:left]
            last = int(part[-1]) + 1 if part.numel() == left else stop
            found.append(part)
            left -= part.numel()
            self.cursor = last % self.nodes
            if self.cursor == 0:
                self.round = self.steps - 1
            if left == 0 or self.cursor == 0:
                break
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.long)

    def _renew_oldest(self) -> None:
        if any(f.why for fs in self.kept.values() for f in fs):
            self.refresh = 0  # what such a layer gives for a node without edges is not what it gives
            return
        nodes = self._oldest()
        if nodes.numel() == 0:
            return
        root, training = Root.of(self.model), [m for m in bare(self.model).modules() if m.training]
        form, self.renewing = root.form, True
        try:
            with torch.no_grad():
                if not self.tried:
                    self.tried = True
                    self._try_random(nodes)
                bare(self.model).eval()
                self._run(nodes)
            self.settle()
        except Exception as e:
            self.refresh = 0
            self._pending.clear()
            self.say(
                f"the oldest rows of {type(bare(self.model)).__name__} are not renewed ({' '.join(str(e).split())}), "
                "only those of nodes in training batches"
            )
        finally:
            self.renewing, root.form = False, form
            for m in training:
                m.training = True

    def _run(self, nodes: Tensor) -> None:
        """The model on some nodes; the one edge is there so that layers know the batch, and counts for nothing."""
        one = torch.zeros(1, dtype=torch.long)
        hops = Hops(nodes, torch.stack([one, one]), one, torch.ones(1), one.new_zeros(nodes.numel()), [nodes.numel()],
                    [1], [])  # fmt: skip
        batch = filter_data(self.data, nodes, one, one, one)
        batch.num_nodes, batch.batch_size, batch.n_id, batch.e_id = nodes.numel(), nodes.numel(), nodes, one
        batch = weigh(batch, hops)
        batch = batch if self.transform is None else self.transform(batch)
        model = bare(self.model)
        device = next((p.device for p in model.parameters()), batch.edge_index.device)
        batch = batch.to(device)
        assert self.whole is not None
        drawn = DrawnBatch(nodes, one, hops.scale, self.whole, hops.num_nodes, hops.num_edges, [])
        drawn.memory = weakref.ref(self)
        batches.register(batch, drawn)
        model(**arguments_of(model, batch, device, {}))

    def _try_random(self, nodes: Tensor) -> None:
        """Twice in training mode: rows that differ then do so by chance, as with dropout."""
        kept = {name: b.clone() for name, b in bare(self.model).named_buffers()}
        seen: list[dict[tuple[int, str], Tensor]] = []
        with torch.random.fork_rng(devices=[]):
            for _ in range(2):
                self.trying = {}
                try:
                    self._run(nodes)
                finally:
                    seen.append(self.trying)
                    self.trying = None
        for name, b in bare(self.model).named_buffers():
            b.copy_(kept[name])
        self._pending.clear()
        for past in (p for fs in self.kept.values() for f in fs for p in f.passes):
            keys = [(id(past), name) for name in past.rows]
            past.random = any(not _alike_sums(seen[0][k], seen[1][k]) for k in keys if k in seen[0])

    # --- a checkpoint -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What later steps depend on."""
        self.settle()

        def of_pass(p: PassHistory) -> dict[str, Any]:
            return {
                "level": p.level, "own": p.own, "shape": p.shape, "random": p.random, "coefs": p.coefs,
                "dots": list(p.dots), "filled": p.filled,
                "rows": {k: (r.shape, r.tensors()) for k, r in p.rows.items()},
                "sums": None if p.sums is None else (p.sums.shape, p.sums.tensors()),
            }  # fmt: skip

        layers = {
            name: [
                {"passes": [*map(of_pass, f.passes)], "updates": [*map(of_pass, f.updates)], "why": f.why,
                 "tried": f.tried}
                for f in self.kept.get(layer, [])
            ]
            for name, layer in self.layers.items() if layer is not None
        }  # fmt: skip
        words = ("steps", "cursor", "round", "refresh", "tried")
        return {"history": layers, "stamp": self.stamp, "form": Root.of(self.model).form,
                **{k: getattr(self, k) for k in words}}  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a `state`; that of a model with other layers, or of a snapshot, is of no use and left alone."""
        layers = state.get("history", {})
        if layers.keys() != self.layers.keys() or state["stamp"].numel() != self.nodes:
            return

        def table(kept: Any, dtype: torch.dtype) -> NodeRows:
            shape, tensors = kept
            rows = NodeRows(self.nodes, shape, dtype, self.storage)
            if tensors.keys() == rows.tensors().keys() and tensors["value"].dtype == dtype:
                for k, own in rows.tensors().items():
                    own.copy_(tensors[k])
            else:  # kept in another precision
                value = tensors["value"].float()
                value = value * tensors["scale"].unsqueeze(1) if "scale" in tensors else value
                rows.write(torch.arange(self.nodes), value)
            return rows

        def of_pass(p: dict[str, Any]) -> PassHistory:
            rows = {k: table(r, self.dtype) for k, r in p["rows"].items()}
            sums = None if p["sums"] is None else table(p["sums"], torch.float32)
            filled = None if p["filled"] is None else p["filled"].clone()
            return PassHistory(
                p["level"],
                rows,
                p["own"],
                sums,
                {},
                filled,
                tuple(p["shape"]),
                p["random"],
                p["coefs"],
                list(p["dots"]),
            )

        for name, layer in self.layers.items():
            assert layer is not None
            self.kept[layer] = [
                ForwardHistory([*map(of_pass, f["passes"])], [*map(of_pass, f["updates"])], f["why"], f["tried"])
                for f in layers[name]
            ]
        self.stamp = state["stamp"].clone()
        for k in ("steps", "cursor", "round", "refresh", "tried"):
            setattr(self, k, state[k])
        root = Root.of(self.model)
        root.form = state["form"] if root.form is None else root.form


class _Heard:
    """A forward of a layer over the whole graph, whose rows are all taken."""

    def __init__(self, layer: Propagate, forward: ForwardHistory, nodes: int):
        self.layer, self.forward, self.nodes = layer, forward, nodes
        assert layer.reading is not None
        self.reading = layer.reading._replace(functions=frozenset())
        self.passes = self.updates = 0

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        self._take(self.forward.updates, self.updates, kwargs)
        self.updates += 1
        return self.layer.own("edge_updater")(edge_index, size=size, **kwargs)

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        self._take(self.forward.passes, self.passes, kwargs)
        self.passes += 1
        return self.layer.own("propagate")(edge_index, size=size, **kwargs)

    def aggregate(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.layer.own("aggregate")(inputs, *args, **kwargs)

    def _take(self, past: list[PassHistory], at: int, kwargs: dict[str, Any]) -> None:
        for name, rows in past[at].rows.items() if at < len(past) else ():
            now = sources_of(kwargs.get(name))
            if now is not None and now.shape[0] == self.nodes and tuple(now.shape[1:]) == rows.shape:
                rows.write(torch.arange(self.nodes), now.detach())
                if at < len(self.forward.passes) and past is self.forward.passes and not past[at].dots[1]:
                    past[at].dots = [1.0, 1.0]


# --- a layer's arguments ----------------------------------------------------------------------------------------------


def are_edges(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return value.dim() == 2 and value.shape[0] == 2 and not value.is_floating_point()


def lifted(conv: MessagePassing, which: str = "_user_args") -> dict[str, set[str]]:
    """The arguments of `propagate` (or `edge_updater`) that nodes have, and whether sources (j) or targets (i) do."""
    found: dict[str, set[str]] = {}
    for name in getattr(conv, which):
        if name.endswith(("_i", "_j")) and name[:-2] not in ("edge_index", "size"):
            found.setdefault(name[:-2], set()).add(name[-1])
    return found


def sources_of(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value


def targets_of(value: Any) -> Any:
    return value[1] if isinstance(value, tuple | list) else value


def _rows_of(value: Any, at: Tensor) -> Any:
    """Targets' rows at some places."""
    if isinstance(value, tuple | list):
        return value[0], None if value[1] is None else value[1][at.to(value[1].device)]
    return value[at.to(value.device)] if isinstance(value, Tensor) else value


def _paired(sources: Tensor, now: Any, sides: set[str]) -> Any:
    """Sources' rows beside the targets' own of now."""
    if "i" not in sides and not isinstance(now, tuple | list):
        return sources
    target = targets_of(now)
    return sources, None if target is None else target.detach()


def _detached(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_detached(v) for v in value)
    return value.detach() if isinstance(value, Tensor) else value


def _less(now: Any, then: Any, trust: float) -> Any:
    """Sources' rows less what is trusted of those kept."""
    if isinstance(now, tuple | list):
        return now[0] - trust * sources_of(then), now[1]
    return now - trust * then


def _per_edge(value: Any, edges: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == edges


def _no_edges(kwargs: dict[str, Any], edges: int, node: dict[str, set[str]]) -> dict[str, Any]:
    return {k: v[:0] if _per_edge(v, edges) and k not in node else v for k, v in kwargs.items()}


def _pair(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _first_of_each(ids: Tensor) -> Tensor:
    """Where each id comes first."""
    order = ids.argsort(stable=True)
    new = torch.ones_like(order, dtype=torch.bool)
    new[1:] = ids[order][1:] != ids[order][:-1]
    return order[new]


def _alike_sums(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).norm()) <= CLOSE * float(b.norm()) + 1e-12


def some(place: Aligned, at: Tensor) -> Aligned:
    """How some of the edges in use lie in the batch's."""
    if place.at is None:
        rest = at.new_full((place.edges - place.kept,), -1)
        where = torch.cat([torch.arange(place.start, place.start + place.kept, device=at.device), rest])
    else:
        where = place.at
    return Aligned(0, 0, at.numel(), where[at], place.share)


@contextlib.contextmanager
def still(conv: MessagePassing) -> Iterator[None]:
    """Within, a layer drops nothing and counts nothing."""
    training = [m for m in conv.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


@contextlib.contextmanager
def _alike(conv: MessagePassing) -> Iterator[None]:
    """Within, the layer's own modules compute rows that are all alike once, and drop nothing."""

    def once(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if len(args) == 1 and not kwargs else None
            if isinstance(x, Tensor) and x.dim() > 1 and x.shape[0] > 1 and x.stride(0) == 0:
                out = forward(x[:1])
                return out.expand(x.shape[0], *out.shape[1:]) if isinstance(out, Tensor) else forward(*args)
            return forward(*args, **kwargs)

        return run

    inner = [m for m in conv.children() if "forward" not in m.__dict__]
    for m in inner:
        m.__dict__["forward"] = once(m.forward)
    try:
        with still(conv):
            yield
    finally:
        for m in inner:
            del m.__dict__["forward"]
