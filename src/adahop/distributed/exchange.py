"""What ranks exchange so that their equal state stays equal: drawn edges with their energies, rows of histories."""

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

    Sent for an edge: its place in the CSR, probability, scale and energy; for a target: its id and number of edges.
    Policies update running means and clip, so increments of several ranks cannot be added up; the inputs of an update
    can be joined, in the order of the ranks, so that all hold the same bits afterwards. A target on two ranks drew the
    same edges (its random numbers depend on the step and the node alone) and counts once, as it does in one process:
    the first rank's energies are taken.
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
        everyone = self.peers.all_gather(sent)
        out, energies = [], []
        for layer in range(len(blocks)):
            dst, many, pos, prob, scale, e = (
                torch.cat([theirs[6 * layer + i] for theirs in everyone]) for i in range(6)
            )
            block, e = first_per_target(sampler, dst.long(), Drawn(pointer(many.long()), pos.long(), prob, scale), e)
            out.append(block)
            energies.append(e)
        return out, energies


def first_per_target(sampler: Sampler, dst: Tensor, drawn: Drawn, energy: Tensor) -> tuple[Block, Tensor]:
    """The block of the drawn edges and their energies; of a target that occurs twice, the first occurrence."""
    order = torch.argsort(dst, stable=True)
    new = torch.ones_like(order, dtype=torch.bool)
    new[1:] = dst[order][1:] != dst[order][:-1]
    first = torch.empty_like(new).index_copy_(0, order, new)
    used = first[expand(drawn.ptr, drawn.pos.numel())]
    own = Drawn(pointer(drawn.ptr.diff()[first]), drawn.pos[used], drawn.prob[used], drawn.scale[used])
    return sampler.block(dst[first], own), energy[used]


class Histories:
    """Sends the rows of h that a rank has pushed in this step to all: every rank holds the same, whole history.

    Rows are written in the order of the ranks: where two pushed the same node, the last one's row is taken everywhere.
    """

    def __init__(self, peers: Peers, sums: Iterable[Sum]):
        self.peers = peers
        self.written = [history for s in sums if (history := s.written_history) is not None]
        for history in self.written:
            history.log = []

    def exchange(self) -> None:
        if not self.written:
            return
        sent = []
        for history in self.written:
            history.flush()
            pushed, history.log = history.log or [], []
            none = (torch.zeros(0, dtype=torch.long, device=history.value.device), history.value[:0])
            n_id, rows = (torch.cat(t) for t in zip(none, *pushed, strict=True))
            sent += [n_id, rows.float()]
        for theirs in self.peers.all_gather(sent):
            for history, n_id, rows in zip(self.written, theirs[::2], theirs[1::2], strict=True):
                history.value[n_id] = rows.to(history.value.dtype)
