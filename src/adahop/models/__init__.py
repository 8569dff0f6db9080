"""Models: message passing over blocks, and exact inference over the whole graph."""

from __future__ import annotations

from typing import Any

from adahop.checks import one_of
from adahop.models.base import GNN, Conv
from adahop.models.gat import GAT, GATConv
from adahop.models.gcn import GCN, SAGE, GCNConv, SAGEConv
from adahop.models.geniepath import BreadthConv, GeniePath

MODELS: dict[str, type[GNN]] = {"gcn": GCN, "sage": SAGE, "gat": GAT, "geniepath": GeniePath}

__all__ = [
    "GAT", "GCN", "GNN", "MODELS", "SAGE", "BreadthConv", "Conv", "GATConv", "GCNConv", "GeniePath", "SAGEConv", "make",
]  # fmt: skip


def make(name: str, inputs: int, hidden: int, outputs: int, **options: Any) -> GNN:
    """A model by name: gcn, sage, gat or geniepath."""
    return MODELS[one_of(name, MODELS, "model")](inputs, hidden, outputs, **options)
