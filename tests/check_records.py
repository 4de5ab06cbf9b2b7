"""Writes what the check catches into records: every impostor, and the errors that honest kernels cannot avoid.

``python -m tests.check_records`` appends to ``reports/check/impostors.jsonl``; ``splitkv render reports/check``
draws the report from it. A length that is tried again takes the place of its older records.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness import record
from harness.check import CheckResult
from harness.env import default_device, environment
from harness.probes import Examination, Observation, probes
from harness.record import IMPOSTORS_FILE, Record
from harness.waking import as_done, spawned
from impls.catalog import OURS, load
from impls.problem import DTYPE_BYTES
from tests.impostors import (
    IMPOSTORS,
    LENGTHS,
    Verdict,
    around,
    honest_floor,
    honest_plans,
    judge_all,
    problem_of,
)

SIMULATED = "simulated"
"""The kernel in torch, which impostors are built around besides the real ones."""


def impostor_records(run_id: str, kernel: str, length: int, device: torch.device) -> list[Record]:
    """One record an impostor around ``kernel`` at one length; status ``ok`` is one that was not caught."""
    if kernel == SIMULATED:
        verdicts = judge_all(length, device)
    else:
        real = [impostor for impostor in IMPOSTORS if not impostor.simulated]
        verdicts = judge_all(length, device, right=around(load(kernel)), impostors=real)
    return [_impostor_record(run_id, kernel, length, verdict) for verdict in verdicts]


def _impostor_record(run_id: str, kernel: str, length: int, verdict: Verdict) -> Record:
    assert verdict.worst is not None
    return record.check_record(
        run_id=run_id,
        case=f"{kernel} {length}",
        impl=verdict.impostor,
        status="wrong" if verdict.caught else "ok",
        reason=verdict.reason,
        problem=problem_of(length),
        seed=0,
        config={
            "role": "impostor",
            "around": kernel,
            "length": length,
            "counts": verdict.counts,
            "excess": verdict.excess if math.isfinite(verdict.excess) else None,
            "visible": verdict.visible,
        },
        check={
            **_digits(verdict.worst.to_dict()),
            "family": verdict.caught[0] if verdict.caught else None,
            "caught": list(verdict.caught),
        },
    )


def floor_record(run_id: str, dtype: str, length: int, device: torch.device) -> Record:
    """The largest errors of honest kernels in every family."""
    problem = problem_of(length, dtype)
    plans = honest_plans(problem, device)
    found = Examination()
    for probe in probes(problem, 0, device, repeat_outputs=1):
        if probe.name == "values":
            floor: CheckResult = honest_floor(plans, probe)
            found.add(probe, Observation(floor))
    return record.check_record(
        run_id=run_id,
        case=f"honest {dtype} {length}",
        impl="honest",
        status="ok",
        problem=problem,
        seed=0,
        config={"role": "floor", "length": length},
        check=_digits(found.to_dict()),
    )


def floor_records(run_id: str, length: int, device: torch.device) -> list[Record]:
    """The honest errors at one length, one record a dtype."""
    return [floor_record(run_id, dtype, length, device) for dtype in DTYPE_BYTES]


def _digits(value: Any) -> Any:
    """Numbers to four digits: they are there to be compared."""
    if isinstance(value, dict):
        return {key: _digits(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_digits(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def write(
    folder: Path, device: torch.device, kernels: Sequence[str], lengths: Sequence[int], *, jobs: int = 1
) -> None:
    """Try everything, in so many processes, and write it into a folder, each part as it is done."""
    path = folder / IMPOSTORS_FILE
    run = record.run_record(record.new_run_id(), "check", environment(device.type))
    run_id = str(run["run_id"])
    pending = [run]
    with spawned(jobs) as pool:
        parts = {
            **{
                pool.submit(impostor_records, run_id, kernel, length, device): f"{kernel} {length}"
                for length in sorted(lengths, reverse=True)  # the long ones take longest
                for kernel in kernels
            },
            **{
                pool.submit(floor_records, run_id, length, device): f"honest kernels {length}"
                for length in sorted(lengths, reverse=True)
            },
        }
        for part in as_done(parts):
            rows = part.result()
            record.replace_cases(path, [*pending, *rows])
            pending = []
            count = sum(row["config"].get("counts", False) for row in rows)
            caught = sum(row["config"].get("counts", False) and row["status"] == "wrong" for row in rows)
            told = f", {count} count, {caught} of them caught" if count else ""
            print(f"{parts[part]}: {len(rows)} tried{told}", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.check_records", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("reports/check"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--around", default=None, help="kernels; all of ours and a simulated one on a GPU")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    asked = parser.parse_args()
    everyone = (SIMULATED, *OURS) if asked.device == "cuda" else (SIMULATED,)
    kernels = asked.around.split(",") if asked.around else everyone
    write(
        asked.folder,
        torch.device(asked.device),
        kernels,
        [int(n) for n in asked.lengths.split(",")],
        jobs=asked.jobs,
    )


if __name__ == "__main__":
    main()
