"""Samplers, one file per family; `adahop.methods` lists the methods by name."""

from adahop.samplers.base import Sampler
from adahop.samplers.bliss import Bliss
from adahop.samplers.cluster import ClusterGCN
from adahop.samplers.labor import Labor
from adahop.samplers.layer import FastGCN, Ladies, LayerSampler
from adahop.samplers.learned import ASGCN
from adahop.samplers.neighbor import NeighborSampler
from adahop.samplers.random_nodes import RandomNodes
from adahop.samplers.saint import GraphSAINT

__all__ = [
    "ASGCN", "Bliss", "ClusterGCN", "FastGCN", "GraphSAINT", "Labor", "Ladies", "LayerSampler", "NeighborSampler",
    "RandomNodes", "Sampler",
]  # fmt: skip
