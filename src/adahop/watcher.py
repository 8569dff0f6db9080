"""watch(model): the energy of every message, layer by layer, while the model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from adahop.errors import InputError, KindError
from adahop.messages import HasListeners, Messages, Reading, energy


@contextlib.contextmanager
def watch(model: nn.Module, reads: Reading | None = energy) -> Iterator[list[Tensor]]:
    """Collect the energy |m_ij|^2 of each layer's messages, in the order the layers run.

    `reads` is the function of the messages to collect, see a sampler's `reads`; None collects nothing. Our own layers
    hand over their messages; unmodified PyG layers have a hook, and allow `energy` only. A layer that passes no
    messages is an error, as the sampler would never learn its energies.

    >>> import torch; from torch_geometric.nn import GCNConv
    >>> conv = GCNConv(2, 2, add_self_loops=False)
    >>> with watch(conv) as energy: _ = conv(torch.ones(2, 2), torch.tensor([[0], [1]]))
    >>> energy[0].shape
    torch.Size([1])
    """
    found: list[Tensor] = []
    seen: set[str] = set()
    layers = {} if reads is None else _layers(model, reads)
    with contextlib.ExitStack() as listening:
        for name, module in layers.items():
            note = _note(name, found, seen)
            if hasattr(module, "listeners"):
                assert reads is not None
                listening.enter_context(listen(module, _through(reads, note)))
            else:
                handle = module.register_message_forward_hook(_message_hook(note))
                listening.callback(handle.remove)
        yield found
    silent = [name or type(module).__name__ for name, module in layers.items() if name not in seen]
    if silent:
        raise RuntimeError(
            f"layer '{silent[0]}' passed no messages while watched; pass it edge_index, not a sparse matrix, and run it"
        )


@contextlib.contextmanager
def listen(conv: HasListeners, listener: Callable[[Messages], None]) -> Iterator[None]:
    """Inside, one of our layers hands its messages to this listener, too."""
    conv.listeners.append(listener)
    try:
        yield
    finally:
        conv.listeners.remove(listener)


def _layers(model: nn.Module, reads: Reading) -> dict[str, Any]:
    """The layers that pass messages, by name."""
    if not callable(reads):
        kind = type(reads).__name__
        raise KindError(f"`reads` must be a function of Messages such as adahop.messages.energy, got {kind}")
    if not isinstance(model, nn.Module):
        raise KindError(f"`model` must be a torch module, got {type(model).__name__}")
    found: dict[str, Any] = {}
    for name, m in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, o in found.items() if hasattr(o, "listeners"))
        if not inside and (hasattr(m, "listeners") or isinstance(m, MessagePassing)):
            found[name] = m
    if not found:
        raise InputError(f"`model` must have layers that pass messages, got {type(model).__name__} with none")
    of_pyg = [m for m in found.values() if not hasattr(m, "listeners")]
    if of_pyg and reads is not energy:
        raise InputError(f"`reads` must be `energy` for PyG's {type(of_pyg[0]).__name__}, got {reads.__name__}")
    return found


def _note(name: str, found: list[Tensor], seen: set[str]) -> Callable[[Tensor], None]:
    def note(value: Tensor) -> None:
        seen.add(name)
        found.append(value.detach())

    return note


def _through(reads: Reading, note: Callable[[Tensor], None]) -> Callable[[Messages], None]:
    return lambda messages: note(messages.read(reads))


def _message_hook(note):
    def hook(module: MessagePassing, inputs: tuple, message: Tensor) -> None:
        note(message.detach().square().flatten(1).sum(1))

    return hook
