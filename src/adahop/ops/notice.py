"""A word to the user when kernels compile, which happens once: numba keeps them on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from numba.core import config, event


def first_time() -> bool:
    """Whether no process has said it before, where it can be noted beside the kernels that are kept."""
    chosen: str = getattr(config, "CACHE_DIR", "")  # NUMBA_CACHE_DIR
    home = Path(chosen) if chosen else Path(__file__).parent / "__pycache__"
    try:
        home.mkdir(parents=True, exist_ok=True)
        (home / "adahop-kernels-compile").open("x").close()
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


class Notice(event.Listener):
    """Says so on stderr when the first of our kernels compiles, and then is silent, in later processes as well.

    Others compile when they are first needed, each for a second or two.
    """

    def __init__(self) -> None:
        self.told = False

    def on_start(self, event: Any) -> None:
        kernel = getattr(event.data.get("dispatcher"), "py_func", None)
        if not self.told and str(getattr(kernel, "__module__", "")).startswith("adahop."):
            self.told = True
            if not first_time():
                return
            print("adahop compiles its kernels once, about 20 s in all; they are kept for later runs", file=sys.stderr)

    def on_end(self, event: Any) -> None: ...


notice = Notice()
event.register("numba:compile", notice)
