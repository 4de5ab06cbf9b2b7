"""Waiting for other threads and processes so that Ctrl-C is heard, whichever thread of this process it reaches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

WAKE_S = 0.5
"""How long the main thread waits at a time. Ctrl-C may be delivered to another thread of the process, and the main
one, which handles it, learns of it when it wakes."""


def as_done(futures: Iterable[Future[T]]) -> Iterator[Future[T]]:
    """The futures as they are done, in any order among those that are done together."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, WAKE_S, FIRST_COMPLETED)
        yield from done


def spawned(workers: int) -> ProcessPoolExecutor:
    """So many processes that begin from nothing: a forked one could use neither CUDA nor threads of its parent."""
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
