"""Matrix products: torch's own, or oneDNN's where torch's BLAS leaves half of the processor unused.

MKL, which torch's wheels multiply with, keeps to vectors of 256 bits on AMD's processors, also where they have 512;
oneDNN, which is in the same wheels, does not: twice as fast there, with its gradients. It compiles a kernel for every
shape, so numbers of rows are rounded to a few of them. Which one runs is decided by the processor and the shapes alone,
so that runs stay equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from llvmlite import binding
from torch import Tensor
from torch.nn.functional import linear

from adahop.ops.registry import register

ROWS = 128  # rows come in multiples of so many
SMALL = 1 << 22  # products of numbers below which handing over costs more than it gives
LARGE = 1 << 22  # numbers whose copy, with rows of zeros, would cost more than another kernel


def plain(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W h + b: [N, out] of h [N, in], W [out, in], and b [out] or with a row for each of h."""
    if bias is not None and bias.dim() == 2:
        return torch.addmm(bias, h, weight.t())
    return linear(h, weight, bias)


@functools.cache
def halved() -> bool:
    """Whether torch's BLAS uses half of this processor's vectors, and oneDNN is there."""
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    there = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return wide and there and binding.get_host_cpu_name().startswith("znver")


def served(h: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN takes such a product, and it is large enough."""
    fits = h.dim() == weight.dim() == 2 and h.dtype == weight.dtype == torch.float32
    large = h.shape[0] >= ROWS and h.numel() * weight.shape[0] >= SMALL
    return fits and large and (bias is None or bias.dtype == torch.float32) and not torch.is_autocast_enabled("cpu")


def times(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b' + bias by oneDNN."""
    multiply: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
    return multiply(a, b, bias, "none", [], "")


def by_row(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same, with rows of zeros after those of `a`."""
    rows = a.shape[0]
    even = -(-rows // ROWS) * ROWS
    if rows < even and a.numel() <= LARGE:
        wide = a.new_empty(even, a.shape[1])
        wide[:rows], wide[rows:] = a, 0.0
        a = wide
    out = times(a, b, bias)
    return out if len(out) == rows else out[:rows]


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a' b: by oneDNN, the narrower one first, which suits it better; the last rows by torch's own product."""
    rows = a.shape[0]
    even = rows // ROWS * ROWS
    first, second = a[:even].t(), b[:even].t()
    out = times(first, second) if first.shape[0] <= second.shape[0] else times(second, first).t()
    return out if even == rows else out.addmm_(a[even:].t(), b[even:])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, bias):
        ctx.save_for_backward(h, weight)
        return by_row(h, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        h, weight = ctx.saved_tensors
        dh = dw = None
        asked, again = ctx.needs_input_grad, torch.is_grad_enabled()  # a gradient of this gradient will be asked for
        if asked[0]:
            dh = grad @ weight if again else by_row(grad.contiguous(), weight.t())
        if asked[1]:
            dw = grad.t() @ h if again else outer(grad.contiguous(), h)
        return dh, dw, grad.sum(0) if asked[2] else None


def wide_product(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not halved() or not served(h, weight, bias):
        return NotImplemented
    shared = bias is None or bias.dim() == 1
    out = _Product.apply(h, weight, bias if shared else None)
    return out if shared else out + bias


product = register("product", reference=plain, cpu=wide_product)
