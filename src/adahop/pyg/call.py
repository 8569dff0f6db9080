"""Call: one forward of a PyG layer on a batch, in which each drawn edge counts for the `scale` edges it stands for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch_geometric.utils import is_sparse, to_edge_index

from adahop.checks import tell
from adahop.ops import segment_sum, spread
from adahop.pyg import batches, fused
from adahop.pyg.align import Aligned, align, is_edge_index, plain
from adahop.pyg.arguments import Kwargs, tensors_in
from adahop.pyg.batches import Found
from adahop.pyg.readings import shares
from adahop.typed import Relation

if TYPE_CHECKING:
    from adahop.pyg.memory import ControlledSum
    from adahop.pyg.wrap import Propagate

LARGE_SUMS = 4.0, 8.0  # times the drawn sums, and messages: plain sums beyond both keep the size of the drawn
SAMPLED_ROWS = 16  # rows by which the input of a layer's forward is recognised


class MessageEnergies:
    """The energy of each message that one `propagate` sent over the edges of a batch, 0 where it sent none."""

    def __init__(self, layer: Propagate, relation: Relation | None = None):
        self.layer, self.relation = layer, relation
        self.trains = layer.conv.training  # a layer in evaluation mode trains if a gradient comes back
        self.exact = False  # whether the sum was known without sampling, so that there is nothing to learn
        self.energy: Tensor | None = None  # of the batch's edges from `first` on, or of all those of a relation
        self.first = 0

    def add(self, energy: Tensor, first: int = 0) -> None:
        self.energy = energy if self.energy is None else self.energy + energy
        self.first = first

    def of_edges(self, first: int, many: int) -> Tensor | None:
        """[many] the energies of the batch's edges from `first` on, 0 where none were recorded; None where there are
        none at all.
        """
        energy, start = self.energy, first - self.first
        if energy is None or self.exact or not bool(energy.any()):
            return None
        if start >= 0 and start + many <= energy.numel():
            return energy[start : start + many]
        out = energy.new_zeros(many)
        lo, hi = max(start, 0), min(start + many, energy.numel())
        if lo < hi:
            out[lo - start : hi - start] = energy[lo:hi]
        return out

    def on_gradient(self, grad: Tensor) -> None:
        self.trains = True


class Call:
    """One forward of a layer on a batch."""

    LEARNED = "\0learned"  # in place of an attribute's name

    def __init__(self, layer: Propagate, found: Found):
        assert layer.reading is not None
        self.layer, self.reading, self.found = layer, layer.reading, found
        self.batch, self.edge_index = found.batch, found.edge_index
        self.device = found.edge_index.device
        self.scale = self.batch.on(self.device, "scale")
        self.records_energies = self.batch.root.records_energies
        self.functions_called: set[str] = set()  # of the functions in `readings`
        self.estimated = False  # whether degrees were estimated from the batch
        self.share = 1.0  # of the batch's edges in use
        self.unit_weights: list[Tensor] = []  # ones in place of a scale that the layer was passed as edge weight
        self.alpha: Tensor | None = None  # what softmax gave for the edges in use
        self.target_factor: Tensor | None = None  # per node, a factor of all messages that it receives
        self.used: Tensor | None = None  # edges in use
        self.aligned: Aligned | None = None  # how these lie in the batch
        self.recorded: MessageEnergies | None = None
        self.alignments: list[tuple[Tensor, Aligned | None]] = []  # of all edges asked for so far
        self.scaled_values: list[Tensor] = []  # edge values that have the scale in them
        self.graph_values: list[Tensor] = []  # those that follow from the graph alone
        self.propagates = 0  # how many there were so far
        self.control: ControlledSum | None = None
        self.operand: fused.Operand | None = None  # what a sum without messages is formed from

    def forward_number(self, args: tuple, kwargs: Kwargs) -> int:
        """Which of the layer's forwards on this batch it is. A checkpointed part that runs again for its gradient is
        recognised by the values of its input, which then lies elsewhere in memory.
        """
        first = next((t for t in tensors_in((*args, *kwargs.values())) if t.is_floating_point()), None)
        rows = None if first is None else first.detach()[:: max(1, len(first) // SAMPLED_ROWS)]
        inputs = self.batch.forward_inputs.setdefault(self.layer, [])
        if in_backward():
            return next((i for i, one in enumerate(inputs) if _equal(one, rows)), 0)
        inputs.append(None if rows is None else rows.clone())
        return len(inputs) - 1

    def why_no_control(self, values: tuple) -> str | None:
        """Why sums over all neighbours are no control variate for those of this forward, which was given `values`."""
        if self.layer.conv.decomposed_layers > 1:
            return "it sums its features part by part (decomposed_layers > 1)"
        if not self.reading.sums_match:
            return "its sums on a batch have another meaning than on the whole graph"
        columns = self.found.span
        for aligned in (self.align(t) for t in tensors_in(values) if is_edge_index(t)):
            if aligned is not None and (aligned.share < 1.0 or aligned.edges != columns.stop - columns.start):
                return "it is given other edges than those drawn"
        return None

    # --- what the functions in `readings` ask -------------------------------------------------------------------------

    def align(self, used: Tensor) -> Aligned | None:
        """How some edges lie in the batch."""
        for one, aligned in self.alignments:
            if one is used:
                return aligned
        aligned = self._align(used)
        self.alignments.append((used, aligned))
        if aligned is not None:
            self.share = aligned.share
        return aligned

    def _align(self, used: Tensor) -> Aligned | None:
        edges, columns = self.edge_index, self.found.span
        passed = edges[:, columns]
        if (used.data_ptr(), used.shape, used.stride()) == (passed.data_ptr(), passed.shape, passed.stride()):
            return self._check_hops(Aligned(columns.start, used.shape[1], used.shape[1], None, 1.0))
        if self.batch.typed is not None:  # pairs of nodes may be in several relations
            for relation in self.batch.typed.span.values():
                if torch.equal(edges[:, relation], used):
                    return Aligned(relation.start, used.shape[1], used.shape[1], None, used.shape[1] / edges.shape[1])
        nodes = max(self.batch.ids(row).numel() for row in (0, 1))
        aligned = align(edges, used, columns, nodes, self.batch.whole_graph.bipartite)
        return None if aligned is None else self._check_hops(aligned)

    def _check_hops(self, aligned: Aligned) -> Aligned:
        """A part that ends within a hop leaves targets without some of their edges: it is marked as not all of them."""
        num_edges, stop = self.batch.num_edges, aligned.start + aligned.num_aligned
        if aligned.columns is not None or num_edges is None or stop == self.scale.numel():
            return aligned
        ends_hop = aligned.start == 0 and stop in itertools.accumulate(num_edges)
        return aligned if ends_hop else aligned._replace(share=1.0 - 1e-9)

    def scale_of(self, edges: int) -> Tensor | None:
        """[edges] scale of the edges in use, if there are as many."""
        if self.aligned is not None and self.used is not None:
            return self.aligned.take(self.scale) if self.aligned.edges == edges else None
        columns = self.found.span
        return self.scale[columns] if columns.stop - columns.start == edges else None

    def row_of(self, index: Tensor) -> int | None:
        """Whether some ids are the targets (1) or the sources (0) of the batch's edges, with self-loops or without."""
        edges = self.edge_index[:, self.found.span]
        no_loop = (edges[0] != edges[1]).nonzero().flatten()
        for row in (1, 0):
            for part in (edges[row], edges[row][no_loop]):
                if part.numel() and torch.equal(index[: part.numel()], part):
                    return row
        if self.alignments and self.alignments[-1][1] is not None:
            used = self.alignments[-1][0]
            return next((row for row in (1, 0) if torch.equal(used[row], index)), None)
        return None

    def sums(self, name: str | None, nodes: int, row: int = 1) -> tuple[Tensor, Tensor]:
        """[nodes] sums over the whole graph's edges of the batch's nodes: without self-loops, and those alone."""
        key = ("sums", name, row, self.device)
        if key not in self.batch.cache:
            inward, loops = self.batch.whole_graph.sums(self.batch.multiplicity if name is None else name, row)
            ids = self.batch.ids(row, inward.device)
            self.batch.cache[key] = tuple(t[ids].to(self.device) for t in (inward, loops))
        inward, loops = self.batch.cache[key]
        return inward[:nodes], loops[:nodes]

    def loops(self, name: str | None, estimate: Tensor, nodes: int) -> Tensor:
        """[nodes] the weight of the self-loop that a node has, NaN where it has none."""
        if name == self.LEARNED:
            return torch.where(self.sums(None, nodes)[1] > 0, estimate, float("nan"))
        key = ("loops", name, self.device)
        if key not in self.batch.cache:
            value = self.batch.whole_graph.loops(self.batch.multiplicity if name is None else name)
            self.batch.cache[key] = value[self.batch.on(value.device, "n_id")].to(self.device)
        return self.batch.cache[key][:nodes]

    def add_scaled(self, value: Tensor, fixed: bool) -> None:
        """Edge values that have the scale in them, `fixed` if they follow from the graph alone."""
        self.scaled_values.append(value)
        if fixed:
            self.graph_values.append(value)

    def attribute(self, value: Tensor | None) -> str | None:
        """The data's attribute that an edge weight is; None for ones, LEARNED for what is none of them."""
        if value is None or any(value is one for one in self.unit_weights):
            return None
        return batches.data_edge_attribute(self.batch, value) or self.LEARNED

    def degrees(
        self, name: str | None, weight: Tensor | None, aligned: Aligned, used: Tensor, nodes: int
    ) -> tuple[Tensor, Tensor]:
        """[nodes] sums of weights in the whole graph, without self-loops and of those alone.

        Weights that the model computes are known for the drawn edges only: a node's sum is then estimated from its
        drawn edges (by their scale), and for nodes without any by the number of neighbours and the mean weight.
        """
        if name != self.LEARNED or weight is None:
            inward, loops = self.sums(name, nodes)
            return inward * self.share, loops
        self.estimated = True
        degree, count = self.sums(None, nodes)
        loop = self.batch.whole_graph.is_loop(used)
        value, scale = weight.view(-1), aligned.take(self.scale).to(weight.dtype)
        drawn = segment_sum((value * scale)[~loop], used[1, ~loop], nodes)
        has_drawn = torch.bincount(used[1, ~loop], minlength=nodes)[:nodes] > 0
        mean = value.new_ones(()) if bool(loop.all()) else value.detach()[~loop].mean()
        undrawn = degree.to(value.dtype) * self.share * mean
        loops = segment_sum(value[loop], used[1, loop], nodes)
        return (
            torch.where(has_drawn, drawn, undrawn),
            torch.where((count > 0) & ~has_drawn, count.to(value.dtype) * mean, loops),
        )

    # --- in place of the layer's own methods --------------------------------------------------------------------------

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        edge_index = strided(edge_index)
        self._use(edge_index)
        out = self.layer.original("edge_updater")(edge_index, size=size, **kwargs)
        if self.control is not None and self.aligned is not None:
            self.control.after_edge_update(edge_index, size, kwargs, out)
        return out

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        edge_index = strided(edge_index)
        self._use(edge_index)
        try:
            if self.aligned is None:
                self.layer.uses_other_edges = True
                return self.layer.original("propagate")(edge_index, size=size, **kwargs)
            self._begin_recording()
            if self.control is not None:
                return self.control.propagate(edge_index, size, kwargs)
            return self.propagate_rows(fused.source_rows(self, kwargs), edge_index, size, kwargs)
        finally:
            self.propagates += 1
            self.used = self.aligned = self.alpha = None

    def propagate_rows(self, rows: Tensor | None, edge_index: Tensor, size: Any, kwargs: Kwargs) -> Tensor:
        """The layer's `propagate`; without messages where messages are coefficients times these `rows` of sources."""
        if rows is None:
            return self.layer.original("propagate")(edge_index, size=size, **kwargs)
        return self.without_messages(fused.Operand(rows), edge_index, size, kwargs)

    def without_messages(self, operand: fused.Operand, edge_index: Tensor, size: Any, kwargs: Kwargs) -> Tensor:
        assert self.reading.row_argument is not None
        self.operand = operand
        kwargs = fused.with_ones(self.reading.row_argument, kwargs)
        try:
            return self.layer.original("propagate")(edge_index, size=size, **kwargs)
        finally:
            self.operand = None

    def _use(self, edge_index: Tensor) -> None:
        self.used, self.aligned = edge_index, self.align(edge_index)

    def _begin_recording(self) -> None:
        assert self.aligned is not None
        partial = self.aligned.share < 1.0  # one relation of many: all of a layer are recorded as one
        if self.recorded is None or not partial:
            self.recorded = MessageEnergies(self.layer, self.batch.relation)
            if self.records_energies and not in_backward():
                self.batch.energies.append(self.recorded)

    def aggregate(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        original = self.layer.original("aggregate")
        if self.aligned is None or self.used is None:
            return original(inputs, *args, **kwargs)
        out = self._sum(original, inputs, args, kwargs)
        if not self.layer.reduces_sums:
            return out
        shape, share = [1] * out.dim(), self.cached("shares", lambda aligned, used: shares(self, aligned, used))
        shape[self.layer.conv.node_dim] = -1
        return out * share[: out.shape[self.layer.conv.node_dim]].to(out.dtype).view(shape)

    def _sum(self, original: Callable[..., Tensor], inputs: Tensor, args: tuple, kwargs: Kwargs) -> Tensor:
        if self.operand is not None:
            return fused.weighted_sum(self, self.operand, inputs, fused.num_targets(*args, **kwargs))
        if self.control is not None:
            return self.control.aggregate(inputs, args, kwargs)
        scaled = self.scaled(inputs)
        self.record(inputs, scaled)
        out = original(scaled, *args, **kwargs)
        self.watch_gradient(out)
        return out

    def scaled(self, inputs: Tensor) -> Tensor:
        factor = self.factor()
        if factor is None:
            return inputs
        shape = [1] * inputs.dim()
        shape[self.layer.conv.node_dim if inputs.dim() > 1 else 0] = -1
        return inputs * factor.to(inputs.dtype).view(shape)

    def factor(self) -> Tensor | None:
        """[edges] what messages are multiplied by."""
        assert self.aligned is not None
        if self.reading.factor in ("one", "none"):
            return None
        if self.reading.factor == "sum":
            return self.aligned.take(self.scale)
        return self.cached(
            "mean", lambda aligned, used: aligned.take(self.scale) * shares(self, aligned, used)[used[1]]
        )

    def cached(self, name: Any, make: Callable[[Aligned, Tensor], Tensor]) -> Tensor:
        """A value of the edges in use, made once for all layers that use the batch's edges as they are."""
        aligned, used = self.aligned, self.used
        assert aligned is not None and used is not None
        if not aligned.unchanged:
            return make(aligned, used)
        key = (name, aligned.start, aligned.edges, self.device)
        if key not in self.batch.cache:
            self.batch.cache[key] = make(aligned, used)
        return self.batch.cache[key]

    def decide_sum_size(self, values: tuple) -> None:
        """Once per layer: whether its plain sums keep the size of the drawn ones.

        Over many more neighbours than are drawn, a sum of the whole graph would be many times what the script summed
        so far, and a model that trained with that may not train with it. Such a layer is named in a warning.
        """
        layer, whole_graph, edges = self.layer, self.batch.whole_graph, self.edge_index
        if layer.sums_as_drawn is not None or self.reading.factor != "sum" or edges.shape[1] == 0:
            return
        layer.sums_as_drawn = False
        if self.reading.functions or whole_graph.given_by_hand:
            return  # normalised, or scaled by hand
        weights = {self.attribute(v): v for v in tensors_in(values) if v.dim() == 1 and len(v) == edges.shape[1]}
        name, weight = next(((k, v) for k, v in weights.items() if k not in (None, self.LEARNED)), (None, None))
        sums = whole_graph.sums(name)[0].abs().float()
        drawn = torch.bincount(edges[1], None if weight is None else weight.detach().abs())
        typical, most = float(sums.square().mean().sqrt()), float(drawn.max())
        layer.sums_as_drawn = typical > LARGE_SUMS[0] * most and typical > LARGE_SUMS[1]
        if layer.sums_as_drawn and not self.batch.cache.setdefault("large sums", False):
            self.batch.cache["large sums"] = True
            tell(
                f"{type(layer.conv).__name__} sums its neighbours, typically {typical:.0f} in the whole graph and "
                f"{most:.0f} at most where they are drawn: its sums keep the size of the drawn ones, as in PyG, and "
                "no snapshot is used; scale_messages(model, sums='whole') makes them those of the whole graph"
            )

    # --- what the sampler learns from ---------------------------------------------------------------------------------

    def is_recording(self) -> bool:
        """Whether a sampler learns from the messages sent now."""
        return (
            self.records_energies
            and self.recorded is not None
            and self.aligned is not None
            and self.reading.teaches
            and not self.reading.left_alone
            and not in_backward()
        )

    def recorded_edges(self) -> slice:
        """Which of the edges in use the sampler will learn from: those of one hop, if this step has as many
        `propagate` as the last one; else all.
        """
        aligned, batch, hops = self.aligned, self.batch, self.batch.num_edges or []
        assert aligned is not None
        every = slice(0, aligned.edges)
        hop = -1 if batch.expected_propagates is None else batch.expected_propagates - len(batch.energies)
        if aligned.columns is not None or aligned.share < 1.0 or not 0 <= hop < len(hops):
            return every
        start = sum(hops[:hop]) - aligned.start
        return slice(start, start + hops[hop]) if 0 <= start <= aligned.num_aligned - hops[hop] else every

    @torch.no_grad()
    def record(self, messages: Tensor, scaled: Tensor) -> None:
        """The energy of each message: of the one that was drawn, times its scale, without its target's own factor."""
        if not self.is_recording():
            return
        assert self.recorded is not None and self.aligned is not None
        if "softmax" in self.reading.functions and self.alpha is not None:
            energy = deviation(scaled, self.alpha, self.aligned.take(self.scale), self.used[1])  # type: ignore[index]
        elif self.reading.factor == "one":
            energy = squared_norm(scaled, self.layer.conv.node_dim)
            if self.target_factor is not None:
                factor = self.target_factor[self.used[1]].float()  # type: ignore[index]
                energy = energy / factor.square().clamp(min=1e-30)
        else:  # a mean's normaliser would bound what is learnt from an edge that is rarely drawn
            scale = self.aligned.take(self.scale).float()
            energy = scale.square() * squared_norm(messages, self.layer.conv.node_dim)
        self.recorded.add(self.aligned.put(energy, self.scale.numel()))

    def watch_gradient(self, out: Tensor) -> None:
        """A layer in evaluation mode trains if a gradient comes back."""
        recorded = self.recorded
        if recorded is not None and not recorded.trains and self.records_energies and out.requires_grad:
            out.register_hook(recorded.on_gradient)


def in_backward() -> bool:
    """Whether a gradient is being computed: a checkpointed part of a model then runs for the second time."""
    return torch._C._current_graph_task_id() != -1


def _equal(one: Tensor | None, two: Tensor | None) -> bool:
    return one is two if one is None or two is None else one.shape == two.shape and torch.equal(one, two)


def strided(edge_index: Any) -> Any:
    """The edges of a sparse matrix or an EdgeIndex; others as they are."""
    return sparse_edges(edge_index)[0] if is_sparse(edge_index) else plain(edge_index)


def sparse_edges(adj_t: Any) -> tuple[Tensor, Tensor | None]:
    """Sources, targets and values of a transposed adjacency matrix."""
    if isinstance(adj_t, Tensor):
        index, value = to_edge_index(adj_t)
        return index.flip(0), value
    row, col, value = adj_t.coo()
    return torch.stack([col, row]), value


def squared_norm(messages: Tensor, node_dim: int) -> Tensor:
    """|m|^2 of every message, in single precision whatever the layer computes in."""
    m = messages.detach()
    m = m.movedim(node_dim, 0).flatten(1) if m.dim() > 2 else m
    m = m.unsqueeze(1) if m.dim() == 1 else m
    kind = torch.float32 if m.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(m, dim=1, dtype=kind).square().float()


@torch.no_grad()
def deviation(messages: Tensor, alpha: Tensor, scale: Tensor, row: Tensor) -> Tensor:
    """What an edge's draw changes in an average that the sample itself normalises: |scale a_ij (x_j - mean)|^2.

    messages [M, H, C] or [M, C] are alpha x_j with the scale in alpha [M, H]; the mean is that of the target's other
    messages, and a_ij the attention over its average, so that it does not matter how many neighbours a target has.
    Where there are no others, the message itself is taken.
    """
    if row.numel() == 0:
        return scale.new_zeros(0)
    m = messages.detach().float()
    n = int(row.max()) + 1
    a = alpha.float().reshape(alpha.shape[0], -1)
    m = m.reshape(m.shape[0], a.shape[1], -1) if m[0].numel() % a.shape[1] == 0 else m.reshape(m.shape[0], 1, -1)
    a = a if a.shape[1] == m.shape[1] else a.mean(1, keepdim=True)
    total = segment_sum(m.flatten(1), row, n).view(n, *m.shape[1:])
    apart = spread(m, torch.arange(len(m), device=m.device), row, torch.ones_like(a), a, total)
    return apart * segment_sum(scale.float(), row, n)[row].square()
