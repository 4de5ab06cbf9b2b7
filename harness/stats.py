"""Statistics of timing samples: the median, and how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0


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


def median_interval(samples: Sequence[float]) -> Estimate:
    """The median of ``samples`` with its percentile bootstrap interval (B. Efron, Ann. Statist. 7, 1979).

    The same samples always give the same interval: the resampling is seeded and depends on their number
    alone.

    Raises:
        ValueError: for no samples, or one that is not finite.
    """
    if not len(samples):
        raise ValueError("samples: expected at least one, got none")
    for i, value in enumerate(samples):
        if not math.isfinite(value):
            raise ValueError(f"samples[{i}]: expected a finite number, got {value}")
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    medians = ordered[_middle_ranks(len(ordered))].mean(axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Estimate(median=float(np.median(ordered)), low=float(low), high=float(high), n=len(ordered))


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
