"""Planning as an experiment: what it costs, and what it saves to have done it before the call.

Our plans are made on the host, from lengths that the host knows, and a call only launches. flash-attn 3 plans on
the device: a small kernel turns the lengths into a schedule. Its ``flash_attn_varlen_func`` takes no schedule and
launches that kernel in every call; ``flash_attn_with_kvcache`` takes one that ``get_scheduler_metadata`` made
before, and makes one itself where it is given none. So for the latter both can be timed, on the same pages.

Sources: ``flash_attn_interface.py`` of the Hopper build; :class:`impls.flash_attn.FlashAttn3Paged`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from harness.check import check_plan
from harness.cuda_timers import GraphTimer, host_times
from harness.inputs import input_sets
from harness.study import Case
from harness.trials import REASON_CHARS, Trial, head, sample_together
from impls.catalog import OURS, load
from impls.contract import DecodeInputs, DecodeOutput, DecodePlan, ImplUnavailable, Scalar
from impls.flash_attn import FlashAttn3Paged
from impls.paged_plan import Pages
from impls.problem import DecodeProblem
from impls.reference import reference

VARLEN, PAGED = "flash-attn-3", "flash-attn-3-paged"
"""The functions of flash-attn 3 by their ids."""

REPEATS = 20
"""Plans, and whole calls, of which the median is taken."""

Makers: TypeAlias = Mapping[tuple[str, str], Callable[[], DecodePlan]]
"""(implementation, ``before``, ``inside`` or ``alone``) -> what makes the plan."""


class FewRoundsTimer(GraphTimer):
    """``graph`` in 20 rounds, settled or not: what planning saves is whole microseconds."""

    max_rounds = GraphTimer.min_rounds


class SchedulePlan:
    """The kernel that plans, alone: each call makes a schedule, and no attention.

    Args:
        impl: whose.
        problem: of sequences that are whole pages.
        device: a CUDA device.
    """

    def __init__(self, impl: FlashAttn3Paged, problem: DecodeProblem, device: torch.device) -> None:
        self.config: Mapping[str, Scalar] = {"function": "get_scheduler_metadata"}
        self._impl = impl
        self._problem = problem
        self._pages = Pages.of(problem, device, impl.page_size)

    def schedule(self) -> object:
        """Launch it; returns what it makes."""
        return self._impl.schedule(self._problem, self._pages)

    def new_output(self) -> None:
        """None: there is no output."""

    def workspaces(self) -> tuple[Tensor, ...]:
        """None: the schedule is made anew in every call."""
        return ()

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Launch it; returns q itself as a stand-in for an output."""
        self._made = self.schedule()  # kept, so that the graph's memory is
        return DecodeOutput(inputs.q, None)


def planning(case: Case, device: torch.device) -> Iterator[Trial]:
    """Our kernels and both functions of flash-attn 3: planning, and calls with it done before and inside.

    A trial holds ``plan_us`` (host time until a plan for other lengths is made and its device work is done),
    ``before`` and ``inside`` (samples of the device's time, by round, with the plan made before the call and
    inside of it), ``kernels`` (of a call, for each of the two), ``alone`` (samples of the kernel that plans) and
    ``host`` (what a caller waits for a whole call, for each of the two). What there is none of is None.
    """
    problem = case.problem
    timer = FewRoundsTimer(device)
    sets = input_sets(problem, case.seed, device, timer.sets(problem))
    ref = reference(sets[0])
    makers, refused = _makers(problem, device)
    for name, reason in refused.items():
        yield {**head(case, name, "planning"), "reason": reason[:REASON_CHARS]}
    for (name, when), make in list(makers.items()):
        if when == "alone" or (name, when) not in makers:
            continue
        if not (result := check_plan(make(), sets[0], ref)).ok:
            yield {
                **head(case, name, "planning"),
                "reason": f"wrong, planned {when}: {result.reason}"[:REASON_CHARS],
            }
            makers = {key: value for key, value in makers.items() if key[0] != name}
    taken = dict(zip(makers, sample_together(timer, sets, list(makers.values())), strict=True))
    for name in dict.fromkeys(name for name, _ in makers):
        mine = {when: found for (whose, when), found in taken.items() if whose == name}
        yield {
            **head(case, name, "planning"),
            "plan_us": _plan_us(name, problem, device, makers),
            **{when: mine[when].us if when in mine else None for when in ("before", "inside", "alone")},
            "kernels": {when: mine[when].kernels if when in mine else None for when in ("before", "inside")},
            "host": _host(name, problem, device, makers, sets[0]),
        }


def _makers(problem: DecodeProblem, device: torch.device) -> tuple[Makers, dict[str, str]]:
    """What there is to time: (name, when it plans) -> plan; and name -> why not."""
    makers: dict[tuple[str, str], Callable[[], DecodePlan]] = {
        (name, "before"): partial(load(name).plan, problem, device) for name in OURS
    }
    refused: dict[str, str] = {}
    for name in (VARLEN, PAGED):
        try:
            impl = load(name)
        except ImplUnavailable as error:
            refused[name] = str(error)
            continue
        if (rule := impl.unsupported(problem, device)) is not None:
            refused[name] = rule
        elif isinstance(impl, FlashAttn3Paged):
            makers[name, "before"] = partial(impl.plan, problem, device, {"scheduled_by": "plan"})
            makers[name, "inside"] = partial(impl.plan, problem, device, {"scheduled_by": "call"})
            makers[name, "alone"] = partial(SchedulePlan, impl, problem, device)
        else:
            makers[name, "inside"] = partial(impl.plan, problem, device)
    return makers, refused


def _plan_us(name: str, problem: DecodeProblem, device: torch.device, makers: Makers) -> float | None:
    """A plan for other lengths of the same batch size, warm; None where planning is no step of its own."""
    if name in OURS:
        # One key less each, and as many pages or blocks: what the next step of a server asks for.
        other = replace(problem, kv_lens=tuple(abs(n - 1) for n in problem.kv_lens))
        return _wait_us(partial(load(name).plan, other, device))
    if (name, "alone") in makers:
        plan = makers[name, "alone"]()
        assert isinstance(plan, SchedulePlan)
        return _wait_us(plan.schedule)
    return None


def _host(
    name: str, problem: DecodeProblem, device: torch.device, makers: Makers, inputs: DecodeInputs
) -> dict[str, float | None]:
    found: dict[str, float | None] = {"before": None, "inside": None}
    for when in ("before", "inside"):
        if (name, when) in makers:
            found[when] = host_times(makers[name, when](), [inputs], REPEATS)["end_to_end_us"]
    if name in OURS:
        impl = load(name)
        output = impl.plan(problem, device).new_output()
        found["inside"] = _wait_us(lambda: impl.plan(problem, device).run(inputs, output))
    return found


def _wait_us(action: Callable[[], object]) -> float:
    """The median time until an action, and what it launched on an idle device, is done."""
    taken = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6
