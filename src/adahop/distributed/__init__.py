"""Training in several processes: seeds are split, gradients averaged, policy updates exchanged."""

from adahop.distributed.heartbeat import session
from adahop.distributed.parted import PartedTeam
from adahop.distributed.peers import Peers, join, launched, leave
from adahop.distributed.shard import HOW, Shard
from adahop.distributed.shard import write as write_shards
from adahop.distributed.teams import Alone, Team, together
from adahop.seams import NodeData

__all__ = [
    "HOW", "Alone", "PartedTeam", "Peers", "Shard", "Team", "join", "launched", "leave", "session", "team", "together",
    "write_shards",
]  # fmt: skip


def team(data: NodeData | None = None) -> Alone:
    """What this process does for the others: nothing in a single process; with a `Shard` as data, each owns a part."""
    if not together():
        return Alone()
    return PartedTeam(data) if isinstance(data, Shard) else Team()
