"""The loop of a tuning: every configuration of our kernels on each case, and the best against our own choice.

For each case and implementation:

1. the implementation says which configurations there are (:mod:`impls.space`), and which cannot run;
2. their kernels are compiled, each once for all cases of a shape, in several processes at a time, for the caches of
   the compilers to hold them: compiling is most of the time;
3. a worker checks each configuration against the float64 reference and, if it is right, takes a few samples on the
   study's own inputs with the study's own timer (:mod:`harness.screen`);
4. the few fastest are compared with the implementation's own choice like implementations of a study: checked again,
   in shared rounds, and checked after.

Every trial is a record of ``tuning.jsonl``, written when it is known; what dies takes a worker with it and nothing
else. A tuning that was interrupted goes on where it stopped if the environment is the same.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from harness import record
from harness.compiler import Compiler, Variant, default_jobs, variant
from harness.loop import (
    NAME_WIDTH,
    Display,
    RunError,
    gbps_of_ceiling,
    keep_to_gpu,
    last_answer,
    last_run,
    measure_ceiling,
    run_case,
    start,
    time_text,
)
from harness.record import TUNING_FILE, Record, records_file
from harness.study import Case, Entry, Study
from harness.tuning import DEFAULT, Tuned, finalists, tuned, tuning_text
from harness.worker import (
    DEADLINE_S,
    Measure,
    Proposal,
    Propose,
    Ready,
    Row,
    Screen,
    Setup,
    Step,
    WorkerLost,
    WorkerPool,
)
from impls.catalog import OURS
from impls.space import Configuration

FINALISTS = 4
"""Configurations of an implementation that are compared with its own choice."""

LOSSES = 2
"""Workers that a kernel may take with it; what is left of it then is not tried."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a tuning has come to.

    Args:
        run_id: the run; one that was continued keeps its id.
        records: the file.
        tuned: each case and implementation that was asked for and is done, in the order of the study.
        left: cases that were not begun, for want of time.
    """

    run_id: str
    records: Path
    tuned: tuple[Tuned, ...]
    left: tuple[str, ...]

    @property
    def succeeded(self) -> bool:
        """Whether any case has a regret."""
        return any(row.regret is not None for row in self.tuned)


def tune_study(
    study: Study,
    *,
    impls: Sequence[str] = OURS,
    cases: Sequence[str] | None = None,
    budget_s: float = math.inf,
    fresh: bool = False,
    device: str | None = None,
    jobs: int | None = None,
    setup: Setup | None = None,
    deadline_s: float = DEADLINE_S,
    console: Console | None = None,
) -> Summary:
    """Tune implementations on a study's cases, or what is left of that, into the ``tuning.jsonl`` of its folder.

    Args:
        study: whose cases to take; its own entries do not matter.
        impls: implementation ids.
        cases: names; None takes all.
        budget_s: seconds after which no further case is begun.
        fresh: begin a new run, and try everything again.
        device: ``cpu`` or ``cuda``; None takes CUDA where there is a device, else the CPU.
        jobs: processes that compile side by side; 1 compiles where it measures. None takes as many as the host
            has cores for on a GPU, and 1 on a CPU.
        setup: implementations, timer and bound in place of the real ones; ``device`` goes before its.
        deadline_s: the longest one step may take before its process is killed.
        console: where to show progress; None shows none.

    Raises:
        RunError: for an unknown case, or if no worker starts; or if no device was asked for, the study's last run
            was a GPU's, and here is none.
        harness.record.RecordError: if the file holds something else.
    """
    known = {case.name: case for case in study.cases}
    for name in cases or ():
        if name not in known:
            raise RunError(f"--cases: expected some of {', '.join(known)}, got {name!r}")
    asked = [known[name] for name in known if cases is None or name in cases]
    chosen = setup or Setup()
    if device is not None:
        chosen = replace(chosen, device=device)
    deadline = time.monotonic() + budget_s
    with ExitStack() as stack:
        pool = stack.enter_context(WorkerPool(chosen, deadline_s))
        ready = start(pool)
        for path in (study.folder / TUNING_FILE, study.folder / records_file()):
            keep_to_gpu(path, record.read(path) if path.exists() else (), ready, chosen.device)
        journal = Journal.open(study.folder / TUNING_FILE, study, ready, fresh=fresh)
        todo = [case for case in asked if not all(journal.is_done(case, impl) for impl in impls)]
        display = stack.enter_context(_Display(console, total=len(todo)))
        display.note(f"{journal.run_id}: {len(todo)} of {len(asked)} cases to tune on {ready.device}")
        count = jobs or default_jobs(ready.device)
        others = [stack.enter_context(WorkerPool(chosen, deadline_s)) for _ in range(count if count > 1 else 0)]
        compiler = Compiler(others, display)
        ceiling_gbps = None
        if todo and ready.has_bound:
            ceiling = measure_ceiling(pool, display)
            ceiling_gbps = gbps_of_ceiling(ceiling.status, ceiling.config, ceiling.timing)
        while todo and time.monotonic() < deadline:
            _CaseTuner(todo.pop(0), pool, compiler, journal, ceiling_gbps, display).tune(impls)
    names = [case.name for case in asked]
    found = [row for row in tuned(journal.rows) if row.case in names and row.impl in impls]
    found.sort(key=lambda row: (names.index(row.case), list(impls).index(row.impl)))
    return Summary(
        run_id=journal.run_id,
        records=journal.path,
        tuned=tuple(found),
        left=tuple(case.name for case in todo),
    )


class _CaseTuner:
    """One case, through all its implementations."""

    def __init__(
        self,
        case: Case,
        pool: WorkerPool,
        compiler: Compiler,
        journal: Journal,
        ceiling_gbps: float | None,
        display: Display,
    ) -> None:
        self._case = case
        self._pool = pool
        self._compiler = compiler
        self._journal = journal
        self._ceiling_gbps = ceiling_gbps
        self._display = display

    def tune(self, impls: Sequence[str]) -> None:
        """All of them together: they share inputs and reference, and at the end rounds."""
        case, journal = self._case, self._journal
        todo = [impl for impl in impls if not journal.is_done(case, impl)]
        spaces: dict[str, Sequence[Configuration]] = {}
        for impl in todo:
            proposal = self._propose(impl)
            if proposal.reason is None:
                spaces[impl] = proposal.configurations
            else:
                row = Row(who=0, status="unsupported", reason=proposal.reason)
                journal.add(self._record("final", Entry(impl=impl, tuning=DEFAULT), row))
        self._screen(self._prepare(spaces))
        self._compare(list(spaces))
        journal.forget_older(case, todo)
        self._display.advance()

    def _propose(self, impl: str) -> Proposal:
        self._display.say(f"{self._case.name} · {impl}")
        answer = None
        try:
            if (reason := self._pool.load(impl)) is not None:
                return Proposal((), reason)
            answer = last_answer(self._pool, Propose(case=self._case, impl=impl), Proposal)
        except WorkerLost as lost:
            return Proposal((), lost.reason)
        assert isinstance(answer, Proposal)
        return answer

    def _prepare(self, spaces: Mapping[str, Sequence[Configuration]]) -> list[tuple[Entry, Configuration]]:
        """What is to be screened: compiled, not tried before, and not refused, which is written here."""
        can_run = []
        for impl, space in spaces.items():
            tried = [r["tuning"] for r in self._journal.screened(self._case, impl)]
            for configuration in space:
                entry = Entry(impl=impl, tuning=configuration.tuning)
                if entry.tuning in tried:
                    continue
                if configuration.refusal is None:
                    can_run.append((entry, configuration))
                else:
                    self._write(entry, Row(who=0, status="unsupported", reason=configuration.refusal))
        broken = self._compiler.compile(self._case, [(entry.impl, point) for entry, point in can_run])
        compiled = []
        for entry, configuration in can_run:
            if (reason := broken.get(variant(self._case.problem, entry.impl, configuration))) is None:
                compiled.append((entry, configuration))
            else:
                self._write(entry, Row(who=0, status="failed", reason=reason))
        return compiled

    def _screen(self, left: Sequence[tuple[Entry, Configuration]]) -> None:
        """Exactly one record for each of them, whatever dies on the way."""
        waiting = dict(enumerate(left))
        losses: Counter[Variant] = Counter()

        def settle(row: Row) -> None:
            entry, _ = waiting.pop(row.who)
            twin = None if row.same_as is None else left[row.same_as][0].tuning
            self._write(entry, row, same_as=twin)

        while waiting:
            entries = {who: entry for who, (entry, _) in waiting.items()}
            task = Screen(case=self._case, entries=entries, ceiling_gbps=self._ceiling_gbps)
            try:
                for message in self._pool.ask(task):
                    if isinstance(message, Row):
                        settle(message)
                    elif isinstance(message, Step):
                        self._display.say(f"{self._case.name} · {len(waiting)} to try · {message.what}")
            except WorkerLost as lost:
                # As in a study, whose step it was pays for it; where it was nobody's, nobody can have a result.
                for who in sorted(waiting) if lost.who is None else sorted({lost.who} & waiting.keys()):
                    entry, configuration = waiting[who]
                    losses[variant(self._case.problem, entry.impl, configuration)] += 1
                    settle(Row(who=who, status="failed", reason=lost.reason))
                for who, (entry, configuration) in list(waiting.items()):
                    if losses[variant(self._case.problem, entry.impl, configuration)] >= LOSSES:
                        reason = f"not tried: its kernel took {LOSSES} workers with it"
                        settle(Row(who=who, status="failed", reason=reason))

    def _compare(self, impls: Sequence[str]) -> None:
        """The own choice and the finalists of each implementation, in rounds that all share."""
        entries = [
            Entry(impl=impl, tuning=tuning)
            for impl in impls
            for tuning in finalists(self._journal.screened(self._case, impl), FINALISTS)
        ]
        rows: dict[int, Row] = {}
        if entries:
            run_case(
                self._pool,
                self._case,
                entries,
                {},
                task=self._measure,
                bound=False,
                on_row=lambda row: rows.update({row.who: row}),
                display=self._display,
            )
        self._journal.add(*(self._record("final", entries[who], rows[who]) for who in sorted(rows)))
        for row in tuned(self._journal.of_case(self._case)):
            if row.impl in impls:
                self._display.note(f"{row.case:20} {row.impl:{NAME_WIDTH}} {told(row)}")

    def _measure(self, entries: Mapping[int, Entry], bound: bool) -> Measure:
        return Measure(case=self._case, entries=entries, bound=bound, ceiling_gbps=self._ceiling_gbps)

    def _write(self, entry: Entry, row: Row, same_as: Mapping[str, Any] | None = None) -> None:
        self._journal.add(self._record("screen", entry, row, same_as))

    def _record(self, stage: str, entry: Entry, row: Row, same_as: Mapping[str, Any] | None = None) -> Record:
        timing = row.timing
        if timing is not None:
            # The samples say whether they were throttled; the clocks of every round would fill the file.
            timing = {key: value for key, value in timing.items() if key not in ("clocks", "breakdown")}
        return record.trial_record(
            run_id=self._journal.run_id,
            case=self._case.name,
            impl=entry.impl,
            stage=stage,
            status=row.status,
            reason=row.reason,
            problem=self._case.problem,
            seed=self._case.seed,
            tuning=entry.tuning,
            same_as=same_as,
            config=row.config,
            check=row.check,
            timing=timing,
        )


class Journal:
    """One run's part of a tuning file.

    Args:
        path: the file.
        run_id: the run.
        rows: of the run.
    """

    def __init__(self, path: Path, run_id: str, rows: list[Record]) -> None:
        self.path = path
        self.run_id = run_id
        self.rows = rows

    @classmethod
    def open(cls, path: Path, study: Study, ready: Ready, *, fresh: bool) -> Journal:
        """Continue the file's last run if it is of this study, environment and method, or begin one."""
        records = record.read(path) if path.exists() else []
        env = {**ready.env, "method": ready.method, "cache": ready.cache}
        if not fresh and (last := last_run(records, study, env)) is not None:
            return cls(path, last["run_id"], [r for r in records if r["run_id"] == last["run_id"]])
        run_id = record.new_run_id()
        record.append(path, record.run_record(run_id, study.name, env, smallest_effect=study.smallest_effect))
        return cls(path, run_id, [])

    def add(self, *rows: Record) -> None:
        """Write trials of the run."""
        record.append(self.path, *rows)
        self.rows += rows

    def of_case(self, case: Case) -> list[Record]:
        """The run's trials of a case as it is now."""
        return [r for r in self.rows if r["kind"] == "trial" and _is_of(r, case)]

    def screened(self, case: Case, impl: str) -> list[Record]:
        """Of these, those of one implementation alone."""
        return [r for r in self.of_case(case) if r["impl"] == impl and r["stage"] == "screen"]

    def is_done(self, case: Case, impl: str) -> bool:
        """Whether the implementation was compared."""
        return any(r["impl"] == impl and r["stage"] == "final" for r in self.of_case(case))

    def forget_older(self, case: Case, impls: Sequence[str]) -> None:
        """Take what other runs, or the same with another problem, know of these out of the file."""

        def stays(row: Record) -> bool:
            return row["impl"] not in impls or (row["run_id"] == self.run_id and _is_of(row, case))

        records = record.read(self.path)
        mine = [r for r in records if r["kind"] == "trial" and r["case"] == case.name]
        kept = [r for r in mine if stays(r)]
        if len(kept) < len(mine):
            needed = {r["run_id"] for r in kept}
            runs = [r for r in records if r["kind"] == "run" and r["run_id"] in needed]
            record.replace_cases(self.path, [*runs, *kept])
            self.rows = [r for r in self.rows if r["kind"] != "trial" or r["case"] != case.name or stays(r)]


class _Display(Display):
    """One line for a case and implementation is enough."""

    def row(self, case: str, impl: str, row: Row) -> None:
        """Nothing: there are hundreds."""


def told(row: Tuned) -> str:
    """A line about one case and implementation."""
    counts = ", ".join(f"{n} {status}" for status, n in row.tried.items())
    if row.regret is None or row.best is None:
        return "; ".join(filter(None, [counts, f"no comparison: {row.reason}"]))
    assert row.default_us is not None
    told = f"{counts}; own choice {time_text(row.default_us)}"
    if row.best == DEFAULT:
        return f"{told}, and nothing tried is faster"
    span = f"[{row.regret.low:.3f}, {row.regret.high:.3f}]"
    return f"{told}, {row.regret.median:.3f} {span} times the best: {tuning_text(row.best)}"


def _is_of(row: Record, case: Case) -> bool:
    return (row["case"], row["seed"]) == (case.name, case.seed) and row["problem"] == case.problem.to_dict()
