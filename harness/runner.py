"""The one loop: every case of a study through every implementation, and each outcome into a record.

The parent process, here, owns the records file and the progress bar; a worker process does the work
(:mod:`harness.worker`). Rows that need no timing are written at once. Those that are timed share their
rounds, so they are written together when the case is done, and a case that was interrupted is redone
whole. When an implementation takes the worker with it, its row says so and a new worker redoes the case
without it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.console import Console

from harness import record
from harness.families import FAMILY_NAMES
from harness.loop import (
    Display,
    RunError,
    gbps_of_ceiling,
    keep_to_gpu,
    last_run,
    load_all,
    measure_ceiling,
    run_case,
    start,
)
from harness.record import READ_CEILING, REPEAT_FILE, STREAM_READ, Record, records_file
from harness.study import Case, Entry, Study
from harness.waking import as_done
from harness.worker import (
    BOUND,
    DEADLINE_S,
    Examine,
    Measure,
    Ready,
    Row,
    Setup,
    WorkerPool,
    default_method,
)

__all__ = ["Outcome", "RunError", "RunSummary", "check_study", "run_study"]

CHECK_COPIES = 16
"""Copies of a case's K and V that its check may hold at once, of all kinds and dtypes."""

CONTEXT_BYTES = 4 << 30
"""What a worker holds besides: its context, the pieces of the float64 reference, workspaces."""

MAX_CHECK_JOBS = 6
"""The most workers that check side by side: more would wait for the device."""


