"""Several processes: seeds split, gradients averaged, what is learnt exchanged. Alone, nothing of it happens."""

from typing import Any

from adahop.distributed.heart import session
from adahop.distributed.parted import PartedTeam
from adahop.distributed.peers import Peers, join, launched, leave
from adahop.distributed.shard import HOW, Shard
from adahop.distributed.shard import write as write_shards
from adahop.distributed.teams import Alone, Team, together

__all__ = [
    "HOW", "Alone", "PartedTeam", "Peers", "Shard", "Team", "join", "launched", "leave", "session", "team", "together",
    "write_shards",
]  # fmt: skip


def team(data: Any = None) -> Alone:
    """The team of this process: alone unless processes were joined; with a shard for data, each owns a part."""
    if not together():
        return Alone()
    return PartedTeam(data) if isinstance(data, Shard) else Team()
