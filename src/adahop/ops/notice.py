"""A word to the user when kernels compile, which happens once: numba keeps them on disk."""

from __future__ import annotations

import sys
from typing import Any

from numba.core import event


class Notice(event.Listener):
    """Says so on stderr when the first of our kernels compiles in this process, and then is silent."""

    def __init__(self) -> None:
        self.told = False

    def on_start(self, event: Any) -> None:
        kernel = getattr(event.data.get("dispatcher"), "py_func", None)
        if not self.told and str(getattr(kernel, "__module__", "")).startswith("adahop."):
            self.told = True
            print("adahop compiles its kernels once, about 20 s in all; they are kept for later runs", file=sys.stderr)

    def on_end(self, event: Any) -> None: ...


notice = Notice()
event.register("numba:compile", notice)
