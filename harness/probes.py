"""Probes: everything a plan is put through before its results are believed.

One output that is right on one input proves little: a kernel may have cached it, may have read memory that
happened to hold zeros, may work once, or may be wrong on inputs that look otherwise. A probe is one such
experiment on one plan. All of them judge by :func:`harness.check.compare`, so that no probe has a tolerance
of its own.

``values``
    One for each family of inputs (:data:`harness.inputs.FAMILIES`): outputs and workspaces NaN-filled, canary
    bands around outputs, inputs unchanged. As the same plan meets one family after another, with fresh
    buffers each time, an answer that was kept from before is wrong here.
``again``
    Another seed of the first family.
``memory``
    K and V lie between guard rows of NaN, and half of the sequences are NaN too: those whose index has a
    certain bit set, then those that have it clear, for each bit of an index. So every sequence is right beside
    NaN in each other one at least once, in ``2 log2(batch)`` runs instead of ``batch``. The outputs of the
    sequences that are left must not change by a bit.
``graph``
    On CUDA, the plan is captured in a graph on some inputs; their buffers are then overwritten by others, the
    outputs and workspaces NaN-filled, and the graph replayed.
``repeat``
    The same input again and again, until a million output elements have been seen: every output that is not
    bitwise that of the first run is judged, so that rare races show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.check import CheckResult, compare, poison_workspaces, run_checked, same_bits
from harness.inputs import FAMILIES, GUARD_ROWS, make_inputs
from harness.timing import CaptureFailed
from impls.contract import DecodeInputs, DecodeOutput, DecodePlan
from impls.problem import DecodeProblem
from impls.reference import Reference, reference

REPEAT_OUTPUTS = 1_000_000
"""Output elements that the ``repeat`` probe wants to see on a GPU."""

REPEAT_RUNS = 3
"""Runs of the ``repeat`` probe elsewhere: without threads there are no races."""


@dataclass(frozen=True)
class Observation:
    """What a probe saw.

    Args:
        result: the verdict.
        output: what the plan returned, where the probe judges one run.
        deterministic: whether all runs on one input were bitwise equal; None where there was one run.
    """

    result: CheckResult
    output: DecodeOutput | None = None
    deterministic: bool | None = None


@dataclass(frozen=True)
class Probe:
    """One experiment.

    Args:
        family: of its inputs.
        name: ``values``, ``again``, ``memory``, ``graph`` or ``repeat``.
        apply: puts one plan through it. Exceptions of the plan are the caller's to handle.
        reference: of the inputs whose output is judged.
    """

    family: str
    name: str
    apply: Callable[[DecodePlan], Observation]
    reference: Reference

    @property
    def title(self) -> str:
        """The family, and the experiment where it is not the plain one."""
        return self.family if self.name == "values" else f"{self.family} {self.name}"


def probes(
    problem: DecodeProblem,
    seed: int,
    device: torch.device,
    *,
    families: Sequence[str] = tuple(FAMILIES),
    split_counts: Sequence[Sequence[int]] = (),
    repeat_outputs: int | None = None,
) -> Iterator[Probe]:
    """All probes of one problem, one after the other, so that the tensors of one at a time are held.

    Args:
        problem: what the plans were made for.
        seed: of the inputs.
        device: where they are made.
        families: keys of :data:`harness.inputs.FAMILIES`; the probes beside ``values`` use the first.
        split_counts: how the plans cut the sequences, for the needles.
        repeat_outputs: output elements for ``repeat``; None takes :data:`REPEAT_OUTPUTS` on CUDA and
            :data:`REPEAT_RUNS` runs elsewhere.

    Raises:
        KeyError: for an unknown family.
    """
    for number, family in enumerate(families):
        inputs = make_inputs(problem, seed, device, family=family, split_counts=split_counts)
        ref = reference(inputs)
        yield Probe(family, "values", _values(inputs, ref), ref)
        if number:
            continue
        other = make_inputs(problem, (seed + 1) % 2**63, device, family=family, split_counts=split_counts)
        other_ref = reference(other)
        yield Probe(family, "again", _values(other, other_ref), other_ref)
        for hidden in hidden_sequences(problem.batch):
            masked = _masked(ref, hidden)
            yield Probe(family, "memory", _memory(inputs, masked, hidden), masked)
        if device.type == "cuda":
            yield Probe(family, "graph", _graph(other, inputs, ref), ref)
        elements = max(1, problem.batch * problem.heads_q * problem.head_dim)
        wanted = REPEAT_OUTPUTS if repeat_outputs is None and device.type == "cuda" else repeat_outputs
        runs = REPEAT_RUNS if wanted is None else max(2, math.ceil(wanted / elements))
        yield Probe(family, "repeat", _repeat(inputs, ref, runs), ref)


def hidden_sequences(batch: int) -> list[list[bool]]:
    """Which sequences hold NaN, run by run.

    For any two sequences there is a run in which the first is hidden and the second is not. The first run
    hides none: there only the guard rows are NaN.
    """
    bits = max(0, batch - 1).bit_length()
    runs = [[bool(b >> bit & 1) == wanted for b in range(batch)] for bit in range(bits) for wanted in (True, False)]
    return [[False] * batch, *runs]


def _values(inputs: DecodeInputs, ref: Reference) -> Callable[[DecodePlan], Observation]:
    def apply(plan: DecodePlan) -> Observation:
        result, output = run_checked(plan, inputs, ref)
        return Observation(result, output)

    return apply


def _masked(ref: Reference, hidden: Sequence[bool]) -> Reference:
    """The reference where hidden sequences have no answer: their rows are not judged."""
    rows = torch.tensor(hidden, device=ref.out.device)[:, None, None]
    return replace(ref, out=torch.where(rows, torch.nan, ref.out))


def _memory(inputs: DecodeInputs, ref: Reference, hidden: Sequence[bool]) -> Callable[[DecodePlan], Observation]:
    problem = inputs.problem
    rows = torch.tensor(hidden, device=inputs.device)
    lens = torch.tensor(problem.kv_lens, dtype=torch.int64, device=inputs.device)
    hidden_rows = rows.repeat_interleave(lens, output_size=problem.total_kv)[:, None, None]
    views: list[Tensor] = []
    for t in (inputs.k, inputs.v):
        buffer = t.new_empty((len(t) + 2 * GUARD_ROWS, *t.shape[1:]))
        buffer[:GUARD_ROWS] = torch.nan
        buffer[GUARD_ROWS + len(t) :] = torch.nan
        views.append(buffer[GUARD_ROWS : GUARD_ROWS + len(t)])
        torch.where(hidden_rows, t.new_tensor(torch.nan), t, out=views[-1])
    alone = replace(inputs, k=views[0], v=views[1])
    kept = ~rows

    def rows_of(output: DecodeOutput) -> DecodeOutput:
        return DecodeOutput(output.out[kept], None if output.lse is None else output.lse[kept])

    def apply(plan: DecodePlan) -> Observation:
        result, output = run_checked(plan, alone, ref)
        if result.ok:
            plain = [rows_of(_fresh_run(plan, inputs)) for _ in range(2)]
            if same_bits(*plain) and not same_bits(plain[0], rows_of(output)):
                reason = "memory: expected the same bits whatever lies in other sequences, got others"
                result = replace(result, ok=False, reason=reason)
        elif result.reason:
            result = replace(result, reason=f"NaN in {sum(hidden)} other sequences and around: {result.reason}")
        return Observation(result)

    return apply


def _fresh_run(plan: DecodePlan, inputs: DecodeInputs) -> DecodeOutput:
    """One run into NaN-filled memory that nobody else holds."""
    out = plan.new_output()
    if out is not None:
        out.out.fill_(torch.nan)
        if out.lse is not None:
            out.lse.fill_(torch.nan)
    poison_workspaces(plan)
    return plan.run(inputs, out)


def _repeat(inputs: DecodeInputs, ref: Reference, runs: int) -> Callable[[DecodePlan], Observation]:
    def apply(plan: DecodePlan) -> Observation:
        first = _fresh_run(plan, inputs)
        result = compare(first, ref, inputs.problem)
        differing = 0
        for number in range(1, runs):
            output = _fresh_run(plan, inputs)
            if same_bits(first, output):
                continue
            differing += 1
            judged = compare(output, ref, inputs.problem)
            if not judged.ok:
                reason = f"run {number + 1} of {runs} on the same input: {judged.reason}"
                return Observation(replace(judged, reason=reason), deterministic=False)
        return Observation(result, deterministic=differing == 0)

    return apply


def _graph(before: DecodeInputs, after: DecodeInputs, ref: Reference) -> Callable[[DecodePlan], Observation]:
    static = replace(before, q=before.q.clone(), k=before.k.clone(), v=before.v.clone())

    def overwrite(values: DecodeInputs) -> None:
        static.q.copy_(values.q)
        static.k.copy_(values.k)
        static.v.copy_(values.v)

    def apply(plan: DecodePlan) -> Observation:
        overwrite(before)
        out = plan.new_output()
        # Libraries create handles and load modules on first use of a stream: not while it is captured.
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            plan.run(static, out)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                captured = plan.run(static, out)
        except Exception as error:
            raise CaptureFailed(f"CUDA graph capture: {type(error).__name__}: {error}") from error
        result = None
        for _ in range(2):  # the second finds what the first left behind
            overwrite(after)
            captured.out.fill_(torch.nan)
            if captured.lse is not None:
                captured.lse.fill_(torch.nan)
            poison_workspaces(plan)
            graph.replay()
            torch.cuda.synchronize()
            result = compare(captured, ref, after.problem)
            if not result.ok:
                return Observation(replace(result, reason=f"replayed from a CUDA graph: {result.reason}"))
        assert result is not None
        return Observation(result)

    return apply
