"""Sums over rows on the GPU: gather and weighted sum in one, its two gradients, and sums over whole neighbourhoods.

Rows may be float32, float16 or bfloat16; sums are float32. A table of rows may be read through a map (local id -> row),
be shared by all heads (head stride 0), and have its entries dropped while it is read. Rows that are not on the GPU are
read where they lie, in pinned memory; `place` says which of them have a copy in `near`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from adahop.ops.cuda_jit import kernel
from adahop.ops.cuda_random import mix


@triton.jit
def kept(seed, row, c, keep):
    """Whether entry c of a row stays when entries are dropped; the same in every read of one step."""
    r = (mix(tl.load(seed) + row) & 0xFFFFFFFF).to(tl.uint32)
    x = r[:, None] + c[None, :].to(tl.uint32) * 0x9E3779B1
    x = (x ^ (x >> 15)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return ((x ^ (x >> 16)) >> 8).to(tl.int32).to(tl.float32) < keep * 16777216.0


@triton.jit
def rows_at(h, near, place, seed, keep, row, c, ok, width, stride, DROP: tl.constexpr, NEAR: tl.constexpr):
    """[rows, columns] in float32: from `near` where a copy lies there, and with entries dropped where asked."""
    both = ok[:, None] & (c < width)[None, :]
    if NEAR:
        at = tl.load(place + row, mask=ok, other=-1).to(tl.int64)
        here = (at >= 0)[:, None]
        x = tl.load(near + tl.maximum(at, 0)[:, None] * stride + c[None, :], mask=both & here, other=0.0).to(tl.float32)
        far = tl.load(h + row[:, None] * stride + c[None, :], mask=both & (here == 0), other=0.0).to(tl.float32)
        x = x + far
    else:
        x = tl.load(h + row[:, None] * stride + c[None, :], mask=both, other=0.0).to(tl.float32)
    if DROP:
        x = tl.where(kept(seed, row, c, keep), x / keep, 0.0)
    return x


@kernel("out", "table", "near", "width")
def fetch(out, table, near, place, ids, width, chunks, BF: tl.constexpr):
    """out[t] = table[ids[t]], from `near` where a copy lies there; entries are copied as they are."""
    pid = tl.program_id(0)
    t = (pid // chunks).to(tl.int64)
    c = (pid % chunks) * BF + tl.arange(0, BF)
    row = tl.load(ids + t)
    at = tl.load(place + row).to(tl.int64)
    if at >= 0:
        tl.store(out + t * width + c, tl.load(near + at * width + c, mask=c < width), mask=c < width)
    else:
        tl.store(out + t * width + c, tl.load(table + row * width + c, mask=c < width), mask=c < width)


@triton.jit
def source(src, rows, e, ok, MAP: tl.constexpr):
    """The row of each edge's source."""
    s = tl.load(src + e, mask=ok, other=0).to(tl.int64)
    if MAP:
        s = tl.load(rows + s, mask=ok, other=0).to(tl.int64)
    return s