@dataclass(frozen=True)
class RunSummary:
    """What a run has recorded.

    Args:
        run_id: the run; an interrupted one that was continued keeps its id.
        records: the file.
        rows: the run's measurement records of the study's implementations, earlier ones of a continued run
            included; without the bound.
        resumed: cases that were complete already and were not run again.
    """

    run_id: str
    records: Path
    rows: tuple[Record, ...]
    resumed: int

    @property
    def succeeded(self) -> bool:
        """Whether any implementation is ``ok`` on any case."""
        return any(row["status"] == "ok" for row in self.rows)

    @property
    def counts(self) -> dict[str, int]:
        """Status -> rows, for the statuses that occur, in the order of the schema."""
        seen = [row["status"] for row in self.rows]
        return {status: seen.count(status) for status in record.STATUSES if status in seen}

    def ok_cases(self, impl: str) -> int:
        """Cases on which an implementation is ``ok``."""
        return len({row["case"] for row in self.rows if row["impl"] == impl and row["status"] == "ok"})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One implementation on one case, checked and not timed.

    Args:
        case: the case's name.
        entry: what was asked for.
        status: ``ok``, ``wrong``, ``unsupported``, ``unavailable`` or ``failed``.
        reason: why it is not ``ok``.
        config: of the plan, if there was one.
        check: the result of the check, if it came to one.
    """

    case: str
    entry: Entry
    status: str
    reason: str | None
    config: Mapping[str, Any] | None
    check: Mapping[str, Any] | None


def run_study(
    study: Study,
    *,
    device: str | None = None,
    method: str | None = None,
    fresh: bool = False,
    repeat: bool = False,
    setup: Setup | None = None,
    deadline_s: float = DEADLINE_S,
    console: Console | None = None,
) -> RunSummary:
    """Run a study, or what is left of it, and append its records to the method's file in its folder.

    The last run in that file is continued if its environment is the present one: cases that it has
    recorded completely, as they are asked for now, are not run again. The others are run whole, and take
    the place of older rows of the same case.

    Args:
        study: what to run.
        device: ``cpu`` or ``cuda``; None takes CUDA where there is a device, else the CPU.
        method: of timing, one of the device's :data:`harness.worker.METHODS`; None takes the default.
        fresh: begin a new run and measure every case.
        repeat: run what the folder's ``records.jsonl`` holds once more, into :data:`harness.record.REPEAT_FILE`.
        setup: implementations, timer and bound in place of the real ones; ``device`` goes before its.
        deadline_s: the longest one step may take before its process is killed.
        console: where to show progress; None shows none.

    Raises:
        RunError: if no worker starts, e.g. because CUDA was asked for and is not there; or if no device was
            asked for, the last run in the file was a GPU's, and here is none; or if it would repeat other
            problems, seeds or another method than those recorded.
        harness.record.RecordError: if the records file holds something else.
    """
    first = _Repeated.read(study) if repeat else None
    chosen = _setup(setup, device)
    if method is not None:
        chosen = replace(chosen, method=method)
    with WorkerPool(chosen, deadline_s) as pool:
        ready = start(pool)
        by_default = chosen.method in (None, default_method(ready.device))
        path = study.folder / (REPEAT_FILE if repeat else records_file(None if by_default else chosen.method))
        if first is not None:
            first.expect_same_way(ready, chosen.device)
        journal = _Journal.open(path, study, ready, asked=chosen.device, fresh=fresh)
        todo = [case for case in study.cases if not journal.is_complete(case, study.entries, ready)]
        with Display(console, total=len(todo) * len(study.entries)) as display:
            if not todo:
                display.note(f"{journal.run_id}: nothing left to run; --fresh begins a new run")
            else:
                display.note(f"{journal.run_id}: {len(todo)} of {len(study.cases)} cases to run on {ready.device}")
                unavailable = load_all(pool, study.entries, display)
                ceiling_gbps = _ceiling(pool, journal, display) if ready.has_bound else None
            for case in todo:
                writer = journal.begin_case(case, study.entries)
                run_case(
                    pool,
                    case,
                    study.entries,
                    unavailable,
                    task=partial(_measure, case, ceiling_gbps),
                    bound=ready.has_bound,
                    on_row=writer.add,
                    display=display,
                )
                writer.finish()
    names = {case.name for case in study.cases}
    rows = (r for r in journal.rows if r["role"] == "impl" and r["case"] in names)
    return RunSummary(journal.run_id, path, tuple(rows), resumed=len(study.cases) - len(todo))


def check_study(
    study: Study,
    *,
    device: str | None = None,
    families: Sequence[str] = FAMILY_NAMES,
    records: Path | None = None,
    jobs: int | None = None,
    setup: Setup | None = None,
    deadline_s: float = DEADLINE_S,
    console: Console | None = None,
) -> tuple[Outcome, ...]:
    """Put every implementation on every case through the probes of :mod:`harness.probes`, without timing.

    Args:
        study: what to check.
        device: as for :func:`run_study`.
        families: of inputs, some of :data:`harness.families.FAMILY_NAMES`; the first also serves the probes of
            memory and state.
        records: where to write ``kind: check`` records, each case's in the place of its older ones; None
            writes none.
        jobs: cases that are checked side by side, each in a worker; None takes as many as fit the device.
        setup: as for :func:`run_study`.
        deadline_s: as for :func:`run_study`.
        console: as for :func:`run_study`.

    Returns:
        One outcome a case and entry, in the order of the study.

    Raises:
        RunError: if no worker starts.
    """
    chosen = _setup(setup, device)
    with ExitStack() as stack:
        pools = [stack.enter_context(WorkerPool(chosen, deadline_s))]
        display = stack.enter_context(Display(console, total=len(study.cases) * len(study.entries)))
        ready = start(pools[0])
        unavailable = load_all(pools[0], study.entries, display)
        more = (jobs or _jobs_that_fit(study, ready.memory_bytes)) - 1
        pools += [stack.enter_context(WorkerPool(chosen, deadline_s)) for _ in range(more)]
        checker = _Checker(study, tuple(families), unavailable, pools, records, display)
        outcomes = checker.check_all(record.run_record(record.new_run_id(), study.name, ready.env))
        display.note_seconds()
        return outcomes


class _Checker:
    """Several worker pools that share out the cases of a study: nothing is timed, so they may work side by side."""

    def __init__(
        self,
        study: Study,
        families: tuple[str, ...],
        unavailable: Mapping[str, str],
        pools: Sequence[WorkerPool],
        records: Path | None,
        display: Display,
    ) -> None:
        self._study = study
        self._families = families
        self._unavailable = unavailable
        self._pools = pools
        self._idle: SimpleQueue[WorkerPool] = SimpleQueue()
        for pool in pools:
            self._idle.put(pool)
        self._records = records
        self._display = display
        self._writing = threading.Lock()
        self._stopped = False

    def check_all(self, run: Record) -> tuple[Outcome, ...]:
        """Every case, the largest first; in the order of the study."""
        unwritten = [run]
        with ThreadPoolExecutor(len(self._pools)) as threads:
            largest_first = sorted(self._study.cases, key=lambda case: -case.problem.kv_bytes)
            futures = {case.name: threads.submit(self._check, case, run, unwritten) for case in largest_first}
            try:
                for future in as_done(futures.values()):
                    future.result()  # raises what it raised
                return tuple(outcome for case in self._study.cases for outcome in futures[case.name].result())
            except BaseException:  # Ctrl-C above all: what others still find is not waited for
                self._stopped = True
                threads.shutdown(wait=False, cancel_futures=True)
                for pool in self._pools:
                    pool.kill()
                raise

    def _check(self, case: Case, run: Record, unwritten: list[Record]) -> list[Outcome]:
        entries = self._study.entries
        found: dict[int, Row] = {}

        def take(row: Row) -> None:
            if self._stopped:
                raise CancelledError
            found[row.who] = row

        pool = self._idle.get()
        try:
            run_case(
                pool,
                case,
                entries,
                self._unavailable,
                task=partial(_examine, case, self._families),
                bound=False,
                on_row=take,
                display=self._display,
            )
        finally:
            self._idle.put(pool)
        outcomes = [_outcome(case, entry, found[who]) for who, entry in enumerate(entries)]
        with self._writing:
            if self._records is not None:
                made = [_check_record(run["run_id"], case, outcome) for outcome in outcomes]
                record.replace_cases(self._records, [*unwritten, *made])
                unwritten.clear()
        return outcomes


def _outcome(case: Case, entry: Entry, row: Row) -> Outcome:
    return Outcome(
        case=case.name, entry=entry, status=row.status, reason=row.reason, config=row.config, check=row.check
    )


def _jobs_that_fit(study: Study, memory_bytes: int | None) -> int:
    """Cases that a GPU checks side by side: as many as its memory holds of the largest; elsewhere one."""
    if memory_bytes is None:
        return 1
    largest = max(case.problem.kv_bytes for case in study.cases)
    fit = memory_bytes // (CHECK_COPIES * largest + CONTEXT_BYTES)
    return max(1, min(fit, MAX_CHECK_JOBS, (os.cpu_count() or 1) // 2, len(study.cases)))


def _setup(setup: Setup | None, device: str | None) -> Setup:
    base = setup or Setup()
    return base if device is None else replace(base, device=device)


def _measure(case: Case, ceiling_gbps: float | None, entries: Mapping[int, Entry], bound: bool) -> Measure:
    return Measure(case=case, entries=entries, bound=bound, ceiling_gbps=ceiling_gbps)


def _examine(case: Case, families: tuple[str, ...], entries: Mapping[int, Entry], bound: bool) -> Examine:
    assert not bound
    return Examine(case=case, entries=entries, families=families)


def _ceiling(pool: WorkerPool, journal: _Journal, display: Display) -> float | None:
    """The device's read ceiling in GB/s, measured once a run; None where that fails."""
    row = journal.ceiling() or journal.add_ceiling(measure_ceiling(pool, display))
    return gbps_of_ceiling(row["status"], row["config"], row["timing"])


