"""The whole step on the GPU: draw, gather, forward, backward, optimizer and policy update as one CUDA graph.

A graph is captured for every batch size that comes up, after the size was run once as it is, so the last and smaller
batch of an epoch has one of its own. All that a step changes (weights, moments, policy, history, the random streams'
step) lives on the device, so a replay is a step, and the run is the one that it would have been without.

An estimator that reads all neighbours of every target (attention with a memory) has no shape of its own: it is given
room for some more edges than were met so far. The draw is then a graph by itself, after which the host reads how many
edges there are; a step that needs more room runs eagerly, on the same draws, and the next one is captured anew. A draw
that itself reads back from the device (of the policy `attended`) stays outside, and its blocks are copied in.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from adahop.block import Block, Seeds
from adahop.features import Features
from adahop.samplers.loop import sample
from adahop.step import Steps, train_step

if TYPE_CHECKING:
    from adahop.models import GNN
    from adahop.run import Run

MORE, STEP = 1.25, 256  # room beside what was needed, and the multiples that it comes in
WARM = 2  # steps run as they are before the first capture: kernels compile, optimizers make their state


@contextlib.contextmanager
def products(tf32: bool) -> Iterator[None]:
    """Inside, float32 matrix products on a GPU may use TF32."""
    was = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32 or was
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = was


class Batch(NamedTuple):
    """What a model and `train_step` ask of a batch."""

    blocks: list[Block]
    features: Features
    y: Tensor
    x: None = None  # features are read from the table


class Targets(NamedTuple):
    """The targets of one step."""

    seeds: Tensor
    batch_size: int

    @property
    def stands_for(self) -> int:
        return self.batch_size


class CapturedStep(NamedTuple):
    """A captured step: fill `seeds`, replay, read `loss`. Where its sums have rooms, the `draw` of its `blocks` is a
    graph of its own, replayed before."""

    graph: torch.cuda.CUDAGraph
    seeds: Tensor
    loss: Tensor
    draw: torch.cuda.CUDAGraph | None = None
    blocks: list[Block] | None = None


class Rooms:
    """Room for all neighbours of a step's targets, where a model's sums read them, per batch size."""

    def __init__(self, model: GNN):
        kept = {layer: model.sums(layer) for layer in range(len(model.layers()))}
        self.sums = {layer: how for layer, how in kept.items() if how.takes_capacity}
        self.edges: dict[int, list[int]] = {}

    def needed(self, blocks: list[Block]) -> list[int]:
        """How many edges each of the sums reads in a step."""
        return torch.stack([how.edges_needed(blocks[layer]) for layer, how in self.sums.items()]).tolist()

    def hold(self, size: int, needed: list[int]) -> bool:
        """Whether they fit; where not, there is more room from now on."""
        held = self.edges.get(size, [-1] * len(needed))
        self.edges[size] = [
            have if need <= have else int(MORE * need) // STEP * STEP + STEP
            for need, have in zip(needed, held, strict=True)
        ]
        return self.edges[size] == held

    @contextlib.contextmanager
    def within(self, size: int | None) -> Iterator[None]:
        """Inside, sums have the shape of a batch size; None: as it comes."""
        given = [None] * len(self.sums) if size is None else self.edges.get(size, [])
        for how, edges in zip(self.sums.values(), given, strict=True):
            how.capacity = edges
        try:
            yield
        finally:
            for how in self.sums.values():
                how.capacity = None


class DeviceSteps(Steps):
    """The steps of a run whose sampler draws blocks of a fixed shape."""

    def __init__(self, run: Run, capture: bool):
        super().__init__(run)
        self.capture, self.nodes = capture, run.loader.nodes
        self.recorded: dict[int, CapturedStep] = {}
        self.done: dict[int, int] = {}
        self.rooms = Rooms(run.model)
        self.stream = torch.cuda.Stream() if capture else None

    def __iter__(self) -> Iterator[tuple[Tensor, Targets]]:
        for seeds in self.run.loader.seeds():
            yield self.take(seeds), Targets(seeds, seeds.numel())

    def take(self, seeds: Tensor) -> Tensor:
        """One step: captured where its size was met often enough, else as it is."""
        if not self.capture:
            return self.step(seeds)
        if self.run.sampler.draw_syncs:
            return self.take_drawn(seeds, self.draw(seeds))
        size = seeds.numel()
        if size not in self.recorded:
            if self.done.get(size, 0) < (1 if self.recorded and not self.rooms.sums else WARM):
                self.done[size] = self.done.get(size, 0) + 1
                return self.aside(seeds)
            if not self.record(size):
                return self.step(seeds)
        held = self.recorded[size]
        held.seeds.copy_(seeds)
        if held.draw is not None and held.blocks is not None:
            held.draw.replay()
            if not self.rooms.hold(size, self.rooms.needed(held.blocks)):
                del self.recorded[size]
                return self.rest(seeds, held.blocks)
        held.graph.replay()
        return held.loss

    def take_drawn(self, seeds: Tensor, blocks: list[Block]) -> Tensor:
        """The rest of a step after its draw, captured likewise."""
        size = seeds.numel()
        fits = not self.rooms.sums or self.rooms.hold(size, self.rooms.needed(blocks))
        if not fits:
            self.recorded.pop(size, None)
        if size not in self.recorded:
            if not fits or self.done.get(size, 0) < WARM:
                self.done[size] = self.done.get(size, 0) + 1
                return self.aside(seeds, blocks, size if fits else None)
            if not self.record(size, blocks):
                return self.rest(seeds, blocks)
        held = self.recorded[size]
        held.seeds.copy_(seeds)
        assert held.blocks is not None
        for kept, block in zip(held.blocks, blocks, strict=True):
            _copy(kept, block)
        held.graph.replay()
        return held.loss

    def step(self, seeds: Tensor) -> Tensor:
        """A step as it is. Before a capture it has the captured shape, where what it needs is known from another."""
        blocks, size = self.draw(seeds), seeds.numel()
        fits = self.capture and bool(self.rooms.sums) and self.rooms.hold(size, self.rooms.needed(blocks))
        with self.rooms.within(size if fits else None):
            return self.rest(seeds, blocks)

    @torch.no_grad()
    def draw(self, seeds: Tensor) -> list[Block]:
        run = self.run
        blocks = sample(run.sampler, Seeds(seeds), run.padded)
        run.sampler.step += 1
        return blocks

    def rest(self, seeds: Tensor, blocks: list[Block]) -> Tensor:
        """All of a step but its draw."""
        run = self.run
        assert run.features is not None
        batch = Batch(blocks, run.features, run.data.y[seeds])
        with torch.autograd.set_multithreading_enabled(False):  # one device: handing over to its thread only costs
            loss = train_step(run.model, run.sampler, run.optimizer, batch)
        for how in run.model.active_memories():
            how.flush()
        return loss

    def aside(self, seeds: Tensor, blocks: list[Block] | None = None, room: int | None = None) -> Tensor:
        """A step, or the rest of one, on a stream of its own, as captures ask of what runs before them."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), self.rooms.within(room):
            loss = self.step(seeds) if blocks is None else self.rest(seeds, blocks)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def record(self, size: int, like: list[Block] | None = None) -> bool:
        """Capture a step of this size; what prevents it is warned of once, and steps then run eagerly.

        With blocks `like` those to come, the rest of a step alone.
        """
        seeds = torch.zeros(size, dtype=torch.long, device=self.nodes.device)
        graph, chance = torch.cuda.CUDAGraph(), torch.cuda.get_rng_state()
        draw = torch.cuda.CUDAGraph() if self.rooms.sums and like is None else None
        blocks = None if like is None else [_copy_of(block) for block in like]
        stream = torch.cuda.current_stream()
        try:
            torch.cuda.synchronize()
            if draw is not None:
                with torch.cuda.graph(draw):
                    blocks = self.draw(seeds)
            with torch.cuda.graph(graph, pool=None if draw is None else draw.pool()), self.rooms.within(size):
                loss = self.rest(seeds, self.draw(seeds) if blocks is None else blocks)
        except Exception as e:
            torch.cuda.set_stream(stream)  # torch stays on the capture's own where it cannot be ended
            self.capture = False
            said = (str(e).strip() or type(e).__name__).splitlines()[0]
            warnings.warn(f"this step cannot be captured as a CUDA graph, so it runs eagerly: {said}", stacklevel=2)
            self.run.optimizer.zero_grad(set_to_none=True)
            for how in self.run.model.active_memories():
                how.cancel()  # what the capture left to be written was never computed
            _restore(chance)
            return False
        self.recorded[size] = CapturedStep(graph, seeds, loss, draw, blocks)
        return True


