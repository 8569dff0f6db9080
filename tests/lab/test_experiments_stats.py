"""Statistics of the report: held against scipy, and slow to call a difference one."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from adahop_lab.experiments.stats import Summary, far, paired, summary, verdicts


@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_paired_is_scipys(seeds):
    rng = np.random.default_rng(seeds)
    one, two = rng.normal(0.8, 0.01, seeds), rng.normal(0.79, 0.01, seeds)
    ours = paired(dict(enumerate(one)), dict(enumerate(two)))
    theirs = scipy_stats.ttest_rel(one, two)
    low, high = theirs.confidence_interval(0.95)
    assert np.allclose([ours.p, ours.low, ours.high], [theirs.pvalue, low, high])
    assert ours.seeds == seeds and np.isclose(ours.difference, (one - two).mean())
    assert ours.apart == (theirs.pvalue < 0.05)


def test_pairs_are_by_seed():
    one, two = {0: 0.5, 1: 0.6, 2: 0.7, 9: 0.0}, {2: 0.6, 1: 0.5, 0: 0.4, 8: 1.0}
    test = paired(one, two)
    assert test.seeds == 3 and np.isclose(test.difference, 0.1) and test.low > 0.09
    assert paired({0: 0.5, 1: 0.5}, {1: 0.4}) is None


def test_equal_runs_are_no_difference():
    test = paired({0: 0.5, 1: 0.6}, {0: 0.5, 1: 0.6})
    assert (test.difference, test.p, test.apart) == (0.0, 1.0, False)


def test_intervals_cover_as_they_should():
    """2,000 pairs of equal methods: about 5 % are called apart; outside 3.5 to 6.5 % in fewer than 1 of 400 seeds."""
    rng = np.random.default_rng(0)
    called = sum(
        paired(dict(enumerate(rng.normal(size=5))), dict(enumerate(rng.normal(size=5)))).apart for _ in range(2000)
    )
    assert 0.035 < called / 2000 < 0.065


def test_summary_of_one_run_has_no_spread():
    assert summary([0.5]) == (0.5, None, 1) and summary([0.5]).text() == "0.5000"
    assert np.isclose(summary([0.4, 0.6]).std, np.std([0.4, 0.6], ddof=1))


def test_far_from_the_paper():
    assert far(Summary(0.87, 0.004, 5), (0.855, 0.005)) and not far(Summary(0.864, 0.004, 5), (0.855, 0.005))
    assert not far(Summary(0.87, 0.004, 5), None) and far(Summary(0.5, None, 1), (0.6, 0.001))


def test_the_verdict_says_what_is_known():
    one = {0: 0.5, 1: 0.6, 2: 0.7}
    others = {
        "alike": paired(one, {0: 0.52, 1: 0.58, 2: 0.7}), "worse": paired(one, {0: 0.4, 1: 0.5, 2: 0.61}), "new": None,
    }  # fmt: skip
    alike, worse, new = verdicts("top", others)
    assert alike.startswith("top cannot be told apart from alike (+0.0000, -0.0") and "worse" not in alike
    assert worse.startswith("top is ahead of worse (+0.0967") and "fewer than two seeds" in new
