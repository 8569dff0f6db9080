"""AllNeighbours: the edges of a layer over all neighbours of some nodes, with the values that the layer gives them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adahop.pyg import batches
from adahop.pyg.align import Aligned, is_edge_index
from adahop.pyg.arguments import Kwargs, NodeArguments, equal_rows_once, is_per_edge, node_arguments
from adahop.pyg.batches import DrawnBatch, Found
from adahop.pyg.call import Call
from adahop.pyg.rows import NodeRows


class NoHistory(Exception):
    """Why a layer's sums over all neighbours cannot be formed."""


@dataclass
class PassHistory:
    """Of one `propagate` (or `edge_updater`) of a layer: the sources' rows, by argument."""

    level: int = 0  # how many sums lie before it
    rows: dict[str, NodeRows] = field(default_factory=dict)
    # the attribute of the data that its only argument is, so that its sums never change
    data_name: str | None = None
    sums: NodeRows | None = None  # those sums, where `filled`
    filled: Tensor | None = None
    state: tuple[int, int | None] | None = field(default=None, init=False)  # of the data's rows, when sums were formed
    shape: tuple[int, ...] = ()  # of what it gives, per node or edge
    complete: bool = False  # whether it is over all edges that the layer is given
    random: bool = False  # whether rows differ from one forward to the next (dropout)
    dots: list[float] = field(default_factory=lambda: [0.0, 0.0])  # running <x, x'> and <x', x'>
    spare: dict[str, NodeRows] = field(default_factory=dict, init=False)  # rows that it would need if its sums changed

    @property
    def cv_weight(self) -> float:
        """The share of x' that was found in x in recent batches: x less that share of x' has the least variance."""
        if self.data_name:
            return 1.0
        return min(max(self.dots[0] / self.dots[1], 0.0), 1.0) if self.dots[1] > 0 else 0.0

    def tables(self) -> Iterator[NodeRows]:
        yield from self.rows.values()
        if self.data_name is not None and self.sums is not None:
            yield self.sums


@dataclass
class ForwardHistory:
    """Of one forward of a layer; a layer that is used n times has n."""

    passes: list[PassHistory] = field(default_factory=list)
    updates: list[PassHistory] = field(default_factory=list)
    why: str = ""  # why it has no history
    tried: bool = False  # whether edge values were found to depend on the graph alone


class EdgeArguments(NamedTuple):
    """The edges of one `propagate` (or `edge_updater`) over all neighbours, and the edge-level arguments."""

    used: Tensor
    aligned: Aligned
    edge: dict[str, Tensor]
    updated: dict[str, int]  # arguments that an edge update gave, and which one


class _Stop(Exception):
    """What was wanted of a layer's forward is known."""


