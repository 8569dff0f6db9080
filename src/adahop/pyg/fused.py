"""Sums without messages: where a message is the source's row times a coefficient, it need not be formed.

The layer runs on ones in place of the rows, so that its messages are the coefficients alone; the sum of coefficient
times row is then formed edge by edge from the rows where they lie. Which layers are of this kind is found by trying,
see `probe`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

from adahop import ops
from adahop.pyg.align import Aligned
from adahop.pyg.arguments import Kwargs, map_tensors, sources_of

if TYPE_CHECKING:
    from adahop.pyg.call import Call

HOOKS = ("_message_forward_pre_hooks", "_message_forward_hooks", "_aggregate_forward_pre_hooks",
         "_aggregate_forward_hooks", "_propagate_forward_pre_hooks", "_propagate_forward_hooks")  # fmt: skip


class Layout(NamedTuple):
    """Edges in use, grouped by target."""

    order: Tensor | None  # [M] which edge stands at each place; None: they lie so already
    src: Tensor
    dst: Tensor
    ptr: Tensor  # [targets + 1]

    def sorted(self, value: Tensor) -> Tensor:
        """A value per edge in use, by target."""
        return value if self.order is None else value.index_select(0, self.order)


class Operand(NamedTuple):
    """What a sum without messages is formed from, while a layer's own `propagate` runs on ones."""

    h: Tensor  # [S, C] or [S, H, C] rows of the sources
    norm: Tensor | None = None  # [S] or [S, H] their squared lengths, where they are known
    base: tuple[Tensor, Tensor | None, float] | None = None  # (table, rows, keep): what is added to the sum


def candidate(conv: MessagePassing) -> bool:
    """Whether a layer adds or averages its messages, by PyG's own methods."""
    inherited = type(conv).aggregate is MessagePassing.aggregate
    return inherited and type(conv.aggr_module) in (SumAggregation, MeanAggregation) and conv.decomposed_layers == 1


def source_rows(call: Call, kwargs: Kwargs) -> Tensor | None:
    """The rows of sources that a layer's messages are, times coefficients; None where they are not of this kind."""
    conv = call.layer.conv
    if call.reading.row_argument is None or any(getattr(conv, name, None) for name in HOOKS):
        return None
    h = sources_of(kwargs.get(call.reading.row_argument))
    if not isinstance(h, Tensor) or h.dtype not in (torch.float32, torch.float64) or h.layout != torch.strided:
        return None
    if not (h.dim() == 2 and conv.node_dim in (0, -2)) and not (h.dim() == 3 and conv.node_dim in (0, -3)):
        return None
    return h if h.shape[-1] > 1 else None


def num_targets(index: Tensor, ptr: Tensor | None = None, dim_size: int | None = None) -> int:
    """How many nodes `aggregate` sums for, from its arguments."""
    return int(index.max()) + 1 if dim_size is None else dim_size


def with_ones(name: str, kwargs: Kwargs) -> dict[str, Any]:
    """The arguments of `propagate` with one column of ones in place of `name`."""
    return {**kwargs, name: map_tensors(kwargs[name], lambda t: t.new_ones(1).expand(*t.shape[:-1], 1))}


def edge_layout(call: Call, used: Tensor, targets: int) -> Layout:
    """The edges in use by target; found once for all layers of a batch that use the same."""
    key = ("layout", used.shape[1], targets, call.device)
    edges, found = call.batch.cache.get(key, (None, None))
    if edges is None or not torch.equal(edges, used):
        edges = used.clone()  # a batch that held its own edges would never be let go
        found = by_target(edges, targets)
        call.batch.cache[key] = edges, found
    return found


