"""Weighted sums of rows on the CPU, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import numba as nb
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from adahop.ops.segments import segment_sum
from adahop.ops.simd import WIDE, add16, kernel, per_line, prefetch, real
from adahop.ops.summing.reference import LEAST, Base, Copies, Drop
from adahop.ops.threads import get_threads, over
from adahop.ops.types import LEAST_SUM, NO_PLACES, NO_WEIGHTS, Edges

ROWS = 12  # how many edges ahead a row of h is asked for


@nb.njit(inline="always")
def ask(array, a, n):
    """Prefetch the lines of array[a:a + n]."""
    for c in range(0, n, per_line(array)):
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
                    row[c] += (x0 * real(h0[c]) + x1 * real(h1[c])) + (x2 * real(h2[c]) + x3 * real(h3[c]))
                e += 4
            while e < end:
                ask(flat, (src[min(e + ROWS, last)] * h.shape[1] + a) * h.shape[2], h.shape[2])
                h0, x0 = h[src[e], a], coef[e, a]
                for c in range(row.shape[0]):
                    row[c] += x0 * real(h0[c])
                e += 1


@kernel
def sum_heads(lo, hi, h, src, coef, ptr, out):
    """The same of float32 in heads of 16, 32, ... numbers, which are too few for a loop over them to pay."""
    heads, width, last = h.shape[1], h.shape[2], ptr[hi] - 1
    wide, flat, to = heads * width, h.reshape(-1), out.reshape(-1)
    for i in range(lo, hi):
        out[i] = 0.0
        for e in range(ptr[i], ptr[i + 1]):
            ask(flat, src[min(e + ROWS, last)] * wide, wide)
            for a in range(heads):
                for c in range(a * width, (a + 1) * width, WIDE):
                    add16(to, i * wide + c, flat, src[e] * wide + c, coef[e, a])


@kernel
def sum_all(lo, hi, h, begin, last, indices, weight, mean, total, rows, out, share, square):
    """out[t] = sum over all edges of rows[t] of weight * h[source], share[t] that of the weights alone; with `mean`,
    of weights over the row's sum. Where there is room for it, square[t] = the sum of the squares."""
    width, flat, both, weighted = h.shape[1], h.reshape(-1), square.shape[0] > 0, weight.shape[0] > 0
    for t in range(lo, hi):
        v = rows[t]
        row, e, end, over, all_weights = out[t], begin[v], last[v], 1.0, np.float32(0.0)
        if mean:
            over = max(total[v] if total.shape[0] > 0 else np.float64(end - begin[v]), LEAST_SUM)
        even = np.float32(1.0 / over)  # what an edge without a weight counts
        row[:] = 0.0
        if both:
            square[t, :] = 0.0
        while e + 4 <= end:  # four at a time, as in `sum_rows`
            for j in range(e + ROWS, e + ROWS + 4):
                ask(flat, np.int64(indices[min(j, end - 1)]) * width, width)
            x0 = x1 = x2 = x3 = even
            if weighted:
                x0, x1, x2, x3 = weight[e], weight[e + 1], weight[e + 2], weight[e + 3]
                if mean:
                    x0, x1 = np.float32(np.float64(x0) / over), np.float32(np.float64(x1) / over)
                    x2, x3 = np.float32(np.float64(x2) / over), np.float32(np.float64(x3) / over)
            h0, h1, h2, h3 = h[indices[e]], h[indices[e + 1]], h[indices[e + 2]], h[indices[e + 3]]
            for c in range(width):
                row[c] += (x0 * real(h0[c]) + x1 * real(h1[c])) + (x2 * real(h2[c]) + x3 * real(h3[c]))
            all_weights += (x0 + x1) + (x2 + x3)
            if both:
                x0, x1, x2, x3 = x0 * x0, x1 * x1, x2 * x2, x3 * x3
                for c in range(width):
                    a, b = x0 * (real(h0[c]) * real(h0[c])), x1 * (real(h1[c]) * real(h1[c]))
                    square[t, c] += (a + b) + (x2 * (real(h2[c]) * real(h2[c])) + x3 * (real(h3[c]) * real(h3[c])))
            e += 4
        while e < end:
            ask(flat, np.int64(indices[min(e + ROWS, end - 1)]) * width, width)
            x, h0 = even, h[indices[e]]
            if weighted:
                x = np.float32(np.float64(weight[e]) / over) if mean else weight[e]
            all_weights += x
            for c in range(width):
                row[c] += x * real(h0[c])
            if both:
                x *= x
                for c in range(width):
                    square[t, c] += x * (real(h0[c]) * real(h0[c]))
            e += 1
        share[t] = all_weights


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