class AllNeighbours(Call):
    """A forward of a layer on all in-edges of some nodes, each edge with a source of its own, for its edge values."""

    def __init__(self, call: Call, nodes: Tensor, forward: ForwardHistory):
        whole_graph, name = call.batch.whole_graph, call.batch.multiplicity
        every = whole_graph.graph.in_edges(nodes)
        (src, row), t = every.edge_index, nodes.numel()
        local = torch.where(src == nodes[row], row, torch.arange(t, t + src.numel(), device=src.device))
        self.weighted = name is not None
        scale = every.scale if name is None else whole_graph.data[name][every.e_id].view(-1)
        n_id = torch.cat([nodes, src])
        batch = DrawnBatch(n_id, every.e_id, scale, whole_graph, blocks=[], multiplicity=name)
        edge_index = torch.stack([local, row]).to(call.device)
        super().__init__(call.layer, Found(batch, edge_index, slice(0, src.numel())))
        self.num_targets, self.forward = t, forward
        self.edge_attributes: dict[str, Tensor] = {}
        self.passes: list[EdgeArguments] = []
        self.updates: list[EdgeArguments] = []
        self._placeholders: list[Tensor] = []  # in place of what the edge updates give
        self._random = False  # whether rows and placeholders are random, instead of zeros

    @property
    def num_nodes(self) -> int:
        return self.batch.n_id.numel()

    def run(self, args: tuple, kwargs: Kwargs, call: Call, random: bool = False) -> None:
        """The layer's forward up to its last `propagate`, on rows of nodes that are all zeros, or random ones."""
        named = dict(zip(inspect.signature(self.layer.original_forward).parameters, args, strict=False)) | kwargs
        self._random = random
        named = {name: self._for_all_edges(name, value, call) for name, value in named.items()}
        self.passes, self.updates, self._placeholders, self.alignments = [], [], [], []
        try:
            with torch.no_grad(), self.layer.installed(self), equal_rows_once(self.layer.conv):
                self.layer.forward(**named)
        except NoHistory:
            raise
        except _Stop:
            pass
        except Exception as e:  # a layer of the user's own may fail in any way on rows of zeros
            raise NoHistory(f"it cannot run on all neighbours ({' '.join(str(e).split())[:200]})") from e
        if len(self.passes) < len(self.forward.passes):
            raise NoHistory("it passes messages another number of times than before")

    def _for_all_edges(self, name: str, value: Any, call: Call) -> Any:
        """An argument of the layer for all neighbours."""
        if is_edge_index(value):
            return self.edge_index
        if isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value):
            return tuple(self._for_all_edges(name, v, call) for v in value)
        if isinstance(value, tuple | list) and value and all(isinstance(v, int) for v in value):
            return tuple(self.num_nodes for _ in value)  # sizes
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if any(value is one for one in call.unit_weights):
            self.unit_weights.append(torch.ones(self.scale.numel(), device=self.device, dtype=value.dtype))
            return self.unit_weights[-1]
        data, columns = call.batch.whole_graph.data, call.found.span
        if value.shape[0] == columns.stop - columns.start:
            found = batches.data_edge_attribute(call.batch, value)
            if found is not None and is_per_edge(data.to_dict().get(found), data.edge_index.shape[1]):
                rows = data[found][self.batch.e_id].to(value.device)
                self.edge_attributes[found] = rows.view(-1, *value.shape[1:])
                return self.edge_attributes[found]
            if name.startswith("edge") or value.shape[0] > call.batch.n_id.numel():
                raise NoHistory(f"its `{name}` is made by the model, and known for drawn edges only")
        if not value.is_floating_point():
            found = batches.data_node_attribute(call.batch, value)
            if found is None:
                raise NoHistory(f"its `{name}` is made by the model, and known for the batch's nodes only")
            return data[found][self.batch.n_id].to(value.device)
        return self._rows(self.num_nodes, value.shape[1:], value.dtype)

    def _rows(self, many: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows that are all zeros, or random ones."""
        if self._random:
            return torch.randn(many, *shape, generator=torch.Generator().manual_seed(0)).to(self.device, dtype)
        return torch.zeros(1, device=self.device, dtype=dtype).expand(many, *shape)

    def attribute(self, value: Tensor | None) -> str | None:
        if value is None or any(value is one for one in self.unit_weights):
            return None
        at = value.data_ptr(), value.numel()
        known = self.edge_attributes.items()
        return next((name for name, rows in known if (rows.data_ptr(), rows.numel()) == at), self.LEARNED)

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        self.updates.append(self._arguments(edge_index, kwargs, node_arguments(self.layer.conv, "_edge_user_args")))
        shape = self.forward.updates[len(self.updates) - 1].shape
        self._placeholders.append(self._rows(edge_index.shape[1], shape))
        return self._placeholders[-1]

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        self.passes.append(self._arguments(edge_index, kwargs, node_arguments(self.layer.conv)))
        if len(self.passes) == len(self.forward.passes):
            raise _Stop
        shape = self.forward.passes[len(self.passes) - 1].shape
        return self._rows(self.num_nodes, shape)

    def _arguments(self, edge_index: Any, kwargs: Kwargs, node: NodeArguments) -> EdgeArguments:
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            raise NoHistory("it passes messages by a sparse matrix")
        aligned, many = self.align(edge_index), edge_index.shape[1]
        if aligned is None:
            raise NoHistory("it passes messages over other edges than those of the batch")
        updated = {k: i for k, v in kwargs.items() for i, zeros in enumerate(self._placeholders) if v is zeros}
        edge = {k: v for k, v in kwargs.items() if is_per_edge(v, many) and k not in node and k not in updated}
        at = (edge_index[1] < self.num_targets).nonzero().flatten()  # layers add loops to sources as well
        if at.numel() < many:
            edge_index, aligned, edge = edge_index[:, at], aligned.subset(at), {k: v[at] for k, v in edge.items()}
        return EdgeArguments(edge_index, aligned, edge, updated)

    def aggregated(self, arguments: EdgeArguments, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
        """Messages and sums of the layer's own `propagate` over all neighbours."""
        found: list[tuple[Tensor, Tensor]] = []

        def aggregate(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            inputs = self.scaled(inputs) if self.weighted else inputs
            found.append((inputs, self.layer.original("aggregate")(inputs, *args, **kwargs)))
            raise _Stop

        self.use(arguments)
        with contextlib.suppress(_Stop):
            self.layer.propagate_by(aggregate, arguments.used, (self.num_nodes, self.num_targets), kwargs)
        return found[-1]

    def use(self, arguments: EdgeArguments) -> None:
        """From now on these are the edges in use."""
        self.used, self.aligned, self.alpha = arguments.used, arguments.aligned, None
