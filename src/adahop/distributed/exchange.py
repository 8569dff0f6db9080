"""What ranks with equal state tell each other, so that it stays equal: drawn edges with their energies, rows of h."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from adahop.block import Block, expand
from adahop.distributed.peers import Peers
from adahop.ops import Drawn, pointer
from adahop.samplers import Sampler
from adahop.sum import Sum


class Updates:
    """Joins all ranks' blocks into the block that one process would have drawn; every rank then learns from it.

    Sent for an edge: its place in the CSR, probability, scale and energy; for a target: its id and how many edges.
    Policies move running means and clip, so what they would add is no plain sum; what they add it from is, and the
    ranks' order is fixed, so all hold the same bits afterwards. A target drawn by two ranks drew the same edges (its
    random numbers are its own) and counts once, as it does in one process: the first rank's energies are taken.
    """

    def __init__(self, peers: Peers):
        self.peers = peers

    def __call__(self, sampler: Sampler, blocks: list[Block], energy: list[Tensor]) -> tuple[list[Block], list[Tensor]]:
        g = sampler.graph
        node = torch.int32 if g.num_nodes < 2**31 else torch.int64
        place = torch.int32 if g.num_edges < 2**31 else torch.int64
        sent: list[Tensor] = []
        for b, e in zip(blocks, energy, strict=True):
            dst = b.n_id[: b.num_dst].to(node)
            sent += [dst, b.ptr.diff().to(torch.int32), b.pos.to(place), b.prob, b.scale, e]
        everyone = self.peers.gather(sent)
        out, told = [], []
        for layer in range(len(blocks)):
            dst, many, pos, prob, scale, e = (
                torch.cat([theirs[6 * layer + i] for theirs in everyone]) for i in range(6)
            )
            block, e = once(sampler, dst.long(), Drawn(pointer(many.long()), pos.long(), prob, scale), e)
            out.append(block)
            told.append(e)
        return out, told


def once(sampler: Sampler, dst: Tensor, drawn: Drawn, energy: Tensor) -> tuple[Block, Tensor]:
    """The block of what was drawn for some targets, and its energies, each target as it came first."""
    order = torch.argsort(dst, stable=True)
    new = torch.ones_like(order, dtype=torch.bool)
    new[1:] = dst[order][1:] != dst[order][:-1]
    first = torch.empty_like(new).index_copy_(0, order, new)
    kept = first[expand(drawn.ptr, drawn.pos.numel())]
    own = Drawn(pointer(drawn.ptr.diff()[first]), drawn.pos[kept], drawn.prob[kept], drawn.scale[kept])
    return sampler.block(dst[first], own), energy[kept]


class Histories:
    """Rows of h that a rank has seen in this step go to all: every rank keeps the whole history, and the same one.

    Rows are written in the order of the ranks, so where two saw one node the last counts, everywhere.
    """

    def __init__(self, peers: Peers, sums: Iterable[Sum]):
        self.peers = peers
        self.written = [(how, history) for how in sums if (history := how.written) is not None]
        for _, history in self.written:
            history.seen = []

    def exchange(self) -> None:
        if not self.written:
            return
        sent = []
        for how, history in self.written:
            how.settle()
            seen, history.seen = history.seen or [], []
            none = (torch.zeros(0, dtype=torch.long, device=history.value.device), history.value[:0])
            n_id, rows = (torch.cat(t) for t in zip(none, *seen, strict=True))
            sent += [n_id, rows.float()]
        for theirs in self.peers.gather(sent):
            for (_, history), n_id, rows in zip(self.written, theirs[::2], theirs[1::2], strict=True):
                history.value[n_id] = rows.to(history.value.dtype)
