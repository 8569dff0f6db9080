"""What was measured, for people: a table on the screen, a plot on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from adahop_lab.plots import COLOURS, INK, _dress, _save

COLUMNS = {
    "method": ("method", "{}"),
    "threads": ("threads", "{}"),
    "edges_per_s": ("M edges/s", "{:.2f}"),
    "spread": ("quartiles", "{}"),
    "ratio_dgl_uniform": ("/ dgl uniform", "{:.2f}"),
    "ratio_dgl_int32": ("/ dgl int32", "{:.2f}"),
    "ratio_pyg_uniform": ("/ pyg uniform", "{:.2f}"),
    "of_limit": ("of limit", "{:.2f}"),
    "bytes_per_edge": ("bytes/edge", "{:.1f}"),
    "bytes_per_node": ("bytes/node", "{:.1f}"),
    "seconds": ("s/epoch", "{:.3f}"),
    "degree": ("degree", "{}"),
    "us_per_batch": ("µs/batch", "{:.0f}"),
}


def cell(key: str, row: dict[str, Any]) -> str:
    value = row.get(key)
    if value is None:
        return "-"
    if key == "edges_per_s":
        value = value / 1e6
    if key == "spread":
        unit = 1.0 if "seconds" in row or "us_per_batch" in row else 1e6
        return " – ".join(f"{v / unit:.3g}" for v in value)
    return COLUMNS[key][1].format(value)


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Those that any row has something to say in."""
    return [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    keys = columns(rows)
    out = Table(box=None, pad_edge=False)
    for key in keys:
        wide: dict[str, Any] = {"overflow": "fold", "min_width": 24} if key == "method" else {"justify": "right"}
        out.add_column(COLUMNS[key][0], **wide)
    for row in rows:
        out.add_row(*(escape(cell(key, row)) for key in keys))
    return out


def markdown(rows: Sequence[dict[str, Any]], keys: Sequence[str] | None = None) -> str:
    """The same table for a page."""
    keys = columns(rows) if keys is None else keys
    lines = [[COLUMNS[key][0] for key in keys], ["---"] + ["---:"] * (len(keys) - 1)]
    lines += [[cell(key, row) for key in keys] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def bars(rows: Sequence[dict[str, Any]], path_stem: str | Path) -> list[Path]:
    """A bar a row with its quartiles, ours and the peers' in two colours; a panel a number of threads."""
    from matplotlib.figure import Figure

    key = "seconds" if "seconds" in rows[0] else "edges_per_s"
    counts = sorted({row["threads"] for row in rows})
    names = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(4 + 4 * len(counts), 1.2 + 0.32 * len(names)), layout="constrained")
    unit = 1e6 if key == "edges_per_s" else 1.0
    for ax, n in zip(figure.subplots(1, len(counts), squeeze=False, sharey=True)[0], counts, strict=True):
        mine = {row["method"]: row for row in rows if row["threads"] == n}
        values = [mine[name][key] / unit if name in mine else 0.0 for name in names]
        spread = [[v / unit for v in mine[name]["spread"]] if name in mine else [0.0, 0.0] for name in names]
        error = [[max(v - s[0], 0) for v, s in zip(values, spread, strict=True)],
                 [max(s[1] - v, 0) for v, s in zip(values, spread, strict=True)]]  # fmt: skip
        colours = [COLOURS[1] if mine.get(name, {}).get("peer") else COLOURS[0] for name in names]
        ax.barh(range(len(names)), values, xerr=error, color=colours, height=0.7, ecolor=INK)
        ax.set_yticks(range(len(names)), names)
        ax.set_title(f"{n} thread{'s' if n > 1 else ''}", color=INK, fontsize=10)
        _dress(ax, "M edges/s" if key == "edges_per_s" else COLUMNS[key][0])
    figure.axes[0].invert_yaxis()
    return _save(figure, Path(path_stem))
