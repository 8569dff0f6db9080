"""Race: `noise="auto"`. How much sampling noise a control variate leaves in is chosen on validation, during the run.

    2 epochs shared | every arm, from the same state with the same random streams | the two best | the winner goes on

Counted in epochs and evaluations, never in seconds: the choice is the same on any machine, and a run that was stopped
chooses as if it had not been. The arms were fixed before anything was measured with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adahop.storage import Storage, storage_in

if TYPE_CHECKING:
    from adahop.run import Run

ARMS = (0.0, 0.5, 1.0)  # the first is kept unless another is clearly ahead
SHARED = 2  # epochs before the arms part
MOST = (4, 6)  # epochs of each arm in the first round, and in the second
LEAST = 10  # epochs of a run that has a race
GROUPS = 20  # of validation nodes, each left out once: how the error of a difference is found


def rounds(epochs: int, patience: int = 0) -> tuple[int, int]:
    """Epochs of each arm in the first and in the second round; (0, 0): none.

    All arms together then cost at most 1.35 times what the run alone would, were it to end as early as `patience` lets
    it: 2 further arms of the first round and 1 of the second.

    >>> rounds(40), rounds(30), rounds(9), rounds(40, patience=10)
    ((4, 6), (3, 4), (0, 0), (1, 1))
    """
    surely = min(epochs, patience + 1) if patience else epochs
    if surely < LEAST:
        return 0, 0
    return min(surely // 10, MOST[0]), min(3 * surely // 20, MOST[1])


@dataclass
class Arm:
    """One setting of the dial: its best validation score so far, that score without each group, and where it stands."""

    noise: float
    val: float = -1.0
    epochs: int = 0
    groups: list[float] = field(default_factory=list)
    state: dict[str, Any] | None = None  # of the run, where the arm's last round ended

    def ahead_of(self, other: Arm) -> tuple[float, float]:
        """By how much, and the standard error of that over validation nodes, both arms judged on the same."""
        d = torch.tensor(self.groups, dtype=torch.float64) - torch.tensor(other.groups, dtype=torch.float64)
        return self.val - other.val, float(((len(d) - 1) * d.var(correction=0)).sqrt())

    def beats(self, other: Arm) -> bool:
        gap, error = self.ahead_of(other)
        return gap > error

    def row(self, base: Arm) -> dict[str, float]:
        """Where it stands, and how far ahead of another."""
        gap, error = self.ahead_of(base)
        return {"noise": self.noise, "epochs": self.epochs, "val": self.val, "ahead": gap, "error": error}


class Race:
    """The running arm, and what the others have reached. `judged` is called after every epoch and moves the run on."""

    def __init__(self, first: int, second: int):
        self.ends = (SHARED, SHARED + first, SHARED + first + second)  # the epoch at which each stage ends
        self.stage = 0  # 0 shared, 1 and 2 the rounds, 3 over
        self.arms = [Arm(noise) for noise in ARMS]
        self.running: list[int] = []  # the arms of this round
        self.turn = 0
        self.fork: Arm | None = None  # where the arms part
        self.groups: list[float] = []  # of the best epoch in the line of epochs that runs now
        self.evaluations = 0
        self.table: list[dict[str, float]] = []
        self.why = ""

    @property
    def over(self) -> bool:
        return self.stage > 2

    @property
    def noise(self) -> float:
        return self.arms[self.running[self.turn]].noise if self.running else ARMS[0]

    def judged(self, run: Run, groups: Callable[[], list[float]]) -> None:
        """An epoch was closed; `groups` gives the validation score of its model without each group of nodes."""
        self.evaluations += 1
        if self.over:
            return
        if run.result.best_epoch == run.result.epochs:
            self.groups = groups()
        if run.result.epochs < self.ends[self.stage]:
            return
        if self.stage == 0:
            self.fork = Arm(ARMS[0], state=kept(run), groups=self.groups)
            self._enter(run, list(range(len(self.arms))))
        else:
            self._ended(run)

    def _ended(self, run: Run) -> None:
        """An arm has run its round."""
        arm, last = self.arms[self.running[self.turn]], self.turn == len(self.running) - 1
        arm.val, arm.epochs, arm.groups = run.result.val, run.result.epochs, self.groups
        arm.state = None if last and self.stage == 2 else kept(run)
        if not last:
            self.turn += 1
            self._go_on(run)
            return
        base = self.arms[self.running[0]]
        self.table += [{"round": self.stage, **self.arms[i].row(base)} for i in self.running]
        if self.stage == 1:
            self.fork = None
            self._enter(run, self._best_two())
        else:
            self._choose(run)

    def _enter(self, run: Run, arms: list[int]) -> None:
        self.stage, self.running, self.turn = self.stage + 1, arms, 0
        for i in set(range(len(self.arms))) - set(arms):
            self.arms[i].state = None
        self._go_on(run)

    def _go_on(self, run: Run) -> None:
        """The run takes up the arm whose turn it is, where it stands."""
        arm = self.arms[self.running[self.turn]]
        at = self.fork if self.stage == 1 else arm
        assert at is not None and at.state is not None
        run.take_up(at.state)
        run.team.reseed(run)
        run.model.set_noise(arm.noise)
        self.groups, arm.state = at.groups, None

    def _best_two(self) -> list[int]:
        """The first and the best of the others; without the first where all others are clearly ahead of it."""
        first, *others = range(len(self.arms))
        others.sort(key=lambda i: -self.arms[i].val)
        if all(self.arms[i].beats(self.arms[first]) for i in others):
            return sorted(others[:2])
        return [first, others[0]]

    def _choose(self, run: Run) -> None:
        one, other = (self.arms[i] for i in self.running)
        clear = other.beats(one) if one.noise == ARMS[0] else other.val > one.val
        chosen = self.running[int(clear)]
        self.why = _sentence(one, other, clear)
        if not clear:
            self.turn = 0
            self._go_on(run)
        self.stage, self.running, self.turn = 3, [chosen], 0
        for arm in self.arms:
            arm.state = None

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "arms": [dict(vars(a)) for a in self.arms], "fork": self.fork and dict(vars(self.fork))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.arms = [Arm(**a) for a in state["arms"]]
        self.fork = Arm(**state["fork"]) if state["fork"] else None


def _sentence(one: Arm, other: Arm, clear: bool) -> str:
    """The choice between the last two, the less noisy one first, and why."""
    gap, error = other.ahead_of(one)
    if clear and one.noise == ARMS[0]:
        return f"noise {other.noise:g}: sampling regularises here, by {gap:+.4f} ± {error:.4f} on validation"
    if one.noise != ARMS[0]:
        return f"noise {(other if clear else one).noise:g}: sampling regularises here, noise {ARMS[0]:g} fell behind"
    if gap > 0:
        return (
            f"noise {one.noise:g}: {other.noise:g} is ahead on validation by {gap:.4f}, within its error of {error:.4f}"
        )
    return f"noise {one.noise:g}: ahead of {other.noise:g} on validation by {-gap:.4f} ± {error:.4f}"


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
