"""The scripts in pyg/ at k neighbours, and converted at k/2 with the dial `noise` set on validation.

    python lab/benchmarks/pyg_dial.py --data DIR [--again | --table]

Settings are those that pyg_half.py chose for the script as it is. The dial is one of 0, .5 and 1: that with the best
validation score of seed 0, 0 where they are equal; test scores have no part in it. The script's own runs are those of
results/pyg_half.jsonl, as its draws are what they were: where a run of it is made again (`--again`), its curve must be
the same. One JSON line per run in results/pyg_dial.jsonl; finished runs are not repeated. `--table`
prints the table of docs/results.md, with the cost of results/pyg_cost.json beside it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from pyg_cost import scripts

from adahop_lab.experiments.stats import paired
from adahop_lab.rows import Lines, Row, markdown

half = scripts()
HERE = Path(__file__).parent
GRAPHS = ("tolokers", "amazon_computers", "ppi_rebuilt_labels")
K, SEEDS = 10, (0, 1, 2)
DIAL = {"adahop": 0.0, "adahop, noise .5": 0.5, "adahop, noise 1": 1.0}


class Finished:
    """Finished runs: those of the script as it is, and converted ones."""

    def __init__(self, out: Path):
        self.old, self.new = (Lines(path, half.HalfTask._fields) for path in (HERE / "results" / "pyg_half.jsonl", out))
        self.settings = list(self.old.rows.values())

    def task(self, graph: str, script: str, way: str, seed: int) -> Any:
        k = K if way == "pyg" else K // 2
        return half.HalfTask(graph, script, way, k, seed, *half.settings(self.settings, graph, script))

    def find(self, graph: str, script: str, way: str, seed: int, again: bool = False) -> Row | None:
        lines = self.old if way == "pyg" and not again else self.new
        return lines.rows.get(self.task(graph, script, way, seed))

    def chosen(self, graph: str, script: str) -> str | None:
        """The dial by validation; None before all its values have run."""
        tried = {way: self.find(graph, script, way, 0) for way in DIAL}
        if any(r is None for r in tried.values()):
            return None
        return max(DIAL, key=lambda way: tried[way]["val"])  # the first of equal ones

    def todo(self, again: bool) -> Iterator[Any]:
        """Cell by cell; with `again`, the script's own runs."""
        for graph in GRAPHS:
            for script in half.SCRIPTS:
                for seed in SEEDS:
                    ways = ["pyg"] if again else list(DIAL) if seed == 0 else [str(self.chosen(graph, script))]
                    for way in ways:
                        if self.find(graph, script, way, seed, again) is None:
                            yield self.task(graph, script, way, seed)


def table(rows: Finished) -> str:
    cost = json.loads((HERE / "results" / "pyg_cost.json").read_text())["cells"]
    head = ["graph", "script", "at k = 10", "`adahop` at 5", "difference, 95 %", "`noise`", "seconds per epoch"]
    lines = []
    for graph in GRAPHS:
        for script in half.SCRIPTS:
            way = rows.chosen(graph, script)
            both = [(rows.find(graph, script, "pyg", s), rows.find(graph, script, str(way), s)) for s in SEEDS]
            tests = {s: (a["test"], b["test"]) for s, (a, b) in zip(SEEDS, both, strict=True) if a and b}
            if not tests:
                continue
            one, two = ({s: pair[i] for s, pair in tests.items()} for i in (0, 1))
            gap = paired(two, one)
            reach = "one seed" if gap is None else f"± {gap.high - gap.difference:.4f}"
            apart = mean(b - a for a, b in tests.values())
            at = cost.get(f"{graph} {script}", {}).get("rows", {})
            spent = [at[name]["train"] / 1e3 for name in ("script, k", "adahop, k/2")] if at else []
            ratio = f"{spent[0]:.3g} → {spent[1]:.3g} ({at['adahop, k/2']['ratio']:.2f})" if at else "–"
            said = [f"{mean(one.values()):.4f}", f"{mean(two.values()):.4f}", f"{apart:+.4f} {reach}"]
            lines.append([half.NAMES[graph], script.upper(), *said, f"{DIAL[str(way)]:g}", ratio])
    return markdown(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("ADAHOP_DATA", "data"), type=Path)
    parser.add_argument("--out", default=HERE / "results" / "pyg_dial.jsonl", type=Path)
    parser.add_argument("--again", action="store_true", help="the script's own runs, to see that they are the same")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    rows = Finished(args.out)
    if args.table:
        print(table(rows))
        return
    while (task := next(rows.todo(args.again), None)) is not None:
        row = half.run(task, args.data)
        rows.new.add(row)
        before = rows.find(*task[:3], task.seed)
        same = "" if before is None or task.way != "pyg" else f"the same curve: {before['curve'] == row['curve']}"
        print(*task, f"val {row['val']:.4f}", f"{row['cpu_seconds']} s", same, flush=True)


if __name__ == "__main__":
    main()
