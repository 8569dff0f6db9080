"""Feedback: overhear an unmodified PyG model while it trains, and teach the sampler that drew its batch."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from adahop.block import Block
from adahop.checks import InputError, KindError
from adahop.policies import Uniform
from adahop.pyg.align import align
from adahop.pyg.snapshot import Snapshots
from adahop.pyg.wrap import ATTENTION, energy_of, scale_of
from adahop.samplers import NeighborSampler


@dataclass
class Heard:
    """One round of messages: over which edges, with which energies, and whether they held the scale."""

    name: str
    conv: MessagePassing
    edge_index: Tensor
    weighed: bool
    energy: Tensor | None = None


class Ear:
    """Hooks in every layer of a model that passes messages; they hear nothing while the model evaluates."""

    def __init__(self, model: nn.Module, listens: bool = True):
        if not isinstance(model, nn.Module):
            raise KindError(f"`model` must be a torch module, got {type(model).__name__}")
        self.layers = {m: name for name, m in model.named_modules() if isinstance(m, MessagePassing)}
        if not self.layers:
            raise InputError(f"`model` must have PyG layers that pass messages, got {type(model).__name__} with none")
        self.listens = listens  # where energies are of no use, only the scale is handed on
        self.batch: Any = None
        self.heard: list[Heard] = []
        self.weighed: dict[MessagePassing, bool] = {}
        self.handles: list[Any] = []
        for m in self.layers:
            self.handles += [
                m.register_forward_pre_hook(self._arguments, with_kwargs=True, prepend=True),
                m.register_propagate_forward_pre_hook(self._edges),
                m.register_message_forward_hook(self._message),
            ]

    def start(self, batch: Any) -> None:
        """Listen for this batch; layers wrapped by `scaled` read their scale from it."""
        self.batch, self.heard = batch, []
        for m in self.layers:
            scale = scale_of(m)
            if scale is not None:
                scale.batch, scale.listens = batch, self.listens

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """Within, the scale is still handed on, and nothing is heard."""
        batch, scales = self.batch, [s for s in map(scale_of, self.layers) if s is not None]
        self.batch = None
        for scale in scales:
            scale.listens = False
        try:
            yield
        finally:
            self.batch = batch
            for scale in scales:
                scale.listens = self.listens

    def close(self) -> None:
        self.start(None)
        for handle in self.handles:
            handle.remove()

    def _arguments(self, module: MessagePassing, args: tuple, kwargs: dict) -> None:
        weight = kwargs.get("edge_weight")
        names = list(inspect.signature(module.forward).parameters)
        if weight is None and "edge_weight" in names and names.index("edge_weight") < len(args):
            weight = args[names.index("edge_weight")]
        self.weighed[module] = weight is not None

    def _edges(self, module: MessagePassing, inputs: tuple) -> None:
        if self.batch is None or not module.training:
            return
        edge_index = inputs[0]
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            raise KindError(f"layer '{self.layers[module]}' must be passed edge_index, not a sparse matrix")
        weighed = self.weighed.get(module, False) or getattr(scale_of(module), "batch", None) is not None
        self.heard.append(Heard(self.layers[module], module, edge_index.detach(), weighed))

    def _message(self, module: MessagePassing, inputs: tuple, message: Tensor) -> None:
        if self.batch is None or not module.training or not self.listens:
            return
        energy, scale = None, scale_of(module)
        if scale is not None:
            energy, scale.energy = scale.energy, None
        if energy is None:
            energy = energy_of(message)
        last = self.heard[-1]
        last.energy = energy if last.energy is None else last.energy + energy

    def rounds(self) -> list[Heard]:
        return [h for h in self.heard if h.energy is not None]

    def complete(self) -> bool:
        """Whether every hop of the batch has been heard."""
        return self.batch is not None and len(self.rounds()) >= len(getattr(self.batch, "num_sampled_edges", ()))

    def energies(self) -> list[Tensor]:
        """One tensor a block of the batch, input layer first: hop h from the model's h-th last round of messages."""
        batch, hops = self.batch, len(self.batch.num_sampled_edges)
        rounds = self.rounds()
        if len(rounds) < hops:
            raise InputError(f"`model` must have a layer for each of the {hops} hops, got {len(rounds)} that spoke")
        out, start = [], 0
        for hop, many in enumerate(batch.num_sampled_edges):
            heard = rounds[-1 - hop]
            i, j = align(batch.edge_index, heard.edge_index, heard.name)
            assert heard.energy is not None
            energy = torch.zeros(batch.edge_index.shape[1], device=heard.energy.device)
            energy[i] = heard.energy[j]
            if not heard.weighed:
                energy = energy * batch.scale.square()
            out.append(energy[start : start + many])
            start += many
        return out[::-1]