@kernel("out", "h", "near", "width", "stride", "step", "heads", "chunks")
def gather_sum(out, h, src, rows, coef, ptr, near, place, seed, keep, width, stride, step, heads, chunks,
               RB: tl.constexpr, BF: tl.constexpr,
               MAP: tl.constexpr, DROP: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    """out[t, a] = sum over t's edges of coef[e, a] * h[source, a]; `step` leads from a head to the next in h."""
    pid, a = tl.program_id(0), tl.program_id(1)
    t = (pid // chunks).to(tl.int64)
    c = (pid % chunks) * BF + tl.arange(0, BF)
    lo, hi = tl.load(ptr + t), tl.load(ptr + t + 1)
    total = tl.zeros((BF,), tl.float32)
    for b in range(lo, hi, RB):
        e = b + tl.arange(0, RB)
        s = source(src, rows, e, e < hi, MAP)
        x = tl.load(coef + e * heads + a, mask=e < hi, other=0.0).to(tl.float32)
        y = rows_at(h + a * step, near, place, seed, keep, s, c, e < hi, width, stride, DROP, NEAR)
        total += tl.sum(y * x[:, None], 0)
    tl.store(out + (t * heads + a) * width + c, total, mask=c < width)


@kernel("dh", "grad", "width", "heads", "chunks")
def scatter_sum(dh, grad, src, coef, ptr, width, heads, chunks, RB: tl.constexpr, BF: tl.constexpr):
    """The gradient of h: dh[source, a] += coef[e, a] * grad[t, a]. One writer a row where sources do not repeat."""
    pid, a = tl.program_id(0), tl.program_id(1)
    t = (pid // chunks).to(tl.int64)
    c = (pid % chunks) * BF + tl.arange(0, BF)
    lo, hi = tl.load(ptr + t), tl.load(ptr + t + 1)
    g = tl.load(grad + (t * heads + a) * width + c, mask=c < width, other=0.0).to(tl.float32)
    for b in range(lo, hi, RB):
        e = b + tl.arange(0, RB)
        s = source(src, src, e, e < hi, False)
        x = tl.load(coef + e * heads + a, mask=e < hi, other=0.0).to(tl.float32)
        some = ((e < hi) & (x != 0.0))[:, None] & (c < width)[None, :]
        tl.atomic_add(dh + (s[:, None] * heads + a) * width + c[None, :], x[:, None] * g[None, :], mask=some)


@kernel("h", "grad", "near", "width", "stride", "step", "heads", "every")
def edge_dot(out, h, src, rows, grad, ptr, near, place, seed, keep, width, stride, step, heads, every,
             RB: tl.constexpr, BF: tl.constexpr,
             MAP: tl.constexpr, DROP: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    """out[e, a] = <h[source, a], grad[t, a]>: the gradient of coef. `every` 0: one row of grad for all targets."""
    pid, a = tl.program_id(0), tl.program_id(1)
    t = pid.to(tl.int64)
    lo, hi = tl.load(ptr + t), tl.load(ptr + t + 1)
    for b in range(lo, hi, RB):
        e = b + tl.arange(0, RB)
        s = source(src, rows, e, e < hi, MAP)
        total = tl.zeros((RB, BF), tl.float32)
        for at in range(0, width, BF):
            c = at + tl.arange(0, BF)
            g = tl.load(grad + (t * every * heads + a) * width + c, mask=c < width, other=0.0).to(tl.float32)
            y = rows_at(h + a * step, near, place, seed, keep, s, c, e < hi, width, stride, DROP, NEAR)
            total += y * g[None, :]
        tl.store(out + e * heads + a, tl.sum(total, 1), mask=e < hi)


@kernel("h", "width", "heads")
def energies(out, h, src, coef, width, heads, edges, TB: tl.constexpr, BF: tl.constexpr):
    """out[e] = sum over heads of |coef[e, a] h[source, a]|^2."""
    e = tl.program_id(0).to(tl.int64) * TB + tl.arange(0, TB)
    s = tl.load(src + e, mask=e < edges, other=0).to(tl.int64)
    total = tl.zeros((TB,), tl.float32)
    for a in range(heads):
        norm = tl.zeros((TB,), tl.float32)
        for at in range(0, width, BF):
            c = at + tl.arange(0, BF)
            some = (e < edges)[:, None] & (c < width)[None, :]
            x = tl.load(h + (s[:, None] * heads + a) * width + c[None, :], mask=some, other=0.0).to(tl.float32)
            norm += tl.sum(x * x, 1)
        x = tl.load(coef + e * heads + a, mask=e < edges, other=0.0)
        total += x * x * norm
    tl.store(out + e, total, mask=e < edges)


@kernel("heads")
def known_energies(out, square, rows, src, coef, heads, edges, TB: tl.constexpr):
    """The same from |h|^2 of every row, which a map leads to."""
    e = tl.program_id(0).to(tl.int64) * TB + tl.arange(0, TB)
    norm = tl.load(square + source(src, rows, e, e < edges, True), mask=e < edges, other=0.0)
    total = tl.zeros((TB,), tl.float32)
    for a in range(heads):
        x = tl.load(coef + e * heads + a, mask=e < edges, other=0.0)
        total += x * x
    tl.store(out + e, total * norm, mask=e < edges)


@kernel("out", "h", "width", "stride", "chunks")
def full_sum(out, h, begin, last, indices, weight, rows, width, stride, chunks, pieces, LONG: tl.constexpr,
             RB: tl.constexpr, BF: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    """out[t, piece] = a part of the sum over all edges of rows[t]; a row over LONG is cut into `pieces`."""
    pid, piece = tl.program_id(0), tl.program_id(1)
    t = (pid // chunks).to(tl.int64)
    c = (pid % chunks) * BF + tl.arange(0, BF)
    v = tl.load(rows + t)
    lo, hi = tl.load(begin + v), tl.load(last + v)
    part = tl.maximum((hi - lo + pieces - 1) // pieces, LONG)
    lo, hi = lo + part * piece, tl.minimum(hi, lo + part * (piece + 1))
    total = tl.zeros((BF,), tl.float32)
    for b in range(lo, hi, RB):
        e = b + tl.arange(0, RB)
        s = tl.load(indices + e, mask=e < hi, other=0).to(tl.int64)
        both = (e < hi)[:, None] & (c < width)[None, :]
        x = tl.load(h + s[:, None] * stride + c[None, :], mask=both, other=0.0).to(tl.float32)
        if WEIGHTED:
            x = x * tl.load(weight + e, mask=e < hi, other=0.0)[:, None]
        total += tl.sum(x, 0)
    tl.store(out + (t * pieces + piece) * width + c, total, mask=c < width)
