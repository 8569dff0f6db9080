"""Sampler: draws the edges of each layer and sets the scale that makes the sum unbiased."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adahop import messages
from adahop.block import Block, Seeds
from adahop.checks import InputError, KindError, as_tensor, count, flag, implied, of_kind
from adahop.graph import Graph, OnGraph
from adahop.ops import Drawn, Rows, random
from adahop.samplers import loop
from adahop.samplers.loop import Draw, Fetched, Numbering
from adahop.samplers.sizes import Sizes, read_sizes
from adahop.storage import MEMORY, Storage

if TYPE_CHECKING:
    from adahop.samplers.neighbor import NeighborSampler

EPOCH = 1 << 40  # counters for shuffling epochs, away from those of the steps


class Sampler(OnGraph):
    """State is held in buffers and learned parts in parameters, so that `.to()` and `state_dict()` work.

    A new sampler implements `expand(layer, rows, key)`, which the loop calls for every layer, or the whole
    `draw(seeds)`; and `learn` if it learns. `sample` and `update` wrap them with checks.
    """

    learns = False  # whether `learn` changes its state; set for a class that defines `learn`
    ordered = False  # whether a batch depends on those before it; set for a class that defines `draw`
    fixed_size = False  # whether a layer's draws per row are known beforehand, so that blocks can be padded
    rescales = False  # whether `scaled` changes anything
    budget = False  # whether it needs the weight of each row in the sums above, see `Rows.weigh`
    penalises = False  # whether `penalty` joins the loss; set for a class that defines `penalty`
    per_node = False  # whether a node's draw depends on the step and the node alone: all ranks draw the same for it
    by_owner = False  # whether the owner of a part of the graph can draw for its own nodes
    by_subgraph = False  # whether a batch is one subgraph for all layers: its seeds cannot be split over ranks
    syncs = False  # whether an update reads from the device, so that it cannot be part of a CUDA graph
    draw_syncs = False  # the same of its draws
    sized_by: tuple[str, ...] = ()  # in a typed graph, sizes may be a dict by "relation" or "type"
    reads: messages.Reading = staticmethod(messages.energy)  # the function of a layer's messages that it learns from
    skip: frozenset[int] = frozenset()  # layers whose sum the model knows: nothing needs to be drawn for them
    exchange: Callable[..., Any] | None = None  # joins the updates of all ranks, see `adahop.distributed`
    salt: tuple[int, ...] = ()  # makes the random streams of one rank different from those of others
    step: Tensor
    epochs: Tensor

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        implied(cls, "learns", by="learn")
        implied(cls, "penalises", by="penalty")
        implied(cls, "ordered", by="draw")

    def __init__(self, graph: Graph, sizes: Any, seed: int = 0, storage: Storage = MEMORY):
        super().__init__()
        if not isinstance(graph, Graph):
            raise KindError(f"`graph` must be an adahop.Graph, got {type(graph).__name__}")
        self.graph, self.seed = graph, count(seed, -(2**63), "seed")
        self.sized = read_sizes(sizes, graph.types, self.sized_by)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("epochs", torch.zeros((), dtype=torch.int64))
        self._scratch = of_kind(storage, Storage, "storage").full((graph.num_nodes,), -1, torch.int32)
        self._pending: list[tuple[list[Block], list[Tensor]]] | None = None

    # --- for users -------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except (RuntimeError, TypeError) as e:
            raise InputError(
                "`state_dict` must be that of a sampler with this method, graph and number of layers, got "
                f"another: {str(e).splitlines()[-1].strip()}"
            ) from None

    def epoch(self, nodes: Any, batch_size: int, shuffle: bool = True) -> Iterator[Tensor]:
        """The nodes in batches, in an order that depends on the seed and the epoch number alone."""
        nodes = self.graph.ids(nodes, "nodes").to(self.graph.device)
        size = count(batch_size, 1, "batch_size")
        if flag(shuffle, "shuffle"):
            nodes = random.shuffled(nodes, random.key(self.seed, EPOCH, int(self.epochs)))
        self.epochs += 1
        yield from nodes.split(size) if nodes.numel() else ()

    def batches(self, nodes: Tensor, batch_size: int) -> int:
        """How many batches an epoch has."""
        return -(-nodes.numel() // batch_size)

    @property
    def parallel(self) -> bool:
        """Whether threads may draw a batch each (`twin`): batches depend on their step alone, nothing is learnt."""
        return not (self.ordered or self.listens or self.exchange is not None)

    def twin(self) -> Any:
        """A copy for another thread or for diagnostics: it shares the state, and has its own step and scratch."""
        other = copy.copy(self)
        own = {name: torch.zeros_like(getattr(self, name)) for name in ("step", "epochs")}
        other.__dict__["_buffers"] = {**self._buffers, **own}
        other.__dict__["_modules"] = dict(self._modules)
        other._scratch, other._pending = torch.full_like(self._scratch, -1), None
        return other

    @torch.no_grad()
    def sample(self, seeds: Any, numbering: Numbering | None = None) -> list[Block]:
        """Blocks for the seeds, input layer first; the last block's targets are the seeds (see `Graph.ids`).

        Nodes are numbered once each, targets first, unless another `numbering` is chosen.
        """
        seeds = self.graph.ids(seeds).to(self.graph.device)
        blocks = self.draw(seeds) if numbering is None else loop.sample(self, Seeds(seeds), numbering)
        self.step.add_(1)
        return blocks

    def update(self, blocks: Sequence[Block], energy: Sequence[Tensor]) -> None:
        """Learn from one number per edge of each block, by default the squared norm of its message."""
        if not all(isinstance(given, list | tuple) for given in (blocks, energy)) or not all(
            isinstance(b, Block) for b in blocks
        ):
            raise KindError(
                f"`blocks` and `energy` must be lists, got {type(blocks).__name__}, {type(energy).__name__}"
            )
        if len(energy) != len(blocks):
            raise InputError(f"`energy` must hold one tensor a block, {len(blocks)} in all, got {len(energy)}")
        given = [
            e if isinstance(e, Tensor) and e.dtype == b.scale.dtype and e.device == b.scale.device
            else as_tensor(e, "energy").to(b.scale)
            for e, b in zip(energy, blocks, strict=True)
        ]  # fmt: skip
        for i, (e, b) in enumerate(zip(given, blocks, strict=True)):
            if e.dim() == 0 or len(e) != b.num_edges or (e.dim() > 1 and self.reads is not messages.scores):
                raise InputError(
                    f"`energy[{i}]` must hold one number per edge, {b.num_edges} in all, got shape {tuple(e.shape)}"
                )
        drawn = list(blocks)
        if self.exchange is not None:
            drawn, given = self.exchange(self, drawn, given)
        if self._pending is not None:
            self._pending.append((drawn, given))
        else:
            self.learn(drawn, given)

    def penalty(self, blocks: Sequence[Block], energy: Sequence[Tensor]) -> Tensor | float:
        """A term of the loss, for samplers that are trained by the optimizer."""
        return 0.0

    def loss_weight(self, blocks: Sequence[Block]) -> Tensor | None:
        """A weight for the loss of every target of the last block; None: equal weights."""
        return None

    # --- for samplers ----------------------------------------------------------------------------------------------

    @property
    def listens(self) -> bool:
        """Whether it reads energies; otherwise none are computed."""
        return self.learns or self.penalises

    def draw(self, seeds: Tensor) -> list[Block]:
        """The blocks of all layers: by the loop, unless a sampler overrides this."""
        return loop.sample(self, Seeds(seeds))

    def rows(self, layer: int, dst: Tensor, until: Tensor | None = None) -> Rows:
        """The rows that a layer draws from for some targets, without relations of size 0."""
        only = self.sized.drawn(layer, self.graph.types)
        return self.graph.rows(dst, until=until, only=only)

    def expand(self, layer: int, rows: Rows, key: int | random.Stream) -> Drawn | Draw | Fetched:
        """Which edges of the rows are taken, with which probability and scale."""
        raise NotImplementedError

    def scaled(self, rows: Rows, drawn: Drawn) -> Drawn:
        """The drawn edges with the scale of the sampler's estimator; by default that of the draw, which is unbiased."""
        return drawn

    def learn(self, blocks: list[Block], energy: list[Tensor]) -> None:
        """Called by `update`, after the optimizer step and without gradients."""

    def key(self, layer: int) -> int:
        """The key of this step's random numbers for a layer."""
        return random.key(self.seed, int(self.step), layer, *self.salt)

    def stream(self, layer: int) -> random.Stream:
        """The same for CUDA kernels, which read the step from the device."""
        return random.Stream(random.key(self.seed), self.step, layer)

    def block(self, dst: Tensor, drawn: Drawn) -> Block:
        """The block of drawn places, for some targets."""
        return loop.numbered_block(self, self.graph.rows(dst), drawn)

    # --- for diagnostics: baselines -----------------------------------------------------------------------------------

    def uniform(self) -> Sampler:
        """A sampler of uniform draws of the same family and the same sizes."""
        from adahop.samplers.neighbor import NeighborSampler

        other = NeighborSampler(self.graph, self.sizes)
        other.sized = self.sized if self.sized.relation is not None else other.sized
        return other

    @property
    def sizes(self) -> list[int]:
        """Draws per layer, input layer first; the largest number where relations differ."""
        return self.sized.most

    @sizes.setter
    def sizes(self, sizes: list[int]) -> None:
        self.sized = Sizes(list(sizes))

    def by_target(self) -> NeighborSampler | None:
        """A node-wise sampler with the same draw and sizes, whose odds can be set; None where targets share a draw."""
        return None

    # --- for the loader: feedback with an exact delay -----------------------------------------------------------------

    def defer(self, on: bool) -> None:
        """While on, updates are queued until `release`; turning it off applies those that are queued."""
        queued, self._pending = self._pending, ([] if on else None)
        for blocks, energy in queued or ():
            self.learn(blocks, energy)

    def release(self) -> Callable[[], None]:
        """Take the queued updates; the returned function applies them, in order."""
        taken, self._pending = self._pending or [], []

        def apply() -> None:
            for blocks, energy in taken:
                self.learn(blocks, energy)

        return apply
