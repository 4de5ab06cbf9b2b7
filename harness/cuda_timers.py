"""The timers of a CUDA device; see :mod:`harness.timing` for what a timer is.

``graph`` (cache cold; the default)
    One CUDA graph per plan calls it on one input set after the other, so launch gaps of the host are not
    in the time. A sample is one replay, measured by two CUDA events, divided by its calls. There are as
    many sets as it takes to read at least :data:`COLD_FACTOR` times the L2 of other data between two uses
    of one set, and never fewer than two. Where that would take more than :data:`MAX_SETS` sets, the graph
    uses each set once, and a buffer of that size is read before each sample, outside of it. Before each timed
    replay comes an untimed one of the same graph, so that what ran before is the same for all.

``graph-warm`` (cache warm)
    The same on a single input set: whatever of it fits the L2 is there.

``events`` (cache flushed)
    The protocol of the official examples and of ``do_bench``: one launch at a time between two CUDA events,
    :data:`FLUSH_BYTES` written before each, outside of it; 25 ms of warm-up, 100 ms measured. The events are
    made before the first launch, and a sample is the median of its calls. A launch that the host cannot queue
    in time counts.

``kernels`` (cache cold)
    The graph of ``graph`` under CUPTI, through torch's profiler: the time in which at least one kernel of a
    call runs. The profile of each kernel, and the gaps, go into the record beside it.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from harness.breakdown import Activity, busy_us, split_calls, summarize
from harness.clocks import Clocks, Reading
from harness.timing import CaptureFailed, Lap, NotTheWork, fill_nan
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

FLUSH_BYTES = 256 * 2**20
"""What ``events`` writes before each call, as the official examples do."""

WARM_UP_MS, MEASURED_MS = 25.0, 100.0
"""How long ``events`` runs a plan untimed, and timed, over all rounds."""

EVENTS_STATISTIC = "median"
"""What a sample of ``events`` is of its calls."""

DISPLACED_BYTES = (512 * 2**10, 8 * 2**20)
"""The most that :meth:`GraphTimer.displace` takes from the allocator's small blocks and from its large ones."""


