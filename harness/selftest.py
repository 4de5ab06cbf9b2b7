"""The harness measured by itself: does it call equal kernels equal, and how small a difference does it find?

Each experiment runs in a process of its own (:mod:`harness.experiments`), for a profiler that was once in a
process may slow what is timed there afterwards. Each case's trials are written when they are complete; a run
that was interrupted goes on with the next case.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness import record
from harness.record import SELFTEST_FILE
from harness.runner import VOLATILE, RunError
from harness.study import Case, Study

EXPERIMENTS = ("identical", "sensitivity", "timers", "profilers", "nvbench")
"""What there is to do, in order: the same kernel under two names; a kernel slowed by a known share; timers of
others beside ours, without CUPTI and with it; and NVIDIA's own benchmark library."""

TIMED_CASES = ("b1_1k", "b1_8k", "b1_32k", "b16_8k")
"""The cases on which timers are compared, of those that a study has; where it has none of them, all."""

STEP_DEADLINE_S = 240.0
"""How long one case of one experiment may take."""


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
) -> bool:
    """Run the experiments, or what is left of them, and append their trials to a file in ``folder``.

    Args:
        study: whose cases to take.
        folder: where the trials go.
        experiments: some of :data:`EXPERIMENTS`.
        fresh: begin a new run, in a new file.
        say: told what happens.
        target: ``module:function`` of the process that does the work.

    Returns:
        Whether all of them came to their end.

    Raises:
        RunError: for an unknown experiment, or if there is no GPU.
        harness.record.RecordError: if the file holds something else.
    """
    for name in experiments:
        if name not in EXPERIMENTS:
            raise RunError(f"experiment: expected one of {', '.join(EXPERIMENTS)}, got {name!r}")
    path = folder / SELFTEST_FILE
    if fresh:
        path.unlink(missing_ok=True)
    complete = True
    for name in experiments:
        complete &= _run(name, study, path, say, target)
    return complete


def _run(name: str, study: Study, path: Path, say: Callable[[str], None], target: str) -> bool:
    """One experiment in one process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(target, theirs, name), daemon=True)
    process.start()
    theirs.close()
    complete = True
    try:
        env = _receive(ours, "start")
        run_id, done = _journal(path, study, env)
        for case in _cases_of(name, study):
            if (name, case.name) in done:
                continue
            say(f"{name}: {case.name}")
            ours.send(case)
            try:
                trials = _receive(ours, case.name)
            except _Lost:
                raise
            except RunError as error:
                say(f"{name}: {error}")
                complete = False
                continue
            for trial in trials:
                record.append(path, {"kind": "trial", "schema": record.SCHEMA, "run_id": run_id, **trial})
            marker = {"case": case.name, "impl": name, "experiment": "done"}
            record.append(path, {"kind": "trial", "schema": record.SCHEMA, "run_id": run_id, **marker})
    except RunError as error:
        say(f"{name}: {error}")
        return False
    finally:
        process.kill()
        process.join()
    return complete


def _serve(target: str, conn: Connection, name: str) -> None:
    module, function = target.split(":")
    getattr(import_module(module), function)(conn, name)


def _receive(conn: Connection, what: str) -> Any:
    """The process's next answer.

    Raises:
        RunError: if it failed; if it hung or died, :class:`_Lost`.
    """
    try:
        if not conn.poll(STEP_DEADLINE_S):
            raise _Lost(f"{what}: no answer within {STEP_DEADLINE_S:g} s")
        answer = conn.recv()
    except (EOFError, ConnectionError) as error:
        raise _Lost(f"{what}: the process died") from error
    if isinstance(answer, str):
        raise RunError(f"{what}: {answer}")
    return answer


def _cases_of(name: str, study: Study) -> tuple[Case, ...]:
    if name in ("identical", "sensitivity"):
        return study.cases
    return tuple(case for case in study.cases if case.name in TIMED_CASES) or study.cases


def _journal(path: Path, study: Study, env: dict[str, Any]) -> tuple[str, set[tuple[str, str]]]:
    """The run to go on with, or a new one, and the (experiment, case) pairs that it has."""
    records = record.read(path) if path.exists() else []
    runs = [r for r in records if r["kind"] == "run"]
    if runs and _stable(runs[-1]["env"]) == _stable(env):
        run_id = runs[-1]["run_id"]
        mine = [r for r in records if r["run_id"] == run_id and r.get("experiment") == "done"]
        return run_id, {(r["impl"], r["case"]) for r in mine}
    run_id = record.new_run_id()
    record.append(path, record.run_record(run_id, study.name, env))
    return run_id, set()


def _stable(env: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in env.items() if key not in VOLATILE}
