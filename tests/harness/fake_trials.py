"""Trials of a tuning whose truth the tests know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness import record
from harness.record import Record
from impls.problem import DecodeProblem
from tests.harness.fake_records import problem

CHECK = {"rel_l2": 0.002, "worst_row": 0.4, "lse_err": 1e-6, "finite": True}
B1_8K = problem([8192])
FAST = {"block_n": 64, "waves": None}


def trial(
    stage: str,
    tuning: Mapping[str, Any],
    us: Sequence[float] | None,
    *,
    case: str = "b1_8k",
    impl: str = "triton-splitkv",
    run_id: str = "r1",
    status: str = "ok",
    same_as: Mapping[str, Any] | None = None,
    throttled: Sequence[int] = (),
    of: DecodeProblem = B1_8K,
) -> Record:
    timing = None
    if us is not None:
        timing = {
            "method": "graph",
            "cache": "cold",
            "working_set_bytes": 400_000_000,
            "calls_per_sample": 10,
            "kernels": 2,
            "samples": [{"round": i, "us": t, "throttled": i in throttled} for i, t in enumerate(us)],
        }
    return record.trial_record(
        run_id=run_id,
        case=case,
        impl=impl,
        stage=stage,
        status=status,
        reason=None if status == "ok" else "because",
        problem=of,
        seed=0,
        tuning=tuning,
        same_as=same_as,
        config={"block_n": tuning.get("block_n", 128), "splits_max": 16},
        check=CHECK,
        timing=timing,
    )


def drifting(factor: float, n: int = 20) -> list[float]:
    """Times that double over the rounds: only a comparison round by round finds the factor."""
    return [factor * (10 + i / 2) for i in range(n)]
