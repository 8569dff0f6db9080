"""Plots of measured variance, over k or over the steps of training; a panel a layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adahop.checks import InputError, one_of
from adahop.diagnostics.report import NOTHING
from adahop.plots import COLOURS, INK, STYLES, _dress, _save


def variance_plot(rows: Sequence[dict[str, Any]], over: str, path_stem: str | Path) -> list[Path]:
    """Variance on a log scale over "k" or "step", the mean over seeds; writes .png and .svg and returns their paths.

    Where a layer has no variance but rounding its line is left out: a log scale has no place for it.
    """
    from matplotlib.figure import Figure

    one_of(over, ("k", "step"), "over")
    if not rows:
        raise InputError("`rows` must hold at least one measurement, got none")
    layers = sorted({row["layer"] for row in rows})
    names = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(4.2 * len(layers) + 2, 4.2), layout="constrained")
    for ax, layer in zip(figure.subplots(1, len(layers), squeeze=False)[0], layers, strict=True):
        for at, name in enumerate(names):
            mine = [row for row in rows if row["method"] == name and row["layer"] == layer and _is_more(row)]
            places = sorted({row[over] for row in mine})
            means = [_mean([row["variance"] for row in mine if row[over] == x]) for x in places]
            look = {"color": COLOURS[at % len(COLOURS)], "linestyle": STYLES[at % len(STYLES)]}
            ax.plot(places, means, linewidth=1.8, marker="o", markersize=3, label=name, **look)
        ax.set_yscale("log")
        _dress(ax, "drawn" if over == "k" else "training steps")
        if over == "k":
            _mark(ax, sorted({row["k"] for row in rows}))
        ax.set_title(f"layer {layer}", color=INK, fontsize=10)
    figure.axes[0].set_ylabel("E|estimate - truth|²", color=INK)
    found = dict(pair for ax in figure.axes for pair in zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    handles, labels = [found[name] for name in names if name in found], [name for name in names if name in found]
    figure.legend(handles, labels, loc="outside right center", frameon=False, handlelength=3.2, fontsize=9)
    return _save(figure, Path(path_stem))


def _is_more(row: dict[str, Any]) -> bool:
    """Whether a variance is more than rounding."""
    return row["variance"] > 0 and row.get("relative", 1.0) > NOTHING


def _mark(ax: Any, ks: Sequence[int]) -> None:
    """A log axis with a tick at each k that was tried."""
    from matplotlib.ticker import NullLocator

    ax.set_xscale("log")
    ax.set_xticks(ks, [str(k) for k in ks])
    ax.xaxis.set_minor_locator(NullLocator())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
