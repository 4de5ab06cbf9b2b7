"""Compiling ahead of a tuning: several processes that leave kernels in the caches of the compilers.

What a kernel is compiled for are heads, head dim and dtype, and what the implementation calls the kernel of a
configuration: each is compiled once for all cases of a shape.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeAlias

from harness.loop import Display, last_answer
from harness.study import Case, Entry
from harness.waking import as_done
from harness.worker import Compile, Row, WorkerLost, WorkerPool
from impls.problem import DecodeProblem
from impls.space import Configuration

MAX_JOBS = 14
"""The most processes that compile side by side."""

SHAPE = ("heads_q", "heads_kv", "head_dim", "dtype")
"""What of a problem a kernel is compiled for."""

Variant: TypeAlias = tuple[str, str]
"""One compiled kernel: an implementation, and shape and kernel as text."""


class Compiler:
    """Several processes that fill the caches of the compilers, each kernel once.

    Args:
        pools: the processes; none leaves compiling to whoever measures.
        display: told what happens.
    """

    def __init__(self, pools: Sequence[WorkerPool], display: Display) -> None:
        self._pools = pools
        self._display = display
        self._done: dict[Variant, str | None] = {}

    def compile(self, case: Case, wanted: Sequence[tuple[str, Configuration]]) -> dict[Variant, str]:
        """Compile what was not compiled before, each by the first configuration that needs it.

        Args:
            case: what is planned.
            wanted: implementations and their configurations.

        Returns:
            Why a variant cannot be compiled, for those of this shape that cannot.
        """
        variants: dict[Variant, Entry] = {}
        for impl, configuration in wanted:
            entry = Entry(impl=impl, tuning=configuration.tuning)
            variants.setdefault(variant(case.problem, impl, configuration), entry)
        missing = [v for v in variants if v not in self._done]
        if self._pools and missing:
            self._display.say(f"{case.name} · compiling {len(missing)} kernels")
            self._done |= self._compile_all({v: Compile(case=case, entry=variants[v]) for v in missing})
        return {v: reason for v in variants if (reason := self._done.get(v)) is not None}

    def _compile_all(self, tasks: Mapping[Variant, Compile]) -> dict[Variant, str | None]:
        idle: SimpleQueue[WorkerPool] = SimpleQueue()
        for pool in self._pools:
            idle.put(pool)

        def one(task: Compile) -> str | None:
            pool = idle.get()
            try:
                _ = pool.ready
            except WorkerLost:  # that is not the kernel's fault: who measures compiles it
                idle.put(pool)
                return None
            try:
                row = last_answer(pool, task, Row)
            except WorkerLost as lost:
                return lost.reason
            finally:
                idle.put(pool)
            assert isinstance(row, Row)
            return row.reason

        with ThreadPoolExecutor(len(self._pools)) as threads:
            futures = {v: threads.submit(one, task) for v, task in tasks.items()}
            try:
                for future in as_done(futures.values()):
                    future.result()  # raises what it raised
                return {v: future.result() for v, future in futures.items()}
            except BaseException:  # Ctrl-C above all: what is still being compiled is not waited for
                threads.shutdown(wait=False, cancel_futures=True)
                for pool in self._pools:
                    pool.kill()
                raise


def default_jobs(device: str) -> int:
    """Processes to compile in: what the host has cores for on a GPU; on a CPU one, which is who measures."""
    return min(MAX_JOBS, max(1, (os.cpu_count() or 1) - 2)) if device == "cuda" else 1


def variant(problem: DecodeProblem, impl: str, configuration: Configuration) -> Variant:
    """The kernel that a configuration of an implementation is compiled to for a problem."""
    shape = {key: getattr(problem, key) for key in SHAPE}
    return impl, json.dumps([shape, configuration.kernel], sort_keys=True)
