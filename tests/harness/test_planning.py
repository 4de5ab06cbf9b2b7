"""Planning as an experiment: what is passed to flash-attn 3, and what a trial says, with a stand-in for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import planning
from harness.study import Case
from impls.contract import DecodeImpl, DecodeInputs, DecodeOutput, DecodePlan, ImplUnavailable
from impls.flash_attn import SCHEDULED_BY, FlashAttn3Paged
from impls.paged_plan import check_pages
from impls.problem import DecodeProblem
from impls.reference import reference
from tests.harness import fakes

CPU = torch.device("cpu")
PROBLEM = DecodeProblem(kv_lens=(128, 64), heads_q=4, heads_kv=2, head_dim=64, dtype="float16")
CASE = Case(name="case", problem=PROBLEM, seed=3)


class Library:
    """``flash_attn_interface`` of the Hopper build, as far as it is called; its arguments have the real names."""

    def __init__(self, wrong: bool = False) -> None:
        self.wrong = wrong
        self.scheduled: list[dict[str, Any]] = []
        self.schedules: list[Tensor | None] = []

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: Tensor,
        qkv_dtype: torch.dtype = torch.bfloat16,
        page_size: int | None = None,
        num_splits: int = 0,
    ) -> Tensor:
        self.scheduled.append({key: value for key, value in locals().items() if key != "self"})
        return torch.zeros(13, dtype=torch.int32)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        page_table: Tensor,
        softmax_scale: float,
        scheduler_metadata: Tensor | None,
        num_splits: int,
        return_softmax_lse: bool,
    ) -> tuple[Tensor, ...]:
        assert return_softmax_lse
        self.schedules.append(scheduler_metadata)
        lengths = cache_seqlens.tolist()
        rows = [
            [x[page_table[b, : -(-n // x.shape[1])].long()].flatten(0, 1)[:n] for b, n in enumerate(lengths)]
            for x in (k_cache, v_cache)
        ]
        problem = DecodeProblem(
            kv_lens=tuple(lengths),
            heads_q=q.shape[2],
            heads_kv=k_cache.shape[2],
            head_dim=q.shape[3],
            dtype="float16",
            scale=softmax_scale,
        )
        starts = torch.tensor(problem.cu_seqlens, dtype=torch.int32)
        found = reference(DecodeInputs(problem, q.squeeze(1), torch.cat(rows[0]), torch.cat(rows[1]), starts))
        out = found.out.to(q.dtype) * (2 if self.wrong else 1)
        return out.unsqueeze(1), found.lse.float().unsqueeze(-1), torch.empty(0), torch.empty(0)


def paged(library: Library, monkeypatch: pytest.MonkeyPatch) -> FlashAttn3Paged:
    """The adapter of the catalog around the stand-in, on the CPU."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
    impl = FlashAttn3Paged()
    monkeypatch.setattr(impl, "unsupported", lambda problem, device: check_pages(problem, impl.page_size))
    return impl


