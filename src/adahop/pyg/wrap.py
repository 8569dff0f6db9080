"""scaled(conv): one object in a PyG layer, at `propagate`, that finds the batch, scales, notes and remembers."""

from __future__ import annotations

import contextlib
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import is_sparse, to_edge_index

from adahop.checks import InputError, KindError, one_of, tell
from adahop.ops import segment_sum
from adahop.pyg import batches, fused
from adahop.pyg.align import Aligned, align, same
from adahop.pyg.arguments import are_edges
from adahop.pyg.batches import DrawnBatch, Found, Side
from adahop.pyg.readings import Copies, Reading, shares
from adahop.typed import Relation

if TYPE_CHECKING:
    from adahop.pyg.memory import Memory, Remembered

SMALL = {"auto": None, "whole": False, "drawn": True}
LARGE = 4.0, 8.0  # times the drawn sums, and messages: plain sums beyond both keep the size of the drawn
SOME = 16  # rows by which a layer's input is known again


class Round:
    """What one layer sent over the edges of a batch: the energy of each message, 0 where it sent none."""

    def __init__(self, layer: Propagate, trains: bool):
        self.layer, self.counts = layer, trains  # in evaluation mode it counts once a gradient comes back
        self.known = False  # whether the sum was known, so that nothing was left to chance
        self.energy: Tensor | None = None  # of the batch's edges from `first` on, or of all those of a relation
        self.first = 0
        self.relation: Relation | None = None

    def add(self, energy: Tensor, first: int = 0) -> None:
        self.energy = energy if self.energy is None else self.energy + energy
        self.first = first

    def of(self, first: int, many: int) -> Tensor | None:
        """[many] the energies of the batch's edges from `first` on, 0 where none were noted; None where there are none
        at all.
        """
        energy, start = self.energy, first - self.first
        if energy is None or self.known or not bool(energy.any()):
            return None
        if start >= 0 and start + many <= energy.numel():
            return energy[start : start + many]
        out = energy.new_zeros(many)
        lo, hi = max(start, 0), min(start + many, energy.numel())
        if lo < hi:
            out[lo - start : hi - start] = energy[lo:hi]
        return out

    def came_back(self, grad: Tensor) -> None:
        self.counts = True


