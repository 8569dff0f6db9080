"""Dropout, and noise of a given size, on the CPU in the time of one pass over the memory.

torch's own random numbers come one after another from one generator, which takes longer than a layer's products do
(five times as long with processors for which MKL draws no bits). Here the generator gives one key per call, and the
random bits of an entry are a hash of the key and its place: the same for any number of threads, and found again in the
backward pass instead of being stored.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from adahop.ops.random import halves, short32
from adahop.ops.registry import register
from adahop.ops.simd import kernel, part
from adahop.ops.threads import over

LIGHT = 64  # entries that take the time of drawing an edge
_PAIRS, _FOURS, _BYTES, _EACH = (np.uint32(0x01010101 * x) for x in (0x55, 0x33, 0x0F, 0x01))
_ONE, _TWO, _FOUR, _TOP = (np.uint32(n) for n in (1, 2, 4, 24))
_DEVIATION = 8.0**0.5  # of the number of heads in 32 tosses, whose mean is 16


def _key() -> int:
    """63 bits from torch's generator, which a checkpoint holds."""
    return int(torch.empty((), dtype=torch.long).random_())


def _below(share: float) -> int:
    """An entry stays if its 32 bits are below this."""
    return min(round((1.0 - share) * 2**32), 2**32 - 1)


def dropout_reference(x: Tensor, share: float) -> Tensor:
    """x with a share of its entries dropped at random, and the others scaled up. Other forms drop other entries."""
    return functional.dropout(x, share)


def noisy_reference(x: Tensor, size: Tensor, by: float) -> Tensor:
    """x + by * size * e, e of mean 0 and variance 1 in every entry: normal, or nearly so. No gradient."""
    return torch.addcmul(x, size, torch.randn_like(size), value=by)


@kernel
def drop(lo, hi, x, key, below, over, out):
    low, high = halves(key)
    mine, to = x[lo:hi], out[lo:hi]
    for i in range(len(mine)):
        to[i] = mine[i] * over if short32(low, high, lo + i) < below else np.float32(0.0)


@part
def heads_of(bits):
    """How many of 32 bits are set: by twos, by fours, by bytes; vectors have no instruction of their own everywhere."""
    x = np.uint32(bits - ((bits >> _ONE) & _PAIRS))
    x = np.uint32((x & _FOURS) + ((x >> _TWO) & _FOURS))
    x = np.uint32(np.uint32(x + (x >> _FOUR)) & _BYTES)
    return np.int32(np.uint32(x * _EACH) >> _TOP)


@kernel
def add_noise(lo, hi, x, size, key, by, out):
    low, high = halves(key)
    mine, deviation, to = x[lo:hi], size[lo:hi], out[lo:hi]
    for i in range(len(mine)):
        heads = heads_of(short32(low, high, lo + i))
        to[i] = mine[i] + deviation[i] * (by * np.float32(heads - np.int32(16)))


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, share, key):
        ctx.share, ctx.key = share, key
        out, rows = torch.empty(x.shape), x.detach().contiguous().view(-1)
        given = (np.uint32(_below(share)), np.float32(1.0 / (1.0 - share)), out.view(-1).numpy())
        over(drop, rows.numel(), rows.numpy(), key, *given, light=LIGHT)
        return out

    @staticmethod
    def backward(ctx, grad):
        return _Dropped.apply(grad, ctx.share, ctx.key), None, None


def dropout_cpu(x: Tensor, share: float) -> Tensor:
    return _Dropped.apply(x, share, _key()) if x.dtype == torch.float32 else NotImplemented


def noisy_cpu(x: Tensor, size: Tensor, by: float) -> Tensor:
    if not x.dtype == size.dtype == torch.float32 or x.requires_grad:
        return NotImplemented
    out, flat = torch.empty(x.shape), [t.contiguous().view(-1).numpy() for t in (x, size)]
    over(add_noise, x.numel(), *flat, _key(), np.float32(by / _DEVIATION), out.view(-1).numpy(), light=LIGHT)
    return out


dropout = register("dropout", reference=dropout_reference, cpu=dropout_cpu)
noisy = register("noisy", reference=noisy_reference, cpu=noisy_cpu)
