"""The subgraph that some nodes induce: every edge of the graph with both ends among them."""

from __future__ import annotations

import numba as nb
import numpy as np
import torch
from torch import Tensor

from adahop.ops import fast, over, reference


def induced(indptr: Tensor, indices: Tensor, nodes: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(ptr, pos, src) of the induced edges, grouped by target: places in the CSR and local source ids.

    A node that comes twice has two rows of edges and speaks from its first. `scratch` [N] int32 holds -1 throughout.
    """
    if not fast(nodes):
        return _plain(indptr, indices, nodes)
    n, local_of, start, of = nodes.numel(), scratch.numpy(), indptr.numpy(), nodes.numpy()
    ptr, none = np.zeros(n + 1, np.int64), np.empty(0, np.int64)
    work = np.concatenate([[0], np.cumsum(start[of + 1] - start[of])])
    _mark(of, local_of)
    over(_rows, n, True, start, indices.numpy(), of, local_of, ptr, none, none, work=work)
    np.cumsum(ptr, out=ptr)
    pos, src = np.empty(int(ptr[-1]), np.int64), np.empty(int(ptr[-1]), np.int64)
    over(_rows, n, False, start, indices.numpy(), of, local_of, ptr, pos, src, work=work)
    local_of[of] = -1
    return torch.from_numpy(ptr), torch.from_numpy(pos), torch.from_numpy(src)


def _plain(indptr: Tensor, indices: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, device = nodes.numel(), nodes.device
    local = torch.full((indptr.numel() - 1,), n, device=device)
    local.scatter_reduce_(0, nodes, torch.arange(n, device=device), "amin")
    row, pos = reference.spans(indptr[nodes], indptr[nodes + 1] - indptr[nodes])
    src = local[indices[pos].long()]
    inside = src < n
    ptr = torch.cat([nodes.new_zeros(1), torch.bincount(row[inside], minlength=n).cumsum(0)])
    return ptr, pos[inside], src[inside]


@nb.njit(nogil=True, cache=True)
def _mark(nodes, local_of):
    for i in range(nodes.shape[0] - 1, -1, -1):
        local_of[nodes[i]] = i


@nb.njit(nogil=True, cache=True)
def _rows(lo, hi, count, indptr, indices, nodes, local_of, ptr, pos, src):
    """Fill rows lo..hi. With `count`, only ptr[i + 1] = how many edges row i has."""
    for i in range(lo, hi):
        o = 0 if count else ptr[i]
        for j in range(indptr[nodes[i]], indptr[nodes[i] + 1]):
            s = local_of[indices[j]]
            if s >= 0:
                if not count:
                    pos[o], src[o] = j, s
                o += 1
        if count:
            ptr[i + 1] = o
