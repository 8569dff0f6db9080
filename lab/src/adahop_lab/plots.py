"""Plots of what was measured, as PNG and SVG; matplotlib is loaded only when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adahop.checks import InputError, one_of
from adahop.diagnostics.report import ROUNDING
from adahop.records import write_whole

# Okabe and Ito's colours, which colour-blind readers can tell apart; 7 colours and 4 styles make 28 looks
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
HEAD = 0.15  # share of a run whose scores may fall below the frame: the differences worth seeing come later
INK, FAINT = "#333333", "#dddddd"

History = Sequence[Mapping[str, float]]  # one run: rows with epoch, val and seconds


def convergence(histories: Mapping[str, Sequence[History]], metric: str, path_stem: str | Path) -> list[Path]:
    """Validation score against epochs and against seconds of training: mean and band (one deviation) over the runs.

    `histories` holds a list of runs a method. Writes `path_stem`.png and .svg, and returns their paths.
    """
    from matplotlib.figure import Figure

    known = {name: [_finite(run) for run in runs if _finite(run)] for name, runs in histories.items()}
    curves = {name: _curves(runs) for name, runs in known.items() if runs}
    if not curves:
        raise InputError("`histories` must hold at least one run with an epoch, got none")
    order = sorted(curves, key=lambda name: -curves[name][0][1][-1])
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    alpha = 0.15 if len(curves) < 6 else 0.07  # many bands would turn to mud
    for name in order:
        at = list(histories).index(name)  # a method keeps its look however it ends
        look = {"color": COLOURS[at % len(COLOURS)], "linestyle": STYLES[at % len(STYLES)]}
        for ax, (x, mean, spread) in zip(axes, curves[name], strict=True):
            ax.plot(x, mean, linewidth=1.8, label=name, marker="o" if len(x) == 1 else None, **look)
            ax.fill_between(x, mean - spread, mean + spread, color=look["color"], alpha=alpha, linewidth=0)
    for ax, label in zip(axes, ("epoch", "seconds of training"), strict=True):
        _dress(ax, label)
    axes[0].set_ylabel(f"validation {metric}", color=INK)
    axes[0].set_ylim(*_frame([c[0] for c in curves.values()]))
    _stretch(axes[1], [c[1][0][-1] for c in curves.values()])
    many = max(len(runs) for runs in histories.values())
    of = f": mean and one deviation over {many} runs" if many > 1 else ""
    figure.suptitle(f"Validation {metric}{of}", color=INK, fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, handlelength=3.2,
                  title="best at the end first", title_fontsize=9, fontsize=9)  # fmt: skip
    return _save(figure, Path(path_stem))


def _finite(run: History) -> History:
    return [row for row in run if np.isfinite(row["val"])]


def _curves(runs: Sequence[History]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(x, mean, deviation) over epochs and over seconds; a run that stopped early keeps its last score."""
    epochs = [np.array([row["epoch"] for row in run], float) for run in runs]
    seconds = [np.array([row["seconds"] for row in run], float) for run in runs]
    scores = [np.array([row["val"] for row in run], float) for run in runs]
    steps = np.arange(max(x[0] for x in epochs), max(x[-1] for x in epochs) + 1)
    points = 1 if len(steps) == 1 else max(2 * len(steps), 50)
    time = np.linspace(max(x[0] for x in seconds), max(x[-1] for x in seconds), points)
    out = []
    for grid, places in ((steps, epochs), (time, seconds)):
        table = np.stack([np.interp(grid, x, y) for x, y in zip(places, scores, strict=True)])
        out.append((grid, table.mean(0), table.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(grid))))
    return out


def _frame(curves: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """From the lowest score after the head of the runs to the highest, with some air."""
    late = [slice(int(HEAD * len(mean)), None) for _, mean, _ in curves]
    low = min(float((mean - spread)[part].min()) for (_, mean, spread), part in zip(curves, late, strict=True))
    high = max(float((mean + spread).max()) for _, mean, spread in curves)
    air = max(0.06 * (high - low), 1e-3)
    return low - air, high + air


def _stretch(ax: Any, ends: list[float]) -> None:
    """A log axis where some methods are so fast that a plain one would hide them."""
    if max(ends) > 8 * min(ends) > 0:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel("seconds of training (log scale)", color=INK)


def _dress(ax: Any, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    if label == "epoch":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_xlabel(label, color=INK)
    ax.grid(color=FAINT, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#999999")
    ax.tick_params(colors=INK, labelsize=9)
    ax.margins(x=0.02)


def _save(figure: Any, stem: Path) -> list[Path]:
    from matplotlib import rc_context

    paths = []
    with rc_context({"svg.hashsalt": "adahop", "svg.fonttype": "none"}):  # equal scores, equal files; text stays text
        for kind in ("png", "svg"):
            buffer = io.BytesIO()
            plain = {"Date": None} if kind == "svg" else None
            figure.savefig(buffer, format=kind, dpi=160, metadata=plain)
            paths.append(stem.with_name(f"{stem.name}.{kind}"))
            write_whole(paths[-1], buffer.getvalue())
    return paths


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
    return row["variance"] > 0 and row.get("relative", 1.0) > ROUNDING


def _mark(ax: Any, ks: Sequence[int]) -> None:
    """A log axis with a tick at each k that was tried."""
    from matplotlib.ticker import NullLocator

    ax.set_xscale("log")
    ax.set_xticks(ks, [str(k) for k in ks])
    ax.xaxis.set_minor_locator(NullLocator())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
