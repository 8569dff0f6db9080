"""Feedback: a sampler learns from the messages of an unmodified PyG model, batch by batch."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from adahop.block import Block, nothing
from adahop.checks import InputError, between
from adahop.ops import pointer
from adahop.pyg import batches
from adahop.pyg.batches import DrawnBatch, Whole
from adahop.pyg.history import LayerHistories
from adahop.pyg.hops import Hops
from adahop.pyg.memory import Memory
from adahop.pyg.root import Root
from adahop.pyg.snapshot import Snapshots
from adahop.pyg.wrap import Propagate, Round, layers_of, scale_of, scaled
from adahop.samplers import NeighborSampler
from adahop.typed import Relation

Cut = TypeVar("Cut", Data, HeteroData)  # a batch as it is handed out


class Learner:
    """What a loader or a PyG sampler needs to learn from a model: `feedback` around a step, or `learn` once."""

    sampler: NeighborSampler
    data: Data | HeteroData
    estimator = "plain"  # or "snapshot", "history"
    _noise = 0.0
    _snapshots: Memory | None = None
    _history: dict[str, Any] | None = None  # options of `LayerHistories`
    _found: dict[str, Any] | None = None  # snapshots of a checkpoint, until the model is known
    _last: weakref.ref[Any] | None = None  # the batch handed out last
    _model: nn.Module | None = None  # whose messages it learns from
    _layers: set[Propagate] = set()  # noqa: RUF012  of that model
    _rounds: int | None = None  # how many times layers passed messages in the last step
    _handed: list[DrawnBatch] | None = None  # batches that it has not learnt from yet
    models_must: Callable[[nn.Module], None] | None = None  # raises where a model does not fit its batches

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
    def feedback(self, model: nn.Module, batch: Data | HeteroData | None = None) -> Iterator[None]:
        """Around a model's forward (or the whole step): the sampler learns from its messages when the block ends.

        `batch` is the one handed out last unless given. Every layer that passes messages is `scaled` from then on. A
        model in `eval()` teaches nothing, unless a gradient comes back.
        """
        batch = (None if self._last is None else self._last()) if batch is None else batch
        if batch is None:
            raise InputError("`batch` must be given before the loader has handed one out, got None")
        drawn = batches.of(batch) or next(
            (f.batch.root for f in [batches.find(_tensors(batch))] if f is not None), None
        )
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
        if self.models_must is not None:
            self.models_must(model)
        self._layers = {ours for conv in layers_of(model).values() if (ours := scale_of(scaled(conv))) is not None}
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

    def _memory_of(self, model: nn.Module) -> Memory:
        if self.estimator == "snapshot":
            return Snapshots(model, self.data, self._wholes, self.noise)
        more: dict[str, Any] = {
            "disjoint": getattr(self, "disjoint", False),
            "transform": getattr(self, "transform", None),
            "device": self.sampler.graph.device,
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
        drawn.listens = self.sampler.listens
        drawn.expected = self._rounds if drawn.typed is None else None  # typed edges do not lie hop by hop
        drawn.memory = None if self._snapshots is None else weakref.ref(self._snapshots)

    def _hand_out(self, batch: Cut, hops: Hops) -> Cut:
        """Make a batch known, so that layers find it by its tensors."""
        if self._snapshots is not None:
            self._snapshots.before_batch(self._wholes[None])
        drawn = self._drawn_typed(batch, hops) if isinstance(batch, HeteroData) else self._drawn_plain(batch, hops)
        self._last = weakref.ref(batch)
        if self._model is not None:
            self._open(drawn)
            self._handed = [*(self._handed or []), drawn]
        return batch

    @functools.cached_property
    def _wholes(self) -> dict[Relation | None, Whole]:
        """The whole graph, and each relation of typed data."""
        return batches.wholes(self.data, self.sampler.graph)

    def _drawn_plain(self, batch: Data, hops: Hops) -> DrawnBatch:
        whole = self._wholes[None]
        drawn = DrawnBatch(hops.n_id, hops.e_id, hops.scale, whole, hops.num_nodes, hops.num_edges, hops.blocks)
        batches.register(batch, drawn, hops.edge_index)
        return drawn

    def _drawn_typed(self, batch: HeteroData, hops: Hops) -> DrawnBatch:
        types, typed = self.sampler.graph.types, hops.typed
        assert types is not None and typed is not None
        n_id = torch.cat([ids + types.nodes[t] for t, ids in typed.n_id.items()])
        order = torch.cat(list(typed.edge.values()))
        drawn = DrawnBatch(
            n_id, hops.e_id[order], hops.scale[order], self._wholes[None], hops.num_nodes, hops.num_edges, hops.blocks,
            typed=typed,
        )  # fmt: skip
        batches.register_typed(batch, drawn, self._wholes)
        return drawn

    def _attend_to(self, model: nn.Module, batch: Data | HeteroData) -> None:
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
        rounds = [r for r in drawn.rounds if r.layer in self._layers]
        many = len(drawn.rounds)
        rounds = [r for r in rounds if r.counts or r.known] if any(r.counts for r in rounds) else []
        self._rounds = many if len(rounds) == many else None
        drawn.rounds.clear()
        if not rounds or not self.sampler.listens or drawn.e_id.numel() == 0:
            return
        by = energies if drawn.typed is None else typed_energies
        self.sampler.update(*by(drawn, rounds, self.sampler))


def energies(
    drawn: DrawnBatch, rounds: list[Round], sampler: NeighborSampler
) -> tuple[list[Block], list[Tensor]]:  # fmt: skip
    """A block and its energies per hop, input layer first: hop h from the model's h-th last round of messages.

    Of a hop whose layer has no use for the scale, or whose sum was known, nothing is learnt: its odds stay uniform.
    """
    hops = drawn.num_edges or []
    if len(rounds) < len(hops):
        raise InputError(f"`model` must have a layer for each of the {len(hops)} hops, got {len(rounds)}")
    device, start = sampler.graph.device, 0
    blocks, out = [], []
    for hop, many in enumerate(hops):
        energy = rounds[-1 - hop].of(start, many)
        block = (drawn.blocks or [])[len(hops) - 1 - hop]
        if block.n_id.device != device:
            block = Block._make(t.to(device) if isinstance(t, Tensor) else t for t in block)
        if energy is None:
            block, energy = nothing(block.n_id[: block.num_dst]), torch.zeros(0)
        blocks.append(block)
        out.append(energy.to(device))
        start += many
    return blocks[::-1], out[::-1]


def typed_energies(
    drawn: DrawnBatch, rounds: list[Round], sampler: NeighborSampler
) -> tuple[list[Block], list[Tensor]]:  # fmt: skip
    """The same by relation: a block has the rows of the relations whose layers spoke, others stay as they were."""
    typed, blocks, hops = drawn.typed, drawn.blocks, drawn.num_edges
    assert typed is not None and blocks is not None and hops is not None
    if len(rounds) < len(hops):
        raise InputError(f"`model` must have a layer for each of the {len(hops)} hops, got {len(rounds)}")
    device, start = sampler.graph.device, [sum(hops[:h]) for h in range(len(hops))]
    out = [torch.zeros(many, device=device) for many in hops]
    spoke = torch.zeros(len(hops), len(typed.edge), dtype=torch.bool, device=device)
    sizes = [ids.numel() for ids in typed.e_id.values()]
    for r, (relation, place) in enumerate(typed.edge.items()):
        own = [
            e if one.relation is not None or e is None else e.split(sizes)[r]
            for one in rounds
            if one.relation in (None, relation)
            for e in [one.energy]
        ]
        many = typed.num_edges[relation]
        for hop, energy in _hops_of(own, many):
            of = slice(sum(many[:hop]), sum(many[: hop + 1]))
            if energy is not None and bool(energy.any()):
                out[hop][place[of] - start[hop]] = energy[of].to(device)
                spoke[hop, r] = True
    return _of_rows(blocks, out[::-1], spoke.flip(0))


def _hops_of(rounds: list[Tensor | None], many: list[int]) -> Iterator[tuple[int, Tensor | None]]:
    """(hop, its round) of a relation: hop h from the h-th last round. A relation that a model leaves out of some layers
    has fewer: they are the run of layers whose hops drew from it most often, from the input layer on."""
    rounds = rounds[-len(many) :]
    last = len(many) - 1
    offsets = range(len(many) - len(rounds) + 1)
    first = max(offsets, key=lambda o: sum(many[last - o - i] > 0 for i in range(len(rounds))))
    for i, energy in enumerate(rounds):
        yield last - first - i, energy


def _of_rows(blocks: list[Block], energy: list[Tensor], spoke: Tensor) -> tuple[list[Block], list[Tensor]]:
    """Blocks with the rows of some relations alone, and the energies of their edges."""
    kept, out = [], []
    for block, e, relations in zip(blocks, energy, spoke, strict=True):
        if block.row is None or block.row_ptr is None or block.relation is None or not bool(relations.any()):
            kept.append(nothing(block.n_id[: block.num_dst]))
            out.append(e[:0])
            continue
        rows, size = relations[block.relation], block.row_ptr.diff()
        edges = rows.repeat_interleave(size)
        part = {k: getattr(block, k)[edges] for k in ("e_id", "weight", "prob", "scale", "pos")}
        part |= {k: getattr(block, k)[rows] for k in ("row", "relation")}
        both = block.edge_index[:, edges]
        ptr = pointer(torch.bincount(both[1], minlength=block.num_dst))
        kept.append(block._replace(edge_index=both, ptr=ptr, row_ptr=pointer(size[rows]), **part))
        out.append(e[edges])
    return kept, out


def _tensors(batch: Data | HeteroData) -> list[Tensor]:
    if isinstance(batch, HeteroData):
        return [store.edge_index for store in batch.edge_stores if isinstance(store.get("edge_index"), Tensor)]
    return [v for name in ("edge_index", "x") if isinstance(v := getattr(batch, name, None), Tensor)]
