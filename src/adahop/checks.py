"""Checks at the door: one sentence for a user's mistake, *must ..., got ...*."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor


class InputError(ValueError):
    """Something a user passed in cannot be used; the message says what must hold."""


class IdError(InputError, IndexError):
    """A node or edge id lies outside the graph."""


class KindError(InputError, TypeError):
    """A value is of the wrong type or dtype."""


def one_of(value: Any, known: Iterable[str], what: str) -> str:
    """`value` if it is known, else an error that names the nearest known word."""
    words = list(known)
    if value in words:
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
        raise InputError(f"`{what}` must be a whole number of at least {low}, got {value!r}")
    return int(value)


def flag(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"`{what}` must be true or false, got {value!r}")
    return value


def as_tensor(values: Any, what: str) -> Tensor:
    """Lists, arrays and tensors alike as a tensor."""
    if isinstance(values, Tensor):
        return values.detach()
    try:
        array = np.asarray(values)
        if not array.flags.writeable or array.dtype == np.uint32:
            array = array.astype(np.int64 if array.dtype == np.uint32 else array.dtype)
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError):
        raise KindError(f"`{what}` must be an array of numbers, got {type(values).__name__}") from None


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


def in_range(ids: Tensor, n: int, what: str) -> Tensor:
    """Every id in [0, n); the error names the first that is not."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= n):
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
    if t.dim() == 0:
        t = t[None]
    return in_range(whole(t, what), n, what)


def edge_weights(values: Any, m: int, what: str = "weight") -> Tensor:
    """Finite, non-negative float32 weights, one an edge; the error names the first bad edge."""
    t = as_tensor(values, what)
    if t.dim() == 2 and t.shape[1] == 1:
        t = t[:, 0]
    if t.dim() != 1 or t.numel() != m:
        raise InputError(f"`{what}` must have one number an edge, {m} in all, got shape {tuple(t.shape)}")
    if t.is_complex():
        raise KindError(f"`{what}` must hold real numbers, got dtype {t.dtype}")
    t = t.float()
    bad = ~(torch.isfinite(t) & (t >= 0))
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise InputError(f"`{what}` must be finite and not negative, got {what}[{at}] = {float(t[at])}")
    return t
