"""A GPU without one: tensors elsewhere that say they lie on cuda:0, see `elsewhere` and `launches`.

Tensors of two devices in one operation are an error, and so is a launch whose arguments the GPU could not read. What a
kernel would have computed comes from the operation's reference. A step is captured as on a GPU: nothing of it may wait
for the device or come from the host's memory; afterwards all is as it was before, and a replay does the same operations
on the same memory again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from adahop import capture
from adahop.ops.registry import Op
from elsewhere import ELSEWHERE, Elsewhere, _Device, pretended
from launches import Noted, Stand, noted

CUDA = torch.device("cuda:0")


class Graph:
    """A CUDA graph: operations, and the memory that they read and write."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what lay in memory that is older than the capture
        self.made: set[int] = set()

    def see(self, tensors: list[Tensor]) -> None:
        """These are about to be read or written."""
        for t in tensors:
            at = t.untyped_storage().data_ptr()
            if at not in self.made and at not in self.before:
                whole = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
                self.before[at] = whole, whole.clone()

    def note(self, call: Callable[[], Any], given: list[Tensor], out: Any) -> None:
        """A call, and those of its results that are no views of what it was given."""
        known = {t.untyped_storage().data_ptr() for t in given}
        made = [t for t in _held(out) if t.untyped_storage().data_ptr() not in known]
        self.made |= {t.untyped_storage().data_ptr() for t in made}
        self.calls.append((call, _held(out)))

    def end(self) -> None:
        """Nothing was run: old memory is as before."""
        for whole, old in self.before.values():
            whole.copy_(old)

    def forget(self) -> None:
        """What a capture that broke off made was never computed.

        (Of one that ends, a second capture reads the shapes of what the first made, and here computes with it.)
        """
        for _, kept in self.calls:
            for storage in {t.untyped_storage() for t in kept if t.untyped_storage().data_ptr() in self.made}:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x7F)

    def replay(self) -> None:
        for call, kept in self.calls:
            for old, new in zip(kept, _held(call()), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)

    def pool(self) -> None:
        return None


def _held(tree: Any) -> list[Tensor]:
    return [t.held if isinstance(t, Elsewhere) else t for t in tree_leaves(tree) if isinstance(t, Tensor)]