@nb.njit(nogil=True, cache=True)
def add_rows(lo, hi, h, src, coef, ptr, table, rows, keep, out):
    """The same on top of keep * table[rows[i]], or of keep * table[i] where there are no rows."""
    flat, last, heads, width = h.reshape(-1), ptr[hi] - 1, h.shape[1], h.shape[2]
    for i in range(lo, hi):
        at = rows[i] if rows.shape[0] else i
        for a in range(heads):
            row, start = out[i, a], table[at, a]
            for c in range(width):
                row[c] = keep * start[c]
            for e in range(ptr[i], ptr[i + 1]):
                ask(flat, (src[min(e + ROWS, last)] * heads + a) * width, width)
                h0, x0 = h[src[e], a], coef[e, a]
                for c in range(width):
                    row[c] += x0 * real(h0[c])


@nb.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def change_rows(lo, hi, h, table, rows, keep, out, norm):
    """out = h - keep * table[rows], and the squared length of each row and head."""
    heads, width = h.shape[1], h.shape[2]
    flat, last = table.reshape(-1), rows.shape[0] - 1
    for i in range(lo, hi):
        ask(flat, rows[min(i + ROWS, last)] * heads * width, heads * width)
        for a in range(heads):
            now, before, row = h[i, a], table[rows[i], a], out[i, a]
            x = np.float32(0.0)
            for c in range(width):
                d = now[c] - keep * before[c]
                row[c] = d
                x += d * d
            norm[i, a] = x


@nb.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def spread_rows(lo, hi, h, src, dst, coef, alpha, mean, out):
    """Per edge and head |coef h - alpha mean|^2 / (1 - alpha)^2; |coef h|^2 where an edge has nearly all the weight."""
    heads, width = h.shape[1], h.shape[2]
    flat = h.reshape(-1)
    for e in range(lo, hi):
        ask(flat, src[min(e + ROWS, hi - 1)] * heads * width, heads * width)
        s, d, energy = src[e], dst[e], np.float32(0.0)
        for a in range(heads):
            x, y, one = coef[e, a], alpha[e, a], np.float32(0.0)
            rest = np.float32(1.0) - y
            if rest <= np.float32(0.05):
                y, rest = np.float32(0.0), np.float32(1.0)
            for c in range(width):  # no branch and no view in here: it runs several numbers at a time
                apart = x * h[s, a, c] - y * mean[d, a, c]
                one += apart * apart
            energy += one / (rest * rest)
        out[e] = energy


@nb.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def square_rows(lo, hi, h, out):
    """out = |h|^2 per row and head."""
    for i in range(lo, hi):
        for a in range(h.shape[1]):
            x = np.float32(0.0)
            for c in range(h.shape[2]):
                x += h[i, a, c] * h[i, a, c]
            out[i, a] = x


@nb.njit(nogil=True, cache=True)
def weigh_squares(lo, hi, square, src, coef, times, divisor, dst, out):
    """out = (coef times / divisor[target])^2 square[source], heads summed; `times` and `divisor` may be empty."""
    for e in range(lo, hi):
        x, by = np.float32(0.0), np.float32(1.0)
        for a in range(square.shape[1]):
            x += coef[e, a] * coef[e, a] * square[src[e], a]
        if times.shape[0] > 0:
            by = times[e]
        if divisor.shape[0] > 0:
            by /= max(divisor[dst[e]], np.float32(LEAST))
        out[e] = x * by * by


