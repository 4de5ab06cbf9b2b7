"""Implementations with a space, whose every configuration has a time and a fate that the tests know."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from impls.contract import DecodeInputs, DecodeOutput, DecodePlan, Scalar
from impls.problem import DecodeProblem
from impls.space import Configuration
from tests.harness.fakes import Lap, Plan, Right, Timer

LOG_VARIABLE = "SPLITKV_TEST_TUNING_LOG"
"""Names a file that gets a line for each plan and one for each plan that is timed."""

OWN_US = 20.0
US = {"slow": 30.0, "fast": 10.0, "middling": 15.0, "wrong": 1.0, "dies": 1.0, "too-fast": 0.008}
"""Tile -> µs of a call; a wrong tile and those that die would be the fastest."""


class TunablePlan(Plan):
    def __init__(self, problem: DecodeProblem, tuning: Mapping[str, Scalar] | None) -> None:
        super().__init__(problem, tuning)
        self.tile = str((tuning or {}).get("tile", "own"))
        asked = (tuning or {}).get("num_splits", 1)
        # More splits than two are none: the plan is the same.
        self.split_counts = (min(int(asked), 2) if isinstance(asked, int) else 1,) * problem.batch
        us = US.get(self.tile, OWN_US) + 2.0 * (self.split_counts[:1] == (2,))
        self.config = {"tile": self.tile, "num_splits": asked, "us": str(us)}
        log("plan", self)

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        if self.tile == "dies":
            os._exit(7)
        output = super().run(inputs, out)
        if self.tile == "wrong":
            output.out.mul_(1.5)
        return output


class Tunable(Right):
    plan_class = TunablePlan
    name = "tunable"

    def plan(
        self, problem: DecodeProblem, device: torch.device, tuning: Mapping[str, Scalar] | None = None
    ) -> DecodePlan:
        if (tuning or {}).get("tile") == "does-not-compile":
            raise RuntimeError("ptxas: out of registers")
        return super().plan(problem, device, tuning)

    def configurations(self, problem: DecodeProblem, device: torch.device) -> Sequence[Configuration]:
        tiles = ("slow", "wrong", "fast", "dies", "middling", "does-not-compile", "too-fast")
        found = [Configuration({}, {})]
        for tile in tiles:
            found += [Configuration({"tile": tile}, {"num_splits": n}, kernel=tile) for n in (1, 2, 3)]
        return [*found, Configuration({"tile": "large"}, {}, "shared memory: expected <= 10 bytes a CTA, got 20")]


class BestAlready(Tunable):
    """Its own choice is the fastest."""

    def configurations(self, problem: DecodeProblem, device: torch.device) -> Sequence[Configuration]:
        return [Configuration({}, {}), Configuration({"tile": "slow"}, {})]


class OwnChoiceIsWrong(Tunable):
    def plan(
        self, problem: DecodeProblem, device: torch.device, tuning: Mapping[str, Scalar] | None = None
    ) -> DecodePlan:
        return super().plan(problem, device, tuning or {"tile": "wrong"})


class StrictTimer(Timer):
    """Ends the process if it is asked to time a plan that is wrong: a check has to come before."""

    def lap(self, plan: DecodePlan, sets: Sequence[DecodeInputs], *, rotations: int | None = None) -> Lap:
        if isinstance(plan, TunablePlan):  # and not the bound's
            if plan.tile == "wrong":
                os._exit(9)
            log("time", plan)
        return super().lap(plan, sets, rotations=rotations)


def log(what: str, plan: TunablePlan) -> None:
    path = os.environ.get(LOG_VARIABLE)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{what} {plan.problem.batch} {plan.tile} {plan.config['num_splits']}\n")