@dataclass(frozen=True)
class _Repeated:
    """The records of a study that are to be repeated: the same problems, seeds and method, or it is no repeat."""

    path: Path
    records: Sequence[Record]

    @classmethod
    def read(cls, study: Study) -> _Repeated:
        """The study's records, which must have every case as the study has it now.

        Raises:
            RunError: naming the case, and what of it is another.
        """
        path = study.folder / records_file()
        if not path.is_file():
            raise RunError(f"{path}: expected the records of a run to repeat, got no such file")
        records = record.read(path)
        rows = {r["case"]: r for r in records if r["kind"] == "measurement"}
        for case in study.cases:
            if (row := rows.get(case.name)) is None:
                raise RunError(f"{path}: expected records of {case.name} to repeat, got none")
            now, then = (
                {**p, "seed": seed}
                for p, seed in ((case.problem.to_dict(), case.seed), (row["problem"], row["seed"]))
            )
            if differ := [key for key in now if now[key] != then.get(key)]:
                raise RunError(
                    f"{path}: {case.name}: expected the problem that the study has now, to repeat it, got another"
                    f" {', '.join(differ)}"
                )
        return cls(path, records)

    def expect_same_way(self, ready: Ready, asked: str | None) -> None:
        """Refuse a device or a method of timing that is not that of the records.

        Raises:
            RunError: naming both.
        """
        keep_to_gpu(self.path, self.records, ready, asked)
        for row in self.records:
            if row["kind"] == "measurement" and row["case"] is not None and row["timing"] is not None:
                then = (row["timing"]["method"], row["timing"]["cache"])
                if then != (ready.method, ready.cache):
                    raise RunError(
                        f"{self.path}: a repeat is timed like what it repeats: expected method {then[0]}, cache"
                        f" {then[1]}, got method {ready.method}, cache {ready.cache}"
                    )


