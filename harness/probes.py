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
    The plan runs on inputs of the first family, whose tensors are then overwritten by those of another seed: an
    answer that is remembered by where its inputs lie is wrong here.
``memory``
    K and V lie between guard rows of NaN, and half of the sequences are NaN too: those whose index has a
    certain bit set, then those that have it clear, for each bit of an index. So every sequence is right beside
    NaN in each other one at least once, in ``2 log2(batch)`` runs instead of ``batch``. Then the same rows hold
    large numbers: a maximum leaves NaN out (``fmax``), and so does a comparison. The outputs of the sequences that
    are left must be right both times, and the same to the bit.
``layout``
    The inputs as views: Q cut out of wider rows, K and V from one buffer, K and V with strides of their own. The
    answer must be right, or the layout refused by name (:class:`impls.contract.InputError`).
``graph``
    On CUDA, the plan is captured in a graph on some inputs; their buffers are then overwritten by others, the
    outputs and workspaces NaN-filled, and the graph replayed.
``repeat``
    The same input again and again, until a million output elements have been seen: every output that is not
    bitwise that of the first run is judged, so that rare races show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

import torch

from harness.check import CheckResult, compare, poison_workspaces, run_checked, same_bits, ulp_distance
from harness.inputs import FAMILIES, LAYOUTS, guard, guarded_buffer, make_inputs
from harness.timing import CaptureFailed
from impls.contract import DecodeImpl, DecodeInputs, DecodeOutput, DecodePlan, InputError, PlanRefused, Scalar
from impls.problem import DecodeProblem
from impls.reference import Reference, reference

REPEAT_OUTPUTS = 1_000_000
"""Output elements that the ``repeat`` probe wants to see on a GPU."""

REPEAT_RUNS = 3
"""Runs of the ``repeat`` probe elsewhere: without threads there are no races."""


STEADY_RUNS = 8
"""Runs of each kind, in turns, that must agree among themselves before a difference between the kinds counts."""

LOUD = 2.0**10
"""What other rows hold instead of NaN, with alternating sign: every query scores one of two such rows very high."""

VIEWS = (
    ("sliced", "packed", "packed"),
    ("packed", "interleaved", "interleaved"),
    ("packed", "heads-first", "interleaved"),
)
"""The layouts (:data:`harness.inputs.LAYOUTS`) of Q, K and V in each run of ``layout``."""


REFUSED = CheckResult(
    ok=True,
    reason=None,
    rel_l2=0.0,
    worst_row=0.0,
    lse_err=0.0,
    finite=True,
    worst_element=0.0,
    worst_lse=0.0,
    rel_row=0.0,
)
"""The verdict on a layout that is refused by name: right, and off by nothing."""


@dataclass(frozen=True)
class Observation:
    """What a probe saw.

    Args:
        result: the verdict.
        output: what the plan returned, where the probe judges one run.
        spread: the largest distance between runs on one input, in representable values of the output; None
            where there was one run, or a NaN.
    """

    result: CheckResult
    output: DecodeOutput | None = None
    spread: int | None = None


@dataclass(frozen=True)
class Probe:
    """One experiment.

    Args:
        family: of its inputs.
        name: ``values``, ``again``, ``memory``, ``layout``, ``graph`` or ``repeat``.
        apply: puts one plan through it. Exceptions of the plan are the caller's to handle.
        reference: of the inputs whose output is judged.
    """

    family: str
    name: str
    apply: Callable[[DecodePlan], Observation]
    reference: Reference

    @property
    def title(self) -> str:
        """What reports call it."""
        return title(self.family, self.name)


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
        restore = _restorer(inputs)
        of_family = _of_family(problem, seed, device, family, inputs, split_counts, repeat_outputs)
        for probe in islice(of_family, 1 if number else None):  # the first is ``values``
            yield replace(probe, apply=_after(restore, probe.apply))
            restore()  # what the last plan did to them must not reach the copies that the next probe makes


