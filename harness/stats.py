"""Statistics of timing samples: medians, ratios of two, and what may be said of their difference.

Samples that were taken in shared rounds are compared round by round: whatever slowed a round slowed both
sides of it, and cancels in their ratio. So a ratio is the median of the rounds' ratios, and its interval is
that of a median. All intervals are percentile bootstrap intervals (B. Efron, Ann. Statist. 7, 1979) at level
:data:`CONFIDENCE`, seeded, so that the same records always make the same report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy import stats as scipy_stats

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0

SMALLEST_EFFECT = 0.01
"""The difference below which two times count as equal, whatever their intervals say; a study may state another."""

FASTER, SLOWER, TIE = "faster", "slower", "tie"
"""The verdicts on a time against another."""

MIN_PAIRS = 5
"""Shared rounds below which a ratio has no verdict but ``tie``: a bootstrap of fewer knows no doubt."""


@dataclass(frozen=True)
class Estimate:
    """A median with its bootstrap interval, all in the unit of the samples.

    Args:
        median: of the ``n`` samples.
        low: lower end of the percentile bootstrap interval at level :data:`CONFIDENCE`.
        high: its upper end.
        n: how many samples there were.
    """

    median: float
    low: float
    high: float
    n: int

    @property
    def half_width(self) -> float:
        """Half the interval's width, as a share of the median; infinite for a median of 0."""
        return (self.high - self.low) / 2 / abs(self.median) if self.median else math.inf

    def scaled(self, factor: float) -> Estimate:
        """The estimate of ``factor`` (> 0) times the quantity."""
        return Estimate(self.median * factor, self.low * factor, self.high * factor, self.n)

    def inverse(self) -> Estimate:
        """The estimate of one over the quantity, which must be above 0; a slowdown becomes a speed-up."""
        return Estimate(1 / self.median, 1 / self.high, 1 / self.low, self.n)


def median_interval(samples: Sequence[float]) -> Estimate:
    """The median of ``samples`` with its interval.

    The same samples always give the same interval: the resampling is seeded and depends on their number
    alone. It is what ``scipy.stats.bootstrap`` computes, at a hundredth of its time (see
    :func:`_middle_ranks`), for a report has thousands of them.

    Raises:
        ValueError: for no samples, or one that is not finite.
    """
    if not len(samples):
        raise ValueError("samples: expected at least one, got none")
    for i, value in enumerate(samples):
        if not math.isfinite(value):
            raise ValueError(f"samples[{i}]: expected a finite number, got {value}")
    low, high = _percentiles(_resampled_medians(samples))
    return Estimate(median=float(np.median(samples)), low=float(low), high=float(high), n=len(samples))


def ratio_interval(times: Mapping[int, float], others: Mapping[int, float]) -> Estimate | None:
    """``times`` over ``others``, paired by round; None where they share no round.

    Args:
        times: round -> a time above 0.
        others: likewise, in the same unit.
    """
    shared = times.keys() & others.keys()
    return median_interval([times[i] / others[i] for i in sorted(shared)]) if shared else None


