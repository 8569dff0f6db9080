"""Rows of results: a JSON object per line of a file that grows as runs end."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file; none where there is no such file."""
    path = Path(path)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def add_row(path: str | Path, row: Row) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def run_tasks(
    path: str | Path, run: Callable[..., Row], tasks: Sequence[tuple], jobs: int, *given: Any
) -> Iterator[tuple[tuple, Row]]:
    """Each task with its row, `run(task, *given)`, as it ends in one of `jobs` processes; the row is written first."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(run, task, *given): task for task in tasks}
        for job in as_completed(waiting):
            add_row(path, job.result())
            yield waiting[job], job.result()
