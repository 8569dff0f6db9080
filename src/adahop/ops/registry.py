"""The registry: one operation, up to three forms, and the only place that asks which of them runs.

An operation is called like a function. Its `cpu` form (numba) runs on the CPU's tensors and its `cuda` form (Triton) on
a GPU's; a form that is not there, or that answers `NotImplemented` as it does not serve these arguments, leaves them to
`reference`, plain torch on any device.

Set ADAHOP_REFERENCE=1 to run the reference everywhere. ADAHOP_TRITON=1 sends any tensor to the GPU's kernels:
with TRITON_INTERPRET=1 they run on the CPU, slowly, which is how they are tested without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Form = Callable[..., Any]
OPS: dict[str, Op] = {}


def uncast(t: Tensor) -> torch.autocast:
    """Inside, operations where `t` lies keep the precision of their arguments, whatever autocast is around."""
    return torch.autocast(t.device.type, enabled=False)


def on_device(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Inside, kernels run where `t` lies: Triton launches on the current device, whatever it is given."""
    elsewhere = t.is_cuda and t.device.index != torch.cuda.current_device()
    return torch.cuda.device(t.device) if elsewhere else contextlib.nullcontext()


class Op:
    """One operation: `op(*args)`, or one of its forms by name."""

    def __init__(self, name: str, reference: Form, cpu: Form | None, cuda: str | None, by: int):
        self.name, self.reference, self.cpu, self._cuda, self.by = name, reference, cpu, cuda, by
        self.__doc__ = reference.__doc__

    @functools.cached_property
    def cuda(self) -> Form | None:
        """Imported at its first use; None where Triton is not installed."""
        if self._cuda is None:
            return None
        module, _, name = self._cuda.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as e:
            if (e.name or "").partition(".")[0] != "triton":
                raise
            return None

    def form(self, t: Tensor) -> str:
        """Which form runs on a tensor's device: "reference", "cpu" or "cuda"."""
        if os.environ.get("ADAHOP_REFERENCE"):
            return "reference"
        if t.is_cuda or os.environ.get("ADAHOP_TRITON"):
            return "reference" if self.cuda is None else "cuda"
        return "cpu" if t.is_cpu and self.cpu is not None else "reference"

    def __call__(self, *args: Any, **options: Any) -> Any:
        at = args[self.by]
        t = at if isinstance(at, Tensor) else at[0]
        with on_device(t):
            out = getattr(self, self.form(t))(*args, **options)
        return self.reference(*args, **options) if out is NotImplemented else out

    def __repr__(self) -> str:
        return f"<op {self.name}>"


def register(name: str, *, reference: Form, cpu: Form | None = None, cuda: str | None = None, by: int = 0) -> Op:
    """Add an operation. `cuda` is "module:function", as Triton is imported only where it is needed.

    The device of argument `by`, a tensor or a tuple that starts with one, decides which form runs.
    """
    OPS[name] = Op(name, reference, cpu, cuda, by)
    return OPS[name]
