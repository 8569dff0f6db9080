"""Write the tables and plots of lab/docs/ablation.md from measured rows: `python lab/benchmarks/buys.py`.

Everything between a pair of marks in the page is replaced; nothing is typed by hand.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adahop_lab.experiments.stats import paired
from adahop_lab.rows import markdown, read_rows, replaced

ROOT = Path(__file__).parents[2]
PAGE, IMAGES, RESULTS = (
    ROOT / "lab" / "docs" / "ablation.md",
    ROOT / "docs" / "img",
    ROOT / "lab" / "benchmarks" / "results",
)
NAMES = {
    "ppi_rebuilt_labels": "PPI", "amazon_computers": "computers", "tolokers": "tolokers", "cora": "Cora",
    "pubmed": "Pubmed", "blogcatalog_attr": "BlogCatalog", "flickr_small_attr": "Flickr, small",
    "coauthor_physics": "physics",
}  # fmt: skip
GAT = {
    "gat, uniform, softmax": "softmax over the sample", "gat, uniform, paper": "the paper's form",
    "gat, uniform, self-normalised": "self-normalised", "gat, tracked": "tracked, self-normalised",
    "gat, attended, scores": "attended, normaliser from scores", "gat, uniform, history": "uniform, history",
    "gat, attended, exact first": "attended, exact first layer alone", "gat, tracked, history": "tracked, history",
    "gat, tracked, snapshot": "tracked, snapshot", "gat, attended, history": "attended, history (0.1's preset)",
    "gat, everyone": "all neighbours",
}  # fmt: skip
Rows = list[dict[str, Any]]


def read(name: str) -> Rows:
    return read_rows(RESULTS / name)


def short(x: float, digits: int = 2) -> str:
    return f"{x:.{digits}f}".replace("0.", ".", 1) if abs(x) < 1 else f"{x:.{digits}f}"


class Bought:
    """The rows of what_it_buys.jsonl, by graph, parts and k."""

    def __init__(self) -> None:
        self.rows: dict[tuple, Rows] = defaultdict(list)
        for row in read("what_it_buys.jsonl"):
            self.rows[row["graph"], row["name"], row["k"]].append(row)

    def mean(self, key: tuple, what: Callable[[dict], float]) -> float:
        return statistics.fmean(map(what, self.rows[key]))

    def layers(self, key: tuple, what: str, digits: int = 2) -> str:
        return " / ".join(short(self.mean(key, lambda r: r["layers"][i][what] or 0.0), digits) for i in (0, 1))  # noqa: B023


def tracked(bought: Bought) -> str:
    rows = []
    for graph, name in NAMES.items():
        keys = [(graph, "tracked", k) for k in (2, 5)]
        cells = [bought.layers(key, what) for key in keys for what in ("over_oracle", "over_uniform")]
        rows.append([f"{name} ({len(bought.rows[keys[0]])})", *cells])
    head = ["graph (seeds)", "k = 2, over the oracle", "over uniform", "k = 5, over the oracle", "over uniform"]
    return markdown(head, rows)


def scored() -> dict[tuple, list[float]]:
    """Test scores of the settings that validation chose: the only ones with runs of seeds below 100."""
    chosen: dict[tuple, dict[tuple, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for r in read("tuned.jsonl"):
        settings = tuple(r[f] for f in ("lr", "dropout", "decay", "average"))
        chosen[r["graph"], r["method"], r["k"]][settings][r["seed"]] = r["val"] if r["seed"] >= 100 else r["test"]
    out = {}
    for case, settings in chosen.items():
        final = {s: runs for s, runs in settings.items() if all(t in runs for t in (0, 100, 101, 102))}
        best = max(final, key=lambda s: statistics.fmean(final[s][t] for t in (100, 101, 102)))
        out[case] = [final[best][s] for s in sorted(final[best]) if s < 100]
    return out


def tuned(bought: Bought) -> str:
    scores, rows = scored(), []
    for graph, name in NAMES.items():
        ours, even = scores[graph, "adahop", 2], scores[graph, "graphsage", 10]
        gap = paired(dict(enumerate(ours)), dict(enumerate(even)))
        assert gap is not None
        noise = bought.mean((graph, "adahop", 2), lambda r: r["layers"][-1]["over_uniform"])
        means = [short(statistics.fmean(s), 4) for s in (ours, even)]
        rows.append([f"{name}", short(noise, 4), *means, f"{gap.difference:+.4f} ± {gap.high - gap.difference:.4f}"])
    head = ["graph", "variance, adahop, k = 2", "score, adahop, k = 2", "score, uniform, k = 10", "difference"]
    return markdown(head, rows)


def attention(bought: Bought) -> str:
    rows = []
    for part, name in GAT.items():
        key = ("ppi_rebuilt_labels", part, -1 if part == "gat, everyone" else 5)
        score = [r["test"] for r in bought.rows[key]]
        mean = [short(statistics.fmean(score), 4), short(statistics.stdev(score), 4)]
        if key[2] < 0:
            rows.append([name, *mean, "", "", ""])
            continue
        error = " / ".join(short(bought.mean(key, lambda r: r["normaliser"][i]), 3) for i in (0, 1))  # noqa: B023
        noise = short(bought.mean(key, lambda r: r["layers"][1]["over_uniform"]), 4)
        rows.append([name, *mean, error, noise, short(bought.mean(key, lambda r: r["layers"][0]["gradient_variance"]))])
    head = [
        "draws and estimator",
        "test F1",
        "sd",
        "normaliser's error",
        "variance, second layer",
        "gradient's variance",
    ]
    return markdown(head, rows)


def budgets() -> str:
    found: dict[tuple, list[float]] = defaultdict(list)
    for r in read("budget.jsonl"):
        found[r["graph"], r["method"], r["norm"], r["k"]].append(r["ratio"])
    rows = []
    for graph, method, norm in dict.fromkeys(key[:3] for key in found):
        cells = [found.get((graph, method, norm, k), []) for k in (2, 5, 10)]
        what = "tracked" if method == "graphsage" else "adahop"
        weights = "by row" if norm == "row" else "symmetric"
        shown = [f"{short(statistics.fmean(c))} ({len(c)})" if c else "" for c in cells]
        rows.append([f"{NAMES[graph]}, {what}, weights {weights}", *shown])
    return markdown(["(seeds)", "k = 2", "k = 5", "k = 10"], sorted(rows, reverse=True))


def plots(bought: Bought) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "adahop"
    from matplotlib import pyplot as plt

    IMAGES.mkdir(exist_ok=True)
    scores, names = scored(), list(NAMES.values())
    figure, axes = plt.subplots(figsize=(7, 3))
    for at, (method, k, label) in enumerate((("graphsage", 10, "uniform, k = 10"), ("adahop", 2, "adahop, k = 2"))):
        runs = [scores[graph, method, k] for graph in NAMES]
        places = [i + 0.36 * (at - 0.5) for i in range(len(names))]
        axes.bar(
            places, [statistics.fmean(r) for r in runs], 0.34, yerr=[statistics.stdev(r) for r in runs], label=label
        )
    axes.set_xticks(range(len(names)), names, rotation=20)
    axes.set(ylim=(0.6, 1.0), ylabel="test score")
    finish(figure, axes, "scores.svg")
    figure, axes = plt.subplots(figsize=(7, 3.4))
    keys = [("ppi_rebuilt_labels", part, -1 if part == "gat, everyone" else 5) for part in GAT]
    runs = [[r["test"] for r in bought.rows[key]] for key in keys]
    axes.barh(list(GAT.values()), [statistics.fmean(r) for r in runs], xerr=[statistics.stdev(r) for r in runs])
    axes.axvline(statistics.fmean(runs[-1]), color="black", linewidth=0.8, linestyle=":")
    axes.set(xlim=(0.6, 0.86), xlabel="test F1, GAT on PPI, k = 5")
    finish(figure, axes, "attention.svg", legend=False)


def finish(figure: Any, axes: Any, name: str, legend: bool = True) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend:
        axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))  # above the bars
    figure.tight_layout()
    figure.savefig(IMAGES / name, metadata={"Date": None})


def main() -> None:
    bought = Bought()
    parts = {"tracked": tracked(bought), "tuned": tuned(bought), "attention": attention(bought), "budgets": budgets()}
    for name, made in parts.items():
        replaced(PAGE, name, made)
    plots(bought)


if __name__ == "__main__":
    main()
