"""Timers: how sets rotate, which times are refused, and what the two real timers measure."""

from __future__ import annotations

import math

import pytest
import torch

from harness.cuda_timers import (
    COLD_FACTOR,
    FLUSH_BYTES,
    MAX_SETS,
    EventsTimer,
    GraphTimer,
    GraphWarmTimer,
    KernelsTimer,
    cold_sets,
    host_times,
)
from harness.inputs import input_sets
from harness.timing import NotTheWork, WallTimer, judge
from impls.contract import DecodeInputs, DecodeOutput, Scalar
from impls.problem import DecodeProblem

L2 = 60 * 2**20
MB = 2**20


@pytest.mark.parametrize("kv_bytes", [1, 4 * MB, 32 * MB, 134 * MB, L2 * COLD_FACTOR, 1024 * MB])
def test_enough_other_data_lies_between_two_uses_of_a_set_and_no_set_is_wasted(kv_bytes: int) -> None:
    sets = cold_sets(kv_bytes, COLD_FACTOR * L2)
    assert (sets - 1) * kv_bytes >= COLD_FACTOR * L2
    assert sets == 2 or (sets - 2) * kv_bytes < COLD_FACTOR * L2


def test_the_smallest_case_of_the_study_rotates_without_a_flush() -> None:
    assert cold_sets(4 * MB, COLD_FACTOR * L2) == 46 <= MAX_SETS


def test_nothing_to_read_has_two_sets() -> None:
    assert cold_sets(0, COLD_FACTOR * L2) == 2


@pytest.mark.parametrize("us", [0.0, -1.0, math.nan, math.inf, None])
def test_one_impossible_sample_refuses_all(us: float | None) -> None:
    reason = judge([20.0, us, 20.0], kv_bytes=1000, ceiling_gbps=None)
    assert reason is not None
    assert reason.startswith("samples[1]: expected a finite time > 0, got ")


def test_the_median_may_be_as_fast_as_memory_and_no_faster() -> None:
    kv_bytes, ceiling = 33_554_432, 4500.0
    least = kv_bytes / (1.03 * ceiling * 1e3)
    assert judge([least * 1.001] * 3, kv_bytes=kv_bytes, ceiling_gbps=ceiling) is None
    assert judge([least * 0.5, least * 1.1, least * 1.1], kv_bytes=kv_bytes, ceiling_gbps=ceiling) is None
    reason = judge([least * 0.999] * 3, kv_bytes=kv_bytes, ceiling_gbps=ceiling)
    assert reason is not None
    assert reason.startswith("faster than memory: expected at least 7.24 µs for 33554432 bytes")


def test_eight_nanoseconds_are_no_speed_up() -> None:
    assert judge([0.008] * 20, kv_bytes=33_554_432, ceiling_gbps=4500.0) is not None


