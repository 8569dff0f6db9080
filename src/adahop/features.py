"""Features: the table of raw features as the first layer reads it on a GPU, wherever its rows lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from adahop import ops
from adahop.block import Block
from adahop.checks import InputError

Drop = tuple[Tensor, float] | None  # (seed, share kept): entries dropped while they are read


def mapped(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W h + b, where h may be rows of a table that end in zeros."""
    return linear(h, ops.widened(weight, h), bias)


class Features:
    """Rows of x, in any floating dtype, on the GPU or in pinned host memory (then with copies of `cache` rows near).

    With `cache`, the rows that `often` says are read most have a copy on the device; kernels read the others over the
    bus. `hit_rate` says what share of the sampled rows was near since it was asked last.
    """

    def __init__(self, x: Tensor, device: Any, cache: int | None = None, often: Tensor | None = None):
        here = torch.zeros(0, device=device)
        if ops.table.form(here) != "cuda":
            raise InputError("`device` must be a CUDA GPU with Triton installed for a table of features")
        self.near: tuple[Tensor, Tensor] | None = None
        self.hits, self.reads = (torch.zeros((), dtype=torch.long, device=device) for _ in range(2))
        if cache is None:
            self.value = ops.table(x.to(device), here)
            self.square = _squares(self.value, device)
            return
        x = ops.table(x.cpu(), here)
        self.value = x if not torch.cuda.is_available() else _pinned(x)
        self.square = _squares(self.value, device)
        order = torch.arange(len(x)) if often is None else often.cpu().argsort(descending=True, stable=True)
        kept = order[:cache]
        place = torch.full((len(x),), -1, dtype=torch.int32)
        place[kept] = torch.arange(kept.numel(), dtype=torch.int32)
        self.near = ops.table(self.value[kept].to(device), here), place.to(device)

    def drop(self, share: float) -> Drop:
        """A seed for this step's dropout, from torch's own generator on the device."""
        return torch.empty((), dtype=torch.long, device=self.square.device).random_(), 1.0 - share

    def rows(self, n_id: Tensor, drop: Drop = None) -> Tensor:
        """x[n_id] in float32, with columns of zeros up to a width that products like (`mapped` takes them)."""
        return ops.table_rows(self.value, n_id, drop, self.near)

    def sum(self, block: Block, coef: Tensor, drop: Drop = None) -> Tensor:
        """[targets, heads, F and zeros]: sum over a target's edges of coef[:, head] * x[source]."""
        if self.near is not None:
            read = self.near[1][block.n_id]
            self.hits += (read >= 0).sum()
            self.reads += read.numel()
        return ops.table_sum(self.value, block.src, coef, block.ptr, block.n_id, drop, self.near)

    def dot(self, block: Block, v: Tensor, drop: Drop = None) -> Tensor:
        """[M, heads]: <x[source], v[head]>."""
        return ops.table_dot(self.value, block.src, v, block.ptr, block.n_id, drop, self.near)

    @torch.no_grad()
    def renew(self, norms: Callable[[Tensor], Tensor]) -> None:
        """What `energies` takes for |m|^2 of a row from now on: what `norms` says of its raw features."""
        for at in range(0, len(self.value), 1 << 16):
            part = self.value[at : at + (1 << 16)].to(self.square.device).float()
            self.square[at : at + len(part)] = norms(part)

    @torch.no_grad()
    def energies(self, block: Block, coef: Tensor) -> Tensor:
        """|coef m[source]|^2 of every edge, heads summed: |x|^2 for |m|^2, or what it was when it was renewed."""
        return ops.known_energies(self.square, block.n_id, block.src, coef)

    def per_target(self, block: Block, coef: Tensor) -> Tensor:
        """The sum of the coefficients of each target."""
        if block.slots:
            return coef.view(block.num_dst, block.slots, *coef.shape[1:]).sum(1)
        return ops.segment_sum(coef, block.dst, block.num_dst)

    def hit_rate(self) -> float:
        """The share of sampled rows that had a copy on the device; 1 where all of them live there."""
        hits, reads = int(self.hits), int(self.reads)
        self.hits.zero_()
        self.reads.zero_()
        return hits / reads if reads else 1.0


def _pinned(x: Tensor) -> Tensor:
    """The same padded rows in page-locked memory, which kernels read over the bus."""
    whole = torch.empty(len(x), x.stride(0), dtype=x.dtype, pin_memory=True)
    whole[:, : x.shape[1]] = x
    return whole[:, : x.shape[1]]


def _squares(x: Tensor, device: Any) -> Tensor:
    parts = [part.to(device).float().square().sum(1) for part in x.split(1 << 16)]
    return torch.cat(parts) if parts else torch.zeros(0, device=device)
