"""One piece of work, a cell with one seed or one point of its grid, in this process or in a worker of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any

import torch

from adahop.checks import InputError
from adahop.config import Config
from adahop.datasets import load
from adahop.datasets.base import Dataset
from adahop.train import fit
from adahop_lab.experiments.catalogue import measure_of
from adahop_lab.experiments.cells import Cell
from adahop_lab.experiments.find import fetch
from adahop_lab.experiments.grid import SEED
from adahop_lab.experiments.made import machine, made_with
from adahop_lab.experiments.measure import MEASURES
from adahop_lab.experiments.store import Store


@dataclass(frozen=True)
class Setting:
    """What all pieces of one command share."""

    out: Path
    folders: tuple[Path, ...]
    device: str = "cpu"
    jobs: int = 1
    download: bool = False


@dataclass(frozen=True)
class Piece:
    """`at` is a seed, or the number of the grid's point whose settings are in `changes`."""

    cell: Cell
    at: int
    changes: dict[str, Any] = field(default_factory=dict)
    search: bool = False

    @property
    def name(self) -> str:
        return f"grid-{self.at}" if self.search else f"seed-{self.at}"


def work(piece: Piece, setting: Setting) -> dict[str, Any]:
    """Run it and leave its files; returns what a display needs. A failure is an answer too: the others go on."""
    began = time.perf_counter()
    try:
        said = _work(piece, setting)
    except Exception as e:
        reason = str(e) if isinstance(e, InputError) else f"{type(e).__name__}: {e}"
        return {"failed": " ".join(reason.split()), "traceback": traceback.format_exc()}
    return {**said, "seconds": time.perf_counter() - began}


def _work(piece: Piece, setting: Setting) -> dict[str, Any]:
    cell, store = piece.cell, Store(setting.out)
    measure = measure_of(cell)
    data = _data(cell.dataset, setting.folders, setting.download, cell.metric)
    config = None if measure == "regret" else cell.config(setting.device, **piece.changes)
    if config is not None:
        _warm(config)
    facts, times = MEASURES[measure](cell, data, config, SEED if piece.search else piece.at)
    if piece.search:
        store.keep(cell, piece.name, {"point": piece.changes, "val": facts["val"], "settings": cell.settings}, times)
        return {"val": facts["val"]}
    facts |= {"with": made_with(), "about": _about(cell, data, config), "settings": {**cell.settings, **piece.changes}}
    store.keep(cell, piece.name, facts, {**times, "machine": machine(setting.jobs, setting.device)})
    return {key: facts[key] for key in ("test", "val") if key in facts}


def _about(cell: Cell, data: Dataset, config: Config | None) -> dict[str, Any]:
    """What a reader of a cell's file wants to know of its data and its whole config."""
    if data is None or config is None:
        return {"metric": None, "data": None, "config": {**cell.settings, **cell.more}}
    size = {"nodes": data.num_nodes, "edges": data.graph.num_edges, "training": int(data.train_mask.sum())}
    return {"metric": data.metric, "data": {**size, "note": data.note}, "config": config.as_dict()}


@lru_cache(maxsize=2)
def _data(name: str, folders: tuple[Path, ...], download: bool, metric: str | None) -> Any:
    return fetch(name, list(folders), download, metric)


_warmed: set[tuple[str, str, str]] = set()


def _warm(config: Config) -> None:
    """Compile what is needed on a tiny graph first, so that no run's seconds hold it."""
    kind = (config.method, config.model, repr(config.method_options))
    if kind in _warmed:
        return
    _warmed.add(kind)
    small = tuple(max(-1, min(k, 3)) for k in config.sizes)
    with contextlib.suppress(Exception):  # what is wrong will show, and be told, in the run
        fit(load("synthetic:60,400,4,2"), config, epochs=1, sizes=small, hidden=4)


# --- processes -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Every run has one thread, so that its numbers are the same alone, beside others, and on any machine's count."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def settle() -> None:
    """The start of a worker: one thread, Ctrl-C left to its parent, and ended with it."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
