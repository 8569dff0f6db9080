"""Partitioned training: each rank owns some nodes; others ask it for their draws and features."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from adahop.block import Block, Seeds
from adahop.checks import InputError
from adahop.distributed.exchange import first_per_target
from adahop.distributed.peers import Peers
from adahop.distributed.shard import Shard
from adahop.distributed.strategy import Replicated
from adahop.graph import Graph
from adahop.messages import Reading
from adahop.ops import Drawn, Rows, pointer, random, spans
from adahop.samplers import NeighborSampler, Sampler
from adahop.samplers.base import EPOCH
from adahop.samplers.loop import Fetched, Numbering, drawn_from, sample
from adahop.seams import NodeData

if TYPE_CHECKING:
    from adahop.run import Run


class OwnerRequest:
    """Ids, sorted by the rank that owns them and sent to it."""

    def __init__(self, peers: Peers, bounds: Tensor, ids: Tensor):
        owner = torch.bucketize(ids, bounds[1:-1], right=True)
        self.peers, self.order = peers, torch.argsort(owner, stable=True)
        self.many = torch.bincount(owner, minlength=peers.size).tolist()
        theirs = peers.all_to_all([[part] for part in ids[self.order].split(self.many)])
        self.theirs = [part for (part,) in theirs]  # what each rank asks of this one

    def rows(self, own: Tensor, low: int) -> Tensor:
        """own[id - low] of every id, in the order they were given."""
        got = self.peers.all_to_all([[own[ids - low]] for ids in self.theirs])
        rows = torch.cat([part for (part,) in got])
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


class RemoteRows:
    """Rows of all nodes, each held by its owner. `index_select` is a collective call: every rank must make it."""

    def __init__(self, peers: Peers, shard: Shard, own: Tensor, length: int):
        self.peers, self.shard, self.own, self.length = peers, shard, own, length

    def __len__(self) -> int:
        return self.length

    def index_select(self, dim: int, n_id: Tensor) -> Tensor:
        return OwnerRequest(self.peers, self.shard.bounds, n_id).rows(self.own, self.shard.low)


class OwnRows:
    """Rows of this rank's own nodes, by global id: enough for seeds, which are always own nodes."""

    def __init__(self, shard: Shard, own: Tensor, length: int):
        self.low, self.own, self.length = shard.low, own, length

    def __len__(self) -> int:
        return self.length

    def index_select(self, dim: int, n_id: Tensor) -> Tensor:
        return self.own[n_id - self.low]


class Answers(NamedTuple):
    """What a rank drew for all ranks in one layer, and the number of edges that it received from each."""

    received: list[int]
    dst: Tensor
    drawn: Drawn