@pytest.mark.parametrize("scheduled_by", SCHEDULED_BY)
def test_the_paged_call_takes_the_schedule_made_before_or_none(
    scheduled_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    inputs = planning.input_sets(PROBLEM, 3, CPU, 1)[0]
    plan = paged(library, monkeypatch).plan(PROBLEM, CPU, {"scheduled_by": scheduled_by})
    assert planning.check_plan(plan, inputs, reference(inputs)).ok
    ahead = scheduled_by == "plan"
    assert len(library.scheduled) == ahead
    assert library.schedules
    assert all((schedule is not None) == ahead for schedule in library.schedules)
    assert plan.config["scheduler_metadata"] == f"made by {scheduled_by}"


class Varlen(fakes.Right):
    """flash-attn 3's varlen function."""


class Unavailable(fakes.Right):
    def __init__(self) -> None:
        raise ImplUnavailable("import flash_attn_interface: not here")


class RoundsOfWall(fakes.Timer):
    renews = False


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, dict[str, Any]]]:
    """The experiment on a CPU: fake kernels of ours, a stand-in library, a fake timer, nothing to wait for."""

    def experiment(case: Case = CASE, varlen: type[fakes.Right] = Varlen, wrong: bool = False) -> dict[str, Any]:
        def load(name: str) -> DecodeImpl:
            if name == planning.PAGED:
                if varlen is Unavailable:  # both are of one library
                    return Unavailable()
                return paged(Library(wrong), monkeypatch)
            return varlen() if name == planning.VARLEN else fakes.Right()

        def host_times(plan: DecodePlan, sets: Sequence[DecodeInputs], calls: int) -> dict[str, float]:
            plan.run(sets[0], plan.new_output())
            return {"launch_us": 10.0, "end_to_end_us": 30.0}

        monkeypatch.setattr(planning, "load", load)
        monkeypatch.setattr(planning, "FewRoundsTimer", RoundsOfWall)
        monkeypatch.setattr(planning, "host_times", host_times)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(fakes.Lap, "sample", lambda self: 20.0)
        return {trial["impl"]: trial for trial in planning.planning(case, CPU)}

    return experiment


def test_a_trial_has_both_ways_of_planning_side_by_side(run: Callable[..., dict[str, dict[str, Any]]]) -> None:
    trials = run()
    assert list(trials) == [*planning.OURS, planning.VARLEN, planning.PAGED]
    ours, varlen, paged = (trials[name] for name in ("triton-splitkv", planning.VARLEN, planning.PAGED))
    assert ours["before"] == [20.0] * 4
    assert ours["inside"] is ours["alone"] is None
    assert ours["plan_us"] > 0
    assert ours["host"]["before"] == 30.0
    assert ours["host"]["inside"] > 0
    assert (varlen["before"], varlen["plan_us"], varlen["host"]) == (None, None, {"before": None, "inside": 30.0})
    assert varlen["kernels"] == {"before": None, "inside": 2}
    for when in ("before", "inside", "alone"):
        assert paged[when] == [20.0] * 4
    assert paged["plan_us"] > 0
    assert paged["host"] == {"before": 30.0, "inside": 30.0}
    assert {trial["experiment"] for trial in trials.values()} == {"planning"}


def test_lengths_that_are_no_whole_pages_leave_the_paged_function_out(
    run: Callable[..., dict[str, dict[str, Any]]],
) -> None:
    trials = run(Case(name="odd", problem=DecodeProblem(kv_lens=(65,), heads_q=2, heads_kv=1, head_dim=64), seed=0))
    assert trials[planning.PAGED]["reason"].startswith("kv_lens: expected multiples of 64")
    assert "before" not in trials[planning.PAGED]
    assert trials[planning.VARLEN]["inside"] == [20.0] * 4


def test_without_the_library_ours_remain(run: Callable[..., dict[str, dict[str, Any]]]) -> None:
    trials = run(varlen=Unavailable)
    for name in (planning.VARLEN, planning.PAGED):
        assert trials[name]["reason"] == "import flash_attn_interface: not here"
    assert {name for name, trial in trials.items() if "before" in trial} == set(planning.OURS)


def test_what_is_wrong_is_not_timed(run: Callable[..., dict[str, dict[str, Any]]]) -> None:
    trials = run(wrong=True)
    assert trials[planning.PAGED]["reason"].startswith("wrong, planned before: ")
    assert "before" not in trials[planning.PAGED]
    assert trials[planning.VARLEN]["inside"] == [20.0] * 4


def test_the_schedule_alone_computes_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    inputs = planning.input_sets(PROBLEM, 3, CPU, 1)[0]
    output: DecodeOutput = planning.SchedulePlan(paged(library, monkeypatch), PROBLEM, CPU).run(inputs, None)
    assert output.out is inputs.q
    assert len(library.scheduled) == 1
    assert library.schedules == []