class GraphTimer:
    """CUDA-graph replay over rotated input sets; see the module's docstring.

    Args:
        device: a CUDA device.
    """

    method = "graph"
    cache = "cold"
    min_rounds = 20
    max_rounds = 320
    cap_s = 4.0
    rotates = True
    renews = True

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self._device = device
        self._cold_bytes = COLD_FACTOR * properties.L2_cache_size
        self._clocks = Clocks(str(properties.uuid))
        self._flush = torch.zeros(0, dtype=torch.int32, device=device)
        self._random = random.Random(0)
        self._taken: list[torch.Tensor] = []

    def sets(self, problem: DecodeProblem) -> int:
        """As many as the cold factor asks for, from 2 to :data:`MAX_SETS`."""
        return min(cold_sets(problem.kv_bytes, self._cold_bytes), MAX_SETS)

    def flush_bytes(self, problem: DecodeProblem) -> int:
        """The cold factor times the L2 where :data:`MAX_SETS` sets are too few, else 0."""
        return self._cold_bytes if cold_sets(problem.kv_bytes, self._cold_bytes) > MAX_SETS else 0

    def lap(self, plan: DecodePlan, sets: Sequence[DecodeInputs], *, rotations: int | None = None) -> Lap:
        """Capture the graph.

        Raises:
            CaptureFailed: if the plan cannot be captured, with what CUDA said.
            NotTheWork: if its calls launch different numbers of kernels, or none.
        """
        return GraphLap(plan, sets, *self._rotations(sets, rotations))

    def displace(self) -> None:
        """Take memory of a random size, in place of what was taken before."""
        self._taken = [
            torch.empty(self._random.randrange(most // 512) * 512, dtype=torch.uint8, device=self._device)
            for most in DISPLACED_BYTES
        ]

    def clocks(self) -> Reading | None:
        """What NVML says now; None where it is missing."""
        return self._clocks.read()

    def _rotations(self, sets: Sequence[DecodeInputs], rotations: int | None) -> tuple[int, torch.Tensor]:
        """How often a sample goes through all sets, and what it reads before."""
        problem = sets[0].problem
        flush_bytes = self.flush_bytes(problem)
        if flush_bytes > self._flush.nbytes:
            self._flush = torch.zeros(flush_bytes // 4, dtype=torch.int32, device=self._device)
        if flush_bytes:
            rotations = 1  # a second use of a set in one sample would find it in the cache
        elif rotations is None:
            guess_us = len(sets) * (problem.kv_bytes / (ASSUMED_GBPS * 1e3) + CALL_OVERHEAD_US)
            rotations = max(1, round(SAMPLE_US / guess_us))
        return rotations, self._flush[: flush_bytes // 4]


class GraphLap:
    """A captured plan.

    Args:
        plan: what is timed.
        sets: the input sets that the calls take in turn.
        rotations: how often one replay goes through them.
        flush: read before each sample; may be empty.

    Raises:
        CaptureFailed: if the plan cannot be captured, with what CUDA said.
        NotTheWork: if its calls launch different numbers of kernels, or none.
    """

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
        nodes = [0]
        stopped: Exception | None = None  # leaving a broken capture raises an error of its own, which says less
        try:
            with torch.cuda.graph(self._graph):
                try:
                    for call in range(self.calls):
                        self._last = plan.run(sets[call % len(sets)], self._output)
                        nodes.append(_nodes_captured())
                except Exception as error:
                    stopped = error
                    raise
        except Exception as error:
            cause = stopped or error
            raise CaptureFailed(f"CUDA graph capture: {type(cause).__name__}: {cause}") from error
        launched = [after - before for before, after in pairwise(nodes)]
        if not launched[0] and sets[0].problem.batch:
            raise NotTheWork("call 0: expected at least one launch on the stream of the caller, got none")
        for call, count in enumerate(launched):
            if count != launched[0]:
                raise NotTheWork(f"call {call}: expected {launched[0]} launches like call 0, got {count}")
        self._graph.instantiate()
        self.kernels: int | None = _kernels(self._graph) // self.calls
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def sample(self) -> float:
        """Replay twice and time the second."""
        # The device spins while the host queues the sample: it must not wait for the host inside of it.
        torch.cuda._sleep(QUEUE_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        self._graph.replay()
        if len(self._flush):
            self._flush.amax()  # read, not written: the sample must not pay for writing dirty lines back
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        elapsed_ms: float = self._start.elapsed_time(self._end)
        return elapsed_ms * 1e3 / self.calls

    def result(self) -> DecodeOutput:
        """The output of the replay's last call."""
        fill_nan(self._last)
        self._graph.replay()
        torch.cuda.synchronize()
        return self._last

    def breakdown(self) -> Mapping[str, Any] | None:
        """Not known."""
        return None


class GraphWarmTimer(GraphTimer):
    """CUDA-graph replay on one input set; see the module's docstring.

    Args:
        device: a CUDA device.
    """

    method = "graph-warm"
    cache = "warm"
    rotates = False

    def sets(self, problem: DecodeProblem) -> int:
        """One to check before the timing, and one to time."""
        del problem
        return 2

    def flush_bytes(self, problem: DecodeProblem) -> int:
        """None."""
        del problem
        return 0


class EventsTimer(GraphTimer):
    """One launch at a time between two CUDA events; see the module's docstring.

    Args:
        device: a CUDA device.
    """

    method = "events"
    cache = "flushed"
    max_rounds = GraphTimer.min_rounds
    rotates = False
    renews = False

    def sets(self, problem: DecodeProblem) -> int:
        """One to check before the timing, and one to time."""
        del problem
        return 2

    def flush_bytes(self, problem: DecodeProblem) -> int:
        """:data:`FLUSH_BYTES`, whatever the problem."""
        del problem
        return FLUSH_BYTES

    def lap(self, plan: DecodePlan, sets: Sequence[DecodeInputs], *, rotations: int | None = None) -> Lap:
        """Warm up; with ``rotations``, the calls of a sample, there is none."""
        if not len(self._flush):
            self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=self._device)
        return EventsLap(plan, sets[-1], self._flush, self.max_rounds, rotations)


class EventsLap:
    """A plan that is launched call by call.

    Args:
        plan: what is timed.
        inputs: of every call.
        flush: written before each.
        rounds: samples that share :data:`MEASURED_MS`.
        calls: of one sample, without a warm-up; None warms up and lets :data:`MEASURED_MS` decide.
    """

    kernels: int | None = None

    def __init__(
        self, plan: DecodePlan, inputs: DecodeInputs, flush: torch.Tensor, rounds: int, calls: int | None
    ) -> None:
        self._plan = plan
        self._inputs = inputs
        self._flush = flush
        self._output = plan.new_output()
        self._last = plan.run(inputs, self._output)
        if calls is None:
            guess_ms = max(1e-3, self._launch(5))
            for _ in range(max(1, int(WARM_UP_MS / guess_ms))):
                plan.run(inputs, self._output)
            calls = max(1, math.ceil(MEASURED_MS / guess_ms / rounds))
        self.calls = calls

    def sample(self) -> float:
        """The median of its calls, as in ``do_bench``: the first waits for a host that is not ahead yet."""
        return self._launch(self.calls) * 1e3

    def result(self) -> DecodeOutput:
        """The output of one more call."""
        # The NaN come late: work on a stream that does not wait for this one is done before them, and lost.
        torch.cuda._sleep(QUEUE_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        fill_nan(self._last)
        self._last = self._plan.run(self._inputs, self._output)
        torch.cuda.synchronize()
        return self._last

    def breakdown(self) -> Mapping[str, Any] | None:
        """Not known."""
        return None

    def _launch(self, calls: int) -> float:
        """Milliseconds of a call, the median of that many; flushes do not count."""
        starts, ends = (
            [torch.cuda.Event(enable_timing=True) for _ in range(calls)]  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        for start, end in zip(starts, ends, strict=True):
            self._flush.zero_()
            start.record()
            self._last = self._plan.run(self._inputs, self._output)
            end.record()
        torch.cuda.synchronize()
        milliseconds: list[float] = [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]
        return statistics.median(milliseconds)


class KernelsTimer(GraphTimer):
    """CUPTI's time of each kernel of a replay; see the module's docstring.

    Args:
        device: a CUDA device.
    """

    method = "kernels"
    min_rounds = 10
    max_rounds = 10
    renews = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # CUPTI does not survive being torn down and brought up again beside CUDA graphs (torch.profiler says so
        # where it sets the same for its own graphs).
        os.environ.update(DISABLE_CUPTI_LAZY_REINIT="1", TEARDOWN_CUPTI="0")

    def lap(self, plan: DecodePlan, sets: Sequence[DecodeInputs], *, rotations: int | None = None) -> Lap:
        """Capture the graph and time it untraced.

        Raises:
            CaptureFailed: if the plan cannot be captured, with what CUDA said.
            NotTheWork: if its calls launch different numbers of kernels, or none.
        """
        return KernelsLap(plan, sets, *self._rotations(sets, rotations))


class KernelsLap(GraphLap):
    """A captured plan that is profiled; the arguments are those of :class:`GraphLap`."""

    def __init__(self, plan: DecodePlan, sets: Sequence[DecodeInputs], rotations: int, flush: torch.Tensor) -> None:
        super().__init__(plan, sets, rotations, flush)
        self._untraced_us = statistics.median(super(KernelsLap, self).sample() for _ in range(9))
        self._traced: list[list[Activity]] = []

    def sample(self) -> float:
        """Replay once untraced and once traced.

        Raises:
            ValueError: if the profiler did not see every call.
        """
        self._graph.replay()
        if len(self._flush):
            self._flush.amax()
        torch.cuda.synchronize()
        calls = split_calls(trace(self._graph.replay), self.calls)
        self._traced += calls
        return math.fsum(map(busy_us, calls)) / self.calls

    def breakdown(self) -> Mapping[str, Any]:
        """The medians over all traced calls."""
        return summarize(self._traced, self._untraced_us)


def trace(launch: Callable[[], object]) -> list[Activity]:
    """All that runs on the device until what ``launch`` queued is done."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        launch()
        torch.cuda.synchronize()
    return [
        Activity(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]


def host_times(plan: DecodePlan, sets: Sequence[DecodeInputs], calls: int = 20) -> dict[str, float]:
    """What a caller of ``plan.run`` waits, one call at a time on an idle device; medians in µs.

    Returns:
        ``launch_us`` until the call returns, ``end_to_end_us`` until the device is done too.
    """
    output = plan.new_output()
    launch, end_to_end = [], []
    for call in range(calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        plan.run(sets[call % len(sets)], output)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        launch.append(launched - start)
        end_to_end.append(time.perf_counter() - start)
    return {"launch_us": statistics.median(launch) * 1e6, "end_to_end_us": statistics.median(end_to_end) * 1e6}


def cold_sets(kv_bytes: int, cold_bytes: int) -> int:
    """Input sets that must rotate so that ``cold_bytes`` of the others lie between two uses of one; at least 2.

    Args:
        kv_bytes: bytes of K and V of one set. Where it is 0, nothing is read and nothing has to be cold.
        cold_bytes: bytes of other data wanted.
    """
    if kv_bytes == 0:
        return 2
    return max(2, 1 + math.ceil(cold_bytes / kv_bytes))


# PyTorch captures graphs and hands them out, and has no call that looks into them. The driver has.


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _nodes_captured() -> int:
    """Nodes of the graph that the current stream is capturing into, so far.

    Raises:
        RuntimeError: if the driver does not say.
    """
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status, graph, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
    unused = None
    _expect_success(
        _driver().cuStreamGetCaptureInfo_v2(
            stream, ctypes.byref(status), unused, ctypes.byref(graph), unused, unused
        )
    )
    _expect_success(_driver().cuGraphGetNodes(graph, None, ctypes.byref(count)))
    return count.value


def _kernels(graph: torch.cuda.CUDAGraph) -> int:
    """Kernel nodes of a captured graph.

    Raises:
        RuntimeError: if the driver does not say.
    """
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    _expect_success(_driver().cuGraphGetNodes(handle, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _expect_success(_driver().cuGraphGetNodes(handle, nodes, ctypes.byref(count)))
    kind = ctypes.c_int()
    kernels = 0
    for node in nodes:
        _expect_success(_driver().cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        kernels += kind.value == 0  # CU_GRAPH_NODE_TYPE_KERNEL
    return kernels


def _expect_success(result: int) -> None:
    if result:
        raise RuntimeError(f"CUDA driver: expected CUDA_SUCCESS, got error {result}")