class SumPlan:
    """Launches one kernel, allocates its own output, and remembers which input sets it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @property
    def config(self) -> dict[str, Scalar]:
        return {}

    def new_output(self) -> DecodeOutput | None:
        return None

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        return ()

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        self.seen.append(inputs.q.data_ptr())
        return DecodeOutput(out=inputs.q + 1, lse=None)


PROBLEM = DecodeProblem(kv_lens=(64, 3), heads_q=4, heads_kv=2, head_dim=64, dtype="float16")


def test_wall_samples_alternate_between_the_sets() -> None:
    timer = WallTimer(torch.device("cpu"))
    sets = input_sets(PROBLEM, 0, "cpu", timer.sets(PROBLEM))
    plan = SumPlan()
    lap = timer.lap(plan, sets)
    assert all(0 < lap.sample() < 1e6 for _ in range(4))
    assert plan.seen == [inputs.q.data_ptr() for inputs in (*sets, *sets)]
    result = lap.result()
    assert result is not None
    assert torch.equal(result.out, sets[-1].q + 1)


@pytest.mark.gpu
def test_a_graph_calls_each_set_in_turn_and_its_output_is_that_of_the_last() -> None:
    device = torch.device("cuda", 0)
    timer = GraphTimer(device)
    problem = DecodeProblem(kv_lens=(8192, 1000), heads_q=8, heads_kv=8, head_dim=128)
    sets = input_sets(problem, 0, device, timer.sets(problem))
    plan = SumPlan()
    lap = timer.lap(plan, sets)
    assert lap.kernels == 1
    assert lap.calls % len(sets) == 0
    assert plan.seen[1:] == [inputs.q.data_ptr() for inputs in sets] * (lap.calls // len(sets))
    assert lap.breakdown() is None
    assert all(0 < lap.sample() < 1e4 for _ in range(3))
    for _ in range(2):
        result = lap.result()
        assert result is not None
        assert torch.equal(result.out, sets[-1].q + 1)


@pytest.mark.gpu
def test_tiny_cases_use_each_set_once_and_are_flushed() -> None:
    device = torch.device("cuda", 0)
    timer = GraphTimer(device)
    sets = input_sets(PROBLEM, 0, device, timer.sets(PROBLEM))
    assert len(sets) == MAX_SETS
    assert timer.flush_bytes(PROBLEM) == COLD_FACTOR * torch.cuda.get_device_properties(device).L2_cache_size
    lap = timer.lap(SumPlan(), sets)
    assert lap.calls == MAX_SETS
    assert lap.sample() > 0


@pytest.mark.gpu
def test_calls_that_do_not_launch_the_same_are_found_while_they_are_captured() -> None:
    class Uneven(SumPlan):
        def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
            result = super().run(inputs, out)
            return DecodeOutput(out=result.out * 2, lse=None) if len(self.seen) % 2 else result

    device = torch.device("cuda", 0)
    timer = GraphTimer(device)
    with pytest.raises(NotTheWork, match=r"call 1: expected \d launches like call 0, got \d"):
        timer.lap(Uneven(), input_sets(LARGE, 0, device, timer.sets(LARGE)))


LARGE = DecodeProblem(kv_lens=(8192, 1000), heads_q=8, heads_kv=8, head_dim=128)


@pytest.mark.gpu
@pytest.mark.alone
def test_the_other_methods_take_believable_samples_of_the_same_work() -> None:
    device = torch.device("cuda", 0)
    warm, events = GraphWarmTimer(device), EventsTimer(device)
    for timer in (warm, events):
        sets = input_sets(LARGE, 0, device, timer.sets(LARGE))
        assert len(sets) == 2  # the first was checked, the last is timed
        lap = timer.lap(SumPlan(), sets)
        assert all(0 < lap.sample() < 1e4 for _ in range(3))
        result = lap.result()
        assert result is not None
        assert torch.equal(result.out, sets[-1].q + 1)
    assert events.flush_bytes(LARGE) == FLUSH_BYTES


@pytest.mark.gpu
@pytest.mark.alone
def test_the_profile_of_a_replay_has_every_kernel_of_every_call_and_no_other() -> None:
    class TwoKernels(SumPlan):
        def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
            return DecodeOutput(out=super().run(inputs, out).out * 2, lse=None)

    device = torch.device("cuda", 0)
    timer = KernelsTimer(device)
    for problem in (LARGE, PROBLEM):  # the second is flushed, by a kernel that must not count
        lap = timer.lap(TwoKernels(), input_sets(problem, 0, device, timer.sets(problem)))
        samples = [lap.sample() for _ in range(3)]
        found = lap.breakdown()
        assert found is not None
        assert found["calls"] == 3 * lap.calls
        assert len(found["kernels"]) == lap.kernels == 2
        assert sum(kernel["us"] for kernel in found["kernels"]) == pytest.approx(min(samples), rel=0.5)


@pytest.mark.gpu
def test_a_caller_waits_longer_for_the_device_than_for_the_launch() -> None:
    device = torch.device("cuda", 0)
    times = host_times(SumPlan(), input_sets(LARGE, 0, device, 2))
    assert 0 < times["launch_us"] <= times["end_to_end_us"] < 1e5
