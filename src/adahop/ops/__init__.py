"""The few operations everything is made of, each with a plain reference and a fast form chosen by the device.

Set ADAHOP_REFERENCE=1 to run the reference everywhere. ADAHOP_TRITON=1 sends any tensor to the GPU's kernels:
with TRITON_INTERPRET=1 they run on the CPU, slowly, which is how they are tested without a GPU.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from adahop.ops import cpu, random, reference
from adahop.ops.kinds import DRAWS, Drawn, Flat, Odds
from adahop.ops.threads import get_threads, over, set_threads, threads

__all__ = [
    "DRAWS", "Drawn", "Flat", "Odds", "add_log_weights", "draw", "full_sum", "gather_sum", "get_threads", "on_gpu",
    "over", "random", "reference", "relabel", "segment_max", "segment_sum", "set_threads", "threads",
]  # fmt: skip

segment_sum, segment_max = reference.segment_sum, reference.segment_max


def fast(t: Tensor) -> bool:
    return t.device.type == "cpu" and not (os.environ.get("ADAHOP_REFERENCE") or os.environ.get("ADAHOP_TRITON"))


def on_gpu(t: Tensor) -> Any:
    """The Triton kernels where they serve this tensor, else None."""
    wanted = t.is_cuda or os.environ.get("ADAHOP_TRITON")
    return _triton() if wanted and not os.environ.get("ADAHOP_REFERENCE") else None


@functools.cache
def _triton() -> Any:
    try:
        import adahop.ops.gpu as kernels
    except ImportError:  # no Triton: the reference runs on the device
        return None
    return kernels


def draw(
    indptr: Tensor, first: Tensor, indices: Tensor, dst: Tensor, k: Tensor, how: str, odds: Odds, key: int
) -> Drawn:
    """For each target its self-loops and k of its true neighbours (all, exactly, where there are no more than k).

    `k` holds one number for all targets or one each; -1 takes everyone. `how` is one of DRAWS.
    """
    if fast(dst):
        return cpu.draw(indptr, first, indices, dst, k, how, odds, key)
    if (kernels := on_gpu(dst)) and how != "poisson" and indices.numel() and kernels.serves(k):
        return kernels.draw(indptr, first, indices, dst, k, how, odds, key)
    ks = k.expand(dst.numel()) if k.numel() == 1 else k
    return Drawn(*reference.draw(
        indptr, first, indices, dst, ks, how, odds.edge, odds.log, odds.node, odds.eta, key))  # fmt: skip


def relabel(dst: Tensor, pos: Tensor, indices: Tensor, eid: Tensor | None, scratch: Tensor):
    """(n_id, local source ids, e_id) of the edges at `pos`: targets first. `scratch` [N] int32 holds -1 throughout."""
    if fast(dst):
        return cpu.relabel(dst, pos, indices, eid, scratch)
    nodes, src = reference.relabel(dst, indices[pos].long())
    return nodes, src, pos if eid is None else eid[pos].long()


def gather_sum(h: Tensor, src: Tensor, dst: Tensor, coef: Tensor, ptr: Tensor) -> Tensor:
    """out[i] = sum over target i's edges of coef * h[src]. h [S, C] with coef [M], or h [S, H, C] with coef [M, H]."""
    flat = h.dim() == 2
    if flat:
        h, coef = h.unsqueeze(1), coef.unsqueeze(1)
    if fast(h) and h.dtype == torch.float32:
        out = cpu.gather_sum(h, src, dst, coef, ptr)
    elif (kernels := on_gpu(h)) and h.is_floating_point() and h.dtype != torch.float64:
        out = kernels.gather_sum(h, src, coef, ptr).to(h.dtype)
    else:
        out = segment_sum(coef.to(h.dtype).unsqueeze(-1) * h[src], dst, ptr.numel() - 1)
    return out.squeeze(1) if flat else out


def full_sum(h: Tensor, indptr: Tensor, indices: Tensor, weight: Tensor | None, nodes: Tensor) -> Tensor:
    """out[t] = sum over all in-edges of nodes[t] of weight * h[source], straight from the CSR; no gradient."""
    if fast(h) and h.dtype == torch.float32:
        return cpu.full_sum(h, indptr, indices, weight, nodes)
    if kernels := on_gpu(h):
        return kernels.full_sum(h, indptr, indices, weight, nodes)
    return reference.full_sum(h, indptr, indices, weight, nodes)


def add_log_weights(dst, ptr, pos, gain, first, indptr, log_weight, scratch) -> None:
    """log_weight[pos] += gain in place, kept within float32's reach (only differences within a segment matter)."""
    if fast(dst):
        cpu.add_log_weights(dst, ptr, pos, gain, first, indptr, log_weight, scratch)
    elif kernels := on_gpu(dst):
        kernels.add_log_weights(dst, ptr, pos, gain, first, indptr, log_weight)
    else:
        reference.add_log_weights(dst, pos, gain, first, indptr, log_weight)
