"""adahop: samplers that learn which neighbours matter, for training graph neural networks on large graphs."""

from typing import Any

from adahop import models
from adahop.block import Block
from adahop.checks import InputError
from adahop.datasets import load
from adahop.graph import Graph
from adahop.loader import Loader
from adahop.methods import METHODS, make
from adahop.train import fit
from adahop.watch import watch

__version__ = "0.1.0"
__all__ = [
    "METHODS", "Block", "Graph", "InputError", "Loader", "fit", "inference", "load", "make", "models", "pyg", "watch",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """`pyg` and `inference` are looked up when first asked for, so that they cost nothing before."""
    if name not in ("inference", "pyg"):
        raise AttributeError(f"module 'adahop' has no attribute '{name}'")
    import adahop.pyg as pyg

    return pyg if name == "pyg" else pyg.inference