def _of_family(
    problem: DecodeProblem,
    seed: int,
    device: torch.device,
    family: str,
    inputs: DecodeInputs,
    split_counts: Sequence[Sequence[int]],
    repeat_outputs: int | None,
) -> Iterator[Probe]:
    """All probes of one family, ``values`` first; each may leave ``inputs`` modified."""
    ref = reference(inputs)
    yield Probe(family, "values", _values(inputs, ref), ref)
    other = make_inputs(problem, (seed + 1) % 2**63, device, family=family, split_counts=split_counts)
    other_ref = reference(other)
    yield Probe(family, "again", _again(inputs, other, other_ref), other_ref)
    for hidden in hidden_sequences(problem.batch):
        masked = _masked(ref, hidden)
        yield Probe(family, "memory", _memory(inputs, masked, hidden), masked)
    for views in VIEWS:
        yield Probe(family, "layout", _layout(inputs, ref, views), ref)
    if device.type == "cuda":
        yield Probe(family, "graph", _graph(other, inputs, ref), ref)
    elements = max(1, problem.batch * problem.heads_q * problem.head_dim)
    wanted = REPEAT_OUTPUTS if repeat_outputs is None and device.type == "cuda" else repeat_outputs
    runs = REPEAT_RUNS if wanted is None else max(2, math.ceil(wanted / elements))
    yield Probe(family, "repeat", _repeat(inputs, ref, runs), ref)


class Examination:
    """What all probes said about one plan."""

    def __init__(self) -> None:
        self._seen: list[tuple[str, str, CheckResult]] = []
        self._spread: int | None = None

    def add(self, probe: Probe, seen: Observation) -> None:
        """Take an observation."""
        self._seen.append((probe.family, probe.name, seen.result))
        if probe.name == "repeat":
            self._spread = seen.spread

    @property
    def caught(self) -> str | None:
        """The title of the first probe that found a fault, or None."""
        return next((title(family, name) for family, name, result in self._seen if not result.ok), None)

    @property
    def reason(self) -> str | None:
        """What that probe found, or None."""
        return next((result.reason for _, _, result in self._seen if not result.ok), None)

    def to_dict(self) -> dict[str, Any]:
        """The record's ``check`` object: the worst of each number, then probe by probe."""
        results = [result for _, _, result in self._seen]
        return {
            **worst(results),
            "family": self.caught,
            "same_input_ulp": self._spread,
            "probes": [
                {
                    "family": family,
                    "probe": name,
                    "ok": all(result.ok for result in of_probe),
                    **worst(of_probe),
                    "reason": next((result.reason for result in of_probe if not result.ok), None),
                }
                for (family, name), of_probe in self._by_probe().items()
            ],
        }

    def _by_probe(self) -> dict[tuple[str, str], list[CheckResult]]:
        groups: dict[tuple[str, str], list[CheckResult]] = {}
        for family, name, result in self._seen:
            groups.setdefault((family, name), []).append(result)
        return groups


def title(family: str, name: str) -> str:
    """What a probe is called: its family, and the experiment where it is not the plain one."""
    return family if name == "values" else f"{family} {name}"


def worst(results: Sequence[CheckResult]) -> dict[str, Any]:
    """The largest of each number of several results, None where one of them could not be computed."""
    merged: dict[str, Any] = {"finite": all(result.finite for result in results)}
    for key in ("rel_l2", "worst_row", "lse_err", "worst_element", "worst_lse", "rel_row"):
        values = [getattr(result, key) for result in results]
        merged[key] = None if any(value is None for value in values) else max(values, default=None)
    return merged


def determinism(
    impl: DecodeImpl, tuning: Mapping[str, Scalar], plan: DecodePlan, inputs: DecodeInputs
) -> dict[str, int | None]:
    """Facts about one implementation, none of them a fault: how far its answer moves with what should not matter.

    Args:
        impl: the implementation.
        tuning: what the plan was asked for.
        plan: made for ``inputs.problem``.
        inputs: of any family.

    Returns:
        ``other_batch_ulp``: the longest sequence's output in this batch against the same sequence alone (in a
        batch of one: against two of it); ``one_split_ulp``: this plan against one that does not split, None
        where the implementation takes no such wish. Both are the largest distance of two output elements, in
        representable values between them.
    """
    problem = inputs.problem
    facts: dict[str, int | None] = {"other_batch_ulp": None, "one_split_ulp": None}
    if not problem.total_kv:
        return facts
    output = fresh_run(plan, inputs).out.clone()
    longest = max(range(problem.batch), key=problem.kv_lens.__getitem__)
    elsewhere = _elsewhere(inputs, longest)
    moved = fresh_run(impl.plan(elsewhere.problem, inputs.device, tuning), elsewhere).out
    facts["other_batch_ulp"] = ulp_distance(output[longest], moved[0])
    try:
        unsplit = impl.plan(problem, inputs.device, {**tuning, "num_splits": 1})
    except ValueError:  # not to be tuned
        return facts
    facts["one_split_ulp"] = ulp_distance(output, fresh_run(unsplit, inputs).out)
    return facts


