"""train_step, evaluate, fit: the feedback loop, with no branch on the method."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from adahop import models
from adahop.checks import InputError, between, count, one_of
from adahop.loader import Loader
from adahop.methods import METHODS
from adahop.methods import make as make_sampler
from adahop.memory import ESTIMATORS
from adahop.metrics import METRICS, criterion, score
from adahop.samplers import Sampler
from adahop.samplers.base import check_sizes
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


@dataclass(frozen=True)
class Config:
    """How to train; every field is a flag of `adahop train`."""

    model: str = "gcn"
    arch: str = "residual"
    method: str = "bs"
    sizes: tuple[int, ...] = (10, 10)
    hidden: int = 64
    epochs: int = 30
    lr: float = 0.01
    weight_decay: float = 0.0
    dropout: float = 0.1
    batch_size: int = 256
    patience: int = 0
    prefetch: int = 0
    estimator: str | None = None  # None: the method's own
    device: str = "cpu"
    model_options: dict[str, Any] = field(default_factory=dict)
    method_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of(self.model, models.MODELS, "model")
        one_of(self.arch, ("plain", "residual"), "arch")
        preset = METHODS[one_of(self.method, METHODS, "method")]
        if self.model not in preset.models:
            known = ", ".join(preset.models)
            raise InputError(preset.why_not or f"`model` must be one of {known} for {self.method}, got {self.model}")
        object.__setattr__(self, "sizes", tuple(check_sizes(self.sizes)))
        for name, low in (("hidden", 1), ("epochs", 1), ("batch_size", 1), ("patience", 0), ("prefetch", 0)):
            count(getattr(self, name), low, name)
        between(self.lr, 1e-12, 1e6, "lr")
        between(self.weight_decay, 0.0, 1e6, "weight_decay")
        between(self.dropout, 0.0, 0.999, "dropout")
        if self.estimator is not None:
            one_of(self.estimator, ESTIMATORS, "estimator")
        one_of(self.device.split(":")[0], ("cpu", "cuda"), "device")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError("`device` must be cpu on a machine without a CUDA GPU, got cuda")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sizes": list(self.sizes)}


def fit(
    data: Any,
    config: Config | None = None,
    *,
    seed: int = 0,
    on_epoch: Callable[[dict[str, float]], None] | None = None,
    on_step: Callable[[int], None] | None = None,
    **options: Any,
) -> Result:
    """Train on the data's training nodes and keep what was best on validation.

    Options are the fields of `Config`, and override those of `config`. The seed resets the model, its dropout and the
    sampler: a run is the same alone or after others, and torch's own random state is left as it was.

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
        return _fit(data, config, seed, on_epoch or (lambda row: None), on_step or (lambda step: None))


def _fit(data: Any, config: Config, seed: int, on_epoch: Callable, on_step: Callable) -> Result:
    data = data.to(config.device)
    model = models.make(
        config.model, data.x.shape[1], config.hidden, data.classes, layers=len(config.sizes), arch=config.arch,
        dropout=config.dropout, **config.model_options,
    ).to(config.device)  # fmt: skip
    graph = data.graph.normalized(*model.graph)
    known = {"features": data.x}
    options = {**{k: known[k] for k in METHODS[config.method].needs}, **config.method_options}
    sampler = make_sampler(config.method, graph, config.sizes, seed=seed, **options).to(config.device)
    sampler.skip = model.remember(config.estimator or METHODS[config.method].estimator, graph, data.x)
    parameters = [*model.parameters(), *sampler.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=config.lr, weight_decay=config.weight_decay)
    loader = Loader(data, sampler, data.train_mask, config.batch_size, prefetch=config.prefetch)
    result = Result(seed, 0.0, -1.0, 0, 0, 0, 0.0, model=model, sampler=sampler)
    best, start, trained = None, time.perf_counter(), 0.0
    for epoch in range(1, config.epochs + 1):
        total, seen, began = torch.zeros((), device=config.device), 0, time.perf_counter()
        for batch in loader:
            total += train_step(model, sampler, optimizer, batch) * batch.batch_size
            seen += batch.batch_size
            result.steps += 1
            on_step(result.steps)
        trained += time.perf_counter() - began
        scores = evaluate(model, data, graph)
        row = {"epoch": epoch, "loss": float(total) / max(seen, 1), **scores, "seconds": trained}
        result.history.append(row)
        result.epochs = epoch
        if scores["val"] > result.val:
            result.val, result.test, result.best_epoch = scores["val"], scores["test"], epoch
            best = copy.deepcopy(model.state_dict())
        on_epoch(row)
        if config.patience and epoch - result.best_epoch >= config.patience:
            break
    result.seconds = time.perf_counter() - start
    if best is not None:
        model.load_state_dict(best)
    return result
