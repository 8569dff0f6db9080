"""texts: the graph is made as it says, and no rule that knows less beats its bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import adahop
from adahop.checks import InputError
from adahop.datasets.texts import _links, _right, _words, texts

SPEC = "texts:3000,30000,300,4"


def test_links_stay_within_a_topic_as_often_as_said():
    """12 topics: a link stays by `signal`, or by chance; 30,000 links, three deviations."""
    data = texts(f"{SPEC},topics=3,signal=0.6,seed=2")
    rng = np.random.default_rng(2)
    topic = rng.integers(0, 12, 3000)
    assert np.array_equal(topic // 3, data.y.numpy())
    graph = data.graph
    to = np.repeat(topic, np.diff(graph.indptr.numpy()))
    alike = (topic[graph.indices.numpy()] == to).mean()
    assert alike == pytest.approx(0.6 + 0.4 / 12, abs=0.02)


def test_words_occur_as_often_as_said():
    data = texts(f"{SPEC},words=30")
    assert set(data.x.unique().tolist()) == {0.0, 1.0}
    rng = np.random.default_rng(0)
    rate = rng.random((5, 40))
    topic = rng.integers(0, 5, 20000)
    x, log = _words(topic, rate, rng)
    for t in range(5):  # 160,000 draws of at most .5 deviations each, 200 means: five deviations
        assert np.abs(x[topic == t].mean(0) - (1 - np.exp(-rate[t]))).max() < 5 * 0.5 / (topic == t).sum() ** 0.5
    by_hand = np.where(x[:3, None] > 0, np.log(1 - np.exp(-rate)), -rate).sum(2)
    assert np.allclose(log[:3], by_hand)


def test_the_bound_is_that_of_a_rule_that_does_what_it_expects_to():
    """Where the likeliest label is taken to be right with some odds, it is right as often: 3,000 nodes, four errors."""
    rng = np.random.default_rng(5)
    kinds, n = 8, 3000
    topic = rng.integers(0, kinds, n)
    rate = 3.0 * rng.dirichlet(np.ones(60), kinds)
    _, log = _words(topic, rate, rng)
    odds = np.exp(log - log.max(1, keepdims=True)).reshape(n, 4, 2).sum(2)
    expected = _right(log, 2, 4).mean()
    found = (odds.argmax(1) == topic // 2).mean()
    assert 0.4 < expected < 0.95 and found == pytest.approx(expected, abs=4 * 0.5 / n**0.5)


def test_links_say_more_of_the_right_topic():
    data = texts(f"{SPEC},topics=2,signal=0.5,seed=4")
    topic = np.random.default_rng(4).integers(0, 8, 3000)
    g = data.graph
    indptr, indices = g.indptr.numpy(), g.indices.numpy()
    counts = np.zeros((3000, 8), np.int32)
    np.add.at(counts, (np.repeat(np.arange(3000), np.diff(indptr)), topic[indices]), 1)
    log = _links(indptr, indices, counts, topic, np.ones(3000), 0.5, 8)
    assert (log.argmax(1) == topic).mean() > 0.8


def test_more_links_words_or_signal_raise_the_bound():
    few = "texts:1000,2000,200,4,topics=4"
    least = texts(f"{few},words=3,signal=0.1").bound
    assert least < texts(f"{few},words=12,signal=0.1").bound < texts(f"{few},words=12,signal=0.6").bound <= 1.0


def test_loading_divides_rows_and_equal_specs_are_equal():
    one, two = adahop.load(f"{SPEC},seed=7"), adahop.load(f"{SPEC},seed=7")
    assert torch.equal(one.x, two.x) and torch.equal(one.graph.indices, two.graph.indices) and one.bound == two.bound
    some = one.x.sum(1) > 0
    assert torch.allclose(one.x.sum(1)[some], torch.ones(int(some.sum())))
    assert "no model can be expected to score above" in one.note


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("texts:10,20,3", "`dataset` must be texts:N,E,F,C, then name=value of topics"),
        ("texts:10,20,3,2,loud=1", "`dataset` must be texts:N,E,F,C, then name=value of topics"),
        ("texts:10,20,3,11", "`dataset` texts:N,E,F,C must have 2 <= C <= N"),
        ("texts:10,20,3,2,topics=6", r"`topics` of texts: must be in \[1, 5\], got 6"),
    ],
)
def test_bad_specs(spec, said):
    with pytest.raises(InputError, match=said):
        adahop.load(spec)