def _elsewhere(inputs: DecodeInputs, b: int) -> DecodeInputs:
    """Sequence ``b`` alone, or twice where it is alone already."""
    problem = inputs.problem
    times = 2 if problem.batch == 1 else 1
    rows = slice(problem.cu_seqlens[b], problem.cu_seqlens[b + 1])
    shape = replace(problem, kv_lens=(problem.kv_lens[b],) * times)
    return DecodeInputs(
        problem=shape,
        q=inputs.q[b : b + 1].repeat(times, 1, 1),
        k=inputs.k[rows].repeat(times, 1, 1),
        v=inputs.v[rows].repeat(times, 1, 1),
        cu_seqlens_k=torch.tensor(shape.cu_seqlens, dtype=torch.int32, device=inputs.device),
    )


def hidden_sequences(batch: int) -> list[list[bool]]:
    """Which sequences hold NaN, run by run.

    For any two sequences there is a run in which the first is hidden and the second is not. The first run
    hides none: there only the guard rows are NaN.
    """
    bits = max(0, batch - 1).bit_length()
    runs = [[bool(b >> bit & 1) == wanted for b in range(batch)] for bit in range(bits) for wanted in (True, False)]
    return [[False] * batch, *runs]


def _restorer(inputs: DecodeInputs) -> Callable[[], None]:
    """Puts inputs back as they are now: a plan that modifies them must not spoil what others are tried on."""
    tensors = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_k)
    kept = [t.clone() for t in tensors]

    def restore() -> None:
        for t, old in zip(tensors, kept, strict=True):
            t.copy_(old)

    return restore


def _after(
    restore: Callable[[], None], apply: Callable[[DecodePlan], Observation]
) -> Callable[[DecodePlan], Observation]:
    """The same experiment, on inputs that are put back before it."""

    def restored(plan: DecodePlan) -> Observation:
        restore()
        return apply(plan)

    return restored


def _values(inputs: DecodeInputs, ref: Reference) -> Callable[[DecodePlan], Observation]:
    def apply(plan: DecodePlan) -> Observation:
        result, output = run_checked(plan, inputs, ref)
        return Observation(result, output)

    return apply


def _again(before: DecodeInputs, after: DecodeInputs, ref: Reference) -> Callable[[DecodePlan], Observation]:
    static, overwrite = _buffers(before)

    def apply(plan: DecodePlan) -> Observation:
        overwrite(before)
        fresh_run(plan, static)
        overwrite(after)
        result, output = run_checked(plan, static, ref)
        return Observation(result, output)

    return apply


def _buffers(like: DecodeInputs) -> tuple[DecodeInputs, Callable[[DecodeInputs], None]]:
    """Inputs of their own, and what overwrites their values."""
    static = replace(like, q=like.q.clone(), k=like.k.clone(), v=like.v.clone())
    return static, _overwriter(static)


def _overwriter(target: DecodeInputs) -> Callable[[DecodeInputs], None]:
    """Puts other values into a target's tensors."""

    def overwrite(values: DecodeInputs) -> None:
        target.q.copy_(values.q)
        target.k.copy_(values.k)
        target.v.copy_(values.v)

    return overwrite


def _masked(ref: Reference, hidden: Sequence[bool]) -> Reference:
    """The reference where hidden sequences have no answer: their rows are not judged."""
    rows = torch.tensor(hidden, device=ref.out.device)[:, None, None]
    return replace(ref, out=torch.where(rows, torch.nan, ref.out))


