"""Random problems through every implementation: does the check call a right answer wrong, or find a wrong one?

Run as ``python -m harness.fuzz``. Each problem follows from a seed and its number alone: lengths from 0 to
70,000 with many small ones and many at the edges of tiles, head shapes, dtypes, split counts, families of
inputs and memory layouts. The file of ``kind: check`` records is appended to as it goes, so that a second call
continues where the first stopped.

An answer over its budget is tried again in a process of its own, and the report calls it true only if it is far
over its budget there too (:mod:`harness.render.checks`); else it is a false alarm.

Shapes come from a short list (:data:`SHAPES`): lengths, batch sizes and split counts never compile a kernel,
heads, head dims and dtypes do. Before the first problem the kernels of all shapes are compiled in parallel
processes, for the caches of the compilers to hold them.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch

from harness import record
from harness.check import CheckResult, check_plan
from harness.env import default_device, environment
from harness.families import FAMILY_NAMES
from harness.inputs import guard, make_inputs
from harness.record import RANDOM_FILE, Record
from harness.waking import WAKE_S, as_done, spawned
from impls.catalog import OURS, load
from impls.contract import DecodeImpl, DecodeInputs, ImplUnavailable, InputError, PlanRefused, Scalar
from impls.problem import DecodeProblem
from impls.reference import Reference, reference

Row: TypeAlias = dict[str, object]
"""What is known of one implementation on one problem: ``status``, ``reason``, ``config``, ``check``."""

IMPLS = (*OURS, "flash-attn-2", "flash-attn-3")
"""What is tried unless the caller says otherwise."""

SHAPES = (
    # heads_q, heads_kv, head_dim, dtype
    (8, 2, 128, "bfloat16"),
    (32, 8, 128, "bfloat16"),
    (8, 1, 64, "float16"),
    (4, 4, 64, "bfloat16"),
    (14, 2, 64, "float16"),
    (10, 2, 128, "float16"),
    (24, 1, 80, "bfloat16"),
    (12, 2, 96, "float16"),
    (6, 1, 192, "bfloat16"),
    (16, 1, 256, "bfloat16"),
    (70, 1, 128, "bfloat16"),
    (8, 2, 64, "float32"),
)
"""Ratios 1, 4, 5, 6, 7, 8, 16, 24 and one over the largest head tile; every head dim; every dtype."""

EDGES = sorted({0, 1, 2, 3, 5, 7, 100, 1000, 1001, *(2**e + d for e in range(4, 12) for d in (-1, 0, 1))})
"""Lengths at the edges of tiles, and a few beside them."""

MAX_KEYS = 70_000
"""Of one sequence, and of a problem."""

SPLITS: tuple[Scalar, ...] = ("auto", "auto", "auto", 1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 128, 200)
"""Asked of our own kernels."""

REASON_CHARS = 500
"""Where the text of an exception is cut."""

MAX_RETRIES = 8
"""Failures that are tried again in a process of their own."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One random problem, and how it is asked.

    Args:
        sequence: the seed of the sequence of problems.
        number: in that sequence.
        problem: what is to be computed.
        family: of the inputs.
        layout: of K and V.
        num_splits: asked of our own kernels.
        seed: of the inputs.
    """

    sequence: int
    number: int
    problem: DecodeProblem
    family: str
    layout: str
    num_splits: Scalar
    seed: int

    @property
    def name(self) -> str:
        """The case in the records."""
        return f"random_{self.number:05}"


def draw(seed: int, number: int) -> Draw:
    """Problem ``number`` of a seed; the same on every machine."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(("edges", "ragged", "long", "skew", "empty"), weights=(45, 33, 12, 7, 3))[0]
    if kind == "edges":
        lens = [rng.choice(EDGES) for _ in range(rng.randint(1, 8))]
    elif kind == "ragged":
        lens = [_log_uniform(rng, 1, 4096) for _ in range(rng.randint(1, 16))]
    elif kind == "long":
        lens = [_log_uniform(rng, 4096, MAX_KEYS) for _ in range(rng.randint(1, 3))]
    elif kind == "skew":
        lens = [_log_uniform(rng, 2048, 32768), *(rng.randint(0, 300) for _ in range(rng.randint(1, 31)))]
        rng.shuffle(lens)
    else:
        lens = [0] * rng.randint(0, 4)
    while sum(lens) > MAX_KEYS:
        lens.remove(max(lens))
    heads_q, heads_kv, head_dim, dtype = rng.choice(SHAPES)
    return Draw(
        sequence=seed,
        number=number,
        problem=DecodeProblem(
            kv_lens=tuple(lens),
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=head_dim,
            dtype=dtype,
            scale=rng.choices((None, 0.01, 1.0), weights=(8, 1, 1))[0],
        ),
        family=rng.choices(FAMILY_NAMES, weights=(6, *[2] * (len(FAMILY_NAMES) - 1)))[0],
        layout=rng.choices(("packed", "interleaved", "heads-first"), weights=(8, 1, 1))[0],
        num_splits=rng.choice(SPLITS),
        seed=rng.randrange(2**31),
    )


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def make_material(drawn: Draw, device: torch.device) -> tuple[DecodeInputs, Reference]:
    """A problem's inputs and their reference; packed K and V lie between rows of NaN."""
    inputs = make_inputs(drawn.problem, drawn.seed, device, family=drawn.family, layout=drawn.layout)
    if drawn.layout == "packed":
        inputs = guard(inputs)
    return inputs, reference(inputs)


