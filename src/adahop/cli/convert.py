"""`adahop convert`: tables, an OGB folder or a saved PyG Data as one .npz."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from adahop.convert import convert as run


def convert(
    source: Annotated[list[str], typer.Argument(help="edges features labels; or one OGB folder or .pt file.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The .npz to write, or with --mmap the folder.")],
    split: Annotated[
        str | None, typer.Option(help="random:60,20,20 or a folder with train.csv, val.csv, test.csv.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of a random split.")] = 0,
    ids: Annotated[str, typer.Option(help="numbers: 0, 1, ... as the rows of features; names: any words.")] = "numbers",
    undirected: Annotated[bool, typer.Option("--undirected", help="Add the reverse of every edge.")] = False,
    name: Annotated[str | None, typer.Option(help="The data set's name; default the file's.")] = None,
    mmap: Annotated[bool, typer.Option("--mmap", help="Write a folder that is mapped, for large graphs.")] = False,
) -> None:
    """Check the files of a graph and write them as one .npz for `--dataset`.

    Edges: .csv, .tsv, .txt (also .gz) or .parquet with columns src, dst and optionally weight, header or not.
    Features: .npy, scipy's .npz or a table. Labels: .npy or a table with a label, or id and label, per row.
    """
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

        meta = run(source if len(source) > 1 else source[0], out, split=split, seed=seed, ids=ids,
                   undirected=undirected, name=name, tell=tell, mmap=mmap)  # fmt: skip
    train, val, test = meta["split"]
    print(
        f"{out}: {meta['nodes']:,} nodes, {meta['edges']:,} directed edges, {meta['features']:,} features, "
        f"{meta['classes']:,} {'labels' if meta['task'] == 'multilabel' else 'classes'}, "
        f"{train:,} / {val:,} / {test:,} to train, validate and test on"
    )