class Learner:
    """What a loader or a PyG sampler needs to learn from a model: `feedback` around a step, or `learn` once."""

    sampler: NeighborSampler
    data: Any
    estimator = "plain"  # or "snapshot"
    _snapshots: Snapshots | None = None
    _found: dict[str, Any] | None = None  # snapshots of a checkpoint, until the model is known
    _last: Any = None  # the batch handed out last
    _ear: Ear | None = None
    _warned = False

    @contextlib.contextmanager
    def feedback(self, model: nn.Module, batch: Any = None) -> Iterator[None]:
        """Around a model's forward (or the whole step): the sampler learns from its messages when the block ends.

        `batch` is the one handed out last unless given. Works for GCNConv, SAGEConv, GATConv, GATv2Conv, GINConv,
        TransformerConv and other layers that pass messages over `edge_index`; a model in `eval()` teaches nothing.
        """
        batch = self._last if batch is None else batch
        if batch is None:
            raise InputError("`batch` must be given before the loader has handed one out, got None")
        ear = Ear(model, self.sampler.listens)
        try:
            self._listen(ear, model, batch)
            yield
            self._teach(ear)
        finally:
            self._start(ear, None)
            ear.close()

    def learn(self, model: nn.Module | None) -> None:
        """Learn from `model` whenever it trains on a batch of this loader, from now on; None ends it."""
        if self._ear is not None:
            self._ear.close()
        self._ear = None if model is None else Ear(model, self.sampler.listens)
        self._remember(model)

    def _remember(self, model: nn.Module | None) -> None:
        """Snapshots of this model's layers from now on, where the estimator asks for them."""
        if self._snapshots is not None and self._snapshots.model is not model:
            self._snapshots.close()
            self._snapshots = None
        if self.estimator == "snapshot" and model is not None:
            self._snapshots = self._snapshots or Snapshots(model, self.data)
            if self._found is not None:
                self._snapshots.restore(self._found)
                self._found = None

    def _listen(self, ear: Ear, model: nn.Module, batch: Any) -> Ear:
        self._remember(model)
        self._start(ear, batch)
        return ear

    def _start(self, ear: Ear, batch: Any) -> None:
        ear.start(batch)
        if self._snapshots is not None:
            self._snapshots.start(batch, ear)

    def _hand_out(self, batch: Any) -> Any:
        self._last = batch
        if self._ear is not None:
            self._start(self._ear, batch)
        return batch

    def _take_back(self, done: bool = True) -> None:
        """What was overheard since the last batch reaches the sampler; a step cut short (not `done`) may be silent."""
        if self._ear is not None and self._ear.batch is not None:
            if done or self._ear.complete():
                self._teach(self._ear)
            self._start(self._ear, None)

    def _teach(self, ear: Ear) -> None:
        if not ear.heard:
            return
        if getattr(ear.batch, "blocks", None) is None:
            raise InputError("`subgraph_type` must be 'directional' for a sampler to learn, got another")
        self._warn(ear.heard)
        if not self.sampler.listens:  # uniform draws
            return
        energy = ear.energies()
        ear.heard = []
        device = self.sampler.graph.device
        blocks = [Block._make(t.to(device) if isinstance(t, Tensor) else t for t in b) for b in ear.batch.blocks]
        self.sampler.update(blocks, [e.to(device) for e in energy])

    def _warn(self, heard: list[Heard]) -> None:
        """Once: a layer that ignores the scale averages a biased sample as if it were a fair one."""
        fair = isinstance(self.sampler.policy, Uniform)
        for h in heard:
            mean = h.conv.aggr == "mean" or isinstance(h.conv, ATTENTION)  # right as it is for a uniform sample
            if not self._warned and not h.weighed and not (fair and mean):
                self._warned = True
                kind = type(h.conv).__name__
                warnings.warn(
                    f"layer '{h.name}' ({kind}) ignores the scale of the drawn edges, so its sums are biased; pass it "
                    "batch.edge_weight where it takes an edge_weight, or call adahop.pyg.scale_messages(model) once",
                    stacklevel=4,
                )
