"""Planning as an experiment: what it costs, and what it saves to have done it before the call.

Our plans are made on the host, from lengths that the host knows, and a call only launches. flash-attn 3 plans on
the device: a small kernel turns the lengths into a schedule. Its ``flash_attn_varlen_func`` takes no schedule and
launches that kernel in every call; ``flash_attn_with_kvcache`` takes one that ``get_scheduler_metadata`` made
before, and makes one itself where it is given none. So for the latter both can be timed, on the same pages.

Sources: ``flash_attn_interface.py`` of the Hopper build; ``hopper/flash_api.cpp``, where ``scheduler_metadata``
sets ``skip_scheduler_metadata_computation``, and the combine kernel, or a fill where nothing is split, resets the
counter in it for the next call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from harness.check import check_plan
from harness.cuda_timers import GraphTimer, host_times
from harness.inputs import input_sets
from harness.study import Case
from harness.trials import Trial, head, sample_together
from impls.catalog import OURS, load
from impls.contract import TORCH_DTYPES, DecodeInputs, DecodeOutput, DecodePlan, ImplUnavailable, Scalar
from impls.problem import DecodeProblem
from impls.reference import reference

PAGE = 64
"""Keys of a page; the packed K and V are looked at as pages, and nothing is copied."""

PAGED = f"flash-attn-3 kvcache, page {PAGE}"
"""What the paged function is called in the trials; ``flash-attn-3`` is the varlen function of the catalog."""

VARLEN = "flash-attn-3"

REPEATS = 20
"""Plans, and whole calls, of which the median is taken."""

REASON_CHARS = 200
"""Where a reason is cut."""

Makers: TypeAlias = Mapping[tuple[str, str], Callable[[], DecodePlan]]
"""(implementation, ``before``, ``inside`` or ``alone``) -> what makes the plan."""


class FewRoundsTimer(GraphTimer):
    """``graph`` in 20 rounds, settled or not: what planning saves is whole microseconds."""

    max_rounds = GraphTimer.min_rounds


class PagedPlan:
    """flash-attn 3 on pages; see :class:`impls.contract.DecodePlan`.

    Args:
        library: the module ``flash_attn_interface``.
        problem: of sequences that fill their pages.
        device: a CUDA device.
        ahead: whether the schedule is made here; else the library makes one in every call.
    """

    def __init__(self, library: ModuleType, problem: DecodeProblem, device: torch.device, *, ahead: bool) -> None:
        self._library = library
        self._problem = problem
        lengths, table = page_table(problem)
        self._lengths = lengths.to(device)  # [B] int32
        self._table = table.to(device)  # [B, pages of the longest] int32
        self.config: Mapping[str, Scalar] = {"function": "flash_attn_with_kvcache", "page": PAGE, "ahead": ahead}
        self._schedule = self.schedule() if ahead else None

    def schedule(self) -> Tensor:
        """Launch the kernel that plans, and return what it makes: int32, of a size that the library knows."""
        p = self._problem
        made: Tensor = self._library.get_scheduler_metadata(
            p.batch,
            1,
            self._table.shape[1] * PAGE,  # the longest sequence that the pages can hold, as the call takes it
            p.heads_q,
            p.heads_kv,
            p.head_dim,
            self._lengths,
            qkv_dtype=TORCH_DTYPES[p.dtype],
            page_size=PAGE,
        )
        return made

    def new_output(self) -> None:
        """None: the library allocates its own output."""

    def workspaces(self) -> tuple[Tensor, ...]:
        """None that a check may fill: the schedule is a table."""
        return ()

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Call the library; ``out`` is not used."""
        p = self._problem
        result, lse, *_ = self._library.flash_attn_with_kvcache(
            inputs.q.unsqueeze(1),  # [B, 1, Hq, D]
            inputs.k.view(-1, PAGE, p.heads_kv, p.head_dim),
            inputs.v.view(-1, PAGE, p.heads_kv, p.head_dim),
            cache_seqlens=self._lengths,
            page_table=self._table,
            softmax_scale=p.softmax_scale,
            scheduler_metadata=self._schedule,
            return_softmax_lse=True,
        )
        return DecodeOutput(result.squeeze(1), lse.squeeze(-1))


class SchedulePlan(PagedPlan):
    """The kernel that plans, alone: each call makes a schedule, and no attention."""

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Launch it; returns q itself as a stand-in for an output."""
        self._made = self.schedule()  # kept, so that the graph's memory is
        return DecodeOutput(inputs.q, None)


def page_table(problem: DecodeProblem) -> tuple[Tensor, Tensor]:
    """Lengths ``[B]`` and the pages of each sequence ``[B, pages of the longest]``, int32, on the CPU.

    Places past a sequence's end name page 0 and are not read.

    Raises:
        ValueError: for a sequence that does not fill its pages: the next would not begin with one.
    """
    for b, n in enumerate(problem.kv_lens):
        if n % PAGE or not n:
            raise ValueError(f"kv_lens[{b}]: expected a multiple of {PAGE} above 0 (whole pages), got {n}")
    table = torch.zeros((problem.batch, problem.max_kv // PAGE), dtype=torch.int32)
    for b, n in enumerate(problem.kv_lens):
        first = problem.cu_seqlens[b] // PAGE
        table[b, : n // PAGE] = torch.arange(first, first + n // PAGE, dtype=torch.int32)
    return torch.tensor(problem.kv_lens, dtype=torch.int32), table


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
    try:
        varlen = load(VARLEN)
    except ImplUnavailable as error:
        return makers, {VARLEN: str(error)}
    if (rule := varlen.unsupported(problem, device)) is not None:
        return makers, {VARLEN: rule}
    makers[VARLEN, "inside"] = partial(varlen.plan, problem, device)
    try:
        page_table(problem)
    except ValueError as error:
        return makers, {PAGED: str(error)}
    library = import_module("flash_attn_interface")
    makers[PAGED, "before"] = partial(PagedPlan, library, problem, device, ahead=True)
    makers[PAGED, "inside"] = partial(PagedPlan, library, problem, device, ahead=False)
    makers[PAGED, "alone"] = partial(SchedulePlan, library, problem, device, ahead=False)
    return makers, {}


def _plan_us(name: str, problem: DecodeProblem, device: torch.device, makers: Makers) -> float | None:
    """A plan for other lengths of the same batch size, warm; None where planning is no step of its own."""
    if name in OURS:
        # One key less each, and as many pages or blocks: what the next step of a server asks for.
        other = replace(problem, kv_lens=tuple(abs(n - 1) for n in problem.kv_lens))
        return _wait_us(partial(load(name).plan, other, device))
    if (name, "before") in makers:
        plan: Any = makers[name, "before"]()
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
