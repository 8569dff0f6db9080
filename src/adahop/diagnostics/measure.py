"""Measure: the error of every layer's estimate over repeated draws, at fixed nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adahop.checks import count
from adahop.diagnostics.frozen import recorded, run
from adahop.diagnostics.truth import Truth
from adahop.messages import Messages, energy, estimate
from adahop.models import GNN
from adahop.ops import segment_sum
from adahop.samplers import Sampler


class Measured(NamedTuple):
    """One layer: E|estimate - truth|^2 per node and its standard error; E of the sum of |m|^2 over what was drawn.

    ess = (sum c)^2 / sum c^2, c = |m| of a node's drawn neighbours (one drawn twice counts once, twice as strong), the
    mean over nodes; it is k where q is the oracle's and no node comes twice. None where nothing was left to chance.
    coverage: the share of the nodes' neighbours that came at least once in all the draws, or need not be drawn.
    In a typed graph it is one relation of the layer, at the nodes of its target type.
    """

    layer: int
    relation: int
    variance: float
    error: float
    effective: float
    ess: float | None
    coverage: float


class _Tally:
    """What adds up for one relation of a layer."""

    def __init__(self, truth: Truth, layer: int, relation: int):
        self.truth, self.layer, self.relation = truth, layer, relation
        self.nodes = truth.first[relation]
        self.square: list[float] = []
        self.energy: list[float] = []
        self.ess, self.busy = 0.0, 0
        self.seen = torch.zeros_like(truth.true)

    def add(self, messages: Messages, drawn: bool) -> None:
        """The nodes come first among the targets of every block, whatever was drawn above."""
        p, block, mapped = self.nodes, messages.block, self.layer not in self.truth.with_memory
        true = self.truth.sums[self.layer, self.relation]
        mine = estimate(messages, mapped)[:p, ..., : true.shape[-1]]  # a GPU's rows may end in zeros
        gap = (mine - true).flatten(1).double()
        self.square.append(float(gap.square().sum(1).mean()))
        m = int(block.ptr[p])
        chance, pos = block.drawn()[:m], block.pos[:m]
        square = messages.read(energy)[:m].double()
        self.energy.append(float(square[chance].sum()) / p)
        self.seen |= not drawn
        self.seen[torch.searchsorted(self.truth.pos, pos)] = True
        self._count(pos[chance], block.dst[:m][chance], square[chance].sqrt())

    def _count(self, pos: Tensor, row: Tensor, strength: Tensor) -> None:
        where, back = pos.unique(return_inverse=True)  # a place belongs to one node, so it stands for the pair
        once = segment_sum(strength, back, where.numel())
        target = torch.zeros_like(where).scatter_(0, back, row)
        p = self.nodes
        first, second = segment_sum(once, target, p), segment_sum(once.square(), target, p)
        busy = second > 0
        self.ess += float((first[busy].square() / second[busy]).sum())
        self.busy += int(busy.sum())

    def result(self) -> Measured:
        square = torch.tensor(self.square, dtype=torch.double)
        error = float(square.std() / len(square) ** 0.5) if len(square) > 1 else 0.0
        seen = self.seen[self.truth.true & (self.truth.relation == self.relation)]
        return Measured(
            self.layer,
            self.relation,
            float(square.mean()),
            error,
            sum(self.energy) / len(self.energy),
            self.ess / self.busy if self.busy else None,
            float(seen.double().mean()) if seen.numel() else 1.0,
        )


@torch.no_grad()
def measure(model: GNN, sampler: Sampler, x: Tensor, truth: Truth, repeats: int, layers: int | None = None):
    """[Measured] of each relation of every layer, or of the first `layers`; the model is frozen, the sampler a twin."""
    count(repeats, 1, "repeats")
    layers = len(model.convs) if layers is None else layers
    tallies = {(layer, r): _Tally(truth, layer, r) for layer in range(layers) for r in truth.first}
    with recorded(model) as found:
        for _ in range(repeats):
            run(model, x, sampler.sample(truth.nodes), layers)
            for layer in range(layers):
                memory = model.memory(layer)
                for r, messages in found[layer].by_relation():
                    if r in truth.first:
                        tallies[layer, r].add(messages, memory is None or memory.draws)
    return [tally.result() for tally in tallies.values()]
