"""Timers: how long one call of a plan takes, and what makes such a time believable.

A timer turns a plan into a *lap*: a thing that can be sampled again and again. The loop takes the samples
in interleaved rounds (A B C, then C B A), so that whatever drifts, drifts for all.

``graph`` (CUDA, cache cold)
    One CUDA graph per plan calls it on one input set after the other, so launch gaps of the host are not
    in the time. A sample is one replay, measured by two CUDA events, divided by its calls. There are as
    many sets as it takes to read at least :data:`COLD_FACTOR` times the L2 of other data between two uses
    of one set, and never fewer than two. Where that would take more than :data:`MAX_SETS` sets, the graph
    uses each set once, and a buffer of that size is read before each sample, outside of it.

``wall`` (CPU, cache uncontrolled)
    Host time of single calls, alternating between two input sets. It shows that the kernels run, and makes
    no claim about speed.
"""

from __future__ import annotations

import ctypes
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch

from impls.contract import DecodeInputs, DecodeOutput, DecodePlan
from impls.problem import DecodeProblem

COLD_FACTOR = 3
"""Other data read between two uses of one input set, as a multiple of the L2."""

MAX_SETS = 64
"""The most input sets that rotate; below about 3 MB of K and V a flush takes over."""

SAMPLE_US = 1000.0
"""What one sample should last, so that the resolution of CUDA events (0.5 µs) does not matter."""

CALL_OVERHEAD_US = 5.0
"""A call's assumed time beside reading its bytes, for choosing how many calls make a sample."""

ASSUMED_GBPS = 4000.0
"""The memory speed assumed for the same choice. Neither constant enters a result."""

QUEUE_AHEAD_CYCLES = 1_000_000
"""A spin of about half a millisecond that the device executes while the host queues a sample."""

CEILING_SLACK = 1.03
"""How much faster than the read ceiling a time may seem before it is called impossible."""


class CaptureFailed(RuntimeError):
    """A plan that cannot be captured in a CUDA graph; the message is what stopped it.

    PyTorch's allocator and random generators do not come back from a broken capture: the process must end.
    """


class Lap(Protocol):
    """One plan, made ready for being timed; warmed up."""

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


class Timer(Protocol):
    """How the loop takes its samples. Constructed with the device."""

    method: str
    """The name of the method in the record; times of different methods are never compared."""

    cache: str
    """The state of the caches at the start of a call: ``cold``, ``uncontrolled``."""

    rounds: int
    """Rounds to take: samples of each plan."""

    min_rounds: int
    """Rounds to take even where that lasts longer than ``cap_s``."""

    cap_s: float
    """Seconds after which no further round is started."""

    def sets(self, problem: DecodeProblem) -> int:
        """How many input sets the loop has to make for this problem."""
        ...

    def flush_bytes(self, problem: DecodeProblem) -> int:
        """Bytes of other data that are touched before each sample; 0 where the rotation suffices."""
        ...

    def lap(self, plan: DecodePlan, sets: Sequence[DecodeInputs], *, rotations: int | None = None) -> Lap:
        """Make a plan ready.

        Args:
            plan: what to time.
            sets: the input sets, all of one problem.
            rotations: how often one sample goes through all sets; None chooses.

        Raises:
            CaptureFailed: if the method needs a CUDA graph of the plan, and there can be none.
            Exception: whatever else the plan raises.
        """
        ...

    def throttled(self) -> bool | None:
        """Whether the device holds its clocks back now; None where nobody can tell."""
        ...


