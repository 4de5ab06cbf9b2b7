"""Where the time of a call goes: from what a profiler saw on the device to a summary for the record.

Nothing here knows the name of a kernel. What belongs to which call follows from order and number alone: a
window holds nothing but whole calls, and each of them launches the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NAME_CHARS = 100
"""Where the name of a kernel is cut: templates spell out their arguments."""


@dataclass(frozen=True)
class Activity:
    """One kernel, copy or fill on the device; times in µs of one clock."""

    name: str
    start_us: float
    end_us: float


def split_calls(activities: Sequence[Activity], calls: int) -> list[list[Activity]]:
    """The activities of each call, in the order of their starts.

    Args:
        activities: all that ran in a window of ``calls`` calls, on one stream.
        calls: at least 1.

    Raises:
        ValueError: if there is nothing, or it cannot be shared out evenly.
    """
    if not activities or len(activities) % calls:
        raise ValueError(
            f"profile: expected a multiple of {calls} activities (one for each call), got {len(activities)}"
        )
    ordered = sorted(activities, key=lambda a: (a.start_us, a.end_us))
    each = len(ordered) // calls
    return [ordered[i : i + each] for i in range(0, len(ordered), each)]


def busy_us(activities: Sequence[Activity]) -> float:
    """The time during which at least one of the activities ran; kernels may overlap."""
    busy, reached = 0.0, float("-inf")
    for a in sorted(activities, key=lambda a: a.start_us):
        busy += max(0.0, a.end_us - max(a.start_us, reached))
        reached = max(reached, a.end_us)
    return busy


def summarize(calls: Sequence[Sequence[Activity]], total_us: float) -> dict[str, Any]:
    """Medians over calls of one plan.

    Args:
        calls: of :func:`split_calls`, perhaps of several windows; consecutive calls of a window follow one another.
        total_us: what a call took untraced, by the clock that the times of a report come from.

    Returns:
        ``calls`` (how many), ``kernels`` (``name`` and ``us`` of each, in order), ``gap_us`` (the call's span less
        its kernels; below 0 where they overlap), ``between_us`` (from the end of a call to the start of the
        next), ``traced_us`` (the sum of all these) and ``total_us``.
    """
    kernels = [
        {
            "name": same[0].name[:NAME_CHARS],
            "us": statistics.median(a.end_us - a.start_us for a in same),
        }
        for same in zip(*calls, strict=True)
    ]
    ends = [max(a.end_us for a in call) for call in calls]
    gaps = [
        end - call[0].start_us - sum(a.end_us - a.start_us for a in call)
        for call, end in zip(calls, ends, strict=True)
    ]
    # From one window to the next there is a pause, far longer than any gap between calls; the median ignores it.
    between = [later[0].start_us - end for end, later in zip(ends[:-1], calls[1:], strict=True)]
    gap_us = statistics.median(gaps)
    between_us = statistics.median(between) if between else 0.0
    return {
        "calls": len(calls),
        "kernels": kernels,
        "gap_us": gap_us,
        "between_us": between_us,
        "traced_us": sum(kernel["us"] for kernel in kernels) + gap_us + between_us,
        "total_us": total_us,
    }
