"""What the worker does: plan, run, check and time, one case at a time.

Every step is announced before it begins, and a failing implementation costs its own row alone. The one
exception is a device that no longer answers: then the worker ends, and its parent starts another.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from harness.check import check_plan, compare
from harness.clocks import to_record
from harness.cuda_timers import host_times
from harness.env import default_device, environment
from harness.examine import Examiner
from harness.inputs import input_sets
from harness.rounds import take_rounds
from harness.screen import Screener
from harness.steps import Steps
from harness.study import Entry
from harness.timing import CaptureFailed, Lap, NotTheWork, Timer, conditions, judge, timed_sets
from harness.worker import (
    BOUND,
    BOUNDS,
    METHODS,
    Ceiling,
    Compile,
    Examine,
    Fatal,
    Load,
    Loaded,
    Measure,
    Propose,
    Ready,
    Row,
    Screen,
    Setup,
    Step,
    Task,
    default_method,
)
from impls.contract import DecodeImpl, DecodeInputs, DecodePlan, ImplUnavailable, PlanRefused, Scalar
from impls.problem import DecodeProblem
from impls.reference import Reference, reference

REPLANS = 5
"""Plans for other lengths whose median time is ``plan_us``."""

WHOLE_PAGES = 256
"""Keys by which lengths may differ and still be whole pages, whatever an implementation's page size."""

SWEEP_ROUNDS = 3
"""Samples of each configuration of the bound, of which the fastest by median is kept."""

MEMORY_SHARE = 0.9
"""The share of the free device memory that the input sets of a case may take."""

REASON_CHARS = 500
"""Where the text of a reason is cut: some libraries put their whole source into an exception."""


class Refused(Exception):
    """A case that is not run at all; the message is the reason of all its rows."""


class DeviceLost(Exception):
    """The device is of no more use to this process; the message is the reason of whoever did it."""


@dataclass
class Candidate:
    """An entry on its way to its row: planned and checked, waiting for its times."""

    row: Row
    plan: DecodePlan | None
    replan: Callable[[], DecodePlan]


