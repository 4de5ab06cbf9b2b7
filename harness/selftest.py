"""The harness measured by itself: does it call equal kernels equal, and how small a difference does it find?

The experiments run in another process (:mod:`harness.experiments`), the liars in that of the loop
(:mod:`harness.lies`). Those that use a profiler have a process of their own, for a profiler that was once in a
process may slow what is timed there afterwards. Each case's trials are written when they are complete; a run that
was interrupted goes on with the next case.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

from harness import record
from harness.lies import CASES as LIARS_CASES
from harness.lies import try_liars
from harness.loop import RunError, stable
from harness.record import SELFTEST_FILE
from harness.study import Case, Study
from harness.worker import answers
from impls.problem import DecodeProblem

LIARS = "liars"
"""The experiment that goes through the loop itself."""

EXPERIMENTS = ("identical", "sensitivity", "timers", "planning", "example", LIARS, "profilers", "nvbench")
"""What there is to do, in order: the same kernel under two names; a kernel slowed by a known share; timers of
others beside ours, without CUPTI; plans made before a call and inside of it; the shape of TileLang's example by its
protocol; fakes that would like to look fast; timers by CUPTI; and NVIDIA's own benchmark library."""

ALONE = ("profilers", "nvbench")
"""The experiments that share their process with no other."""

ANEW = ("nvbench",)
"""The experiments that take a new process for each case: nvbench runs once, and registers nothing after that."""

COMPARED_CASES = (
    *("b1_1k", "b8_512", "b1_8k"),
    *("trace_code_1200s", "b1_32k", "trace_conv_600s"),
    *("b16_8k", "skew_1x128k_31x1k", "b64_4k"),
)
"""The cases on which kernels are compared with themselves: three of each size class of the report, of one shape of
heads, which is compiled once."""

TIMED_CASES = ("b1_1k", "b8_512", "b1_8k", "b16_8k")
"""The cases on which timers are compared."""

PLANNED_CASES = ("b1_8k", "b16_8k", "b64_4k", "skew_1x128k_31x1k")
"""The cases on which planning is timed: all of whole pages."""

EXAMPLE_CASES = tuple(
    Case(
        name=f"example_1x{keys}",
        problem=DecodeProblem(kv_lens=(keys,), heads_q=32, heads_kv=8, head_dim=128, dtype="float16"),
        seed=0,
    )
    for keys in (8192, 131072)
)
"""The shape of TileLang's GQA decode example, and the same with 16 times the keys."""

OF_STUDY: Mapping[str, tuple[str, ...]] = {
    "identical": COMPARED_CASES,
    "sensitivity": COMPARED_CASES,
    "timers": TIMED_CASES,
    "planning": PLANNED_CASES,
    "profilers": TIMED_CASES,
    "nvbench": TIMED_CASES,
}
"""Experiment -> the cases that it takes of those that a study has; where it has none of them, all."""

STEP_DEADLINE_S = 240.0
"""How long one case of one experiment may take."""

Trials: TypeAlias = list[dict[str, Any]]


class _Lost(RunError):
    """A process that will not answer again."""


def run_selftest(
    study: Study,
    folder: Path,
    *,
    experiments: Sequence[str] = EXPERIMENTS,
    fresh: bool = False,
    say: Callable[[str], None] = lambda text: None,
    target: str = "harness.experiments:serve",
    device: str | None = None,
    liars: Callable[[str], tuple[dict[str, Any], Trials]] = try_liars,
) -> bool:
    """Run the experiments, or what is left of them, and append their trials to a file in ``folder``.

    Args:
        study: whose cases to take.
        folder: where the trials go.
        experiments: some of :data:`EXPERIMENTS`.
        fresh: begin a new run, in a new file.
        say: told what happens.
        target: ``module:function`` of the process that does the work of all but the liars.
        device: where the liars try; None takes CUDA where there is a device. The others need a GPU.
        liars: what tries them.

    Returns:
        Whether all of them came to their end.

    Raises:
        RunError: for an unknown experiment.
        harness.record.RecordError: if the file holds something else.
    """
    for name in experiments:
        if name not in EXPERIMENTS:
            raise RunError(f"experiment: expected one of {', '.join(EXPERIMENTS)}, got {name!r}")
    path = folder / SELFTEST_FILE
    if fresh:
        path.unlink(missing_ok=True)
    complete = True
    with _Laboratory(target) as laboratory:
        for name in experiments:
            try:
                laboratory.make_ready(name)
                if name == LIARS:
                    _run_liars(study, path, say, laboratory, device, liars)
                else:
                    complete &= _run(name, study, path, say, laboratory)
            except RunError as error:
                say(f"{name}: {error}")
                complete = False
    return complete


def _run(name: str, study: Study, path: Path, say: Callable[[str], None], laboratory: _Laboratory) -> bool:
    """One experiment.

    Raises:
        RunError: if its process does not start, or is lost.
    """
    complete = True
    journal = _Journal.open(path, study, laboratory.start())
    for case in _cases_of(name, study):
        if (name, case.name) in journal.done:
            continue
        say(f"{name}: {case.name}")
        laboratory.start()
        started = time.monotonic()
        try:
            trials = laboratory.ask(name, case)
        except RunError as error:
            journal.fail(name, case.name, str(error))
            if isinstance(error, _Lost):
                raise
            say(f"{name}: {error}")
            complete = False
            continue
        finally:
            if name in ANEW:
                laboratory.close()
        journal.write(name, case.name, trials, time.monotonic() - started)
    return complete


