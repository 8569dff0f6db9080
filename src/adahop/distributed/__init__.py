"""Training in several processes: seeds are split, gradients averaged, policy updates exchanged."""

from adahop.distributed.heartbeat import session
from adahop.distributed.partitioned import Partitioned
from adahop.distributed.peers import Peers, join, launched, leave
from adahop.distributed.shard import HOW, Shard
from adahop.distributed.shard import write as write_shards
from adahop.distributed.strategy import Replicated, Strategy, several_ranks
from adahop.seams import NodeData

__all__ = [
    "HOW", "Partitioned", "Peers", "Replicated", "Shard", "Strategy", "join", "launched", "leave", "session",
    "several_ranks", "strategy", "write_shards",
]  # fmt: skip


def strategy(data: NodeData | None = None) -> Strategy:
    """How ranks train together: not at all in a single process, each with its part of the graph where data is a Shard,
    else each with the whole graph."""
    if not several_ranks():
        return Strategy()
    return Partitioned(data) if isinstance(data, Shard) else Replicated()
