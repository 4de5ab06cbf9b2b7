"""The deep check of one case: every entry's plan through every probe, and what distinguishes the right ones.

It runs in the worker, without timing. The probes are the outer loop, so that the tensors and the float64
reference of one probe serve all entries and are gone before the next one's are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.check import disagreement
from harness.inputs import make_inputs
from harness.probes import Examination, determinism, probes
from harness.steps import Steps
from harness.study import Entry
from harness.worker import Examine, Row
from impls.contract import DecodeImpl, DecodeOutput, DecodePlan
from impls.problem import DecodeProblem
from impls.reference import Reference


@dataclass
class Subject:
    """One entry's plan, and what is known of it so far.

    Args:
        entry: what was asked for.
        impl: the implementation.
        plan: for the case's problem.
        found: by the probes.
        output: of the first family's inputs.
        facts: of :func:`harness.probes.determinism`.
    """

    entry: Entry
    impl: DecodeImpl
    plan: DecodePlan
    found: Examination = field(default_factory=Examination)
    output: DecodeOutput | None = None
    facts: Mapping[str, int | None] = field(default_factory=dict)


class Examiner:
    """Answers :class:`harness.worker.Examine` tasks with one row an entry.

    Args:
        steps: how to do its steps.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def examine(self, task: Examine, settled: set[int]) -> None:
        """Send one row for each of the task's entries.

        Args:
            task: the case and its entries.
            settled: takes each entry whose row was sent.
        """
        problem, seed = task.case.problem, task.case.seed
        subjects: dict[int, Subject] = {}

        def tell(row: Row) -> None:
            self._steps.send(row)
            settled.add(row.who)
            subjects.pop(row.who, None)

        def step(who: int, what: str, action: Callable[..., Any], *arguments: Any) -> Any:
            """What the action returns; None after a row was sent in its place."""
            self._steps.at(who, what)
            outcome = self._steps.attempt(who, action, *arguments)
            if isinstance(outcome, Row):
                tell(outcome)
                return None
            return outcome

        for who, entry in task.entries.items():
            if (subject := step(who, "plan", self._subject, who, entry, problem)) is not None:
                subjects[who] = subject
        counts = [
            c for subject in subjects.values() if (c := getattr(subject.plan, "split_counts", None)) is not None
        ]
        first: Reference | None = None
        self._steps.at(None, "inputs and reference")
        if subjects:
            for probe in probes(problem, seed, self._steps.device, families=task.families, split_counts=counts):
                for who, subject in list(subjects.items()):
                    if (seen := step(who, probe.title, probe.apply, subject.plan)) is not None:
                        subject.found.add(probe, seen)
                        subject.output = subject.output or seen.output
                first = first or probe.reference
                self._steps.at(None, "inputs and reference")
        right = {who: subject for who, subject in subjects.items() if subject.found.caught is None}
        if right:
            inputs = make_inputs(problem, seed, self._steps.device, family=task.families[0], split_counts=counts)
            for who, subject in right.items():
                asked = (subject.impl, subject.entry.tuning, subject.plan, inputs)
                subject.facts = step(who, "determinism", determinism, *asked) or {}
        everyone = dict(subjects)
        for who, subject in everyone.items():
            tell(self._row(who, subject, everyone, first, problem))

    def _subject(self, who: int, entry: Entry, problem: DecodeProblem) -> Subject | Row:
        impl = self._steps.load(entry.impl)
        if rule := impl.unsupported(problem, self._steps.device):
            return Row(who=who, status="unsupported", reason=rule)
        return Subject(entry, impl, impl.plan(problem, self._steps.device, entry.tuning))

    def _row(
        self,
        who: int,
        subject: Subject,
        everyone: Mapping[int, Subject],
        ref: Reference | None,
        problem: DecodeProblem,
    ) -> Row:
        caught = subject.found.caught
        pairs = []
        if caught is None and ref is not None:
            pairs = [
                {
                    "impl": other.entry.impl,
                    "entry": number,
                    **disagreement(subject.output, other.output, ref, problem),
                }
                for number, other in everyone.items()
                if number != who and other.found.caught is None and subject.output and other.output
            ]
        return Row(
            who=who,
            status="ok" if caught is None else "wrong",
            reason=None if caught is None else f"{caught}: {subject.found.reason}",
            config=subject.plan.config,
            check={**subject.found.to_dict(), **subject.facts, "entry": who, "pairs": pairs},
        )
