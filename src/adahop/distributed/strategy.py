"""Strategies: what a training does differently where there are several ranks; nothing where there is one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adahop.checks import InputError
from adahop.distributed.exchange import Histories, Updates
from adahop.distributed.peers import Peers
from adahop.graph import Graph
from adahop.metrics import TOGETHER, score, tally
from adahop.ops import random
from adahop.samplers import Sampler
from adahop.seams import NodeData

if TYPE_CHECKING:
    from adahop.run import Run


class Strategy:
    """Training in a single process; subclasses train in several."""

    rank, size = 0, 1
    allows_memory = True  # whether a model may have memories, which hold something of every node
    peers: Peers | None = None

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """What a training step calls: the model, or one that averages gradients over the ranks."""
        return model

    def check_estimator(self, estimator: str) -> None:
        """Refuse an estimator that this strategy does not support."""

    def wrap_sampler(self, sampler: Sampler) -> Sampler:
        """The sampler that draws: the method's own, or one that asks other ranks."""
        return sampler

    def row_source(self, data: NodeData, sampler: Sampler) -> Any:
        """Where the loader takes rows of x and y from."""
        return data

    def setup(self, run: Run) -> None:
        """Give this rank its part of the run: seeds, updates, gradients, random numbers."""

    def batches(self, loader: Any) -> Iterator[Any]:
        """The loader's batches; `stands_for` is the number of seeds that a batch's loss stands for."""
        for batch in loader:
            batch.stands_for = batch.batch_size
            yield batch

    def sync_histories(self) -> None:
        """After a step: exchange the rows of histories that were written."""

    def total(self, *numbers: float) -> list[float]:
        """The sums of some numbers over the ranks."""
        return list(numbers)

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def common_step(self, step: int) -> int:
        """The last step that the checkpoints of all ranks have reached."""
        return step

    def checkpoint_due(self, due: bool) -> bool:
        """Whether to write a checkpoint now: all ranks write theirs at the same step."""
        return due

    def after_resume(self, run: Run) -> None:
        """After all ranks have loaded a checkpoint, or none."""

    def split_seeds(self, run: Run) -> None:
        """Give this rank its part of the seeds of every batch of the run's sampler."""

    def reseed(self, run: Run) -> None:
        """After the run has gone back to an earlier state of its own."""

    def parts(self, graph: Graph) -> Any:
        """Which rows of the whole graph this rank computes; None for all."""
        return None

    def score(self, metric: str, out: Tensor, y: Tensor) -> float:
        return score(metric, out, y)


class Replicated(Strategy):
    """Every rank holds the graph and all state, and draws its part of each batch.

    The gradient is the mean over the global batch, however seeds are split: DistributedDataParallel averages over the
    ranks, and a seed's loss is weighted by ranks / seeds of all. A rank without seeds takes the step with an empty
    batch.
    """

    def __init__(self) -> None:
        self.peers: Peers = Peers()
        self.rank, self.size = self.peers.rank, self.peers.size
        self.histories: Histories | None = None

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Without broadcasts: `Histories` exchanges buffers, and equal seeds have made equal weights already."""
        with warnings.catch_warnings():  # newer torch renames `broadcast_buffers`, older torch knows this name alone
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(model, broadcast_buffers=False, init_sync=False)

    def setup(self, run: Run) -> None:
        sampler = run.sampler
        if sampler.learns:
            sampler.exchange = Updates(self.peers)
        if not sampler.per_node:
            sampler.salt = (self.rank,)  # draws for a whole layer: with equal streams all ranks would draw the same
        self.split_seeds(run)
        self.histories = Histories(self.peers, run.model.active_memories())
        own = list(sampler.parameters())
        if own:
            run.optimizer.register_step_pre_hook(lambda *_: self._average(own))
        self.reseed(run)

    def split_seeds(self, run: Run) -> None:
        run.loader.split = self.seeds(run.sampler)

    def seeds(self, sampler: Sampler) -> Callable[[Iterator[Tensor]], Iterator[Tensor]]:
        """This rank's part: a share of each batch's seeds, or every `size`-th batch where a batch is a subgraph."""
        rank, size = self.rank, self.size

        def by_seed(batches: Iterator[Tensor]) -> Iterator[Tensor]:
            for seeds in batches:
                n = seeds.numel()
                yield seeds[n * rank // size : n * (rank + 1) // size]

        def by_batch(batches: Iterator[Tensor]) -> Iterator[Tensor]:
            for first in batches:
                yield [first, *(next(batches, first[:0]) for _ in range(size - 1))][rank]

        return by_batch if sampler.by_subgraph else by_seed

    def batches(self, loader: Any) -> Iterator[Any]:
        for batch in loader:
            mine = batch.batch_size
            seeds, ranks = self.peers.total(mine, mine > 0)
            batch.stands_for = seeds / self.size
            given = getattr(batch, "loss_weight", None)
            if given is None:
                batch.loss_weight = torch.full((mine,), self.size / max(seeds, 1.0), device=batch.n_id.device)
            else:
                batch.loss_weight = given * (self.size / max(ranks, 1.0))
            yield batch

    def sync_histories(self) -> None:
        assert self.histories is not None
        self.histories.exchange()

    def total(self, *numbers: float) -> list[float]:
        return self.peers.total(*numbers)

    def parts(self, graph: Graph) -> Any:
        return RowRange(self.peers, graph)

    def score(self, metric: str, out: Tensor, y: Tensor) -> float:
        """From summed counts where the metric allows it; areas under curves need all outputs, on every rank."""
        if metric in TOGETHER:
            everyone = self.peers.all_gather([out.cpu(), y.cpu()])
            return score(metric, *(torch.cat(t) for t in zip(*everyone, strict=True)))
        top, bottom = self.peers.total(*tally(metric, out, y))
        return top / bottom if bottom else 0.0

    def barrier(self) -> None:
        self.peers.barrier()

    def after_resume(self, run: Run) -> None:
        steps = self.peers.all_gather([torch.tensor([run.result.steps])])
        if len({int(theirs[0]) for theirs in steps}) > 1:
            got = ", ".join(str(int(theirs[0])) for theirs in steps)
            raise InputError(f"every rank must find the same checkpoint, on a disk that all share, got steps {got}")
        if run.loader.prefetch:
            raise InputError(f"`prefetch` must be 0 for checkpoints of several processes, got {run.loader.prefetch}")
        self.reseed(run)

    def reseed(self, run: Run) -> None:
        """Initial weights come from the same seed on all ranks; dropout must differ."""
        torch.manual_seed(random.key(run.result.seed, run.result.steps, self.rank) & (2**63 - 1))

    def _average(self, own: list[nn.Parameter]) -> None:
        for p, grad in zip(own, self.peers.average([p.grad for p in own], own), strict=True):
            p.grad = grad


class RowRange:
    """A range of the graph's nodes, about equal work on every rank; `all_rows` gathers h of all nodes."""

    def __init__(self, peers: Peers, graph: Graph):
        self.peers = peers
        n, cost = graph.num_nodes, graph.indptr + torch.arange(graph.num_nodes + 1, device=graph.device)
        marks = int(cost[-1]) * torch.arange(peers.size + 1, device=graph.device) // peers.size
        cuts = torch.searchsorted(cost, marks).clamp(max=n).tolist()
        cuts[0], cuts[-1] = 0, n
        self.rows = cuts[peers.rank], cuts[peers.rank + 1]

    def all_rows(self, h: Tensor) -> Tensor:
        return torch.cat([part[0] for part in self.peers.all_gather([h])])


def several_ranks() -> bool:
    """Whether a process group of several ranks exists."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
