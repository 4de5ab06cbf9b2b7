"""What every loop over a study's cases shares: its worker, one row for each entry whatever dies, and what it shows.

The loops are :mod:`harness.runner` (check, or check and time) and :mod:`harness.tune`.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from harness import cost
from harness.record import READ_CEILING, STREAM_READ, Record
from harness.study import Case, Entry, Study
from harness.worker import BOUND, Ceiling, Message, Ready, Row, Step, Task, WorkerLost, WorkerPool
from impls.catalog import IMPLS

VOLATILE = ("clocks",)
"""Keys of a run's environment that change by themselves, and do not make it another environment."""

STYLES: Mapping[str, str] = {"ok": "green", "wrong": "bold red", "failed": "red", "invalid": "red"}
"""Colours of the statuses on the console; the others are dim."""


NAME_WIDTH = max(map(len, IMPLS))
"""Columns that hold any implementation's name."""


class RunError(RuntimeError):
    """A run that cannot begin: no such device, or a worker that does not start."""


def start(pool: WorkerPool) -> Ready:
    """What the pool's worker said when it was up.

    Raises:
        RunError: if none comes up.
    """
    try:
        return pool.ready
    except WorkerLost as lost:
        raise RunError(lost.reason) from lost


def load_all(pool: WorkerPool, entries: Sequence[Entry], display: Display) -> dict[str, str]:
    """Implementation -> why it is unavailable, for those that are."""
    unavailable = {}
    for impl in dict.fromkeys(entry.impl for entry in entries):
        display.say(f"import {impl}")
        if reason := pool.load(impl):
            unavailable[impl] = reason
    return unavailable


def run_case(
    pool: WorkerPool,
    case: Case,
    entries: Sequence[Entry],
    unavailable: Mapping[str, str],
    *,
    task: Callable[[Mapping[int, Entry], bool], Task],
    bound: bool,
    on_row: Callable[[Row], None],
    display: Display,
) -> None:
    """Exactly one row for each entry, and for the bound if it is wanted, whatever dies on the way.

    ``task`` makes the worker's task, given the entries that have no row yet and whether the bound lacks one.
    """
    waiting = {*range(len(entries)), *([BOUND] if bound else [])}
    names = {who: STREAM_READ if who == BOUND else entries[who].impl for who in waiting}

    def settle(row: Row) -> None:
        waiting.remove(row.who)
        on_row(row)
        display.row(case.name, names[row.who], row)

    for who, entry in enumerate(entries):
        if entry.impl in unavailable:
            settle(Row(who=who, status="unavailable", reason=unavailable[entry.impl]))
    while waiting:
        left = {who: entry for who, entry in enumerate(entries) if who in waiting}
        try:
            for message in pool.ask(task(left, BOUND in waiting)):
                if isinstance(message, Row):
                    settle(message)
                elif isinstance(message, Step):
                    whose = "" if message.who is None else f"{names[message.who]} · "
                    display.step(case.name, whose, message.what)
        except WorkerLost as lost:
            # Whose step it was pays for it, unless it has its row; where it was nobody's, nobody can have a result.
            for who in sorted(waiting) if lost.who is None else sorted(waiting & {lost.who}):
                settle(Row(who=who, status="failed", reason=lost.reason))
    display.step(case.name, "", "")


def last_answer(pool: WorkerPool, task: Task, kind: type[Message]) -> Message | None:
    """The last message of a kind that a task is answered with.

    Raises:
        WorkerLost: as of :meth:`harness.worker.WorkerPool.ask`.
    """
    answer = None
    for message in pool.ask(task):
        if isinstance(message, kind):
            answer = message
    return answer


def measure_ceiling(pool: WorkerPool, display: Display) -> Row:
    """The row of the device's read ceiling; a failed one where the worker is lost over it."""
    display.say(READ_CEILING)
    try:
        row = last_answer(pool, Ceiling(), Row)
    except WorkerLost as lost:
        return Row(who=BOUND, status="failed", reason=lost.reason)
    assert isinstance(row, Row)
    return row


