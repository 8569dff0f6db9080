"""Counter-based randomness: u = hash(key, node, i), the same for any thread, any order, any device.

`key(seed, step, layer)` names a stream; `bits(key, node, i)` are its 64 random bits for the i-th draw of a node.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np
import torch
from torch import Tensor

GOLD, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ALL = (1 << 64) - 1
_GOLD, _MIX1, _MIX2 = np.uint64(GOLD), np.uint64(MIX1), np.uint64(MIX2)
_WORD, A, B, C = 0xFFFFFFFF, 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
_A32, _B32, _C32, _T13, _T16 = np.uint32(A), np.uint32(B), np.uint32(C), np.uint32(13), np.uint32(16)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


def signed(x: int) -> int:
    """64 bits as the int64 that torch and numpy hold."""
    x &= _ALL
    return x - (1 << 64) if x >> 63 else x


def key(*counters: int, start: int = 0) -> int:
    """One int64 from a seed and any counters; key(a, b) is key(b, start=key(a))."""
    x = start & _ALL
    for c in counters:
        x = (x + GOLD + (int(c) & _ALL)) & _ALL
        x = ((x ^ (x >> 30)) * MIX1) & _ALL
        x = ((x ^ (x >> 27)) * MIX2) & _ALL
        x ^= x >> 31
    return signed(x)


class Stream(NamedTuple):
    """key(seed, step, layer) with the step on the device, for kernels: nothing waits for it to be read."""

    head: int  # key(seed)
    step: Tensor
    layer: int

    def now(self) -> int:
        return key(int(self.step), self.layer, start=self.head)


def _shift(x: Tensor, s: int) -> Tensor:
    return (x >> s) & ((1 << (64 - s)) - 1)  # int64's own shift would drag the sign along


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * signed(MIX1)
    x = (x ^ _shift(x, 27)) * signed(MIX2)
    return x ^ _shift(x, 31)


def bits(key: int | Tensor, node: Tensor, i: int | Tensor) -> Tensor:
    """64 random bits as int64, in plain torch; equal to `base` and `draw` below."""
    step = (i + 1) * signed(GOLD)
    return _mix(_mix(node.long() * signed(GOLD) + key) + (step if isinstance(step, Tensor) else signed(step)))


def unit(key: int | Tensor, node: Tensor, i: int | Tensor) -> Tensor:
    """A number in [0, 1) with 32 random bits, float64."""
    return _shift(bits(key, node, i), 32).double() * 2.0**-32


def below(key: int | Tensor, node: Tensor, i: int | Tensor, n: Tensor) -> Tensor:
    """A whole number in [0, n)."""
    return (_shift(bits(key, node, i), 32) * n) >> 32


def short(key: int, node: Tensor) -> Tensor:
    """32 random bits per node, as int64: less mixing than `bits`, for scans that need one number of very many nodes."""
    x = (node.long() * A + (key & _WORD)) & _WORD
    x = ((x ^ (x >> 16)) * B) & _WORD
    x = (((x ^ (x >> 13)) + ((key >> 32) & _WORD)) * C) & _WORD
    return x ^ (x >> 16)


def shuffled(ids: Tensor, key: int) -> Tensor:
    """`ids` in an order that depends on the key and on the places alone."""
    place = torch.arange(ids.numel(), device=ids.device)
    return ids[torch.argsort(bits(key, place, 0), stable=True)]


@nb.njit(inline="always")
def short32(low, high, node):
    """`short` in 32-bit arithmetic; low and high are the halves of the key."""
    x = np.uint32(np.uint32(node) * _A32 + low)
    x = np.uint32(np.uint32(x ^ (x >> _T16)) * _B32)
    x = np.uint32(np.uint32(np.uint32(x ^ (x >> _T13)) + high) * _C32)
    return np.uint32(x ^ (x >> _T16))


@nb.njit(inline="always")
def halves(key):
    return np.uint32(key & np.int64(_WORD)), np.uint32((key >> 32) & np.int64(_WORD))


@nb.njit(inline="always")
def mix(x):
    x = (x ^ (x >> _S30)) * _MIX1
    x = (x ^ (x >> _S27)) * _MIX2
    return x ^ (x >> _S31)


@nb.njit(inline="always")
def base(key, node):
    """The stream of one node."""
    return mix(np.uint64(node) * _GOLD + np.uint64(key))


@nb.njit(inline="always")
def draw64(base, i):
    """The bits of a node's i-th draw."""
    return mix(base + np.uint64(i + 1) * _GOLD)


@nb.njit(inline="always")
def draw32(base, i):
    """The upper 32 bits of a node's i-th draw."""
    return mix(base + np.uint64(i + 1) * _GOLD) >> _S32


@nb.njit(inline="always")
def draw_unit(base, i):
    return np.float64(draw32(base, i)) * 2.0**-32


@nb.njit(inline="always")
def draw_below(base, i, n):
    return np.int64((draw32(base, i) * np.uint64(n)) >> _S32)
