"""Honest numbers: means with their spread, and differences paired by seed with confidence intervals."""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

SURE = 0.95
FAR = 2.0  # standard deviations from the paper's figure that ask for a word


class Summary(NamedTuple):
    """Of several runs; the deviation of one run is unknown."""

    mean: float
    std: float | None
    runs: int

    def text(self) -> str:
        return f"{self.mean:.4f}" + ("" if self.std is None else f" ± {self.std:.4f}")


class Paired(NamedTuple):
    """one - two, seed by seed: the mean, its confidence interval (t), the p-value, and over how many seeds."""

    difference: float
    low: float
    high: float
    p: float
    seeds: int

    @property
    def apart(self) -> bool:
        return self.low > 0 or self.high < 0


def summary(scores: list[float]) -> Summary:
    return Summary(statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else None, len(scores))


def paired(one: dict[int, float], two: dict[int, float], sure: float = SURE) -> Paired | None:
    """None where fewer than two seeds are in common: nothing can be said then. `sure`: the interval's probability."""
    gaps = [one[seed] - two[seed] for seed in sorted(one.keys() & two.keys())]
    if len(gaps) < 2:
        return None
    from scipy.stats import t

    mean, error = statistics.fmean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
    if error == 0:  # no spread to measure against
        return Paired(mean, mean, mean, 0.0 if mean else 1.0, len(gaps))
    reach = float(t.ppf(0.5 + sure / 2, len(gaps) - 1)) * error
    p = 2 * float(t.sf(abs(mean / error), len(gaps) - 1))
    return Paired(mean, mean - reach, mean + reach, p, len(gaps))


def verdicts(top: str, others: dict[str, Paired | None], numbers: bool = True) -> list[str]:
    """What may be said of the highest mean against each of the others: a sentence for each kind of answer."""
    groups: dict[str, list[str]] = {}
    for name, test in others.items():
        if test is None:
            groups.setdefault("has fewer than two seeds in common with, and cannot be compared to,", []).append(name)
            continue
        kind = "is ahead of" if test.low > 0 else "cannot be told apart from"
        by = f" ({test.difference:+.4f}, {test.low:+.4f} to {test.high:+.4f})" if numbers else ""
        groups.setdefault(kind, []).append(name + by)
    return [f"{top} {kind} {', '.join(names)}." for kind, names in groups.items()]


def far(ours: Summary, paper: tuple[float, float] | None) -> bool:
    """Whether ours and the paper's mean are more than two standard deviations apart, the larger of the two."""
    return paper is not None and abs(ours.mean - paper[0]) > FAR * max(ours.std or 0.0, paper[1])


def scores(facts: dict[str, Any]) -> dict[int, float]:
    """Test scores by seed."""
    return {run["seed"]: run["test"] for run in facts["runs"]}
