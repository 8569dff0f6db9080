"""adahop: samplers that learn which neighbours matter, for training graph neural networks on large graphs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adahop import models, pyg
    from adahop.block import Block
    from adahop.datasets import load
    from adahop.errors import InputError
    from adahop.graph import Graph
    from adahop.loader import Loader
    from adahop.methods import METHODS, make, register
    from adahop.pyg import inference  # type: ignore[no-redef]
    from adahop.train import fit
    from adahop.watcher import watch

__version__ = "0.1.0"
__all__ = [
    "METHODS", "Block", "Graph", "InputError", "Loader", "fit", "inference", "load", "make", "models", "pyg",
    "register", "watch",
]  # fmt: skip

# where each public name lives; torch is loaded with the first of them, so that `adahop --help` need not wait for it
_HOME = {
    "METHODS": "methods",
    "Block": "block",
    "Graph": "graph",
    "InputError": "errors",
    "Loader": "loader",
    "fit": "train",
    "inference": "pyg",
    "load": "datasets",
    "make": "methods",
    "register": "methods",
    "watch": "watcher",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"adahop.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    try:  # a submodule, as after an import of all of them: adahop.ops.set_threads(1)
        if not name.startswith("_"):
            return import_module(f"adahop.{name}")
    except ModuleNotFoundError as e:
        if e.name != f"adahop.{name}":
            raise
    raise AttributeError(f"module 'adahop' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
