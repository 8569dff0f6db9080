"""What layers pass to `propagate` and `edge_updater`: whose rows they are, and some of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from adahop.pyg.align import Aligned

CLOSE = 1e-4


def are_edges(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return value.dim() == 2 and value.shape[0] == 2 and not value.is_floating_point()


def lifted(conv: MessagePassing, which: str = "_user_args") -> dict[str, set[str]]:
    """The arguments of `propagate` (or `edge_updater`) that nodes have, and whether sources (j) or targets (i) do."""
    found: dict[str, set[str]] = {}
    for name in getattr(conv, which):
        if name.endswith(("_i", "_j")) and name[:-2] not in ("edge_index", "size"):
            found.setdefault(name[:-2], set()).add(name[-1])
    return found


def ends(conv: MessagePassing, which: str = "_user_args") -> dict[str, int]:
    """Per argument that nodes have, whether one tensor of it has rows of sources (0) or of targets (1).

    Of two tensors the first has those of sources. What both sides have is of one type of nodes.
    """
    return {name: 0 if "j" in sides else 1 for name, sides in lifted(conv, which).items()}


def sources_of(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value


def targets_of(value: Any) -> Any:
    return value[1] if isinstance(value, tuple | list) else value


def rows_at(value: Any, at: Tensor) -> Any:
    """Targets' rows at some places."""
    if isinstance(value, tuple | list):
        return value[0], None if value[1] is None else value[1][at.to(value[1].device)]
    return value[at.to(value.device)] if isinstance(value, Tensor) else value


def paired(sources: Tensor, now: Any, sides: set[str]) -> Any:
    """Sources' rows beside the targets' own of now."""
    if "i" not in sides and not isinstance(now, tuple | list):
        return sources
    target = targets_of(now)
    return sources, None if target is None else target.detach()


def detached(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(detached(v) for v in value)
    return value.detach() if isinstance(value, Tensor) else value


def less(now: Any, then: Any, trust: float) -> Any:
    """Rows less what is trusted of those kept; a part that nothing is kept of stays as it is."""
    if not isinstance(now, tuple | list):
        return now - trust * then
    if now[0] is now[-1] and then[-1] is not None:
        return (now[0] - trust * then[0],) * len(now)
    return tuple(a if a is None or b is None else a - trust * b for a, b in zip(now, then, strict=True))


def per_edge(value: Any, edges: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == edges


def no_edges(kwargs: dict[str, Any], edges: int, node: Container[str]) -> dict[str, Any]:
    """The arguments for no edge at all; those in `node` have rows of nodes."""
    return {k: v[:0] if per_edge(v, edges) and k not in node else v for k, v in kwargs.items()}


def pair(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def first_of_each(ids: Tensor) -> Tensor:
    """Where each id comes first."""
    order = ids.argsort(stable=True)
    new = torch.ones_like(order, dtype=torch.bool)
    new[1:] = ids[order][1:] != ids[order][:-1]
    return order[new]


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).norm()) <= CLOSE * float(b.norm()) + 1e-12


def some(place: Aligned, at: Tensor) -> Aligned:
    """How some of the edges in use lie in the batch's."""
    if place.at is None:
        rest = at.new_full((place.edges - place.kept,), -1)
        where = torch.cat([torch.arange(place.start, place.start + place.kept, device=at.device), rest])
    else:
        where = place.at
    return Aligned(0, 0, at.numel(), where[at], place.share)


@contextlib.contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Within, a layer or model is in evaluation: it drops nothing and counts nothing."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


@contextlib.contextmanager
def alike(conv: MessagePassing) -> Iterator[None]:
    """Within, the layer's own modules compute rows that are all alike once, and drop nothing."""

    def once(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if len(args) == 1 and not kwargs else None
            if isinstance(x, Tensor) and x.dim() > 1 and x.shape[0] > 1 and x.stride(0) == 0:
                out = forward(x[:1])
                return out.expand(x.shape[0], *out.shape[1:]) if isinstance(out, Tensor) else forward(*args)
            return forward(*args, **kwargs)

        return run

    inner = [m for m in conv.children() if "forward" not in m.__dict__]
    for m in inner:
        m.__dict__["forward"] = once(m.forward)
    try:
        with still(conv):
            yield
    finally:
        for m in inner:
            del m.__dict__["forward"]
