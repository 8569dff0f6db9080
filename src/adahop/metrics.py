"""Metrics by task: accuracy, micro-F1, macro-F1, ROC-AUC."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from adahop.checks import one_of

METRICS = ("accuracy", "micro-f1", "macro-f1", "roc-auc")
TOGETHER = ("macro-f1", "roc-auc")  # of all nodes at once: parts do not add up


def criterion(out: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
    """Cross-entropy for classes, binary cross-entropy for multi-labels; weights, where given, sum the rows instead."""
    if y.is_floating_point():
        loss = binary_cross_entropy_with_logits(out, y, reduction="none").mean(1)
    else:
        loss = cross_entropy(out, y, reduction="none")
    return loss.mean() if weight is None else (loss * weight).sum()


def score(metric: str, out: Tensor, y: Tensor) -> float:
    """One number for outputs and labels; 0 for an empty set."""
    one_of(metric, METRICS, "metric")
    if len(y) == 0:
        return 0.0
    if metric == "roc-auc":
        return _roc_auc(out, y)
    if metric == "macro-f1":
        return _macro_f1(out, y)
    if not y.is_floating_point():
        return float((out.argmax(1) == y).float().mean())
    top, bottom = tally(metric, out, y)
    return top / max(bottom, 1)


def tally(metric: str, out: Tensor, y: Tensor) -> tuple[int, int]:
    """Two counts that add up over parts of the nodes; their ratio is the accuracy or micro-F1."""
    assert metric not in TOGETHER
    if not y.is_floating_point():
        return int((out.argmax(1) == y).sum()), len(y)
    predicted, true = out > 0, y > 0.5
    return 2 * int((predicted & true).sum()), int(predicted.sum()) + int(true.sum())


def _macro_f1(out: Tensor, y: Tensor) -> float:
    """The mean of every class's F1; 0 for a class that neither occurs nor is predicted."""
    predicted, true = (
        (out > 0, y > 0.5)
        if y.is_floating_point()
        else (one_hot(out.argmax(1), out.shape[1]) > 0, one_hot(y, out.shape[1]) > 0)
    )
    both, either = (predicted & true).sum(0), predicted.sum(0) + true.sum(0)
    return float((2 * both / either.clamp(min=1)).mean())


def _roc_auc(out: Tensor, y: Tensor) -> float:
    """Mean over the labels that have both kinds; classes count one against the rest, of two only the second."""
    if not y.is_floating_point():
        out, y = torch.softmax(out, 1), one_hot(y, out.shape[1])
        out, y = (out[:, 1:], y[:, 1:]) if out.shape[1] == 2 else (out, y)
    mixed = (y.min(0).values < y.max(0).values).nonzero().flatten().tolist()
    areas = [_area(out[:, j], y[:, j] > 0.5) for j in mixed]
    return sum(areas) / len(areas) if areas else 0.5


def _area(score: Tensor, true: Tensor) -> float:
    """The share of pairs (true, false) whose scores are in order, a tie counting half: Mann and Whitney's U.

    >>> _area(torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([True, False, True, False]))
    0.875
    """
    _, place, many = torch.unique(score, return_inverse=True, return_counts=True)
    rank = many.cumsum(0) - (many - 1) / 2.0  # equal scores share the mean of their ranks, counted from 1
    yes, no = int(true.sum()), int((~true).sum())
    return (float(rank.double()[place[true]].sum()) - yes * (yes + 1) / 2) / (yes * no)
