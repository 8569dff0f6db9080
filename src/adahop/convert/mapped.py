"""A data set as a folder of mapped arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adahop.checks import InputError
from adahop.datasets.base import Dataset
from adahop.datasets.folder import save


def check_folder(out: Path) -> None:
    if not out.name or out.exists() or not out.parent.is_dir():
        raise InputError(f"`out` must be a new folder in an existing one, got {out}")


def is_npz(source: Any) -> bool:
    return isinstance(source, str | Path) and Path(source).suffix == ".npz"


def to_folder(data: Dataset, out: Path) -> dict[str, Any]:
    """Write it; returns what was written, in numbers."""
    save(data, out)
    split = [int(data[f"{part}_mask"].sum()) for part in ("train", "val", "test")]
    return {"name": data.name, "nodes": data.num_nodes, "edges": data.graph.num_edges, "features": data.x.shape[1],
            "classes": data.classes, "task": data.task, "split": split}  # fmt: skip
