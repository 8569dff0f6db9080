"""Where a cell's data lies; data that is not here is never fetched unasked, and never replaced by anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from adahop.checks import InputError
from adahop.datasets import DATASETS, load

MADE = ("digits", "stars")  # nothing to find
FOLDERS = {"ppi": "PPI", "reddit": "Reddit2", "flickr": "Flickr", "cora": "Cora", "pubmed": "PubMed"}


def roots(given: str | None) -> list[Path]:
    """The given folder, or the environment's ADAHOP_DATA and the cache of downloads."""
    if given is not None:
        return [Path(given).expanduser()]
    tries = [os.environ.get("ADAHOP_DATA"), "~/.cache/adahop"]
    return [Path(root).expanduser() for root in tries if root]


def find(name: str, folders: list[Path], download: bool = False) -> tuple[str, Path | None] | None:
    """What `load` must be given for a data set: (name or path, root); None where it is not here."""
    if name in MADE or name.startswith("synthetic:"):
        return name, None
    for root in folders:
        for end in (".npz", ".pt"):
            if (root / f"{name}{end}").is_file():
                return str(root / f"{name}{end}"), None
        if (root / FOLDERS.get(name, name.replace("-", "_"))).is_dir() and name in DATASETS:
            return name, root
    return (name, folders[0]) if download and name in DATASETS else None


def fetch(name: str, folders: list[Path], download: bool = False, metric: str | None = None) -> Any:
    """The data set, with the cell's metric."""
    if name == "stars":
        return None
    place = find(name, folders, download)
    if place is None:
        raise InputError(f"data set '{name}' must lie in one of {', '.join(map(str, folders))}, got none")
    data = load(*place)
    if metric is not None:
        data.metric = metric
    return data
