"""What a model remembers to spend fewer samples. Names combine: "exact" first layer, "history", "snapshot" or
"scores" (attention's normaliser) above.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from adahop.checks import InputError, one_of
from adahop.graph import Graph
from adahop.memory.attended import AttendedFirst, AttendedScores, AttendedVariate
from adahop.memory.fixed import ControlVariate, FirstLayer, Memory, pre_aggregate

ESTIMATORS = (
    "plain", "history", "snapshot", "scores", "exact", "exact+history", "exact+snapshot", "exact+scores",
)  # fmt: skip
FIXED: dict[str, Any] = {"first": FirstLayer, "hidden": ControlVariate}
ATTENDED: dict[str, Any] = {"first": AttendedFirst, "hidden": AttendedVariate, "scores": AttendedScores}

__all__ = [
    "ATTENDED", "ESTIMATORS", "FIXED", "AttendedFirst", "AttendedScores", "AttendedVariate", "ControlVariate",
    "FirstLayer", "Memory", "build", "pre_aggregate",
]  # fmt: skip


def build(
    estimator: str,
    kinds: dict[str, Any],
    graph: Graph,
    x: Tensor,
    widths: list[int],
    dtype: torch.dtype,
    heads: int = 1,
) -> nn.ModuleDict:
    """The memories of an estimator's name, by layer; `widths` are those of the layers' inputs."""
    parts = one_of(estimator, ESTIMATORS, "estimator").split("+")
    if "scores" in parts and "scores" not in kinds:
        raise InputError(f"`estimator` must not remember scores for a model without attention, got {estimator}")
    memories = nn.ModuleDict()
    if "exact" in parts:
        memories["0"] = kinds["first"](graph, x)
    for layer, width in enumerate(widths):
        if str(layer) in memories:
            continue
        if parts[-1] == "scores":
            memories[str(layer)] = kinds["scores"](graph, heads)
        elif parts[-1] in ("history", "snapshot"):
            memories[str(layer)] = kinds["hidden"](graph, width, parts[-1], dtype)
    return memories.to(x.device)
