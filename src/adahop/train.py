"""train_step, evaluate, fit: the feedback loop, with no branch on the method."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from adahop import models
from adahop.checks import one_of
from adahop.config import Config
from adahop.loader import Loader
from adahop.methods import METHODS
from adahop.methods import make as make_sampler
from adahop.metrics import METRICS, criterion, score
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


@dataclass
class Result:
    """What a run leaves: scores at the epoch that was best on validation, and the road there."""

    seed: int
    test: float
    val: float
    best_epoch: int
    epochs: int
    steps: int
    seconds: float
    history: list[dict[str, float]] = field(default_factory=list, repr=False)
    model: models.GNN | None = field(default=None, repr=False)
    sampler: Sampler | None = field(default=None, repr=False)

    def summary(self) -> dict[str, Any]:
        kept = ("seed", "test", "val", "best_epoch", "epochs", "steps", "seconds")
        return {k: v for k, v in asdict_shallow(self).items() if k in kept}


def asdict_shallow(result: Result) -> dict[str, Any]:
    return {k: getattr(result, k) for k in result.__dataclass_fields__}


class Average:
    """A running average of a model's weights, to evaluate with: smoother than the last step's. keep=0 does nothing."""

    def __init__(self, model: nn.Module, keep: float):
        self.model, self.keep, self.steps = model, keep, 0
        self.mean = [p.detach().clone() for p in model.parameters()] if keep else []

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        keep = min(self.keep, self.steps / (self.steps + 9))  # the first steps are forgotten faster
        for mean, p in zip(self.mean, self.model.parameters(), strict=bool(self.keep)):
            mean.lerp_(p, 1.0 - keep)

    @contextlib.contextmanager
    def worn(self) -> Iterator[None]:
        """Inside, the model has the average for its weights."""
        pairs = list(zip(self.mean, self.model.parameters(), strict=bool(self.keep)))
        for mean, p in pairs:
            mean.data, p.data = p.data, mean.data
        try:
            yield
        finally:
            for mean, p in pairs:
                mean.data, p.data = p.data, mean.data


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
        return _fit(data, config, seed, on_epoch or (lambda row: None), _after(on_step, probe))


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


def assemble(data: Any, config: Config, seed: int) -> tuple[models.GNN, Sampler]:
    """The model and the sampler of a config, fitted to each other: its graph, its memory, what need not be drawn."""
    model = models.make(
        config.model, data.x.shape[1], config.hidden, data.classes, layers=len(config.sizes), arch=config.arch,
        dropout=config.dropout, **config.model_options,
    ).to(config.device)  # fmt: skip
    graph = data.graph.normalized(*model.graph)
    known = {"features": data.x}
    options = {**{k: known[k] for k in METHODS[config.method].needs}, **config.method_options}
    sampler = make_sampler(config.method, graph, config.sizes, seed=seed, **options).to(config.device)
    sampler.skip = model.remember(config.estimator or METHODS[config.method].estimator, graph, data.x)
    return model, sampler


def _fit(data: Any, config: Config, seed: int, on_epoch: Callable, after: Callable) -> Result:
    start = time.perf_counter()
    data = data.to(config.device)
    model, sampler = assemble(data, config, seed)
    parameters = [*model.parameters(), *sampler.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=config.lr, weight_decay=config.weight_decay)
    loader = Loader(data, sampler, data.train_mask, config.batch_size, prefetch=config.prefetch)
    result = Result(seed, 0.0, -1.0, 0, 0, 0, 0.0, model=model, sampler=sampler)
    best, trained = None, 0.0
    average = Average(model, config.average)
    for epoch in range(1, config.epochs + 1):
        total, seen, began = torch.zeros((), device=config.device), 0, time.perf_counter()
        for batch in loader:
            total += train_step(model, sampler, optimizer, batch) * batch.batch_size
            average.update()
            seen += batch.batch_size
            result.steps += 1
            trained -= after(result.steps, model, sampler)
        trained += time.perf_counter() - began
        with average.worn():
            scores = evaluate(model, data, sampler.graph)
            if scores["val"] > result.val:
                result.val, result.test, result.best_epoch = scores["val"], scores["test"], epoch
                best = copy.deepcopy(model.state_dict())
        row = {"epoch": epoch, "loss": float(total) / max(seen, 1), **scores, "seconds": trained}
        result.history.append(row)
        result.epochs = epoch
        on_epoch(row)
        if config.patience and epoch - result.best_epoch >= config.patience:
            break
    result.seconds = time.perf_counter() - start
    if best is not None:
        model.load_state_dict(best)
    return result
