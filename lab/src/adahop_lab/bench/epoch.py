"""A whole epoch of training side by side: our loop, and the same model on DGL's sampler and blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor

from adahop.capture import steps
from adahop.checks import between, count, one_of
from adahop.config import Config
from adahop.datasets import load
from adahop.datasets.base import Dataset
from adahop.run import Run
from adahop.seams import NodeBatch
from adahop_lab.bench import EPOCH, gpu_epoch, ours, peers
from adahop_lab.bench.clock import Runner, Turn, quartiles, ratio, take_turns, threads
from adahop_lab.bench.dgl_epoch import FORMS, DGLTraining


@dataclass
class EpochBench(ours.Bench):
    """Whole epochs of one model."""

    batch_size: int = 256
    methods: Sequence[str] = EPOCH
    peers: Sequence[str] = ("dgl",)
    rounds: int = 3
    arch: str = "residual"
    hidden: int = 256
    dropout: float = 0.0
    prefetch: int = 0
    model: str = "gcn"
    half: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        count(self.hidden, 1, "hidden")
        between(self.dropout, 0.0, 0.999, "dropout")
        for text in self.peers:
            one_of(text.partition(":")[0], ("dgl", "pyg"), "peers")


def measure(plan: EpochBench, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each method and peer and number of threads; a turn is one epoch."""
    data = load(plan.graph)
    many = data.train_idx.numel()
    say(f"{data.name}: {data.num_nodes:,} nodes, {data.graph.num_edges:,} edges, {many:,} to train on")
    mine = [runner for text in plan.methods for runner in _ours(text, data, plan)]
    others, models = _peers(data, plan, say)
    if plan.device.startswith("cuda") and "pyg" in plan.peers:
        others += gpu_epoch.pyg(data, plan.hidden, tuple(plan.sizes), plan.batch_size, plan.device)
    rows, steps = [], -(-many // plan.batch_size)
    for n in plan.threads:
        if n > 1 and models:
            say("dgl is left out with several threads: its sums over a block then write past their memory (2.1.0)")
            others, models = [other for other in others if not other.name.startswith("dgl")], []
        with threads(n, models):
            turns = take_turns([*mine, *others], [data.train_idx], plan.rounds, 0.0, plan.device, plan.clock)
            rows += [row(plan, runner, n, turns, steps) for runner in turns]
    return rows


def _ours(text: str, data: Dataset, plan: EpochBench) -> list[Runner]:
    """One who trains; on a GPU two, with the step captured and without."""
    name, options = ours.parse(text)
    config = Config(
        method=name, sizes=tuple(plan.sizes), hidden=plan.hidden, batch_size=plan.batch_size, arch=plan.arch,
        dropout=plan.dropout, prefetch=plan.prefetch, device=plan.device, method_options=options, model=plan.model,
        half=plan.half, noise=0.0,
    )  # fmt: skip
    if plan.device.startswith("cuda"):
        return [gpu_epoch.ours(text, data, replace(config, capture=c), c) for c in (True, False)]
    run = Run(data, config, 0)
    run.model.inference(run.sampler.graph, data.x)  # an evaluation has been: measured is an epoch after the first
    step = steps(run)

    def work(nodes: Tensor) -> int:
        edges = 0
        for _, batch in step:
            edges += sum(block.num_edges for block in cast(NodeBatch, batch).blocks)
        return edges

    return [Runner(text, work)]


def _peers(data: Dataset, plan: EpochBench, say: Callable[[str], None]) -> tuple[list[Runner], list[Any]]:
    asked = [text.partition(":") for text in plan.peers if text.startswith("dgl")]
    try:
        forms = [f for _, _, form in asked for f in ([one_of(form, FORMS, "peers of dgl")] if form else FORMS)]
        found = [DGLTraining(data, plan, form) for form in forms]
    except peers.Absent as e:
        say(f"dgl is left out: {e}")
        return [], []
    return [Runner(f"dgl:{t.form}", t.epoch, peer=True) for t in found], found


def row(plan: EpochBench, runner: Runner, n: int, turns: dict[Runner, list[Turn]], steps: int) -> dict[str, Any]:
    """Promised keys first; `seconds` is an epoch's median, `spread` its quartiles; DGL's fastest form counts."""
    mine = turns[runner]
    low, mid, high = quartiles([t.seconds for t in mine])
    against = {other.name: ratio(mine, theirs, "batches_per_s") for other, theirs in turns.items() if other.peer}
    return {
        "method": runner.name,
        "edges_per_s": quartiles([t.edges_per_s for t in mine])[1],
        "batches_per_s": steps / mid,
        "ratio_dgl_uniform": min((v for k, v in against.items() if k.startswith("dgl:")), default=None),
        "ratio_pyg_uniform": None,
        **plan.row(runner, n),
        "seconds": mid,
        "spread": [low, high],
        "ratios": against,
        "arch": plan.arch,
        "hidden": plan.hidden,
        "dropout": plan.dropout,
    }
