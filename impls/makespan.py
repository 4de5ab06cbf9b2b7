"""When the last CTA of a grid ends, from the lengths of its splits alone, in microseconds of host time.

Splits are handed out longest first, each to whichever place for a CTA is free first: list scheduling in LPT
order (Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969). Bounds of a few array
operations settle most questions. The rest is simulated, coarsely enough to take about :data:`STEPS` steps.
Times are in keys that one CTA reads.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import numpy.typing as npt

COUNT_BITS = 8
"""A split's keys and its sequence's count are sorted as one integer; the count has so many bits of it."""

CLOSE = 0.05
"""Bounds no further apart than this share are as good as a simulation."""

WITHIN = 0.4
"""Where between close bounds the last CTA is taken to end: over random batches it ends there on average."""

STEPS = 64
"""Steps that a simulation is cut to, where that leaves at least :data:`MIN_TEAMS` teams of CTAs."""

MIN_TEAMS = 8
"""The fewest teams of CTAs that are simulated."""

Int64Array = npt.NDArray[np.int64]


class Schedule:
    """The CTAs of one batch in the order of their launch, and between which bounds the last one ends.

    The bounds are narrowed only as far as a question needs.

    Args:
        keys: ``[B]`` int64, what a CTA over one split of each sequence costs, in keys.
        counts: ``[B]`` int64, splits of each sequence, under ``1 << COUNT_BITS``; at least one sequence.
        copies: CTAs that each split launches, side by side.
        ctas: CTAs that run at once.

    Attributes:
        even_share: when all CTAs would end if all ended together.
        lower: the last CTA does not end before this.
        upper: it does not end after this, as far as is known. Once the question is settled, both are the
            answer, and no longer bounds.
    """

    def __init__(self, keys: Int64Array, counts: Int64Array, *, copies: int, ctas: int) -> None:
        self._keys, self._counts, self._copies, self._ctas = keys, counts, copies, ctas
        self.even_share = int(keys.dot(counts)) * copies / ctas
        self.lower: float = max(self.even_share, keys.item(keys.argmax()))
        self.upper = math.inf

    def bound(self) -> None:
        """Find bounds on both sides, once; close ones are taken for settled."""
        if self.upper < math.inf:
            return
        packed = self._keys << COUNT_BITS
        packed |= self._counts
        packed.sort()
        packed = packed[::-1]  # longest first
        self._counts = counts = packed & ((1 << COUNT_BITS) - 1)
        self._keys = keys = packed >> COUNT_BITS
        # Up to the end of each sequence: CTAs and what they cost, each divided by copies.
        self._launched = launched = np.add.accumulate(counts)
        self._cost = np.add.accumulate(counts * keys)
        copies, ctas = self._copies, self._ctas
        if launched.item(-1) * copies <= ctas:
            self.upper = self.lower = keys.item(0)
            return
        late = launched.searchsorted(ctas // copies, side="right").item()  # those that may have to wait
        keys, launched = keys[late:], launched[late:]
        # Some CTA is free by the time that an even share of all earlier work takes.
        ends = self._cost[late:] * (copies / ctas)
        ends += keys * (1 - 1 / ctas)
        longest = self._keys.item(0)
        self.upper = max(longest, ends.item(ends.argmax()))
        if self._far_apart():
            # Of the CTAs so far, one has at least the rounded-up share, and one has fewer than that.
            rounds = -(launched * -copies // ctas)
            least = rounds * keys
            self.lower = max(self.lower, least.item(least.argmax()))
            rounds -= 1
            rounds *= longest
            np.minimum(ends, rounds + keys, out=ends)
            self.upper = max(longest, ends.item(ends.argmax()))
        if not self._far_apart():
            self.lower = self.upper = self.lower + WITHIN * (self.upper - self.lower)

    def _far_apart(self) -> bool:
        return self.upper > (1 + CLOSE) * self.lower

    def settle(self) -> None:
        """Decide between the bounds by simulation, if they differ."""
        self.bound()
        if self.lower < self.upper:
            self.lower = self.upper = min(max(self.lower, self._simulate()), self.upper)

    def _simulate(self) -> float:
        """When the last CTA ends, simulated for teams of CTAs that run in step.

        The copies of one split do that anyway, so that few rounds are simulated exactly. Otherwise a team runs
        CTAs of about one length, neighbours in the order of launch, and takes their mean.
        """
        copies, ctas = self._copies, self._ctas
        launched = self._launched.item(-1) * copies
        in_step = math.gcd(copies, ctas)
        teams = max(MIN_TEAMS, STEPS * ctas // (launched - ctas))
        if teams * in_step >= ctas:
            teams = ctas // in_step
            lengths: npt.NDArray[Any] = self._keys.repeat(self._counts * (copies // in_step))
        else:
            lengths = self._means(teams)
        free = lengths[teams - 1 :: -1].tolist()  # ascending: a heap
        for length in lengths[teams:].tolist():
            heapq.heapreplace(free, free[0] + length)
        return float(max(free))

    def _means(self, teams: int) -> npt.NDArray[np.float64]:
        """Mean costs of as many neighbouring CTAs as make a team, in the order of launch; the last may be fewer."""
        launched = self._launched.item(-1)
        steps = -(-launched * self._copies * teams // self._ctas)
        edges = np.arange(steps + 1) * (self._ctas / (teams * self._copies))
        edges[-1] = launched
        cost = np.interp(edges, self._launched, self._cost)
        # Before the end of the first sequence all splits are as long as its first.
        cost -= np.maximum(self._launched.item(0) - edges, 0) * self._keys.item(0)
        means: npt.NDArray[np.float64] = (cost[1:] - cost[:-1]) / (edges[1:] - edges[:-1])
        return means

    def may_end_after(self, time: float) -> bool:
        """Whether the last CTA ends after ``time`` for all that the bounds tell."""
        if self.lower > time:
            return True
        self.bound()
        return self.upper > time

    def ends_before(self, other: Schedule, share: float, later: float = 0.0) -> bool:
        """Whether the last CTA ends before ``share`` of the time that ``other`` takes, and earlier by ``later``."""
        for narrow in (None, self.bound, other.bound, other.settle, self.settle):
            if narrow is not None:
                narrow()
            if self.lower + later >= share * other.upper:
                return False
            if self.upper + later < share * other.lower:
                break
        return True
