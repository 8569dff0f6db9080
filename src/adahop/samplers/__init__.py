"""Samplers: one file, one family; `adahop.methods` has the names people know."""

from adahop.samplers.base import Sampler
from adahop.samplers.neighbor import NeighborSampler

__all__ = ["NeighborSampler", "Sampler"]
