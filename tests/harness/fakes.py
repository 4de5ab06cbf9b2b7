"""Implementations, a timer and a bound that need no kernel: each does one thing, mostly a wrong one.

They are named to the loop as ``tests.harness.fakes:Class``, for it loads them in a process of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from harness.clocks import Reading
from impls.contract import (
    TORCH_DTYPES,
    DecodeInputs,
    DecodeOutput,
    DecodePlan,
    ImplUnavailable,
    PlanRefused,
    Scalar,
    empty_output,
)
from impls.problem import DecodeProblem
from impls.reference import reference

STALL_VARIABLE = "SPLITKV_TEST_STALL"
"""While this is set, :class:`Stalls` never returns."""

FIRST = 1
"""Batch size of the case on which the lethal fakes strike; on any other they are right."""


class Plan:
    """Right, unless a subclass says otherwise."""

    us: str = "20"
    """What the fake timer reads off it, as text: it may be no number that a record can hold."""

    def __init__(self, problem: DecodeProblem, tuning: Mapping[str, Scalar] | None) -> None:
        self.problem = problem
        self.runs = 0
        self.config: dict[str, Scalar] = {"num_splits": "auto", **(tuning or {}), "us": self.us}

    def new_output(self) -> DecodeOutput | None:
        return empty_output(self.problem, torch.device("cpu"))

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(8),)

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        assert out is not None
        assert out.lse is not None
        self.runs += 1
        ref = reference(inputs)
        out.out.copy_(ref.out)
        out.lse.copy_(ref.lse)
        return out


class Right:
    plan_class: type[Plan] = Plan
    name = "right"

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        return None

    def plan(
        self, problem: DecodeProblem, device: torch.device, tuning: Mapping[str, Scalar] | None = None
    ) -> DecodePlan:
        return self.plan_class(problem, tuning)


class WrongPlan(Plan):
    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        output = super().run(inputs, out)
        output.out.mul_(1.5)
        return output


class Wrong(Right):
    plan_class = WrongPlan


class ForgetsPlan(Plan):
    """Answers every call with the output of its first."""

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        if self.runs == 0:
            output = super().run(inputs, out)
            self.first = output.out.clone()
            return output
        output = super().run(inputs, out)
        output.out.copy_(self.first)
        return output


class Forgets(Right):
    plan_class = ForgetsPlan


class RaisesPlan(Plan):
    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        raise ValueError("no such\n    stride")


class Raises(Right):
    plan_class = RaisesPlan


class OutOfMemoryPlan(Plan):
    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")


class OutOfMemory(Right):
    plan_class = OutOfMemoryPlan


class Refuses(Right):
    def plan(
        self, problem: DecodeProblem, device: torch.device, tuning: Mapping[str, Scalar] | None = None
    ) -> DecodePlan:
        raise PlanRefused("workspace: expected at most 10 bytes, got 20")


class Unsupported(Right):
    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        return "head_dim: expected 256, got 64"


class Missing(Right):
    def __init__(self) -> None:
        raise ImplUnavailable("import no_such_library: not here")


class KillsOnImport(Right):
    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class DiesPlan(Plan):
    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        if self.problem.batch == FIRST:
            os._exit(7)
        return super().run(inputs, out)


class Dies(Right):
    plan_class = DiesPlan


class DiesLaterPlan(Plan):
    """Survives the check, not the timing."""

    us = "exit"


class DiesLater(Right):
    plan_class = DiesLaterPlan


class HangsPlan(Plan):
    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        while self.problem.batch == FIRST:
            time.sleep(0.1)
        return super().run(inputs, out)


class Hangs(Right):
    plan_class = HangsPlan


class StallsPlan(Plan):
    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        while STALL_VARIABLE in os.environ and self.problem.batch != FIRST:
            time.sleep(0.1)
        return super().run(inputs, out)


class Stalls(Right):
    plan_class = StallsPlan


class NanTimePlan(Plan):
    us = "nan"


class NanTime(Right):
    plan_class = NanTimePlan


class ZeroTimePlan(Plan):
    us = "0"


class ZeroTime(Right):
    plan_class = ZeroTimePlan


class NegativeTimePlan(Plan):
    us = "-3"


class NegativeTime(Right):
    plan_class = NegativeTimePlan


class TooFastPlan(Plan):
    """Faster than :class:`Bound` lets any memory be, on a case of :data:`TOO_FAST_BYTES` or more."""

    us = "0.008"


class TooFast(Right):
    plan_class = TooFastPlan


class RaisesLaterPlan(Plan):
    us = "raise"


class RaisesLater(Right):
    plan_class = RaisesLaterPlan


class CopiesPlan(Plan):
    """For a GPU: launches one kernel, and is wrong only by what it computes."""

    def new_output(self) -> DecodeOutput | None:
        return empty_output(self.problem, torch.device("cuda", 0))

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        return ()

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        assert out is not None
        out.out.copy_(inputs.q)
        return out


class NotCapturablePlan(CopiesPlan):
    """Right, and waits for the device in every run."""

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        torch.cuda.current_stream().synchronize()
        return Plan.run(self, inputs, out)


class NotCapturable(Right):
    plan_class = NotCapturablePlan


class PoisonsPlan(CopiesPlan):
    """Reads out of bounds on the device, which ends the CUDA context of its process."""

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        inputs.q.view(-1)[torch.full((1,), 2**40, device=inputs.q.device)].add_(1)
        return super().run(inputs, out)


class Poisons(Right):
    plan_class = PoisonsPlan


class Copies(Right):
    plan_class = CopiesPlan


class Bound:
    """Reads nothing. Its ceiling is 1 GB/s: 1000 bytes take 1 µs."""

    name = "stream-read"
    ceiling_problem = DecodeProblem(kv_lens=(125,), heads_q=1, heads_kv=1, head_dim=64, dtype="float16")  # 32000 B

    def sweep(self) -> tuple[Mapping[str, Scalar], ...]:
        return ({"us": "40"}, {"us": "32"}, {"us": "36"})

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        return None if problem.kv_bytes else "nothing to read"

    def plan(self, problem: DecodeProblem, device: torch.device, tuning: Mapping[str, Scalar]) -> BoundPlan:
        return BoundPlan(tuning)


class FastBound(Bound):
    """Reads nothing, at 100 GB/s by the clock of the liars' timer."""

    def sweep(self) -> tuple[Mapping[str, Scalar], ...]:
        return ({"clock_us": "0.32"},)


