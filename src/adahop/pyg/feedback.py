"""Feedback: a sampler learns from the messages of an unmodified PyG model, batch by batch."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from adahop.block import Block
from adahop.checks import InputError, between
from adahop.pyg import batches
from adahop.pyg.batches import DrawnBatch, Whole
from adahop.pyg.history import LayerHistories
from adahop.pyg.hops import Hops
from adahop.pyg.root import Root
from adahop.pyg.snapshot import Snapshots
from adahop.pyg.wrap import Propagate, Round, layers_of, scale_of, scaled
from adahop.samplers import NeighborSampler
from adahop.samplers.loop import nothing


class Learner:
    """What a loader or a PyG sampler needs to learn from a model: `feedback` around a step, or `learn` once."""

    sampler: NeighborSampler
    data: Data
    estimator = "plain"  # or "snapshot", "history"
    _noise = 0.0
    _whole: Whole | None = None
    _snapshots: Snapshots | LayerHistories | None = None
    _history: dict[str, Any] | None = None  # options of `LayerHistories`
    _found: dict[str, Any] | None = None  # snapshots of a checkpoint, until the model is known
    _last: weakref.ref[Any] | None = None  # the batch handed out last
    _model: nn.Module | None = None  # whose messages it learns from
    _rounds: int | None = None  # how many times layers passed messages in the last step
    _handed: list[DrawnBatch] | None = None  # batches that it has not learnt from yet

    @property
    def noise(self) -> float:
        """Share of what is remembered that is left out, in [0, 1]; it may be set while training."""
        return self._noise

    @noise.setter
    def noise(self, share: float) -> None:
        if between(share, 0.0, 1.0, "noise") and self.estimator == "plain":
            raise InputError(f"`noise` must be 0 where nothing is remembered (estimator='plain'), got {share!r}")
        self._noise = float(share)
        if self._snapshots is not None:
            self._snapshots.noise = self._noise

    @contextlib.contextmanager
    def feedback(self, model: nn.Module, batch: Data | None = None) -> Iterator[None]:
        """Around a model's forward (or the whole step): the sampler learns from its messages when the block ends.

        `batch` is the one handed out last unless given. Every layer that passes messages is `scaled` from then on. A
        model in `eval()` teaches nothing, unless a gradient comes back.
        """
        batch = (None if self._last is None else self._last()) if batch is None else batch
        if batch is None:
            raise InputError("`batch` must be given before the loader has handed one out, got None")
        drawn = batches.of(batch) or next((f.batch for f in [batches.find(_tensors(batch))] if f is not None), None)
        if drawn is None:
            raise InputError("`batch` must be one that this loader handed out, got another")
        self._attend(model)
        self._open(drawn)
        try:
            yield
            self._teach(drawn, model)
        finally:
            drawn.rounds.clear()
            drawn.listens, drawn.memory = False, None
            if self._handed is not None:
                self._handed = [b for b in self._handed if b is not drawn]

    def learn(self, model: nn.Module | None) -> None:
        """Learn from `model` whenever it trains on a batch of this loader, from now on; None ends it."""
        if self._model is not None:
            self._take_back(done=False)  # the last step counts
            Root.of(self._model).leave(self)
        self._model, self._handed = model, []
        if model is not None:
            self._attend(model)
        self._remember(model)

    def _attend(self, model: nn.Module) -> None:
        for conv in layers_of(model).values():
            scaled(conv)
        Root.of(model).join(self)
        self._remember(model)

    def _remember(self, model: nn.Module | None) -> None:
        """Snapshots of this model's layers from now on, where the estimator asks for them."""
        if self._snapshots is not None and self._snapshots.model is not model:
            self._snapshots.close()
            self._snapshots = None
        if self.estimator != "plain" and model is not None:
            self._snapshots = self._snapshots or self._memory_of(model)
            if self._found is not None:
                self._snapshots.restore(self._found)
                self._found = None

    def _memory_of(self, model: nn.Module) -> Snapshots | LayerHistories:
        if self.estimator == "snapshot":
            return Snapshots(model, self.data, self.noise)
        more: dict[str, Any] = {
            "disjoint": getattr(self, "disjoint", False),
            "transform": getattr(self, "transform", None),
        }
        return LayerHistories(model, self.data, self.noise, **(self._history or {}), **more)

    def memory_cost(self) -> dict[str, float]:
        """What the estimator remembers, in bytes, and its milliseconds: of a pass, or per step."""
        return {"bytes": 0.0} if self._snapshots is None else self._snapshots.cost()

    def _open(self, drawn: DrawnBatch) -> None:
        """Layers that train on this batch note their messages and apply the snapshot."""
        if not drawn.directional:
            raise InputError("`subgraph_type` must be 'directional' for a sampler to learn, got another")
        drawn.rounds.clear()
        drawn.listens, drawn.expected = self.sampler.listens, self._rounds
        drawn.memory = None if self._snapshots is None else weakref.ref(self._snapshots)

    def _hand_out(self, batch: Data, hops: Hops) -> Data:
        """Make a batch known, so that layers find it by its tensors."""
        if self._whole is None:
            self._whole = Whole(self.data, self.sampler.graph)
        if self._snapshots is not None:
            self._snapshots.before_batch(self._whole)
        drawn = DrawnBatch(hops.n_id, hops.e_id, hops.scale, self._whole, hops.num_nodes, hops.num_edges, hops.blocks)
        batches.register(batch, drawn, hops.edge_index)
        self._last = weakref.ref(batch)
        if self._model is not None:
            self._open(drawn)
            self._handed = [*(self._handed or []), drawn]
        return batch

    def _attend_to(self, model: nn.Module, batch: Data) -> None:
        """A model is about to train on a batch, which may have been handed out before the model was known."""
        if self._model is not model:
            self.learn(model)
        drawn = batches.of(batch)
        if drawn is not None and all(b is not drawn for b in self._handed or ()):
            self._open(drawn)
            self._handed = [*(self._handed or []), drawn]

    def _take_back(self, done: bool = True) -> None:
        """What layers noted since reaches the sampler, in the order in which batches were handed out.

        A step that was cut short (not `done`) may have noted too little.
        """
        left = []
        for drawn in self._handed or []:
            if not drawn.rounds:
                if batches.alive(drawn):
                    left.append(drawn)  # may be used yet
            elif self._model is not None and (done or self._complete(drawn)):
                self._teach(drawn, self._model)
        self._handed = left

    def _complete(self, drawn: DrawnBatch) -> bool:
        return len(drawn.rounds) >= len(drawn.num_edges or ())

    def _teach(self, drawn: DrawnBatch, model: nn.Module) -> None:
        ours: set[Propagate | None] = {scale_of(m) for m in layers_of(model).values()}
        rounds = [r for r in drawn.rounds if r.layer in ours]
        many = len(drawn.rounds)
        rounds = [r for r in rounds if r.counts or r.known] if any(r.counts for r in rounds) else []
        self._rounds = many if len(rounds) == many else None
        drawn.rounds.clear()
        if not rounds or not self.sampler.listens or drawn.e_id.numel() == 0:
            return
        blocks, energy = energies(drawn, rounds, self.sampler)
        self.sampler.update(blocks, energy)


