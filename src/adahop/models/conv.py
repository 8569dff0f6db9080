"""Conv: one layer, and how it tells a watching sampler of its messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from adahop.block import Block
from adahop.checks import one_of
from adahop.estimators import FEEDBACK, energies, scored


class Conv(nn.Module):
    """One layer: from h of the sources, and of the targets, to the targets' new h.

    `self.speak` tells a watching sampler one number a message, its energy or what else it wants; it costs nothing while
    nobody watches.
    """

    memories: dict[str, Any] = {}  # noqa: RUF012  (which memories can serve it, see `adahop.memory`)
    raw = False  # whether `raw_total` can form the sum from a table of features
    asks_own = True  # whether the target's own h has a part in `combine` or in the scores

    def __init__(self) -> None:
        super().__init__()
        self.watcher: Callable[[Tensor], None] | None = None
        self.feedback = "energy"
        self.ready: Any = None
        self.tap: Callable[[Tensor, Block, Tensor | None], None] | None = None  # see `diagnostics`

    def speak(self, h: Tensor, block: Block, coef: Tensor, scores: tuple[Tensor, Tensor] | None = None) -> None:
        if self.watcher is not None and self.feedback in FEEDBACK:
            self.watcher(FEEDBACK[self.feedback](h, block, coef))
        elif self.watcher is not None:
            self.tell(energies(h, block, coef), coef, scores)
        if self.tap is not None:
            self.tap(h, block, coef)

    def tell(self, energy: Tensor, coef: Tensor | None = None, scores: tuple[Tensor, Tensor] | None = None) -> None:
        """For memories, whose messages are not a coefficient times a row of h, and for scores (attention alone)."""
        if self.watcher is None:
            return
        one_of(self.feedback, ("energy",) if scores is None else ("energy", "scores"), "feedback")
        if self.feedback == "scores" and scores is not None and coef is not None:
            energy = scored(energy, coef, *scores)
        self.watcher(energy)

    def prepare(self, h: Tensor) -> Any:
        """What the sources bring along, whoever the targets are."""
        return h

    def prepared(self, h: Tensor) -> Any:
        """`prepare(h)`, once for all chunks while the whole graph is passed over."""
        return self.prepare(h) if self.ready is None else self.ready

    def forward(self, h: Tensor, own: Tensor, block: Block) -> Tensor:
        raise NotImplementedError

    def raw_total(self, features: Any, own: Tensor, block: Block, encoder: nn.Linear | None, drop: Any) -> Tensor:
        """The sum of a_ij h_j, h_j = E x_j + b, from the features themselves."""
        raise NotImplementedError

    def combine(self, total: Tensor, own: Tensor) -> Tensor:
        """The targets' new h from the sum of a_ij h_j; layers that can be served by a memory can say."""
        raise NotImplementedError
