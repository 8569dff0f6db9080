"""Data sets as folders of mapped arrays: for graphs and features that do not fit into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from adahop.checks import InputError, count
from adahop.datasets.base import Dataset, make
from adahop.mapped import Folder, MappedGraph, read
from adahop.mapped.folder import MANIFEST
from adahop.mapped.graph import save as save_graph

SPLITS = ("train", "val", "test")


def is_folder(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def save(data: Dataset, out: str | Path) -> None:
    """Write a data set as a folder that `load` maps; its features are written as they are, prepared or not."""
    with Folder(out, about(data)) as folder:
        save_graph(data.graph, folder)
        folder.save("x", data.x)
        folder.save("y", data.y)
        for part in SPLITS:
            folder.save(f"{part}_idx", data[f"{part}_mask"].nonzero().flatten())


def about(data: Dataset) -> dict[str, Any]:
    """The manifest entries of a data set."""
    return {k: getattr(data, k) for k in ("name", "classes", "metric", "note")}


def open_folder(path: Path) -> Dataset:
    """The data set of a folder: graph and features mapped, labels and splits in memory."""
    arrays, meta = read(path)
    lacking = [k for k in ("x", "y", *(f"{p}_idx" for p in SPLITS)) if k not in arrays]
    if lacking:
        raise InputError(f"{path} must hold the array {lacking[0]}, got {', '.join(arrays)}")
    if arrays["x"].dtype != torch.float32:
        raise InputError(f"`x` of {path} must be float32, to be mapped, got {arrays['x'].dtype}")
    graph = MappedGraph.of(path, arrays)
    splits = {part: arrays[f"{part}_idx"] for part in SPLITS}
    classes = None if meta.get("classes") is None else count(meta["classes"], 1, "classes")
    name, metric, note = str(meta.get("name", path.name)), meta.get("metric"), str(meta.get("note", ""))
    return make(name, graph, arrays["x"], arrays["y"], splits, classes, metric, note)