class Device(_Device, Stand):
    """The pretended GPU."""

    def __init__(self) -> None:
        super().__init__(ELSEWHERE)
        self.names.add(CUDA.type)
        self.graph: Graph | None = None  # while a step is captured
        self.dry = self.kernel = False  # while an operation is called for its launches; while its kernels are stood for
        self.stream = _Stream()
        self.pinned: set[int] = set()
        self.locked: list[Tensor] = []

    # --- the host and the device --------------------------------------------------------------------------------------

    def read(self, kind: str, what: Any = None) -> None:
        if not self.kernel:
            if self.graph is not None:
                raise RuntimeError(f"operation not permitted when stream is capturing: {what or kind}")
            super().read(kind, what)

    def sent(self, what: Any) -> None:
        if self.graph is not None and not self.kernel:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what} from the host's memory")

    def pin(self, t: Tensor) -> Tensor:
        self.locked.append(t)  # its address stays its own
        self.pinned.add(t.untyped_storage().data_ptr())
        return t

    def is_pinned(self, t: Tensor) -> bool:
        return not isinstance(t, Elsewhere) and t.untyped_storage().data_ptr() in self.pinned

    # --- kernels ------------------------------------------------------------------------------------------------------

    def given(self, arguments: Any) -> Any:
        for t in arguments:
            if isinstance(t, Tensor) and not isinstance(t, Elsewhere) and not self.is_pinned(t):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        return [t.held if isinstance(t, Elsewhere) else t for t in arguments]

    def launch(self, op: Op, args: Any, options: Any) -> Any:
        self.dry = True
        try:
            return super().launch(op, args, options)
        finally:
            self.dry = False

    def answer(self, op: Op, args: Any, options: Any) -> Any:
        graph, self.kernel = self.graph, True
        try:
            if graph is None or any(t.requires_grad for t in tree_leaves((args, options)) if isinstance(t, Tensor)):
                return self._answered(op, args, options)  # operation by operation: their gradients follow
            self.graph, given = None, _held((args, options))
            graph.see(given)
            out = self._answered(op, args, options)
            graph.note(lambda: self._replayed(op, args, options), given, out)
            return out
        finally:
            self.graph, self.kernel = graph, False

    def _answered(self, op: Op, args: Any, options: Any) -> Any:
        """By the reference; what the kernels read in the host's memory is moved first."""
        args, options = tree_map_only(Tensor, lambda t: Elsewhere(t) if self.is_pinned(t) else t, (args, options))
        return op.reference(*args, **options)

    def _replayed(self, op: Op, args: Any, options: Any) -> Any:
        self.kernel = True
        try:
            return self._answered(op, args, options)
        finally:
            self.kernel = False

    # --- operations ---------------------------------------------------------------------------------------------------

    def ran(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.graph is None or self.dry:
            return func(*args, **kwargs)
        given = _held((args, kwargs))
        self.graph.see(given)
        out = func(*args, **kwargs)
        self.graph.note(lambda: func(*args, **kwargs), given, out)
        return out

    @contextlib.contextmanager
    def capture(self, graph: Graph, **_: Any) -> Iterator[None]:
        """As torch's, the stream of a capture that breaks off stays the current one."""
        chance, self.graph = torch.get_rng_state(), graph
        stream, self.stream = self.stream, _Stream()
        try:
            yield
            self.stream = stream
        except BaseException:
            graph.forget()
            raise
        finally:
            self.graph = None
            torch.set_rng_state(chance)
            graph.end()

    def set_stream(self, stream: _Stream) -> None:
        self.stream = stream


class _Named(TorchFunctionMode):
    """What is asked of the device "cuda" is asked of the other one: torch may have been built without CUDA."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = tuple(map(_index, args[1])) if isinstance(args[1], tuple) else _index(args[1])
            if func is Tensor.__setitem__ and isinstance(args[0], Elsewhere) and _by_number(index, args[2]):
                self.device.sent("a number for places of an index")
            return func(args[0], index, *args[2:])
        if func not in (torch.device, torch.get_device_module):
            args, kwargs = tree_map_only((str, torch.device), self._name, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _name(name: Any) -> Any:
        return ELSEWHERE if name in ("cuda", "cuda:0", torch.device("cuda"), CUDA) else name


def _index(part: Any) -> Any:
    """Numbers in a list become an index in the host's memory."""
    return torch.tensor(part, dtype=None if part else torch.long) if isinstance(part, list) else part


def _by_number(index: Any, value: Any) -> bool:
    """Whether a number is assigned to the places of an index; torch then copies it to the GPU."""
    parts = index if isinstance(index, tuple) else (index,)
    return not isinstance(value, Tensor) and any(isinstance(i, Tensor) and i.dtype != torch.bool for i in parts)


class _Stream:
    def wait_stream(self, other: _Stream) -> None:
        pass


@contextlib.contextmanager
def pretended_cuda() -> Iterator[tuple[Device, Noted]]:
    """Inside, this machine has a GPU."""
    device = Device()
    own = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "_lazy_init": lambda: None, "synchronize": lambda *_: None, "stream": lambda _: contextlib.nullcontext(),
        "Stream": _Stream, "current_stream": lambda *_: device.stream, "set_stream": device.set_stream,
        "CUDAGraph": Graph, "graph": device.capture, "is_current_stream_capturing": lambda: device.graph is not None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, what in own.items():
            patch.setattr(torch.cuda, name, what)
        patch.setattr(capture, "_restore", torch.set_rng_state)
        patch.setattr(Elsewhere, "is_cuda", True, raising=False)
        patch.setattr(Elsewhere, "device", CUDA, raising=False)
        patch.setattr(Tensor, "pin_memory", lambda t: device.pin(t.clone()))
        patch.setattr(Tensor, "is_pinned", lambda t: device.is_pinned(t))
        patch.delenv("ADAHOP_REFERENCE", raising=False)
        alone = torch.autograd.set_multithreading_enabled(False)
        with alone, noted(False, device) as launches, pretended(device), _Named(device):
            yield device, launches