@nb.njit(nogil=True, cache=True)
def square_and_weigh(h, src, coef, times, divisor, dst, out):
    """Both in one call, for one thread; no row after the last that is asked for is squared."""
    many = 0
    for e in range(src.shape[0]):
        many = max(many, src[e] + 1)
    square = np.empty((many, h.shape[1]), np.float32)
    square_rows(0, many, h, square)
    weigh_squares(0, src.shape[0], square, src, coef, times, divisor, dst, out)


@nb.njit(nogil=True, cache=True)
def lessen(score, row, most, out):
    """out = the score less the largest per row and head; rows in any order."""
    many, heads = score.shape
    most[:] = -np.inf
    for e in range(many):
        for a in range(heads):
            most[row[e], a] = max(most[row[e], a], score[e, a])
    for e in range(many):
        for a in range(heads):
            out[e, a] = score[e, a] - most[row[e], a]


@nb.njit(nogil=True, cache=True)
def divide(out, row, scale, total):
    """out scale over the sum of these per row and head."""
    many, heads = out.shape
    total[:] = 0.0
    for e in range(many):
        one = scale[e] if scale.shape[0] else np.float32(1.0)
        for a in range(heads):
            out[e, a] *= one
            total[row[e], a] += out[e, a]
    for e in range(many):
        for a in range(heads):
            out[e, a] /= max(total[row[e], a], np.float32(1e-30))


@nb.njit(nogil=True, cache=True)
def soften_back(out, row, grad, total, score):
    """The gradient of the scores: out (grad - sum over the row of out grad)."""
    many, heads = out.shape
    total[:] = 0.0
    for e in range(many):
        for a in range(heads):
            total[row[e], a] += out[e, a] * grad[e, a]
    for e in range(many):
        for a in range(heads):
            score[e, a] = out[e, a] * (grad[e, a] - total[row[e], a])


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, score, row, rows, scale):
        out, per_row = torch.empty_like(score), torch.empty(rows, score.shape[1])
        one = NO_SCALE if scale is None else scale.detach().numpy()
        lessen(score.detach().numpy(), row.numpy(), per_row.numpy(), out.numpy())
        divide(out.exp_().numpy(), row.numpy(), one, per_row.numpy())
        ctx.save_for_backward(out, row)
        ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx, grad):
        out, row = ctx.saved_tensors
        if torch.is_grad_enabled():
            return out * (grad - segment_sum(out * grad, row, ctx.rows)[row]), None, None, None
        back, total = torch.empty_like(out), torch.empty(ctx.rows, out.shape[1])
        given = (out, row, grad.contiguous(), total, back)
        soften_back(*(t.detach().numpy() for t in given))
        return back, None, None, None


def softmax(score: Tensor, row: Tensor, rows: int, scale: Tensor | None = None) -> Tensor:
    kinds = {score.dtype} if scale is None else {score.dtype, scale.dtype}
    if kinds != {torch.float32} or score.dim() > 2 or (scale is not None and scale.requires_grad):
        return NotImplemented
    wide = score.unsqueeze(1) if score.dim() == 1 else score
    out = _Softmax.apply(wide.contiguous(), row.contiguous(), rows, None if scale is None else scale.contiguous())
    return out.squeeze(1) if score.dim() == 1 else out


@nb.njit(nogil=True, cache=True)
def add_two(lo, hi, s, t, src, dst, out):
    for e in range(lo, hi):
        one, other = s[dst[e]], t[src[e]]
        for a in range(out.shape[1]):
            out[e, a] = one[a] + other[a]


@nb.njit(nogil=True, cache=True)
def add_back(grad, at, out):
    """out[at[e]] += grad[e]."""
    for e in range(grad.shape[0]):
        row = out[at[e]]
        for a in range(grad.shape[1]):
            row[a] += grad[e, a]


