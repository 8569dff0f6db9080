"""`adahop convert`: tables, an OGB folder or a saved PyG Data as one .npz."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from adahop.convert import convert


def start(source: list[str], out: str, **options: Any) -> None:
    """Convert, with a bar per file (without a terminal: a line), and print what was written."""
    screen = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        tasks: dict[Path, int] = {}

        def tell(path: Path, done: int, total: int) -> None:
            if path not in tasks:
                tasks[path] = progress.add_task(f"reading {path.name}", total=total)
            progress.update(tasks[path], completed=done)  # type: ignore[arg-type]
            if progress.disable and done == total:
                print(f"read {path}", file=sys.stderr)

        meta = convert(source if len(source) > 1 else source[0], out, tell=tell, **options)
    train, val, test = meta["split"]
    split = f"{train:,} / {val:,} / {test:,} to train, validate and test on"
    if "directed" in meta:
        kinds, relations = (", ".join(f"{n:,} {name}" for name, n in meta[what].items()) for what in ("nodes", "edges"))
        print(f"{out}: {kinds}; edges: {relations}; {split}")
        return
    print(
        f"{out}: {meta['nodes']:,} nodes, {meta['edges']:,} directed edges, {meta['features']:,} features, "
        f"{meta['classes']:,} {'labels' if meta['task'] == 'multilabel' else 'classes'}, {split}"
    )
