"""Waiting for other threads and processes so that Ctrl-C is heard, whichever thread of this process it reaches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

WAKE_S = 0.5
"""How long the main thread waits at a time, in seconds. Ctrl-C may be delivered to another thread of the process,
and the main one, which handles it, learns of it when it wakes."""


def as_done(futures: Iterable[Future[T]]) -> Iterator[Future[T]]:
    """The futures as they are done, in any order among those that are done together."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, WAKE_S, FIRST_COMPLETED)
        yield from done


@contextmanager
def spawned(workers: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes that begin from nothing: a forked one could use neither CUDA nor threads of its parent.

    Whoever is interrupted, or fails, does not wait for what they have not begun; what they have, they end.
    """
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown()
