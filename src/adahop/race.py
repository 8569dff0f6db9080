"""Race: `noise="auto"`. Whether sampling noise is taken away or left in is chosen on validation, during the run.

    2 epochs shared | as the method draws, noise 0 | the same epochs by uniform draws | the better one goes on

Where noise hurts, uniform draws of a part of the neighbours fall behind by far and at once; where it regularises they
are ahead by a little, and later. So both run for as long as the cost allows, and the better one is taken however small
its lead: a wrong choice between equals costs nothing. Counted in epochs and evaluations, never in seconds: the choice
is the same on any machine, and a run that was stopped chooses as if it had not been.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adahop.storage import Storage, storage_in

if TYPE_CHECKING:
    from adahop.graph import Graph
    from adahop.run import Run

UNIFORM = "uniform"  # instead of a level of the dial: every layer is drawn, evenly, and nothing is remembered
SHARE, FEWEST, MOST = 5, 2, 10  # one neighbour in so many is then drawn per layer, and no fewer and no more than these
ARMS = (0.0, UNIFORM)
SHARED = 2  # epochs before the arms part
LEAST = 10  # epochs of a run that has a race
BEST = 3  # epochs of an arm whose mean score counts: the very best is more often luck
GROUPS = 20  # of validation nodes, each left out once: how the error of a difference is found


def length(epochs: int, patience: int = 0) -> int:
    """Epochs of each arm; 0: there is no race.

    The second arm's come on top of the run's own: 1.35 times what it alone would cost, were it to end as early as
    `patience` lets it.

    >>> length(40), length(30), length(9), length(40, patience=10)
    (14, 10, 0, 3)
    """
    surely = min(epochs, patience + 1) if patience else epochs
    return 7 * surely // 20 if surely >= LEAST else 0


def draws(graph: Graph) -> int:
    """Neighbours that the uniform arm draws per node (per row of a typed graph) and layer.

    >>> from adahop.datasets import load
    >>> [draws(load(f"synthetic:100,{edges},4,2").graph) for edges in (400, 2500, 9000)]
    [2, 5, 10]
    """
    degree = graph.num_edges / max(graph.num_rows, 1)
    return min(max(round(degree / SHARE), FEWEST), MOST)


@dataclass
class Arm:
    """One way to draw: its validation scores, the best one without each group of nodes, and where it stands."""

    noise: float | str
    scores: list[float] = field(default_factory=list)
    groups: list[float] = field(default_factory=list)
    state: dict[str, Any] | None = None  # of the run, where the arm ended

    @property
    def val(self) -> float:
        """What it is judged by: the mean of its best epochs."""
        return statistics.fmean(sorted(self.scores)[-BEST:])

    def ahead_of(self, other: Arm) -> float:
        return self.val - other.val

    def error(self, other: Arm) -> float:
        """The standard error of a difference to another over validation nodes, both at their best on the same."""
        d = torch.tensor(self.groups, dtype=torch.float64) - torch.tensor(other.groups, dtype=torch.float64)
        return float(((len(d) - 1) * d.var(correction=0)).sqrt())

    def beats(self, other: Arm) -> bool:
        """Whether it is ahead by more than the error."""
        return self.ahead_of(other) > self.error(other)

    def row(self, base: Arm) -> dict[str, Any]:
        """Where it stands, and how far ahead of another."""
        told = {"noise": self.noise, "epochs": len(self.scores), "val": self.val}
        return {**told, "ahead": self.ahead_of(base), "error": self.error(base)}


class Race:
    """The running arm, and what the other has reached. `judged` is called after every epoch and moves the run on."""

    def __init__(self, epochs: int, draws: int):
        self.draws = draws  # of the uniform arm
        self.ends = (SHARED, SHARED + epochs)  # the epochs at which the arms part, and at which each ends
        self.arms = [Arm(noise) for noise in ARMS]
        self.turn = -1  # which arm runs; -1: both do
        self.over = False
        self.fork: dict[str, Any] | None = None  # the run's state where the arms part
        self.evaluations = 0
        self.table: list[dict[str, Any]] = []
        self.why = ""

    @property
    def noise(self) -> float | str:
        return self.arms[max(self.turn, 0)].noise

    def judged(self, run: Run, val: float, groups: Callable[[], list[float]]) -> None:
        """An epoch was closed; `groups` gives the validation score of its model without each group of nodes."""
        self.evaluations += 1
        if self.over:
            return
        if self.turn < 0:
            if run.result.epochs == self.ends[0]:
                self.fork, self.turn = kept(run), 0
            return
        arm = self.arms[self.turn]
        arm.scores.append(val)
        if val >= max(arm.scores):
            arm.groups = groups()
        if run.result.epochs == self.ends[1]:
            self._ended(run)

    def _ended(self, run: Run) -> None:
        """An arm has run its epochs."""
        first, second = self.arms
        if self.turn == 0:
            first.state, state, self.fork = kept(run), self.fork, None
            assert state is not None
            self.turn = 1
            self._go_on(run, state)
            return
        self.table = [arm.row(first) for arm in self.arms]
        ahead, self.over = second.ahead_of(first), True
        self.why = _sentence(ahead, second.error(first), self.draws)
        if ahead <= 0:
            assert first.state is not None
            self.turn = 0
            self._go_on(run, first.state)
        first.state = None

    def _go_on(self, run: Run, state: dict[str, Any]) -> None:
        """The run takes up the arm whose turn it is, from a state."""
        run.take_up(state)
        run.strategy.reseed(run)
        run.turn(self.noise)

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "arms": [dict(vars(a)) for a in self.arms]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.arms = [Arm(**a) for a in state["arms"]]


def _sentence(ahead: float, error: float, draws: int) -> str:
    """The choice and why: by how much uniform draws are ahead on validation."""
    if ahead > 0:
        lead = f"{ahead:.4f} ± {error:.4f}"
        return f"noise uniform: sampling regularises here; uniform draws of {draws} are ahead on validation by {lead}"
    return f"noise 0: uniform draws of {draws} are behind on validation by {-ahead:.4f} ± {error:.4f}"


def kept(run: Run) -> dict[str, Any]:
    """A copy of all that the rest of a run depends on, in host memory or in files, as the run's own state is."""
    return _copy(run.line(), storage_in(run.config.state))


def _copy(value: Any, storage: Storage) -> Any:
    if isinstance(value, Tensor):
        return storage.empty(tuple(value.shape), value.dtype).copy_(value)
    if isinstance(value, dict):
        return {k: _copy(v, storage) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy(v, storage) for v in value)
    return value


def group_of(nodes: Tensor) -> Tensor:
    """The group of each validation node: by its id alone, spread evenly."""
    return ((nodes * 2654435761) % (1 << 32) >> 12) % GROUPS
