"""Checks of what users pass in: one sentence for a mistake, *must ..., got ...*."""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adahop.errors import IdError, InputError, KindError, RoomError, no_room


@contextlib.contextmanager
def room_for(what: str) -> Iterator[None]:
    """Inside, an out-of-memory error names what needed how much."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if isinstance(e, RoomError) or not no_room(e):
            raise
        found = AMOUNT.search(str(e))
        amount = "more memory" if found is None else f"{_gib(*found.groups()):.3g} GiB more"
        raise RoomError(f"{what} must have room: it needs {amount}, got an allocation that failed") from None


AMOUNT = re.compile(r"allocate (\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB|TiB|PiB|EiB)")


def _gib(number: str, unit: str) -> float:
    return float(number) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}.get(unit, 2**50) / 2**30


def tell(sentence: str) -> None:
    """A warning at the line of the user's that led here, past the frames of the libraries in between."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(" ".join(sentence.split()), stacklevel=level)


LIBRARIES = ("adahop", "torch", "torch_geometric", "lightning", "pytorch_lightning", "contextlib")


def one_of(value: Any, known: Iterable[str], what: str) -> str:
    """`value` if it is known, else an error that names the nearest known word."""
    words = list(known)
    if isinstance(value, str) and value in words:
        return value
    near = difflib.get_close_matches(str(value).lower(), words, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    raise InputError(f"`{what}` must be one of {', '.join(words)}, got '{value}'{hint}")


def between(value: Any, low: float, high: float, what: str) -> float:
    """A finite number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not low <= value <= high:
        raise InputError(f"`{what}` must be a number in [{low:g}, {high:g}], got {value!r}")
    return float(value)


def count(value: Any, low: int, what: str) -> int:
    """A whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        least = f" of at least {low}" if low > -(2**63) else ""
        raise InputError(f"`{what}` must be a whole number{least}, got {value!r}")
    if value >= 2**63:
        raise InputError(f"`{what}` must be below 2^63, got {value}")
    return int(value)


def flag(value: Any, what: str) -> bool:
    """True or False, numpy's too."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"`{what}` must be true or false, got {value!r}")
    return bool(value)


def of_kind(value: Any, kind: type, what: str) -> Any:
    """An instance of a class."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise KindError(f"`{what}` must be {article} {kind.__name__}, got {type(value).__name__}")
    return value


def function(value: Any, what: str) -> Any:
    """Something that can be called, or None."""
    if value is not None and not callable(value):
        raise KindError(f"`{what}` must be a function, got {type(value).__name__}")
    return value


def device_of(value: Any, what: str = "device") -> torch.device:
    """A device that torch knows and this machine has."""
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except Exception:  # torch has many kinds for it
        known = "cpu or cuda" if torch.cuda.is_available() else "cpu"
        raise InputError(f"`{what}` must be a device of this machine, like {known}, got {value!r}") from None
    return device


def fields(value: Any, names: Iterable[str], what: str) -> Any:
    """An object with these attributes, none of them None."""
    lacking = [name for name in names if getattr(value, name, None) is None]
    if lacking:
        raise KindError(f"`{what}` must have {', '.join(lacking)}, got {type(value).__name__} without")
    return value


def implied(cls: type, fact: str, by: str) -> None:
    """Set a class's fact to True where the method that makes it true is written nearer than the fact itself."""
    for kind in cls.__mro__:
        if fact in vars(kind):
            return
        if by in vars(kind):
            setattr(cls, fact, True)
            return


def as_tensor(values: Any, what: str) -> Tensor:
    """Lists, arrays and tensors alike as a tensor."""
    if isinstance(values, Tensor):
        if values.is_meta or values.layout is not torch.strided:
            kind = "on the meta device" if values.is_meta else f"of layout {values.layout}; its to_dense() is"
            raise KindError(f"`{what}` must be a dense tensor with values, got one {kind}")
        values = values.detach() if values.requires_grad else values
        wider = WIDER.get(str(values.dtype).removeprefix("torch."))
        return values if wider is None else values.to(getattr(torch, wider))
    dtype = ""
    try:
        array = np.asarray(values)
        dtype = f" of dtype {array.dtype}" if isinstance(values, np.ndarray) else ""
        known = np.dtype(WIDER.get(array.dtype.name, array.dtype.newbyteorder("=")))  # torch knows no other order
        return torch.as_tensor(array if array.flags.writeable and array.dtype == known else array.astype(known))
    except (TypeError, ValueError, RuntimeError):
        raise KindError(f"`{what}` must be an array of numbers, got {type(values).__name__}{dtype}") from None


WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}  # torch has these types, but compares none of them


