"""The few operations everything is made of, each with a plain reference and a fast form chosen by the device.

Set ADAHOP_REFERENCE=1 to run the reference everywhere.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from adahop.ops import cpu_block, cpu_draw, cpu_rows, random, reference
from adahop.ops.threads import get_threads, over, set_threads, threads

__all__ = [
    "DRAWS", "Drawn", "Odds", "add_log_weights", "draw", "full_sum", "gather_sum", "get_threads", "random", "reference",
    "relabel", "segment_max", "segment_sum", "set_threads", "threads",
]  # fmt: skip

DRAWS = {"multinomial": 0, "systematic": 1, "depround": 2, "poisson": 3}
segment_sum, segment_max = reference.segment_sum, reference.segment_max


class Odds(NamedTuple):
    """What a policy says: edge j of a node is drawn in proportion (1 - eta) w_j / sum w + eta / n.

    w = edge (or exp(edge) where `log`) times node[source]; what is None counts as 1, so `Odds()` is uniform.
    """

    edge: Tensor | None = None
    node: Tensor | None = None
    eta: float = 0.0
    log: bool = False


class Drawn(NamedTuple):
    """Places in the CSR, grouped by target, each with its probability and scale."""

    ptr: Tensor
    pos: Tensor
    prob: Tensor
    scale: Tensor


def fast(t: Tensor) -> bool:
    return t.device.type == "cpu" and not os.environ.get("ADAHOP_REFERENCE")


def draw(indptr: Tensor, first: Tensor, indices: Tensor, dst: Tensor, k: Tensor, how: str, odds: Odds, key: int):
    """For each target its self-loops and k of its true neighbours (all, exactly, where there are no more than k).

    `k` holds one number for all targets or one each; -1 takes everyone. `how` is one of DRAWS.
    """
    if not fast(dst):
        ks = k.expand(dst.numel()) if k.numel() == 1 else k
        return Drawn(*reference.draw(
            indptr, first, indices, dst, ks, how, odds.edge, odds.log, odds.node, odds.eta, key))  # fmt: skip
    plain = odds.edge is None and odds.node is None and how != "poisson"
    kernel = cpu_rows.uniform_rows if plain else cpu_rows.weighted_rows
    graph = (indptr.numpy(), first.numpy(), dst.numpy(), k.numpy())
    choice = (DRAWS[how], key) if plain else (DRAWS[how], key, indices.numpy(), *_odds(odds))
    n, work = dst.numel(), _work(graph)
    ptr, none = np.zeros(n + 1, np.int64), np.empty(0, np.float32)
    over(kernel, n, True, *graph, *choice, ptr, np.empty(0, np.int64), none, none, work=work)
    np.cumsum(ptr, out=ptr)
    m = int(ptr[-1])
    pos, prob, scale = np.empty(m, np.int64), np.empty(m, np.float32), np.empty(m, np.float32)
    over(kernel, n, False, *graph, *choice, ptr, pos, prob, scale, work=work)
    return Drawn(*map(torch.from_numpy, (ptr, pos, prob, scale)))


def _odds(odds: Odds) -> tuple:
    """(form, edge, node, eta) as the kernels take them."""
    form = cpu_draw.UNIFORM if odds.edge is None else cpu_draw.EDGE_LOG if odds.log else cpu_draw.EDGE
    edge, node = (np.empty(0, np.float32) if t is None else t.numpy() for t in (odds.edge, odds.node))
    return form, edge, node, odds.eta


def _work(graph: tuple) -> np.ndarray:
    """Cumulative degree of the targets: what a scan of their neighbourhoods costs."""
    indptr, _, dst, _ = graph
    return np.concatenate([[0], np.cumsum(indptr[dst + 1] - indptr[dst] + 16)])


def relabel(dst: Tensor, pos: Tensor, indices: Tensor, eid: Tensor | None, scratch: Tensor):
    """(n_id, local source ids, e_id) of the edges at `pos`: targets first. `scratch` [N] int32 holds -1 throughout."""
    if not fast(dst):
        nodes, src = reference.relabel(dst, indices[pos].long())
        return nodes, src, pos if eid is None else eid[pos].long()
    m = pos.numel()
    n_id, local, e_id = np.empty(dst.numel() + m, np.int64), np.empty(m, np.int64), np.empty(m, np.int64)
    ids = np.empty(0, np.int32) if eid is None else eid.numpy()
    n = cpu_block.relabel(dst.numpy(), pos.numpy(), indices.numpy(), ids, scratch.numpy(), n_id, local, e_id)
    return torch.from_numpy(n_id[:n].copy()), torch.from_numpy(local), torch.from_numpy(e_id)


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, src, dst, coef, ptr):
        ctx.save_for_backward(h, src, dst, coef, ptr)
        out = torch.empty(ptr.numel() - 1, *h.shape[1:])
        over(cpu_block.gather_sum, len(out), *(t.detach().numpy() for t in (h, src, coef, ptr, out)),
             work=ptr.numpy() * h[0].numel() // 8 if len(h) else 1)  # fmt: skip
        return out

    @staticmethod
    def backward(ctx, grad):
        h, src, dst, coef, _ = (t.detach() for t in ctx.saved_tensors)
        grad = grad.contiguous()
        dh = dc = None
        m, wide = src.numel(), max(h[0].numel() // 8, 1) if len(h) else 1
        if ctx.needs_input_grad[0]:
            tptr, tdst, tcoef = np.empty(len(h) + 1, np.int64), np.empty(m, np.int64), np.empty(coef.shape, np.float32)
            cpu_block.transpose(src.numpy(), dst.numpy(), coef.numpy(), tptr, tdst, tcoef)
            dh = torch.empty_like(h)
            over(cpu_block.gather_sum, len(h), grad.numpy(), tdst, tcoef, tptr, dh.numpy(), work=tptr * wide)
        if ctx.needs_input_grad[3]:
            dc = torch.empty_like(coef)
            over(cpu_block.edge_dot, m, *(t.numpy() for t in (h, src, grad, dst, dc)), work=wide)
        return dh, None, None, dc, None


def gather_sum(h: Tensor, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor) -> Tensor:
    """out[i] = sum over target i's edges of coef * h[src]. h [S, C] with coef [M], or h [S, H, C] with coef [M, H]."""
    flat = h.dim() == 2
    if flat:
        h, coef = h.unsqueeze(1), coef.unsqueeze(1)
    if fast(h) and h.dtype == torch.float32:
        out = _GatherSum.apply(h.contiguous(), src, dst, coef.float().contiguous(), ptr)
    else:
        out = segment_sum(coef.to(h.dtype).unsqueeze(-1) * h[src], dst, ptr.numel() - 1)
    return out.squeeze(1) if flat else out