def _run_liars(
    study: Study,
    path: Path,
    say: Callable[[str], None],
    laboratory: _Laboratory,
    device: str | None,
    liars: Callable[[str], tuple[dict[str, Any], Trials]],
) -> None:
    """All liars at once: one worker does both of their cases.

    Raises:
        RunError: if a process does not start.
    """
    from harness.env import default_device, environment  # the former imports torch

    device = device or default_device()
    cases = [case.name for case in LIARS_CASES[device]]
    if path.exists():
        # Not asked of CUDA in this process: that would make a context on the device.
        known = _Journal.find(path, environment("cpu") if device == "cpu" else laboratory.start())
        if known is not None and all((LIARS, case) in known.done for case in cases):
            return
    say(f"{LIARS}: {', '.join(cases)}")
    started = time.monotonic()
    env, trials = liars(device)
    seconds = (time.monotonic() - started) / len(cases)
    journal = _Journal.open(path, study, env)
    for case in cases:
        journal.write(LIARS, case, [trial for trial in trials if trial["case"] == case], seconds)


def _cases_of(name: str, study: Study) -> tuple[Case, ...]:
    if name == "example":
        return EXAMPLE_CASES
    return tuple(case for case in study.cases if case.name in OF_STUDY[name]) or study.cases


class _Laboratory:
    """The process in which experiments run, and a new one when it is lost or must be clean; ends with the block.

    Args:
        target: ``module:function`` that serves: given the pipe, it answers first with the environment and then each
            ``(experiment, case)`` with trials, or with a text that says why not.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._process: BaseProcess | None = None
        self._conn: Connection | None = None
        self._env: dict[str, Any] = {}
        self._last = ""

    def __enter__(self) -> _Laboratory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def make_ready(self, name: str) -> None:
        """End the process if the next experiment must not share it with the last."""
        if name != self._last and (name in ALONE or self._last in ALONE):
            self.close()
        self._last = name

    def start(self) -> dict[str, Any]:
        """The environment, of a process that is started if need be.

        Raises:
            RunError: if it does not start.
        """
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._conn, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(self._target, theirs), daemon=True)
            self._process.start()
            theirs.close()
            try:
                self._env = self._receive("start")
            except RunError:
                self.close()
                raise
        return self._env

    def ask(self, name: str, case: Case) -> Trials:
        """The trials of one experiment on one case.

        Raises:
            RunError: if it failed; if the process hung or died, :class:`_Lost`.
        """
        assert self._conn is not None, "expected a process that was started"
        try:
            self._conn.send((name, case))
            trials: Trials = self._receive(case.name)
        except ConnectionError as error:
            self.close()
            raise _Lost(f"{case.name}: the process died") from error
        return trials

    def close(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None and self._conn is not None:
            self._process.kill()
            self._process.join()
            self._conn.close()
        self._process = None

    def _receive(self, what: str) -> Any:
        assert self._conn is not None
        try:
            if not answers(self._conn, STEP_DEADLINE_S):
                self.close()
                raise _Lost(f"{what}: no answer within {STEP_DEADLINE_S:g} s")
            answer = self._conn.recv()
        except (EOFError, ConnectionError) as error:
            self.close()
            raise _Lost(f"{what}: the process died") from error
        if isinstance(answer, str):
            raise RunError(f"{what}: {answer}")
        return answer


def _serve(target: str, conn: Connection) -> None:
    module, function = target.split(":")
    getattr(import_module(module), function)(conn)


class _Journal:
    """One run's part of the trials file.

    Args:
        path: the file.
        run_id: the run.
        done: the (experiment, case) pairs that the run has.
    """

    def __init__(self, path: Path, run_id: str, done: set[tuple[str, str]]) -> None:
        self.path = path
        self.run_id = run_id
        self.done = done

    @classmethod
    def find(cls, path: Path, env: Mapping[str, Any]) -> _Journal | None:
        """The file's last run, if it is of this environment."""
        records = record.read(path) if path.exists() else []
        runs = [r for r in records if r["kind"] == "run"]
        if not runs or stable(runs[-1]["env"]) != stable(env):
            return None
        run_id = runs[-1]["run_id"]
        mine = [r for r in records if r["run_id"] == run_id and r.get("experiment") == "done"]
        return cls(path, run_id, {(r["impl"], r["case"]) for r in mine})

    @classmethod
    def open(cls, path: Path, study: Study, env: dict[str, Any]) -> _Journal:
        """That run, or a new one."""
        if (found := cls.find(path, env)) is not None:
            return found
        run_id = record.new_run_id()
        record.append(path, record.run_record(run_id, study.name, env))
        return cls(path, run_id, set())

    def write(self, name: str, case: str, trials: Iterable[dict[str, Any]], seconds: float) -> None:
        """Append an experiment's trials of a case, and that they are complete."""
        marker = {"case": case, "impl": name, "experiment": "done", "seconds": round(seconds, 2)}
        top = {"kind": "trial", "schema": record.SCHEMA, "run_id": self.run_id}
        record.append(self.path, *({**top, **row} for row in (*trials, marker)))
        self.done.add((name, case))

    def fail(self, name: str, case: str, reason: str) -> None:
        """Append why an experiment has no trials of a case; a later call tries it again."""
        top = {"kind": "trial", "schema": record.SCHEMA, "run_id": self.run_id}
        record.append(self.path, {**top, "case": case, "impl": name, "experiment": "failed", "reason": reason})
