"""What the experiments of the selftest share: how a trial begins, and samples taken in shared rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from harness.inputs import input_sets
from harness.rounds import take_rounds
from harness.study import Case
from harness.timing import Lap, Timer
from impls.contract import DecodeInputs, DecodePlan

Trial: TypeAlias = dict[str, Any]

SAMPLES = 11
"""Samples of a timer whose median is taken, where nothing is compared round by round."""

REASON_CHARS = 200
"""Characters of a reason that a trial keeps."""


@dataclass(frozen=True)
class Sampled:
    """One plan's part of shared rounds.

    Args:
        us: µs per call, by round; None where the GPU was throttled, or the time was not finite.
        kernels: that one call launches; None where that is not known.
    """

    us: list[float | None]
    kernels: int | None


def head(case: Case, impl: str, experiment: str) -> Trial:
    """What every trial of an experiment begins with."""
    return {
        "case": case.name,
        "impl": impl,
        "experiment": experiment,
        "problem": case.problem.to_dict(),
        "kv_bytes": case.problem.kv_bytes,
    }


def sample_together(
    timer: Timer, sets: Sequence[DecodeInputs], plans: Sequence[Callable[[], DecodePlan]]
) -> list[Sampled]:
    """The samples of each plan, taken in shared rounds, in the order of ``plans``.

    Raises:
        Exception: whatever a plan raises; nobody is left out.
    """

    def lap(plan: Callable[[], DecodePlan]) -> Lap:
        return timer.lap(plan(), sets)

    taken = take_rounds(timer, {who: partial(lap, plan) for who, plan in enumerate(plans)})
    return [
        Sampled([None if s["throttled"] else s["us"] for s in taken.samples[who]], taken.laps[who].kernels)
        for who in range(len(plans))
    ]


def samples_of(timer: Timer, case: Case, plan: DecodePlan, device: torch.device, count: int) -> list[float]:
    """That many samples of one plan alone, on inputs of the timer's own choice; µs per call."""
    lap = timer.lap(plan, input_sets(case.problem, case.seed, device, timer.sets(case.problem)))
    return [lap.sample() for _ in range(count)]


def median_us(timer: Timer, case: Case, plan: DecodePlan, device: torch.device) -> float:
    """The median of :data:`SAMPLES` samples of one plan alone, in µs per call."""
    return statistics.median(samples_of(timer, case, plan, device, SAMPLES))


def call_of(plan: DecodePlan, inputs: DecodeInputs) -> Callable[[], object]:
    """What timers of others take: a call without arguments, here of one plan on the same inputs and output."""
    output = plan.new_output()
    return lambda: plan.run(inputs, output)