class _Journal:
    """One run's part of a records file."""

    def __init__(self, path: Path, run_id: str, rows: list[Record], older: set[str]) -> None:
        self.path = path
        self.run_id = run_id
        self.rows = rows
        self._older = older

    @classmethod
    def open(cls, path: Path, study: Study, ready: Ready, *, asked: str | None, fresh: bool) -> _Journal:
        """Continue the file's last run if :func:`harness.loop.last_run` allows it, or begin one."""
        records = record.read(path) if path.exists() else []
        keep_to_gpu(path, records, ready, asked)
        measured = [r for r in records if r["kind"] == "measurement"]
        cases = {r["case"] for r in measured if r["case"] is not None}
        if not fresh and (last := last_run(records, study, ready.env)) is not None:
            rows = [r for r in measured if r["run_id"] == last["run_id"]]
            return cls(path, last["run_id"], rows, cases)
        run_id = record.new_run_id()
        made = record.run_record(run_id, study.name, ready.env, smallest_effect=study.smallest_effect)
        record.append(path, made)
        return cls(path, run_id, [], cases)

    def is_complete(self, case: Case, entries: Sequence[Entry], ready: Ready) -> bool:
        """Whether the run holds a row for each entry, and for the bound, as they are asked for now."""
        how = (ready.method, ready.cache)
        rows = [
            r
            for r in self.rows
            if r["case"] == case.name
            and r["problem"] == case.problem.to_dict()
            and r["seed"] == case.seed
            and (r["timing"] is None or (r["timing"]["method"], r["timing"]["cache"]) == how)
        ]
        have = [(r["impl"], r["config"].get("asked", {})) for r in rows if r["role"] == "impl"]
        return all((entry.impl, dict(entry.tuning)) in have for entry in entries) and (
            not ready.has_bound or any(r["role"] == "bound" for r in rows)
        )

    def begin_case(self, case: Case, entries: Sequence[Entry]) -> _CaseWriter:
        """A writer of the case's rows; what the run knew of the case is forgotten."""
        self.rows = [r for r in self.rows if r["case"] != case.name]
        return _CaseWriter(self, case, entries, replaces=case.name in self._older)

    def ceiling(self) -> Record | None:
        """The run's read ceiling, if it was measured."""
        return next((r for r in self.rows if r["impl"] == READ_CEILING), None)

    def add_ceiling(self, row: Row) -> Record:
        """Write the run's read ceiling."""
        made = _record(self.run_id, row, impl=READ_CEILING)
        record.append(self.path, made)
        self.rows.append(made)
        return made


class _CaseWriter:
    """Writes one case's rows: at once, but timed ones together.

    Where the file has rows of the case from before, all are held back until the case is done, and take the
    older ones' place in one step: at no time is the case missing.
    """

    def __init__(self, journal: _Journal, case: Case, entries: Sequence[Entry], *, replaces: bool) -> None:
        self._journal = journal
        self._case = case
        self._entries = entries
        self._replaces = replaces
        self._held: list[Record] = []

    def add(self, row: Row) -> None:
        """Take a row."""
        entry = None if row.who == BOUND else self._entries[row.who]
        made = _record(
            self._journal.run_id, row, impl=entry.impl if entry else STREAM_READ, case=self._case, entry=entry
        )
        self._journal.rows.append(made)
        if self._replaces or row.timing is not None:
            self._held.append(made)
        else:
            record.append(self._journal.path, made)

    def finish(self) -> None:
        """Write what was held back."""
        if self._replaces:
            record.replace_cases(self._journal.path, self._held)
        else:
            for made in self._held:
                record.append(self._journal.path, made)


def _record(run_id: str, row: Row, *, impl: str, case: Case | None = None, entry: Entry | None = None) -> Record:
    return record.measurement_record(
        run_id=run_id,
        case=case.name if case else None,
        impl=impl,
        role="bound" if row.who == BOUND else "impl",
        status=row.status,
        reason=row.reason,
        problem=case.problem if case else None,
        seed=case.seed if case else None,
        config=_config(row.config, entry),
        compile_ms=row.compile_ms,
        plan_us=row.plan_us,
        check=row.check,
        timing=row.timing,
    )


def _check_record(run_id: str, case: Case, outcome: Outcome) -> Record:
    return record.check_record(
        run_id=run_id,
        case=case.name,
        impl=outcome.entry.impl,
        status=outcome.status,
        reason=outcome.reason,
        problem=case.problem,
        seed=case.seed,
        config=_config(outcome.config, outcome.entry),
        check=outcome.check,
    )


def _config(config: Mapping[str, Any] | None, entry: Entry | None) -> dict[str, Any]:
    """A plan's config, with what was asked for where anything was: it tells entries of one implementation apart."""
    asked = {"asked": dict(entry.tuning)} if entry is not None and entry.tuning else {}
    return {**(config or {}), **asked}
