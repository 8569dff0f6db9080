"""Write the tables of lab/docs/speed.md from measured rows: `python lab/benchmarks/tables.py [FOLDER]`.

Everything between the two marks in the page is replaced; nothing is typed by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from adahop_lab.bench.show import markdown
from adahop_lab.rows import read_rows, replaced

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "lab" / "docs" / "speed.md"
KEYS = {
    "sampling": ["method", "threads", "edges_per_s", "spread", "ratio_dgl_uniform", "ratio_dgl_int32", "of_limit",
                 "bytes_per_edge", "bytes_per_node"],
    "epoch": ["method", "threads", "seconds", "spread", "ratio_dgl_uniform"],
}  # fmt: skip
LIKE = (("graphsage:draw=systematic", "dgl:uniform:replace=false"), ("bs", "dgl:weighted"),
        ("labor:refine=0", "dgl:labor"), ("labor", "dgl:labor:refine=1"))  # fmt: skip


def sampling(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    limits = {row["threads"]: row["lines_per_s"] / 1e6 for row in rows}
    said = ", ".join(f"{rate:.0f} M with {n} thread{'s' if n > 1 else ''}" for n, rate in limits.items())
    clock = "" if first["clock"] == "wall" else " Processor seconds: the machine was busy."
    head = f"### Sampling, `{first['graph']}`, sizes {first['sizes']}, batches of {first['batch_size']}\n\n"
    return f"{head}Random cache lines a second: {said}.{clock}\n\n{markdown(rows, KEYS['sampling'])}{weighted(rows)}"


def weighted(rows: list[dict[str, Any]]) -> str:
    """What the bars also ask for: learned weights over DGL's weighted draws, LABOR over LABOR."""
    out = ""
    for method, peer in LIKE:
        found = [(r["threads"], r["ratios"].get(peer)) for r in rows if r["method"] == method]
        said = ", ".join(f"{x:.1f} × ({n} thread{'s' if n > 1 else ''})" for n, x in found if x)
        out += f"\n- `{method}` over `{peer}`: {said}" if said else ""
    return out + "\n" if out else ""


def degrees(rows: list[dict[str, Any]]) -> str:
    """A line a method, a column a degree."""
    names, all_degrees = (list(dict.fromkeys(r[k] for r in rows)) for k in ("method", "degree"))
    cost = {(r["method"], r["degree"]): r["us_per_batch"] for r in rows}
    out = f"### Cost of a batch by degree, `{rows[0]['graph']}` (µs, {rows[0]['batch_size']} targets, one layer)\n\n"
    out += "| method | " + " | ".join(f"{d:,}" for d in all_degrees) + " |\n|---|" + "---:|" * len(all_degrees) + "\n"
    for name in names:
        cells = [f"{cost[name, d]:,.0f}" if (name, d) in cost else "-" for d in all_degrees]
        out += f"| {name} | " + " | ".join(cells) + " |\n"
    return out


def epoch(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    what = f"{first['arch']} GCN, hidden {first['hidden']}, sizes {first['sizes']}, batches of {first['batch_size']}"
    clock = "" if first["clock"] == "wall" else " Processor seconds: the machine was busy."
    said = f"The ratio is to the faster of DGL's two.{clock}"
    return f"### An epoch on PPI: {what}\n\n{said}\n\n{markdown(rows, KEYS['epoch'])}"


def inference(rows: list[dict[str, Any]]) -> str:
    out = "### Inference over the whole graph\n\n"
    out += "| graph | skeleton | graph + features + output, MB | peak, MB | ratio |\n|---|---|---:|---:|---:|\n"
    for r in rows:
        sizes = f"{r['needed_bytes'] / 1e6:,.0f} | {r['peak_bytes'] / 1e6:,.0f} | {r['ratio']:.2f}"
        out += f"| {r['graph']}, {r['features']} features | {r['arch']} | {sizes} |\n"
    return out


def main(folder: Path) -> None:
    parts = []
    for kind in (sampling, degrees, epoch, inference):
        for path in sorted(folder.glob(f"{kind.__name__}*.jsonl")):
            rows = read_rows(path)
            parts += [kind(rows)] if rows else []
    replaced(PAGE, "speed", "\n".join(parts))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "lab" / "benchmarks" / "results" / "speed")
