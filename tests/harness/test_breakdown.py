"""Breakdowns: calls told apart by order and number, and sums that come out."""

from __future__ import annotations

import pytest

from harness.breakdown import NAME_CHARS, Activity, busy_us, split_calls, summarize


def call(start: float, *, split: float = 10.0, gap: float = 1.0, combine: float = 2.0) -> list[Activity]:
    end = start + split
    return [Activity("split", start, end), Activity("combine", end + gap, end + gap + combine)]


def test_calls_are_told_apart_by_order_alone() -> None:
    calls = [call(0.0), call(14.0), call(28.0)]
    shuffled = [calls[2][1], calls[0][0], calls[1][1], calls[1][0], calls[2][0], calls[0][1]]
    assert split_calls(shuffled, 3) == calls


@pytest.mark.parametrize("seen", [0, 5])
def test_a_window_that_is_not_whole_calls_is_refused(seen: int) -> None:
    with pytest.raises(ValueError, match=f"expected a multiple of 3 .*, got {seen}"):
        split_calls([Activity("k", float(i), i + 0.5) for i in range(seen)], 3)


def test_the_parts_of_a_call_add_up_to_its_period() -> None:
    found = summarize([call(14.0 * i) for i in range(5)], total_us=14.1)
    assert found["calls"] == 5
    assert found["kernels"] == [{"name": "split", "us": 10.0}, {"name": "combine", "us": 2.0}]
    assert (found["gap_us"], found["between_us"]) == (1.0, 1.0)
    assert (found["traced_us"], found["total_us"]) == (14.0, 14.1)


def test_kernels_that_overlap_have_a_gap_below_zero_and_are_busy_once() -> None:
    """As under programmatic dependent launch, where the second kernel waits on the device for the first."""
    calls = [call(12.0 * i, gap=-4.0, combine=6.0) for i in range(4)]
    found = summarize(calls, total_us=12.0)
    assert found["gap_us"] == -4.0
    assert found["between_us"] == 0.0
    assert found["traced_us"] == 12.0
    assert busy_us(calls[0]) == 12.0


def test_busy_time_leaves_gaps_out() -> None:
    assert busy_us(call(3.0)) == 12.0
    assert busy_us([Activity("outer", 0.0, 10.0), Activity("inner", 2.0, 3.0)]) == 10.0


def test_a_pause_between_windows_does_not_count_as_a_gap() -> None:
    found = summarize([*(call(14.0 * i) for i in range(4)), *(call(1e6 + 14.0 * i) for i in range(4))], 14.0)
    assert found["between_us"] == 1.0


def test_one_call_alone_has_nothing_between() -> None:
    assert summarize([call(0.0)], 13.0)["between_us"] == 0.0


def test_names_are_cut() -> None:
    found = summarize([[Activity("x" * 1000, 0.0, 1.0)]], 1.0)
    assert found["kernels"][0]["name"] == "x" * NAME_CHARS