def try_one(impl: DecodeImpl, drawn: Draw, inputs: DecodeInputs, ref: Reference) -> Row:
    """One implementation on one problem: ``status``, ``reason``, ``config`` and ``check``, as a record has them."""
    if rule := impl.unsupported(drawn.problem, inputs.device):
        return {"status": "unsupported", "reason": rule}
    tuning: dict[str, Scalar] = {"num_splits": drawn.num_splits} if impl.name in OURS else {}
    try:
        plan = impl.plan(drawn.problem, inputs.device, tuning)
        result = check_plan(plan, inputs, ref)
    except (PlanRefused, InputError) as refusal:
        return {"status": "unsupported", "reason": str(refusal)}
    asked = {"sequence": drawn.sequence, "family": drawn.family, "layout": drawn.layout, **tuning}
    status = "ok" if result.ok else "wrong"
    return {"status": status, "reason": result.reason, "config": asked, "check": _short(result)}


def _short(result: CheckResult) -> dict[str, object]:
    """A result's numbers to three digits: there are thousands."""
    values = result.to_dict().items()
    return {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in values}


def try_again(seed: int, number: int, name: str, device: str) -> Row:
    """One problem through one implementation, from nothing; for a process of its own."""
    drawn = draw(seed, number)
    return try_one(load(name), drawn, *make_material(drawn, torch.device(device)))


def warm(names: Sequence[str], device: str, shape: tuple[int, int, int, str]) -> None:
    """Compile what one shape needs; for a process of its own."""
    heads_q, heads_kv, head_dim, dtype = shape
    problem = DecodeProblem(kv_lens=(1,), heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, dtype=dtype)
    for name in names:
        impl = _load(name)
        if not isinstance(impl, str) and impl.unsupported(problem, torch.device(device)) is None:
            impl.plan(problem, torch.device(device))


@cache
def _load(name: str) -> DecodeImpl | str:
    try:
        return load(name)
    except ImplUnavailable as error:
        return str(error)


