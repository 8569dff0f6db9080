"""Turns on one clock: everyone works a little in every round, so that a busy moment of the machine hits all alike."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adahop import ops

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # "cpu": for a busy machine, and one thread alone


class Runner(NamedTuple):
    """One who takes part: `work(seeds)` does a batch and says how many edges it had; `rest()` ends what it put off."""

    name: str
    work: Callable[[Tensor], int]
    peer: bool = False
    rest: Callable[[], int] = lambda: 0


class Turn(NamedTuple):
    """What was done in one turn."""

    edges: int
    batches: int
    seconds: float

    @property
    def edges_per_s(self) -> float:
        return self.edges / self.seconds

    @property
    def batches_per_s(self) -> float:
        return self.batches / self.seconds


def take_turns(
    runners: Sequence[Runner],
    seeds: Sequence[Tensor],
    rounds: int,
    seconds: float,
    device: str = "cpu",
    clock: str = "wall",
) -> dict[Runner, list[Turn]]:
    """Every runner's turns. A turn lasts `seconds` or one batch; one unmeasured batch comes first, which compiles."""
    turns: dict[Runner, list[Turn]] = {runner: [] for runner in runners}
    for runner in runners:
        runner.work(seeds[0])
        runner.rest()
    for _ in range(rounds):
        for runner in runners:
            turns[runner].append(turn(runner, seeds, seconds, device, CLOCKS[clock]))
    return turns


def turn(runner: Runner, seeds: Sequence[Tensor], seconds: float, device: str, now: Callable[[], float]) -> Turn:
    edges = batches = 0
    settle(device)
    began = now()
    while True:
        edges += runner.work(seeds[batches % len(seeds)])
        batches += 1
        if now() - began >= seconds:
            edges += runner.rest()
            settle(device)
            return Turn(edges, batches, now() - began)


def settle(device: str) -> None:
    """A GPU works behind our back: wait for it before the clock is read."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile)."""
    low, mid, high = np.quantile(np.asarray(values, float), [0.25, 0.5, 0.75]).tolist()
    return low, mid, high


def ratio(ours: Sequence[Turn], theirs: Sequence[Turn], of: str = "edges_per_s") -> float:
    """The median over rounds of ours over theirs in the same round."""
    pairs = zip(ours, theirs, strict=True)
    return quartiles([getattr(a, of) / getattr(b, of) for a, b in pairs])[1]


@contextlib.contextmanager
def threads(n: int, peers: Sequence[Any] = ()) -> Iterator[None]:
    """n threads for torch, our kernels and every peer alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    for peer in peers:
        peer.set_threads(n)
    try:
        with ops.threads(n):
            yield
    finally:
        torch.set_num_threads(before)
