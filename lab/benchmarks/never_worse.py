"""`adahop train` with its defaults beside uniform draws, full batch and RNS, on every homogeneous graph of a folder.

    python lab/benchmarks/never_worse.py --data DIR [--out FILE] [--device cuda] [--graphs cora,pubmed]
                                         [--arms "adahop, k = 2; RNS"] [--clock cpu] [--processes 12] [--seconds 500]
    python lab/benchmarks/never_worse.py --table [--out FILE]

Rate and dropout by validation on two seeds, for every arm alike; then ten other seeds; 40 epochs, hidden 64, batch 256.
Finished runs are not repeated; several processes share the machine. `adahop reproduce tta` knows these arms and more.
The table (of all files given) shows differences paired by seed with 95 % intervals, and intervals that hold for all of
them together (Bonferroni). Nothing may be tuned by what it shows.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from adahop.config import Config
from adahop.datasets import load
from adahop_lab.candidates import NAMES, TUNING, Entry, Lines, Row, chosen, count_seconds, run_entries
from adahop_lab.experiments.stats import SURE, paired

OURS = {"adahop, k = 2": 0.008, "adahop, k = 5": 0.004}  # and the loss that is allowed
OTHERS = ("uniform, k = 2", "uniform, k = 10", "full batch", "RNS")


def graphs(folder: Path, wanted: str | None) -> list[str]:
    """Files with one relation, labels and features."""
    names = wanted.split(",") if wanted else sorted(path.stem for path in folder.glob("*.npz"))
    return [name for name in names if one_relation(folder / f"{name}.npz")]


def one_relation(path: Path) -> bool:
    try:
        return load(str(path)).graph.types is None
    except ValueError:  # pairs or events: no labels to train on
        return False


def entries(folder: Path, device: str, wanted: str | None, arms: str) -> list[Entry]:
    base = Config(hidden=64, epochs=40, batch_size=256, device=device)
    return [Entry(str(folder / f"{graph}.npz"), way, base) for graph in graphs(folder, wanted) for way in chosen(arms)]


def scores(rows: list[Row]) -> dict[tuple[str, str], dict[int, float]]:
    """Test scores by graph, arm and seed, of the runs that count."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row["seed"] not in TUNING:
            found.setdefault((row["dataset"], row["candidate"]), {})[row["seed"]] = row["test"]
    return found


def table(rows: list[Row]) -> list[str]:
    """Lines of Markdown."""
    found = scores(rows)
    asked = [(g, mine, other) for g, mine in found if mine in OURS for other in OTHERS if (g, other) in found]
    together = 1 - (1 - SURE) / max(len(asked), 1)
    out = [
        f"{len(asked)} differences; each interval has {SURE:.0%}, so that one or more of all may miss with a chance of "
        f"up to {min(1.0, (1 - SURE) * len(asked)):.0%}; those in brackets hold together with {SURE:.0%}.",
        "",
        "| graph | arm | score | against | score | difference | within |",
        "|---|---|---|---|---|---|---|",
    ]
    for graph, mine, other in asked:
        one, two = found[graph, mine], found[graph, other]
        alone, all_ = paired(one, two), paired(one, two, together)
        if alone is None or all_ is None:
            continue
        means = [sum(s.values()) / len(s) for s in (one, two)]
        bound = "yes" if alone.low >= -OURS[mine] else "**no**" if alone.high < -OURS[mine] else "open"
        out.append(
            f"| {graph} | {mine} | {means[0]:.4f} | {other} | {means[1]:.4f} | {alone.difference:+.4f} "
            f"({alone.low:+.4f} to {alone.high:+.4f}) [{all_.low:+.4f} to {all_.high:+.4f}] | {bound} |"
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, nargs="+", default=[Path(__file__).parent / "results/never_worse.jsonl"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--graphs")
    parser.add_argument("--arms", default="; ".join((*OURS, *OTHERS)))
    parser.add_argument("--runs", type=int, default=10, help="0: tuning alone")
    parser.add_argument("--processes", type=int, default=0, help="0: in this one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this many")
    parser.add_argument("--clock", default="wall")
    parser.add_argument("--table", action="store_true")
    said = parser.parse_args()
    if said.table:
        print("\n".join(table([row for path in said.out for row in Lines(path, NAMES).rows.values()])))
        return
    if said.data is None:
        parser.error("--data must be a folder of .npz files, got none")
    count_seconds(said.clock)
    todo = entries(said.data, said.device, said.graphs, said.arms)
    run_entries(Lines(said.out[0], NAMES), todo, range(said.runs), jobs=said.processes, seconds=said.seconds)


if __name__ == "__main__":
    main()
