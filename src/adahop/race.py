"""Race: `noise="auto"`. Whether sampling noise is taken away or left in is chosen on validation, during the run.

    many neighbours: 2 epochs shared | 5 each: noise 0, uniform draws of 2, of 10 | 6 more of the best two | the best
    few:             2 epochs shared | 14 each: noise 0, uniform draws of 2                                | the best

How much noise is best differs: where it hurts, uniform draws fall behind by far and at once; where it regularises they
are ahead by a little, and later, and which number of neighbours is best depends on the graph. So the best two run for
as long as the cost allows, and the better one is taken however small its lead, but for the dearer draws of ten: a wrong
choice between equals costs nothing. Counted in epochs and evaluations, never in seconds: the choice is the same on any
machine, and a run that was stopped chooses as if it had not been.
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

UNIFORM = {
    "uniform 2": 2,
    "uniform 10": 10,
}  # every layer is drawn evenly, so many of a node, and nothing is remembered
MARGIN = {"uniform 10": 0.01}  # by which an arm must be ahead: a step costs more, and it may look good early alone
ENOUGH = 2  # times as many neighbours as an arm draws, where it is not the first: else it takes most of them
SHARED = 2  # epochs before the arms part
LEAST = 10  # epochs of a run that has a race
BEST = 3  # epochs of an arm whose mean score counts: the very best is more often luck
GROUPS = 20  # of validation nodes, each left out once: how the error of a difference is found


def arms(graph: Graph) -> list[float | str]:
    """What is raced: noise 0, and the uniform draws that leave enough of the neighbours out.

    >>> from adahop.datasets import load
    >>> [arms(load(f"synthetic:100,{edges},4,2").graph) for edges in (300, 2500)]
    [[0.0, 'uniform 2'], [0.0, 'uniform 2', 'uniform 10']]
    """
    degree = graph.num_edges / max(graph.num_rows, 1)
    first, *more = UNIFORM
    return [0.0, first, *(name for name in more if degree >= ENOUGH * UNIFORM[name])]


def length(epochs: int, patience: int = 0, many: int = 3) -> tuple[int, int]:
    """Epochs of so many arms, and how many more the last two have; (0, 0): there is no race.

    All but one of the arms' come on top of the run's own: together at most 1.4 times what it alone would cost, were it
    to end as early as `patience` lets it.

    >>> length(40), length(30), length(9), length(40, patience=10)
    ((5, 6), (3, 6), (0, 0), (1, 2))
    >>> length(40, many=2)
    (0, 14)
    """
    surely = min(epochs, patience + 1) if patience else epochs
    if surely < LEAST:
        return 0, 0
    if many == 2:
        return 0, 7 * surely // 20
    first = surely // 8
    return first, 2 * surely // 5 - 2 * first


@dataclass
class Arm:
    """One way to draw: its validation scores, the best one without each group of nodes, and where it stands."""

    noise: float | str
    scores: list[float] = field(default_factory=list)
    groups: list[float] = field(default_factory=list)
    state: dict[str, Any] | None = None  # of the run, where the arm ended

    def val(self, epochs: int | None = None) -> float:
        """What it is judged by: the mean of the best of its first epochs (all)."""
        return statistics.fmean(sorted(self.scores[:epochs])[-BEST:])

    @property
    def rank(self) -> float:
        """What decides between arms."""
        return self.val() - MARGIN.get(str(self.noise), 0.0)

    def ahead_of(self, other: Arm) -> float:
        """After as many epochs as both have run."""
        both = min(len(self.scores), len(other.scores))
        return self.val(both) - other.val(both)

    def error(self, other: Arm) -> float:
        """The standard error of a difference to another over validation nodes, both at their best on the same."""
        d = torch.tensor(self.groups, dtype=torch.float64) - torch.tensor(other.groups, dtype=torch.float64)
        return float(((len(d) - 1) * d.var(correction=0)).sqrt())

    def beats(self, other: Arm) -> bool:
        """Whether it is ahead by more than the error."""
        return self.ahead_of(other) > self.error(other)

    def row(self, base: Arm) -> dict[str, Any]:
        """Where it stands, and how far ahead of another."""
        told = {"noise": self.noise, "epochs": len(self.scores), "val": self.val()}
        return {**told, "ahead": self.ahead_of(base), "error": self.error(base)}


class Race:
    """The running arm, and what the others have reached. `judged` is called after every epoch and moves the run on."""

    def __init__(self, arms: list[float | str], first: int, second: int):
        self.ends = (SHARED, SHARED + first, SHARED + first + second)  # epochs at which the arms part, and stop
        self.arms = [Arm(noise) for noise in arms]
        self.left = list(range(len(arms)))  # arms that are still in it
        self.turn = -1  # which arm runs; -1: all do
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
        if run.result.epochs == self.ends[1 if len(self.left) > 2 else 2]:
            self._stopped(run, arm)

    def _stopped(self, run: Run, arm: Arm) -> None:
        """The running arm has had its epochs, for now."""
        arm.state = kept(run)
        at = self.left.index(self.turn) + 1
        if at < len(self.left):
            self.turn = self.left[at]
            self._go_on(run)
            return
        ranked = sorted(self.left, key=lambda i: self.arms[i].rank, reverse=True)  # of equals, the first
        if len(ranked) > 2:
            self.arms[ranked[-1]].state = None
            self.left = sorted(ranked[:-1])
            self.turn = self.left[0]
            self._go_on(run)
            return
        best, other = (self.arms[i] for i in ranked)
        self.table = [a.row(self.arms[0]) for a in self.arms]
        self.over, self.why = True, _sentence(best, other)
        self.turn = ranked[0]
        self._go_on(run)

    def _go_on(self, run: Run) -> None:
        """The run takes up the arm whose turn it is, where that stands or where the arms part."""
        arm = self.arms[self.turn]
        state, arm.state = arm.state or self.fork, None
        assert state is not None
        if all(a.scores or a is arm for a in self.arms):
            self.fork = None
        if self.over:
            for a in self.arms:
                a.state = None
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


def _sentence(best: Arm, other: Arm) -> str:
    """The choice and why: how it compares with the next best on validation."""
    ahead, error = best.ahead_of(other), best.error(other)
    lead = f"{'ahead of' if ahead >= 0 else 'behind'} {_named(other)} on validation by {abs(ahead):.4f} ± {error:.4f}"
    surely = best.noise in UNIFORM and best.beats(other)
    return f"{_named(best)}{': sampling regularises here' if surely else ''}; {lead}"


def _named(arm: Arm) -> str:
    return f"noise {arm.noise}" if isinstance(arm.noise, str) else f"noise {arm.noise:g}"


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