def quotient_interval(times: Sequence[float], others: Sequence[float]) -> Estimate:
    """The median of ``times`` over that of ``others``, where the two were not taken together.

    Args:
        times: values above 0.
        others: likewise, in the same unit.

    Raises:
        ValueError: for no values on a side.
    """
    if not len(times) or not len(others):
        raise ValueError(f"samples: expected at least one on each side, got {len(times)} and {len(others)}")

    def quotient(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], axis: int) -> npt.NDArray[np.float64]:
        return np.asarray(np.median(a, axis=axis) / np.median(b, axis=axis))

    # scipy refuses a lone observation; twice the same has no spread either.
    sides = [np.asarray([*side] * (2 if len(side) == 1 else 1), dtype=np.float64) for side in (times, others)]
    found = scipy_stats.bootstrap(
        sides,
        quotient,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    ratio = float(np.median(times) / np.median(others))
    return Estimate(ratio, float(found.low), float(found.high), min(len(times), len(others)))


def geometric_mean_interval(ratios: Sequence[Sequence[float]]) -> Estimate:
    """The geometric mean over cases of each case's median ratio.

    The interval tells how far the noise of the samples reaches, for these cases; it does not tell what
    other cases would give.

    Args:
        ratios: for each case the ratios of its rounds, all above 0.

    Raises:
        ValueError: for no case, or a ratio that is not above 0.
    """
    if not ratios:
        raise ValueError("ratios: expected at least one case, got none")
    for i, case in enumerate(ratios):
        if not (least := np.min(case, initial=np.inf)) > 0:
            raise ValueError(f"ratios[{i}]: expected numbers > 0, got {least}")

    rng = np.random.default_rng(SEED)
    # Every case has the same resamples, by rank; in an order of its own, so that the cases vary independently.
    logs = [np.log(_resampled_medians(case))[rng.permutation(RESAMPLES)] for case in ratios]
    low, high = np.exp(_percentiles(np.mean(logs, axis=0)))
    medians = [float(np.median(case)) for case in ratios]
    return Estimate(
        math.exp(math.fsum(map(math.log, medians)) / len(medians)), float(low), float(high), len(medians)
    )


def verdict(ratio: Estimate, smallest_effect: float = SMALLEST_EFFECT) -> str:
    """What may be said of a time, given its ratio to another.

    Args:
        ratio: the time over the other; below 1 is faster.
        smallest_effect: the difference, as a share, below which it is a tie; 0 leaves only the interval to
            decide.

    Returns:
        ``faster``, ``slower``, or ``tie``: where the interval holds 1, the difference is under
        ``smallest_effect``, or there are fewer than :data:`MIN_PAIRS` rounds.
    """
    if ratio.n < MIN_PAIRS or ratio.low <= 1 <= ratio.high or abs(ratio.median - 1) < smallest_effect:
        return TIE
    return FASTER if ratio.median < 1 else SLOWER


def next_look(n: int) -> int:
    """The sample count at which to ask next whether an interval is narrow enough: twice as many.

    Who asks after every sample stops at the first count that happens to look narrow: that costs two to three
    points of the interval's coverage, doubling about one.
    """
    return 2 * n


def share_interval(hits: int, of: int) -> tuple[float, float]:
    """The 95 % interval (Wilson's) of a share of which ``hits`` of ``of`` trials are a sample."""
    interval = scipy_stats.binomtest(hits, of).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def _resampled_medians(samples: Sequence[float]) -> npt.NDArray[np.float64]:
    """``[RESAMPLES]``: the medians of resamples with replacement."""
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    medians: npt.NDArray[np.float64] = ordered[_middle_ranks(len(ordered))].mean(axis=1)
    return medians


def _percentiles(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """What ``np.quantile`` gives for the two ends of the interval, in a quarter of its time."""
    tail = (1 - CONFIDENCE) / 2
    places = [share * (len(values) - 1) for share in (tail, 1 - tail)]
    ranks = [rank for place in places for rank in (math.floor(place), math.floor(place) + 1)]
    ordered = np.partition(values, ranks)
    ends = []
    for place, below, above in zip(places, ranks[::2], ranks[1::2], strict=True):
        a, b, t = float(ordered[below]), float(ordered[above]), place - below
        # From the nearer of the two, as numpy does it: the last bit is the same.
        ends.append(a + (b - a) * t if t < 0.5 else b - (b - a) * (1 - t))
    return ends[0], ends[1]


@cache
def _middle_ranks(n: int) -> npt.NDArray[np.int64]:
    """``[RESAMPLES, 2]``: the ranks of the two middle members of each resample of ``n`` ordered samples.

    A resample's median is the mean of these two (they coincide for odd ``n``), so the resampling is done
    once for each sample count rather than once for each row of a report.
    """
    drawn = np.random.default_rng(SEED).integers(0, n, size=(RESAMPLES, n))
    drawn.sort(axis=1)
    ranks: npt.NDArray[np.int64] = drawn[:, [(n - 1) // 2, n // 2]]
    return ranks
