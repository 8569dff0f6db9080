"""watch(model): the energy of every message, layer by layer, while the model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import MessagePassing


@contextlib.contextmanager
def watch(model: nn.Module, feedback: str | None = "energy") -> Iterator[list[Tensor]]:
    """Collect the energy |m_ij|^2 of each layer's messages, in the order the layers run.

    `feedback` is the number wanted of a message, a sampler's `feedback`; all but "energy" need our own layers, and
    None wants nothing.
    Works for our own layers (they offer a `watcher`) and for unmodified PyG layers (their messages are overheard).
    A layer that stays silent is an error: the sampler would never learn of it.

    >>> import torch; from torch_geometric.nn import GCNConv
    >>> conv = GCNConv(2, 2, add_self_loops=False)
    >>> with watch(conv) as energy: _ = conv(torch.ones(2, 2), torch.tensor([[0], [1]]))
    >>> energy[0].shape
    torch.Size([1])
    """
    energy: list[Tensor] = []
    heard: set[str] = set()
    listening = {} if feedback is None else _layers(model, feedback)
    handles = []
    try:
        for name, module in listening.items():
            note = _note(name, energy, heard)
            if hasattr(module, "watcher"):
                module.watcher, module.feedback = note, feedback
            else:
                handles.append(module.register_message_forward_hook(_overhear(note)))
        yield energy
    finally:
        for handle in handles:
            handle.remove()
        for module in listening.values():
            if hasattr(module, "watcher"):
                module.watcher = None
    silent = [name or type(module).__name__ for name, module in listening.items() if name not in heard]
    if silent:
        raise RuntimeError(
            f"layer '{silent[0]}' passed no messages while watched; pass it edge_index, not a sparse matrix, and run it"
        )


def _layers(model: nn.Module, feedback: str) -> dict[str, Any]:
    """The layers that pass messages, by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch module, got {type(model).__name__}")
    found = {name: m for name, m in model.named_modules() if hasattr(m, "watcher") or isinstance(m, MessagePassing)}
    if not found:
        raise ValueError(f"`model` must have layers that pass messages, got {type(model).__name__} with none")
    strange = [m for m in found.values() if not hasattr(m, "watcher")]
    if strange and feedback != "energy":
        raise ValueError(f"`feedback` must be 'energy' for PyG's {type(strange[0]).__name__}, got '{feedback}'")
    return found


def _note(name: str, energy: list[Tensor], heard: set[str]):
    def note(value: Tensor) -> None:
        heard.add(name)
        energy.append(value.detach())

    return note


def _overhear(note):
    def hook(module: MessagePassing, inputs: tuple, message: Tensor) -> None:
        note(message.detach().square().flatten(1).sum(1))

    return hook
