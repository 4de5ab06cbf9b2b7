"""The rounds: samples of several plans, taken together so that they can be compared pair by pair.

A round takes one sample of everyone, in an order drawn by lot; the next in the reverse of it. Where the timer
wants it, everyone is planned and made ready anew for each round, elsewhere in memory: all give back what they
hold before the first takes anything, so that the lot also decides who gets whose place. Else a place, and the
luck that comes with it, would stay with whoever has it, and rounds would not be independent. Rounds go on until
the median of everyone is known to :data:`HALF_WIDTH`, or the timer's cap.
"""

from __future__ import annotations

import math
import random
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
        del lap  # a name that stays would keep the last one's memory
    lots = random.Random(0)
    order: list[int] = []
    started = time.monotonic()
    look = timer.min_rounds
    for number in range(timer.max_rounds):
        if number >= timer.min_rounds and time.monotonic() - started > timer.cap_s:
            break
        if number == look:
            if all(_is_settled(taken.samples[who]) for who in taken.laps):
                break
            look = next_look(look)
        order = list(reversed(order)) if number % 2 else lots.sample(list(makers), len(makers))
        _take_one(timer, makers, attempt, taken, number, [who for who in order if who in taken.laps])
    return taken


def _take_one(
    timer: Timer,
    makers: Mapping[int, Callable[[], Lap]],
    attempt: Callable[[int, str, Callable[[], Any]], Any],
    taken: Taken,
    number: int,
    order: list[int],
) -> None:
    if timer.renews:
        taken.laps.clear()
    readings = [timer.clocks()]
    times: dict[int, float] = {}
    for place, who in enumerate(order):
        if place == len(order) // 2:
            readings.append(timer.clocks())
        lap: Lap | None
        if timer.renews:
            timer.displace()
            lap = attempt(who, "prepare timing", makers[who])
        else:
            lap = taken.laps[who]
        us = None if lap is None else attempt(who, "time", lap.sample)
        if lap is None or us is None:
            taken.laps.pop(who, None)
            taken.samples.pop(who)
            continue
        taken.laps[who] = lap
        times[who] = us
    # In the order in which they came, not in that of the round.
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
