"""The liars' experiment: fakes that would like to look fast go through the real loop, and each must be caught.

The fakes are in :mod:`harness.liars`. What is tried here is the loop itself, with its worker process, its checks
and its judgement of times, so the loop runs them as it runs everything. A liar's outcome becomes a trial.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import record
from harness.runner import run_study
from harness.study import Case, Entry, Study
from harness.worker import Setup
from impls.problem import DecodeProblem

SEED = 1
"""Of the inputs; some of the liars know it."""

TIMER = "harness.liars:lying_timer"
"""The timer of all of them: honest, but for plans that ask it not to be."""

BOUNDS: Mapping[str, str] = {"cuda": "harness.spin:OneWaveRead"}
"""Device type -> a bound without a sweep: the read ceiling has to be right within a factor here, and soon known."""

STEP_DEADLINE_S = 90.0
"""How long one step of the loop may take."""


@dataclass(frozen=True)
class Lie:
    """One liar.

    Args:
        where: ``module:Class`` of the implementation.
        does: what it does, for the report.
        devices: where it can.
        ceiling: whether only the device's read ceiling gives it away: it is tried where there is one.
        control: whether it is honest, and must come out ``ok``.
    """

    where: str
    does: str
    devices: tuple[str, ...] = ("cuda", "cpu")
    ceiling: bool = False
    control: bool = False


LIES: Mapping[str, Lie] = {
    "honest": Lie(
        "harness.liars:Honest", "nothing wrong: the kernel that all others stand on, as the control", control=True
    ),
    "clock-8ns": Lie("harness.liars:EightNanoseconds", "its timer says 8 ns", ceiling=True),
    "clock-zero": Lie("harness.liars:Zero", "its timer says 0"),
    "clock-negative": Lie("harness.liars:Negative", "its timer says −3 µs"),
    "clock-nan": Lie("harness.liars:Nan", "its timer says NaN"),
    "elsewhere": Lie(
        "harness.liars:RunsElsewhere", "launches on a stream that the caller does not wait for", devices=("cuda",)
    ),
    "in-plan": Lie(
        "harness.liars:WorksInPlan", "guesses the first inputs, does its work in plan, and only copies when it runs"
    ),
    "every-second": Lie("harness.liars:Skips", "does nothing in every second call"),
    "knows-the-inputs": Lie(
        "harness.liars:KnowsTheInputs",
        "guesses all inputs that are timed and only copies right answers: faster than memory allows",
        ceiling=True,
    ),
}
"""Name -> liar. The last needs a case whose K and V take long to read: it refuses the small one."""

CASES: Mapping[str, tuple[Case, ...]] = {
    "cuda": (
        Case(
            name="liars_small",
            problem=DecodeProblem(kv_lens=(1000,), heads_q=4, heads_kv=2, head_dim=64, dtype="float16"),
            seed=SEED,
        ),
        Case(
            name="liars_large",
            problem=DecodeProblem(kv_lens=(32768,), heads_q=32, heads_kv=8, head_dim=128),
            seed=SEED,
        ),
    ),
    "cpu": (
        Case(
            name="liars_small",
            problem=DecodeProblem(kv_lens=(70, 33), heads_q=4, heads_kv=2, head_dim=64, dtype="float16"),
            seed=SEED,
        ),
        Case(
            name="liars_large",
            problem=DecodeProblem(kv_lens=(2048, 500), heads_q=8, heads_kv=4, head_dim=128, dtype="float16"),
            seed=SEED,
        ),
    ),
}
"""Device type -> a small case, and one over which memory takes its time: 134 MB on a GPU, 5 MB on a CPU."""


def try_liars(
    device: str, *, bound: str | None = None, method: str | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Send every liar of a device through the loop.

    Args:
        device: ``cpu`` or ``cuda``.
        bound: ``module:Class`` of a bound for a device that has none, so that there is a read ceiling.
        method: of timing; None takes the default with a timer that lies for those who ask. By other methods the
            liars of the clock are honest, and left out.

    Returns:
        The environment, and a trial for each liar and case that it does not refuse.

    Raises:
        harness.runner.RunError: if no worker starts.
    """
    bound = bound or BOUNDS.get(device)
    lies = {
        name: lie
        for name, lie in LIES.items()
        if device in lie.devices and (bound or not lie.ceiling) and (method is None or "clock" not in name)
    }
    setup = Setup(
        device=device,
        catalog={name: lie.where for name, lie in lies.items()},
        method=method,
        timer=None if method else TIMER,
        bound=bound,
    )
    with tempfile.TemporaryDirectory() as folder:
        study = Study(
            name="liars",
            title="Liars",
            cases=CASES[device],
            entries=tuple(Entry(impl=name, tuning={}) for name in lies),
            path=Path(folder) / "study.toml",
        )
        summary = run_study(study, setup=setup, deadline_s=STEP_DEADLINE_S)
        env = next(r["env"] for r in record.read(summary.records) if r["kind"] == "run")
    return env, [_trial(row, lies[row["impl"]]) for row in summary.rows if row["status"] != "unsupported"]


def _trial(row: record.Record, lie: Lie) -> dict[str, Any]:
    problem = DecodeProblem.from_dict(row["problem"])
    times = [sample["us"] for sample in (row["timing"] or {}).get("samples", ())]
    return {
        "case": row["case"],
        "impl": row["impl"],
        "experiment": "liars",
        "problem": row["problem"],
        "kv_bytes": problem.kv_bytes,
        "does": lie.does,
        "control": lie.control,
        "status": row["status"],
        "reason": row["reason"],
        "us": statistics.median(times) if times and None not in times else None,
    }
