"""Numbering on the CPU: a table of local ids, filled as nodes appear; parts are looked up while others are drawn."""

from __future__ import annotations

import numba as nb
import numpy as np
import torch
from torch import Tensor

from adahop.ops.buffers import empty
from adahop.ops.simd import prefetch, prefetch_write
from adahop.ops.threads import cuts, over, relay
from adahop.ops.types import NO_PLACES, Drawn, Edges, Numbered, Plan

AHEAD = 48  # how many nodes ahead a number's line is asked for
EDGES = 64  # and how many edges ahead


@nb.njit(nogil=True, cache=True)
def name_targets(dst, local_of, n_id):
    """Targets are numbered as they come; one that comes twice goes by its first number."""
    for i in range(dst.shape[0]):
        if i + AHEAD < dst.shape[0]:
            prefetch_write(local_of, dst[i + AHEAD])
        n_id[i] = dst[i]
        if local_of[dst[i]] < 0:
            local_of[dst[i]] = i


@nb.njit(nogil=True, cache=True)
def name_sources(a, b, src, local_of, n_id, n):
    """src[a:b] from global to local ids, new ones from n on as they first appear; how many there are then."""
    for e in range(a, b):
        prefetch_write(local_of, src[min(e + AHEAD, b - 1)])
        v = src[e]
        old = local_of[v]
        new = old < 0  # no branch: which sources are new cannot be foreseen
        x = n if new else np.int64(old)
        n_id[n] = v
        local_of[v] = x
        src[e] = x
        n += new
    return n


@nb.njit(nogil=True, cache=True)
def unname(n_id, local_of):
    for i in range(n_id.shape[0]):
        if i + AHEAD < n_id.shape[0]:
            prefetch_write(local_of, n_id[i + AHEAD])
        local_of[n_id[i]] = -1


@nb.njit(nogil=True, cache=True)
def repeated(ids, mark):
    """Whether an id comes twice; `mark` is -1 everywhere before and after."""
    twice = False
    for i in range(ids.shape[0]):
        prefetch_write(mark, ids[min(i + AHEAD, ids.shape[0] - 1)])
        twice = twice or mark[ids[i]] >= 0
        mark[ids[i]] = i
    for i in range(ids.shape[0]):
        mark[ids[i]] = -1
    return twice


@nb.njit(nogil=True, cache=True)
def look_up(lo, hi, ptr, pos, stored, target, ends):
    """Source, target, edge id and weight of the edges of rows lo..hi; an empty `eid` or `weight` is left out."""
    indices, eid, weight = stored
    src, row, e_id, w = ends
    a, b = ptr[lo], ptr[hi]
    for e in range(a, b):
        prefetch(indices, pos[min(e + EDGES, b - 1)])
        src[e] = indices[pos[e]]
    if eid.shape[0] > 0:
        for e in range(a, b):
            prefetch(eid, pos[min(e + EDGES, b - 1)])
            e_id[e] = eid[pos[e]]
    if weight.shape[0] > 0:
        for e in range(a, b):
            prefetch(weight, pos[min(e + EDGES, b - 1)])
            w[e] = weight[pos[e]]
    for t in range(lo, hi):
        at = target[t] if target.shape[0] > 0 else t
        for e in range(ptr[t], ptr[t + 1]):
            row[e] = at


@nb.njit(nogil=True, cache=True)
def among(lo, hi, count, begin, last, indices, rows, local_of, ptr, pos, src):
    """The edges of the rows lo..hi whose source has a number. With `count`, only ptr[i + 1] = how many row i has."""
    for i in range(lo, hi):
        o = 0 if count else ptr[i]
        for j in range(begin[rows[i]], last[rows[i]]):
            s = local_of[indices[j]]
            if s >= 0:
                if not count:
                    pos[o], src[o] = j, s
                o += 1
        if count:
            ptr[i + 1] = o


