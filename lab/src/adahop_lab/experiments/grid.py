"""The paper's grid of settings, searched on validation alone: test scores of these runs are not even kept."""

from __future__ import annotations

from itertools import product
from typing import Any

GRID = {
    "lr": (0.01, 0.001),
    "weight_decay": (0.0, 0.0001, 0.0005, 0.001),
    "dropout": (0.0, 0.1, 0.2, 0.3),
}
SEED = 1000  # of the search; no run that counts has it


def points() -> list[dict[str, float]]:
    return [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]


def best(tried: list[dict[str, Any]]) -> dict[str, float]:
    """The settings with the highest validation score; of equals, the first in the grid's order."""
    top = max(tried, key=lambda row: row["val"])
    return {key: top[key] for key in GRID}
