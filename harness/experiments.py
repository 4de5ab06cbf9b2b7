"""The experiments of the selftest, in the process that does them; see :mod:`harness.selftest`.

Every function here takes a case and yields trials: what one comparison, or one timer, gave. Shares, verdicts
and rates are worked out when they are reported.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from harness.check import check_plan
from harness.cuda_timers import EVENTS_STATISTIC, EventsTimer, GraphTimer, GraphWarmTimer, KernelsTimer
from harness.env import environment
from harness.inputs import input_sets
from harness.planning import planning
from harness.spin import SpinningRead, cycles_per_us
from harness.study import Case
from harness.trials import REASON_CHARS, SAMPLES, Trial, call_of, head, median_us, sample_together, samples_of
from impls.catalog import OURS, load
from impls.contract import DecodeInputs, DecodePlan, ImplUnavailable
from impls.problem import DecodeProblem
from impls.reference import reference

PAIRS = 12
"""Comparisons of a kernel with itself, on each case: with two kernels and nine cases, 216."""

EFFECTS = (0.005, 0.01, 0.02, 0.05)
"""By how much a kernel is slowed, as a share of its time."""

TRIALS = 8
"""Trials of each effect on each case."""

PROFILES = 5
"""Profiles of each kernel: each is of all calls of a replay."""

TIMED_IMPLS = (*OURS, "flash-attn-2", "flash-attn-3")
"""The implementations on which timers are compared."""


def serve(conn: Connection) -> None:
    """Answer the parent: first the environment, then for each experiment and case its trials; text says why not."""
    try:
        if not torch.cuda.is_available():
            raise RuntimeError("device: expected a CUDA device, got none that torch can use")
        device = torch.device("cuda", 0)
        conn.send(environment("cuda"))
    except Exception as error:
        conn.send(f"{type(error).__name__}: {error}")
        return
    while True:
        name: str
        case: Case
        try:
            name, case = conn.recv()
        except EOFError:
            return
        try:
            conn.send(list(EXPERIMENTS[name](case, device)))
        except Exception as error:
            conn.send(f"{type(error).__name__}: {error}")
        torch.cuda.empty_cache()


def identical(case: Case, device: torch.device) -> Iterator[Trial]:
    """Each of our kernels :data:`PAIRS` times against itself, as two names that share rounds with all others."""
    timer = GraphTimer(device)
    sets = input_sets(case.problem, case.seed, device, timer.sets(case.problem))
    for name in OURS:
        plan = partial(load(name).plan, case.problem, device)
        taken = sample_together(timer, sets, [plan] * (2 * PAIRS))
        for trial in range(PAIRS):
            yield {
                **head(case, name, "identical"),
                "trial": trial,
                "a": taken[2 * trial].us,
                "b": taken[2 * trial + 1].us,
            }


def sensitivity(case: Case, device: torch.device) -> Iterator[Trial]:
    """A kernel against itself with a spin inside that takes a known share of its time."""
    timer = GraphTimer(device)
    problem = case.problem
    if not problem.kv_bytes:
        return
    sets = input_sets(problem, case.seed, device, timer.sets(problem))
    lap = timer.lap(SpinningRead(problem, device, 0), sets)
    us = statistics.median(lap.sample() for _ in range(SAMPLES))
    speed = cycles_per_us(device)
    spins = {effect: round(effect * us * speed) for effect in EFFECTS}
    plans: list[Callable[[], DecodePlan]] = []
    for _ in range(TRIALS):
        plans += (partial(SpinningRead, problem, device, cycles) for cycles in (0, *spins.values()))
    taken = sample_together(timer, sets, plans)
    width = 1 + len(EFFECTS)
    for trial in range(TRIALS):
        for place, effect in enumerate(EFFECTS, start=1):
            yield {
                **head(case, "spinning-read", "sensitivity"),
                "trial": trial,
                "effect": effect,
                "spin_us": spins[effect] / speed,
                "a": taken[width * trial].us,
                "b": taken[width * trial + place].us,
            }


def timers(case: Case, device: torch.device) -> Iterator[Trial]:
    """Our timers and those of Triton and TileLang, none of which uses CUPTI, on the same plans and inputs."""
    testing = import_module("triton.testing")
    profiler = import_module("tilelang.profiler")
    for name, plan, inputs in _plans(case, device):
        top = head(case, name, "timers")
        for timer in (GraphTimer(device), GraphWarmTimer(device), EventsTimer(device)):
            of_calls = {"of_calls": EVENTS_STATISTIC} if timer.method == "events" else {}
            yield {**top, "timer": timer.method, "us": median_us(timer, case, plan, device), **of_calls}
        call = call_of(plan, inputs)
        others: Mapping[str, Callable[[], float]] = {
            "triton do_bench": partial(testing.do_bench, call, warmup=25, rep=100, return_mode="median"),
            "triton do_bench_cudagraph": partial(testing.do_bench_cudagraph, call, rep=20, return_mode="median"),
            "tilelang do_bench": partial(profiler.do_bench, call, warmup=25, rep=100, return_mode="median"),
        }
        for timer_name, bench in others.items():
            yield {**top, "timer": timer_name, **_milliseconds(bench)}


def example(case: Case, device: torch.device) -> Iterator[Trial]:
    """Our kernels on the shape of TileLang's GQA decode example, by its protocol and by ``events``.

    The protocol is that of TileLang's ``examples/flash_decoding/example_gqa_decode.py``: ``do_bench(warmup=500)``,
    which writes 256 MB before each call and gives the mean. Only what is right is timed.
    """
    profiler = import_module("tilelang.profiler")
    inputs = input_sets(case.problem, case.seed, device, 1)[0]
    ref = reference(inputs)
    for name in OURS:
        top = head(case, name, "example")
        plan = load(name).plan(case.problem, device)
        if not (result := check_plan(plan, inputs, ref)).ok:
            yield {**top, "timer": None, "us": None, "reason": f"wrong: {result.reason}"[:REASON_CHARS]}
            continue
        events = EventsTimer(device)
        samples = samples_of(events, case, plan, device, events.max_rounds)
        top["config"] = dict(plan.config)
        us = {"us": statistics.fmean(samples), "samples": samples, "of_calls": EVENTS_STATISTIC}
        yield {**top, "timer": events.method, **us}
        bench = partial(profiler.do_bench, call_of(plan, inputs), warmup=500)
        yield {**top, "timer": "tilelang do_bench(warmup=500)", **_milliseconds(bench)}


def profilers(case: Case, device: torch.device) -> Iterator[Trial]:
    """Our profile of kernels and TileLang's, both by CUPTI; and ours with the gaps: what ``graph`` times."""
    profiler = import_module("tilelang.profiler")
    for name, plan, inputs in _plans(case, device):
        top = head(case, name, "timers")
        timer = KernelsTimer(device)
        lap = timer.lap(plan, input_sets(case.problem, case.seed, device, timer.sets(case.problem)))
        yield {**top, "timer": timer.method, "us": statistics.median(lap.sample() for _ in range(PROFILES))}
        parts = lap.breakdown()
        assert parts is not None  # of this timer there is one
        yield {**top, "timer": "kernels and gaps", "us": parts["traced_us"], "untraced_us": parts["total_us"]}
        bench = partial(profiler.do_bench, call_of(plan, inputs), warmup=25, rep=100, backend="cupti")
        yield {**top, "timer": "tilelang do_bench, cupti", **_milliseconds(bench)}