def relabel(dst: Tensor, src: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    local, n_id, marks = src.numpy().copy(), np.empty(dst.numel() + src.numel() + 1, np.int64), scratch.numpy()
    name_targets(dst.numpy(), marks, n_id)
    n = name_sources(0, len(local), local, marks, n_id, dst.numel())
    unname(n_id[:n], marks)
    return torch.from_numpy(n_id[:n].copy()), torch.from_numpy(local)


def number(
    dst: Tensor, drawn: Drawn | Plan, edges: Edges, target: Tensor | None, scratch: Tensor, known: bool | None
) -> Numbered:
    plan = drawn if isinstance(drawn, Plan) else None
    done = plan.drawn if plan is not None else drawn
    assert isinstance(done, Drawn)
    job = _Numbering(dst, done, edges, target, scratch, bool(known))
    out = job.run(plan, job.ptr if plan is None else plan.work)
    if known is None:
        forget(out.n_id, scratch)
    return out


def forget(n_id: Tensor, scratch: Tensor) -> None:
    unname(n_id.numpy(), scratch.numpy())


def induced(edges: Edges, nodes: Tensor, rows: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, local_of, of = rows.numel(), scratch.numpy(), rows.numpy()
    stored = [t.numpy() for t in (edges.begin, edges.last, edges.indices)]
    ptr, none = np.zeros(n + 1, np.int64), np.empty(0, np.int64)
    work = np.concatenate([[0], np.cumsum(stored[1][of] - stored[0][of])])
    name_targets(nodes.numpy(), local_of, np.empty(nodes.numel(), np.int64))
    over(among, n, True, *stored, of, local_of, ptr, none, none, work=work)
    np.cumsum(ptr, out=ptr)
    pos, src = np.empty(int(ptr[-1]), np.int64), np.empty(int(ptr[-1]), np.int64)
    over(among, n, False, *stored, of, local_of, ptr, pos, src, work=work)
    unname(nodes.numpy(), local_of)
    return torch.from_numpy(ptr), torch.from_numpy(pos), torch.from_numpy(src)


class _Numbering:
    """Drawn edges become a block, part after part: sources, targets, ids, weights, and the nodes numbered."""

    def __init__(self, dst: Tensor, drawn: Drawn, edges: Edges, target: Tensor | None, scratch: Tensor, known: bool):
        m, n = drawn.pos.numel(), dst.numel()
        self.ptr, self.pos, self.n, self.scratch = drawn.ptr.numpy(), drawn.pos.numpy(), n, scratch.numpy()
        self.edge_index, self.n_id = empty((2, m), np.int64), empty((n + m + 1,), np.int64)
        self.src = self.edge_index[0]
        self.e_id = self.pos if edges.eid is None else empty((m,), np.int64)
        self.weight = empty((m,), np.float32)
        if edges.weight is None:
            self.weight.fill(1.0)
        self.ends = (self.src, self.edge_index[1], self.e_id, self.weight)
        self.target = NO_PLACES if target is None else target.numpy()
        _, _, _, indices, weight, eid = edges.arrays
        self.stored = (indices, eid, weight)
        if known:
            self.n_id[:n] = dst.numpy()
        else:
            name_targets(dst.numpy(), self.scratch, self.n_id)

    def run(self, plan: Plan | None, work: np.ndarray) -> Numbered:
        """Parts are drawn (where they are not yet) and looked up in any thread; their nodes are numbered in order."""

        def fill(lo: int, hi: int) -> None:
            if plan is not None:
                plan.fill(lo, hi)
            look_up(lo, hi, self.ptr, self.pos, self.stored, self.target, self.ends)

        def here(lo: int, hi: int) -> None:
            fill(lo, hi)
            self.name(lo, hi)

        try:
            relay(here, fill, self.name, cuts(len(work) - 1, work))
        except BaseException:
            self.scratch.fill(-1)
            raise
        found = self.n_id[: self.n], self.edge_index, self.e_id, self.weight
        return Numbered(*map(torch.from_numpy, found))

    def name(self, lo: int, hi: int) -> None:
        a, b = self.ptr[lo], self.ptr[hi]
        self.n = name_sources(a, b, self.src, self.scratch, self.n_id, self.n)
