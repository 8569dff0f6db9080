"""Draws joined to blocks on the CPU: a part of the targets is drawn, gathered and numbered while it is in the cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from adahop.ops import cpu_block, cpu_draw, cpu_reject, cpu_rows, cpu_tree_rows, threads
from adahop.ops.kinds import DRAWS, Drawn, Hop, Odds
from adahop.ops.threads import get_threads, over, relay

NO_IDS, NO_WEIGHTS = np.empty(0, np.int32), np.empty(0, np.float32)


class Plan:
    """A draw made ready: `ptr` is known, and `rows(lo, hi)` fills pos, prob and scale of the targets lo..hi."""

    def __init__(self, indptr: Tensor, first: Tensor, indices: Tensor, dst: Tensor, k: Tensor, how: str, odds: Odds,
                 key: int):  # fmt: skip
        n, of, ks = dst.numel(), dst.numpy(), k.numpy()
        start = np.empty((3, n), np.int64)
        where, ptr = (start[0], start[1], start[2]), np.empty(n + 1, np.int64)
        cpu_rows.spans(indptr.numpy(), first.numpy(), of, ks, where, ptr)
        plain = odds.edge is None and odds.node is None and how != "poisson"
        self.ptr, self.work = ptr, ptr
        self.kernel: Callable = cpu_rows.uniform_rows
        given: tuple = (of, where, ptr, ks, DRAWS[how], key)
        if odds.tree is not None and odds.edge is not None and how == "multinomial":
            tree = tuple(t.numpy() for t in (odds.edge, *odds.tree))
            self.kernel, given = cpu_tree_rows.tree_rows, (*given[:4], key, odds.eta, tree)
        elif odds.bound is not None and odds.eta > 0.0 and how == "multinomial":
            bound = tuple(t.numpy() for t in odds.bound)
            self.kernel, given = cpu_reject.reject_rows, (*given[:4], key, _odds(odds), indices.numpy(), bound)
        elif not plain:
            self.kernel, given = cpu_rows.weighted_rows, (*given, _odds(odds), indices.numpy())
            self.work = np.concatenate([[0], np.cumsum(start[1] + 16)])
            if how == "poisson" or odds.eta == 0.0:  # who takes part is known only when the odds are
                over(cpu_rows.count_rows, n, *given, work=self.work)
                np.cumsum(ptr, out=ptr)
        m = int(ptr[-1])
        self.out = np.empty(m, np.int64), np.empty(m, np.float32), np.empty(m, np.float32)
        self.given = (*given, self.out)

    def drawn(self) -> Drawn:
        return Drawn(*map(torch.from_numpy, (self.ptr, *self.out)))


def draw(*given) -> Drawn:
    plan = Plan(*given)
    over(plan.kernel, len(plan.ptr) - 1, *plan.given, work=plan.work)
    return plan.drawn()


def _odds(odds: Odds) -> tuple:
    """(form, edge, node, eta) as the kernels take them."""
    form = cpu_draw.UNIFORM if odds.edge is None else cpu_draw.EDGE_LOG if odds.log else cpu_draw.EDGE
    edge, node = (NO_WEIGHTS if t is None else t.numpy() for t in (odds.edge, odds.node))
    return form, edge, node, odds.eta


LESS = 0.2  # of a thread's share of the work: what numbering costs


def hop(indptr, first, indices, eid, weight, dst, k, how, odds, key, scratch, known) -> Hop:
    plan = Plan(indptr, first, indices, dst, k, how, odds, key)
    joined = _Join(dst, plan.ptr, plan.out[0], indices, eid, weight, scratch, known)
    return Hop(plan.drawn(), *joined.run(plan, plan.work))


def join(dst: Tensor, drawn: Drawn, indices: Tensor, eid, weight, scratch: Tensor, known: bool | None) -> Hop:
    ptr, pos = drawn.ptr.numpy(), drawn.pos.numpy()
    joined = _Join(dst, ptr, pos, indices, eid, weight, scratch, bool(known))
    done = Hop(drawn, *joined.run(None, ptr))
    if known is None:
        forget(done.n_id, scratch)
    return done


def relabel(dst: Tensor, src: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    local, n_id, marks = src.numpy().copy(), np.empty(dst.numel() + src.numel() + 1, np.int64), scratch.numpy()
    cpu_block.name_targets(dst.numpy(), marks, n_id)
    n = cpu_block.name_sources(0, len(local), local, marks, n_id, dst.numel())
    cpu_block.forget(n_id[:n], marks)
    return torch.from_numpy(n_id[:n].copy()), torch.from_numpy(local)


def _cuts(work: np.ndarray) -> list[int]:
    """Rows in a part a thread; the first part has less work, as the thread that makes it also numbers the nodes."""
    rows, total = len(work) - 1, int(work[-1])
    parts = min(get_threads(), rows, total // threads.SMALL + 1)
    if parts <= 1:
        return [0, rows]
    return [0, *np.searchsorted(work, total / (parts - LESS) * (np.arange(1, parts) - LESS)).tolist(), rows]


class _Join:
    """What joins drawn edges to a block, part after part: sources, targets, ids, weights, and the nodes numbered."""

    def __init__(self, dst, ptr, pos, indices, eid, weight, scratch, known: bool):
        m, n = len(pos), dst.numel()
        self.ptr, self.pos, self.n, self.scratch = ptr, pos, n, scratch.numpy()
        self.edge_index, self.n_id = np.empty((2, m), np.int64), np.empty(n + m + 1, np.int64)
        self.src = self.edge_index[0]
        self.e_id = pos if eid is None else np.empty(m, np.int64)
        self.weight = np.ones(m, np.float32) if weight is None else np.empty(m, np.float32)
        self.ends = (self.src, self.edge_index[1], self.e_id, self.weight)
        ids, weights = NO_IDS if eid is None else eid.numpy(), NO_WEIGHTS if weight is None else weight.numpy()
        self.csr = (indices.numpy(), ids, weights)
        if known:
            self.n_id[:n] = dst.numpy()
        else:
            cpu_block.name_targets(dst.numpy(), self.scratch, self.n_id)

    def run(self, plan: Plan | None, work: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Parts are drawn (where they are not yet) and looked up in any thread; their nodes are numbered in order."""

        def fill(lo: int, hi: int) -> None:
            if plan is not None:
                plan.kernel(lo, hi, *plan.given)
            cpu_rows.look_up(lo, hi, self.ptr, self.pos, self.csr, self.ends)

        try:
            relay(fill, self.number, _cuts(work))
        except BaseException:
            self.scratch.fill(-1)
            raise
        n_id = self.n_id[: self.n].copy()
        return tuple(map(torch.from_numpy, (n_id, self.edge_index, self.e_id, self.weight)))  # type: ignore[return-value]

    def number(self, lo: int, hi: int) -> None:
        a, b = self.ptr[lo], self.ptr[hi]
        self.n = cpu_block.name_sources(a, b, self.src, self.scratch, self.n_id, self.n)


def forget(n_id: Tensor, scratch: Tensor) -> None:
    cpu_block.forget(n_id.numpy(), scratch.numpy())
