"""A Lightning callback: the sampler learns from the model of every training batch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn
from torch_geometric.data import Data, HeteroData

from adahop.checks import InputError
from adahop.pyg.adapter import AdaptiveSampler
from adahop.pyg.loader import AdaptiveNeighborLoader
from adahop.pyg.logging import stats


def callback(
    learner: AdaptiveNeighborLoader | AdaptiveSampler, log: Callable[..., None] | None = None, every: int = 50
) -> Any:
    """A callback for `Trainer(callbacks=[...])`; `learner` is the loader, or the AdaptiveSampler of LightningNodeData.

    `log` (a CSVLog or TensorBoardLog) gets the `stats` of every `every`-th batch. What was learned is part of
    Lightning's checkpoints: it keeps a loader's state by itself, so that a run goes on within an epoch, and an
    AdaptiveSampler's by this callback. Needs adahop[lightning].
    """

    class Feedback(_base()):  # type: ignore[misc]
        """Records messages from the start of a training batch to its end."""

        state_key = "adahop"  # its name in a checkpoint

        def on_train_batch_start(
            self, trainer: object, module: nn.Module, batch: Data | HeteroData, batch_idx: int, *args: object
        ) -> None:
            learner._learn_on(module, batch)

        def on_train_batch_end(
            self,
            trainer: object,
            module: nn.Module,
            outputs: object,
            batch: Data | HeteroData,
            batch_idx: int,
            *args: object,
        ) -> None:
            learner._update_from_open()
            if log is not None and batch_idx % every == 0:
                log(getattr(trainer, "global_step", batch_idx), **stats(batch))

        def on_train_end(self, trainer: object, module: nn.Module) -> None:
            learner.learn(None)

        def state_dict(self) -> dict[str, Any]:
            return learner.state_dict() if isinstance(learner, AdaptiveSampler) else {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            learner.load_state_dict(state)

    return Feedback()


def _base() -> Any:
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return importlib.import_module(name).Callback
        except ImportError:
            continue
    raise InputError("the callback needs lightning: pip install 'adahop[lightning]'")