def by_target(used: Tensor, targets: int) -> Layout:
    """Edges by target, in their order within one. Sorted edges need no sort, nor do sorted edges with a self-loop of
    each node behind them.
    """
    src, dst = used
    ptr = ops.pointer(torch.bincount(dst, minlength=targets))
    if _sorted(dst):
        return Layout(None, src, dst, ptr)
    m = dst.numel() - targets  # edges without the added self-loops
    nodes = torch.arange(targets, device=dst.device)
    if m >= 0 and torch.equal(dst[m:], nodes) and _sorted(dst[:m]):
        to = torch.cat([torch.arange(m, device=dst.device) + dst[:m], ptr[1:] - 1])
        order = torch.empty_like(to)
        order[to] = torch.arange(to.numel(), device=dst.device)
    else:
        order = dst.argsort(stable=True)
    return Layout(order, src[order], dst[order], ptr)


def _sorted(row: Tensor) -> bool:
    return bool((row[1:] >= row[:-1]).all())


def weights(call: Call, layout: Layout) -> Tensor | None:
    """[M] what coefficients are multiplied by: the reading's factor, over the number of messages where they are
    averaged.
    """
    factor = call.factor()
    if type(call.layer.conv.aggr_module) is not MeanAggregation:
        return factor

    def make(aligned: Aligned, used: Tensor) -> Tensor:
        weight = 1.0 / layout.ptr.diff().clamp(min=1)[used[1]].to(call.scale.dtype)
        return weight if factor is None else factor * weight

    return call.cached(("weights", call.reading.factor), make)


class Unfit(Exception):
    """A layer's messages on ones are not one coefficient per edge (and head)."""


def weighted_sum(call: Call, operand: Operand, messages: Tensor, targets: int) -> Tensor:
    """The sum (or mean) over the edges in use of coefficient times row, on top of the operand's base."""
    coef, scaled, layout = coefficients(call, operand.h, messages, targets)
    out = ops.gather_sum(operand.h, layout.src, layout.dst, layout.sorted(scaled), layout.ptr, operand.base)
    if call.is_recording():
        record(call, operand, coef, scaled, out)
    call.watch_gradient(out)
    return out


def coefficients(call: Call, h: Tensor, messages: Tensor, targets: int) -> tuple[Tensor, Tensor, Layout]:
    """The layer's coefficient per edge in use, the same with the factor, and how edges lie by target."""
    assert call.used is not None
    if messages.shape != (call.used.shape[1], *h.shape[1:-1], 1):
        raise Unfit
    coef = messages.squeeze(-1)
    layout = edge_layout(call, call.used, targets)
    factor = weights(call, layout)
    if factor is None:
        return coef, coef, layout
    return coef, coef * factor.to(coef.dtype).view(-1, *[1] * (coef.dim() - 1)), layout


@torch.no_grad()
def record(call: Call, operand: Operand, coef: Tensor, scaled: Tensor, out: Tensor) -> None:
    """The energy of each message from coefficients and lengths of rows, as `Call.record` has it from messages; of the
    edges alone that the sampler will learn from.
    """
    assert call.aligned is not None and call.used is not None and call.recorded is not None
    edges, aligned = call.recorded_edges(), call.aligned
    src, dst = call.used[:, edges]
    coef = coef[edges]
    if "softmax" in call.reading.functions and call.alpha is not None:
        base = None
        if operand.base is not None:
            table, rows, keep = operand.base
            assert rows is None and keep == 1.0
            base = table[: len(out)]
        alpha = call.alpha.reshape(-1, *coef.shape[1:])[edges]
        energy = ops.spread(operand.h, src, dst, scaled[edges], alpha, out, base)
        energy = energy * ops.segment_sum(aligned.take(call.scale).float(), call.used[1], len(out))[dst].square()
    else:
        one = call.reading.factor == "one"
        scale = None if one else aligned.take(call.scale)[edges]
        factor = (call.target_factor, dst) if one and call.target_factor is not None else None
        energy = ops.energies(operand.h, src, coef, scale, factor, operand.norm)
    energy = energy.float()
    if len(energy) < aligned.edges:  # of one hop
        call.recorded.add(energy, aligned.start + edges.start)
    else:
        call.recorded.add(aligned.put(energy, call.scale.numel()))
