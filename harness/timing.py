"""Timers: how long one call of a plan takes, and what makes such a time believable.

A timer turns a plan into a *lap*: a thing that can be sampled. The samples are taken in shared rounds
(:mod:`harness.rounds`), so that whatever drifts, drifts for all. The timers of a GPU are in
:mod:`harness.cuda_timers`; the one of a CPU is here:

``wall`` (cache uncontrolled)
    Host time of single calls, alternating between two input sets. It shows that the kernels run, and makes
    no claim about speed.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from harness.clocks import Reading
from harness.cost import CEILING_SLACK
from impls.contract import DecodeInputs, DecodeOutput, DecodePlan
from impls.problem import DecodeProblem


class CaptureFailed(RuntimeError):
    """A plan that cannot be captured in a CUDA graph; the message is what stopped it.

    PyTorch's allocator and random generators do not come back from a broken capture: the process must end.
    """


class NotTheWork(RuntimeError):
    """A plan whose timed calls do not all do what was checked; the message says which."""


class Lap(Protocol):
    """One plan, made ready for being timed."""

    calls: int
    """Calls of ``plan.run`` in one sample."""

    kernels: int | None
    """Kernels that one call launches; None where that is not known."""

    def sample(self) -> float:
        """Microseconds per call; whatever the clock gave, not yet judged."""
        ...

    def result(self) -> DecodeOutput | None:
        """What the timed calls leave for the last input set, computed once more into NaN-filled memory."""
        ...

    def breakdown(self) -> Mapping[str, Any] | None:
        """Where the time of a call goes: see :func:`harness.breakdown.summarize`; None where that is not known."""
        ...


class Timer(Protocol):
    """How the loop takes its samples. Constructed with the device."""

    method: str
    """The name of the method in the record; times of different methods are never compared."""

    cache: str
    """The state of the caches at the start of a call: ``cold``, ``warm``, ``flushed`` or ``uncontrolled``."""

    min_rounds: int
    """Rounds to take in any case."""

    max_rounds: int
    """Rounds to take where the intervals stay wide."""

    cap_s: float
    """Seconds after which no further round beyond ``min_rounds`` is started."""

    rotates: bool
    """Whether calls take the input sets in turn; else each takes the last, which no check before it has seen."""

    renews: bool
    """Whether every round has new plans and laps, elsewhere in memory.

    Where outputs and workspaces happen to lie changes a kernel's time by up to some tenths of a per cent. That is
    no property of the kernel, so it should be part of the noise rather than of the difference between two.
    """

    def sets(self, problem: DecodeProblem) -> int:
        """How many input sets the loop has to make for this problem."""
        ...

    def flush_bytes(self, problem: DecodeProblem) -> int:
        """Bytes of other data that are touched before a sample or call; 0 where the rotation suffices."""
        ...

    def lap(self, plan: DecodePlan, sets: Sequence[DecodeInputs], *, rotations: int | None = None) -> Lap:
        """Make a plan ready.

        Args:
            plan: what to time.
            sets: the input sets, all of one problem.
            rotations: how often one sample goes through all sets; None chooses.

        Raises:
            CaptureFailed: if the method needs a CUDA graph of the plan, and there can be none.
            NotTheWork: if some of the calls would not launch what the others do.
            Exception: whatever else the plan raises.
        """
        ...

    def displace(self) -> None:
        """Take memory of a random size, so that what is allocated next lies elsewhere."""
        ...

    def clocks(self) -> Reading | None:
        """What the device's clocks do now; None where nobody can tell."""
        ...


class WallTimer:
    """Host time of single calls; see the module's docstring.

    Args:
        device: the CPU.
    """

    method = "wall"
    cache = "uncontrolled"
    min_rounds = 3
    max_rounds = 10
    cap_s = 1.5
    rotates = True
    renews = False

    def __init__(self, device: torch.device) -> None:
        del device  # there is only one

    def sets(self, problem: DecodeProblem) -> int:
        """Two."""
        del problem
        return 2

    def flush_bytes(self, problem: DecodeProblem) -> int:
        """None."""
        del problem
        return 0

    def lap(self, plan: DecodePlan, sets: Sequence[DecodeInputs], *, rotations: int | None = None) -> Lap:
        """Nothing to prepare: the check has run the plan already."""
        del rotations
        return _WallLap(plan, sets)

    def displace(self) -> None:
        """Nothing: plans are not made anew."""

    def clocks(self) -> Reading | None:
        """Nobody can tell."""
        return None


class _WallLap:
    calls = 1
    kernels: int | None = None

    def __init__(self, plan: DecodePlan, sets: Sequence[DecodeInputs]) -> None:
        self._plan = plan
        self._sets = sets
        self._output = plan.new_output()
        self._taken = 0

    def sample(self) -> float:
        inputs = self._sets[self._taken % len(self._sets)]
        self._taken += 1
        start = time.perf_counter()
        self._plan.run(inputs, self._output)
        return (time.perf_counter() - start) * 1e6

    def result(self) -> DecodeOutput:
        if self._output is not None:
            fill_nan(self._output)
        return self._plan.run(self._sets[-1], self._output)

    def breakdown(self) -> None:
        return None


def timed_sets(timer: Timer, sets: Sequence[DecodeInputs]) -> Sequence[DecodeInputs]:
    """Of the input sets of a case those that the timed calls take."""
    return sets if timer.rotates else sets[-1:]


def conditions(timer: Timer, lap: Lap, sets: Sequence[DecodeInputs]) -> dict[str, Any]:
    """What a record's ``timing`` says of all samples of a lap: everything but them and what was found beside them.

    Args:
        timer: that made the lap.
        lap: of one plan.
        sets: of :func:`timed_sets`.
    """
    tensors = (t for inputs in sets for t in (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_k))
    return {
        "method": timer.method,
        "cache": timer.cache,
        "working_set_bytes": sum(t.nbytes for t in tensors) + timer.flush_bytes(sets[0].problem),
        "input_sets": len(sets),
        "calls_per_sample": lap.calls,
        "kernels": lap.kernels,
    }


def judge(samples_us: Sequence[float | None], *, kv_bytes: int, ceiling_gbps: float | None) -> str | None:
    """Why the times of one plan cannot be true, or None.

    Every sample must be finite and above zero. Their median must not be under the time that reading
    ``kv_bytes`` takes at :data:`harness.cost.CEILING_SLACK` times the read ceiling.

    Args:
        samples_us: µs per call; None stands for a time that is not finite.
        kv_bytes: bytes of K and V that a call has to read.
        ceiling_gbps: the device's read ceiling in GB/s (1e9 bytes); None leaves the second rule out.
    """
    times = [math.nan if us is None else us for us in samples_us]
    for i, us in enumerate(times):
        if not (math.isfinite(us) and us > 0):
            return f"samples[{i}]: expected a finite time > 0, got {us:g} µs"
    if ceiling_gbps is None:
        return None
    least_us = kv_bytes / (CEILING_SLACK * ceiling_gbps * 1e3)
    if (median_us := statistics.median(times)) < least_us:
        return (
            f"faster than memory: expected at least {least_us:.3g} µs for {kv_bytes} bytes of K and V at "
            f"{CEILING_SLACK:g} x {ceiling_gbps:.0f} GB/s, got a median of {median_us:.3g} µs"
        )
    return None


def fill_nan(output: DecodeOutput) -> None:
    """Fill an output with what no right result holds."""
    output.out.fill_(math.nan)
    if output.lse is not None:
        output.lse.fill_(math.nan)
