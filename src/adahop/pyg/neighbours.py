"""AllNeighbours: the edges of a layer over all neighbours of some nodes, with the values that the layer gives them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adahop import ops
from adahop.pyg import batches
from adahop.pyg.align import Aligned
from adahop.pyg.arguments import alike, are_edges, lifted, per_edge, some
from adahop.pyg.batches import DrawnBatch, Found
from adahop.pyg.rows import NodeRows
from adahop.pyg.wrap import Call, Named


class Unknown(Exception):
    """Why a layer's sums over all neighbours cannot be formed."""


@dataclass
class PassHistory:
    """Of one `propagate` (or `edge_updater`) of a layer: the sources' rows, by argument."""

    level: int = 0  # how many sums lie before it
    rows: dict[str, NodeRows] = field(default_factory=dict)
    own: str | None = None  # the attribute of the data that its only argument is; its sums never change
    sums: NodeRows | None = None  # those sums, where `filled`
    filled: Tensor | None = None
    shape: tuple[int, ...] = ()  # of what it gives, per node or edge
    random: bool = False  # whether rows differ from one forward to the next (dropout)
    dots: list[float] = field(default_factory=lambda: [0.0, 0.0])  # <x, x'> and <x', x'> of late
    spare: dict[str, NodeRows] = field(default_factory=dict, init=False)  # rows that it would need if its sums changed

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
        local = torch.where(src == nodes[row], row, torch.arange(t, t + src.numel(), device=src.device))
        e_id = edges.numbers(nodes[row], place)
        self.weighted = isinstance(whole, Named)
        scale = torch.ones(src.numel(), device=src.device)
        if isinstance(whole, Named):
            scale = whole.data[whole.name][e_id].view(-1)
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
        with torch.no_grad(), self.layer.within(self), alike(self.layer.conv), contextlib.suppress(_Enough):
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
            if found is not None and per_edge(data.to_dict().get(found), data.edge_index.shape[1]):
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
        edge = {k: v for k, v in kwargs.items() if per_edge(v, many) and k not in node and k not in updated}
        at = (edge_index[1] < self.targets_).nonzero().flatten()  # loops that the layer added to sources as well
        if at.numel() < many:
            edge_index, place, edge = edge_index[:, at], some(place, at), {k: v[at] for k, v in edge.items()}
        return Sent(edge_index, place, edge, updated)

    def put(self, sent: Sent) -> None:
        """From now on these are the edges in use."""
        self.used, self.place, self.alpha = sent.used, sent.place, None
