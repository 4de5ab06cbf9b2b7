"""The rounds: samples of several plans, taken together so that they can be compared pair by pair.

A round takes one sample of everyone, in order; the next in reversed order. Where the timer wants it, everyone
is planned and made ready anew for each round, elsewhere in memory. Rounds go on until the median of everyone is
known to :data:`HALF_WIDTH`, or the timer's cap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness import clocks
from harness.clocks import Reading
from harness.stats import median_interval, next_look
from harness.timing import Lap, Timer

HALF_WIDTH = 0.005
"""Half the width of an interval, as a share of its median, at which sampling ends."""


@dataclass
class Taken:
    """What the rounds gave.

    Args:
        laps: who -> the lap of its last sample; who failed is not in it.
        samples: who -> its samples as a record has them: ``round``, ``us`` (None if not finite), ``throttled``.
        readings: for each round what the clocks were before, during and after it.
    """

    laps: dict[int, Lap] = field(default_factory=dict)
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    readings: list[list[Reading | None]] = field(default_factory=list)


def take_rounds(
    timer: Timer,
    makers: Mapping[int, Callable[[], Lap]],
    attempt: Callable[[int, str, Callable[[], Any]], Any] = lambda who, what, action: action(),
) -> Taken:
    """Take all the rounds.

    Args:
        timer: how long, and with or without new laps.
        makers: who -> what plans and makes a lap.
        attempt: called with who, what is done, and an action; returns what the action returns, or None if it
            failed. Then ``who`` is out.
    """
    taken = Taken()
    for who, make in makers.items():
        lap = attempt(who, "prepare timing", make)
        if lap is not None:
            taken.laps[who] = lap
            taken.samples[who] = []
    started = time.monotonic()
    look = timer.min_rounds
    for number in range(timer.max_rounds):
        if number >= timer.min_rounds and time.monotonic() - started > timer.cap_s:
            break
        if number == look:
            if all(_is_settled(taken.samples[who]) for who in taken.laps):
                break
            look = next_look(look)
        _take_one(timer, makers, attempt, taken, number)
    return taken


def _take_one(
    timer: Timer,
    makers: Mapping[int, Callable[[], Lap]],
    attempt: Callable[[int, str, Callable[[], Any]], Any],
    taken: Taken,
    number: int,
) -> None:
    order = list(taken.laps) if number % 2 == 0 else list(reversed(taken.laps))
    readings = [timer.clocks()]
    times: dict[int, float] = {}
    for place, who in enumerate(order):
        if place == len(order) // 2:
            readings.append(timer.clocks())
        lap: Lap | None = taken.laps[who]
        if timer.renews and number:
            del lap, taken.laps[who]  # what it holds is free before the next takes its place
            timer.displace()
            lap = attempt(who, "prepare timing", makers[who])
        us = None if lap is None else attempt(who, "time", lap.sample)
        if lap is None or us is None:
            taken.laps.pop(who, None)
            taken.samples.pop(who)
            continue
        taken.laps[who] = lap
        times[who] = us
    # Back in the order of the first round: what is taken out and put in again goes to the end.
    taken.laps = {who: taken.laps[who] for who in makers if who in taken.laps}
    readings.append(timer.clocks())
    taken.readings.append(readings)
    throttled = clocks.throttled(readings)
    for who, us in times.items():
        taken.samples[who].append(
            {"round": number, "us": us if math.isfinite(us) else None, "throttled": throttled}
        )


def _is_settled(samples: list[dict[str, Any]]) -> bool:
    """Whether more samples are not needed, or cannot help: one impossible time spoils all."""
    times = [sample["us"] for sample in samples]
    return any(us is None or us <= 0 for us in times) or median_interval(times).half_width <= HALF_WIDTH
