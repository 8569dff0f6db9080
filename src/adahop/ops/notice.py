"""A line on stderr when kernels compile, which happens once: numba keeps them on disk."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from numba.core import config, event

SAYS = "adahop compiles its kernels once, about 15 s in all, each when it is first needed; they are kept for later runs"


def first_time() -> bool:
    """Whether no process has printed it before; a file beside the cached kernels notes that."""
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
    """Prints a line on stderr when the first kernel compiles, once, also over later processes.

    Each kernel compiles when it is first needed, for a second or two. On a terminal the line counts them.
    """

    def __init__(self) -> None:
        self.told, self.tells, self.deep, self.many, self.took, self.began = False, False, 0, 0, 0.0, 0.0

    def on_start(self, event: Any) -> None:
        kernel = getattr(event.data.get("dispatcher"), "py_func", None)
        if not self.told and str(getattr(kernel, "__module__", "")).startswith("adahop."):
            self.told, self.tells = True, first_time()
            if self.tells:
                print(SAYS, end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
        if self.deep == 0:
            self.began = time.perf_counter()
        self.deep += 1  # a kernel compiles those that it calls

    def on_end(self, event: Any) -> None:
        self.deep, self.many = self.deep - 1, self.many + 1
        if self.deep == 0:
            self.took += time.perf_counter() - self.began
        if self.tells and sys.stderr.isatty():
            line = f"\r{SAYS}: {self.many} so far, {self.took:.0f} s"
            print(line, end="\n" if self.deep == 0 else "", file=sys.stderr, flush=True)


notice = Notice()
event.register("numba:compile", notice)
