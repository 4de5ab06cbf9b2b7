"""The worker process: where tensors, compilers and other people's libraries live, and may die.

The parent holds a :class:`Worker`, asks it for one task at a time, and hears what it is about to do before
it does it. So when the process dies, hangs past its deadline, or reports a device that no longer answers,
the parent knows whose step it was, and says so with :class:`WorkerLost`.

Nothing here imports torch: the worker's own half is :mod:`harness.bench`, imported in the worker alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import connection
from typing import Any, TypeAlias

from harness.study import Case, Entry
from harness.waking import WAKE_S
from impls.catalog import IMPLS
from impls.space import Configuration

BOUND = -1
"""Who a step or a row belongs to, where it is no entry of the study: the bound of the case."""

DEADLINE_S = 180.0
"""How long one step may take before its process is killed; compiling is the longest."""

START_DEADLINE_S = 300.0
"""How long a worker may take to come up: it imports torch, perhaps from a cold disk on a busy machine."""

METHODS: Mapping[str, Mapping[str, str]] = {
    "cuda": {
        "graph": "harness.cuda_timers:GraphTimer",
        "graph-warm": "harness.cuda_timers:GraphWarmTimer",
        "events": "harness.cuda_timers:EventsTimer",
        "kernels": "harness.cuda_timers:KernelsTimer",
    },
    "cpu": {"wall": "harness.timing:WallTimer"},
}
"""Device type -> method -> ``module:Class`` of its timer; the first method is the default."""

BOUNDS: Mapping[str, str] = {"cuda": "harness.bound:StreamRead"}
"""Device type -> ``module:Class`` of the bound; a device that is not named has none."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a worker works with; everything by name, because it is sent to another process.

    Args:
        device: ``cpu`` or ``cuda``; None takes CUDA where there is a device, else the CPU.
        catalog: implementation id -> ``module:Class``.
        method: of timing, one of the device's :data:`METHODS`; None takes the default.
        timer: ``module:Class`` in place of the method's timer.
        bound: ``module:Class`` in place of the device's bound.
    """

    device: str | None = None
    catalog: Mapping[str, str] = field(default_factory=lambda: dict(IMPLS))
    method: str | None = None
    timer: str | None = None
    bound: str | None = None


def default_method(device: str) -> str:
    """The method of timing that a run takes unless it is told otherwise."""
    return next(iter(METHODS[device]))


# --- tasks: parent -> worker ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Import and construct one implementation; answered by :class:`Loaded`."""

    impl: str


@dataclass(frozen=True)
class Ceiling:
    """Measure how fast the device reads memory at best; answered by one :class:`Row` of the bound."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Plan, run, check and time one case; answered by one :class:`Row` an entry.

    Args:
        case: the case.
        entries: position in the study -> what to run.
        bound: whether the bound is timed too.
        ceiling_gbps: the device's read ceiling, in GB/s, that no time may beat; None where it is not known.
    """

    case: Case
    entries: Mapping[int, Entry]
    bound: bool
    ceiling_gbps: float | None


@dataclass(frozen=True, kw_only=True)
class Examine:
    """Put every entry of one case through all probes, untimed; answered by one :class:`Row` an entry.

    Args:
        case: the case.
        entries: position in the study -> what to run.
        families: of inputs; the first also serves the probes of memory and state.
    """

    case: Case
    entries: Mapping[int, Entry]
    families: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Propose:
    """Ask an implementation for the space of its own choices; answered by :class:`Proposal`.

    Args:
        case: the case.
        impl: the implementation.
    """

    case: Case
    impl: str


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compile what an entry needs on a case, for the caches of the compilers; answered by one :class:`Row`.

    Args:
        case: the case.
        entry: what to compile.
    """

    case: Case
    entry: Entry


@dataclass(frozen=True, kw_only=True)
class Screen:
    """Check every entry of one case and, if it is right, take a few samples; answered by one :class:`Row` an entry.

    Args:
        case: the case.
        entries: position among the configurations -> what to try.
        ceiling_gbps: as for :class:`Measure`.
    """

    case: Case
    entries: Mapping[int, Entry]
    ceiling_gbps: float | None


Task = Load | Ceiling | Measure | Examine | Propose | Compile | Screen


# --- messages: worker -> parent ------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The worker is up: the device it works on, its environment, how it measures, and the device's memory."""

    device: str
    env: Mapping[str, Any]
    has_bound: bool
    method: str
    cache: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Step:
    """What the worker does next, and for whom: an entry's position, :data:`BOUND`, or None for the case."""

    who: int | None
    what: str


@dataclass(frozen=True)
class Loaded:
    """The answer to :class:`Load`: why the implementation is unavailable, or None."""

    reason: str | None


