"""Implementations and a timer that would like to look fast. None of them may end with a time that counts.

They are there to be caught: the selftest sends them through the real loop (:mod:`harness.lies`), and so do the
tests. Each stands on an honest implementation and cheats in one way; :data:`harness.lies.LIES` tells which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from harness.cuda_timers import GraphTimer
from harness.inputs import input_sets
from harness.lies import SEED
from harness.timing import Lap, Timer, WallTimer
from impls.catalog import OURS, load
from impls.contract import DecodeImpl, DecodeInputs, DecodeOutput, DecodePlan, Scalar
from impls.problem import DecodeProblem

HONEST: Mapping[str, str] = {"cuda": "triton-splitkv", "cpu": "torch-sdpa"}
"""Device type -> the implementation that all of them stand on."""

CLOCK = "clock_us"
"""Key of a plan's config: what the lying timer tells of it, as text, for it may be no number of a record."""

KNOWN_SETS = 4
"""Input sets that :class:`KnowsTheInputs` has answers for: as many as a case of over 64 MB rotates."""

MEMORY_SHOWS_BYTES = 1_000_000
"""K and V under which reading is over before anything else is: no time is too short for so few bytes."""


class HonestPlan:
    """Right and honest, unless a subclass says otherwise; see :class:`impls.contract.DecodePlan`."""

    def __init__(
        self, plan: DecodePlan, problem: DecodeProblem, device: torch.device, clock: str | None = None
    ) -> None:
        self._plan = plan
        self._problem = problem
        self._device = device
        self.config: Mapping[str, Scalar] = {**plan.config, **({CLOCK: clock} if clock else {})}
        self.prepare()

    def prepare(self) -> None:
        """What it does in ``plan``."""

    def new_output(self) -> DecodeOutput | None:
        """As the honest plan's."""
        return self._plan.new_output()

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        """As the honest plan's."""
        return self._plan.workspaces()

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """As the honest plan's."""
        return self._plan.run(inputs, out)


class SkipsPlan(HonestPlan):
    """Does nothing in every second call, and hands out what the call before has left."""

    def prepare(self) -> None:
        """Begin to count."""
        self._calls = 0
        self._kept: DecodeOutput | None = None

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Compute, or not."""
        self._calls += 1
        if self._calls % 2 or self._kept is None:
            self._kept = super().run(inputs, out)
        return self._kept


class WorksInPlanPlan(HonestPlan):
    """Guesses the first inputs from the case's seed, computes in ``plan``, and only copies in ``run``."""

    sets = 1

    def prepare(self) -> None:
        """Compute."""
        self._answers = [
            _clone(self._plan.run(guess, self._plan.new_output()))
            for guess in input_sets(self._problem, SEED, self._device, self.sets)
        ]

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Copy the answer to the first inputs, whatever these are."""
        return _copy(self._answers[0], out)


class KnowsTheInputsPlan(WorksInPlanPlan):
    """Guesses all inputs that the timing takes, and tells them apart by where they lie: right every time."""

    sets = KNOWN_SETS

    def prepare(self) -> None:
        """Compute."""
        super().prepare()
        self._seen: dict[int, int] = {}

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Copy the answer to these inputs; where there are more than it knows, compute."""
        number = self._seen.setdefault(inputs.k.data_ptr(), len(self._seen))
        if number >= len(self._answers):
            return super(WorksInPlanPlan, self).run(inputs, out)
        return _copy(self._answers[number], out)


class RunsElsewherePlan(HonestPlan):
    """Launches on a stream of its own, which the caller's stream does not wait for."""

    def prepare(self) -> None:
        """Make the stream."""
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Compute out of sight of events on the caller's stream."""
        with torch.cuda.stream(self._stream):
            return super().run(inputs, out)


class Honest:
    """An implementation that cheats in nothing: what must come out ``ok`` beside the others."""

    name = "honest"
    plan_class: type[HonestPlan] = HonestPlan

    clock: str | None = None
    """What the lying timer tells of its plans, in µs; None: the truth."""

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """As the honest implementation."""
        return _honest(device.type).unsupported(problem, device)

    def plan(
        self, problem: DecodeProblem, device: torch.device, tuning: Mapping[str, Scalar] | None = None
    ) -> HonestPlan:
        """A plan that cheats as its class does."""
        # Who runs where nobody waits for it writes words that nobody orders: never by exchange.
        apart = {"merge": "combine"} if HONEST[device.type] in OURS else {}
        honest = _honest(device.type).plan(problem, device, {**apart, **(tuning or {})})
        return self.plan_class(honest, problem, device, self.clock)


