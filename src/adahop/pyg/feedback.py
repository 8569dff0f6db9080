"""Feedback: a sampler learns from the messages of an unmodified PyG model, batch by batch."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData

from adahop.block import Block, nothing
from adahop.checks import InputError, between
from adahop.ops import pointer
from adahop.pyg import batches
from adahop.pyg.batches import AsCut, DrawnBatch
from adahop.pyg.call import MessageEnergies
from adahop.pyg.history import LayerHistories
from adahop.pyg.hops import AnyData, Hops
from adahop.pyg.memory import Memory
from adahop.pyg.root import Root
from adahop.pyg.snapshot import Snapshots
from adahop.pyg.whole_graph import WholeGraph, whole_graphs
from adahop.pyg.wrap import Propagate, layers_of, propagate_of, scaled
from adahop.samplers import NeighborSampler
from adahop.typed import Relation, TypedBatch

# of a learner, what it has from the model that it learns from
OF_A_MODEL = ("_memory", "_last_batch", "_model", "_layers", "_num_propagates", "_open_batches")


class Learner:
    """What a loader or a PyG sampler needs to learn from a model: `feedback` around a step, or `learn` once."""

    sampler: NeighborSampler
    data: Data | HeteroData
    estimator = "plain"  # or "snapshot", "history"
    disjoint = False  # whether every seed has a tree of its own
    transform: Callable[..., Any] | None = None  # of its batches
    _noise = 0.0
    _memory: Memory | None = None  # the snapshots or histories of the model's layers
    _history_options: dict[str, Any] | None = None  # of `LayerHistories`
    _memory_state: dict[str, Any] | None = None  # of a checkpoint, until the model is known
    _last_batch: weakref.ref[Any] | None = None  # handed out last
    _model: nn.Module | None = None  # whose messages it learns from
    _layers: set[Propagate] = set()  # noqa: RUF012  of that model
    _num_propagates: int | None = None  # how many `propagate` the last step had
    _open_batches: tuple[DrawnBatch, ...] = ()  # handed out, and not learnt from yet
    check_model: Callable[[nn.Module], None] | None = None  # raises where a model does not fit its batches

    @property
    def noise(self) -> float:
        """Share of what is remembered that is left out, in [0, 1]; it may be set while training."""
        return self._noise

    @noise.setter
    def noise(self, share: float) -> None:
        if between(share, 0.0, 1.0, "noise") and self.estimator == "plain":
            raise InputError(f"`noise` must be 0 where nothing is remembered (estimator='plain'), got {share!r}")
        self._noise = float(share)
        if self._memory is not None:
            self._memory.noise = self._noise

    @contextlib.contextmanager
    def feedback(self, model: nn.Module, batch: Data | HeteroData | None = None) -> Iterator[None]:
        """Around a model's forward (or the whole step): the sampler learns from its messages when the block ends.

        `batch` is the one handed out last unless given. Every layer that passes messages is `scaled` from then on. A
        model in `eval()` teaches nothing, unless a gradient comes back.
        """
        batch = (None if self._last_batch is None else self._last_batch()) if batch is None else batch
        if batch is None:
            raise InputError("`batch` must be given before the loader has handed one out, got None")
        drawn = batches.batch_of(batch)
        if drawn is None:
            found = batches.find(_tensors(batch))
            drawn = None if found is None else found.batch.root
        if drawn is None:
            raise InputError("`batch` must be one that this loader handed out, got another")
        self._attach_to(model)
        self._open(drawn)
        try:
            yield
            self._update(drawn)
        finally:
            drawn.energies.clear()
            drawn.records_energies, drawn.memory = False, None
            self._open_batches = tuple(b for b in self._open_batches if b is not drawn)

    def learn(self, model: nn.Module | None) -> None:
        """Learn from `model` whenever it trains on a batch of this loader, from now on; None ends it."""
        if self._model is not None:
            self._update_from_open(done=False)  # the last step counts
            Root.of(self._model).learners.discard(self)
        self._model, self._open_batches = model, ()
        if model is not None:
            self._attach_to(model)
        self._set_memory(model)

    def _attach_to(self, model: nn.Module) -> None:
        """Scale the model's layers, and have its forwards noticed."""
        if self.check_model is not None:
            self.check_model(model)
        self._layers = {ours for conv in layers_of(model).values() if (ours := propagate_of(scaled(conv))) is not None}
        Root.of(model).learners.add(self)
        self._set_memory(model)

    def _set_memory(self, model: nn.Module | None) -> None:
        """Snapshots or histories of this model's layers from now on, where the estimator asks for them."""
        if self._memory is not None and self._memory.model is not model:
            self._memory.close()
            self._memory = None
        if self.estimator != "plain" and model is not None:
            self._memory = self._memory or self._new_memory(model)
            if self._memory_state is not None:
                self._memory.restore(self._memory_state)
                self._memory_state = None

    def _new_memory(self, model: nn.Module) -> Memory:
        if self.estimator == "snapshot":
            return Snapshots(model, self.data, self._whole_graphs, self.noise)
        more: dict[str, Any] = {
            "disjoint": self.disjoint, "transform": self.transform, "device": self.sampler.graph.device,
        }  # fmt: skip
        return LayerHistories(model, self.data, self.noise, **(self._history_options or {}), **more)

    def memory_cost(self) -> dict[str, float]:
        """What the estimator remembers, in bytes, and its milliseconds: of a pass, or per step."""
        return {"bytes": 0.0} if self._memory is None else self._memory.cost()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a loader in another process, learns from no model until it is told to."""
        inherited = getattr(super(), "__getstate__", None)
        state = vars(self) if inherited is None else inherited()
        return {name: value for name, value in state.items() if name not in OF_A_MODEL}

    # --- a batch ------------------------------------------------------------------------------------------------------

    def _hand_out(self, batch: AnyData, hops: Hops, as_cut: AsCut | None = None) -> AnyData:
        """Make a batch known, so that layers find it by its tensors; `as_cut` are those that no transform has seen."""
        if self._memory is not None:
            self._memory.begin_batch(self._whole_graphs[None])
        drawn = self._register_typed(batch, hops) if isinstance(batch, HeteroData) else self._register(batch, hops)
        drawn.as_cut = as_cut or {}
        self._last_batch = weakref.ref(batch)
        if self._model is not None:
            self._open(drawn)
            self._open_batches += (drawn,)
        return batch

    @functools.cached_property
    def _whole_graphs(self) -> dict[Relation | None, WholeGraph]:
        return whole_graphs(self.data, self.sampler.graph)

    def _register(self, batch: Data, hops: Hops) -> DrawnBatch:
        graph = self._whole_graphs[None]
        drawn = DrawnBatch(hops.n_id, hops.e_id, hops.scale, graph, hops.num_nodes, hops.num_edges, hops.blocks)
        batches.register(batch, drawn, hops.edge_index)
        return drawn

    def _register_typed(self, batch: HeteroData, hops: Hops) -> DrawnBatch:
        types, typed = self.sampler.graph.types, hops.typed
        assert types is not None and typed is not None
        n_id = torch.cat([ids + types.nodes[t] for t, ids in typed.n_id.items()])
        order = torch.cat(list(typed.edge.values()))
        drawn = DrawnBatch(
            n_id, hops.e_id[order], hops.scale[order], self._whole_graphs[None], hops.num_nodes, hops.num_edges,
            hops.blocks, typed=typed,
        )  # fmt: skip
        batches.register_typed(batch, drawn, self._whole_graphs)
        return drawn

    def _open(self, drawn: DrawnBatch) -> None:
        """Layers that train on this batch record their messages and apply the memory."""
        if not drawn.directional:
            raise InputError("`subgraph_type` must be 'directional' for a sampler to learn, got another")
        drawn.energies.clear()
        drawn.records_energies = self.sampler.listens
        # typed edges do not lie hop by hop, so that their energies are all recorded
        drawn.expected_propagates = self._num_propagates if drawn.typed is None else None
        drawn.memory = None if self._memory is None else weakref.ref(self._memory)

    def _learn_on(self, model: nn.Module, batch: Data | HeteroData) -> None:
        """A model is about to train on a batch, which may have been handed out before the model was known."""
        if self._model is not model:
            self.learn(model)
        drawn = batches.batch_of(batch)
        if drawn is not None and all(b is not drawn for b in self._open_batches):
            self._open(drawn)
            self._open_batches += (drawn,)

    def _update_from_open(self, done: bool = True) -> None:
        """The sampler learns what layers recorded since, in the order in which batches were handed out.

        A step that was cut short (not `done`) may have recorded too little.
        """
        left = []
        for drawn in self._open_batches:
            if not drawn.energies:
                if batches.is_in_use(drawn):
                    left.append(drawn)  # may be used yet
            elif self._model is not None and (done or len(drawn.energies) >= len(drawn.num_edges or ())):
                self._update(drawn)
        self._open_batches = tuple(left)

    def _update(self, drawn: DrawnBatch) -> None:
        """The sampler learns from a batch."""
        recorded = [r for r in drawn.energies if r.layer in self._layers]
        many = len(drawn.energies)
        recorded = [r for r in recorded if r.trains or r.exact] if any(r.trains for r in recorded) else []
        self._num_propagates = many if len(recorded) == many else None
        drawn.energies.clear()
        if not recorded or not self.sampler.listens or drawn.e_id.numel() == 0:
            return
        hops = drawn.num_edges or []
        if len(recorded) < len(hops):
            layers = {} if self._model is None else layers_of(self._model)
            replaced = any(propagate_of(m) not in self._layers for m in layers.values())
            more = "; call `learn` again, as layers were replaced since" if replaced else ""
            raise InputError(f"`model` must have a layer for each of the {len(hops)} hops, got {len(recorded)}{more}")
        device = self.sampler.graph.device
        self.sampler.update(*(energies if drawn.typed is None else typed_energies)(drawn, recorded, device))


def energies(
    drawn: DrawnBatch, recorded: list[MessageEnergies], device: torch.device
) -> tuple[list[Block], list[Tensor]]:  # fmt: skip
    """A block and its energies per hop, input layer first: hop h from the model's h-th last `propagate`.

    Of a hop whose layer has no use for the scale, or whose sum was exact, nothing is learnt: its odds stay uniform.
    """
    hops, start = drawn.num_edges or [], 0
    blocks, out = [], []
    for hop, many in enumerate(hops):
        energy = recorded[-1 - hop].of_edges(start, many)
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
    drawn: DrawnBatch, recorded: list[MessageEnergies], device: torch.device
) -> tuple[list[Block], list[Tensor]]:  # fmt: skip
    """The same by relation: a block has the rows of the relations whose messages were recorded; nothing is learnt of
    the others.
    """
    typed, blocks, hops = drawn.typed, drawn.blocks, drawn.num_edges
    assert typed is not None and blocks is not None and hops is not None
    start = [sum(hops[:h]) for h in range(len(hops))]
    out = [torch.zeros(many, device=device) for many in hops]
    has_energy = torch.zeros(len(hops), len(typed.edge), dtype=torch.bool, device=device)
    for r, (relation, place) in enumerate(typed.edge.items()):
        many = typed.num_edges[relation]
        for hop, energy in _by_hop(_of_relation(recorded, relation, r, typed), many):
            edges = slice(sum(many[:hop]), sum(many[: hop + 1]))
            if energy is not None and bool(energy.any()):
                out[hop][place[edges] - start[hop]] = energy[edges].to(device)
                has_energy[hop, r] = True
    return _of_rows(blocks, out[::-1], has_energy.flip(0))


def _of_relation(
    recorded: list[MessageEnergies], relation: Relation, number: int, typed: TypedBatch
) -> list[Tensor | None]:  # fmt: skip
    """The energies of a relation's edges, one tensor per `propagate` over them, alone or with all others."""
    sizes = [ids.numel() for ids in typed.e_id.values()]
    return [
        one.energy if one.relation is not None or one.energy is None else one.energy.split(sizes)[number]
        for one in recorded
        if one.relation in (None, relation)
    ]