class GraphTimer:
    """CUDA-graph replay over rotated input sets; see the module's docstring.

    Args:
        device: a CUDA device.
    """

    method = "graph"
    cache = "cold"
    rounds = 20
    min_rounds = 20
    cap_s = math.inf

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cold_bytes = COLD_FACTOR * torch.cuda.get_device_properties(device).L2_cache_size
        self._clocks = _ClockReasons(device)
        self._flush = torch.zeros(0, dtype=torch.int32, device=device)

    def sets(self, problem: DecodeProblem) -> int:
        """As many as the cold factor asks for, from 2 to :data:`MAX_SETS`."""
        return min(cold_sets(problem.kv_bytes, self._cold_bytes), MAX_SETS)

    def flush_bytes(self, problem: DecodeProblem) -> int:
        """The cold factor times the L2 where :data:`MAX_SETS` sets are too few, else 0."""
        return self._cold_bytes if cold_sets(problem.kv_bytes, self._cold_bytes) > MAX_SETS else 0

    def lap(self, plan: DecodePlan, sets: Sequence[DecodeInputs], *, rotations: int | None = None) -> Lap:
        """Capture the graph and replay it once, untimed.

        Raises:
            CaptureFailed: if the plan cannot be captured, with what CUDA said.
        """
        problem = sets[0].problem
        flush_bytes = self.flush_bytes(problem)
        if flush_bytes > self._flush.nbytes:
            self._flush = torch.zeros(flush_bytes // 4, dtype=torch.int32, device=self._device)
        if flush_bytes:
            rotations = 1  # a second use of a set in one sample would find it in the cache
        elif rotations is None:
            guess_us = len(sets) * (problem.kv_bytes / (ASSUMED_GBPS * 1e3) + CALL_OVERHEAD_US)
            rotations = max(1, round(SAMPLE_US / guess_us))
        return _GraphLap(plan, sets, rotations, self._flush[: flush_bytes // 4])

    def throttled(self) -> bool | None:
        """Whether NVML names a reason that lowers the clocks now; None where NVML is missing."""
        return self._clocks.throttled()


class _GraphLap:
    def __init__(self, plan: DecodePlan, sets: Sequence[DecodeInputs], rotations: int, flush: torch.Tensor) -> None:
        self.calls = rotations * len(sets)
        self._flush = flush
        self._plan = plan  # it owns the workspaces and tables that the graph reads
        self._output = plan.new_output()

        # Libraries create handles and load modules on first use of a stream: not while it is captured.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            plan.run(sets[0], self._output)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        stopped: Exception | None = None  # leaving a broken capture raises an error of its own, which says less
        try:
            with torch.cuda.graph(self._graph):
                try:
                    for call in range(self.calls):
                        self._last = plan.run(sets[call % len(sets)], self._output)
                except Exception as error:
                    stopped = error
                    raise
        except Exception as error:
            cause = stopped or error
            raise CaptureFailed(f"CUDA graph capture: {type(cause).__name__}: {cause}") from error
        self._graph.instantiate()
        self.kernels = _kernels_per_call(self._graph, self.calls)
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._graph.replay()
        torch.cuda.synchronize()

    def sample(self) -> float:
        if len(self._flush):
            self._flush.amax()  # read, not written: the sample must not pay for writing dirty lines back
        # The device spins while the host queues the sample: it must not wait for the host inside of it.
        torch.cuda._sleep(QUEUE_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        elapsed_ms: float = self._start.elapsed_time(self._end)
        return elapsed_ms * 1e3 / self.calls

    def result(self) -> DecodeOutput:
        _fill_nan(self._last)
        self._graph.replay()
        torch.cuda.synchronize()
        return self._last


class WallTimer:
    """Host time of single calls; see the module's docstring.

    Args:
        device: the CPU.
    """

    method = "wall"
    cache = "uncontrolled"
    rounds = 10
    min_rounds = 3
    cap_s = 1.5

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

    def throttled(self) -> bool | None:
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
            _fill_nan(self._output)
        return self._plan.run(self._sets[-1], self._output)


def cold_sets(kv_bytes: int, cold_bytes: int) -> int:
    """Input sets that must rotate so that ``cold_bytes`` of the others lie between two uses of one; at least 2.

    Args:
        kv_bytes: bytes of K and V of one set. Where it is 0, nothing is read and nothing has to be cold.
        cold_bytes: bytes of other data wanted.
    """
    if kv_bytes == 0:
        return 2
    return max(2, 1 + math.ceil(cold_bytes / kv_bytes))


def judge(samples_us: Sequence[float | None], *, kv_bytes: int, ceiling_gbps: float | None) -> str | None:
    """Why the times of one plan cannot be true, or None.

    Every sample must be finite and above zero. Their median must not be under the time that reading
    ``kv_bytes`` takes at :data:`CEILING_SLACK` times the read ceiling.

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


def _fill_nan(output: DecodeOutput) -> None:
    output.out.fill_(math.nan)
    if output.lse is not None:
        output.lse.fill_(math.nan)


def _kernels_per_call(graph: torch.cuda.CUDAGraph, calls: int) -> int | None:
    """Kernel nodes of a captured graph per call, from the CUDA driver; None where it does not divide.

    PyTorch hands out the graph, and has no call that counts its nodes.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    if driver.cuGraphGetNodes(handle, None, ctypes.byref(count)):
        return None
    nodes = (ctypes.c_void_p * count.value)()
    if driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)):
        return None
    kind = ctypes.c_int()
    kernels = 0
    for node in nodes:
        if driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)):
            return None
        kernels += kind.value == 0  # CU_GRAPH_NODE_TYPE_KERNEL
    return kernels // calls if kernels % calls == 0 else None


class _ClockReasons:
    """NVML's reasons for lowered clocks, asked of the device that CUDA uses."""

    def __init__(self, device: torch.device) -> None:
        self._nvml = None
        with suppress(Exception):  # no library, no driver, no permission: then nobody can tell
            import pynvml

            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._slow = (
                pynvml.nvmlClocksEventReasonSwPowerCap
                | pynvml.nvmlClocksEventReasonHwSlowdown
                | pynvml.nvmlClocksEventReasonSwThermalSlowdown
                | pynvml.nvmlClocksEventReasonHwThermalSlowdown
                | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
            )
            self._nvml = pynvml

    def throttled(self) -> bool | None:
        if self._nvml is None:
            return None
        try:
            reasons = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
        except self._nvml.NVMLError:
            return None
        return bool(reasons & self._slow)