def gbps_of_ceiling(
    status: str, config: Mapping[str, Any] | None, timing: Mapping[str, Any] | None
) -> float | None:
    """The read ceiling in GB/s (1e9 bytes), of the fastest sample of its row; None where that is not ``ok``."""
    if status != "ok":
        return None
    assert config is not None
    assert timing is not None
    return cost.gbps(config["bytes"], min(sample["us"] for sample in timing["samples"]))


def stable(env: Mapping[str, Any]) -> dict[str, Any]:
    """A run's environment without what changes by itself: a run is continued where this is the same."""
    return {key: value for key, value in env.items() if key not in VOLATILE}


def last_run(records: Sequence[Record], study: Study, env: Mapping[str, Any]) -> Record | None:
    """The last run among a file's records if it can be continued, else None.

    That takes the same study, the same smallest effect, and the same environment as far as it is :func:`stable`.
    """
    last = next((r for r in reversed(records) if r["kind"] == "run"), None)
    if last is None or last["study"] != study.name or last.get("smallest_effect") != study.smallest_effect:
        return None
    return last if stable(last["env"]) == stable(env) else None


def keep_to_gpu(path: Path, records: Iterable[Record], ready: Ready, asked: str | None) -> None:
    """Keep a file of a GPU's runs from a CPU's that nobody asked for: such a study takes hours there.

    Args:
        path: the file.
        records: what it holds.
        ready: the worker that is to add to it.
        asked: the device that was asked for; None for the best one here.

    Raises:
        RunError: if the last run was a GPU's and the best device here is the CPU.
    """
    last = next((r for r in reversed(list(records)) if r["kind"] == "run"), None)
    if asked is None and ready.device == "cpu" and last is not None and last["env"].get("device") == "cuda":
        name = last["env"].get("gpu") or "a GPU"
        raise RunError(
            f"{path}: expected a GPU, as of its last run ({name}), got none that torch can use; "
            "--device cpu adds a run on the CPU all the same"
        )


def time_text(us: float) -> str:
    """A time in µs, to four digits and never with an exponent."""
    return f"{us:.4g} µs" if us < 10_000 else f"{us:,.0f} µs"


class Display:
    """The progress bar, and a line for each row above it; silent without a console."""

    def __init__(self, console: Console | None, total: int) -> None:
        self._console = console or Console(quiet=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=console is None,
        )
        self._bar = self._progress.add_task("start", total=total)
        self._steps: dict[str, tuple[str, float]] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False)

    def say(self, text: str) -> None:
        """What is happening now."""
        self._progress.update(self._bar, description=text)

    def step(self, case: str, whose: str, what: str) -> None:
        """The case's next step, which ends the one before; no text ends the case."""
        before, since = self._steps.pop(case, ("", 0.0))
        if before:
            self._seconds[before] += time.monotonic() - since
        if what:
            self._steps[case] = (what, time.monotonic())
            self.say(f"{case} · {whose}{what}")

    def note_seconds(self) -> None:
        """A line that says where the time went: the steps of all cases and workers, the longest first."""
        longest_first = sorted(self._seconds.items(), key=lambda step: -step[1])
        spent = ", ".join(f"{what} {seconds:.0f}" for what, seconds in longest_first if seconds >= 1)
        if spent:
            self.note(f"seconds by step, all workers together: {spent}")

    def row(self, case: str, impl: str, row: Row) -> None:
        """A result."""
        told = row.reason or ""
        if row.status == "ok" and row.timing is not None:
            told = time_text(statistics.median(sample["us"] for sample in row.timing["samples"]))
        line = Text(f"{case:20} {impl:{NAME_WIDTH}} ")
        line.append(f"{row.status:12}", style=STYLES.get(row.status, "dim"))
        line.append(told)
        line.rstrip()
        self._console.print(line)
        if row.who != BOUND:
            self.advance()

    def advance(self) -> None:
        """One more of the total is done."""
        self._progress.advance(self._bar)
