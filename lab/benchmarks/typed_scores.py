"""Typed graphs: rgcn and hgt with all neighbours, learned draws and uniform draws; settings by validation, ten seeds.

    python lab/benchmarks/typed_scores.py acm.npz freebase.npz planted --processes 2

Candidates, fixed beforehand: rate in {.003, .01} and dropout in {.2, .5}; every arm takes the pair with the best mean
validation score over seeds 100 to 102, then runs seeds 0 to 9. One row per run is appended to --out as it ends, and
what is there already is not run again. `--table` prints the means and paired 95 % intervals.

`planted`: a dense typed graph on which single neighbours say little. A node of type `case` has 60 neighbours in each of
four relations from two types; its class is the largest of three sums of hidden numbers over all of them, with a sign
per relation. The features of `signal` and `other` nodes are these numbers in noise, those of cases are noise alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product
from pathlib import Path

import torch
from torch_geometric.data import HeteroData

import adahop
from adahop.datasets.typed import make_typed
from adahop.metrics import score
from adahop_lab.experiments import stats
from adahop_lab.rows import Lines, markdown

ARMS = {
    "all": ("graphsage", -1),
    "adahop 2": ("adahop", 2),
    "adahop 5": ("adahop", 5),
    "uniform 2": ("graphsage", 2),
    "uniform 5": ("graphsage", 5),
    "uniform 10": ("graphsage", 10),
}
SETTINGS = list(product((0.003, 0.01), (0.2, 0.5)))
TRIALS, SEEDS = range(100, 103), range(10)


def planted(cases: int = 3000, sources: int = 2000, degree: int = 60, seed: int = 0) -> HeteroData:
    g = torch.Generator().manual_seed(seed)
    data, total = HeteroData(), torch.zeros(cases, 3)
    data["case"].x = torch.randn(cases, 8, generator=g)
    for kind, signs in (("signal", (1.0, -1.0)), ("other", (0.7, -0.7))):
        hidden = torch.randn(sources, 3, generator=g)
        noise = torch.randn(sources, 13, generator=g)
        data[kind].x = torch.cat([hidden, noise], 1) @ torch.linalg.qr(torch.randn(16, 16, generator=g))[0]
        for i, sign in enumerate(signs):
            src = torch.randint(sources, (cases * degree,), generator=g)
            dst = torch.arange(cases).repeat_interleave(degree)
            data[kind, f"to{i}", "case"].edge_index = torch.stack([src, dst])
            data["case", f"back{i}", kind].edge_index = torch.stack([dst, src])
            total.index_add_(0, dst, sign * hidden[src])
    data["case"].y = (total + 2.0 * torch.randn(total.shape, generator=g)).argmax(1)
    return data


def planted_splits() -> HeteroData:
    """The planted graph with masks of its cases."""
    data = planted()
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(1))
    for name, part in (("train", order[:1200]), ("val", order[1200:2000]), ("test", order[2000:])):
        data["case"][f"{name}_mask"] = torch.zeros(3000, dtype=torch.bool).index_fill_(0, part, True)
    return data


def read(name: str):
    if name != "planted":
        return adahop.load(name)
    data = planted_splits()
    splits = {part: data["case"].pop(f"{part}_mask").nonzero().flatten() for part in ("train", "val", "test")}
    return make_typed("planted", data, "case", splits)


def run(task: tuple[str, str, str, float, float, int, int], files: dict[str, str], device: str) -> dict:
    torch.set_num_threads(1)
    adahop.ops.set_threads(1)
    graph, model, arm, rate, dropout, seed, epochs = task
    data, (method, k) = read(files[graph]).to(device), ARMS[arm]
    start = time.perf_counter()
    result = adahop.fit(
        data, model=model, method=method, sizes=(k, k), hidden=64, epochs=epochs, batch_size=256, lr=rate,
        dropout=dropout, seed=seed, noise=0.0, device=device,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    graph_of = data.graph.normalized(*result.model.graph)
    mask = data.test_mask
    out, y = result.model.inference(graph_of, data.x)[mask], data.y[mask]
    found = {"val": result.val, "micro": score("accuracy", out, y), "macro": score("macro-f1", out, y)}
    return {
        "graph": graph, "model": model, "arm": arm, "rate": rate, "dropout": dropout, "seed": seed, "noise": 0.0,
        "epochs": epochs, "device": device, "seconds": round(seconds, 2), **{k: round(v, 5) for k, v in found.items()},
    }  # fmt: skip


NAMES = ("graph", "model", "arm", "rate", "dropout", "seed", "epochs")


def best(rows: list[dict], graph: str, model: str, arm: str) -> tuple[float, float]:
    """The pair of settings with the best mean validation score over the trials."""

    def val(pair: tuple[float, float]) -> float:
        tried = [r for r in rows if _of(r, graph, model, arm) and r["seed"] in TRIALS]
        return statistics.mean(r["val"] for r in tried if (r["rate"], r["dropout"]) == pair)

    return max(SETTINGS, key=val)


HEAD = ("graph", "model", "arm", "micro-F1", "macro-F1", "- all", "- uniform 10", "seconds")


def table(rows: list[dict], seeds: int) -> str:
    lines = []
    for graph, model in dict.fromkeys((r["graph"], r["model"]) for r in rows):
        by_arm = {arm: {r["seed"]: r for r in rows if _of(r, graph, model, arm) and r["seed"] < seeds} for arm in ARMS}
        for arm, mine in by_arm.items():
            if not mine:
                continue
            means = [statistics.mean(r[k] for r in mine.values()) for k in ("micro", "macro", "seconds")]
            apart = ["" if other == arm else paired(mine, by_arm[other]) for other in ("all", "uniform 10")]
            cells = [graph, model, arm, f"{means[0]:.4f}", f"{means[1]:.4f}", *apart, f"{means[2]:.1f}"]
            lines.append(cells)
    return markdown(HEAD, lines)


def _of(row: dict, graph: str, model: str, arm: str) -> bool:
    return (row["graph"], row["model"], row["arm"]) == (graph, model, arm)


def paired(mine: dict, other: dict) -> str:
    """The mean difference in micro-F1 over the seeds of both, and half its 95 % interval."""
    found = stats.paired(*({s: row["micro"] for s, row in rows.items()} for rows in (mine, other)))
    return "" if found is None else f"{found.difference:+.4f} ± {found.high - found.difference:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("graphs", nargs="*")
    parser.add_argument("--models", default="rgcn,hgt")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="more than ten narrow the intervals")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this many")
    parser.add_argument("--out", default="lab/benchmarks/results/typed_scores.jsonl")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    lines = Lines(args.out, NAMES)
    if args.table:
        print(table(list(lines.rows.values()), args.seeds))
        return
    files, arms = {Path(graph).stem: graph for graph in args.graphs}, args.arms.split(",")
    for stage in (TRIALS, range(args.seeds)):
        rows, asked = list(lines.rows.values()), []
        for graph, model, seed, arm in product(files, args.models.split(","), stage, arms):
            pairs = SETTINGS if stage is TRIALS else [best(rows, graph, model, arm)]
            asked += [(graph, model, arm, *pair, seed, args.epochs) for pair in pairs]
        if not lines.fill(asked, run, files, args.device, jobs=args.processes, seconds=args.seconds):
            return
    print(table(list(lines.rows.values()), args.seeds))


if __name__ == "__main__":
    main()
