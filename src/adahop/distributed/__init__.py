"""Several processes: seeds split, gradients averaged, what is learnt exchanged. Alone, nothing of it happens."""

from adahop.distributed.heart import session
from adahop.distributed.peers import Peers, join, launched, leave
from adahop.distributed.team import Alone, Team, team

__all__ = ["Alone", "Peers", "Team", "join", "launched", "leave", "session", "team"]
