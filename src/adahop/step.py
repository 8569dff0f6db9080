"""A step of the model, the optimizer and the sampler: alone, as one of several processes, or as a CUDA graph: one call.

`capture.steps(run)` gives a run its steps: iterate to take those of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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


def step_rows(optimizer: torch.optim.Adam, *_: Any) -> None:
    """Before a step of Adam: tables with sparse gradients move in the rows of these alone, their moments too.

    Register it as a step's pre-hook. A row that every step reads moves as Adam moves it; one that a step does not read
    stays, where Adam would go on by its momentum and decay.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and p.grad.is_sparse:
                _step_rows(p, group, optimizer.state[p])
                p.grad = None  # Adam's own step leaves it out


@torch.no_grad()
def _step_rows(p: Tensor, group: dict[str, Any], state: dict[str, Tensor]) -> None:
    assert p.grad is not None
    if not state:
        state["step"] = torch.zeros((), device=p.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    grad, (b1, b2) = p.grad.coalesce(), group["betas"]
    rows, g = grad.indices()[0], grad.values()
    step = state["step"].add_(1)
    g = g.add(p[rows], alpha=group["weight_decay"])
    mean = torch.lerp(state["exp_avg"][rows], g, 1 - b1)
    square = torch.lerp(state["exp_avg_sq"][rows], g * g, 1 - b2)
    for name, value in (("exp_avg", mean), ("exp_avg_sq", square)):
        state[name].index_copy_(0, rows, value)
    size = (square / (1 - b2**step)).sqrt().add_(group["eps"])
    p.index_add_(0, rows, mean / (1 - b1**step) / size, alpha=-group["lr"])


class Steps:
    """The steps of a run, one after the other, each with the batch that its loader draws."""

    def __init__(self, run: Run):
        self.run = run

    def __iter__(self) -> Iterator[tuple[Tensor, StepBatch]]:
        """Take the steps of an epoch: of each, its loss and what it was taken with."""
        run = self.run
        for batch in run.strategy.batches(run.loader):
            loss = train_step(run.net, run.sampler, run.optimizer, batch)
            run.strategy.sync_histories()
            yield loss, batch

    def finish(self) -> None:
        """Wait until the device, which may be steps behind, has done what it was asked for."""
        if self.run.config.device.startswith("cuda"):
            torch.cuda.synchronize()
