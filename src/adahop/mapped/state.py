"""State on disk: while `on_disk` holds, every large tensor that is made from nothing lies in a mapped file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from adahop.checks import InputError
from adahop.mapped.folder import scratch

LEAST = 1 << 20  # bytes; smaller tensors stay in memory
FILL = {torch.zeros: 0, torch.zeros_like: 0, torch.ones: 1, torch.ones_like: 1, torch.full: None, torch.full_like: None,
        torch.empty: 0, torch.empty_like: 0}  # fmt: skip


class _OnDisk(TorchFunctionMode):
    """Policies and histories make their state with torch.zeros and the like; none of them has to know of files."""

    def __init__(self, folder: Path, least: int):
        super().__init__()
        self.folder, self.least = folder, least

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in FILL or kwargs.get("requires_grad") or not self._on_cpu(args, kwargs):
            return func(*args, **kwargs)
        wanted = func(*args, **{**kwargs, "device": "meta"})
        if wanted.numel() * wanted.element_size() < self.least or wanted.dtype == torch.bfloat16:
            return func(*args, **kwargs)
        out = scratch(self.folder, tuple(wanted.shape), wanted.dtype)
        value = FILL[func]
        if value is None:
            value = kwargs["fill_value"] if "fill_value" in kwargs else args[1]
        if value:
            for rows in out.view(-1).split(1 << 22):
                rows.fill_(value)
        return out

    @staticmethod
    def _on_cpu(args: Any, kwargs: Any) -> bool:
        given = kwargs.get("device")
        if given is None and args and isinstance(args[0], torch.Tensor):
            given = args[0].device
        return torch.device(given or torch.get_default_device()).type == "cpu"


def on_disk(folder: str | Path | None, least: int = LEAST) -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors of at least so many bytes are made in nameless files of the folder; None changes nothing.

    >>> import tempfile
    >>> with on_disk(tempfile.mkdtemp(), least=8): state = torch.ones(2, 2)
    >>> state.tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    if folder is None:
        return contextlib.nullcontext()
    home = Path(folder)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"`state` must be a folder that can be written, got {folder} ({e.strerror})") from None
    return _OnDisk(home, least)
