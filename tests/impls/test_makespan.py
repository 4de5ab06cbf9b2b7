"""When the last CTA ends: bounds that hold, simulations that are exact where they are fine enough."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impls import makespan as module
from impls.makespan import CLOSE, Schedule
from tests.impls.lpt import makespan


@st.composite
def grids(draw: st.DrawFn) -> tuple[Schedule, int]:
    """A schedule, and when its last CTA ends exactly."""
    size = draw(st.integers(1, 30))
    keys = draw(st.lists(st.integers(1, draw(st.sampled_from([20, 100_000]))), min_size=size, max_size=size))
    counts = draw(st.lists(st.integers(1, draw(st.sampled_from([1, 12]))), min_size=size, max_size=size))
    copies, ctas = draw(st.sampled_from([1, 2, 5, 8])), draw(st.integers(1, 60))
    jobs = np.sort(np.repeat(keys, counts))[::-1].tolist()
    schedule = Schedule(np.array(keys), np.array(counts), copies=copies, ctas=ctas)
    return schedule, makespan(jobs, copies=copies, ctas=ctas)


ROUNDING = 1 + 1e-9


@given(grids())
def test_the_end_is_between_the_bounds(grid: tuple[Schedule, int]) -> None:
    schedule, exact = grid
    assert schedule.even_share <= schedule.lower <= exact * ROUNDING
    schedule.bound()
    # Where the bounds are close they have been replaced by one value between them.
    slack = (1 + CLOSE) * ROUNDING if schedule.lower == schedule.upper else ROUNDING
    assert schedule.lower <= exact * slack
    assert exact <= schedule.upper * slack


@given(grids())
def test_bounds_may_not_be_narrowed_without_being_right(grid: tuple[Schedule, int]) -> None:
    """The bounds themselves, none of them taken for settled because it is close."""
    schedule, exact = grid
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CLOSE", 0.0)
        schedule.bound()
    assert schedule.lower <= exact * ROUNDING
    assert exact <= schedule.upper * ROUNDING


@given(grids())
def test_a_simulation_that_is_not_cut_short_is_exact(grid: tuple[Schedule, int]) -> None:
    schedule, exact = grid
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CLOSE", 0.0)
        patch.setattr(module, "STEPS", 10**9)
        schedule.settle()
    assert schedule.lower == schedule.upper == pytest.approx(exact, rel=1e-9)


@given(grids())
def test_a_settled_question_stays_settled(grid: tuple[Schedule, int]) -> None:
    schedule, _ = grid
    schedule.settle()
    end = schedule.lower
    assert schedule.upper == end
    schedule.bound()
    schedule.settle()
    assert (schedule.lower, schedule.upper) == (end, end)


@given(grids(), grids(), st.sampled_from([0.0, 10.0, 1000.0]))
def test_which_ends_first_is_what_settled_ends_say(
    a: tuple[Schedule, int], b: tuple[Schedule, int], more: float
) -> None:
    first, second = a[0], b[0]
    answer = first.ends_before(second, 0.98, later=more)
    later = first.may_end_after(second.even_share)
    first.settle()
    second.settle()
    assert answer == (first.upper + more < 0.98 * second.upper)
    assert later or first.upper <= second.even_share


def test_a_coarse_simulation_is_close_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """1280 CTAs of 160 lengths on 132 places, 8 of each length; steps of about 16 CTAs."""
    pushed: list[float] = []
    replace = module.heapq.heapreplace
    monkeypatch.setattr(module.heapq, "heapreplace", lambda heap, x: (pushed.append(x), replace(heap, x))[1])
    keys = np.linspace(900, 3000, 160).astype(np.int64)
    monkeypatch.setattr(module, "CLOSE", 0.0)
    schedule = Schedule(keys, np.ones(160, dtype=np.int64), copies=8, ctas=132)
    schedule.settle()
    assert 0 < len(pushed) <= 2 * module.STEPS
    monkeypatch.undo()
    exact = makespan(sorted(keys.tolist(), reverse=True), copies=8, ctas=132)
    assert schedule.lower == pytest.approx(exact, rel=0.02)


def test_the_exact_simulation_hands_each_split_to_the_first_free_cta() -> None:
    assert makespan([5, 4, 3, 2], copies=1, ctas=2) == 7  # 5 + 2 and 4 + 3
    assert makespan([5, 4], copies=3, ctas=4) == 9  # one of the three 4s starts on the idle CTA, two after a 5
    assert makespan([7], copies=8, ctas=132) == 7
    assert makespan([], copies=8, ctas=132) == 0
