"""Weighted sums of rows on the CPU, with their gradients."""

from __future__ import annotations

import numba as nb
import numpy as np
import torch
from torch import Tensor

from adahop.ops.simd import prefetch
from adahop.ops.threads import over
from adahop.ops.types import Edges

ROWS = 12  # how many edges ahead a row of h is asked for
LINE = 16  # float32 per cache line


@nb.njit(inline="always")
def ask(array, a, n):
    """Prefetch the lines of array[a:a + n]."""
    for c in range(0, n, LINE):
        prefetch(array, a + c)


@nb.njit(nogil=True, cache=True)
def sum_rows(lo, hi, h, src, coef, ptr, out):
    """out[i] = sum of coef * h[src] over i's edges; four at a time, so that a row of `out` is read and written less."""
    flat, last = h.reshape(-1), ptr[hi] - 1
    for i in range(lo, hi):
        for a in range(h.shape[1]):
            row, e, end = out[i, a], ptr[i], ptr[i + 1]
            row[:] = 0.0
            while e + 4 <= end:
                for j in range(e + ROWS, e + ROWS + 4):
                    ask(flat, (src[min(j, last)] * h.shape[1] + a) * h.shape[2], h.shape[2])
                h0, h1, h2, h3 = h[src[e], a], h[src[e + 1], a], h[src[e + 2], a], h[src[e + 3], a]
                x0, x1, x2, x3 = coef[e, a], coef[e + 1, a], coef[e + 2, a], coef[e + 3, a]
                for c in range(row.shape[0]):
                    row[c] += (x0 * h0[c] + x1 * h1[c]) + (x2 * h2[c] + x3 * h3[c])
                e += 4
            while e < end:
                ask(flat, (src[min(e + ROWS, last)] * h.shape[1] + a) * h.shape[2], h.shape[2])
                h0, x0 = h[src[e], a], coef[e, a]
                for c in range(row.shape[0]):
                    row[c] += x0 * h0[c]
                e += 1


@nb.njit(nogil=True, cache=True)
def sum_all(lo, hi, h, begin, last, indices, weight, rows, squared, out):
    """out[t] = sum over all edges of rows[t] of weight * h[source], or of its square."""
    width = h.shape[1]
    for t in range(lo, hi):
        v = rows[t]
        for c in range(width):
            out[t, c] = 0.0
        for e in range(begin[v], last[v]):
            s = indices[e]
            x = weight[e] if weight.shape[0] > 0 else np.float32(1.0)
            if squared:
                x *= x
                for c in range(width):
                    out[t, c] += x * (h[s, c] * h[s, c])
            else:
                for c in range(width):
                    out[t, c] += x * h[s, c]


@nb.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def dot_rows(lo, hi, h, src, grad, dst, out):
    """out[e] = <grad[dst], h[src]> per head."""
    heads, width = h.shape[1], h.shape[2]
    for e in range(lo, hi):
        s, d = src[e], dst[e]
        for a in range(heads):
            x = np.float32(0.0)
            for c in range(width):
                x += grad[d, a, c] * h[s, a, c]
            out[e, a] = x


@nb.njit(nogil=True, cache=True)
def transpose(src, dst, coef, ptr, out_dst, out_coef):
    """Group the edges by source (stable): ptr [S + 1], and each edge's target and coefficient in that order."""
    n = ptr.shape[0] - 1
    for i in range(n + 1):
        ptr[i] = 0
    for e in range(src.shape[0]):
        ptr[src[e] + 1] += 1
    for i in range(n):
        ptr[i + 1] += ptr[i]
    at = ptr[:-1].copy()
    for e in range(src.shape[0]):
        o = at[src[e]]
        at[src[e]] += 1
        out_dst[o] = dst[e]
        for a in range(coef.shape[1]):
            out_coef[o, a] = coef[e, a]


class _GatherSum(torch.autograd.Function):
    """Forward by target, backward by source: each row of either has one writer."""

    @staticmethod
    def forward(ctx, h, src, dst, coef, ptr):
        ctx.save_for_backward(h, src, dst, coef, ptr)
        out = torch.empty(ptr.numel() - 1, *h.shape[1:])
        over(sum_rows, len(out), *(t.detach().numpy() for t in (h, src, coef, ptr, out)),
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
            transpose(src.numpy(), dst.numpy(), coef.numpy(), tptr, tdst, tcoef)
            dh = torch.empty_like(h)
            over(sum_rows, len(h), grad.numpy(), tdst, tcoef, tptr, dh.numpy(), work=tptr * wide)
        if ctx.needs_input_grad[3]:
            dc = torch.empty_like(coef)
            over(dot_rows, m, *(t.numpy() for t in (h, src, grad, dst, dc)), work=wide)
        return dh, None, None, dc, None


def gather_sum(h: Tensor, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor) -> Tensor:
    if h.dtype != torch.float32:
        return NotImplemented
    flat = h.dim() == 2
    if flat:
        h, coef = h.unsqueeze(1), coef.unsqueeze(1)
    out = _GatherSum.apply(h.contiguous(), src, dst, coef.float().contiguous(), ptr)
    return out.squeeze(1) if flat else out


def full_sum(h: Tensor, edges: Edges, rows: Tensor, squared: bool = False) -> Tensor:
    if h.dtype != torch.float32:
        return NotImplemented
    out, of = torch.empty(rows.numel(), h.shape[1]), rows.numpy()
    begin, _, last, indices, weight, _ = edges.arrays
    work = np.concatenate([[0], np.cumsum(last[of] - begin[of])]) * max(h.shape[1] // 8, 1)
    over(sum_all, len(of), h.detach().numpy(), begin, last, indices, weight, of, squared, out.numpy(), work=work)
    return out


def rows_dot(x: Tensor, rows: Tensor, w: Tensor) -> Tensor:
    if x.dtype != torch.float32 or not x.is_contiguous():
        return NotImplemented
    out, zero = torch.empty(rows.numel(), 1), torch.zeros(rows.numel(), dtype=torch.long)
    given = (x.unsqueeze(1), rows, w.detach().view(1, 1, -1), zero, out)
    over(dot_rows, rows.numel(), *(t.numpy() for t in given), work=max(x.shape[1] // 8, 1))
    return out[:, 0]