def nvbench(case: Case, device: torch.device) -> Iterator[Trial]:
    """NVIDIA's nvbench: one launch at a time, flushed, behind a kernel that blocks the stream."""
    try:
        bench = import_module("cuda.bench")
        results = import_module("cuda.bench.results")
        library = bench.run_all_benchmarks
    except Exception as error:  # it is built for some versions of CUDA and not for others
        top = head(case, OURS[0], "timers")
        yield {**top, "timer": "nvbench", "us": None, "reason": f"{type(error).__name__}: {error}"}
        return
    chosen: list[str] = []
    for name, plan, inputs in _plans(case, device):
        call = call_of(plan, inputs)
        call()  # compiles and loads what it launches: not behind a kernel that blocks the stream
        torch.cuda.synchronize()

        def run(state: Any, call: Callable[[], object] = call) -> None:
            stream = torch.cuda.ExternalStream(state.get_stream().addressof())  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                state.exec(lambda launch: call(), batched=False)

        bench.register(run).set_name(f"{case.name}.{name}")
        chosen += ["--benchmark", f"{case.name}.{name}"]  # it keeps those of the cases before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        library(["nvbench", "--devices", "0", "--timeout", "3", "--json", str(path), *chosen])
        found = results.BenchmarkResult.from_json(path)
    for name, result in found.items():
        for state in result:
            seconds = float(state.summaries["nv/cold/time/gpu/mean"].value)
            yield {**head(case, name.partition(".")[2], "timers"), "timer": "nvbench", "us": seconds * 1e6}


def _plans(case: Case, device: torch.device) -> Iterator[tuple[str, DecodePlan, DecodeInputs]]:
    """What can be planned of :data:`TIMED_IMPLS`, and inputs for it."""
    problem: DecodeProblem = case.problem
    inputs = input_sets(problem, case.seed, device, 1)[0]
    for name in TIMED_IMPLS:
        try:
            impl = load(name)
        except ImplUnavailable:
            continue
        if impl.unsupported(problem, device) is None:
            yield name, impl.plan(problem, device), inputs


def _milliseconds(bench: Callable[[], float]) -> Trial:
    """What a timer of others says, which is in ms, or why it says nothing."""
    try:
        return {"us": bench() * 1e3}
    except Exception as error:
        return {"us": None, "reason": f"{type(error).__name__}: {error}"[:REASON_CHARS]}


EXPERIMENTS: Mapping[str, Callable[[Case, torch.device], Iterator[Trial]]] = {
    "identical": identical,
    "sensitivity": sensitivity,
    "timers": timers,
    "planning": planning,
    "example": example,
    "profilers": profilers,
    "nvbench": nvbench,
}
"""Those that run here; the liars go through the loop, which has a process of its own."""
