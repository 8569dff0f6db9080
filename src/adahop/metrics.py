"""Metrics by task: accuracy, micro-F1, ROC-AUC."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from adahop.checks import one_of

METRICS = ("accuracy", "micro-f1", "roc-auc")


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
    if not y.is_floating_point():
        return float((out.argmax(1) == y).float().mean())
    predicted, true = out > 0, y > 0.5
    both = int((predicted & true).sum())
    return 2 * both / max(int(predicted.sum()) + int(true.sum()), 1)


def _roc_auc(out: Tensor, y: Tensor) -> float:
    """Mean over the labels that have both kinds; for two classes, of the second's score."""
    from sklearn.metrics import roc_auc_score

    if not y.is_floating_point():
        out = torch.softmax(out, 1)
        if out.shape[1] == 2:
            return float(roc_auc_score(y.cpu(), out[:, 1].cpu()))
        return float(roc_auc_score(y.cpu(), out.cpu(), multi_class="ovr", labels=range(out.shape[1])))
    mixed = (y.min(0).values < y.max(0).values).nonzero().flatten()
    if mixed.numel() == 0:
        return 0.5
    return float(roc_auc_score(y[:, mixed].cpu(), out[:, mixed].cpu(), average="macro"))
