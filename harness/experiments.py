"""The experiments of the selftest, in the process that does them; see :mod:`harness.selftest`.

Every function here takes a case and yields trials: what one comparison, or one timer, gave. Shares, verdicts
and rates are worked out when they are reported.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch

from harness.cuda_timers import EventsTimer, GraphTimer, GraphWarmTimer, KernelsTimer
from harness.env import environment
from harness.inputs import input_sets
from harness.rounds import take_rounds
from harness.spin import SpinningRead, cycles_per_us
from harness.study import Case
from harness.timing import Lap, Timer
from impls.catalog import OURS, load
from impls.contract import DecodeInputs, DecodePlan, ImplUnavailable
from impls.problem import DecodeProblem

Trial: TypeAlias = dict[str, Any]

PAIRS = 6
"""Comparisons of a kernel with itself, on each case: with two kernels and 17 cases, 204."""

EFFECTS = (0.01, 0.02, 0.05)
"""By how much a kernel is slowed, as a share of its time."""

TRIALS = 8
"""Trials of each effect on each case."""

TIMED_IMPLS = (*OURS, "flash-attn-2", "flash-attn-3")
"""The implementations on which timers are compared."""

SAMPLES = 11
"""Samples of each of our timers, of which the median is taken."""


def serve(conn: Connection, name: str) -> None:
    """Answer the parent: first the environment, then for each case its trials; text tells why there are none."""
    try:
        if not torch.cuda.is_available():
            raise RuntimeError("device: expected a CUDA device, got none that torch can use")
        device = torch.device("cuda", 0)
        experiment: Callable[[Case, torch.device], Iterator[Trial]] = globals()[name]
        conn.send(environment("cuda"))
    except Exception as error:
        conn.send(f"{type(error).__name__}: {error}")
        return
    while True:
        try:
            case: Case = conn.recv()
        except EOFError:
            return
        try:
            conn.send(list(experiment(case, device)))
        except Exception as error:
            conn.send(f"{type(error).__name__}: {error}")
        torch.cuda.empty_cache()


def identical(case: Case, device: torch.device) -> Iterator[Trial]:
    """Each of our kernels :data:`PAIRS` times against itself, as two names that share rounds with all others."""
    timer = GraphTimer(device)
    sets = input_sets(case.problem, case.seed, device, timer.sets(case.problem))
    for name in OURS:
        impl = load(name)
        plan = partial(impl.plan, case.problem, device)
        samples = _samples(timer, sets, [plan] * (2 * PAIRS))
        for trial in range(PAIRS):
            yield {
                **_head(case, name, "identical"),
                "trial": trial,
                "a": samples[2 * trial],
                "b": samples[2 * trial + 1],
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
    samples = _samples(timer, sets, plans)
    width = 1 + len(EFFECTS)
    for trial in range(TRIALS):
        for place, effect in enumerate(EFFECTS, start=1):
            yield {
                **_head(case, "spinning-read", "sensitivity"),
                "trial": trial,
                "effect": effect,
                "spin_us": spins[effect] / speed,
                "a": samples[width * trial],
                "b": samples[width * trial + place],
            }


def timers(case: Case, device: torch.device) -> Iterator[Trial]:
    """Our timers and those of Triton and TileLang, none of which uses CUPTI, on the same plans and inputs."""
    for name, plan, inputs in _plans(case, device):
        head = _head(case, name, "timers")
        for timer in (GraphTimer(device), GraphWarmTimer(device), EventsTimer(device)):
            yield {**head, "timer": timer.method, "us": _median_us(timer, case, plan, device)}
        call = _call(plan, inputs)
        testing = import_module("triton.testing")
        profiler = import_module("tilelang.profiler")
        others: Mapping[str, Callable[[], float]] = {
            "triton do_bench": partial(testing.do_bench, call, warmup=25, rep=100, return_mode="median"),
            "triton do_bench_cudagraph": partial(testing.do_bench_cudagraph, call, rep=20, return_mode="median"),
            "tilelang do_bench": partial(profiler.do_bench, call, warmup=500, rep=100, return_mode="median"),
        }
        for timer_name, bench in others.items():
            yield {**head, "timer": timer_name, **_milliseconds(bench)}


def profilers(case: Case, device: torch.device) -> Iterator[Trial]:
    """Our profile of kernels and TileLang's, both by CUPTI."""
    for name, plan, inputs in _plans(case, device):
        head = _head(case, name, "timers")
        timer = KernelsTimer(device)
        yield {**head, "timer": timer.method, "us": _median_us(timer, case, plan, device)}
        profiler = import_module("tilelang.profiler")
        bench = partial(profiler.do_bench, _call(plan, inputs), warmup=25, rep=100, backend="cupti")
        yield {**head, "timer": "tilelang do_bench, cupti", **_milliseconds(bench)}


