"""What would make the host wait for a device, or give a tensor a shape that depends on numbers in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "lift_fresh",  # the last is torch.tensor of the host's numbers
}  # fmt: skip


class NoWaiting(TorchDispatchMode):
    """Inside, operations of torch that wait are errors; `aside(f)` is f without the rule."""

    def __init__(self) -> None:
        super().__init__()
        self.strict, self.seen = True, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.seen += 1
        if self.strict:
            assert name not in WAITS, name
            given = [t for a in args for t in (a if isinstance(a, list | tuple) else [a]) if torch.is_tensor(t)]
            if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
                assert not any(t.dtype == torch.bool for t in given[1:]), f"{name} by a mask"
            if name == "repeat_interleave":
                assert (kwargs or {}).get("output_size") is not None, "a length that repeats decide"
        return func(*args, **(kwargs or {}))

    def aside(self, f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.strict, was = False, self.strict
            try:
                return f(*args, **options)
            finally:
                self.strict = was

        return call