def real(t: Tensor, what: str) -> Tensor:
    """Numbers that are not complex."""
    if t.is_complex():
        raise KindError(f"`{what}` must hold real numbers, got dtype {t.dtype}")
    return t


def whole(values: Any, what: str) -> Tensor:
    """A one-dimensional int64 tensor; an empty float array counts as empty."""
    t = as_tensor(values, what)
    if t.numel() == 0:
        t = t.long()
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise KindError(f"`{what}` must hold whole numbers, got dtype {t.dtype}")
    if t.dim() != 1:
        raise InputError(f"`{what}` must be one-dimensional, got shape {tuple(t.shape)}")
    return t.long()


def edge_pairs(values: Any, what: str = "edge_index") -> Tensor:
    """Edges as [2, E] int64, sources and targets."""
    t = as_tensor(values, what)
    if t.numel() == 0:
        t = t.reshape(2, 0).long()
    if t.dim() != 2 or t.shape[0] != 2:
        raise InputError(f"`{what}` must have shape [2, E], got {tuple(t.shape)}")
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        raise KindError(f"`{what}` must hold whole numbers, got dtype {t.dtype}")
    return t.long()


def in_range(ids: Tensor, n: int, what: str) -> Tensor:
    """Every id in [0, n); the error names the first that is not."""
    low, high = map(int, torch.aminmax(ids)) if ids.numel() else (0, n - 1)
    if low < 0 or high >= n:
        at = int(((ids < 0) | (ids >= n)).nonzero()[0])
        raise IdError(f"`{what}` must be in [0, {n}), got {what}[{at}] = {int(ids[at])}")
    return ids


def node_ids(values: Any, n: int, what: str = "seeds") -> Tensor:
    """Node ids, or a boolean mask of length n, as an int64 tensor."""
    t = as_tensor(values, what)
    if t.dtype == torch.bool:
        if t.dim() != 1 or t.numel() != n:
            raise InputError(f"a mask for `{what}` must have {n} entries, got shape {tuple(t.shape)}")
        return t.nonzero().flatten()
    if t.dtype == torch.uint8 and t.numel() == n > 2 and int(t.max()) <= 1:
        raise KindError(f"a mask for `{what}` must be of bool, got uint8, which are ids")
    if t.dim() == 0:
        t = t[None]
    return in_range(whole(t, what), n, what)


def edge_weights(values: Any, m: int, what: str = "weight") -> Tensor:
    """Finite, non-negative float32 weights, one per edge; the error names the first bad edge."""
    t = as_tensor(values, what)
    if t.dim() == 2 and t.shape[1] == 1:
        t = t[:, 0]
    if t.dim() != 1 or t.numel() != m:
        raise InputError(f"`{what}` must have one number per edge, {m} in all, got shape {tuple(t.shape)}")
    t = real(t, what).float()
    bad = ~(torch.isfinite(t) & (t >= 0))
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise InputError(f"`{what}` must be finite and not negative, got {what}[{at}] = {float(t[at])}")
    return t


def edge_features(values: Any, m: int, what: str = "edge_attr") -> Tensor:
    """Finite float32 features, a row per edge; one number per edge is a row of one."""
    t = as_tensor(values, what)
    t = t.unsqueeze(1) if t.dim() == 1 else t
    if t.dim() != 2 or len(t) != m:
        raise InputError(f"`{what}` must have a row per edge, {m} in all, got shape {tuple(t.shape)}")
    t = real(t, what).float()
    if not bool(torch.isfinite(t).all()):
        at = int((~torch.isfinite(t)).any(1).nonzero()[0])
        raise InputError(f"`{what}` must be finite, got {what}[{at}] = {t[at].tolist()}")
    return t
