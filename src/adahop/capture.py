"""The whole step on the GPU: draw, gather, forward, backward, optimizer and policy update as one CUDA graph.

A graph is captured for every batch size that comes up, after the size was run once as it is, so the last and smaller
batch of an epoch has one of its own. All that a step changes (weights, moments, policy, history, the random streams'
step) lives on the device, so a replay is a step, and the run is the one that it would have been without.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from adahop.block import Block, Seeds
from adahop.features import Features
from adahop.samplers.loop import Padded, sample
from adahop.step import Steps, train_step

if TYPE_CHECKING:
    from adahop.run import Run

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
    """A captured step: fill `seeds`, replay, read `loss`."""

    graph: Any
    seeds: Tensor
    loss: Tensor


class DeviceSteps(Steps):
    """The steps of a run whose sampler draws blocks of a fixed shape."""

    def __init__(self, run: Run, capture: bool):
        super().__init__(run)
        self.capture, self.nodes = capture, run.loader.nodes
        self.recorded: dict[tuple[Padded | None, int], CapturedStep] = {}  # by the shape of blocks, and the seeds
        self.done: dict[tuple[Padded | None, int], int] = {}
        self.stream = torch.cuda.Stream() if capture else None

    def __iter__(self) -> Iterator[tuple[Tensor, Targets]]:
        for seeds in self.run.loader.seeds():
            yield self.take(seeds), Targets(seeds, seeds.numel())

    def take(self, seeds: Tensor) -> Tensor:
        """One step: captured where its size was met often enough, else as it is."""
        if not self.capture:
            return self.step(seeds)
        kind = self.run.padded, seeds.numel()
        if kind not in self.recorded:
            if self.done.get(kind, 0) < (1 if self.recorded else WARM):
                self.done[kind] = self.done.get(kind, 0) + 1
                return self.aside(seeds)
            if not self.record(kind):
                return self.step(seeds)
        held = self.recorded[kind]
        held.seeds.copy_(seeds)
        held.graph.replay()
        return held.loss

    def step(self, seeds: Tensor) -> Tensor:
        run = self.run
        with torch.no_grad():
            blocks = sample(run.sampler, Seeds(seeds), run.padded)
            run.sampler.step += 1
        assert run.features is not None
        batch = Batch(blocks, run.features, run.data.y[seeds])
        with torch.autograd.set_multithreading_enabled(False):  # one device: handing over to its thread only costs
            loss = train_step(run.model, run.sampler, run.optimizer, batch)
        for how in run.model.sums_kept():
            how.settle()
        return loss

    def aside(self, seeds: Tensor) -> Tensor:
        """A step on a stream of its own, as captures ask of what runs before them."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            loss = self.step(seeds)
        torch.cuda.current_stream().wait_stream(self.stream)
        return loss

    def record(self, kind: tuple[Padded | None, int]) -> bool:
        """Capture a step of this kind; what prevents it is warned of once, and steps then run eagerly."""
        seeds = torch.zeros(kind[1], dtype=torch.long, device=self.nodes.device)
        graph, chance = torch.cuda.CUDAGraph(), torch.cuda.get_rng_state()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                loss = self.step(seeds)
        except Exception as e:
            self.capture = False
            said = (str(e).strip() or type(e).__name__).splitlines()[0]
            warnings.warn(f"this step cannot be captured as a CUDA graph, so it runs eagerly: {said}", stacklevel=2)
            self.run.optimizer.zero_grad(set_to_none=True)
            _restore(chance)
            return False
        self.recorded[kind] = CapturedStep(graph, seeds, loss)
        return True


def _restore(chance: Tensor) -> None:
    """A capture that broke off leaves the device's generator bound to it: give it a state of its own again."""
    torch.cuda.synchronize()
    fresh = torch.Generator("cuda")
    fresh.set_state(chance)
    torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(fresh.graphsafe_get_state())


def steps(run: Run) -> Steps:
    """The steps of a run: on the device where its draws have a fixed shape, captured unless `capture` is False."""
    wanted, why = run.config.capture, run.unpadded
    if why is None and run.sampler.syncs:
        why = "its policy reads from the device at every step"
    elif why is None and not all(how.shaped for how in run.model.sums_kept()):
        why = "its estimator reads all neighbours of every target, as many as they are"
    if why and wanted:
        warnings.warn(f"this step cannot be captured as a CUDA graph, so it runs eagerly: {why}", stacklevel=2)
    if run.features is None:
        return Steps(run)
    return DeviceSteps(run, capture=why is None and wanted is not False)
