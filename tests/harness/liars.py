"""Implementations that would like to look fast. None of them may end with a speed-up.

On a CPU and a GPU alike; named to the loop as ``tests.harness.liars:Class``. Each stands on an honest
implementation, and cheats in one way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from harness.inputs import input_sets
from impls.contract import DecodeInputs, DecodeOutput, DecodePlan, Scalar
from impls.problem import DecodeProblem
from impls.torch_attention import TorchSdpa
from impls.triton_splitkv import TritonSplitKV


class Liar:
    """Honest, unless a subclass says otherwise."""

    def __init__(self, plan: DecodePlan, problem: DecodeProblem, device: torch.device) -> None:
        self._plan = plan
        self._problem = problem
        self._device = device
        self.config = plan.config
        self.prepare()

    def prepare(self) -> None:
        """What it does in ``plan``."""

    def new_output(self) -> DecodeOutput | None:
        return self._plan.new_output()

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        return self._plan.workspaces()

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        return self._plan.run(inputs, out)


class SkipsEverySecondCall(Liar):
    """Does nothing in every second call, and leaves what the call before has left."""

    def prepare(self) -> None:
        self._calls = 0
        self._kept: DecodeOutput | None = None

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        self._calls += 1
        if self._calls % 2 or self._kept is None:
            self._kept = super().run(inputs, out)
        return self._kept


class WorksInPlan(Liar):
    """Guesses the inputs from the case's seed, computes in ``plan``, and only copies in ``run``."""

    def prepare(self) -> None:
        guess = input_sets(self._problem, SEED, self._device, 1)[0]
        output = self._plan.run(guess, self._plan.new_output())
        self._answer = output.out.clone()

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        target = torch.empty_like(self._answer) if out is None else out.out
        target.copy_(self._answer)
        return DecodeOutput(out=target, lse=None)


class RunsElsewhere(Liar):
    """Launches on a stream of its own, which the caller's stream does not wait for."""

    def prepare(self) -> None:
        self._stream = torch.cuda.Stream(self._device)

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        with torch.cuda.stream(self._stream):
            return super().run(inputs, out)


SEED = 1
"""Of the cases that :class:`WorksInPlan` knows."""


class Skips(TorchSdpa):
    def plan(
        self, problem: DecodeProblem, device: torch.device, tuning: Mapping[str, Scalar] | None = None
    ) -> DecodePlan:
        return SkipsEverySecondCall(super().plan(problem, device, tuning), problem, device)


class Plans(TorchSdpa):
    def plan(
        self, problem: DecodeProblem, device: torch.device, tuning: Mapping[str, Scalar] | None = None
    ) -> DecodePlan:
        return WorksInPlan(super().plan(problem, device, tuning), problem, device)


class Elsewhere(TritonSplitKV):
    def plan(
        self, problem: DecodeProblem, device: torch.device, tuning: Mapping[str, Scalar] | None = None
    ) -> DecodePlan:
        return RunsElsewhere(super().plan(problem, device, tuning), problem, device)