@dataclass(frozen=True)
class Proposal:
    """The answer to :class:`Propose`: the space, or why there is none."""

    configurations: tuple[Configuration, ...]
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one entry, in the terms of a measurement record."""

    who: int
    status: str
    reason: str | None = None
    config: Mapping[str, Any] | None = None
    compile_ms: float | None = None
    plan_us: float | None = None
    check: Mapping[str, Any] | None = None
    timing: Mapping[str, Any] | None = None
    same_as: int | None = None
    """The entry that came to the same plan, where there was one before: then this one is not timed."""


@dataclass(frozen=True)
class Fatal:
    """The worker cannot go on (its CUDA context is gone, it could not start); it ends after this."""

    who: int | None
    reason: str


@dataclass(frozen=True)
class Done:
    """The task is finished."""


Message: TypeAlias = Step | Loaded | Row | Proposal
"""What a task is answered with."""


class WorkerLost(RuntimeError):
    """The worker process is gone.

    Args:
        who: whose step it was: an entry's position, :data:`BOUND`, or None for the case or the start.
        reason: the step, and how the process ended.
    """

    def __init__(self, who: int | None, reason: str) -> None:
        super().__init__(reason)
        self.who = who
        self.reason = reason


def answers(conn: connection.Connection, within_s: float) -> bool:
    """Whether something comes through a pipe in time."""
    deadline = time.monotonic() + within_s
    while not conn.poll(min(WAKE_S, within_s)):
        if time.monotonic() > deadline:
            return False
    return True


class Worker:
    """The parent's handle of one worker process; a context manager that ends it.

    Args:
        setup: what the worker works with.
        deadline_s: the longest one step may take.

    Attributes:
        ready: what the worker said when it was up.

    Raises:
        WorkerLost: if the process does not come up.
    """

    def __init__(self, setup: Setup, deadline_s: float = DEADLINE_S) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self._conn, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, setup), daemon=True)
        self._process.start()
        theirs.close()  # so that the pipe ends when the worker does
        self._step = Step(None, "start")
        self._deadline_s = START_DEADLINE_S
        message = self._receive()
        assert isinstance(message, Ready)
        self._deadline_s = deadline_s
        self.ready = message

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, task: Task) -> Iterator[Message]:
        """Send a task and yield what the worker says, until it is done.

        Raises:
            WorkerLost: if the process dies, hangs or gives up; this handle is of no more use then.
        """
        self._step = Step(None, "the next task")
        try:
            self._conn.send(task)
        except OSError:
            raise self._lost(self._how_it_ended()) from None
        while not isinstance(message := self._receive(), Done):
            if isinstance(message, Step):
                self._step = message
            yield message

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process.is_alive()

    def kill(self) -> None:
        """End the process, for another thread that waits for its answer to learn of it."""
        self._process.kill()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.join()
        self._conn.close()

    def _receive(self) -> Any:
        try:
            if not answers(self._conn, self._deadline_s):
                raise self._lost(f"no answer within {self._deadline_s:g} s; the process was killed")
            message = self._conn.recv()
        except (EOFError, ConnectionError):
            raise self._lost(self._how_it_ended()) from None
        if isinstance(message, Fatal):
            self.close()
            raise WorkerLost(message.who, message.reason)
        return message

    def _how_it_ended(self) -> str:
        self._process.join(timeout=5)
        code = self._process.exitcode
        if code is None:
            return "the process closed its pipe without ending"
        if code < 0:
            return f"the process died of {signal.Signals(-code).name}"
        return f"the process ended with exit code {code}"

    def _lost(self, how: str) -> WorkerLost:
        self.close()
        return WorkerLost(self._step.who, f"{self._step.what}: {how}")


class WorkerPool:
    """One worker at a time, and a new one after each loss; a context manager that ends it.

    Args:
        setup: what each worker works with.
        deadline_s: the longest one step may take.
    """

    def __init__(self, setup: Setup, deadline_s: float = DEADLINE_S) -> None:
        self._setup = setup
        self._deadline_s = deadline_s
        self._worker: Worker | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.close()

    @property
    def ready(self) -> Ready:
        """What the worker said when it was up; starts one if need be.

        Raises:
            WorkerLost: if it does not come up.
        """
        return self._up().ready

    def ask(self, task: Task) -> Iterator[Message]:
        """Like :meth:`Worker.ask`; after a :class:`WorkerLost` the next call has a new worker."""
        worker = self._up()
        try:
            yield from worker.ask(task)
        except WorkerLost:
            self._worker = None
            raise

    def load(self, name: str) -> str | None:
        """Import one implementation in a worker, which it may kill.

        Returns:
            Why it is unavailable, or None.

        Raises:
            WorkerLost: if no worker comes up to begin with.
        """
        self._up()  # a worker that cannot start is not the implementation's fault
        reason = None
        try:
            for message in self.ask(Load(name)):
                if isinstance(message, Loaded):
                    reason = message.reason
        except WorkerLost as lost:
            reason = lost.reason
        return reason

    def kill(self) -> None:
        """End the worker's process, for another thread that asks it to get :class:`WorkerLost`."""
        if self._worker is not None:
            self._worker.kill()

    def _up(self) -> Worker:
        if self._worker is not None and not self._worker.alive:
            self._worker.close()
            self._worker = None
        if self._worker is None:
            self._worker = Worker(self._setup, self._deadline_s)
        return self._worker


def _serve(conn: connection.Connection, setup: Setup) -> None:
    """The worker's main function: tasks in, messages out, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.dup2(2, 1)  # what compilers print is no output of the command
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if setup.device == "cpu":
        # Triton decides at import whether its kernels are interpreted, and would decide for the GPU.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    try:
        bench = import_module("harness.bench").Bench(setup, conn.send)
    except Exception as error:
        conn.send(Fatal(None, f"start: {type(error).__name__}: {error}"))
        return
    conn.send(bench.ready)
    while True:
        try:
            task = conn.recv()
        except EOFError:
            return
        if not bench.perform(task):
            return
        conn.send(Done())


def _end_with_parent() -> None:
    """End this process when its parent is killed, even in the middle of a step."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
