"""How a graph's arrays are laid out before anything is drawn: loops put first, weights normalised."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from adahop.ops.registry import register
from adahop.ops.segments import segment_of
from adahop.ops.simd import kernel
from adahop.ops.threads import over
from adahop.ops.types import LEAST_SUM, NO_WEIGHTS


@kernel
def put_first(lo, hi, values, indptr, own, out):
    for i in range(lo, hi):
        o = indptr[i] + i
        out[o] = own[i]
        for j in range(indptr[i], indptr[i + 1]):
            out[j + i + 1] = values[j]


@kernel
def divide(lo, hi, indptr, weight, total, out):
    """total = the sum of each row's weights; with `out`, the weights divided by it."""
    for i in range(lo, hi):
        c = 0.0
        for j in range(indptr[i], indptr[i + 1]):
            c += np.float64(weight[j]) if weight.shape[0] > 0 else 1.0
        total[i] = c
        c = max(c, LEAST_SUM)
        for j in range(indptr[i], indptr[i + 1] if out.shape[0] > 0 else indptr[i]):
            out[j] = (np.float64(weight[j]) if weight.shape[0] > 0 else 1.0) / c


@kernel
def times_roots(lo, hi, indptr, indices, weight, root, out):
    for i in range(lo, hi):
        for j in range(indptr[i], indptr[i + 1]):
            x = np.float64(weight[j]) if weight.shape[0] > 0 else 1.0
            out[j] = x * root[i] * root[indices[j]]


def _root(total: Tensor) -> Tensor:
    return total.rsqrt().masked_fill(total == 0, 0.0)


def prepend_reference(values: Tensor, indptr: Tensor, own: Tensor) -> Tensor:
    """own[i], then row i's values, row after row."""
    n, m = own.numel(), values.numel()
    row, at = segment_of(indptr, m), torch.arange(n, device=own.device)
    out = torch.empty(m + n, dtype=values.dtype, device=values.device)
    out[indptr[:-1] + at] = own
    out[torch.arange(m, device=own.device) + row + 1] = values
    return out


def prepend_cpu(values: Tensor, indptr: Tensor, own: Tensor) -> Tensor:
    word = {4: torch.int32, 8: torch.int64}.get(values.element_size())
    if word is None or own.dtype != values.dtype:
        return NotImplemented
    out, ptr = torch.empty(values.numel() + own.numel(), dtype=values.dtype), indptr.numpy()
    given = (values.contiguous().view(word).numpy(), ptr, own.view(word).numpy(), out.view(word).numpy())
    over(put_first, own.numel(), *given, work=ptr + np.arange(len(ptr)))
    return out


def normalise_reference(indptr: Tensor, indices: Tensor, weight: Tensor | None, both: bool) -> Tensor:
    """Weights (None: ones) over their row's sum or, with `both`, over the roots of the sums of both ends' rows."""
    m = indices.numel()
    w = torch.ones(m, device=indices.device).double() if weight is None else weight.double()
    row = segment_of(indptr, m)
    total = torch.zeros(indptr.numel() - 1, dtype=torch.double, device=w.device).index_add_(0, row, w)
    if not both:
        return (w / total.clamp(min=LEAST_SUM)[row]).float()
    root = _root(total)
    return (w * root[row] * root[indices.long()]).float()


def normalise_cpu(indptr: Tensor, indices: Tensor, weight: Tensor | None, both: bool) -> Tensor:
    ptr, n = indptr.numpy(), indptr.numel() - 1
    w = NO_WEIGHTS if weight is None else weight.float().contiguous().numpy()
    total, out = torch.empty(n, dtype=torch.double), torch.empty(indices.numel())
    over(divide, n, ptr, w, total.numpy(), NO_WEIGHTS if both else out.numpy(), work=ptr)
    if both:
        over(times_roots, n, ptr, indices.numpy(), w, _root(total).numpy(), out.numpy(), work=ptr)
    return out


prepend = register("prepend", reference=prepend_reference, cpu=prepend_cpu)
normalise = register("normalise", reference=normalise_reference, cpu=normalise_cpu)
