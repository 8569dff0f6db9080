"""Sampling side by side: edges drawn and relabelled per second, ratios to the peers, state per node and edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adahop.graph import Graph
from adahop_lab.bench import SAMPLING, ours, peers
from adahop_lab.bench.clock import Runner, Turn, quartiles, ratio, take_turns, threads
from adahop_lab.bench.graphs import batches, graph
from adahop_lab.bench.limit import lines_per_s
from adahop_lab.bench.state import weigh

UNIFORM = {"ratio_dgl_uniform": "dgl:uniform", "ratio_pyg_uniform": "pyg:uniform"}
INT32 = "dgl:uniform:ids=int32"


@dataclass
class SamplingBench(ours.Bench):
    """Sampling and relabelling alone."""

    methods: Sequence[str] = SAMPLING
    peers: Sequence[str] = ("dgl", "pyg")
    seconds: float = 0.25  # of a turn


def measure(plan: SamplingBench, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each method and peer and number of threads."""
    g = graph(plan.graph)
    say(f"{plan.graph}: {g.num_nodes:,} nodes, {g.num_edges:,} edges, largest degree {int(g.degree().max()):,}")
    present, absent = peers.find(plan.peers, g)
    for name, why in absent.items():
        say(f"{name} is left out: {why}")
    seeds = batches(g, plan.batch_size)
    weights = {text: weigh(text, g, plan.sizes, plan.batch_size) for text in plan.methods}
    rows = []
    for n in plan.threads:
        with threads(n, list(present.values())):
            limit = lines_per_s(clock=plan.clock)
            say(f"{n} threads: {limit['prefetch'] / 1e6:.0f} M random cache lines a second ({limit['plain'] / 1e6:.0f} "
                "without prefetch)")  # fmt: skip
            turns = take_turns(_runners(plan, g, present), seeds, plan.rounds, plan.seconds, plan.device, plan.clock)
            rows += [row(plan, runner, n, turns, limit, weights.get(runner.name, {})) for runner in turns]
    return rows


def _runners(plan: SamplingBench, g: Graph, present: dict[str, Any]) -> list[Runner]:
    mine = [ours.runner(text, g, plan.sizes, plan.batch_size, plan.device) for text in plan.methods]
    return mine + peers.runners(plan.peers, present, plan.sizes)


def row(
    plan: SamplingBench,
    runner: Runner,
    n: int,
    turns: dict[Runner, list[Turn]],
    limit: dict[str, float],
    weight: dict[str, float],
) -> dict[str, Any]:
    """The promised keys first; `spread` are the quartiles of edges a second, `of_limit` edges a random cache line."""
    mine = turns[runner]
    low, mid, high = quartiles([t.edges_per_s for t in mine])
    against = {other.name: ratio(mine, theirs) for other, theirs in turns.items() if other.peer}
    return {
        "method": runner.name,
        "edges_per_s": mid,
        "batches_per_s": quartiles([t.batches_per_s for t in mine])[1],
        **{key: against.get(peer) for key, peer in UNIFORM.items()},
        **plan.row(runner, n),
        "ratio_dgl_int32": against.get(INT32),
        "spread": [low, high],
        "ratios": against,
        "lines_per_s": limit["prefetch"],
        "of_limit": mid / limit["prefetch"],
        **weight,
    }
