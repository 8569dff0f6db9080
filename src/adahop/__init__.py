"""adahop: samplers that learn which neighbours matter, for training graph neural networks on large graphs."""

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
__all__ = ["METHODS", "Block", "Graph", "InputError", "Loader", "fit", "load", "make", "models", "watch"]
