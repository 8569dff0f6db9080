"""What a model remembers to spend fewer samples. Names combine: "exact" first layer, "history" or "snapshot" above."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adahop.checks import one_of
from adahop.graph import Graph
from adahop.memory.attended import AttendedFirst, AttendedVariate
from adahop.memory.fixed import ControlVariate, FirstLayer, Memory, pre_aggregate

ESTIMATORS = ("plain", "history", "snapshot", "exact", "exact+history", "exact+snapshot")
FIXED: dict[str, Any] = {"first": FirstLayer, "hidden": ControlVariate}
ATTENDED: dict[str, Any] = {"first": AttendedFirst, "hidden": AttendedVariate}

__all__ = [
    "ATTENDED", "ESTIMATORS", "FIXED", "AttendedFirst", "AttendedVariate", "ControlVariate", "FirstLayer", "Memory",
    "build", "pre_aggregate",
]  # fmt: skip


def build(
    estimator: str, kinds: dict[str, Any], graph: Graph, x: Tensor, widths: list[int], dtype: torch.dtype
) -> nn.ModuleDict:
    """The memories of an estimator's name, by layer; `widths` are those of the layers' inputs."""
    parts = one_of(estimator, ESTIMATORS, "estimator").split("+")
    memories = nn.ModuleDict()
    if "exact" in parts:
        memories["0"] = kinds["first"](graph, x)
    for layer, width in enumerate(widths):
        if parts[-1] in ("history", "snapshot") and str(layer) not in memories:
            memories[str(layer)] = kinds["hidden"](graph, width, parts[-1], dtype)
    return memories.to(x.device)
