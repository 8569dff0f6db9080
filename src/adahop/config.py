"""Config: how to train, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from adahop import models
from adahop.checks import InputError, KindError, between, count, flag, of_kind, one_of
from adahop.methods import METHODS, OTHER, Method, check_options, part, refusal
from adahop.samplers.sizes import check_sizes
from adahop.sum import ESTIMATORS, controlled, dial

FEATURES = ("auto", "float32", "bfloat16")  # how features are kept
LATER = {"features": "float32"}  # what checkpoints mean that were written before it could be said

# what version 0.1 took for granted, by model: its options, and the estimator of a method that has one per model
FIRST: dict[str, tuple[dict[str, Any], str]] = {"gat": ({"heads": 1}, "exact+history"), "geniepath": ({}, "plain")}


def as_said(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they were meant when they were written: by version 0.1 where there is no dial, else by this one."""
    if "noise" in settings:
        return dict(settings)
    options, estimator = FIRST.get(settings.get("model", ""), ({}, None))
    own = {"noise": 0.0, **settings}
    if options:
        own["model_options"] = {**options, **settings.get("model_options", {})}
    method = METHODS.get(settings.get("method", "adahop"))
    if estimator is not None and method is not None and method.instead and settings.get("estimator") is None:
        own["estimator"] = estimator
    return own


