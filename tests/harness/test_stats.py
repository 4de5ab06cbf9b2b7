import math

import numpy as np
import pytest
import scipy.stats

from harness import stats


@pytest.mark.parametrize("n", [1, 2, 7, 20, 31])
def test_the_median_lies_in_its_interval(n: int) -> None:
    samples = np.random.default_rng(n).normal(20.0, 0.3, n)
    estimate = stats.median_interval(samples)
    assert estimate.median == pytest.approx(np.median(samples))
    assert samples.min() <= estimate.low <= estimate.median <= estimate.high <= samples.max()
    assert estimate.n == n


def test_equal_samples_leave_no_doubt() -> None:
    assert stats.median_interval([5.0] * 20) == stats.Estimate(median=5.0, low=5.0, high=5.0, n=20)


def test_the_same_samples_give_the_same_interval_in_any_order() -> None:
    samples = list(np.random.default_rng(3).gamma(2.0, size=25))
    assert stats.median_interval(samples) == stats.median_interval(samples[::-1])


@pytest.mark.parametrize("n", [9, 20])
def test_it_is_the_percentile_bootstrap(n: int) -> None:
    samples = np.random.default_rng(n).normal(20.0, 0.3, n)
    ours = stats.median_interval(samples)
    theirs = scipy.stats.bootstrap(
        (samples,), np.median, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.05)


def test_the_interval_covers_the_true_median() -> None:
    rng = np.random.default_rng(11)
    trials = 1000
    intervals = [stats.median_interval(rng.normal(0.0, 1.0, 20)) for _ in range(trials)]
    covered = sum(i.low <= 0.0 <= i.high for i in intervals) / trials
    assert 0.92 <= covered <= 0.97


def test_what_is_no_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="samples: expected at least one, got none"):
        stats.median_interval([])
    with pytest.raises(ValueError, match=r"samples\[1\]: expected a finite number, got nan"):
        stats.median_interval([1.0, math.nan])
