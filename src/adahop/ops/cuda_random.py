"""Counter-based randomness in Triton: bit for bit the numbers of `adahop.ops.random`."""

from __future__ import annotations

import triton
import triton.language as tl

from adahop.ops import random

GOLD = tl.constexpr(random.signed(random.GOLD))
MIX1 = tl.constexpr(random.signed(random.MIX1))
MIX2 = tl.constexpr(random.signed(random.MIX2))


@triton.jit
def shift(x, s: tl.constexpr):
    return (x >> s) & ((1 << (64 - s)) - 1)  # int64's own shift would drag the sign along


@triton.jit
def mix(x):
    x = (x ^ shift(x, 30)) * MIX1
    x = (x ^ shift(x, 27)) * MIX2
    return x ^ shift(x, 31)


@triton.jit
def key_of(head, step, layer, STEPS: tl.constexpr):
    """The key itself, or with STEPS key(seed, step, layer) from the seed's part and a step that lives on the device."""
    key = head.to(tl.int64)
    if STEPS:
        key = mix(mix(key + GOLD + tl.load(step)) + GOLD + layer)
    return key


@triton.jit
def base(key, node):
    """The stream of one node."""
    return mix(node * GOLD + key)


@triton.jit
def draw32(stream, i):
    """The upper 32 bits of a stream's i-th draw."""
    i = stream * 0 + i + 1  # int64, whatever i is
    return shift(mix(stream + i * GOLD), 32)


@triton.jit
def draw_unit(stream, i):
    return draw32(stream, i).to(tl.float64) * 2.3283064365386963e-10  # 2^-32


@triton.jit
def draw_below(stream, i, n):
    return (draw32(stream, i) * n) >> 32
