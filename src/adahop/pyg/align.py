"""Which message belongs to which drawn edge, though layers add and remove self-loops on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from adahop.checks import InputError


def align(given: Tensor, used: Tensor, layer: str = "") -> tuple[Tensor, Tensor]:
    """(i, j): edge given[:, i] is used[:, j]. Self-loops are left out: they are never left to chance.

    A layer may see the first part of the edges alone (`trim_to_layer`), or all of them in another order.

    >>> i, j = align(torch.tensor([[1, 0, 2], [0, 0, 0]]), torch.tensor([[1, 2, 0], [0, 0, 0]]))
    >>> i.tolist(), j.tolist()
    ([0, 2], [0, 1])
    """
    used = used.to(given.device)
    i, j = ((e[0] != e[1]).nonzero().flatten() for e in (given, used))
    if j.numel() <= i.numel() and torch.equal(given[:, i[: j.numel()]], used[:, j]):
        return i[: j.numel()], j
    if i.numel() == j.numel():
        n = int(given.max()) + 1 if given.numel() else 1
        ki, kj = (e[1, at] * n + e[0, at] for e, at in ((given, i), (used, j)))
        oi, oj = ki.argsort(stable=True), kj.argsort(stable=True)
        if torch.equal(ki[oi], kj[oj]):
            return i[oi], j[oj]
    raise InputError(
        f"layer '{layer}' must pass messages over the edges of the batch, {i.numel()} without self-loops, "
        f"got {j.numel()} others"
    )