class PartitionedSampler(Sampler):
    """Node-wise sampling over shards: a target's owner draws for it with its own policy state, and updates that.

    Blocks have global node ids; `pos` is the edge's place among the answers of the step. Batches are those of one
    process with the same seed; each rank takes the seeds that it owns, possibly none.
    """

    ordered = True  # all ranks draw at the same time

    def __init__(self, inner: NeighborSampler, shard: Shard, peers: Peers):
        super().__init__(inner.graph, inner.sizes, inner.seed)
        self.inner, self.shard, self.peers = inner, shard, peers
        self.salt = (peers.rank,)
        self.answers: dict[int, Answers] = {}  # of each layer, for the update
        self._scratch = torch.full((shard.num_nodes,), -1, dtype=torch.int32)  # blocks have global ids

    @property
    def learns(self) -> bool:  # type: ignore[override]
        return self.inner.learns

    @property
    def reads(self) -> Reading:  # type: ignore[override]
        return self.inner.reads

    def epoch(self, nodes: Any, batch_size: int, shuffle: bool = True) -> Iterator[Tensor]:
        """This rank's seeds of each batch of a single process; one random number per seed decides the order."""
        before = [int(many[0]) for (many,) in self.peers.all_gather([torch.tensor([nodes.numel()])])]
        mark = torch.arange(nodes.numel()) + sum(before[: self.peers.rank])  # the place among all ranks' nodes
        if shuffle:
            mark = random.bits(random.key(self.seed, EPOCH, int(self.epochs)), mark, 0)
        self.epochs += 1
        everyone = torch.cat([theirs for (theirs,) in self.peers.all_gather([mark])]).sort().values
        ends = everyone[batch_size - 1 :: batch_size].contiguous()
        order = torch.argsort(mark, stable=True)
        cuts = [0, *torch.searchsorted(mark[order], ends, right=True).tolist()]
        for s in range(-(-sum(before) // batch_size)):
            yield nodes[order[cuts[s] : cuts[s + 1] if s + 1 < len(cuts) else None]] + self.shard.low

    @torch.no_grad()
    def sample(self, seeds: Any, numbering: Numbering | None = None) -> list[Block]:
        blocks = sample(self, Seeds(seeds), numbering)
        self.step += 1
        return blocks

    def expand(self, layer: int, rows: Rows, key: int | random.Stream) -> Fetched:
        """The rows' owners draw for them and send sources, edge ids and weights along."""
        asked = OwnerRequest(self.peers, self.shard.bounds, rows.row)
        answers = self.peers.all_to_all(self._answer(layer, asked, key))
        many, src, e_id, weight, prob, scale = (torch.cat(t) for t in zip(*answers, strict=True))
        many = many.long()
        self.answers[layer].received.extend(a[1].numel() for a in answers)
        start = many.cumsum(0) - many
        count, begin = torch.empty_like(many), torch.empty_like(many)
        count[asked.order], begin[asked.order] = many, start
        _, place = spans(begin, count)
        src, e_id, weight, prob, scale = (t[place] for t in (src, e_id, weight, prob, scale))
        return Fetched(Drawn(pointer(count), place, prob, scale), src, e_id, weight)

    def _answer(self, layer: int, asked: OwnerRequest, key: int | random.Stream) -> list[list[Tensor]]:
        """Draw for the own nodes that all ranks asked for, and store the draw for the update."""
        g, dst = self.graph, torch.cat(asked.theirs) - self.shard.low
        rows = g.rows(dst)
        drawn = drawn_from(self.inner, rows, self.inner.expand(layer, rows, key))
        cuts = drawn.ptr[torch.tensor([0, *(part.numel() for part in asked.theirs)]).cumsum(0)].diff().tolist()
        self.answers[layer] = Answers([], dst, drawn)
        src = self.shard.ids(g.indices[drawn.pos])
        e_id = self.shard.edge_ids(drawn.pos if g.eid is None else g.eid[drawn.pos].long())
        weight = torch.ones_like(drawn.scale) if g.weight is None else g.weight[drawn.pos]
        edges = [t.split(cuts) for t in (src, e_id, weight, drawn.prob, drawn.scale)]
        many = drawn.ptr.diff().int().split([part.numel() for part in asked.theirs])
        return [list(part) for part in zip(many, *edges, strict=True)]

    @torch.no_grad()
    def learn(self, blocks: list[Block], energy: list[Tensor]) -> None:
        """Send energies to the owners. Two ranks that asked for one target got the same draw, and the first counts."""
        sent = [torch.empty_like(e).index_copy_(0, b.pos, e) for b, e in zip(blocks, energy, strict=True)]
        parts = [e.split(self.answers[layer].received) for layer, e in enumerate(sent)]
        theirs = self.peers.all_to_all([list(part) for part in zip(*parts, strict=True)])
        for layer in range(len(blocks)):
            _, dst, drawn = self.answers[layer]
            energies = torch.cat([part[layer] for part in theirs])
            self.inner.policy.update(layer, *first_per_target(self.inner, dst, drawn, energies))


class Halo:
    """h of a part's own nodes, and of its halo, asked of its owners: what the part's in-edges read."""

    def __init__(self, peers: Peers, shard: Shard):
        self.rows, self.shard = (0, shard.high - shard.low), shard
        self.asked = OwnerRequest(peers, shard.bounds, shard.halo)

    def all_rows(self, h: Tensor) -> Tensor:
        return torch.cat([h, self.asked.rows(h, self.shard.low)])


class Partitioned(Replicated):
    """Every rank owns a part: its nodes' seeds, draws, features and policy state."""

    allows_memory = False

    def __init__(self, shard: Shard):
        super().__init__()
        self.shard = shard
        self.halo: Halo | None = None

    def check_estimator(self, estimator: str) -> None:
        if estimator != "plain":
            raise InputError(f"`estimator` must be plain with `partition`, as memories hold all nodes, got {estimator}")

    def wrap_sampler(self, sampler: Sampler) -> Sampler:
        if not sampler.by_owner:
            kinds = "a node-wise method without `budget`: graphsage, bs, bs.m, thanos, thanos.m or adahop"
            raise InputError(f"`method` must be {kinds} with `partition`, got {type(sampler).__name__}")
        return PartitionedSampler(cast(NeighborSampler, sampler), self.shard, self.peers)

    def row_source(self, data: NodeData, sampler: Sampler) -> Any:
        n = sampler.graph.num_nodes
        return SimpleNamespace(x=RemoteRows(self.peers, self.shard, data.x, n), y=OwnRows(self.shard, data.y, n))

    def setup(self, run: Run) -> None:
        run.loader.lean = False  # rows of other ranks cannot be read in place
        run.loader.prefetch = 0  # collective calls of a thread would mix with those of the step
        self.reseed(run)

    def common_step(self, step: int) -> int:
        return min(int(theirs[0]) for theirs in self.peers.all_gather([torch.tensor([step])]))

    def checkpoint_due(self, due: bool) -> bool:
        return self.peers.total(due and self.rank == 0)[0] > 0

    def sync_histories(self) -> None:
        """There are none."""

    def parts(self, graph: Graph) -> Any:
        if self.halo is None:
            self.halo = Halo(self.peers, self.shard)
        return self.halo
