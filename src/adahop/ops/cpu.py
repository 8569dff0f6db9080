"""The CPU's form of each operation: numpy views of the tensors, numba kernels over ranges in threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from adahop.ops import cpu_bandit, cpu_block, cpu_reject, cpu_track
from adahop.ops.kinds import Bound, Tree
from adahop.ops.threads import over


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


def grow(dst, ptr, pos, gain, first, indptr, weight, tree, scratch) -> None:
    args = [t.numpy() for t in (dst, ptr, pos, gain.double().exp(), first, indptr, weight)]
    _spread(cpu_bandit.grow, scratch, *args, *_sums(tree, first))


def exp3(dst, ptr, pos, prob, scale, reward, first, indptr, mean, visits, rule, weight, tree, scratch) -> None:
    args = [t.numpy() for t in (dst, ptr, pos, prob, scale, reward, first, indptr, mean, visits)]
    times = np.empty(reward.numel())
    _spread(cpu_bandit.exp3, scratch, *args, rule, times, weight.numpy(), *_sums(tree, first))


def bound(indptr: Tensor, first: Tensor, indices: Tensor, weight: Tensor | None, node: Tensor, out: Bound) -> None:
    given = [t.numpy() for t in (indptr, first, indices)]
    w = np.empty(0, np.float32) if weight is None else weight.numpy()
    over(cpu_reject.sum_up, first.numel(), *given, w, node.numpy(), *(t.numpy() for t in out), work=given[0])


def track(n_id, targets: int, src, dst, weight, scale, energy, square, visits, level, rule) -> int:
    edges = [t.numpy() for t in (src, dst, weight, scale, energy)]
    nodes, total, times = n_id.numpy(), np.zeros(n_id.numel()), np.zeros(n_id.numel())
    cpu_track.see(nodes, targets, *edges, total, times)
    return cpu_track.track(nodes, total, times, *(t.numpy() for t in (square, visits, level)), rule)


def _sums(tree: Tree | None, first: Tensor) -> tuple[np.ndarray, np.ndarray]:
    if tree is None:
        return np.full(first.numel(), -1, np.int32), np.empty(0, np.float32)
    return tree.start.numpy(), tree.sums.numpy()


def _spread(kernel, scratch: Tensor, dst: np.ndarray, ptr: np.ndarray, *given) -> None:
    if cpu_block.repeated(dst, scratch.numpy()):  # two rows of one node: one writer, row after row
        kernel(0, len(dst), dst, ptr, 1, *given)
    else:
        over(kernel, len(dst), dst, ptr, cpu_bandit.GROUP, *given, work=ptr)
