"""Self-normalised attention on the GPU: coefficients from the two ends' scores, and the way back, a kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from adahop.ops.cuda_jit import kernel


@triton.jit
def scores(s, t, src, ptr, row, a, heads, slope, S: tl.constexpr, BY_EDGE: tl.constexpr):
    """(edge, whether there is one, source, s + t) of a target's edges."""
    lo, hi = tl.load(ptr + row), tl.load(ptr + row + 1)
    e = lo + tl.arange(0, S)
    ok = e < hi
    at = e
    if not BY_EDGE:
        at = tl.load(src + e, mask=ok, other=0)
    return e, ok, at, tl.load(s + row * heads + a) + tl.load(t + at * heads + a, mask=ok, other=0.0)


@kernel("heads")
def forward(coef, s, t, src, ptr, scale, heads, slope, S: tl.constexpr, BY_EDGE: tl.constexpr):
    """coef = e^score scale / sum e^score scale, score = leaky(s_i + t_j)."""
    row = tl.program_id(0).to(tl.int64)
    for a in range(heads):
        e, ok, _, x = scores(s, t, src, ptr, row, a, heads, slope, S, BY_EDGE)
        x = tl.where(ok, tl.where(x > 0.0, x, slope * x), -float("inf"))
        w = tl.where(ok, tl.exp(x - tl.max(x, 0)), 0.0) * tl.load(scale + e, mask=ok, other=0.0)
        tl.store(coef + e * heads + a, w / tl.maximum(tl.sum(w, 0), 1e-30), mask=ok)


@kernel("heads")
def backward(ds, dt, up, coef, s, t, src, ptr, heads, slope, S: tl.constexpr, BY_EDGE: tl.constexpr):
    """The gradients of s and t from that of coef; sources add up where several edges have one."""
    row = tl.program_id(0).to(tl.int64)
    for a in range(heads):
        e, ok, at, x = scores(s, t, src, ptr, row, a, heads, slope, S, BY_EDGE)
        c = tl.load(coef + e * heads + a, mask=ok, other=0.0)
        g = tl.load(up + e * heads + a, mask=ok, other=0.0)
        d = c * (g - tl.sum(c * g, 0)) * tl.where(x > 0.0, 1.0, slope)
        tl.store(ds + row * heads + a, tl.sum(d, 0))
        if BY_EDGE:
            tl.store(dt + e * heads + a, d, mask=ok)
        else:
            tl.atomic_add(dt + at * heads + a, d, mask=ok & (c != 0.0))


class Attend(torch.autograd.Function):
    """s [targets, heads], t [sources or edges, heads] -> coef [M, heads]."""

    @staticmethod
    def forward(ctx, s, t, src, ptr, scale, slope, slots, by_edge):
        s, t = s.contiguous(), t.contiguous()
        coef = torch.empty(scale.numel(), s.shape[1], device=s.device)
        ctx.flags = {"S": 1 << (slots - 1).bit_length(), "BY_EDGE": by_edge, "num_warps": 1}
        if len(s):
            forward[(len(s),)](coef, s, t, src, ptr, scale, s.shape[1], slope, **ctx.flags)
        ctx.save_for_backward(s, t, src, ptr, coef)
        ctx.slope = slope
        return coef

    @staticmethod
    def backward(ctx, up):
        s, t, src, ptr, coef = ctx.saved_tensors
        ds, dt = torch.empty_like(s), torch.zeros_like(t)
        if len(s):
            backward[(len(s),)](ds, dt, up.contiguous(), coef, s, t, src, ptr, s.shape[1], ctx.slope, **ctx.flags)
        return ds, dt, None, None, None, None, None, None
