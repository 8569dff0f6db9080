"""The CPU's form of each operation: numpy views of the tensors, numba kernels over ranges in threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from adahop.ops import cpu_block, cpu_draw, cpu_rows
from adahop.ops.kinds import DRAWS, Drawn, Odds
from adahop.ops.threads import over


def draw(indptr: Tensor, first: Tensor, indices: Tensor, dst: Tensor, k: Tensor, how: str, odds: Odds, key: int):
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
    m = pos.numel()
    n_id, local, e_id = np.empty(dst.numel() + m, np.int64), np.empty(m, np.int64), np.empty(m, np.int64)
    ids = np.empty(0, np.int32) if eid is None else eid.numpy()
    n = cpu_block.relabel(dst.numpy(), pos.numpy(), indices.numpy(), ids, scratch.numpy(), n_id, local, e_id)
    return torch.from_numpy(n_id[:n].copy()), torch.from_numpy(local), torch.from_numpy(e_id)


class GatherSum(torch.autograd.Function):
    """Forward by target, backward by source: each row of either has one writer."""

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
    return GatherSum.apply(h.contiguous(), src, dst, coef.float().contiguous(), ptr)


def full_sum(h: Tensor, indptr: Tensor, indices: Tensor, weight: Tensor | None, nodes: Tensor) -> Tensor:
    out = torch.empty(nodes.numel(), h.shape[1])
    w = np.empty(0, np.float32) if weight is None else weight.numpy()
    work = np.concatenate([[0], np.cumsum((indptr[nodes + 1] - indptr[nodes]).numpy())]) * max(h.shape[1] // 8, 1)
    args = (t.detach().numpy() for t in (h, indptr, indices))
    over(cpu_block.full_sum, nodes.numel(), *args, w, nodes.numpy(), out.numpy(), work=work)
    return out


def add_log_weights(dst, ptr, pos, gain, first, indptr, log_weight, scratch) -> None:
    args = [t.numpy() for t in (dst, ptr, pos, gain, first, indptr, log_weight)]
    n = dst.numel()
    if cpu_block.repeated(args[0], scratch.numpy()):  # two rows of one node: one writer, in order
        cpu_block.add_log_weights(0, n, *args)
    else:
        over(cpu_block.add_log_weights, n, *args, work=args[1])