def fuzz(
    path: Path,
    *,
    count: int,
    seed: int,
    device: str,
    names: Sequence[str] = IMPLS,
    budget_s: float = math.inf,
    jobs: int = 1,
) -> list[Record]:
    """Try the problems that the file does not have yet.

    Args:
        path: of the records.
        count: problems in all.
        seed: of the sequence of problems.
        device: ``cpu`` or ``cuda``.
        names: implementation ids.
        budget_s: seconds after which no further problem is begun.
        jobs: problems that are tried at a time, each in a process; 1 is this process.

    Returns:
        All records of ``kind: check`` in the file.

    Raises:
        RuntimeError: with what an implementation raised, after it was recorded as ``failed``: the device may
            be gone with it. The next call goes on behind it.
    """
    deadline = time.monotonic() + budget_s
    known = record.read(path) if path.exists() else []
    done = {r["case"] for r in known if r["kind"] == "check"}
    todo = [number for number in range(count) if f"random_{number:05}" not in done]
    if not todo:
        return [r for r in known if r["kind"] == "check"]
    if device == "cuda":
        workers = max(1, min(len(SHAPES), (os.cpu_count() or 1) // 2))
        with spawned(workers) as pool:
            for future in as_done([pool.submit(warm, OURS, device, shape) for shape in SHAPES]):
                future.result()
    run = record.run_record(record.new_run_id(), "random", environment(device))
    record.append(path, run)
    retries = 0
    for number, rows in _try_many(todo, seed, names, device, deadline=deadline, jobs=jobs):
        drawn = draw(seed, number)
        for name, row in rows.items():
            if row["status"] == "wrong" and retries < MAX_RETRIES:
                retries += 1
                with spawned(1) as pool:
                    (tried,) = as_done([pool.submit(try_again, seed, number, name, device)])
                again = tried.result()
                row["config"] = {**_mapping(row["config"]), "again": again.get("check")}
                print(f"{drawn.name} {name}: {row['reason']}; again: {again.get('reason')}", flush=True)
        record.append(path, *(_record(str(run["run_id"]), drawn, name, row) for name, row in rows.items()))
        for row in rows.values():
            if row["status"] == "failed":
                raise RuntimeError(str(row["reason"]))
    return [r for r in record.read(path) if r["kind"] == "check"]


def _try_many(
    todo: Sequence[int], seed: int, names: Sequence[str], device: str, *, deadline: float, jobs: int
) -> Iterator[tuple[int, dict[str, Row]]]:
    """Each problem's number and its rows, as they are done; none is begun after the deadline."""
    waiting = iter(todo)
    if jobs == 1:
        for number in waiting:
            if time.monotonic() > deadline:
                return
            yield number, try_all(seed, number, names, device)
        return
    with spawned(jobs) as pool:
        running: dict[Future[dict[str, Row]], int] = {}
        while True:
            while (
                len(running) < 2 * jobs and time.monotonic() <= deadline and (n := next(waiting, None)) is not None
            ):
                running[pool.submit(try_all, seed, n, names, device)] = n
            if not running:
                return
            finished, _ = wait(running, WAKE_S, FIRST_COMPLETED)
            for future in finished:
                yield running.pop(future), future.result()


def try_all(seed: int, number: int, names: Sequence[str], device: str) -> dict[str, Row]:
    """One problem through every implementation, up to the first that raises; by implementation id."""
    drawn = draw(seed, number)
    inputs, ref = make_material(drawn, torch.device(device))
    rows: dict[str, Row] = {}
    for name in names:
        impl = _load(name)
        if isinstance(impl, str):
            rows[name] = {"status": "unavailable", "reason": impl}
            continue
        try:
            rows[name] = try_one(impl, drawn, inputs, ref)
        except Exception as error:
            rows[name] = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:REASON_CHARS]}
            break
    return rows


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value


def _record(run_id: str, drawn: Draw, name: str, row: Mapping[str, object]) -> Record:
    return record.check_record(
        run_id=run_id,
        case=drawn.name,
        impl=name,
        problem=drawn.problem,
        seed=drawn.seed,
        status=str(row["status"]),
        reason=None if row["reason"] is None else str(row["reason"]),
        config=_mapping(row.get("config", {})),
        check=_mapping(row["check"]) if row.get("check") else None,
    )


def main() -> int:
    """The command line; 1 if an answer was over its budget."""
    parser = argparse.ArgumentParser(prog="python -m harness.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=3000, help="problems in all, those of earlier calls included")
    parser.add_argument("--only", type=int, help="this problem alone, without records")
    parser.add_argument("--out", type=Path, default=Path("reports/check") / RANDOM_FILE, help="records; continued")
    parser.add_argument("--seed", type=int, default=0, help="of the sequence of problems")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default_device())
    parser.add_argument("--budget-s", type=float, default=math.inf, help="begin no problem after so many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes that try problems at a time")
    parser.add_argument("--impls", default=",".join(IMPLS), help="implementation ids, with commas between")
    asked = parser.parse_args()
    if asked.only is not None:
        print(draw(asked.seed, asked.only))
        found = {name: try_again(asked.seed, asked.only, name, asked.device) for name in asked.impls.split(",")}
        for name, row in found.items():
            print(f"{name}: {row['status']} {row['reason'] or ''} {row.get('check') or ''}")
        return 1 if any(row["status"] == "wrong" for row in found.values()) else 0
    rows = fuzz(
        asked.out,
        count=asked.count,
        seed=asked.seed,
        device=asked.device,
        names=asked.impls.split(","),
        budget_s=asked.budget_s,
        jobs=asked.jobs,
    )
    for (name, status), number in sorted(Counter((r["impl"], r["status"]) for r in rows).items()):
        shares = [
            record.largest_share(r["check"])
            for r in rows
            if (r["impl"], r["status"]) == (name, status) and r["check"]
        ]
        print(f"{name:18} {status:12} {number:6}" + (f"  worst share {max(shares):.3f}" if shares else ""))
    print(f"{len({r['case'] for r in rows})} of {asked.count} problems")
    return 1 if any(r["status"] in ("wrong", "failed") for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
