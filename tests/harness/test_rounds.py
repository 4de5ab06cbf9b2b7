"""The rounds: who is sampled when, when it ends, and what becomes of who fails."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any

import pytest
import torch

from harness.clocks import Reading
from harness.rounds import HALF_WIDTH, take_rounds
from harness.stats import median_interval
from impls.contract import DecodeOutput
from tests.harness import fakes


class Timer(fakes.Timer):
    """Never asked for sets or laps here; ``slow`` are the clock readings at which it is throttled."""

    min_rounds = 4
    max_rounds = 64
    cap_s = 60.0
    rotates = True
    renews = False

    def __init__(self, slow: tuple[int, ...] = ()) -> None:
        super().__init__(torch.device("cpu"))
        self.looks = count()
        self.slow = slow
        self.displaced = 0

    def displace(self) -> None:
        self.displaced += 1

    def clocks(self) -> Reading | None:
        reasons = ("SwPowerCap",) if next(self.looks) in self.slow else ()
        return Reading(sm_mhz=1980, memory_mhz=3201, temperature_c=40, power_w=500.0, reasons=reasons)


class Lap:
    calls = 1
    kernels: int | None = None

    def __init__(self, name: int, times: Iterator[float], log: list[int]) -> None:
        self.name, self.times, self.log = name, times, log

    def sample(self) -> float:
        self.log.append(self.name)
        return next(self.times)

    def result(self) -> DecodeOutput | None:
        return None

    def breakdown(self) -> Mapping[str, Any] | None:
        return None


def makers(log: list[int], *times: Iterator[float]) -> dict[int, Callable[[], Any]]:
    return {who: (lambda who=who, us=us: Lap(who, us, log)) for who, us in enumerate(times)}


def steady(us: float) -> Iterator[float]:
    while True:
        yield us


def noisy(us: float, spread: float) -> Iterator[float]:
    for i in count():
        yield us * (1 + spread * ((i * 37 % 101) / 50 - 1))


def test_the_order_is_drawn_by_lot_and_reversed_in_every_second_round() -> None:
    log: list[int] = []
    taken = take_rounds(Timer(), makers(log, steady(1.0), steady(2.0), steady(3.0)))
    rounds = [log[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    assert rounds[1] == rounds[0][::-1]
    assert rounds[3] == rounds[2][::-1]
    assert [s["us"] for s in taken.samples[1]] == [2.0] * 4
    assert [s["round"] for s in taken.samples[1]] == [0, 1, 2, 3]
    assert [len(readings) for readings in taken.readings] == [3] * 4


def test_everyone_is_first_about_as_often_as_others() -> None:
    timer = Timer()
    timer.min_rounds = timer.max_rounds = 400
    log: list[int] = []
    take_rounds(timer, makers(log, *(steady(1.0) for _ in range(4))))
    first = [log[4 * number] for number in range(400)]
    assert all(70 <= first.count(who) <= 130 for who in range(4))


def test_everyone_is_sampled_until_the_noisiest_is_known_well_enough() -> None:
    log: list[int] = []
    taken = take_rounds(Timer(), makers(log, steady(1.0), noisy(2.0, 0.014)))
    assert len(taken.samples[0]) == len(taken.samples[1])
    assert len(taken.samples[1]) in (8, 16, 32)
    assert median_interval([s["us"] for s in taken.samples[1]]).half_width <= HALF_WIDTH


def test_the_cap_ends_what_never_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer()
    taken = take_rounds(timer, makers([], noisy(2.0, 0.5)))
    assert len(taken.samples[0]) == timer.max_rounds
    timer.cap_s = 0.0
    assert len(take_rounds(timer, makers([], noisy(2.0, 0.5))).samples[0]) == timer.min_rounds


@pytest.mark.parametrize("us", [math.nan, math.inf, 0.0, -1.0])
def test_an_impossible_time_is_kept_and_not_waited_for(us: float) -> None:
    taken = take_rounds(Timer(), makers([], steady(us)))
    assert [s["us"] for s in taken.samples[0]] == [us if math.isfinite(us) else None] * Timer.min_rounds


def test_a_round_during_which_the_clocks_were_held_back_is_marked_for_all() -> None:
    taken = take_rounds(Timer(slow=(4,)), makers([], steady(1.0), steady(2.0)))  # the second look of round 1
    for who in (0, 1):
        assert [s["throttled"] for s in taken.samples[who]] == [False, True, False, False]


def test_renewing_makes_every_lap_of_a_round_anew_and_elsewhere() -> None:
    """All are gone before the first is made again, so that who comes first has the choice of all places."""
    timer = Timer()
    timer.renews = True
    made: list[int] = []
    log: list[int] = []
    alive: list[weakref.ref[Lap]] = []
    left: list[int] = []

    def maker(who: int) -> Callable[[], Any]:
        def make() -> Lap:
            made.append(who)
            left.append(sum(lap() is not None for lap in alive))
            lap = Lap(who, steady(1.0 + who), log)
            alive.append(weakref.ref(lap))
            return lap

        return make

    taken = take_rounds(timer, {who: maker(who) for who in (0, 1)})
    assert made[:2] == [0, 1]
    assert made[2:] == log  # each is made right before it is sampled
    assert [left[i : i + 2] for i in range(0, 10, 2)] == [[0, 1]] * 5
    assert timer.displaced == 8
    assert list(taken.laps) == [0, 1]


@pytest.mark.parametrize("where", ["prepare timing", "time"])
def test_who_fails_is_out_and_the_others_go_on(where: str) -> None:
    asked: list[tuple[int, str]] = []

    def attempt(who: int, what: str, action: Callable[[], Any]) -> Any:
        asked.append((who, what))
        return None if (who, what) == (1, where) else action()

    log: list[int] = []
    taken = take_rounds(Timer(), makers(log, steady(1.0), steady(2.0), steady(3.0)), attempt)
    assert set(taken.samples) == set(taken.laps) == {0, 2}
    assert [sorted(log[i : i + 2]) for i in range(0, 8, 2)] == [[0, 2]] * 4
    assert asked.count((1, where)) == 1
