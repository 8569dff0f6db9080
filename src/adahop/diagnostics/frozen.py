"""A frozen model and a sampler's twin, so that measuring changes neither."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from adahop.block import Block
from adahop.messages import Messages, TypedMessages
from adahop.models import GNN
from adahop.ops import random
from adahop.samplers import Sampler
from adahop.watcher import listen

MEASURE = 1 << 42  # counters for measuring, away from those of training


def twin(sampler: Sampler, seed: int, **changes: Any) -> Sampler:
    """A copy of a sampler with its own random stream, step and scratch."""
    other: Sampler = sampler.twin()
    other.seed = random.key(seed, MEASURE)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


@contextlib.contextmanager
def frozen(model: GNN, plain: bool = False) -> Iterator[GNN]:
    """No dropout and nothing written to memories; with `plain`, memories are not read either."""
    was, own = model.training, model.memories
    model.eval()
    if plain:
        model.memories = nn.ModuleDict()
    try:
        yield model
    finally:
        model.memories = own
        model.train(was)


@contextlib.contextmanager
def recorded(model: GNN) -> Iterator[dict[int, Messages | TypedMessages]]:
    """The messages that each layer passed last, by layer, while the model runs with frozen weights."""
    found: dict[int, Messages | TypedMessages] = {}
    with listening(model, lambda layer, m: found.update({layer: m})):
        yield found


@contextlib.contextmanager
def listening(model: GNN, listener: Callable[[int, Messages], None]) -> Iterator[None]:
    """Inside, the listener is called with every layer's number and messages."""
    with contextlib.ExitStack() as stack:
        for layer, conv in enumerate(model.layers()):
            stack.enter_context(listen(conv, functools.partial(listener, layer)))
        yield


def run(model: GNN, x: Tensor, blocks: list[Block], layers: int | None = None) -> Tensor:
    """The model's forward pass, or h after its first layers alone."""
    h = model.hidden(SimpleNamespace(x=x[blocks[0].n_id], blocks=blocks), layers)
    return model.decode(h) if layers is None else h
