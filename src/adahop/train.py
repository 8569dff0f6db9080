"""train_step, evaluate, fit: the feedback loop, with no branch on the method."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from adahop import models
from adahop.checks import one_of
from adahop.config import Config
from adahop.mapped import on_disk
from adahop.metrics import METRICS, criterion, score
from adahop.run import Result, Run
from adahop.samplers import Sampler
from adahop.watch import watch


def train_step(model: nn.Module, sampler: Sampler, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    """One step of the model, the optimizer and the sampler; returns the loss."""
    model.train()
    with watch(model, sampler.feedback) as energy:
        out = model(batch)
    loss = criterion(out, batch.y, getattr(batch, "loss_weight", None))
    (loss + sampler.penalty(batch.blocks, energy)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    sampler.update(batch.blocks, energy)
    return loss.detach()


def evaluate(model: models.GNN, data: Any, graph: Any = None, metric: str | None = None) -> dict[str, float]:
    """The metric on each split, from every neighbour: evaluation never samples and never updates a policy."""
    graph = data.graph.normalized(*model.graph) if graph is None else graph
    out = model.inference(graph, data.x)
    metric = metric or data.metric
    masks = {"train": data.train_mask, "val": data.val_mask, "test": data.test_mask}
    return {name: score(metric, out[mask], data.y[mask]) for name, mask in masks.items()}


def fit(
    data: Any,
    config: Config | None = None,
    *,
    seed: int = 0,
    on_epoch: Callable[[dict[str, float]], None] | None = None,
    on_step: Callable[[int], None] | None = None,
    probe: Callable[[int, models.GNN, Sampler], None] | None = None,
    **options: Any,
) -> Result:
    """Train on the data's training nodes and keep what was best on validation.

    Options are the fields of `Config`, and override those of `config`. The seed resets the model, its dropout and the
    sampler: a run is the same alone or after others, and torch's own random state is left as it was. `probe` sees the
    step, the model and the sampler after every step, and must leave them as they are (see `diagnostics.Probe`).

    >>> import adahop
    >>> result = adahop.fit(adahop.load("digits"), method="bs", sizes=(5, 5), epochs=1, hidden=16)
    >>> result.steps
    5
    """
    for name in options:
        one_of(name, Config.__dataclass_fields__, "option")
    config = replace(config or Config(), **options)
    one_of(data.metric, METRICS, "metric")
    devices = [torch.cuda.current_device()] if config.device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return _go(Run(data, config, seed), on_epoch or (lambda row: None), _after(on_step, probe))


def _after(on_step: Callable | None, probe: Callable | None) -> Callable[[int, models.GNN, Sampler], float]:
    """What happens after a step; returns the seconds it took, which are not training's."""

    def after(step: int, model: models.GNN, sampler: Sampler) -> float:
        began = time.perf_counter()
        if on_step is not None:
            on_step(step)
        if probe is not None:
            probe(step, model, sampler)
        return time.perf_counter() - began

    return after


def _go(run: Run, on_epoch: Callable, after: Callable) -> Result:
    """Epoch after epoch until the run is over."""
    while not run.over():
        _epoch(run, after)
        with run.average.worn(), on_disk(run.config.state):
            row = run.closed(evaluate(run.model, run.data, run.sampler.graph))
        on_epoch(row)
    return run.finished()


def _epoch(run: Run, after: Callable) -> None:
    """Every training node once."""
    began = time.perf_counter()
    for batch in run.loader:
        run.loss += train_step(run.model, run.sampler, run.optimizer, batch) * batch.batch_size
        run.average.update()
        run.seen += batch.batch_size
        run.result.steps += 1
        run.trained -= after(run.result.steps, run.model, run.sampler)
    run.trained += time.perf_counter() - began
