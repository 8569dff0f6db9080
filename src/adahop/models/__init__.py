"""Models: message passing over blocks, and exact inference over the whole graph."""

from __future__ import annotations

import inspect
from typing import Any

from adahop.checks import InputError, one_of, room_for
from adahop.features import Schema
from adahop.models.base import GNN
from adahop.models.gat import GAT, GATConv, GATv2, GATv2Conv
from adahop.models.gcn import GCN, SAGE, GCNConv, SAGEConv
from adahop.models.geniepath import BreadthConv, GeniePath
from adahop.models.hgt import HGT
from adahop.models.typed import RGAT, RGCN, TypedGNN
from adahop.sum import Conv

MODELS: dict[str, type[GNN]] = {
    "gcn": GCN,
    "sage": SAGE,
    "gat": GAT,
    "gatv2": GATv2,
    "geniepath": GeniePath,
    "rgcn": RGCN,
    "rgat": RGAT,
    "hgt": HGT,
}

__all__ = [
    "GAT", "GCN", "GNN", "HGT", "MODELS", "RGAT", "RGCN", "SAGE", "BreadthConv", "Conv", "GATConv", "GATv2",
    "GATv2Conv", "GCNConv", "GeniePath", "SAGEConv", "TypedGNN", "make",
]  # fmt: skip


def make(name: str, inputs: int | Schema, hidden: int, outputs: int, **options: Any) -> GNN:
    """A model by name: gcn, sage, gat, gatv2, geniepath; for typed graphs rgcn, rgat, hgt (`inputs` is a Schema)."""
    kind = MODELS[one_of(name, MODELS, "model")]
    known = options_of(name)
    for option in options:
        if option not in known:
            raise InputError(f"an option of model '{name}' must be one of {', '.join(known)}, got '{option}'")
    with room_for(f"a {name} of width {hidden}"):
        return kind(inputs, hidden, outputs, **options)  # type: ignore[arg-type]


def options_of(name: str) -> list[str]:
    """What a model's constructors take by name beside its widths."""
    found = [p for c in MODELS[name].__mro__ if issubclass(c, GNN) for p in inspect.signature(c.__init__).parameters]
    hidden = ("self", "inputs", "hidden", "outputs", "args", "options")
    return [p for p in dict.fromkeys(found) if p not in hidden]