class Skips(Honest):
    """See :class:`SkipsPlan`."""

    name = "every-second"
    plan_class = SkipsPlan


class WorksInPlan(Honest):
    """See :class:`WorksInPlanPlan`."""

    name = "in-plan"
    plan_class = WorksInPlanPlan


class KnowsTheInputs(Honest):
    """See :class:`KnowsTheInputsPlan`."""

    name = "knows-the-inputs"
    plan_class = KnowsTheInputsPlan

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """Refuse what is read too fast for the speed of memory to tell."""
        if problem.kv_bytes < MEMORY_SHOWS_BYTES:
            return f"K and V: expected at least {MEMORY_SHOWS_BYTES} bytes, got {problem.kv_bytes}"
        return super().unsupported(problem, device)


class RunsElsewhere(Honest):
    """See :class:`RunsElsewherePlan`."""

    name = "elsewhere"
    plan_class = RunsElsewherePlan


class EightNanoseconds(Honest):
    """Its kernel is honest; its clock is not."""

    name = "clock-8ns"
    clock = "0.008"


class Zero(Honest):
    """Its kernel is honest; its clock is not."""

    name = "clock-zero"
    clock = "0"


class Negative(Honest):
    """Its kernel is honest; its clock is not."""

    name = "clock-negative"
    clock = "-3"


class Nan(Honest):
    """Its kernel is honest; its clock is not."""

    name = "clock-nan"
    clock = "nan"


class LyingLap:
    """A lap that is what it is, but for the time it tells; see :class:`harness.timing.Lap`."""

    def __init__(self, lap: Lap, us: float) -> None:
        self._lap = lap
        self._us = us
        self.calls = lap.calls
        self.kernels = lap.kernels

    def sample(self) -> float:
        """Do the work, and lie about it."""
        self._lap.sample()
        return self._us

    def result(self) -> DecodeOutput | None:
        """The truth."""
        return self._lap.result()

    def breakdown(self) -> Mapping[str, Any] | None:
        """The truth."""
        return self._lap.breakdown()


class LyingGraphTimer(GraphTimer):
    """The default timer of a GPU, in few rounds; it lies of plans whose config says :data:`CLOCK`."""

    min_rounds = 5
    max_rounds = 5

    def lap(self, plan: DecodePlan, sets: Sequence[DecodeInputs], *, rotations: int | None = None) -> Lap:
        """As the honest one."""
        return _told(plan, super().lap(plan, sets, rotations=rotations))


class LyingWallTimer(WallTimer):
    """The timer of a CPU; it lies of plans whose config says :data:`CLOCK`."""

    def lap(self, plan: DecodePlan, sets: Sequence[DecodeInputs], *, rotations: int | None = None) -> Lap:
        """As the honest one."""
        return _told(plan, super().lap(plan, sets, rotations=rotations))


def lying_timer(device: torch.device) -> Timer:
    """The lying timer of a device."""
    return LyingGraphTimer(device) if device.type == "cuda" else LyingWallTimer(device)


def _told(plan: DecodePlan, lap: Lap) -> Lap:
    clock = plan.config.get(CLOCK)
    return lap if clock is None else LyingLap(lap, float(clock))


@cache
def _honest(device: str) -> DecodeImpl:
    return load(HONEST[device])


def _clone(output: DecodeOutput) -> DecodeOutput:
    return DecodeOutput(output.out.clone(), None if output.lse is None else output.lse.clone())


def _copy(answer: DecodeOutput, out: DecodeOutput | None) -> DecodeOutput:
    """The answer in the output that was given, or a copy of it where none was."""
    if out is None:
        return _clone(answer)
    out.out.copy_(answer.out)
    if out.lse is not None and answer.lse is not None:
        out.lse.copy_(answer.lse)
    return out
