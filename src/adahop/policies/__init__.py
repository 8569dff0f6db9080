"""Policies: the odds of each neighbour. The rest of the package uses them only through `POLICIES`."""

from adahop.policies.attended import Attended
from adahop.policies.base import Policy, Static, Uniform
from adahop.policies.exp3 import Exp3, Exp3M
from adahop.policies.thanos import Thanos, ThanosM
from adahop.policies.tracked import Tracked

POLICIES: dict[str, type[Policy]] = {
    "tracked": Tracked, "attended": Attended,
    "uniform": Uniform, "static": Static, "exp3": Exp3, "exp3m": Exp3M, "thanos": Thanos, "thanosm": ThanosM,
}  # fmt: skip

__all__ = [
    "POLICIES",
    "Attended",
    "Exp3",
    "Exp3M",
    "Policy",
    "Static",
    "Thanos",
    "ThanosM",
    "Tracked",
    "Uniform",
]