def _by_hop(recorded: list[Tensor | None], many: list[int]) -> Iterator[tuple[int, Tensor | None]]:
    """(hop, its energies) of a relation: hop h from the h-th last `propagate`. A relation that a model leaves out of
    some layers has fewer: they are the run of layers whose hops drew from it most often, from the input layer on.
    """
    recorded = recorded[-len(many) :]
    last = len(many) - 1
    starts = range(len(many) - len(recorded) + 1)
    first = max(starts, key=lambda s: sum(many[last - s - i] > 0 for i in range(len(recorded))))
    for i, energy in enumerate(recorded):
        yield last - first - i, energy


def _of_rows(blocks: list[Block], energy: list[Tensor], has_energy: Tensor) -> tuple[list[Block], list[Tensor]]:
    """Blocks with the rows of some relations alone, and the energies of their edges."""
    kept, out = [], []
    for block, e, relations in zip(blocks, energy, has_energy, strict=True):
        if block.row is None or block.row_ptr is None or block.relation is None or not bool(relations.any()):
            kept.append(nothing(block.n_id[: block.num_dst]))
            out.append(e[:0])
            continue
        rows, size = relations[block.relation], block.row_ptr.diff()
        edges = rows.repeat_interleave(size)
        part = {k: getattr(block, k)[edges] for k in ("e_id", "weight", "prob", "scale", "pos")}
        part |= {k: getattr(block, k)[rows] for k in ("row", "relation")}
        edge_index = block.edge_index[:, edges]
        ptr = pointer(torch.bincount(edge_index[1], minlength=block.num_dst))
        kept.append(block._replace(edge_index=edge_index, ptr=ptr, row_ptr=pointer(size[rows]), **part))
        out.append(e[edges])
    return kept, out


def _tensors(batch: Data | HeteroData) -> list[Tensor]:
    if isinstance(batch, HeteroData):
        return [store.edge_index for store in batch.edge_stores if isinstance(store.get("edge_index"), Tensor)]
    return [v for name in ("edge_index", "x") if isinstance(v := getattr(batch, name, None), Tensor)]
