"""What layers pass to `propagate` and `edge_updater`: which arguments have rows of nodes, and of which nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

CLOSE = 1e-4
Kwargs = dict[str, Any]  # arguments by name
NodeArguments = dict[str, set[str]]  # see `node_arguments`


def node_arguments(conv: MessagePassing, which: str = "_user_args") -> NodeArguments:
    """The node-level arguments of `propagate` (or `edge_updater`), each with the ends of an edge whose rows `message`
    reads: "j" for sources, "i" for targets, as in PyG's `x_j` and `x_i`.
    """
    found: NodeArguments = {}
    for name in getattr(conv, which):
        if name.endswith(("_i", "_j")) and name[:-2] not in ("edge_index", "size"):
            found.setdefault(name[:-2], set()).add(name[-1])
    return found


def node_sides(conv: MessagePassing, which: str = "_user_args") -> dict[str, int]:
    """Per node-level argument, whether a single tensor has rows of sources (0) or of targets (1).

    Of a pair, the first tensor has those of sources. Where both ends are read from one tensor, both are of one type.
    """
    return {name: 0 if "j" in sides else 1 for name, sides in node_arguments(conv, which).items()}


def read_whole(conv: MessagePassing, *methods: str) -> set[str]:
    """The arguments of `propagate` that some of a layer's methods read as they are, not by the ends of edges."""
    names = conv.inspector.get_flat_param_names(list(methods), exclude=conv.special_args)
    return {name for name in names if not name.endswith(("_i", "_j"))}


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among some values, and in tuples and lists of them."""
    for v in values:
        if isinstance(v, Tensor):
            yield v
        elif isinstance(v, tuple | list):
            yield from tensors_in(v)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tensor, or a tuple of them, with each one changed; other values as they are."""
    if isinstance(value, tuple | list):
        return tuple(map_tensors(v, change) for v in value)
    return change(value) if isinstance(value, Tensor) else value


def sources_of(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) else value


def targets_of(value: Any) -> Any:
    return value[1] if isinstance(value, tuple | list) else value


def target_rows(value: Any, at: Tensor) -> Any:
    """A node-level argument with the targets' rows `at` alone."""
    if isinstance(value, tuple | list):
        return value[0], None if value[1] is None else value[1][at.to(value[1].device)]
    return value[at.to(value.device)] if isinstance(value, Tensor) else value


def replace_sources(value: Any, sources: Tensor, sides: set[str]) -> Any:
    """A node-level argument with other rows of sources; those of targets stay, without a gradient."""
    if "i" not in sides and not isinstance(value, tuple | list):
        return sources
    target = targets_of(value)
    return sources, None if target is None else target.detach()


def subtract(value: Any, previous: Any, weight: float) -> Any:
    """value - weight * previous, of both tensors of a pair; one of which there is no previous stays as it is."""
    if not isinstance(value, tuple | list):
        return value - weight * previous
    if value[0] is value[-1] and previous[-1] is not None:
        return (value[0] - weight * previous[0],) * len(value)
    return tuple(a if a is None or b is None else a - weight * b for a, b in zip(value, previous, strict=True))


def is_per_edge(value: Any, edges: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == edges


def at_edges(kwargs: Kwargs, at: Tensor | slice, edges: int, node: Container[str]) -> Kwargs:
    """The arguments for some of the edges; those in `node` are node-level."""
    return {k: v[at] if is_per_edge(v, edges) and k not in node else v for k, v in kwargs.items()}


def state_of(t: Tensor) -> tuple[int, int | None]:
    """Another one after the tensor was changed in place; a tensor of inference mode does not tell."""
    return t.data_ptr(), None if t.is_inference() else t._version


def first_of_each(ids: Tensor) -> Tensor:
    """Where each id comes first."""
    order = ids.argsort(stable=True)
    new = torch.ones_like(order, dtype=torch.bool)
    new[1:] = ids[order][1:] != ids[order][:-1]
    return order[new]


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).norm()) <= CLOSE * float(b.norm()) + 1e-12


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Within, a layer or model is in evaluation mode: no dropout, no running statistics."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True


@contextlib.contextmanager
def equal_rows_once(conv: MessagePassing) -> Iterator[None]:
    """Within, the layer's submodules, in evaluation mode, compute an input whose rows are one expanded row once."""

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
        with eval_mode(conv):
            yield
    finally:
        for m in inner:
            del m.__dict__["forward"]
