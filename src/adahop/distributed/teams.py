"""Team: what changes in a training when there are several processes, and nothing when there is one."""

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


class Alone:
    """One process: every call does nothing."""

    rank, size = 0, 1
    remembers = True  # whether a model may have memories, which hold something of every node
    peers: Peers | None = None

    def net(self, model: nn.Module) -> nn.Module:
        """What is called in a training step: the model, perhaps with its gradients shared."""
        return model

    def allow(self, estimator: str) -> None:
        """Refuse what these processes cannot do together."""

    def adopt(self, sampler: Sampler) -> Sampler:
        """The sampler that draws: the method's own, or one that asks others."""
        return sampler

    def source(self, data: NodeData, sampler: Sampler) -> Any:
        """Where the loader takes rows of x and y from."""
        return data

    def share(self, run: Run) -> None:
        """Give this rank its part of the run: seeds, updates, gradients, randomness."""

    def batches(self, loader: Any) -> Iterator[Any]:
        """The loader's batches; `stands_for` is the number of seeds that a batch's loss stands for."""
        for batch in loader:
            batch.stands_for = batch.batch_size
            yield batch

    def settle(self) -> None:
        """After a step: what the others remember."""

    def total(self, *numbers: float) -> list[float]:
        return list(numbers)

    def wait(self) -> None:
        """Until all are here."""

    def least(self, step: int) -> int:
        """The step that every part's checkpoint has reached."""
        return step

    def agreed(self, due: bool) -> bool:
        """Whether to write a checkpoint now: parts are written at the same step."""
        return due

    def resumed(self, run: Run) -> None:
        """After all have loaded one checkpoint, or none."""

    def deal(self, run: Run) -> None:
        """Give this rank its part of the seeds, as the sampler in use batches them."""

    def reseed(self, run: Run) -> None:
        """After the run has gone back to an earlier state of its own."""

    def parts(self, graph: Graph) -> Any:
        """Which rows of the whole graph this rank computes; None for all."""
        return None

    def score(self, metric: str, out: Tensor, y: Tensor) -> float:
        return score(metric, out, y)


class Team(Alone):
    """Replicated data: every rank holds the graph and all state, and draws its part of each batch.

    The gradient is the mean over the global batch whatever the ranks' shares: DistributedDataParallel averages over the
    ranks, and a seed's loss weighs ranks / seeds of all. A rank without seeds in a step takes it with an empty batch.
    """

    def __init__(self) -> None:
        self.peers: Peers = Peers()
        self.rank, self.size = self.peers.rank, self.peers.size
        self.histories: Histories | None = None

    def net(self, model: nn.Module) -> nn.Module:
        """Memories are no business of it (see `Histories`), and equal seeds have made equal weights already."""
        with warnings.catch_warnings():  # the new name of `broadcast_buffers` is not known to older torch
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(model, broadcast_buffers=False, init_sync=False)

    def share(self, run: Run) -> None:
        sampler = run.sampler
        if sampler.learns:
            sampler.exchange = Updates(self.peers)
        if not sampler.per_node:
            sampler.salt = (self.rank,)  # a draw for a whole layer: equal streams would draw alike on every rank
        self.deal(run)
        self.histories = Histories(self.peers, run.model.sums_kept())
        own = list(sampler.parameters())
        if own:
            run.optimizer.register_step_pre_hook(lambda *_: self._average(own))
        self.reseed(run)

    def deal(self, run: Run) -> None:
        run.loader.share = self.seeds(run.sampler)

    def seeds(self, sampler: Sampler) -> Callable[[Iterator[Tensor]], Iterator[Tensor]]:
        """This rank's part of every batch: of its seeds, or of each `size` batches where a batch is a subgraph."""
        rank, size = self.rank, self.size

        def cut(batches: Iterator[Tensor]) -> Iterator[Tensor]:
            for seeds in batches:
                n = seeds.numel()
                yield seeds[n * rank // size : n * (rank + 1) // size]

        def deal(batches: Iterator[Tensor]) -> Iterator[Tensor]:
            for first in batches:
                hand = [first, *(next(batches, first[:0]) for _ in range(size - 1))]
                yield hand[rank]

        return deal if sampler.by_subgraph else cut

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

    def settle(self) -> None:
        assert self.histories is not None
        self.histories.exchange()

    def total(self, *numbers: float) -> list[float]:
        return self.peers.total(*numbers)

    def parts(self, graph: Graph) -> Any:
        return Share(self.peers, graph)

    def score(self, metric: str, out: Tensor, y: Tensor) -> float:
        """From counts where the metric is made of them; areas under curves need every output, on every rank."""
        if metric in TOGETHER:
            everyone = self.peers.gather([out.cpu(), y.cpu()])
            return score(metric, *(torch.cat(t) for t in zip(*everyone, strict=True)))
        top, bottom = self.peers.total(*tally(metric, out, y))
        return top / bottom if bottom else 0.0

    def wait(self) -> None:
        self.peers.wait()

    def resumed(self, run: Run) -> None:
        steps = self.peers.gather([torch.tensor([run.result.steps])])
        if len({int(theirs[0]) for theirs in steps}) > 1:
            got = ", ".join(str(int(theirs[0])) for theirs in steps)
            raise InputError(f"every rank must find the same checkpoint, on a disk that all share, got steps {got}")
        if run.loader.prefetch:
            raise InputError(f"`prefetch` must be 0 for checkpoints of several processes, got {run.loader.prefetch}")
        self.reseed(run)

    def reseed(self, run: Run) -> None:
        """Weights began alike; dropout is each rank's own."""
        torch.manual_seed(random.key(run.result.seed, run.result.steps, self.rank) & (2**63 - 1))

    def _average(self, own: list[nn.Parameter]) -> None:
        for p, grad in zip(own, self.peers.average([p.grad for p in own], own), strict=True):
            p.grad = grad


class Share:
    """A range of a replicated graph's nodes, of about equal work on every rank; `whole` gathers all rows of h."""

    def __init__(self, peers: Peers, graph: Graph):
        self.peers = peers
        n, cost = graph.num_nodes, graph.indptr + torch.arange(graph.num_nodes + 1, device=graph.device)
        marks = int(cost[-1]) * torch.arange(peers.size + 1, device=graph.device) // peers.size
        cuts = torch.searchsorted(cost, marks).clamp(max=n).tolist()
        cuts[0], cuts[-1] = 0, n
        self.rows = cuts[peers.rank], cuts[peers.rank + 1]

    def whole(self, h: Tensor) -> Tensor:
        return torch.cat([part[0] for part in self.peers.gather([h])])


def together() -> bool:
    """Whether processes were joined."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
