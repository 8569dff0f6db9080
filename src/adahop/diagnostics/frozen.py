"""A frozen model and a sampler's twin: to measure without leaving a trace in either."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from adahop import ops
from adahop.block import Block
from adahop.models import GNN
from adahop.ops import random
from adahop.samplers import Sampler

MEASURE = 1 << 42  # counters for measuring, away from those of training


def twin(sampler: Sampler, seed: int, **changes: Any) -> Sampler:
    """A sampler that draws as this one does, from a stream of its own; its steps and scratch are its own too."""
    other: Sampler = sampler.twin()
    other.seed = random.key(seed, MEASURE)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


@contextlib.contextmanager
def frozen(model: GNN, plain: bool = False) -> Iterator[GNN]:
    """No dropout, nothing written into memories; with `plain` the memories rest altogether."""
    was, own = model.training, model.memories
    model.eval()
    if plain:
        model.memories = nn.ModuleDict()
    try:
        yield model
    finally:
        model.memories = own
        model.train(was)


class Heard(NamedTuple):
    """What a layer said last: messages coef * h, or, where coef is None, its sum h; and its energies, if any."""

    h: Tensor
    block: Block
    coef: Tensor | None


class Ears:
    """Hears every layer while the model runs. For the layers `inputs`, h is what the layer was given.

    Others may map h first, where that makes the sum narrower; a layer with a memory sums before the map, and who is
    compared with it must do so too.
    """

    def __init__(self, model: GNN, inputs: Iterable[int] = ()):
        self.model, self.inputs = model, frozenset(inputs)
        self.heard: dict[int, Heard] = {}
        self.energy: dict[int, Tensor] = {}
        self.given: dict[int, Tensor] = {}

    def note(self, layer: int, h: Tensor, block: Block, coef: Tensor | None) -> None:
        if coef is not None and layer in self.given:
            h = self.given.pop(layer)
        if coef is not None and coef.dim() == 2 and h.dim() == 2:
            h = h.unsqueeze(1).expand(-1, coef.shape[1], -1)
        self.heard[layer] = Heard(h.detach(), block, None if coef is None else coef.detach())

    @contextlib.contextmanager
    def open(self) -> Iterator[Ears]:
        hooks = []
        try:
            for layer, conv in enumerate(self.model.convs):
                conv.tap = lambda *said, layer=layer: self.note(layer, *said)  # type: ignore[assignment]
                conv.watcher = lambda energy, layer=layer: self.energy.update({layer: energy})  # type: ignore[assignment]
                conv.feedback = "energy"  # type: ignore[assignment]
                if layer in self.inputs:
                    keep = lambda conv, args, layer=layer: self.given.update({layer: args[0]})  # noqa: E731
                    hooks.append(conv.register_forward_pre_hook(keep))
            yield self
        finally:
            for hook in hooks:
                hook.remove()
            for conv in self.model.convs:
                conv.tap = conv.watcher = None  # type: ignore[assignment]


def head_sum(said: Heard, rows: int) -> Tensor:
    """The sum that the layer formed for the first targets of its block."""
    if said.coef is None:
        return said.h[:rows]
    block, m = said.block, int(said.block.ptr[rows])
    return ops.gather_sum(said.h, block.src[:m], block.dst[:m], said.coef[:m], block.ptr[: rows + 1])


def run(model: GNN, x: Tensor, blocks: list[Block], layers: int | None = None) -> Tensor:
    """The model's forward pass, or its first layers alone."""
    h, state = model.encode(x[blocks[0].n_id])
    for layer, block in enumerate(blocks[:layers]):
        n = block.num_dst
        h, state = model.step(layer, h, h[:n], {k: v[:n] for k, v in state.items()}, block)
    return model.decode(h) if layers is None else h
