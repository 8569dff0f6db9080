"""`texts:`: a labelled graph of any size on which sampling noise regularises, with a bound on the best possible score.

Every node is a text about one of its label's topics; its words and the texts it links to are mostly redundant. A model
that always sees all of them overfits to the training nodes' own mixtures; one that sees a sample of them cannot.
`planted:` is its counterpart, where sampling noise hurts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adahop.datasets.base import Dataset, make
from adahop.datasets.made import csr_graph, power_law, random_split
from adahop.datasets.planted import _sources, check_range, options_of, with_bound

CHUNK = 1 << 12  # rows of words drawn at once
FALL = 0.9  # the j-th word occurs in proportion to j^-FALL
SPREAD = 60.0  # the concentration of the Dirichlet distribution of a topic's words around those of all texts


@dataclass(frozen=True)
class Writing:
    """The options after N,E,F,C."""

    topics: int = 6  # of each label
    signal: float = 0.8  # share of a node's neighbours with its own topic; the others have any
    words: float = 20.0  # per text on average, counting repetitions
    told: float = 0.4  # share of the words that are chosen by the topic
    train: float = 0.45  # share of nodes to train on; 15 % are for validation
    seed: int = 0


def texts(spec: str) -> Dataset:
    """`texts:N,E,F,C[,topics=…][,signal=…][,words=…][,told=…][,train=…][,seed=…]`.

    N texts, E links, F words, C labels. Features are the words that occur, which `load` divides by their number.
    Degrees have a power law, as in `synthetic:`. `bound` of the data set is the expected accuracy, over test nodes, of
    the best rule that knows the topic of every *other* node and how the graph was made: no model can be expected to
    score more.

    >>> 0.9 < texts("texts:300,1500,200,3").bound <= 1.0
    True
    """
    (n, m, f, c), plan = options_of(spec, Writing)
    most = max(n // c, 1)
    allowed = {
        "topics": (1, most), "signal": (0, 0.95), "words": (0.1, 1e4), "told": (0, 1), "train": (0.001, 0.8),
        "seed": (0, 2**63),
    }  # fmt: skip
    check_range(spec, plan, allowed)
    rng = np.random.default_rng(plan.seed)
    kinds = c * plan.topics
    topic = rng.integers(0, kinds, n)
    y = topic // plan.topics
    indptr, copies = power_law(n, m, rng)
    indices, counts = _sources(indptr, topic, topic, copies, np.full(n, plan.signal), kinds, rng)
    splits = random_split(n, plan.train, 0.15, rng)
    every = np.arange(1, f + 1) ** -FALL
    every /= every.sum()
    own = np.stack([rng.dirichlet(every * SPREAD) for _ in range(kinds)])
    rate = plan.words * (plan.told * own + (1 - plan.told) * every)
    x, log = _words(topic, rate, rng)
    log += _links(indptr, indices, counts, topic, copies, plan.signal, kinds)
    bound = _right(log, plan.topics, c)[splits["test"]].mean()
    return with_bound(make(spec, csr_graph(indptr, indices), x, y, splits, classes=c), bound)


def _words(topic: np.ndarray, rate: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Which words occur in each text, and the log-likelihood of each topic given these words."""
    absent = np.exp(-rate)  # of a Poisson number of occurrences
    weigh = (np.log(np.maximum(1 - absent, 1e-300)) - np.log(absent)).T
    x, log = np.empty((topic.size, rate.shape[1]), np.float32), np.empty((topic.size, len(rate)))
    for at in range(0, topic.size, CHUNK):
        some = slice(at, at + CHUNK)
        x[some] = rng.random(x[some].shape) >= absent[topic[some]]
        log[some] = x[some] @ weigh - rate.sum(1)
    return x, log


def _links(
    indptr: np.ndarray, indices: np.ndarray, counts: np.ndarray, topic: np.ndarray, copies: np.ndarray, signal: float,
    kinds: int,
) -> np.ndarray:  # fmt: skip
    """Of every node and topic the log of how likely its links are, both ways, were it about that topic."""
    share = np.maximum(np.bincount(topic, weights=copies, minlength=kinds) / copies.sum(), 1e-12)
    gain = np.log(signal + (1 - signal) * share) - np.log((1 - signal) * share)
    to = np.repeat(topic, np.diff(indptr)).astype(np.int64)
    cited = np.bincount(indices * np.int64(kinds) + to, minlength=topic.size * kinds).reshape(-1, kinds)
    return (counts + cited) * gain


def _right(log: np.ndarray, topics: int, c: int) -> np.ndarray:
    """The probability of each node's most likely label."""
    odds = np.exp(log - log.max(1, keepdims=True)).reshape(-1, c, topics).sum(2)
    return odds.max(1) / odds.sum(1)
