"""Built-in data sets: handwritten digits, and synthetic graphs of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from adahop.checks import InputError
from adahop.datasets.base import Dataset, make
from adahop.graph import Graph

NEIGHBOURS = 10  # of a digit
WITHIN = 0.7  # share of synthetic edges inside a class
APART = 2.0  # distance of two class means, in standard deviations of the noise
CHUNK = 1 << 22  # edges drawn at once


def digits() -> Dataset:
    """Digits of 8 x 8 pixels in [0, 1], connected to their nearest neighbours in both directions; split 60/20/20.

    `digits.npz` is the test set of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI Machine
    Learning Repository, CC BY 4.0), 1,797 images.
    """
    with np.load(Path(__file__).parent / "digits.npz", allow_pickle=False) as z:
        pixels, y = z["pixels"].astype(np.float64), z["y"].astype(np.int64)
    n, near = len(y), _nearest(pixels, NEIGHBOURS)
    a, b = np.repeat(np.arange(n), NEIGHBOURS), near.ravel()
    edges = np.unique(np.concatenate([a * n + b, b * n + a]))  # by target, then source, each once
    indptr = np.searchsorted(edges, np.arange(n + 1) * n)
    splits = random_split(n, 0.6, 0.2, np.random.default_rng(0))
    return make("digits", Graph.from_csr(indptr, edges % n), (pixels / 16).astype(np.float32), y, splits)


def _nearest(x: np.ndarray, k: int) -> np.ndarray:
    """The k nearest other rows of every row of integers, the first of equals: the same for any number of threads."""
    n, size = len(x), (x * x).sum(1)
    far = (size[:, None] + size[None, :] - 2 * (x @ x.T)).astype(np.int64)  # exact: the sums are whole and small
    np.fill_diagonal(far, far.max() + 1)
    return np.argpartition(far * n + np.arange(n), k - 1, axis=1)[:, :k]


def synthetic(spec: str) -> Dataset:
    """`synthetic:N,E,F,C[,SEED]`: power-law degrees, planted classes, class means in noise, split 66/10/24.

    A node's weight w (Pareto, between 1 and 100) sets its in-degree and how often it is drawn as a source, so hubs
    have high in- and out-degree. Seven edges in ten stay inside the class. Two class means are about 2 standard
    deviations apart, so features alone do not decide the class. A few edges in a hundred are parallel.
    """
    n, m, f, c, seed = _parse(spec)
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % c)
    indptr, copies = power_law(n, m, rng)
    indices = _sources(indptr, y, copies, c, rng)
    means = (rng.standard_normal((c, f)) * APART / np.sqrt(2 * f)).astype(np.float32)
    x = rng.standard_normal((n, f), dtype=np.float32)
    add_means(x, means, y)
    return make(spec, csr_graph(indptr, indices), x, y, random_split(n, 0.66, 0.1, rng), classes=c)


def _parse(spec: str) -> tuple[int, int, int, int, int]:
    try:
        numbers = [int(word) for word in spec.partition(":")[2].split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (4, 5) or min(numbers) < 0:
        raise InputError(f"`dataset` must be synthetic:N,E,F,C or synthetic:N,E,F,C,SEED, got '{spec}'")
    n, m, f, c, seed = [*numbers, 0][:5]
    check_counts(spec, n, m, f, c)
    return n, m, f, c, seed


def check_counts(spec: str, n: int, m: int, f: int, c: int) -> None:
    if not (2 <= c <= n < 2**31 and f >= 1 and 1 <= m <= n * (n - 1)):
        what, rule = spec.partition(":")[0], "2 <= C <= N < 2^31, 1 <= F and 1 <= E <= N (N - 1)"
        raise InputError(f"`dataset` {what}:N,E,F,C must have {rule}, got '{spec}'")


def random_split(n: int, train: float, val: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
    order = rng.permutation(n)
    a, b = max(round(n * train), 1), round(n * (train + val))
    return {"train": order[:a], "val": order[a:b], "test": order[b:]}


def csr_graph(indptr: np.ndarray, indices: np.ndarray) -> Graph:
    """A graph without self-loops and weights."""
    places = torch.from_numpy(indptr)
    return Graph(places, torch.from_numpy(indices), None, None, places[:-1].clone())


def add_means(x: np.ndarray, means: np.ndarray, kind: np.ndarray) -> None:
    """x += means[kind], in chunks."""
    for at in range(0, len(x), 1 << 16):
        x[at : at + (1 << 16)] += means[kind[at : at + (1 << 16)]]


def power_law(n: int, m: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(indptr, copies): in-degrees proportional to a Pareto weight between 1 and 100, at most n - 1 and m in all; and
    the weight rounded, for draws of sources."""
    w = np.minimum(rng.pareto(1.2, n) + 1.0, 100.0)
    degree = w * (m / w.sum())
    for _ in range(50):
        degree = np.minimum(degree, n - 1.0)
        degree *= m / degree.sum()
    indptr = np.zeros(n + 1, np.int64)
    indptr[1:] = np.rint(np.cumsum(degree))
    indptr[-1] = m
    return indptr, np.rint(w).astype(np.int64)


def _sources(indptr: np.ndarray, y: np.ndarray, copies: np.ndarray, c: int, rng: np.random.Generator) -> np.ndarray:
    """A source for each edge, drawn from a table that holds a node `copies` times, class after class.

    A node's k draws are stratified, the t-th from the t-th part of its range of the table, so they are sorted and a hub
    drawn twice is next to itself; the second one is redrawn uniformly from the same class.
    """
    order = np.argsort(y, kind="stable").astype(np.int32)
    table = np.repeat(order, copies[order])
    width = np.bincount(y, weights=copies, minlength=c).astype(np.int64)
    home = max((WITHIN - 1 / c) / (1 - 1 / c), 0.0)  # draws from the whole table may stay inside the class, too
    inside = rng.binomial(np.diff(indptr), home)
    draws = np.stack([inside, np.diff(indptr) - inside], 1)  # [N, 2]: from the own class, from the whole table
    low = np.stack([(np.cumsum(width) - width)[y], np.zeros_like(y)], 1)
    step = np.stack([width[y], np.full_like(y, table.size)], 1) / np.maximum(draws, 1)
    size = np.bincount(y, minlength=c)
    first = np.cumsum(size) - size
    out = np.empty(indptr[-1], np.int32)
    cuts = np.searchsorted(indptr, np.arange(0, indptr[-1], CHUNK))
    for a, b in zip(cuts, [*cuts[1:], len(y)], strict=True):
        k = draws[a:b].ravel()
        t = np.arange(k.sum()) - np.repeat(np.cumsum(k) - k, k)
        place = ((t + rng.random(t.size)) * np.repeat(step[a:b].ravel(), k)).astype(np.int64)
        src = table[np.minimum(place + np.repeat(low[a:b].ravel(), k), table.size - 1)]
        twice = np.flatnonzero(src[1:] == src[:-1]) + 1
        kind = y[src[twice]]
        src[twice] = order[first[kind] + (rng.random(twice.size) * size[kind]).astype(np.int64)]
        loops = np.flatnonzero(src == np.repeat(np.arange(a, b, dtype=np.int32), np.diff(indptr[a : b + 1])))
        src[loops] = (src[loops] + 1) % len(y)
        out[indptr[a] : indptr[b]] = src
    return out
