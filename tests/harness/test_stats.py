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


def test_a_ratio_is_paired_by_round() -> None:
    """Drift that both sides share cancels, and rounds that only one side has do not count."""
    drift = {i: 1.0 + 0.05 * i for i in range(20)}
    ours = {i: 10.0 * drift[i] for i in drift}
    theirs = {i: 8.0 * drift[i] for i in range(5, 25) if i in drift} | {24: 1.0}
    ratio = stats.ratio_interval(ours, theirs)
    assert ratio is not None
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((1.25, 1.25, 1.25))
    assert ratio.n == 15
    assert stats.ratio_interval(ours, {30: 1.0}) is None


def test_an_estimate_can_be_turned_over_and_scaled() -> None:
    ratio = stats.Estimate(median=1.25, low=1.0, high=2.0, n=9)
    assert ratio.inverse() == stats.Estimate(median=0.8, low=0.5, high=1.0, n=9)
    assert ratio.scaled(100) == stats.Estimate(median=125.0, low=100.0, high=200.0, n=9)
    assert ratio.half_width == pytest.approx(0.4)
    assert stats.Estimate(median=0.0, low=0.0, high=1.0, n=2).half_width == math.inf


@pytest.mark.parametrize(
    ("low", "median", "high", "smallest", "expected"),
    [
        (0.96, 0.97, 0.98, 0.01, "faster"),
        (1.02, 1.03, 1.04, 0.01, "slower"),
        (0.98, 1.03, 1.06, 0.01, "tie"),  # the interval holds 1
        (1.002, 1.005, 1.008, 0.01, "tie"),  # sure, and too small to matter
        (1.002, 1.005, 1.008, 0.0, "slower"),
        (1.0, 1.02, 1.03, 0.01, "tie"),
    ],
)
def test_a_verdict_needs_an_interval_without_1_and_a_difference_that_matters(
    low: float, median: float, high: float, smallest: float, expected: str
) -> None:
    assert stats.verdict(stats.Estimate(median, low, high, 20), smallest) == expected
    assert stats.verdict(stats.Estimate(median, low, high, stats.MIN_PAIRS - 1), smallest) == "tie"


def noisy_rounds(rng: np.random.Generator, us: float, n: int) -> dict[int, float]:
    """Samples as a GPU leaves them: a narrow peak, and at times a second mode 1 % above."""
    return dict(enumerate(us * (1 + rng.normal(0, 0.002, n) + 0.01 * (rng.random(n) < 0.2))))


@pytest.mark.parametrize("n", [20, 40])
def test_identical_code_gets_a_false_verdict_no_oftener_than_promised(n: int) -> None:
    rng = np.random.default_rng(n)
    trials = 1000
    false = [0, 0]
    for _ in range(trials):
        ratio = stats.ratio_interval(noisy_rounds(rng, 20.0, n), noisy_rounds(rng, 20.0, n))
        assert ratio is not None
        false[0] += stats.verdict(ratio, smallest_effect=0) != "tie"
        false[1] += stats.verdict(ratio) != "tie"
    assert 0.02 <= false[0] / trials <= 0.09
    assert false[1] == 0


def test_a_real_difference_is_found_and_lies_in_its_interval() -> None:
    rng = np.random.default_rng(5)
    trials = 400
    ratios = [stats.ratio_interval(noisy_rounds(rng, 20.4, 20), noisy_rounds(rng, 20.0, 20)) for _ in range(trials)]
    assert all(ratio is not None and stats.verdict(ratio) == "slower" for ratio in ratios)
    covered = sum(ratio is not None and ratio.low <= 1.02 <= ratio.high for ratio in ratios)
    assert 0.92 <= covered / trials <= 0.98


def test_sampling_until_the_interval_is_narrow_does_not_spoil_its_coverage() -> None:
    """The rule of the loop: 20 rounds, then twice as many until the half-width is under half a per cent."""
    rng = np.random.default_rng(8)
    covered = 0
    trials = 500
    for _ in range(trials):
        samples = rng.normal(20.0, 0.3, 20)
        while (estimate := stats.median_interval(samples)).half_width > 0.005 and len(samples) < 200:
            samples = np.append(samples, rng.normal(20.0, 0.3, stats.next_look(len(samples)) - len(samples)))
        covered += estimate.low <= 20.0 <= estimate.high
    assert covered / trials >= 0.90


def test_the_quotient_of_two_runs_covers_the_truth() -> None:
    rng = np.random.default_rng(6)
    trials = 200
    covered = 0
    for _ in range(trials):
        found = stats.quotient_interval(rng.normal(21.0, 0.2, 20), rng.normal(20.0, 0.2, 25))
        assert found.low <= found.median <= found.high
        covered += found.low <= 1.05 <= found.high
    assert 0.90 <= covered / trials <= 0.99
    with pytest.raises(ValueError, match="expected at least one on each side, got 1 and 0"):
        stats.quotient_interval([1.0], [])


def test_the_geometric_mean_over_cases_covers_the_truth_and_has_no_direction() -> None:
    rng = np.random.default_rng(7)
    truth = [2.0, 0.5, 1.1, 0.9]
    mean = math.prod(truth) ** (1 / len(truth))
    trials = 200
    covered = 0
    for _ in range(trials):
        found = stats.geometric_mean_interval([rng.normal(ratio, 0.01 * ratio, 20) for ratio in truth])
        covered += found.low <= mean <= found.high
        assert found.n == len(truth)
    assert 0.90 <= covered / trials <= 0.99
    theirs = scipy.stats.bootstrap(
        (cases := [rng.normal(ratio, 0.05 * ratio, 20) for ratio in truth]),
        lambda *drawn, axis: np.exp(np.mean([np.log(np.median(case, axis=axis)) for case in drawn], axis=0)),
        n_resamples=20_000,
        method="percentile",
        rng=rng,
    ).confidence_interval
    found = stats.geometric_mean_interval(cases)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), abs=0.002)
    exact = stats.geometric_mean_interval([[2.0] * 9, [0.5]])
    assert (exact.low, exact.median, exact.high) == pytest.approx((1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="ratios: expected at least one case, got none"):
        stats.geometric_mean_interval([])
    with pytest.raises(ValueError, match=r"ratios\[1\]: expected numbers > 0, got 0.0"):
        stats.geometric_mean_interval([[1.0], [2.0, 0.0]])


def test_the_interval_of_a_share() -> None:
    low, high = stats.share_interval(10, 200)
    assert low < 0.05 < high
    assert (low, high) == pytest.approx((0.0274, 0.0896), abs=1e-3)
    assert stats.share_interval(0, 20)[0] == 0.0


@pytest.mark.parametrize("n", [3, 7, 20, 41])
def test_the_ends_of_an_interval_are_numpys_to_the_last_bit(n: int) -> None:
    rng = np.random.default_rng(n)
    for _ in range(50):
        samples = rng.lognormal(size=n) * 10 ** rng.uniform(-3, 5)
        found = stats.median_interval(list(samples))
        low, high = np.quantile(stats._resampled_medians(samples), [0.025, 0.975])
        assert (found.low, found.high) == (low, high)
