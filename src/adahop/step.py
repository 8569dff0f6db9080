"""A step of the model, the optimizer and the sampler: alone, as one of several processes, or as a CUDA graph: one call.

`capture.steps(run)` gives a run its steps: iterate to take those of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from adahop.metrics import criterion
from adahop.samplers import Sampler
from adahop.seams import NodeBatch, StepBatch
from adahop.watcher import watch

if TYPE_CHECKING:
    from adahop.run import Run


def train_step(model: nn.Module, sampler: Sampler, optimizer: torch.optim.Optimizer, batch: NodeBatch) -> Tensor:
    """One step of the model, the optimizer and the sampler; returns the loss."""
    if not model.training:
        model.train()
    with watch(model, sampler.reads if sampler.listens else None) as energy:
        out = model(batch)
    loss = criterion(out, batch.y, getattr(batch, "loss_weight", None))
    (loss + sampler.penalty(batch.blocks, energy)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if sampler.listens:
        sampler.update(batch.blocks, energy)
    return loss.detach()


class Steps:
    """The steps of a run, one after the other, each with the batch that its loader draws."""

    def __init__(self, run: Run):
        self.run = run

    def __iter__(self) -> Iterator[tuple[Tensor, StepBatch]]:
        """Take the steps of an epoch: of each, its loss and what it was taken with."""
        run = self.run
        for batch in run.team.batches(run.loader):
            loss = train_step(run.net, run.sampler, run.optimizer, batch)
            run.team.settle()
            yield loss, batch

    def finish(self) -> None:
        """Wait until the device, which may be steps behind, has done what it was asked for."""
        if self.run.config.device.startswith("cuda"):
            torch.cuda.synchronize()