def _memory(inputs: DecodeInputs, ref: Reference, hidden: Sequence[bool]) -> Callable[[DecodePlan], Observation]:
    alone = replace(guard(inputs), q=inputs.q.clone())
    kept = torch.tensor([not h for h in hidden], device=inputs.device)
    seen = [rows for rows, h in zip(pairwise(inputs.problem.cu_seqlens), hidden, strict=True) if not h]

    def rows_of(output: DecodeOutput) -> DecodeOutput:
        return DecodeOutput(output.out[kept], None if output.lse is None else output.lse[kept])

    def surround(fill: float) -> None:
        alone.q.copy_(inputs.q)
        for t, values in ((alone.k, inputs.k), (alone.v, inputs.v)):
            everything = guarded_buffer(t)
            everything[::2] = fill
            everything[1::2] = -fill
            for start, stop in seen:
                t[start:stop] = values[start:stop]

    def apply(plan: DecodePlan) -> Observation:
        def beside(fill: float) -> DecodeOutput:
            surround(fill)
            return rows_of(fresh_run(plan, alone))

        for what, fill in (("NaN", math.nan), (f"+-{LOUD:g}", LOUD)):
            surround(fill)
            result, _ = run_checked(plan, alone, ref)
            if not result.ok:
                where = f"{what} in {sum(hidden)} other sequences and around"
                return Observation(replace(result, reason=f"{where}: {result.reason}"))
        # In the very same memory: where a tensor lies may decide which kernel a library takes.
        if _differ_steadily(partial(beside, math.nan), partial(beside, LOUD)):
            reason = "memory: expected the same bits whatever lies in other sequences, got others"
            result = replace(result, ok=False, reason=reason)
        return Observation(result)

    return apply


def _layout(
    inputs: DecodeInputs, ref: Reference, views: tuple[str, str, str]
) -> Callable[[DecodePlan], Observation]:
    of_q, of_k, of_v = views
    arranged = {name: LAYOUTS[name](inputs.k, inputs.v) for name in {of_k, of_v}}
    q = LAYOUTS[of_q](inputs.q, inputs.q)[0]
    viewed = replace(inputs, q=q, k=arranged[of_k][0], v=arranged[of_v][1])
    restore = _restorer(viewed)
    told = ", ".join(f"{name} {of}" for name, of in zip("QKV", views, strict=True) if of != "packed")

    def apply(plan: DecodePlan) -> Observation:
        restore()
        try:
            result, _ = run_checked(plan, viewed, ref)
        except (InputError, PlanRefused):
            return Observation(REFUSED)
        return Observation(result if result.ok else replace(result, reason=f"{told}: {result.reason}"))

    return apply


def _differ_steadily(one: Callable[[], DecodeOutput], other: Callable[[], DecodeOutput]) -> bool:
    """Whether two runs give two outputs, each always its own: a kernel whose answers vary depends on neither."""
    first, second = one(), other()
    if same_bits(first, second):
        return False
    return all(same_bits(first, one()) and same_bits(second, other()) for _ in range(STEADY_RUNS - 1))


def fresh_run(plan: DecodePlan, inputs: DecodeInputs) -> DecodeOutput:
    """One run, unjudged, into NaN-filled memory that nobody else holds."""
    out = plan.new_output()
    if out is not None:
        _poison_output(out)
    poison_workspaces(plan)
    return plan.run(inputs, out)


def _poison_output(output: DecodeOutput) -> None:
    """Fill an output with NaN."""
    output.out.fill_(torch.nan)
    if output.lse is not None:
        output.lse.fill_(torch.nan)


def _repeat(inputs: DecodeInputs, ref: Reference, runs: int) -> Callable[[DecodePlan], Observation]:
    def apply(plan: DecodePlan) -> Observation:
        first = fresh_run(plan, inputs)
        result = compare(first, ref, inputs.problem)
        spread: int | None = 0
        for number in range(1, runs):
            output = fresh_run(plan, inputs)
            if same_bits(first, output):
                continue
            judged = compare(output, ref, inputs.problem)
            if not judged.ok:
                return Observation(
                    replace(judged, reason=f"run {number + 1} of {runs} on the same input: {judged.reason}")
                )
            distance = ulp_distance(first.out, output.out)
            spread = None if spread is None or distance is None else max(spread, distance)
        return Observation(result, spread=spread)

    return apply


def _graph(before: DecodeInputs, after: DecodeInputs, ref: Reference) -> Callable[[DecodePlan], Observation]:
    static, overwrite = _buffers(before)

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
            _poison_output(captured)
            poison_workspaces(plan)
            graph.replay()
            torch.cuda.synchronize()
            result = compare(captured, ref, after.problem)
            if not result.ok:
                return Observation(replace(result, reason=f"replayed from a CUDA graph: {result.reason}"))
        assert result is not None
        return Observation(result)

    return apply
