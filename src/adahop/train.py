"""train_step, evaluate, fit: the feedback loop, with no branch on the method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adahop import models
from adahop.capture import products, steps
from adahop.checkpoint import Checkpoints, agree
from adahop.checks import InputError, KindError, count, fields, function, of_kind, one_of, room_for
from adahop.config import LATER, Config, as_said
from adahop.distributed import Strategy
from adahop.graph import Graph
from adahop.methods import policy_options
from adahop.metrics import METRICS
from adahop.ops import random
from adahop.policies import POLICIES
from adahop.race import GROUPS, group_of
from adahop.run import Result, Run
from adahop.samplers import Sampler
from adahop.seams import NodeData
from adahop.step import Steps
from adahop.step import train_step as train_step

JUDGED = 3  # names the random stream of the nodes that are evaluated, where not all are


def evaluate(
    model: models.GNN,
    data: NodeData,
    graph: Graph | None = None,
    metric: str | None = None,
    strategy: Strategy | None = None,
) -> dict[str, float]:
    """The metric on each split, from every neighbour: evaluation never samples and never updates a policy."""
    graph = data.graph.normalized(*model.graph) if graph is None else graph
    return Judged(model, data, graph, metric or data.metric, strategy or Strategy()).scores()


class Judged:
    """A model's outputs from every neighbour, and their scores; with `some`, those of so many nodes of each split."""

    rows: slice | Tensor

    def __init__(
        self, model: models.GNN, data: NodeData, graph: Graph, metric: str, strategy: Strategy, some: int | None = None
    ):
        self.data, self.metric, self.strategy = data, metric, strategy
        parts = strategy.parts(graph)
        if some is None:
            self.out = model.inference(graph, data.x, parts=parts)
            self.rows = slice(None) if parts is None else slice(*parts.rows)
        else:
            masks = (data.train_mask, data.val_mask, data.test_mask)
            nodes = [random.shuffled(mask.nonzero().flatten(), random.key(JUDGED))[:some] for mask in masks]
            self.rows = torch.cat(nodes)
            self.out = model.outputs(graph, data.x, self.rows)

    def score(self, mask: Tensor) -> float:
        mask = mask[self.rows]
        return self.strategy.score(self.metric, self.out[mask], self.data.y[self.rows][mask])

    def scores(self) -> dict[str, float]:
        """On each split."""
        masks = {"train": self.data.train_mask, "val": self.data.val_mask, "test": self.data.test_mask}
        return {name: self.score(mask) for name, mask in masks.items()}

    def without_groups(self) -> list[float]:
        """On the validation nodes without each of `GROUPS` groups of them."""
        mask = self.data.val_mask
        group = group_of(torch.arange(len(mask), device=mask.device))
        return [self.score(mask & (group != g)) for g in range(GROUPS)]


def fit(
    data: NodeData,
    config: Config | None = None,
    *,
    seed: int = 0,
    on_epoch: Callable[[dict[str, Any]], None] | None = None,
    on_step: Callable[[int], None] | None = None,
    probe: Callable[[int, models.GNN, Sampler], None] | None = None,
    checkpoint: Checkpoints | str | Path | None = None,
    **options: Any,
) -> Result:
    """Train on the data's training nodes and keep what was best on validation.

    Options are the fields of `Config`, and override those of `config`. With noise="auto", the default, a run of ten
    epochs or more also chooses whether control variates take sampling noise away or uniform draws leave it in (see
    `adahop.race`): rows of epochs say which `noise` they had, and `Result.race` why it was chosen. The seed resets the
    model, its dropout and the sampler: a run is the same alone or after others, and torch's own random state is left as
    it was. `probe` sees the step, the model and the sampler after every step, and must leave them as they are (see
    `diagnostics.Probe`).
    `checkpoint` is a folder, or `Checkpoints` with more options: the run's state is written there as it goes; where one
    is found, the run goes on from it and ends as if it had never stopped.

    >>> import adahop
    >>> result = adahop.fit(adahop.load("digits"), method="bs", sizes=(5, 5), epochs=1, hidden=16)
    >>> result.steps
    5
    """
    for name in options:
        if name not in Config.__dataclass_fields__:
            _refuse(name)
    config = replace(Config() if config is None else of_kind(config, Config, "config"), **options)
    _check(data, seed, on_epoch=on_epoch, on_step=on_step, probe=probe)
    if config.partition is not None and getattr(data, "rank", None) is None:
        raise InputError(
            f"`partition` must be None for a whole data set, which `adahop train` cuts, got {config.partition}"
        )
    devices = [torch.cuda.current_device()] if config.device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices), products(bool(devices) and config.tf32):
        torch.manual_seed(seed)
        run = Run(data, config, seed)
        kept = None if checkpoint is None else Kept(run, Checkpoints.of(checkpoint))
        return _go(run, on_epoch or (lambda row: None), _after(on_step, probe, kept), kept)