def _tensors(block: Block) -> list[Tensor]:
    """All of a block, features of its edges too."""
    return [t for part in block for t in (part if isinstance(part, tuple) else (part,)) if isinstance(t, Tensor)]


def _copy_of(block: Block) -> Block:
    attr = None if block.attr is None else tuple(t.clone() for t in block.attr)
    return Block._make(t.clone() if isinstance(t, Tensor) else t for t in block)._replace(attr=attr)


def _copy(to: Block, block: Block) -> None:
    for old, new in zip(_tensors(to), _tensors(block), strict=True):
        old.copy_(new)


def _restore(chance: Tensor) -> None:
    """A capture that broke off leaves the device's generator bound to it: give it a state of its own again."""
    torch.cuda.synchronize()
    fresh = torch.Generator("cuda")
    fresh.set_state(chance)
    torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(fresh.graphsafe_get_state())


def steps(run: Run) -> Steps:
    """The steps of a run as it draws now: on the device where draws have a fixed shape, captured unless `capture` is
    False."""
    wanted, why = run.config.capture, run.unpadded
    if why is None and run.sampler.syncs:
        why = "its policy reads from the device at every step"
    elif why is None and not all(how.fixed_shape or how.takes_capacity for how in run.model.active_memories()):
        why = "its estimator reads all neighbours of every target, as many as they are"
    if why and wanted:
        warnings.warn(f"this step cannot be captured as a CUDA graph, so it runs eagerly: {why}", stacklevel=2)
    if run.features is None or run.padded is None:
        return Steps(run)
    return DeviceSteps(run, capture=why is None and wanted is not False)