def full_sum(h: Tensor, indptr: Tensor, indices: Tensor, weight: Tensor | None, nodes: Tensor) -> Tensor:
    """out[t] = sum over all in-edges of nodes[t] of weight * h[source], straight from the CSR; no gradient."""
    if fast(h) and h.dtype == torch.float32:
        out = torch.empty(nodes.numel(), h.shape[1])
        w = np.empty(0, np.float32) if weight is None else weight.numpy()
        work = np.concatenate([[0], np.cumsum((indptr[nodes + 1] - indptr[nodes]).numpy())]) * max(h.shape[1] // 8, 1)
        args = (t.detach().numpy() for t in (h, indptr, indices))
        over(cpu_block.full_sum, nodes.numel(), *args, w, nodes.numpy(), out.numpy(), work=work)
        return out
    row, place = reference.spans(indptr[nodes], indptr[nodes + 1] - indptr[nodes])
    message = h[indices[place].long()].float()
    return segment_sum(message if weight is None else weight[place].unsqueeze(1) * message, row, nodes.numel())


def add_log_weights(dst, ptr, pos, gain, first, indptr, log_weight, scratch) -> None:
    """log_weight[pos] += gain in place, kept within float32's reach (only differences within a segment matter)."""
    if not fast(dst):
        log_weight.index_add_(0, pos, gain)
        row, place = reference.spans(first[dst], indptr[dst + 1] - first[dst])
        top = segment_max(log_weight[place], row, dst.numel())
        out = (top > cpu_block.HIGH) | (-segment_max(-log_weight[place], row, dst.numel()) < cpu_block.LOW)
        centred = (log_weight[place] - top[row]).clamp(min=-cpu_block.SPAN)
        log_weight[place[out[row]]] = centred[out[row]]
        return
    args = [t.numpy() for t in (dst, ptr, pos, gain, first, indptr, log_weight)]
    n = dst.numel()
    if cpu_block.repeated(args[0], scratch.numpy()):  # two rows of one node: one writer, in order
        cpu_block.add_log_weights(0, n, *args)
    else:
        over(cpu_block.add_log_weights, n, *args, work=args[1])
