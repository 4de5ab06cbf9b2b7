"""A second process that draws figures of a large study beside this one.

It draws what :func:`harness.render.figures.draw` draws here, from the same comparison, so the bytes are the same.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from harness.record import records_file

if TYPE_CHECKING:
    from harness.render.figures import Drawn
    from harness.render.frame import Comparison

LARGE_BYTES = 2_000_000
"""Bytes of records, about a thousand of them, from which the second process is worth its own imports."""


IN_HAND = 2
"""Figures that the process is given at a time: one to draw, and the next, so that it need not wait for this one."""


class Helper:
    """The figures of a report, divided between a process and the caller as each of them comes along.

    What the process cannot draw, for whatever reason, is missing from :meth:`finish`: the caller draws that
    itself, and so meets the error where it can be reported.

    Args:
        conn: to the process; None where the caller draws everything.
    """

    def __init__(self, conn: Connection | None) -> None:
        self._conn = conn
        self._left: list[str] = []
        self._given: list[str] = []
        self._drawn: dict[str, Drawn | None] = {}

    def begin(self, comparison: Comparison, folder: Path, names: Iterable[str]) -> None:
        """Say what is to be drawn, and into which folder; the process sets to work."""
        self._left = list(names)
        self._send((comparison, folder))
        self._give()

    def next(self) -> str | None:
        """The next figure that the caller should draw; None where the process has the last ones in hand."""
        while self._given and self._conn is not None and self._conn.poll():
            self._receive()
        self._give()
        return self._left.pop() if self._left else None

    def finish(self) -> dict[str, Drawn | None]:
        """Wait for the process; name -> what it drew, or None where there was nothing to draw."""
        while self._given and self._conn is not None:
            self._receive()
        return self._drawn

    def _give(self) -> None:
        while self._conn is not None and self._left and len(self._given) < IN_HAND:
            self._given.append(self._left.pop(0))
            self._send(self._given[-1])

    def _send(self, message: object) -> None:
        if self._conn is not None:
            try:
                self._conn.send(message)
            except OSError:
                self._conn = None

    def _receive(self) -> None:
        assert self._conn is not None
        try:
            self._drawn[self._given[0]] = self._conn.recv()
            del self._given[0]
        except (EOFError, OSError):
            self._conn = None


@contextmanager
def helping(folders: Sequence[Path]) -> Iterator[Helper]:
    """A helper for the report of these study folders, whose process starts at once and ends with the context.

    There is no process for a small study, and none on a machine with a single core.
    """
    files = [folder / records_file() for folder in folders]
    if (os.cpu_count() or 1) < 2 or sum(path.stat().st_size for path in files if path.is_file()) < LARGE_BYTES:
        yield Helper(None)
        return
    context = multiprocessing.get_context("spawn")
    conn, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that the pipe ends when the process does
    try:
        yield Helper(conn)
    finally:
        process.terminate()
        process.join()
        process.close()
        conn.close()


def _serve(conn: Connection) -> None:
    """The process's main function: names of figures in, what was saved out, until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    from harness.render.figures import draw

    # An end of the pipe is the parent's; what fails to be drawn fails there again, and is reported.
    with suppress(Exception):
        comparison, folder = conn.recv()
        while True:
            conn.send(draw(comparison, conn.recv(), folder))
