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

from adahop.ops import cpu, cpu_hop, notice, random, reference
from adahop.ops.kinds import DRAWS, Bound, Drawn, Flat, Hop, Odds, Tree
from adahop.ops.prefetch import large_pages
from adahop.ops.threads import alone, get_threads, over, set_threads, threads

__all__ = [
    "DRAWS", "Bound", "Drawn", "Flat", "Hop", "Odds", "Tree", "alone", "bound", "draw", "exp3", "forget", "full_sum",
    "gather_sum", "get_threads", "grow", "hop", "join", "large_pages", "notice", "on_gpu", "over", "random",
    "reference", "relabel", "segment_max",
    "segment_sum", "set_threads", "threads", "track",
]  # fmt: skip

segment_sum, segment_max = reference.segment_sum, reference.segment_max


def fast(t: Tensor) -> bool:
    return t.is_cpu and not (os.environ.get("ADAHOP_REFERENCE") or os.environ.get("ADAHOP_TRITON"))


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
        return cpu_hop.draw(indptr, first, indices, dst, k, how, odds, key)
    if (kernels := on_gpu(dst)) and how != "poisson" and indices.numel() and kernels.serves(k):
        return kernels.draw(indptr, first, indices, dst, k, how, odds, key)
    ks = k.expand(dst.numel()) if k.numel() == 1 else k
    return Drawn(*reference.draw(
        indptr, first, indices, dst, ks, how, odds.edge, odds.log, odds.node, odds.eta, key))  # fmt: skip


def relabel(dst: Tensor, src: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """(n_id, local source ids): targets first, then sources as they appear. `scratch` [N] int32 is -1 throughout."""
    return cpu_hop.relabel(dst, src, scratch) if fast(dst) else reference.relabel(dst, src)


def join(
    dst: Tensor, drawn: Drawn, indices: Tensor, eid: Tensor | None, weight: Tensor | None, scratch: Tensor,
    known: bool | None = None,
) -> Hop:  # fmt: skip
    """Number the nodes of drawn edges as `relabel` does, and look the edges up. With `known`, scratch as in `hop`."""
    if fast(dst):
        return cpu_hop.join(dst, drawn, indices, eid, weight, scratch, known)
    pos, rows = drawn.pos, torch.arange(drawn.ptr.numel() - 1, device=dst.device)
    nodes, src = relabel(dst, indices[pos].long(), scratch)
    edge_index = torch.stack([src, torch.repeat_interleave(rows, drawn.ptr.diff(), output_size=pos.numel())])
    w = torch.ones_like(drawn.scale) if weight is None else weight[pos]
    return Hop(drawn, nodes, edge_index, pos if eid is None else eid[pos].long(), w)


def hop(
    indptr: Tensor, first: Tensor, indices: Tensor, eid: Tensor | None, weight: Tensor | None, dst: Tensor, k: Tensor,
    how: str, odds: Odds, key: int, scratch: Tensor, known: bool,
) -> Hop:  # fmt: skip
    """`draw` and `join` in one. `scratch` keeps the numbers, for the next hop to go on with (`known`): see `forget`."""
    if fast(dst):
        return cpu_hop.hop(indptr, first, indices, eid, weight, dst, k, how, odds, key, scratch, known)
    return join(dst, draw(indptr, first, indices, dst, k, how, odds, key), indices, eid, weight, scratch)


def forget(n_id: Tensor, scratch: Tensor) -> None:
    """After the last hop: scratch is -1 again."""
    if fast(n_id):
        cpu_hop.forget(n_id, scratch)


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


def grow(dst, ptr, pos, gain, first, indptr, weight, tree, scratch) -> None:
    """weight[pos] *= exp(gain) in place, kept within float32's reach (only ratios within a segment matter)."""
    if fast(dst):
        cpu.grow(dst, ptr, pos, gain, first, indptr, weight, tree, scratch)
    elif kernels := on_gpu(dst):
        kernels.grow(dst, ptr, pos, gain, first, indptr, weight)
    else:
        reference.grow(dst, pos, gain, first, indptr, weight)


def exp3(dst, ptr, pos, prob, scale, reward, first, indptr, mean, visits, rule, weight, tree, scratch) -> None:
    """EXP3's update in one pass, on the CPU: rule = (reward times k, paper's step, step, eta, horizon, memory)."""
    cpu.exp3(dst, ptr, pos, prob, scale, reward, first, indptr, mean, visits, rule, weight, tree, scratch)


def track(n_id, targets, src, dst, weight, scale, energy, square, visits, level, rule) -> int:
    """Tracked norms' update in one pass, on the CPU; how many nodes were seen. rule = (memory, few, most visits)."""
    return cpu.track(n_id, targets, src, dst, weight, scale, energy, square, visits, level, rule)


def bound(indptr: Tensor, first: Tensor, indices: Tensor, weight: Tensor | None, node: Tensor, out: Bound) -> None:
    """The sums and reaches of weight * node[source], in one pass over all edges, on the CPU."""
    cpu.bound(indptr, first, indices, weight, node, out)
