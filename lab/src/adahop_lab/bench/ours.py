"""Our own samplers as runners: name:part=value. `update=true` is a learner that is updated after every batch, and
`untyped=true` draws from all edges of a typed graph as if they were of one relation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adahop.block import Block
from adahop.checks import InputError, count, one_of
from adahop.cli import pairs
from adahop.graph import Graph
from adahop.methods import METHODS, make
from adahop.ops import get_threads
from adahop.policies import Exp3, Tracked
from adahop.policies.prefix import OFTEN, PrefixSums
from adahop.samplers import Labor, NeighborSampler, Sampler
from adahop.samplers.parallel import ParallelDraws
from adahop_lab.bench.clock import CLOCKS, Runner
from adahop_lab.bench.graphs import untyped


@dataclass
class Bench:
    """What to measure: one graph and fan-out, our methods beside those of other libraries, each number of threads."""

    graph: str
    sizes: Sequence[int] = (10, 10)
    batch_size: int = 1024
    threads: Sequence[int] = (1,)
    methods: Sequence[str] = ()
    peers: Sequence[str] = ()
    rounds: int = 5
    device: str = "cpu"
    clock: str = "wall"

    def __post_init__(self) -> None:
        count(self.rounds, 1, "rounds")
        count(self.batch_size, 1, "batch_size")
        for n in self.threads:
            count(n, 1, "threads")
        one_of(self.clock, CLOCKS, "clock")
        for text in self.methods:
            parse(text)

    def row(self, runner: Runner, threads: int) -> dict[str, Any]:
        """What a row of any measurement says beside its figures."""
        return {
            "threads": threads, "graph": self.graph, "sizes": list(self.sizes), "batch_size": self.batch_size,
            "device": self.device, "peer": runner.peer, "rounds": self.rounds, "clock": self.clock,
        }  # fmt: skip


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """('bs', {'update': True}) of 'bs:update=true'."""
    name, *parts = text.split(":")
    one_of(name, METHODS, "methods")
    return name, pairs(parts, "methods")


def sampler(text: str, graph: Graph, sizes: Sequence[int], batch_size: int, device: str = "cpu") -> Sampler:
    """The sampler of a text; a layer-wise method draws as many nodes a layer as `sizes` times the batch."""
    name, options = parse(text)
    options.pop("update", None)
    graph = untyped(graph) if options.pop("untyped", False) else graph
    preset = METHODS[name]
    if preset.needs or preset.family == "subgraph":
        raise InputError(f"`methods` must be node-wise or layer-wise and need no features, got {name}")
    wide = batch_size if preset.family == "layer-wise" else 1
    return make(name, graph, [k if k < 0 else k * wide for k in sizes], **options).to(device)


def taught(own: Sampler) -> Sampler:
    """The sampler as it would be amid training: norms and weights that differ, and what makes draws by them quick."""
    if not isinstance(own, NeighborSampler):
        return own
    policy, chance = own.policy, torch.Generator().manual_seed(0)
    if isinstance(policy, Tracked):
        policy.square.copy_(torch.randn(policy.square.shape, generator=chance).exp())
        renew(own, policy.prefix, chance)
    elif isinstance(policy, Exp3):
        policy.arms.put(slice(None), (0.5 * torch.randn(policy.arms.weight.shape, generator=chance)).exp())
        renew(own, policy.arms.prefix, chance)
    return own


def renew(own: NeighborSampler, sums: PrefixSums, chance: torch.Generator) -> None:
    """Prefix sums for all rows, each somewhere between two renewals."""
    edges = own.graph.edges
    for layer, k in enumerate(own.sizes):
        if (prefix := sums.at(layer)) is not None:
            sums.renew(layer, k, own.policy.odds(layer))
            visits = (edges.last - edges.first) / (OFTEN * k) * torch.rand(len(edges.first), generator=chance)
            prefix.upto[1::2] = visits.cpu().int()


def drawing(text: str, own: Sampler) -> Runner:
    """Draws alone: nothing is learnt between batches, so that each thread has one of its own, as in a Loader."""
    many = get_threads(own.graph.indptr) if isinstance(own, NeighborSampler | Labor) else 1
    if many == 1:
        return Runner(text, lambda seeds: edges(own.sample(seeds)))
    own.sample(torch.zeros(1, dtype=torch.long))  # what is made once is made before threads need it
    ahead, waiting = ParallelDraws(own, many, lambda twin, seeds: edges(twin.sample(seeds))), deque()  # type: ParallelDraws, deque

    def work(seeds: Tensor) -> int:
        waiting.append(ahead.submit(seeds))
        return waiting.popleft().result() if len(waiting) > 2 * many else 0

    def rest() -> int:
        return sum(waiting.popleft().result() for _ in range(len(waiting)))

    return Runner(text, work, rest=rest)


def edges(blocks: list[Block]) -> int:
    return sum(block.num_edges for block in blocks)


def runner(text: str, graph: Graph, sizes: Sequence[int], batch_size: int, device: str = "cpu") -> Runner:
    """Draw and relabel; with `update=true` also learn from energies that were made before the clock ran."""
    own = taught(sampler(text, graph, sizes, batch_size, device))
    if not parse(text)[1].get("update"):
        return drawing(text, own)
    chance = torch.Generator().manual_seed(0)
    energy = -torch.rand(1 << 16, generator=chance).log().to(device)

    def work(seeds: Tensor) -> int:
        nonlocal energy
        blocks = own.sample(seeds)
        sizes = [block.num_edges for block in blocks]
        while energy.numel() < max(sizes):  # happens in the first batch, before the clock runs
            energy = torch.cat([energy, energy])
        own.update(blocks, [energy[:m] for m in sizes])
        return sum(sizes)

    return Runner(text, work)
