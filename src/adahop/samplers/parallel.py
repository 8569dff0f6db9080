"""Several threads draw a batch each, the same batches as one thread would draw one after the other.

A batch depends on the seed, the step's number and what was learned. Where nothing is learned, batches can be drawn in
parallel: unlike the threads within a hop, these threads share nothing, and numbering is no bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch
from torch import Tensor

from adahop import ops
from adahop.samplers.base import Sampler

Own = TypeVar("Own", bound=Sampler)
Drawn = TypeVar("Drawn")


class ParallelDraws(Generic[Own, Drawn]):
    """`submit(seeds)` is a future of what `draw(sampler, seeds)` would return next, and advances the sampler's step.

    Each thread draws with a twin of the sampler, so `draw` must use the sampler that it is given.
    """

    def __init__(self, sampler: Own, workers: int, draw: Callable[[Own, Tensor], Drawn]):
        self.sampler, self.draw = sampler, draw
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="adahop-ahead")
        self.twins: SimpleQueue[Own] = SimpleQueue()
        for _ in range(workers):
            self.twins.put(sampler.twin())

    def submit(self, seeds: Tensor) -> Future[Drawn]:
        step = int(self.sampler.step)
        self.sampler.step.add_(1)
        return self.pool.submit(self._draw, step, seeds)

    @torch.no_grad()
    def _draw(self, step: int, seeds: Tensor) -> Drawn:
        twin = self.twins.get()
        try:
            with ops.alone():
                twin.step.fill_(step)
                return self.draw(twin, seeds)
        finally:
            self.twins.put(twin)

    def shutdown(self, wait: bool = True) -> None:
        self.pool.shutdown(wait=wait)
