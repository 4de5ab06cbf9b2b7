"""The smallest problem on which each wrong answer of a check still comes, for people to repeat it.

Run as ``python -m harness.reproduce FOLDER`` on a folder with ``checks.jsonl``: every implementation's first
failing probe is tried again, in this process, on smaller and smaller problems, and what is left becomes a
``kind: check`` record in ``findings.jsonl``. An answer that is right when it is tried again is recorded as
``ok``: that failure was no fault of the implementation, or came of the process it ran in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from harness import record
from harness.env import default_device, environment
from harness.probes import Examination, probes
from harness.record import CHECKS_FILE, FINDINGS_FILE, Record
from impls.catalog import load
from impls.contract import DecodeImpl, ImplUnavailable, PlanRefused
from impls.problem import DecodeProblem

MAX_TRIALS = 80
"""Smaller problems that are tried for one finding."""


def smaller(problem: DecodeProblem) -> Iterator[DecodeProblem]:
    """Problems with less in one respect, the largest steps first: sequences, keys, KV heads, query heads."""
    lens = problem.kv_lens
    half = len(lens) // 2
    if half:
        yield replace(problem, kv_lens=lens[:half])
        yield replace(problem, kv_lens=lens[half:])
    if len(lens) <= 8:
        for b in range(len(lens)):
            yield replace(problem, kv_lens=lens[:b] + lens[b + 1 :])
    if max(lens, default=0) > 1:
        yield replace(problem, kv_lens=tuple(min(n, 1) for n in lens))
        yield replace(problem, kv_lens=tuple((n + 1) // 2 for n in lens))
    for b, n in enumerate(lens[:8]):
        if n > 1:
            yield replace(problem, kv_lens=(*lens[:b], (n + 1) // 2, *lens[b + 1 :]))
    if problem.heads_kv > 1:
        yield replace(problem, heads_q=problem.group, heads_kv=1)
    if problem.group > 1:
        yield replace(problem, heads_q=problem.heads_kv)


def shrink(
    problem: DecodeProblem, fails: Callable[[DecodeProblem], bool], max_trials: int = MAX_TRIALS
) -> DecodeProblem:
    """The smallest problem found that still fails, by greedy steps.

    Args:
        problem: one that fails.
        fails: whether another one does.
        max_trials: how often ``fails`` is asked at most.
    """
    trials = 0
    while True:
        for candidate in smaller(problem):
            if trials == max_trials:
                return problem
            trials += 1
            if fails(candidate):
                problem = candidate
                break
        else:
            return problem


def examine(impl: DecodeImpl, problem: DecodeProblem, seed: int, device: torch.device, title: str) -> Examination:
    """One implementation through the probes of one title, up to the first that it fails."""
    found = Examination()
    if impl.unsupported(problem, device):
        return found
    plan = impl.plan(problem, device)
    counts = getattr(plan, "split_counts", None)
    family = title.partition(" ")[0]
    for probe in probes(problem, seed, device, families=(family,), split_counts=[counts] if counts else ()):
        if probe.title == title:
            found.add(probe, probe.apply(plan))
            if found.caught:
                break
    return found


def reproduce(rows: list[Record], device: torch.device, run_id: str) -> Iterator[Record]:
    """One record for each implementation and probe among the wrong rows of a check.

    Args:
        rows: records of ``kind: check``; those with a tuning of their own are left alone.
        device: where to try.
        run_id: of the records.
    """
    wrong = [r for r in rows if r["status"] == "wrong" and not r["config"].get("asked")]
    first: dict[tuple[str, str], Record] = {}
    for row in sorted(wrong, key=lambda r: sum(r["problem"]["kv_lens"])):
        first.setdefault((row["impl"], row["check"]["family"]), row)
    for (name, title), row in first.items():
        try:
            impl = load(name)
        except ImplUnavailable as error:
            print(f"{name}: {error}", flush=True)
            continue
        given = DecodeProblem.from_dict(row["problem"])

        def fails(
            problem: DecodeProblem, impl: DecodeImpl = impl, seed: int = row["seed"], title: str = title
        ) -> bool:
            try:
                return examine(impl, problem, seed, device, title).caught is not None
            except (PlanRefused, ValueError, RuntimeError):  # another fault, or a shape that it refuses
                return False

        least = shrink(given, fails) if fails(given) else given
        found = examine(impl, least, row["seed"], device, title)
        print(f"{name}, {title}: {found.reason or 'right when tried again'}", flush=True)
        yield record.check_record(
            run_id=run_id,
            case=f"{row['case']}: {title}",
            impl=name,
            status="wrong" if found.caught else "ok",
            reason=found.reason,
            problem=least,
            seed=row["seed"],
            config={"role": "finding", "probe": title, "found_on": row["case"]},
            check=found.to_dict(),
        )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m harness.reproduce", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help=f"a study's folder, with {CHECKS_FILE}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    asked = parser.parse_args()
    rows = [r for r in record.read(asked.folder / CHECKS_FILE) if r["kind"] == "check"]
    run = record.run_record(record.new_run_id(), asked.folder.name, environment(asked.device))
    found = list(reproduce(rows, torch.device(asked.device), str(run["run_id"])))
    if found:
        path = asked.folder / FINDINGS_FILE
        path.unlink(missing_ok=True)
        record.append(path, run, *found)
    print(f"{sum(r['status'] == 'wrong' for r in found)} findings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
