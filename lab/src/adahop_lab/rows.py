"""Rows of results: a JSON object per line of a file that grows as runs end."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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


class Lines:
    """Rows of a file by what names them: what is there is not run again."""

    def __init__(self, path: str | Path, names: Sequence[str]):
        self.path, self.names, self.began = Path(path), tuple(names), time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a line that a kill cut off is run again
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")
        self.rows = {self.key(row): row for row in map(json.loads, whole.splitlines())}

    def key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.names)

    def add(self, row: Row) -> Row:
        self.rows[self.key(row)] = row
        add_row(self.path, row)
        return row

    def fill(
        self, tasks: Iterable[tuple], run: Callable[..., Row], *given: Any, jobs: int = 0, seconds: float = float("inf")
    ) -> bool:
        """Add the row `run(task, *given)` of each task that is not there, in `jobs` processes (0: in this one).

        A task is the tuple of what names its row. No run begins so many seconds after the file was opened; whether all
        rows are there. How far it is stands on the screen.
        """
        todo = [task for task in dict.fromkeys(tasks) if task not in self.rows]
        print(f"{len(self.rows)} runs are there, {len(todo)} to do", flush=True)
        for at, row in enumerate(_ended(todo, run, given, jobs), 1):
            self.add(row)
            score = f"val {row['val']:.4f}" if "val" in row else ""
            print(f"{at}/{len(todo)}", *self.key(row), score, flush=True)
            if time.monotonic() - self.began > seconds:
                return at == len(todo)
        return True


def _ended(tasks: list[tuple], run: Callable[..., Row], given: tuple, jobs: int) -> Iterator[Row]:
    """The rows of tasks as they end."""
    if jobs == 0:
        yield from (run(task, *given) for task in tasks)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        try:
            for job in as_completed([pool.submit(run, task, *given) for task in tasks]):
                yield job.result()
        finally:
            pool.shutdown(cancel_futures=True)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for a page."""
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def replaced(page: Path, name: str, text: str) -> None:
    """The page with `text` between its marks of this name; nothing else in it changes."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    head, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{head}{begin}\n\n{text.strip()}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")