def nvbench(case: Case, device: torch.device) -> Iterator[Trial]:
    """NVIDIA's nvbench: one launch at a time, flushed, behind a kernel that blocks the stream."""
    try:
        bench = import_module("cuda.bench")
        results = import_module("cuda.bench.results")
        library = bench.run_all_benchmarks
    except Exception as error:  # it is built for some versions of CUDA and not for others
        head = _head(case, OURS[0], "timers")
        yield {**head, "timer": "nvbench", "us": None, "reason": f"{type(error).__name__}: {error}"}
        return
    chosen: list[str] = []
    for name, plan, inputs in _plans(case, device):
        call = _call(plan, inputs)

        def run(state: Any, call: Callable[[], object] = call) -> None:
            stream = torch.cuda.ExternalStream(state.get_stream().addressof())  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                state.exec(lambda launch: call(), batched=False)

        bench.register(run).set_name(f"{case.name}.{name}")
        chosen += ["--benchmark", f"{case.name}.{name}"]  # it keeps those of the cases before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.json"
        library(["nvbench", "--devices", "0", "--timeout", "5", "--json", str(path), *chosen])
        found = results.BenchmarkResult.from_json(path)
    for name, result in found.items():
        for state in result:
            seconds = float(state.summaries["nv/cold/time/gpu/mean"].value)
            yield {**_head(case, name.partition(".")[2], "timers"), "timer": "nvbench", "us": seconds * 1e6}


def _head(case: Case, impl: str, experiment: str) -> Trial:
    return {
        "case": case.name,
        "impl": impl,
        "experiment": experiment,
        "problem": case.problem.to_dict(),
        "kv_bytes": case.problem.kv_bytes,
    }


def _samples(
    timer: Timer, sets: Sequence[DecodeInputs], plans: Sequence[Callable[[], DecodePlan]]
) -> list[list[float | None]]:
    """The samples of each plan, by round; a throttled one is None."""

    def lap(plan: Callable[[], DecodePlan]) -> Lap:
        return timer.lap(plan(), sets)

    taken = take_rounds(timer, {who: partial(lap, plan) for who, plan in enumerate(plans)})
    return [[None if s["throttled"] else s["us"] for s in taken.samples[who]] for who in range(len(plans))]


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


def _median_us(timer: Timer, case: Case, plan: DecodePlan, device: torch.device) -> float:
    lap = timer.lap(plan, input_sets(case.problem, case.seed, device, timer.sets(case.problem)))
    return statistics.median(lap.sample() for _ in range(SAMPLES))


def _call(plan: DecodePlan, inputs: DecodeInputs) -> Callable[[], object]:
    output = plan.new_output()
    return lambda: plan.run(inputs, output)


def _milliseconds(bench: Callable[[], float]) -> Trial:
    """What a timer of others says, which is in ms, or why it says nothing."""
    try:
        return {"us": bench() * 1e3}
    except Exception as error:
        return {"us": None, "reason": f"{type(error).__name__}: {error}"[:200]}