def _refuse(name: str) -> None:
    """Say where an option belongs that is not a field of Config."""
    where = ""
    if name != "layers" and any(name in models.options_of(known) for known in models.MODELS):
        where = "model_options"
    elif name in ("policy", "draw", "budget") or any(name in policy_options(policy) for policy in POLICIES):
        where = "method_options"
    if where:
        raise InputError(f"`{name}` must be given as {where}={{'{name}': ...}}, got it as an option of fit")
    one_of(name, Config.__dataclass_fields__, "option")


def _check(data: NodeData, seed: int, **functions: Any) -> None:
    if getattr(data, "metric", None) is None:
        kind = type(data).__name__
        raise KindError(f"`data` must be what `adahop.load` returns, got {kind} (it takes a PyG Data)")
    if data.metric == "none":  # of a typed data set
        raise InputError("`data` must have labels to train on, got a data set without")
    one_of(data.metric, METRICS, "metric")
    fields(data, ("graph", "x", "y", "classes", "train_mask", "val_mask", "test_mask"), "data")
    count(seed, 0, "seed")
    for what, f in functions.items():
        function(f, what)


class Kept:
    """A run and its checkpoints: goes on from the last, writes the next when it is time."""

    def __init__(self, run: Run, checkpoints: Checkpoints):
        self.run, self.checkpoints = run, checkpoints
        state = checkpoints.take()
        least = run.strategy.common_step(state["result"]["steps"] if state else 0)
        if state is not None and state["result"]["steps"] > least:
            state = checkpoints.until(least)
        if state is not None:
            agree(self.identity, {**LATER, **as_said(state.pop("identity"))})
            run.load_state_dict(state)
        run.strategy.after_resume(run)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """It reads all the data: not before there is something to compare or to write."""
        return self.run.identity()

    def save(self, end: bool = False) -> None:
        if self.run.strategy.checkpoint_due(self.checkpoints.due(self.run.result.steps, end)):
            self.checkpoints.save({"identity": self.identity, **self.run.state_dict()})


def _after(on_step: Callable | None, probe: Callable | None, kept: Kept | None) -> Callable[[Run], None]:
    """What happens after a step; its seconds are not training's."""

    def after(run: Run) -> None:
        run.clock(False)
        if on_step is not None:
            on_step(run.result.steps)
        if probe is not None:
            probe(run.result.steps, run.model, run.sampler)
        if kept is not None:
            kept.save()
        run.clock(True)

    return after


def _go(run: Run, on_epoch: Callable, after: Callable, kept: Kept | None) -> Result:
    """Epoch after epoch until the run is over."""
    if run.result.steps == 0:
        run.renew()
    made: dict[Sampler, Steps] = {}  # the race draws in two ways: what was captured of one is there when it comes back
    try:
        while not run.over():
            if run.sampler not in made:
                made[run.sampler] = steps(run)
            run.steps = made[run.sampler]
            _epoch(run, after)
            with run.average.applied(), room_for("evaluation with every neighbour"):
                judged = Judged(
                    run.model, run.data, run.sampler.graph, run.data.metric, run.strategy, run.config.judged
                )
                row = run.closed(judged.scores())
            if run.race is not None:
                run.race.judged(run, row["val"], judged.without_groups)
            run.renew()
            on_epoch(row)
            if kept is not None:
                kept.save(end=True)
        return run.finished()
    finally:
        run.steps = None  # it holds the run: left there, a GPU's memory would wait for the garbage collector


def _epoch(run: Run, after: Callable) -> None:
    """Every training node once."""
    run.clock(True)
    assert run.steps is not None
    with room_for(f"a step of {run.config.batch_size} nodes with sizes {list(run.config.sizes)}"):
        for loss, batch in run.steps:
            run.moved(loss, batch.stands_for)
            after(run)
        run.steps.finish()
    run.clock(False)
