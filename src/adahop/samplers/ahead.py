"""Ahead: several threads draw a batch each, and every batch is the one that it would have been in its turn.

A batch depends on the seed, the step's number and what was learnt. Where nothing is learnt in between, batches can be
drawn side by side: unlike the threads within a hop these hand nothing over, and numbering is no bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from adahop import ops
from adahop.block import Block
from adahop.checks import node_ids
from adahop.samplers.base import Sampler


class Ahead:
    """`submit(seeds)` for the blocks that `sampler.sample(seeds)` would give next, as a future."""

    def __init__(self, sampler: Sampler, workers: int, then: Callable[[list[Block]], Any] = lambda blocks: blocks):
        self.sampler, self.then = sampler, then
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="adahop-ahead")
        self.twins: SimpleQueue[Sampler] = SimpleQueue()
        for _ in range(workers):
            self.twins.put(sampler.twin())

    def submit(self, seeds: Tensor) -> Future[Any]:
        step = int(self.sampler.step)
        self.sampler.step.add_(1)
        return self.pool.submit(self._draw, step, seeds)

    @torch.no_grad()
    def _draw(self, step: int, seeds: Tensor) -> Any:
        twin = self.twins.get()
        try:
            with ops.alone():
                twin.step.fill_(step)
                return self.then(twin.draw(node_ids(seeds, twin.graph.num_nodes)))
        finally:
            self.twins.put(twin)

    def shutdown(self, wait: bool = True) -> None:
        self.pool.shutdown(wait=wait)