class Call:
    """One forward of a layer on a batch."""

    LEARNED = "\0learned"  # in place of an attribute's name

    def __init__(self, layer: Propagate, reading: Reading, found: Found, listens: bool = False):
        self.layer, self.reading, self.found = layer, reading, found
        self.batch, self.edge_index = found.batch, found.edge_index
        self.device = found.edge_index.device
        self.scale = self.batch.on(self.device, "scale")
        self.listens = listens
        self.asked: set[str] = set()  # functions of ours that the layer called
        self.estimated = False
        self.share = 1.0  # of the batch's edges in use
        self.ones: list[Tensor] = []  # weights that stand in for a scale that the layer was passed
        self.alpha: Tensor | None = None  # what softmax gave for the edges in use
        self.targets: Tensor | None = None  # per node, a factor of all its messages
        self.used: Tensor | None = None  # edges in use
        self.place: Aligned | None = None
        self.round: Round | None = None
        self.known: list[tuple[Tensor, Aligned | None]] = []
        self.fixed: list[Tensor] = []  # edge values that only the graph decides
        self.passes = 0  # propagates so far
        self.memory: Remembered | None = None
        self.operand: fused.Operand | None = None  # what a sum without messages is formed from

    def number(self, args: tuple, kwargs: dict[str, Any]) -> int:
        """Which of the layer's forwards on this batch it is. A checkpointed part that runs again for its gradient is
        known by what it is given, which then lies elsewhere.
        """
        first = next((t for t in _tensors((*args, *kwargs.values())) if t.is_floating_point()), None)
        seen = None if first is None else first.detach()[:: max(1, len(first) // SOME)]
        calls = self.batch.calls.setdefault(self.layer, [])
        if backward():
            return next((i for i, one in enumerate(calls) if _same(one, seen)), 0)
        calls.append(None if seen is None else seen.clone())
        return len(calls) - 1

    # --- what the functions in `readings` ask -------------------------------------------------------------------------

    def aligned(self, used: Tensor) -> Aligned | None:
        """How some edges lie in the batch."""
        for one, place in self.known:
            if one is used:
                return place
        place = self._align(used)
        self.known.append((used, place))
        if place is not None:
            self.share = place.share
        return place

    def _align(self, used: Tensor) -> Aligned | None:
        given = self.edge_index
        columns = self.found.columns
        whole = slice(0, given.shape[1]) if columns is None else columns
        passed = given[:, whole]
        if (used.data_ptr(), used.shape, used.stride()) == (passed.data_ptr(), passed.shape, passed.stride()):
            return self._cut(same(whole.start, used.shape[1]))
        if self.batch.typed is not None:  # pairs of nodes may be in several relations
            for relation in self.batch.typed.span.values():
                if torch.equal(given[:, relation], used):
                    return Aligned(relation.start, used.shape[1], used.shape[1], None, used.shape[1] / given.shape[1])
        nodes = max(getattr(self.batch, self.batch.side(row)).numel() for row in (0, 1))
        place = align(given, used, columns, nodes, self.batch.whole.bipartite)
        return None if place is None else self._cut(place)

    def _cut(self, place: Aligned) -> Aligned:
        """A part that ends within a hop leaves targets without some of their edges."""
        if place.at is not None or self.batch.num_edges is None or place.start + place.kept == self.scale.numel():
            return place
        ends = [sum(self.batch.num_edges[: h + 1]) for h in range(len(self.batch.num_edges))]
        return place if place.start == 0 and place.kept in ends else place._replace(share=1.0 - 1e-9)

    def scale_of(self, edges: int) -> Tensor | None:
        """[edges] scale of the edges in use, if there are as many."""
        if self.place is not None and self.used is not None:
            return self.place.take(self.scale) if self.place.edges == edges else None
        columns = self.found.columns or slice(0, self.edge_index.shape[1])
        return self.scale[columns] if columns.stop - columns.start == edges else None

    def row_of(self, index: Tensor) -> int | None:
        """Whether some ids are the targets (1) or the sources (0) of the batch's edges, with self-loops or without."""
        given = self.edge_index if self.found.columns is None else self.edge_index[:, self.found.columns]
        true = (given[0] != given[1]).nonzero().flatten()
        for row in (1, 0):
            for part in (given[row], given[row][true]):
                if part.numel() and torch.equal(index[: part.numel()], part):
                    return row
        if self.known and self.known[-1][1] is not None:
            used = self.known[-1][0]
            return next((row for row in (1, 0) if torch.equal(used[row], index)), None)
        return None

    def sums(self, name: str | None, nodes: int, row: int = 1) -> tuple[Tensor, Tensor]:
        """[nodes] sums over the whole graph's edges of the batch's nodes: without self-loops, and those alone."""
        key = ("sums", name, row, self.device)
        if key not in self.batch.kept:
            inward, loops = self.batch.whole.sums(name, row)
            n_id = self.batch.on(inward.device, self.batch.side(row))
            self.batch.kept[key] = tuple(t[n_id].to(self.device) for t in (inward, loops))
        one, two = self.batch.kept[key]
        return one[:nodes], two[:nodes]

    def loops(self, name: str | None, estimate: Tensor, nodes: int) -> Tensor:
        """[nodes] the weight of the self-loop that a node has, NaN where it has none."""
        if name == self.LEARNED:
            return torch.where(self.sums(None, nodes)[1] > 0, estimate, float("nan"))
        key = ("loops", name, self.device)
        if key not in self.batch.kept:
            value = self.batch.whole.loops(name)
            self.batch.kept[key] = value[self.batch.on(value.device, "n_id")].to(self.device)
        return self.batch.kept[key][:nodes]

    def attribute(self, value: Tensor | None) -> str | None:
        """The data's attribute that an edge weight is; None for ones, LEARNED for what is none of them."""
        if value is None or any(value is one for one in self.ones):
            return None
        name = batches.attribute(self.batch, value)
        return name if name is not None and name in self.batch.whole.data else self.LEARNED

    def degrees(
        self, name: str | None, weight: Tensor | None, place: Aligned, used: Tensor, nodes: int
    ) -> tuple[Tensor, Tensor]:
        """[nodes] sums of weights in the whole graph, without self-loops and of those alone.

        Weights that the model computes are known for the drawn edges only: a node's sum is then estimated from its own
        (by their scale), and at the rim, where there are none, by its number of neighbours and the mean weight.
        """
        if name != self.LEARNED or weight is None:
            inward, loops = self.sums(name, nodes)
            return inward * self.share, loops
        self.estimated = True
        many, count = self.sums(None, nodes)
        true = ~self.batch.whole.is_loop(used)
        value, scale = weight.view(-1), place.take(self.scale).to(weight.dtype)
        own = segment_sum((value * scale)[true], used[1, true], nodes)
        seen = torch.bincount(used[1, true], minlength=nodes)[:nodes] > 0
        mean = value.detach()[true].mean() if bool(true.any()) else value.new_ones(())
        rim = many.to(value.dtype) * self.share * mean
        loops = segment_sum(value[~true], used[1, ~true], nodes)
        return torch.where(seen, own, rim), torch.where((count > 0) & ~seen, count.to(value.dtype) * mean, loops)

    def cast(self, value: Tensor, dtype: torch.dtype | None) -> Tensor:
        return value if dtype is None else value.to(dtype)

    def keep(self, value: Tensor, learned: Tensor | None) -> None:
        """`value` of each edge in use follows from the graph alone, unless it was learned."""
        if learned is None:
            self.fixed.append(value)

    # --- in place of the layer's own methods --------------------------------------------------------------------------

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        edge_index = _strided(edge_index)
        self._use(edge_index)
        out = self.layer.own("edge_updater")(edge_index, size=size, **kwargs)
        if self.memory is not None and self.place is not None:
            self.memory.updated(edge_index, size, kwargs, out)
        return out

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        edge_index = _strided(edge_index)
        self._use(edge_index)
        try:
            if self.place is None:
                self.layer.elsewhere = True
                return self.layer.own("propagate")(edge_index, size=size, **kwargs)
            self._open_round()
            if self.memory is not None:
                return self.memory.propagate(edge_index, size, kwargs)
            return self.summed(fused.rows_of(self, kwargs), edge_index, size, kwargs)
        finally:
            self.passes += 1
            self.used = self.place = self.alpha = None

    def summed(self, rows: Tensor | None, edge_index: Tensor, size: Any, kwargs: dict[str, Any]) -> Tensor:
        """The sum of what is sent now; without messages where `rows` says what sources pass on."""
        if rows is None:
            return self.layer.own("propagate")(edge_index, size=size, **kwargs)
        return self.without_messages(fused.Operand(rows), edge_index, size, kwargs)

    def without_messages(self, operand: fused.Operand, edge_index: Tensor, size: Any, kwargs: dict[str, Any]) -> Tensor:
        assert self.reading.times is not None
        self.operand = operand
        try:
            return self.layer.own("propagate")(edge_index, size=size, **fused.on_ones(self.reading.times, kwargs))
        finally:
            self.operand = None

    def _use(self, edge_index: Tensor) -> None:
        self.used, self.place = edge_index, self.aligned(edge_index)

    def _open_round(self) -> None:
        assert self.place is not None
        partial = self.place.share < 1.0  # one relation of many: all of a layer are one round
        if self.round is None or not partial:
            self.round = Round(self.layer, self.layer.conv.training)
            self.round.relation = self.batch.relation
            if self.listens and not backward():
                self.batch.rounds.append(self.round)

    def aggregate(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own = self.layer.own("aggregate")
        if self.place is None or self.used is None:
            return own(inputs, *args, **kwargs)
        out = self._sum(own, inputs, args, kwargs)
        if not self.layer.shrinks:
            return out
        shape, share = [1] * out.dim(), self._kept_for_all("shares", lambda place, used: shares(self, place, used))
        shape[self.layer.conv.node_dim] = -1
        return out * share[: out.shape[self.layer.conv.node_dim]].to(out.dtype).view(shape)

    def _sum(self, own: Callable[..., Tensor], inputs: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        if self.operand is not None:
            return fused.summed(self, self.operand, inputs, fused.num_targets(*args, **kwargs))
        if self.memory is not None:
            return self.memory.aggregate(inputs, args, kwargs)
        scaled = self.scaled(inputs)
        self.note(inputs, scaled)
        out = own(scaled, *args, **kwargs)
        self.watch(out)
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
        assert self.place is not None
        if self.reading.factor in ("one", "none"):
            return None
        if self.reading.factor == "sum":
            return self.place.take(self.scale)
        return self._kept_for_all(
            "mean", lambda place, used: place.take(self.scale) * shares(self, place, used)[used[1]]
        )

    def _kept_for_all(self, name: str, make: Callable[[Aligned, Tensor], Tensor]) -> Tensor:
        """What all layers of a batch that use its edges as they are compute alike."""
        assert self.place is not None and self.used is not None
        place, key = self.place, (name, self.place.start, self.place.edges, self.device)
        if place.at is not None or place.kept != place.edges or place.share < 1.0:
            return make(place, self.used)
        if key not in self.batch.kept:
            self.batch.kept[key] = make(place, self.used)
        return self.batch.kept[key]

    def decide(self, values: tuple) -> None:
        """Once per layer: a plain sum over many more neighbours than are drawn would be many times what the script
        summed, and what trained so far may not train with it. It then keeps the size of the drawn, and says so.
        """
        layer, whole, given = self.layer, self.batch.whole, self.edge_index
        if layer.small is not None or self.reading.factor != "sum" or given.shape[1] == 0:
            return
        layer.small = False
        if self.reading.functions or isinstance(whole, Counted):
            return  # normalised, or scaled by hand
        weights = {self.attribute(v): v for v in _tensors(values) if v.dim() == 1 and len(v) == given.shape[1]}
        name, weight = next(((k, v) for k, v in weights.items() if k in whole.data), (None, None))
        sums = whole.sums(name)[0].abs().float()
        drawn = torch.bincount(given[1], None if weight is None else weight.detach().abs())
        typical, most = float(sums.square().mean().sqrt()), float(drawn.max())
        layer.small = typical > LARGE[0] * most and typical > LARGE[1]
        if layer.small and not self.batch.kept.setdefault("large sums", False):
            self.batch.kept["large sums"] = True
            tell(
                f"{type(layer.conv).__name__} sums its neighbours, typically {typical:.0f} in the whole graph and "
                f"{most:.0f} at most where they are drawn: its sums keep the size of the drawn ones, as in PyG, and "
                "no snapshot is used; scale_messages(model, sums='whole') makes them those of the whole graph"
            )

    # --- what the sampler learns from ---------------------------------------------------------------------------------

    def hears(self) -> bool:
        """Whether a sampler learns from what is sent now."""
        return (
            self.listens
            and self.round is not None
            and self.place is not None
            and self.reading.teaches
            and not self.reading.left_alone
            and not backward()
        )

    def taught(self) -> slice:
        """Which of the edges in use the sampler will learn from: those of one hop, where as many layers as in the last
        step will speak; else all.
        """
        place, batch = self.place, self.batch
        assert place is not None
        every = slice(0, place.edges)
        hop = -1 if batch.expected is None else batch.expected - len(batch.rounds)
        if place.at is not None or place.share < 1.0 or not batch.num_edges or not 0 <= hop < len(batch.num_edges):
            return every
        first = sum(batch.num_edges[:hop])
        start, stop = first - place.start, first + batch.num_edges[hop] - place.start
        return slice(start, stop) if 0 <= start <= stop <= place.kept else every

    @torch.no_grad()
    def note(self, messages: Tensor, scaled: Tensor) -> None:
        """The energy of each message: of the one that was drawn, times its scale, without its target's own factor."""
        if not self.hears():
            return
        assert self.round is not None and self.place is not None
        if "softmax" in self.reading.functions and self.alpha is not None:
            energy = deviation(scaled, self.alpha, self.place.take(self.scale), self.used[1])  # type: ignore[index]
        elif self.reading.factor == "one":
            energy = square(scaled, self.layer.conv.node_dim)
            if self.targets is not None:
                energy = energy / self.targets[self.used[1]].float().square().clamp(min=1e-30)  # type: ignore[index]
        else:  # a mean's normaliser would cap what a rare edge can say
            energy = self.place.take(self.scale).float().square() * square(messages, self.layer.conv.node_dim)
        self.round.add(self.place.put(energy, self.scale.numel()))

    def watch(self, out: Tensor) -> None:
        """A layer in evaluation mode trains if a gradient comes back."""
        if self.round is not None and not self.round.counts and self.listens and out.requires_grad:
            out.register_hook(self.round.came_back)


class SideBySide(Call):
    """One `propagate` over all relations of a typed batch, joined."""

    def __init__(self, layer: Propagate, reading: Reading, side: Side, listens: bool):
        super().__init__(layer, reading, Found(side.batch, side.edge_index, None), listens)
        self.columns = side.columns.to(self.device)

    def _align(self, used: Tensor) -> Aligned | None:
        if not torch.equal(used, self.edge_index):
            return None
        return Aligned(0, 0, used.shape[1], self.columns, 1.0)


class AllRelations:
    """One forward of a layer that takes all relations of typed data as dictionaries: each `propagate` is over one of
    them, or over all of them joined, and `part` says which call that is.
    """

    def __init__(self, layer: Propagate, reading: Reading, part: Callable[[Tensor], Any]):
        self.layer, self.reading, self.part = layer, reading, part
        self.asked: set[str] = set()
        self.estimated = False
        self.over: Tensor | None = None  # the edges of the call under way

    def _call(self, edge_index: Any) -> Any:
        edge_index = _strided(edge_index)
        if self.over is not edge_index:
            self.over, self.layer.call = edge_index, self.part(edge_index)
            if isinstance(self.layer.call, Call):
                self.layer.call.asked = self.asked
        return self.layer.call

    def edge_updater(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        call = self._call(edge_index)
        return (call.edge_updater if call else self.layer.own("edge_updater"))(edge_index, size=size, **kwargs)

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        call = self._call(edge_index)
        try:
            return (call.propagate if call else self.layer.own("propagate"))(edge_index, size=size, **kwargs)
        finally:
            self.over = self.layer.call = None

    def aggregate(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = self.layer.call
        return (call.aggregate if call else self.layer.own("aggregate"))(inputs, *args, **kwargs)


def drawn_parts(
    layer: Propagate, edges: dict[Relation, Tensor], words: tuple[Any, ...]
) -> Callable[[Tensor], Call | None]:
    """The call of each `propagate` of a layer that was given these dictionaries of a batch."""
    nodes = [w for w in words if isinstance(w, dict) and not any(isinstance(k, tuple) for k in w)]
    rows = {kind: x.shape[0] for w in nodes[:1] for kind, x in w.items() if isinstance(x, Tensor)}
    given = tuple(x for w in nodes for x in w.values())

    def part(edge_index: Tensor) -> Call | None:
        assert layer.reading is not None
        if not edge_index.numel():
            return None
        found = next((batches.find([e]) for e in edges.values() if e is edge_index), None)
        call: Call | None = None
        if found is not None:
            call = Call(layer, layer.reading, found, found.batch.root.listens)
        elif (side := batches.side_by_side(edges, rows)) is not None:
            call = SideBySide(layer, layer.reading, side, side.batch.root.listens)
        if call is None:
            layer.elsewhere = True
            return None
        memory = None if call.batch.root.memory is None else call.batch.root.memory()
        if memory is not None and layer.reading.whole:
            call.memory = memory.of(layer, call, given, {})
        return call

    return part


def by_relation(words: tuple[Any, ...]) -> dict[Relation, Tensor] | None:
    """The edges of all relations, where a layer was given them as a dictionary."""
    for value in words:
        if isinstance(value, dict) and value and all(isinstance(k, tuple) and len(k) == 3 for k in value):
            edges = {k: _strided(v) for k, v in value.items()}
            if all(are_edges(e) for e in edges.values()):
                return edges
    return None


def backward() -> bool:
    """Whether a gradient is being computed: a checkpointed part of a model then runs for the second time."""
    return torch._C._current_graph_task_id() != -1


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is two if one is None or two is None else one.shape == two.shape and torch.equal(one, two)


def square(messages: Tensor, node_dim: int) -> Tensor:
    """|m|^2 of every message, in single precision whatever the layer computes in."""
    m = messages.detach()
    m = m.movedim(node_dim, 0).flatten(1) if m.dim() > 2 else m
    m = m.unsqueeze(1) if m.dim() == 1 else m
    kind = torch.float32 if m.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(m, dim=1, dtype=kind).square().float()


@torch.no_grad()
def deviation(messages: Tensor, alpha: Tensor, scale: Tensor, row: Tensor) -> Tensor:
    """What an edge's draw moves in an average that is normalised by the sample itself: |scale a_ij (x_j - mean)|^2.

    messages [M, H, C] or [M, C] are alpha x_j with the scale in alpha [M, H]; the mean is that of the target's other
    messages, and a_ij the attention over its average, so that targets of many and of few neighbours say the same.
    A message without others is taken by itself.
    """
    if row.numel() == 0:
        return scale.new_zeros(0)
    m = messages.detach().float()
    n = int(row.max()) + 1 if row.numel() else 0
    a = alpha.float().reshape(alpha.shape[0], -1)
    m = m.reshape(m.shape[0], a.shape[1], -1) if m[0].numel() % a.shape[1] == 0 else m.reshape(m.shape[0], 1, -1)
    a = a if a.shape[1] == m.shape[1] else a.mean(1, keepdim=True)
    mean = segment_sum(m.flatten(1), row, n).view(n, *m.shape[1:])
    apart = torch.addcmul(m, a.unsqueeze(-1), mean[row], value=-1.0).square().sum(-1)  # |alpha (x_j - mean of all)|^2
    rest = 1.0 - a
    apart = torch.where(rest > 0.05, apart / rest.clamp(min=0.05).square(), m.square().sum(-1))
    return apart.sum(1) * segment_sum(scale.float(), row, n)[row].square()


class Propagate:
    """The one object of ours in a PyG layer; it stands where the layer's `forward` is found.

    When the layer is given tensors of a batch that a loader of ours handed out, it takes each edge for the `scale`
    edges it stands for, by the reading that was found to be right for this layer; notes the energy of its messages, if
    a sampler learns from them; and applies the snapshot, if there is one. For other tensors the layer is what it was.
    Copies and saved models carry this object, and nothing of data, batches or snapshots.
    """

    def __init__(self, conv: MessagePassing, sums: str = "auto"):
        self.conv, self.small = conv, SMALL[sums]  # whether plain sums keep the size of the drawn; None: not decided
        self.reading: Reading | None = None  # found at the first batch
        self._fresh()

    def _fresh(self) -> None:
        self.call: Call | None = None
        self._copies: Copies | None = None
        self._memory: weakref.ref[Memory] | None = None
        self._before: dict[str, Any] = {}
        self.elsewhere = False  # whether it passed messages over other edges than those of the batch

    def __getstate__(self) -> dict[str, Any]:
        return {"conv": self.conv, "small": self.small, "reading": self.reading}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fresh()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._plain)

    @property
    def _plain(self) -> Callable[..., Any]:
        return types.MethodType(type(self.conv).forward, self.conv)

    @property
    def memory(self) -> Memory | None:
        return None if self._memory is None else self._memory()

    @property
    def shrinks(self) -> bool:
        """Whether its sums keep the size of the drawn."""
        return bool(self.small) and self.reading is not None and self.reading.factor == "sum"

    @property
    def takes_weight(self) -> bool:
        return "edge_weight" in inspect.signature(self._plain).parameters

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="adahop finds a layer's batch by the memory of its tensors, outside of compiled code: "
        "pass torch.compile(model) without fullgraph=True"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        conv = self.conv
        given = kwargs.pop("edge_weight", None) if "edge_weight" in kwargs and not self.takes_weight else None
        if conv.explain:
            return self._plain(*args, **kwargs)
        edges = by_relation((*args, *kwargs.values()))
        if edges is not None:
            return self._over_relations(edges, args, kwargs)
        found = batches.find((*args, *kwargs.values())) or made_from_last((*args, *kwargs.values()))
        if found is None and given is not None:
            found = by_hand(args, kwargs, given)
        if found is None:
            memory = self.memory
            if memory is not None and not conv.training:
                return memory.listen(self, args, kwargs)
            return self._plain(*args, **kwargs)
        if not found.batch.directional and given is None:
            return self._plain(*args, **kwargs)
        if given is not None:
            found = weighted(found, given)
        args, kwargs = self._edges_as_ids(found, args, kwargs)
        if self.reading is None:
            self.choose(found, args, kwargs)
        return self.run(found, args, kwargs)

    def _over_relations(self, edges: dict[Relation, Tensor], args: tuple, kwargs: dict) -> Any:
        """A forward of a layer that takes all relations as dictionaries."""
        found = batches.find(edges.values())
        if found is None or found.batch.root.typed is None:
            memory = self.memory
            if memory is None or self.conv.training:
                return self._plain(*args, **kwargs)
            return self.joined(AllRelations(self, Reading(), memory.parts(self, edges)), args, kwargs)
        if not found.batch.directional:
            return self._plain(*args, **kwargs)
        if self.reading is None:
            self.choose(found, args, kwargs)
        assert self.reading is not None
        found.batch.root.kept["seen"] = True
        words = (*args, *kwargs.values())
        return self.joined(AllRelations(self, self.reading, drawn_parts(self, edges, words)), args, kwargs)

    def joined(self, call: AllRelations, args: tuple, kwargs: dict) -> Any:
        with self.within(call):  # type: ignore[arg-type]
            forward, self.call = self._forward, None
            return forward(*args, **kwargs)

    def run(self, found: Found, args: tuple, kwargs: dict) -> Any:
        assert self.reading is not None
        batch = found.batch
        batch.root.kept["seen"] = True
        call = Call(self, self.reading, found, batch.root.listens)
        for t in (*args, *kwargs.values()) if found.columns is None else ():
            if are_edges(t) and call.aligned(t) is not None:
                batches.alias(t, found)  # the next layer knows them by that
        args, kwargs = self._without_scale(call, args, kwargs)
        call.decide((*args, *kwargs.values()))
        memory = None if batch.root.memory is None else batch.root.memory()
        if memory is not None and self.reading.whole:
            call.memory = memory.of(self, call, args, kwargs)
        with self.within(call):
            out = self._forward(*args, **kwargs)
        return out

    @contextlib.contextmanager
    def within(self, call: Call) -> Iterator[None]:
        """Within, the layer's methods are those of the call."""
        places: list[tuple[dict[str, Any], str, Any]] = [
            (self.conv.__dict__, name, getattr(call, name)) for name in ("propagate", "edge_updater", "aggregate")
        ]
        if call.reading.functions:
            places += [
                (m.__dict__, name, f) for m, name, f in self.copies.methods if (m, name) != (self.conv, "forward")
            ]
        previous = [(where, name, where.get(name, self)) for where, name, _ in places]
        outer, self.call = self.call, call
        self._before = {name: self.conv.__dict__[name] for name in ("propagate", "edge_updater", "aggregate")
                        if name in self.conv.__dict__}  # fmt: skip
        for where, name, value in places:
            if name == "aggregate" and where is self.conv.__dict__ and value is not places[2][2]:
                self._before["aggregate"] = value  # the copy of the layer's own, which ours calls
                continue
            where[name] = value
        try:
            yield
        finally:
            self.call = outer
            for where, name, value in previous:
                if value is self:
                    where.pop(name, None)
                else:
                    where[name] = value

    def own(self, name: str) -> Callable[..., Any]:
        """The layer's method as it is without ours."""
        found = self._before.get(name)
        return types.MethodType(getattr(type(self.conv), name), self.conv) if found is None else found

    @property
    def copies(self) -> Copies:
        if self._copies is None:
            self._copies = Copies(self.conv, lambda: self.call)  # type: ignore[arg-type,return-value]
        return self._copies

    @property
    def _forward(self) -> Callable[..., Any]:
        if self.call is not None and self.call.reading.functions:
            for module, name, copy in self.copies.methods:
                if module is self.conv and name == "forward":
                    return copy
        return self._plain

    def _edges_as_ids(self, found: Found, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """A sparse matrix would be multiplied in one piece, without messages: the layer gets its edges instead."""
        if not any(is_sparse(a) for a in (*args, *kwargs.values())):
            return args, kwargs
        names = list(inspect.signature(self._plain).parameters)
        words = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, value in list(words.items()):
            if is_sparse(value):
                words[name], weight = _edges(value)
                if "edge_weight" in names and words.get("edge_weight") is None and weight is not None:
                    words["edge_weight"] = weight
        return (), words

    def _without_scale(self, call: Call, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """A layer that was passed the batch's scale as its edge weight gets ones: the reading scales."""
        batch = call.batch

        def plain(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() != 1 or not value.is_floating_point() or not value.numel():
                return value
            if value.shape[0] > batch.scale.numel():
                return value
            name = batches.attribute(batch, value)
            if name is None or name in batch.whole.data:
                return value
            one = torch.ones_like(value)
            call.ones.append(one)
            return one

        return tuple(plain(a) for a in args), {k: plain(v) for k, v in kwargs.items()}

    def choose(self, found: Found, args: tuple, kwargs: dict) -> None:
        """Find the reading of this layer, by trying."""
        from adahop.pyg.probe import reading_of

        names = self.copies.names
        if found.batch.whole.bipartite:  # a degree on both sides is of one type
            names = names - {"gcn_norm", "get_laplacian"}
        self.reading = reading_of(self.conv, names, args, kwargs, found)


def _strided(edge_index: Any) -> Any:
    return _edges(edge_index)[0] if is_sparse(edge_index) else edge_index


def _edges(adj_t: Any) -> tuple[Tensor, Tensor | None]:
    """Sources, targets and values of a transposed adjacency matrix."""
    if isinstance(adj_t, Tensor):
        index, value = to_edge_index(adj_t)
        return index.flip(0), value
    row, col, value = adj_t.coo()
    return torch.stack([col, row]), value


def by_hand(args: tuple, kwargs: dict, scale: Tensor) -> Found:
    """A scale that the user gave as `edge_weight` of a layer that takes none, without a batch of ours."""
    edges = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and not t.is_floating_point()]
    edge_index = next((t for t in edges if t.dim() == 2 and t.shape[0] == 2), None)
    if edge_index is None or scale.numel() != edge_index.shape[1]:
        raise InputError("`edge_weight` must hold one number per edge of `edge_index`")
    x = next(t for t in _tensors((*args, *kwargs.values())) if t is not edge_index)
    n = max(x.shape[0], int(edge_index.max()) + 1 if edge_index.numel() else 0)
    whole = Counted(edge_index, scale, n)
    batch = DrawnBatch(torch.arange(n), torch.arange(scale.numel()), scale.view(-1), whole, blocks=[])
    return Found(batch, edge_index, slice(0, edge_index.shape[1]))


def made_from_last(values: tuple) -> Found | None:
    """The batch found last, for edges that are some of its own: a model may drop edges before each layer."""
    batch = batches.last()
    edges = next((v for v in values if are_edges(v)), None)
    given = None if batch is None or edges is None else batches.known(batch)
    if batch is None or edges is None or given is None or given.device != edges.device:
        return None
    n = batch.n_id.numel()
    rows = [t.shape[0] for t in _tensors(values) if t.dim() and t.is_floating_point()]
    if edges.shape[1] > given.shape[1] + n or not rows or max(rows[:2]) > n or edges.shape[1] == 0:
        return None
    place = align(given, edges, nodes=n)
    if place is None or (place.at is not None and not bool((place.at >= 0).any())):
        return None
    return Found(batch, given, None)


def weighted(found: Found, weight: Tensor) -> Found:
    """The batch with the data's own edge weight in its scale, for a layer that takes none; its scale is in it already.

    An edge of weight w is then as good as w edges, in the batch as in the whole graph.
    """
    batch, whole = found.batch, found.batch.whole
    name = batches.attribute(batch, weight)
    if isinstance(whole, Counted) or (name is not None and name not in whole.data):
        return found
    columns = found.columns or slice(0, batch.scale.numel())
    scale = batch.scale.clone()
    scale[columns] = scale[columns] * weight.detach().view(-1).to(scale)
    sums = whole if name is None else Named(whole, name)
    return found._replace(batch=replace(batch, scale=scale, whole=sums, kept={}, _moved={}))


class Named(batches.Whole):
    """A whole graph in which an edge counts for as many as an attribute says."""

    def __init__(self, whole: batches.Whole, name: str):
        self.data, self.graph, self.whole, self.name = whole.data, whole.graph, whole, name
        self.num_nodes, self.bipartite = whole.num_nodes, whole.bipartite

    @property
    def edge_index(self) -> Tensor:
        return self.whole.edge_index

    def sums(self, name: str | None = None, row: int = 1) -> tuple[Tensor, Tensor]:
        return self.whole.sums(self.name if name is None else name, row)

    def loops(self, name: str | None = None) -> Tensor:
        return self.whole.loops(self.name if name is None else name)


def _tensors(values: tuple) -> Iterator[Tensor]:
    for v in values:
        if isinstance(v, Tensor):
            yield v
        elif isinstance(v, tuple | list):
            yield from _tensors(tuple(v))


class Counted(batches.Whole):
    """A whole graph of which only the scale of some edges is known: each edge stands for `scale` of them."""

    def __init__(self, edge_index: Tensor, scale: Tensor, nodes: int):
        self.data, self.scale, self.nodes = {}, scale.detach().view(-1).float(), nodes  # type: ignore[assignment]
        self.edges = edge_index

    def loops(self, name: str | None = None) -> Tensor:
        out = self.scale.new_full((self.nodes,), float("nan"))
        out[self.edges[1, self.edges[0] == self.edges[1]]] = 1.0
        return out

    def sums(self, name: str | None = None, row: int = 1) -> tuple[Tensor, Tensor]:
        loop = self.edges[0] == self.edges[1]
        none = self.scale.new_zeros(self.nodes)
        return (
            none.index_add(0, self.edges[row], self.scale.masked_fill(loop, 0)),
            none.index_add(0, self.edges[row], self.scale.masked_fill(~loop, 0)),
        )


def scale_of(conv: nn.Module) -> Propagate | None:
    """Our object in a layer."""
    found = conv.__dict__.get("forward")
    return found if isinstance(found, Propagate) else None


def scaled(conv: MessagePassing, sums: str = "auto") -> MessagePassing:
    """The same layer, which now applies the scale of the batches of our loaders, if it can.

    A layer that takes no `edge_weight` then takes one, which is applied as a scale. A layer that can use no scale
    (a maximum, for instance) stays as it is; `reading` of it says so after the first batch. `sums` is about plain sums
    (GINConv): "whole" makes them those of the whole graph, "drawn" k / n of that, the size that they have over the
    drawn neighbours, and "auto" is "drawn", with a warning, where those of the whole graph would be many times larger.

    >>> from torch_geometric.nn import GINConv
    >>> conv = scaled(GINConv(nn.Identity()))
    >>> conv(torch.ones(2, 1), torch.tensor([[1], [0]]), edge_weight=torch.tensor([3.0])).tolist()
    [[4.0], [1.0]]
    """
    if not isinstance(conv, MessagePassing):
        raise KindError(f"`conv` must be a PyG layer that passes messages, got {type(conv).__name__}")
    one_of(sums, tuple(SMALL), "sums")
    ours = scale_of(conv)
    if ours is None:
        conv.__dict__["forward"] = Propagate(conv, sums)
    elif sums != "auto":
        ours.small = SMALL[sums]
    return conv


def layers_of(model: nn.Module) -> dict[str, MessagePassing]:
    """A model's layers that pass messages, by name; wrappers (DDP, torch.compile) are looked through."""
    if not isinstance(model, nn.Module):
        raise KindError(f"`model` must be a torch module, got {type(model).__name__}")
    found = {name: m for name, m in bare(model).named_modules() if isinstance(m, MessagePassing)}
    if not found:
        raise InputError(f"`model` must have PyG layers that pass messages, got {type(model).__name__} with none")
    return found


def bare(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel, DataParallel or torch.compile."""
    while True:
        inner = model.__dict__.get("_modules", {})
        if "_orig_mod" in inner:
            model = inner["_orig_mod"]
        elif set(inner) == {"module"} and type(model).__name__.endswith(("DataParallel", "FullyShardedDataParallel")):
            model = inner["module"]
        else:
            return model


def scale_messages(model: nn.Module, sums: str = "auto") -> nn.Module:
    """`scaled` for every layer of a model. PyG's own models (GraphSAGE, GIN, GAT) then heed their `edge_weight`."""
    for m in layers_of(model).values():
        scaled(m, sums)
    for m in model.modules():
        if isinstance(m, BasicGNN):
            m.__dict__["supports_edge_weight"] = True
    return model
