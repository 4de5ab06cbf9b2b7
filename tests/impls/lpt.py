"""The exact simulation that :mod:`impls.makespan` is compared with."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def makespan(keys: Sequence[int], *, copies: int, ctas: int) -> int:
    """When the last CTA ends if each split goes to whichever CTA is free first, in keys read by one CTA.

    Args:
        keys: of each split, in the order in which they are launched.
        copies: CTAs that each split launches, side by side.
        ctas: CTAs that run at once.
    """
    free = [0] * ctas
    for n in keys:
        for _ in range(copies):
            heapq.heapreplace(free, free[0] + n)
    return max(free)
