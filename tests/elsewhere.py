"""A second device without one: tensors that say they lie on `ELSEWHERE`, held in the CPU's memory.

Inside `pretended()` tensors can be made there and moved there and back. An operation on tensors of both devices is an
error, as it is with a GPU, and so is reading one by numpy. What a program reads back to the host (sizes, single
numbers, copies) is counted: `pretended() as reads`, a Counter by operation. `pretended_cuda` makes a GPU of it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

ELSEWHERE = torch.device("lazy:0")  # a name that torch knows, of a device that needs no start and that no machine has
aten = torch.ops.aten
SIZES = {
    aten.nonzero.default, aten._unique.default, aten._unique2.default, aten.unique_dim.default,
    aten.unique_consecutive.default, aten.masked_select.default, aten.bincount.default,
}  # fmt: skip

INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Elsewhere(Tensor):
    """A tensor elsewhere; `held` is where it really lies."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        return Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=_mode().device, requires_grad=held.requires_grad,
        )  # fmt: skip

    def __init__(self, held: Tensor):
        self.held = held

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"cannot read a tensor on {self.device} by numpy")

    def tolist(self) -> Any:
        _mode().read("number")
        return self.held.tolist()

    def __deepcopy__(self, memo: dict) -> Tensor:
        return Elsewhere(self.held.clone()).requires_grad_(self.requires_grad)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _mode():
            return func(*args, **(kwargs or {}))


_modes: list[_Device] = []  # the innermost last


def _mode() -> _Device:
    return _modes[-1]


class _Device(TorchDispatchMode):
    """Runs what is asked of tensors elsewhere on what they hold."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.names, self.reads = device, {device.type}, Counter[str]()

    def read(self, kind: str, what: Any = None) -> None:
        """The host waits for something of the device."""
        self.reads[kind] += 1

    def sent(self, what: Any) -> None:
        """Something of the host is copied to the device."""

    def ran(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation gives, of tensors that are held."""
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat, _ = tree_flatten((args, kwargs))
        tensors = [t for t in flat if isinstance(t, Tensor)]
        asked, given = kwargs.get("device"), any(isinstance(t, Elsewhere) for t in tensors)
        there = given if asked is None else torch.device(asked).type in self.names
        if func in (aten._to_copy.default, aten.copy_.default):
            to, of = (there, tensors[0]) if func is aten._to_copy.default else (_there(tensors[0]), tensors[-1])
            if _there(of) and not to:
                self.read("copy", func)
            elif to and not _there(of) and of.dim() > 0:
                self.sent(func)
        elif given:
            here = [t for t in tensors if not _there(t) and t.dim() > 0]
            free = args[1] if func in INDEXED and _there(args[0]) else ()  # an index may come from the host
            if not all(any(t is index for index in free) for t in here):
                raise RuntimeError(f"{func}: tensors on {self.device} and on the CPU, of shape {tuple(here[0].shape)}")
            if here:
                self.sent(func)
            if self._reads_a_size(func, args, kwargs):
                self.read("size", func)
            elif func in (aten._local_scalar_dense.default, aten.equal.default):
                self.read("number", func)
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = _held(args), _held(kwargs)
        if there:
            return _as_given(self.ran(func, args, kwargs), flat)
        locked = kwargs.pop("pin_memory", None)
        out = func(*args, **kwargs)
        return self.pin(out) if locked else out

    def pin(self, t: Tensor) -> Tensor:
        """In memory of the host that the device can read."""
        return t

    def _reads_a_size(self, func: Any, args: Any, kwargs: dict) -> bool:
        """Whether the host waits to know how much comes out."""
        if func in INDEXED and func is not aten.index.Tensor:  # a number, or values, behind a mask need no size
            return any(i is not None and i.dtype == torch.bool for i in args[1]) and args[2].dim() > 0
        if func is aten.index.Tensor:
            return any(i is not None and i.dtype == torch.bool for i in args[1])
        if func is aten.repeat_interleave.Tensor:
            return kwargs.get("output_size") is None
        return func in SIZES


def _there(t: Tensor) -> bool:
    return isinstance(t, Elsewhere)


def _held(tree: Any) -> Any:
    return tree_map_only(Elsewhere, lambda t: t.held, tree)


def _as_given(out: Any, flat: list[Any]) -> Any:
    """Results elsewhere; what an operation wrote in place is the tensor that it was given."""
    own = {id(t.held): t for t in flat if isinstance(t, Elsewhere)}
    leaves, spec = tree_flatten(out)
    made = [own.get(id(t)) if id(t) in own else Elsewhere(t) if isinstance(t, Tensor) else t for t in leaves]
    return tree_unflatten(made, spec)


@contextlib.contextmanager
def pretended(mode: _Device | None = None) -> Iterator[Counter[str]]:
    """Inside, `ELSEWHERE`, or the device of a `mode`, is a device of this machine."""
    mode, plain, cast = mode or _Device(ELSEWHERE), torch.tensor, torch.autocast
    _modes.append(mode)

    def tensor(*args: Any, device: Any = None, **options: Any) -> Tensor:  # torch's own asks no mode
        made = plain(*args, **options)
        return made if device is None else made.to(device)

    def autocast(device_type: str, *args: Any, **options: Any) -> torch.autocast:
        return cast("cpu" if device_type in mode.names else device_type, *args, **options)

    torch.tensor, torch.autocast = tensor, autocast  # type: ignore[misc,assignment]
    try:
        with mode:
            yield mode.reads
    finally:
        torch.tensor, torch.autocast = plain, cast  # type: ignore[misc]
        _modes.pop()
