"""Many configurations of one case, tried one after the other: compiled, checked, and then timed by a few samples.

It runs in the worker. A trial here says which configurations are worth a comparison; the comparison itself is
taken in shared rounds, like that of a study (:mod:`harness.tune`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from harness import clocks
from harness.check import check_plan
from harness.steps import Steps
from harness.study import Entry
from harness.timing import Timer, conditions, judge, timed_sets
from harness.worker import Compile, Proposal, Propose, Row, Screen
from impls.contract import DecodeInputs, DecodePlan
from impls.problem import DecodeProblem
from impls.reference import Reference, reference
from impls.space import Tunable

SAMPLES = 5
"""Samples of a configuration; their median decides whether it is compared."""

HOPELESS = 1.25
"""A first sample so many times the best median of its implementation stays the only one."""


@dataclass
class Progress:
    """What has been found on a case so far.

    Args:
        best_us: implementation -> its best median.
        plans: what a plan came to -> the entry that came to it first.
        rows: entry -> its row.
    """

    best_us: dict[str, float] = field(default_factory=dict)
    plans: dict[object, int] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)


class Screener:
    """Answers the worker's tasks of tuning.

    Args:
        steps: how to do its steps.
        timer: takes the samples.
        make_sets: the timer's input sets for a problem and seed.
    """

    def __init__(
        self, steps: Steps, timer: Timer, make_sets: Callable[[DecodeProblem, int], Sequence[DecodeInputs]]
    ) -> None:
        self._steps = steps
        self._timer = timer
        self._make_sets = make_sets

    def propose(self, task: Propose) -> Proposal:
        """The space of an implementation, or why there is none to try."""
        self._steps.at(None, "space")
        found = self._steps.attempt(0, self._configurations, task)
        return Proposal((), found.reason) if isinstance(found, Row) else found

    def _configurations(self, task: Propose) -> Proposal:
        impl, problem = self._steps.load(task.impl), task.case.problem
        if rule := impl.unsupported(problem, self._steps.device):
            return Proposal((), rule)
        if not isinstance(impl, Tunable):
            return Proposal((), f"{task.impl}: expected an implementation that declares a space, got none")
        return Proposal(tuple(impl.configurations(problem, self._steps.device)))

    def compile(self, task: Compile) -> None:
        """Plan, for what that leaves in the caches of the compilers, and send how it went."""
        self._steps.at(0, "compile")
        row = self._steps.attempt(0, self._compile, task)
        self._steps.send(row)

    def _compile(self, task: Compile) -> Row:
        started = time.perf_counter()
        self._steps.load(task.entry.impl).plan(task.case.problem, self._steps.device, task.entry.tuning)
        return Row(who=0, status="ok", compile_ms=(time.perf_counter() - started) * 1e3)

    def screen(self, task: Screen, settled: set[int]) -> None:
        """Send one row for each of the task's entries.

        Args:
            task: the case and its entries.
            settled: takes each entry whose row was sent.
        """
        problem = task.case.problem
        sets = self._make_sets(problem, task.case.seed)
        self._steps.at(None, "reference")
        ref = reference(sets[0])
        progress = Progress()
        for who, entry in task.entries.items():
            self._steps.at(who, "plan")
            row = self._steps.attempt(who, self._try, who, entry, sets, ref, task.ceiling_gbps, progress)
            progress.rows[who] = row
            self._steps.send(row)
            settled.add(who)

    def _try(
        self,
        who: int,
        entry: Entry,
        sets: Sequence[DecodeInputs],
        ref: Reference,
        ceiling_gbps: float | None,
        progress: Progress,
    ) -> Row:
        plan = self._steps.load(entry.impl).plan(sets[0].problem, self._steps.device, entry.tuning)
        row = Row(who=who, status="ok", config=plan.config)
        first = progress.plans.setdefault(what_it_is(entry.impl, plan), who)
        if first != who:
            known = progress.rows[first]
            return replace(row, status=known.status, reason=known.reason, same_as=first)
        self._steps.at(who, "check")
        result = check_plan(plan, sets[0], ref)
        row = replace(row, check=result.to_dict())
        if not result.ok:
            return replace(row, status="wrong", reason=result.reason)
        self._steps.at(who, "time")
        timing = self._sample(plan, sets, progress.best_us.get(entry.impl, math.inf))
        times = [sample["us"] for sample in timing["samples"]]
        reason = judge(times, kv_bytes=sets[0].problem.kv_bytes, ceiling_gbps=ceiling_gbps)
        if reason is not None:
            return replace(row, status="invalid", reason=reason, timing=timing)
        progress.best_us[entry.impl] = min(progress.best_us.get(entry.impl, math.inf), statistics.median(times))
        return replace(row, timing=timing)

    def _sample(self, plan: DecodePlan, sets: Sequence[DecodeInputs], best_us: float) -> dict[str, Any]:
        """A record's ``timing``; one sample alone where that is hopeless."""
        timed = timed_sets(self._timer, sets)
        lap = self._timer.lap(plan, timed, rotations=1)
        before = self._timer.clocks()
        times = [lap.sample()]
        # What is not finite is told apart later; here it only ends the sampling.
        while len(times) < SAMPLES and times[0] <= HOPELESS * best_us:
            times.append(lap.sample())
        throttled = clocks.throttled([before, self._timer.clocks()])
        return {
            **conditions(self._timer, lap, timed),
            "samples": [
                {"round": i, "us": us if math.isfinite(us) else None, "throttled": throttled}
                for i, us in enumerate(times)
            ],
        }


def what_it_is(impl: str, plan: DecodePlan) -> object:
    """What tells a plan from another of the same problem: all it came to, but not how its splits were asked for."""
    config = tuple(sorted((key, str(value)) for key, value in plan.config.items() if key != "num_splits"))
    return impl, config, getattr(plan, "split_counts", plan.config.get("num_splits"))
