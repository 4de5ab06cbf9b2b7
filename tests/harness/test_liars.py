"""Cheats go through the whole loop, and none of them comes out with a time that counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from harness import liars
from harness.lies import CASES, LIES, try_liars
from harness.worker import METHODS

Outcomes = Mapping[tuple[str, str], dict[str, Any]]


def outcomes(trials: list[dict[str, Any]]) -> Outcomes:
    return {(trial["impl"], trial["case"]): trial for trial in trials}


@pytest.fixture(scope="module")
def on_cpu() -> Outcomes:
    """With a read ceiling of 100 GB/s, for a CPU has none of its own."""
    env, trials = try_liars("cpu", bound="tests.harness.fakes:FastBound")
    assert env["device"] == "cpu"
    return outcomes(trials)


def test_every_liar_of_a_cpu_is_tried_on_a_small_case_and_a_large_one(on_cpu: Outcomes) -> None:
    wanted = {(name, case.name) for name, lie in LIES.items() if "cpu" in lie.devices for case in CASES["cpu"]}
    assert set(on_cpu) == wanted - {("knows-the-inputs", "liars_small")}


@pytest.mark.parametrize("case", ["liars_small", "liars_large"])
def test_the_honest_one_is_ok(case: str, on_cpu: Outcomes) -> None:
    control = on_cpu["honest", case]
    assert control["status"] == "ok", control["reason"]
    assert control["control"]
    assert control["us"] > 0


@pytest.mark.parametrize(
    ("liar", "status", "reason"),
    [
        ("clock-8ns", "invalid", "faster than memory: "),
        ("clock-zero", "invalid", "expected a finite time > 0, got 0 µs"),
        ("clock-negative", "invalid", "expected a finite time > 0, got -3 µs"),
        ("clock-nan", "invalid", "expected a finite time > 0, got nan µs"),
        ("in-plan", "wrong", "after the timed calls: "),
        ("every-second", "wrong", "after the timed calls: "),
        ("knows-the-inputs", "invalid", "faster than memory: "),
    ],
)
def test_a_liar_is_caught_on_a_cpu(liar: str, status: str, reason: str, on_cpu: Outcomes) -> None:
    trials = [trial for (name, _), trial in on_cpu.items() if name == liar]
    assert trials
    for trial in trials:
        assert trial["status"] == status, trial
        assert reason in trial["reason"]


def test_without_a_ceiling_those_that_only_it_gives_away_are_not_tried() -> None:
    _, trials = try_liars("cpu")
    names = {trial["impl"] for trial in trials}
    assert {name for name, lie in LIES.items() if "cpu" in lie.devices} - names == {"clock-8ns", "knows-the-inputs"}
    assert all(trial["status"] in ("wrong", "invalid") for trial in trials if not trial["control"])


def test_a_lying_lap_does_the_work_and_tells_the_truth_of_everything_else() -> None:
    class Told:
        calls, kernels, taken = 7, 2, 0

        def sample(self) -> float:
            self.taken += 1
            return 20.0

        def result(self) -> None:
            return None

        def breakdown(self) -> Mapping[str, Any]:
            return {"calls": 7}

    truth = Told()
    lap = liars.LyingLap(truth, 0.008)
    assert lap.sample() == 0.008
    assert truth.taken == 1
    assert (lap.calls, lap.kernels, lap.breakdown()) == (7, 2, {"calls": 7})


def test_all_stand_on_the_same_honest_kernel() -> None:
    problem = CASES["cpu"][0].problem
    for lie in LIES.values():
        impl = getattr(liars, lie.where.partition(":")[2])()
        if "cpu" in lie.devices and impl.unsupported(problem, torch.device("cpu")) is None:
            assert (
                impl.plan(problem, torch.device("cpu")).config["function"].endswith("scaled_dot_product_attention")
            )


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("method", [None, *METHODS["cuda"]])
def test_liars_are_caught_by_every_method_of_a_gpu(method: str | None) -> None:
    _, trials = try_liars("cuda", method=method)
    assert {trial["impl"] for trial in trials} >= {"honest", "elsewhere", "in-plan", "every-second"}
    for trial in trials:
        # One launch at a time has the input set that nobody can guess, or a flush that takes longer than memory.
        wanted = ("ok",) if trial["control"] else ("wrong", "invalid")
        assert trial["status"] in wanted, trial