def energies(
    drawn: DrawnBatch, rounds: list[Round], sampler: NeighborSampler
) -> tuple[list[Block], list[Tensor]]:  # fmt: skip
    """A block and its energies per hop, input layer first: hop h from the model's h-th last round of messages.

    Of a hop whose layer has no use for the scale, or whose sum was known, nothing is learnt: its odds stay uniform.
    """
    hops = drawn.num_edges or []
    if len(rounds) < len(hops):
        raise InputError(f"`model` must have a layer for each of the {len(hops)} hops, got {len(rounds)} that spoke")
    device, start = sampler.graph.device, 0
    blocks, out = [], []
    for hop, many in enumerate(hops):
        energy = rounds[-1 - hop].energy
        block = (drawn.blocks or [])[len(hops) - 1 - hop]
        block = Block._make(t.to(device) if isinstance(t, Tensor) else t for t in block)
        if energy is None or rounds[-1 - hop].known or not bool(energy.any()):
            block, part = nothing(block.n_id[: block.num_dst]), torch.zeros(0, device=device)
        else:
            part = energy[start : start + many].to(device)
        blocks.append(block)
        out.append(part)
        start += many
    return blocks[::-1], out[::-1]


def _tensors(batch: Data) -> list[Tensor]:
    return [v for name in ("edge_index", "x") if isinstance(v := getattr(batch, name, None), Tensor)]
