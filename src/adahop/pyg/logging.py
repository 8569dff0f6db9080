"""What a person wants to see of the draws: numbers of a batch, into a CSV file or TensorBoard."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path

from torch_geometric.data import Data, HeteroData

from adahop.checks import InputError


def stats(batch: Data | HeteroData) -> dict[str, float]:
    """Size of a batch, share of its edges left to chance, and how even their scale is.

    `scale_max` is the largest scale, `even` is (mean scale)^2 / mean scale^2 of the edges left to chance: 1 where all
    are scaled alike, small where a few stand for many.
    """
    numbers = {"nodes": float(batch.num_nodes or 0), "edges": float(batch.num_edges)}
    if getattr(batch, "blocks", None) is None:
        return numbers
    scale = [b.scale[b.drawn()] for b in batch.blocks]
    many = sum(s.numel() for s in scale)
    total, square = sum(float(s.sum()) for s in scale), sum(float(s.square().sum()) for s in scale)
    numbers["chance"] = many / max(numbers["edges"], 1.0)
    numbers["scale_max"] = max((float(s.max()) for s in scale if s.numel()), default=1.0)
    numbers["even"] = total**2 / (many * square) if many else 1.0
    return numbers


class CSVLog:
    """One row a call: `log(step, loss=0.3, **stats(batch))`. The first row names the columns; the file is appended to.

    >>> import tempfile; path = Path(tempfile.mkdtemp()) / "log.csv"
    >>> CSVLog(path)(1, loss=0.5)
    >>> path.read_text().split()
    ['step,loss', '1,0.5']
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.columns: list[str] | None = None
        if self.path.exists():
            with self.path.open(newline="") as f:
                self.columns = next(csv.reader(f), None)

    def __call__(self, step: int, **numbers: float) -> None:
        row = {"step": step, **numbers}
        fresh = self.columns is None
        self.columns = self.columns or list(row)
        strange = [name for name in row if name not in self.columns]
        if strange:
            raise InputError(f"a number of {self.path} must be one of {', '.join(self.columns)}, got '{strange[0]}'")
        with self.path.open("a", newline="") as f:
            writer = csv.DictWriter(f, self.columns, restval="", lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(row)


class TensorBoardLog:
    """The same into a TensorBoard folder; `close` writes what waits. Needs adahop[tensorboard]."""

    def __init__(self, folder: str | Path):
        try:
            self.writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder))
        except ImportError:
            raise InputError("TensorBoardLog needs tensorboard: pip install 'adahop[tensorboard]'") from None

    def __call__(self, step: int, **numbers: float) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(f"adahop/{name}", value, step)

    def close(self) -> None:
        self.writer.close()