class Bench:
    """One worker's state: its device, its timer, and the implementations it has loaded.

    Args:
        setup: what to work with.
        send: takes each message to the parent.

    Raises:
        RuntimeError: if CUDA was asked for and is not there.
    """

    def __init__(self, setup: Setup, send: Callable[[object], None]) -> None:
        kind = setup.device or default_device()
        if kind == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("device: expected a CUDA device, got none that torch can use")
        self._device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
        self._catalog = setup.catalog
        self._send = send
        self._timer: Timer = _make(setup.timer or _timer_of(kind, setup.method), self._device)
        bound = setup.bound or BOUNDS.get(kind)
        self._bound = _make(bound) if bound else None
        self._impls: dict[str, DecodeImpl] = {}
        self._who: int | None = None
        self._what = "start"
        steps = Steps(device=self._device, load=self._load, at=self._at, attempt=self._attempt, send=self._send)
        self._examiner = Examiner(steps)
        self._screener = Screener(steps, self._timer, self._make_sets)
        self.ready = Ready(
            device=kind,
            env=environment(kind),
            has_bound=self._bound is not None,
            method=self._timer.method,
            cache=self._timer.cache,
            memory_bytes=torch.cuda.mem_get_info(self._device)[1] if kind == "cuda" else None,
        )

    def perform(self, task: Task) -> bool:
        """Do one task and send what comes of it; False if this process must not go on."""
        try:
            if isinstance(task, Load):
                self._send(Loaded(self._try_load(task.impl)))
            elif isinstance(task, Ceiling):
                self._measure_ceiling()
            elif isinstance(task, Examine):
                with self._row_on_failure(list(task.entries)) as settled:
                    self._examiner.examine(task, settled)
            elif isinstance(task, Screen):
                with self._row_on_failure(list(task.entries)) as settled:
                    self._screener.screen(task, settled)
            elif isinstance(task, Compile):
                self._screener.compile(task)
            elif isinstance(task, Propose):
                self._send(self._screener.propose(task))
            else:
                self._measure(task)
            self._free()
        except DeviceLost as lost:
            self._send(Fatal(self._who, str(lost)))
            return False
        return True

    # --- tasks ---------------------------------------------------------------------------------------

    def _try_load(self, name: str) -> str | None:
        self._at(None, "import")
        try:
            self._load(name)
        except ImplUnavailable as error:
            return _shorten(str(error))
        except Exception as error:
            return _describe("import", error)
        return None

    def _measure_ceiling(self) -> None:
        """The bound's best on a problem so large that only the memory's speed is left."""
        assert self._bound is not None
        problem: DecodeProblem = self._bound.ceiling_problem
        with self._row_on_failure([BOUND]):
            sets = self._make_sets(problem, seed=0)
            outcome = self._attempt(BOUND, self._sweep, problem, sets)
            if isinstance(outcome, Row):
                self._send(outcome)
                return
            outcome.row = replace(outcome.row, config={**outcome.row.config, "bytes": problem.kv_bytes})
            self._time({BOUND: outcome}, sets, last=None, ceiling_gbps=None)

    def _measure(self, task: Measure) -> None:
        case, problem = task.case, task.case.problem
        everyone = [*task.entries, *([BOUND] if task.bound else [])]
        with self._row_on_failure(everyone) as settled:
            sets = self._make_sets(problem, case.seed)
            self._at(None, "reference")
            first: Reference | None = reference(sets[0])
            candidates: dict[int, Candidate] = {}
            for who, entry in task.entries.items():
                outcome = self._attempt(who, self._prepare, who, entry, sets[0], first)
                if isinstance(outcome, Candidate):
                    candidates[who] = outcome
                else:
                    self._send(outcome)
                    settled.add(who)
            first = None  # several times the size of the output, in float64
            if task.bound:
                outcome = self._attempt(BOUND, self._prepare_bound, problem, sets)
                if isinstance(outcome, Candidate):
                    candidates[BOUND] = outcome
                else:
                    self._send(outcome)
                    settled.add(BOUND)
            if candidates:
                self._at(None, "reference")
                self._time(candidates, sets, last=reference(sets[-1]), ceiling_gbps=task.ceiling_gbps)

    # --- one entry -------------------------------------------------------------------------------------

    def _prepare(self, who: int, entry: Entry, inputs: DecodeInputs, ref: Reference) -> Candidate | Row:
        problem = inputs.problem
        self._at(who, "load")
        impl = self._load(entry.impl)
        if rule := impl.unsupported(problem, self._device):
            return Row(who=who, status="unsupported", reason=rule)
        self._at(who, "plan")
        plan, compile_s = self._timed(impl.plan, problem, self._device, entry.tuning)
        other = _other_lengths(problem, impl, self._device)
        replans = [self._timed(impl.plan, other, self._device, entry.tuning)[1] for _ in range(REPLANS)]
        row = Row(
            who=who,
            status="ok",
            config={**plan.config, "workspace_bytes": sum(t.nbytes for t in plan.workspaces())},
            compile_ms=compile_s * 1e3,
            plan_us=statistics.median(replans) * 1e6,
        )
        self._at(who, "check")
        result = check_plan(plan, inputs, ref)
        self._synchronize()
        row = replace(row, check=result.to_dict())
        if not result.ok:
            return replace(row, status="wrong", reason=result.reason)
        return Candidate(row=row, plan=plan, replan=lambda: impl.plan(problem, self._device, entry.tuning))

    def _prepare_bound(self, problem: DecodeProblem, sets: Sequence[DecodeInputs]) -> Candidate | Row:
        assert self._bound is not None
        self._at(BOUND, "load")
        if rule := self._bound.unsupported(problem, self._device):
            return Row(who=BOUND, status="unsupported", reason=rule)
        return self._sweep(problem, sets)

    def _sweep(self, problem: DecodeProblem, sets: Sequence[DecodeInputs]) -> Candidate:
        """The bound's fastest configuration for these inputs, with the whole sweep in its config."""
        assert self._bound is not None
        self._at(BOUND, "sweep")
        sets = timed_sets(self._timer, sets)
        tunings: Sequence[Mapping[str, Scalar]] = self._bound.sweep()
        plans = [self._bound.plan(problem, self._device, tuning) for tuning in tunings]
        laps = [self._timer.lap(plan, sets, rotations=1) for plan in plans]
        samples = [[lap.sample() for lap in laps] for _ in range(SWEEP_ROUNDS)]
        medians = [statistics.median(times) for times in zip(*samples, strict=True)]
        best = min(range(len(plans)), key=medians.__getitem__)
        sweep = [{**tuning, "us": _finite(us)} for tuning, us in zip(tunings, medians, strict=True)]
        row = Row(who=BOUND, status="ok", config={**plans[best].config, "sweep": sweep})
        replan = partial(self._bound.plan, problem, self._device, tunings[best])
        return Candidate(row=row, plan=plans[best], replan=replan)

    # --- timing ----------------------------------------------------------------------------------------

    def _time(
        self,
        candidates: dict[int, Candidate],
        sets: Sequence[DecodeInputs],
        *,
        last: Reference | None,
        ceiling_gbps: float | None,
    ) -> None:
        """Time all candidates in shared rounds and send their rows, checked once more.

        Args:
            candidates: by whose they are.
            sets: the rotated inputs.
            last: the reference of the last set; None for the bound, which computes nothing.
            ceiling_gbps: for :func:`harness.timing.judge`.
        """
        sets = timed_sets(self._timer, sets)
        problem = sets[0].problem
        rows: dict[int, Row] = {}

        def attempt(who: int, what: str, action: Callable[[], Any]) -> Any:
            self._at(who, what)
            result = self._attempt(who, action)
            if isinstance(result, Row):
                rows[who] = result
                return None
            return result

        def lap(candidate: Candidate) -> Lap:
            # The first lap is of the plan that was checked.
            plan, candidate.plan = candidate.plan or candidate.replan(), None
            return self._timer.lap(plan, sets)

        taken = take_rounds(
            self._timer, {who: partial(lap, candidate) for who, candidate in candidates.items()}, attempt
        )
        clocks = to_record(taken.readings)
        for who, timed in taken.laps.items():
            row = candidates[who].row
            if who != BOUND:
                assert last is not None
                self._at(who, "check after timing")
                row = self._attempt(who, self._recheck, row, timed, last, problem)
            host = attempt(who, "host time", partial(self._host_times, candidates[who], sets))
            if row.status == "ok" and who not in rows:
                beside = {"host": host, "breakdown": timed.breakdown(), "clocks": clocks}
                timing = {**conditions(self._timer, timed, sets), **beside, "samples": taken.samples[who]}
                row = _judged(row, timing, problem, ceiling_gbps)
            rows.setdefault(who, row)
        for who in candidates:
            # A row that failed in here keeps what was learnt before.
            row, known = rows[who], candidates[who].row
            check = row.check or (known.check if row.status == "wrong" else None)
            self._send(
                replace(row, check=check, config=known.config, compile_ms=known.compile_ms, plan_us=known.plan_us)
            )

    def _recheck(self, row: Row, lap: Lap, last: Reference, problem: DecodeProblem) -> Row:
        """Whether what was timed computes what was checked, on inputs that no check has seen."""
        for _ in range(2):  # a plan that does its work in every second call is right once
            output = lap.result()
            assert output is not None
            result = compare(output, last, problem)
            self._synchronize()
            if not result.ok:
                reason = f"after the timed calls: {result.reason}"
                return replace(row, status="wrong", reason=reason, check=result.to_dict())
        return row

    def _host_times(self, candidate: Candidate, sets: Sequence[DecodeInputs]) -> Mapping[str, float] | None:
        """What a caller waits for, on a GPU; on a CPU that is what is timed anyway."""
        return host_times(candidate.replan(), sets) if self._device.type == "cuda" else None

    # --- plumbing ----------------------------------------------------------------------------------------

    def _at(self, who: int | None, what: str) -> None:
        self._who, self._what = who, what
        self._send(Step(who, what))

    def _attempt(self, who: int, action: Callable[..., Any], *arguments: Any) -> Any:
        """What the action returns, or the row that tells why it does not.

        Raises:
            DeviceLost: if it took the device with it.
        """
        try:
            result = action(*arguments)
            self._synchronize()
        except PlanRefused as error:
            return Row(who=who, status="unsupported", reason=_shorten(str(error)))
        except ImplUnavailable as error:
            return Row(who=who, status="unavailable", reason=_shorten(str(error)))
        except NotTheWork as error:
            return Row(who=who, status="wrong", reason=_shorten(f"{self._what}: {error}"))
        except CaptureFailed as error:
            raise DeviceLost(_shorten(str(error))) from error
        except Exception as error:
            reason = _describe(self._what, error)
            # The traceback holds on to tensors of the frames it names.
            error.__traceback__ = None
            self._check_device(reason)
            return Row(who=who, status="failed", reason=reason)
        return result

    @contextmanager
    def _row_on_failure(self, everyone: Sequence[int]) -> Iterator[set[int]]:
        """Turn a failure of what all share (inputs, reference) into the rows of all that are not settled."""
        settled: set[int] = set()
        try:
            yield settled
        except DeviceLost:
            raise
        except Exception as error:
            reason = str(error) if isinstance(error, Refused) else _describe(self._what, error)
            self._check_device(reason)
            for who in everyone:
                if who not in settled:
                    self._send(Row(who=who, status="failed", reason=reason))

    def _load(self, name: str) -> DecodeImpl:
        if name not in self._impls:
            self._impls[name] = _make(self._catalog[name])
        return self._impls[name]

    def _make_sets(self, problem: DecodeProblem, seed: int) -> Sequence[DecodeInputs]:
        self._at(None, "inputs")
        count = self._timer.sets(problem)
        if self._device.type == "cuda":
            self._free()
            free, _ = torch.cuda.mem_get_info(self._device)
            q_bytes = problem.batch * problem.heads_q * problem.head_dim * problem.element_bytes
            per_set = problem.kv_bytes + q_bytes
            need = count * per_set + self._timer.flush_bytes(problem)
            if need > MEMORY_SHARE * free:
                raise Refused(
                    f"inputs: expected at most {MEMORY_SHARE:.0%} of the {free} free bytes of device memory, "
                    f"got {count} sets of {per_set} bytes"
                )
        return input_sets(problem, seed, self._device, count)

    def _timed(self, action: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        """What the action returns, and the seconds until it and the device were done."""
        self._synchronize()
        start = time.perf_counter()
        result = action(*arguments)
        self._synchronize()
        return result, time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _check_device(self, reason: str) -> None:
        """Tell a failed call from a device that is gone: after the latter, every call fails."""
        if self._device.type != "cuda":
            return
        try:
            self._free()
            torch.ones(1, device=self._device).item()
        except Exception as error:
            raise DeviceLost(reason) from error

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _timer_of(device: str, method: str | None) -> str:
    known = METHODS[device]
    if method is not None and method not in known:
        raise RuntimeError(f"method: expected one of {', '.join(known)} on {device}, got {method!r}")
    return known[method or default_method(device)]


def _make(where: str, *arguments: object) -> Any:
    module, name = where.split(":")
    return getattr(import_module(module), name)(*arguments)


def _other_lengths(problem: DecodeProblem, impl: DecodeImpl, device: torch.device) -> DecodeProblem:
    """The same problem with other lengths: one key less each, one where there is none.

    Where the implementation wants whole pages, :data:`WHOLE_PAGES` less each; its own lengths if it refuses both.
    """
    for keys in (1, WHOLE_PAGES):
        other = replace(problem, kv_lens=tuple(abs(n - keys) for n in problem.kv_lens))
        if impl.unsupported(other, device) is None:
            return other
    return problem


def _judged(row: Row, timing: Mapping[str, Any], problem: DecodeProblem, ceiling_gbps: float | None) -> Row:
    """The row with its times, ``invalid`` where they cannot be true."""
    times = [sample["us"] for sample in timing["samples"]]
    reason = judge(times, kv_bytes=problem.kv_bytes, ceiling_gbps=ceiling_gbps)
    return replace(row, status="ok" if reason is None else "invalid", reason=reason, timing=timing)


def _finite(us: float) -> float | None:
    return us if math.isfinite(us) else None


def _describe(what: str, error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return _shorten(f"{what}: out of memory: {error}")
    return _shorten(f"{what}: {type(error).__name__}: {error}")


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 1] + "…"
