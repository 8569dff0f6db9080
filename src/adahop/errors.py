"""Errors that a user meets: one sentence, *must ..., got ...*. Nothing is imported here, so that they cost nothing."""

from __future__ import annotations


class InputError(ValueError):
    """Something a user passed in cannot be used; the message states what must hold, on one line."""

    def __init__(self, sentence: str = ""):
        super().__init__(" ".join(str(sentence).split()))  # a tensor's repr has many


class IdError(InputError, IndexError):
    """A node or edge id lies outside the graph."""


class KindError(InputError, TypeError):
    """A value is of the wrong type or dtype."""


class RoomError(InputError, MemoryError):
    """There is not enough memory; the message states for what, and how much."""


def no_room(e: BaseException) -> bool:
    """Whether an error means that memory ran out; torch raises RuntimeError for it, on any device."""
    words = ("out of memory", "can't allocate memory", "Unable to allocate")
    return isinstance(e, MemoryError) or any(s in str(e) for s in words)