class BoundPlan:
    def __init__(self, tuning: Mapping[str, Scalar]) -> None:
        self.config = dict(tuning)

    def new_output(self) -> None:
        return None

    def workspaces(self) -> tuple[torch.Tensor, ...]:
        return ()

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        return DecodeOutput(out=inputs.q, lse=None)


class DyingBound(Bound):
    """Dies in its sweep, on the first case alone."""

    def sweep(self) -> tuple[Mapping[str, Scalar], ...]:
        os._exit(9)


class Lap:
    calls = 10
    kernels: int | None = 2

    def __init__(self, plan: DecodePlan, sets: Sequence[DecodeInputs]) -> None:
        self.plan = plan
        self.sets = sets
        self.output = plan.new_output()
        plan.run(sets[0], self.output)

    def sample(self) -> float:
        us = str(self.plan.config["us"])
        if us == "raise":
            raise RuntimeError("launch failed")
        if us == "exit" and self.sets[0].problem.batch == FIRST:
            os.kill(os.getpid(), signal.SIGABRT)
        return 20.0 if us == "exit" else float(us)

    def result(self) -> DecodeOutput | None:
        return self.plan.run(self.sets[-1], self.output)

    def breakdown(self) -> Mapping[str, Any] | None:
        return None


class Timer:
    """Reads each time off the plan."""

    method = "fake"
    cache = "cold"
    min_rounds = 4
    max_rounds = 8
    cap_s = 1.0
    rotates = True
    renews = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def sets(self, problem: DecodeProblem) -> int:
        return 3

    def flush_bytes(self, problem: DecodeProblem) -> int:
        return 0

    def lap(self, plan: DecodePlan, sets: Sequence[DecodeInputs], *, rotations: int | None = None) -> Lap:
        return Lap(plan, sets)

    def displace(self) -> None:
        pass

    def clocks(self) -> Reading | None:
        return Reading(sm_mhz=1980, memory_mhz=3201, temperature_c=40, power_w=500.0, reasons=())


class WarmTimer(Timer):
    """The same in another state of the cache."""

    cache = "warm"


class NoTimer(Timer):
    def __init__(self, device: torch.device) -> None:
        raise RuntimeError("device: expected a better one")


def inputs_bytes(problem: DecodeProblem) -> int:
    """Bytes of one input set: what three of which are the fake timer's working set."""
    element = torch.empty(0, dtype=TORCH_DTYPES[problem.dtype]).element_size()
    return problem.kv_bytes + problem.batch * problem.heads_q * problem.head_dim * element + 4 * (problem.batch + 1)