@dataclass(frozen=True)
class Config:
    """How to train; every field is a flag of `adahop train`."""

    model: str = "gcn"
    arch: str = "residual"
    method: str = "adahop"
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
    noise: float | tuple[float, ...] | str = "auto"  # of a control variate: in [0, 1], one for all layers or one each;
    # "auto": 0, or uniform draws, by validation during the run (see `adahop.race`); ignored without control variates
    judged: int | None = None  # nodes of each split that are evaluated, with all their neighbours; memories then begin
    # empty, and no pass over the whole graph is made. None: all nodes, by a pass
    average: float = 0.0  # evaluate a running average of the weights that keeps this share a step
    device: str = "cpu"
    state: str | None = None  # a folder: policy state and histories lie in files there instead of in memory
    capture: bool | None = None  # the step as one CUDA graph; None: wherever that can be
    tf32: bool = True  # on a GPU: matrix products in TF32
    half: bool = False  # history in half precision, on a GPU features too (sums stay float32)
    features: str = "auto"  # float32; bfloat16: features are kept and read in 16 bits (sums stay float32); "auto":
    # float32, or sparse where most entries are 0 (see `adahop.run.stored`)
    cache: float | None = None  # on a GPU: features stay in host memory, this share of their rows has a copy there
    partition: str | None = None  # range or metis: each of several processes owns a part of the graph
    model_options: dict[str, Any] = field(default_factory=dict)
    method_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.model, torch.nn.Module):
            raise KindError(
                f"`model` must be a name like gcn, got {type(self.model).__name__} (a module of your own takes its "
                "batches from adahop.Loader or adahop.pyg.AdaptiveNeighborLoader)"
            )
        one_of(self.model, models.MODELS, "model")
        one_of(self.arch, models.MODELS[self.model].arches, "arch")
        preset = METHODS[one_of(self.method, METHODS, "method")]
        object.__setattr__(self, "sizes", tuple(check_sizes(self.sizes)))
        for name, low in (("hidden", 1), ("epochs", 1), ("batch_size", 1), ("patience", 0), ("prefetch", 0)):
            count(getattr(self, name), low, name)
        for name in ("model_options", "method_options"):
            of_kind(getattr(self, name), dict, name)
        between(self.lr, 1e-12, 1e6, "lr")
        between(self.weight_decay, 0.0, 1e6, "weight_decay")
        between(self.dropout, 0.0, 0.999, "dropout")
        between(self.average, 0.0, 0.9999, "average")
        if self.estimator is not None:
            one_of(self.estimator, ESTIMATORS, "estimator")
        if isinstance(self.noise, list | tuple):
            object.__setattr__(self, "noise", tuple(self.noise))
        if isinstance(self.noise, str):
            one_of(self.noise, ("auto",), "noise")
        dial(self.dial, len(self.sizes))
        if self.judged is not None:
            count(self.judged, 1, "judged")
            self._without_passes()
        if one_of(self.features, FEATURES, "features") == "bfloat16" and models.MODELS[self.model].typed:
            raise InputError(
                f"`features` must be auto or float32 for a model over several node types, got {self.features}"
            )
        if self.cache is not None:
            between(self.cache, 0.0, 1.0, "cache")
        if self.partition is not None:
            one_of(self.partition, ("range", "metis"), "partition")
        for name in ("device", "state"):  # also a torch.device, a Path
            if isinstance(getattr(self, name), torch.device | Path):
                object.__setattr__(self, name, str(getattr(self, name)))
        if self.state is not None:
            of_kind(self.state, str, "state")
        for name in ("tf32", "half", *(() if self.capture is None else ("capture",))):
            flag(getattr(self, name), name)
        one_of(str(self.device).split(":")[0], ("cpu", "cuda"), "device")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise InputError("`device` must be cpu on a machine without a CUDA GPU, got cuda")
        self._combines(preset)

    def _without_passes(self) -> None:
        if models.MODELS[self.model].typed:
            raise InputError(f"`judged` must be None for a model over several node types, got {self.judged}")
        if self.estimator is not None and "snapshot" in self.estimator:
            raise InputError(
                f"`estimator` must not be a snapshot with `judged`, which makes no pass for it, got {self.estimator}"
            )

    @property
    def remembers(self) -> str | None:
        """The estimator, where it is not the method's own; a snapshot needs passes, a history does not."""
        own = self.preset.estimator
        return self.estimator or (own.replace("snapshot", "history") if self.judged is not None else None)

    def _combines(self, preset: Method) -> None:
        """The parts fit each other; what does not is refused here, before anything is loaded."""
        if self.model not in preset.models:
            known = ", ".join(preset.models)
            raise InputError(preset.why_not or f"`model` must be one of {known} for {self.method}, got {self.model}")
        if models.MODELS[self.model].typed and preset.family == "subgraph":
            raise InputError(
                f"`method` must not be a subgraph method for a model over several node types, got {self.method}"
            )
        weights = models.MODELS[self.model].weights
        method = preset.on(weights)
        check_options(method, self.method_options)
        why = refusal(self.estimator or method.estimator, self.model, weights)
        if why is not None:
            raise InputError(why)
        if (self.estimator or method.estimator) not in models.MODELS[self.model].estimators:
            known = ", ".join(models.MODELS[self.model].estimators)
            raise InputError(f"`estimator` must be one of {known} for model {self.model}, got {self.estimator}")
        if not controlled(self.estimator or method.estimator) and any(dial(self.dial, len(self.sizes))):
            kind = self.estimator or method.estimator
            raise InputError(
                f"`noise` must be auto or 0 for estimator {kind}, which has no control variate, got {self.noise}"
            )
        for name, by in (("layers", "sizes"), ("arch", "arch"), ("dropout", "dropout")):
            if name in self.model_options:
                raise InputError(f"`model_options` must be without {name}, which `{by}` decides, got {name} in it")
        with torch.device("meta"):  # the model's own checks, without its memory
            models.make(
                self.model, models.MODELS[self.model].smallest(), self.hidden, 1, layers=len(self.sizes),
                arch=self.arch, dropout=self.dropout, **self.model_options,
            )  # fmt: skip
        if self.partition is not None:
            self._combines_with_parts(preset)

    def _combines_with_parts(self, preset: Method) -> None:
        estimator = self.estimator or preset.on(OTHER).estimator
        if estimator != "plain":
            raise InputError(f"`estimator` must be plain with `partition`, as memories hold all nodes, got {estimator}")
        if part(preset, self.method_options, "policy") is None or self.method_options.get("budget"):
            kinds = ", ".join(
                m.name for m in METHODS.values() if part(m, {}, "policy") and m.on(OTHER).estimator == "plain"
            )
            got = f"{self.method} with `budget`" if self.method_options.get("budget") else self.method
            raise InputError(f"`method` must be one of {kinds}, without `budget`, with `partition`, got {got}")
        if self.device != "cpu":
            raise InputError(f"`device` must be cpu with `partition`, got {self.device}")

    @property
    def dial(self) -> float | tuple[float, ...]:
        """Where the dial of a control variate stands at first."""
        return 0.0 if isinstance(self.noise, str) else self.noise

    @property
    def preset(self) -> Method:
        """The method as it is for the model."""
        return METHODS[self.method].on(models.MODELS[self.model].weights)

    def as_dict(self) -> dict[str, Any]:
        noise = list(self.noise) if isinstance(self.noise, tuple) else self.noise
        return {**asdict(self), "sizes": list(self.sizes), "noise": noise}
