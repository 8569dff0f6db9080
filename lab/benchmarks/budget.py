"""What a budget buys: the last layer's variance with totals spread over targets, over that of a fixed fan-out.

    python lab/benchmarks/budget.py --data DIR [--out FILE] [--seeds 3]

Trains, freezes, and measures twice at the same nodes: each target draws k, and as many edges in all are spread by
`budget`. Rows of a finished case are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
from pathlib import Path
from typing import Any

from adahop.samplers import Sampler
from adahop_lab.rows import Lines

GRAPHS = {"ppi_rebuilt_labels": (256, 3e-3, 4), "amazon_computers": (64, 1e-2, 10)}  # hidden, lr, epochs
CASES = [("graphsage", "row"), ("graphsage", "sym"), ("adahop", "row")]  # method, norm of the weights
OPTIONS = {"graphsage": {"policy": "tracked", "draw": "systematic"}, "adahop": {}}
REPEATS = 60


def edges(sampler: Sampler, nodes: Any) -> list[int]:
    """What a layer takes for these nodes, self-loops left out, mean over a few draws."""
    layers = [sampler.sample(nodes) for _ in range(5)]
    return [round(sum(int((~blocks[i].is_self()).sum()) for blocks in layers) / 5) for i in range(len(layers[0]))]


def run(task: tuple[str, str, str, int, int], folder: str) -> dict[str, Any]:
    import torch

    import adahop
    from adahop.diagnostics import Truth, measure, probe_nodes
    from adahop.diagnostics.frozen import frozen, twin

    torch.set_num_threads(1)
    graph, method, norm, k, seed = task
    hidden, lr, epochs = GRAPHS[graph]
    data = adahop.load(Path(folder) / f"{graph}.npz")
    result = adahop.fit(
        data, method=method, method_options=OPTIONS[method], sizes=(k, k), hidden=hidden, lr=lr,
        epochs=epochs, dropout=0.0, batch_size=256, seed=seed, model_options={"norm": norm},
        noise=0.0,
    )  # fmt: skip
    model, fixed = result.model, twin(result.sampler, seed)
    nodes = probe_nodes(data, 256, seed)
    many = edges(copy.copy(fixed), nodes)
    spread = twin(fixed, seed, sizes=[max(n, 1) for n in many], budget=True)
    seen = edges(copy.copy(spread), nodes)
    with frozen(model):
        truth = Truth(model, fixed.graph, data.x, nodes)
        one, other = (measure(model, twin(s, seed + 1), data.x, truth, REPEATS)[-1] for s in (fixed, spread))
    return {
        "graph": graph, "method": method, "norm": norm, "k": k, "seed": seed, "edges": many, "budgeted_edges": seen,
        "variance": one.variance, "budgeted": other.variance, "ratio": other.variance / one.variance,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of the .npz files")
    parser.add_argument("--out", default="lab/benchmarks/results/budget.jsonl")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    asked = itertools.product(range(args.seeds), reversed(GRAPHS), CASES, (2, 5, 10))
    lines = Lines(args.out, ("graph", "method", "norm", "k", "seed"))
    lines.fill(((graph, *case, k, seed) for seed, graph, case, k in asked), run, args.data)


if __name__ == "__main__":
    main()
