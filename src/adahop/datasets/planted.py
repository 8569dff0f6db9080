"""`planted:`: a labelled graph of any size on which samplers differ, with the best possible score known.

Every node has a label and a type; its features are the type's mean plus noise. A node's label decides which types its
neighbours have, so that the label can be read from the *counts* of types around a node. Where the label changes the
counts only a little, many neighbours must be averaged, and sampling noise hurts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

from adahop.checks import InputError
from adahop.datasets.base import Dataset, make
from adahop.datasets.made import add_means, check_counts, csr_graph, power_law, random_split

CHUNK = 1 << 22  # edges drawn at once
Options = TypeVar("Options")


@dataclass(frozen=True)
class Planting:
    """The options after N,E,F,C."""

    signal: float = 0.2  # share of a node's neighbours of the type that its label prefers; the others are of any type
    fade: float = 0.0  # signal * (degree / mean degree)^-fade: with 0.5, hubs are as hard as other nodes
    own: float = 0.3  # share of nodes whose own type is their label; the others have a random type
    shift: int = 0  # the type that a label prefers: 0 its own (homophily), 1 the next one (heterophily)
    strength: float = 2.0  # distance of two types' means, in standard deviations of the feature noise
    train: float = 0.6  # share of nodes to train on; a tenth is for validation
    wrong: float = 0.0  # share of training labels that are wrong
    seed: int = 0


def planted(spec: str) -> Dataset:
    """`planted:N,E,F,C[,signal=…][,fade=…][,own=…][,shift=…][,strength=…][,train=…][,wrong=…][,seed=…]`.

    Degrees have a power law, as in `synthetic:`. `bound` of the data set is the expected accuracy, over test nodes, of
    the best rule that knows every node's type and how the graph was made. A model sees types only through noisy
    features, so no model can be expected to score more.

    >>> planted("planted:200,2000,8,3,signal=0.5").bound > 0.7
    True
    """
    n, m, f, c, plan = _parse(spec)
    rng = np.random.default_rng(plan.seed)
    y = rng.permutation(np.arange(n) % c)
    kind = np.where(rng.random(n) < plan.own, y, rng.integers(0, c, n))
    indptr, copies = power_law(n, m, rng)
    signal = _signal(indptr, plan)
    preferred = (y + plan.shift) % c
    indices, counts = _sources(indptr, preferred, kind, copies, signal, c, rng)
    splits = random_split(n, plan.train, 0.1, rng)
    bound = _best(counts, kind, y, copies, signal, plan, c)[splits["test"]].mean()
    x = rng.standard_normal((n, f), dtype=np.float32)
    means = (rng.standard_normal((c, f)) * plan.strength / np.sqrt(2 * f)).astype(np.float32)
    add_means(x, means, kind)
    known = y.copy()
    learnt = splits["train"]
    bad = learnt[rng.random(learnt.size) < plan.wrong]
    known[bad] = (known[bad] + rng.integers(1, c, bad.size)) % c
    return with_bound(make(spec, csr_graph(indptr, indices), x, known, splits, classes=c), bound)


def with_bound(data: Dataset, bound: float) -> Dataset:
    """A data set with the best score that any model can be expected to have."""
    data.bound, data.note = float(bound), f"no model can be expected to score above {bound:.4f}"
    return data


def _signal(indptr: np.ndarray, plan: Planting) -> np.ndarray:
    degree = np.diff(indptr)
    mean = max(indptr[-1] / degree.size, 1e-9)
    return np.minimum(plan.signal * (np.maximum(degree, 1) / mean) ** -plan.fade, 0.95)


def _sources(
    indptr: np.ndarray, preferred: np.ndarray, kind: np.ndarray, copies: np.ndarray, signal: np.ndarray, c: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """A source for each edge, and the number of each node's sources by type.

    With probability `signal` a source is drawn from the nodes of the preferred type, else from all; a node is drawn in
    proportion to its `copies`. A source drawn twice is redrawn within its type, which leaves the counts unchanged.
    """
    order = np.argsort(kind, kind="stable").astype(np.int32)
    table = np.repeat(order, copies[order])
    width = np.bincount(kind, weights=copies, minlength=c).astype(np.int64)
    begin = np.cumsum(width) - width
    size = np.bincount(kind, minlength=c)
    first = np.cumsum(size) - size
    out, counts = np.empty(indptr[-1], np.int32), np.empty((kind.size, c), np.int32)
    cuts = np.searchsorted(indptr, np.arange(0, indptr[-1], CHUNK))
    for a, b in zip(cuts, [*cuts[1:], kind.size], strict=True):
        row = np.repeat(np.arange(a, b), np.diff(indptr[a : b + 1]))
        draw = rng.random(row.size)
        inside = rng.random(row.size) < signal[row]
        wanted = preferred[row]
        place = np.where(inside, begin[wanted] + draw * width[wanted], draw * table.size).astype(np.int64)
        src = table[np.minimum(place, table.size - 1)].astype(np.int64)
        src = np.sort((row << 32) + src) & 0xFFFFFFFF
        again = np.flatnonzero(np.r_[False, src[1:] == src[:-1]] | (src == row))
        of = kind[src[again]]
        src[again] = order[first[of] + (rng.random(again.size) * size[of]).astype(np.int64)]
        out[indptr[a] : indptr[b]] = src
        counts[a:b] = np.bincount((row - a) * c + kind[src], minlength=(b - a) * c).reshape(b - a, c)
    return out, counts


def _best(
    counts: np.ndarray, kind: np.ndarray, y: np.ndarray, copies: np.ndarray, signal: np.ndarray, plan: Planting, c: int
) -> np.ndarray:
    """Of every node the probability that the likeliest label, given all types and the graph, is right.

    Edges into different nodes are drawn independently: given all types, a label depends only on the node's own type and
    those of its sources.
    """
    share = np.bincount(kind, weights=copies, minlength=c) / copies.sum()
    share = np.maximum(np.roll(share, -plan.shift), 1e-12)  # of the type that each label prefers
    out = np.empty(len(y))
    for at in range(0, len(y), 1 << 16):
        s = signal[at : at + (1 << 16), None]
        preferred = np.roll(counts[at : at + (1 << 16)], -plan.shift, axis=1)
        log = preferred * (np.log(s + (1 - s) * share) - np.log((1 - s) * share))
        mine = np.full(log.shape, (1 - plan.own) / c)
        mine[np.arange(len(mine)), kind[at : at + (1 << 16)]] += plan.own
        log += np.log(np.maximum(mine, 1e-300))
        odds = np.exp(log - log.max(1, keepdims=True))
        out[at : at + (1 << 16)] = 1.0 / odds.sum(1)
    return out


def _parse(spec: str) -> tuple[int, int, int, int, Planting]:
    (n, m, f, c), plan = options_of(spec, Planting)
    allowed = {
        "signal": (0, 0.95), "fade": (0, 2), "own": (0, 1), "shift": (0, c - 1), "strength": (0, 100),
        "train": (0.001, 0.85), "wrong": (0, 1), "seed": (0, 2**63),
    }  # fmt: skip
    check_range(spec, plan, allowed)
    return n, m, f, c, plan


def options_of(spec: str, kind: type[Options]) -> tuple[tuple[int, int, int, int], Options]:
    """The numbers of KIND:N,E,F,C and the options after them."""
    what, _, rest = spec.partition(":")
    words = rest.split(",")
    known = {f.name: f.type for f in fields(kind)}  # type: ignore[arg-type]
    try:
        n, m, f, c = (int(word) for word in words[:4])
        given = dict(word.split("=") for word in words[4:])
        plan = kind(**{k: (int if known[k] == "int" else float)(v) for k, v in given.items()})
    except (ValueError, KeyError):
        names = ", ".join(known)
        raise InputError(f"`dataset` must be {what}:N,E,F,C, then name=value of {names}, got '{spec}'") from None
    check_counts(spec, n, m, f, c)
    return (n, m, f, c), plan


def check_range(spec: str, plan: object, allowed: dict[str, tuple[float, float]]) -> None:
    for name, (low, high) in allowed.items():
        if not low <= getattr(plan, name) <= high:
            what = spec.partition(":")[0]
            raise InputError(f"`{name}` of {what}: must be in [{low}, {high}], got {getattr(plan, name)}")