class _AddEnds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, s, t, src, dst):
        ctx.save_for_backward(src, dst)
        ctx.rows = len(s), len(t)
        out = torch.empty(src.numel(), s.shape[1])
        given = (x.detach().numpy() for x in (s, t, src, dst, out))
        over(add_two, src.numel(), *given, work=max(s.shape[1] // 8, 1))
        return out

    @staticmethod
    def backward(ctx, grad):
        src, dst = ctx.saved_tensors
        needed = ctx.needs_input_grad
        back: list[Tensor | None] = []
        for rows, at, asked in zip(ctx.rows, (dst, src), needed, strict=False):
            if not asked:
                back.append(None)
            elif torch.is_grad_enabled():  # a gradient of this gradient will be asked for
                back.append(segment_sum(grad, at, rows))
            else:
                out = torch.zeros(rows, grad.shape[1])
                add_back(grad.contiguous().detach().numpy(), at.numpy(), out.numpy())
                back.append(out)
        return *back, None, None


def add_ends(s: Tensor, t: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    if not s.dtype == t.dtype == torch.float32 or not s.dim() == t.dim() == 2:
        return NotImplemented
    return _AddEnds.apply(s.contiguous(), t.contiguous(), src, dst)


def attend(
    s: Tensor, t: Tensor, src: Tensor, dst: Tensor, ptr: Tensor, scale: Tensor, slope: float, slots: int, by_edge: bool
) -> Tensor:
    added = s[dst] + t if by_edge else add_ends(s, t, src, dst)
    if added is NotImplemented:
        return NotImplemented
    return softmax(leaky_relu(added, slope), dst, ptr.numel() - 1, scale)


NO_SCALE = np.empty(0, np.float32)
NO_TOTALS = np.empty(0, np.float64)
NO_ROWS = np.empty(0, np.int64)


SHORT = {torch.float16: torch.uint16, torch.bfloat16: torch.int16}  # what kernels take their bits for, see `real`


def bits(h: Tensor) -> np.ndarray:
    """Floating-point numbers as kernels read them, where they lie."""
    h = h.detach()
    return (h if h.dtype == torch.float32 else h.view(SHORT[h.dtype])).numpy()


def rows_summed(h: Tensor) -> Callable:
    """The kernel that sums rows of h."""
    return sum_heads if h.dtype == torch.float32 and h.shape[1] > 1 and h.shape[2] % WIDE == 0 else sum_rows


def summed(h, src, coef, ptr, table, rows, keep) -> Tensor:
    targets, wide = ptr.numel() - 1, h.shape[1] * h.shape[2]
    out = torch.empty(targets, *h.shape[1:])
    args = [bits(h), *(t.detach().numpy() for t in (src, coef, ptr))]
    work = 1 if get_threads() == 1 else args[3] * wide // 8
    if table is None:
        over(rows_summed(h), targets, *args, out.numpy(), work=work)
    else:
        args += [table.numpy(), NO_ROWS if rows is None else rows.numpy(), np.float32(float(keep)), out.numpy()]
        over(add_rows, targets, *args, work=work)
    return out


def by_source(src: Tensor, dst: Tensor, coef: Tensor, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the edges of each of the first `rows` sources begin, and the targets and coefficients in that order."""
    ptr, at, by = np.empty(rows + 1, np.int64), np.empty(src.numel(), np.int64), np.empty(coef.shape, np.float32)
    transpose(src.numpy(), dst.numpy(), coef.numpy(), ptr, at, by)
    return ptr, at, by


def summed_back(h: Tensor, src: Tensor, dst: Tensor, coef: Tensor, rows: int) -> Tensor:
    """out[s] = sum of coef * h[dst] over the edges from s, for the first `rows` sources."""
    ptr, at, by = by_source(src, dst, coef, rows)
    out = torch.empty(rows, *h.shape[1:])
    wide = max(h.shape[1] * h.shape[2] // 8, 1)
    over(rows_summed(h), rows, h.numpy(), at, by, ptr, out.numpy(), work=ptr * wide)
    return out


def dots(h: Tensor, src: Tensor, q: Tensor, dst: Tensor) -> Tensor:
    """[M, H]: <q[dst], h[src]> per head."""
    out = torch.empty(src.numel(), h.shape[1])
    wide = max(h.shape[1] * h.shape[2] // 8, 1)
    over(dot_rows, src.numel(), *(t.detach().numpy() for t in (h, src, q, dst, out)), work=wide)
    return out


class _GatherSum(torch.autograd.Function):
    """Forward by target, backward by source: each row of either has one writer."""

    @staticmethod
    def forward(ctx, h, src, dst, coef, ptr, table, rows, keep):
        ctx.save_for_backward(h, src, dst, coef, ptr)
        return summed(h, src, coef, ptr, table, rows, keep)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # a gradient of this gradient will be asked for
            return *_gradients(ctx, grad), None, None, None, None
        h, src, dst, coef, _ = (t.detach() for t in ctx.saved_tensors)
        grad = grad.contiguous()
        dh = summed_back(grad, src, dst, coef, len(h)) if ctx.needs_input_grad[0] else None
        dc = dots(h, src, grad, dst) if ctx.needs_input_grad[3] else None
        return dh, None, None, dc, None, None, None, None


def _gradients(ctx, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
    """Those of h and coef by operations that have a gradient themselves."""
    h, src, dst, coef, _ = ctx.saved_tensors
    back = grad[dst]
    dh = segment_sum(coef.unsqueeze(-1) * back, src, len(h)) if ctx.needs_input_grad[0] else None
    return dh, None, None, (h[src] * back).sum(-1) if ctx.needs_input_grad[3] else None


def gather_sum(h: Tensor, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor, base: Base = None) -> Tensor:
    if h.dtype != torch.float32:
        return NotImplemented
    table, rows, keep = (None, None, 0.0) if base is None else base
    flat = h.dim() == 2
    if flat:
        h, coef = h.unsqueeze(1), coef.unsqueeze(1)
        table = None if table is None else table.unsqueeze(1)
    table = None if table is None else table.detach().float().contiguous()
    h, coef = h.contiguous(), coef.float().contiguous()
    if h.requires_grad or coef.requires_grad:
        out = _GatherSum.apply(h, src, dst, coef, ptr, table, rows, keep)
    else:
        out = summed(h, src, coef, ptr, table, rows, keep)
    return out.squeeze(1) if flat else out


@kernel
def sum_for_heads(lo, hi, h, src, coef, ptr, out):
    """out[i, a] = sum of coef[:, a] * h[src] over i's edges: a row of h is read once for all heads."""
    width, flat, last = h.shape[1], h.reshape(-1), ptr[hi] - 1
    for i in range(lo, hi):
        out[i] = 0.0
        for e in range(ptr[i], ptr[i + 1]):
            ask(flat, src[min(e + ROWS, last)] * width, width)
            one = h[src[e]]
            for a in range(coef.shape[1]):
                x, row = coef[e, a], out[i, a]
                for c in range(width):
                    row[c] += x * one[c]


@kernel
def sum_of_heads(lo, hi, grad, dst, coef, ptr, out):
    """Its gradient: out[s] = sum of coef[:, a] * grad[dst, a] over the edges from s and the heads a."""
    for s in range(lo, hi):
        row = out[s]
        row[:] = 0.0
        for e in range(ptr[s], ptr[s + 1]):
            for a in range(coef.shape[1]):
                x, one = coef[e, a], grad[dst[e], a]
                for c in range(row.shape[0]):
                    row[c] += x * one[c]


@nb.njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def dot_for_heads(lo, hi, h, src, grad, dst, out):
    """out[e, a] = <grad[dst, a], h[src]>."""
    for e in range(lo, hi):
        one = h[src[e]]
        for a in range(out.shape[1]):
            x, other = np.float32(0.0), grad[dst[e], a]
            for c in range(h.shape[1]):
                x += other[c] * one[c]
            out[e, a] = x


class _GatherHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, src, dst, coef, ptr):
        ctx.save_for_backward(h, src, dst, coef, ptr)
        out = torch.empty(ptr.numel() - 1, coef.shape[1], h.shape[1])
        given = [t.detach().numpy() for t in (h, src, coef, ptr, out)]
        over(sum_for_heads, len(out), *given, work=given[3] * max(coef.shape[1] * h.shape[1] // 8, 1))
        return out

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # a gradient of this gradient will be asked for
            h, src, dst, coef, _ = ctx.saved_tensors
            back = grad[dst]
            dh = segment_sum((coef.unsqueeze(-1) * back).sum(1), src, len(h)) if ctx.needs_input_grad[0] else None
            dc = (h[src].unsqueeze(1) * back).sum(-1) if ctx.needs_input_grad[3] else None
            return dh, None, None, dc, None
        h, src, dst, coef, _ = (t.detach() for t in ctx.saved_tensors)
        grad, wide, dh, dc = grad.contiguous(), max(coef.shape[1] * h.shape[1] // 8, 1), None, None
        if ctx.needs_input_grad[0]:
            ptr, at, by = by_source(src, dst, coef, len(h))
            dh = torch.empty(h.shape)
            over(sum_of_heads, len(h), grad.numpy(), at, by, ptr, dh.numpy(), work=ptr * wide)
        if ctx.needs_input_grad[3]:
            dc = torch.empty(coef.shape)
            given = (t.numpy() for t in (h, src, grad, dst, dc))
            over(dot_for_heads, src.numel(), *given, work=wide)
        return dh, None, None, dc, None


def gather_heads(h: Tensor, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor) -> Tensor:
    if not h.dtype == coef.dtype == torch.float32:
        return NotImplemented
    return _GatherHeads.apply(h.contiguous(), src, dst, coef.contiguous(), ptr)


class _EdgeDot(torch.autograd.Function):
    """Forward by edge; backward by target and by source, as the sums whose gradient this is."""

    @staticmethod
    def forward(ctx, q, h, dst, src, ptr):
        ctx.save_for_backward(q, h, dst, src, ptr)
        return dots(h, src, q, dst)

    @staticmethod
    def backward(ctx, grad):
        q, h, dst, src, ptr = ctx.saved_tensors
        dq = dh = None
        if torch.is_grad_enabled():  # a gradient of this gradient will be asked for
            back = grad.unsqueeze(-1)
            return segment_sum(back * h[src], dst, len(q)), segment_sum(back * q[dst], src, len(h)), None, None, None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            dq = summed(h, src, grad, ptr, None, None, 0.0)
        if ctx.needs_input_grad[1]:
            dh = summed_back(q.detach(), src, dst, grad, len(h))
        return dq, dh, None, None, None


def edge_dot(q: Tensor, h: Tensor, dst: Tensor, src: Tensor, ptr: Tensor) -> Tensor:
    if q.dtype != torch.float32 or h.dtype != torch.float32:
        return NotImplemented
    return _EdgeDot.apply(q.contiguous(), h.contiguous(), dst, src, ptr)


class _Change(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, table, rows, keep):
        out, norm = torch.empty_like(h), torch.empty(h.shape[:2])
        given = (t.detach().numpy() for t in (h, table, rows))
        over(change_rows, len(h), *given, np.float32(keep), out.numpy(), norm.numpy(), work=max(h.stride(0) // 8, 1))
        ctx.mark_non_differentiable(norm)
        return out, norm

    @staticmethod
    def backward(ctx, grad, _):
        return grad, None, None, None


def change(
    h: Tensor, table: Tensor, rows: Tensor, keep: float | Tensor, measured: bool = True
) -> tuple[Tensor, Tensor]:
    if rows.numel() and int(rows.max()) >= len(table):
        raise IndexError(f"`rows` must be below {len(table)}, got {int(rows.max())}")
    keep = float(keep)
    if h.dtype != torch.float32 or table.dtype != torch.float32 or not table.is_contiguous():
        return NotImplemented  # type: ignore[return-value]
    if h.dim() == 3:
        return _Change.apply(h.contiguous(), table, rows, keep)
    out, norm = _Change.apply(h.contiguous().unsqueeze(1), table.unsqueeze(1), rows, keep)
    return out.squeeze(1), norm.squeeze(1)


def spread(
    h: Tensor, src: Tensor, dst: Tensor, coef: Tensor, alpha: Tensor, total: Tensor, base: Tensor | None = None
) -> Tensor:
    if any(t.dtype != torch.float32 for t in (h, coef, alpha, total)):
        return NotImplemented
    out, many = torch.empty(src.numel()), int(dst.max()) + 1 if dst.numel() else 0
    mean = total[:many] if base is None else total[:many] - base[:many]
    given = [t.detach().contiguous() for t in (h, src, dst, coef, alpha, mean)]
    if h.dim() == 2:
        given = [t.unsqueeze(1) if t.is_floating_point() else t for t in given]
    over(spread_rows, src.numel(), *(t.numpy() for t in given), out.numpy(), work=max(h.stride(0) // 8, 1))
    return out


def energies(
    h: Tensor, src: Tensor, coef: Tensor, times: Tensor | None = None, divisor: tuple[Tensor, Tensor] | None = None,
    square: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if any(t is not None and t.dtype != torch.float32 for t in (h, coef, times, divisor and divisor[0], square)):
        return NotImplemented
    out, m = torch.empty(src.numel()), src.numel()
    if m == 0:
        return out
    per = NO_WEIGHTS if times is None else times.contiguous().numpy()
    each, dst = (NO_WEIGHTS, NO_PLACES) if divisor is None else (t.contiguous().numpy() for t in divisor)
    of, given = src.numpy(), (coef.detach().contiguous().view(m, -1).numpy(), per, each, dst, out.numpy())
    if square is not None:
        over(weigh_squares, m, square.contiguous().view(len(square), -1).numpy(), of, *given)
        return out
    rows = h.detach().contiguous().view(len(h), -1, h.shape[-1])
    if get_threads() == 1:
        square_and_weigh(rows.numpy(), of, *given)
        return out
    squares = np.empty((int(of.max()) + 1, rows.shape[1]), np.float32)  # no row after the last that is asked for
    over(square_rows, len(squares), rows.numpy(), squares, work=max(rows.stride(0) // 8, 1))
    over(weigh_squares, m, squares, of, *given)
    return out


def full_sum(h: Tensor, edges: Edges, rows: Tensor, squared: bool = False) -> Tensor:
    found = row_sums(h, edges, rows, squared)
    return NotImplemented if found is NotImplemented else found[2] if squared else found[0]


def row_sums(h: Tensor, edges: Edges, rows: Tensor, squared: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    if h.dtype not in (torch.float32, *SHORT) or not h.is_contiguous():
        return NotImplemented  # type: ignore[return-value]
    many, width, of = rows.numel(), h.shape[1], rows.numpy()
    begin, _, last, indices, weight, _ = edges.arrays
    work = np.concatenate([[0], np.cumsum(last[of] - begin[of])]) * max(width // 8, 1)
    total = NO_TOTALS if edges.total is None else edges.total.numpy()
    out = torch.empty(many, width), torch.empty(many), torch.empty(many if squared else 0, width)
    given = (bits(h), begin, last, indices, weight, edges.mean, total, of)
    over(sum_all, many, *given, *(t.numpy() for t in out), work=work)
    return out


def table_rows(h: Tensor, n_id: Tensor, drop: Drop = None, near: Copies = None) -> Tensor:
    if drop is not None or not h.is_cpu:
        return NotImplemented
    return h.index_select(0, n_id).float()


def table_sum(
    h: Tensor, src: Tensor, coef: Tensor, ptr: Tensor, rows: Tensor, drop: Drop = None, near: Copies = None
) -> Tensor:
    known = h.dtype in (torch.float32, *SHORT) and h.is_contiguous()
    if drop is not None or near is not None or coef.requires_grad or not known:
        return NotImplemented
    h, of = h.unsqueeze(1), rows.index_select(0, src)
    sums = [summed(h, of, one.float().contiguous(), ptr, None, None, 0.0) for one in coef.split(1, dim=1)]
    return torch.cat(sums, dim=1) if len(sums) > 1 else sums[0]


def rows_dot(x: Tensor, rows: Tensor, w: Tensor) -> Tensor:
    if x.dtype != torch.float32 or not x.is_contiguous():
        return NotImplemented
    out, zero = torch.empty(rows.numel(), 1), torch.zeros(rows.numel(), dtype=torch.long)
    given = (x.unsqueeze(1), rows, w.detach().view(1, 1, -1), zero, out)
    over(dot_rows, rows.numel(), *(t.numpy() for t in given), work=max(x.shape[1] // 8, 1))
    return out[:, 0]
