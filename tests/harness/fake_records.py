"""Records as a real run leaves them, from a small model of time and error instead of a device.

Times are ``launch + bytes / speed`` with a launch time and a share of the memory's speed for each
implementation, and seeded noise on each sample; errors are the output rounding of the dtype. The same
arguments always give the same records.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random

from harness import record as rec
from impls.catalog import IMPLS
from impls.problem import DecodeProblem


@dataclass(frozen=True)
class Speed:
    """Microseconds before the first byte, share of the memory's speed after it, and whether it splits."""

    launch_us: float
    share: float
    splits: bool = True


CEILING_GBPS = 4500.0
SPEEDS: Mapping[str, Speed] = {
    "tilelang-splitkv": Speed(6.0, 0.97),
    "triton-splitkv": Speed(4.5, 0.985),
    "flash-attn-2": Speed(11.0, 0.80, splits=False),
    "flash-attn-3": Speed(10.0, 0.92),
    "torch-varlen": Speed(13.0, 0.78, splits=False),
    "torch-sdpa": Speed(30.0, 0.55),
}
ROUNDING: Mapping[str, float] = {"float16": 2.9e-4, "bfloat16": 2.3e-3, "float32": 2e-7}

GPU_ENV: Mapping[str, object] = {
    "device": "cuda",
    "gpu": "NVIDIA H200",
    "driver": "580.95.05",
    "python": "3.12.11",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "tilelang": "0.1.15",
    "flash_attn": "2.8.3",
    "git": "0123456789abcdef0123456789abcdef01234567",
    "dirty": False,
    "l2_bytes": 62914560,
    "sm_count": 132,
    "clocks": {"sm_mhz": 1980, "mem_mhz": 3201},
}
CPU_ENV: Mapping[str, object] = {
    "device": "cpu",
    "gpu": None,
    "driver": None,
    "cpu": "Some CPU @ 2.0 GHz",
    "python": "3.11.13",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "tilelang": "0.1.15",
    "flash_attn": None,
    "git": "0123456789abcdef0123456789abcdef01234567",
    "dirty": True,
}


def problem(
    kv_lens: Sequence[int], heads: tuple[int, int] = (32, 8), head_dim: int = 128, dtype: str = "bfloat16"
) -> DecodeProblem:
    return DecodeProblem(
        kv_lens=tuple(kv_lens), heads_q=heads[0], heads_kv=heads[1], head_dim=head_dim, dtype=dtype
    )


GPU_CASES: Mapping[str, DecodeProblem] = {
    "b1_8k": problem([8192]),
    "b1_1k": problem([1024]),
    "b8_512": problem([512] * 8),
    "b1_32k": problem([32768]),
    "b1_128k": problem([131072]),
    "b16_8k": problem([8192] * 16),
    "b64_4k": problem([4096] * 64),
    "b128_1k": problem([1024] * 128),
    "skew_1x128k_31x1k": problem([131072, *[1024] * 31]),
    "mha_b4_4k": problem([4096] * 4, heads=(32, 32)),
    "tp8_b32_8k": problem([8192] * 32, heads=(8, 1)),
    "ratio7_b16_8k": problem([8192] * 16, heads=(28, 4)),
    "d64_b16_8k": problem([8192] * 16, head_dim=64),
    "h64_b8_16k": problem([16384] * 8, heads=(64, 8)),
    "longtail_b64": problem([960 + 37 * i * i // 5 for i in range(64)]),
}
CPU_CASES: Mapping[str, DecodeProblem] = {
    "one_1k": problem([1024], (8, 2), 64, "float16"),
    "ragged_odd": problem([1, 63, 129, 511], (8, 2), 64, "float16"),
    "with_empty": problem([0, 257, 0], (8, 2), 128, "float16"),
    "all_empty": problem([0, 0], (8, 2), 128, "float16"),
    "mqa": problem([700], (8, 1), 64, "float16"),
    "ratio7_d256": problem([300, 200], (14, 2), 256, "float16"),
}


def gpu_records(
    cases: Mapping[str, DecodeProblem] = GPU_CASES,
    *,
    faults: Mapping[tuple[str, str], tuple[str, str]] | None = None,
    run_id: str = "20261130T101500Z-3fa2",
    study: str = "h200-decode",
    n: int = 20,
) -> list[rec.Record]:
    """One run on a GPU: environment, read ceiling, and each case's bound and implementations.

    ``faults`` maps (case or ``"*"``, implementation) to a status and its reason.
    """
    rng = Random(0)
    records = [rec.run_record(run_id, study, GPU_ENV)]
    ceiling_bytes = 4 * 2**30
    records.append(
        rec.measurement_record(
            run_id=run_id,
            case=None,
            impl=rec.READ_CEILING,
            role="bound",
            status="ok",
            problem=None,
            seed=None,
            config={"bytes": ceiling_bytes},
            timing=_timing(rng, ceiling_bytes / CEILING_GBPS / 1e3, n, "graph"),
        )
    )
    for case, p in cases.items():
        stream_us = 2.0 + p.kv_bytes / CEILING_GBPS / 1e3
        records.append(
            rec.measurement_record(
                run_id=run_id,
                case=case,
                impl=rec.STREAM_READ,
                role="bound",
                status="ok",
                problem=p,
                seed=0,
                config={"block_bytes": 16384},
                timing=_timing(rng, stream_us, n, "graph"),
            )
        )
        for impl, speed in SPEEDS.items():
            us = speed.launch_us + p.kv_bytes / CEILING_GBPS / 1e3 / speed.share
            if not speed.splits:
                us *= max(1.0, p.max_kv * p.batch / max(1, p.total_kv) / 4)
            records.append(_impl_record(run_id, case, p, impl, us, n, "graph", faults or {}, rng))
    return records


def cpu_records(
    cases: Mapping[str, DecodeProblem] = CPU_CASES,
    *,
    faults: Mapping[tuple[str, str], tuple[str, str]] | None = None,
    run_id: str = "20261130T090000Z-77aa",
    study: str = "quick",
) -> list[rec.Record]:
    """One run on a CPU: method ``wall``, no bound, the CUDA libraries unavailable."""
    rng = Random(1)
    missing = ("unavailable", "expected a CUDA device, got none")
    faults = {("*", i): missing for i in ("flash-attn-2", "flash-attn-3", "torch-varlen")} | dict(faults or {})
    records = [rec.run_record(run_id, study, CPU_ENV)]
    for case, p in cases.items():
        for impl, us_per_key in zip(SPEEDS, (2.0, 90.0, 1.0, 1.0, 1.0, 0.2), strict=True):
            us = 150.0 + us_per_key * p.total_kv * p.heads_q / 8
            records.append(_impl_record(run_id, case, p, impl, us, 5, "wall", faults, rng))
    return records


def write(folder: Path, records: Sequence[rec.Record]) -> Path:
    """Write ``records`` as the folder's record file and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rec.replace_cases(folder / "records.jsonl", records)
    return folder


def _impl_record(
    run_id: str,
    case: str,
    p: DecodeProblem,
    impl: str,
    us: float,
    n: int,
    method: str,
    faults: Mapping[tuple[str, str], tuple[str, str]],
    rng: Random,
) -> rec.Record:
    status, reason = faults.get((case, impl), faults.get(("*", impl), ("ok", None)))
    error = ROUNDING[p.dtype] * rng.uniform(0.9, 1.1) if p.total_kv else 0.0
    check = {"rel_l2": error, "worst_row": rng.uniform(0.3, 0.6) if error else 0.0, "finite": True}
    check["lse_err"] = None if impl == "torch-sdpa" else rng.uniform(1e-7, 1e-6)
    if status == "wrong":
        check |= {"rel_l2": 0.08, "worst_row": 41.0}
    splits = max(1, min(128, 132 // max(1, p.batch * p.heads_kv)))
    config: dict[str, object] = {"num_splits": "auto", "splits_max": splits, "work_items": splits * p.batch}
    config |= {"function": impl.replace("-", "_"), "block_n": 128}
    if impl == "flash-attn-2" and p.heads_q == p.heads_kv:
        config |= {"splits_max": 1, "splits_note": "does not split when heads_q == heads_kv"}
    return rec.measurement_record(
        run_id=run_id,
        case=case,
        impl=impl,
        status=status,
        reason=reason,
        problem=p,
        seed=0,
        config=config if status in ("ok", "wrong", "invalid") else {},
        compile_ms=rng.uniform(300, 900) if status in ("ok", "wrong", "invalid") else None,
        plan_us=rng.uniform(20, 80) if status in ("ok", "invalid") else None,
        check=check if status in ("ok", "wrong", "invalid") else None,
        timing=_timing(rng, us, n, method) if status in ("ok", "invalid") else None,
    )


def _timing(rng: Random, us: float, n: int, method: str) -> dict[str, object]:
    return {
        "method": method,
        "cache": "warm" if method == "wall" else "cold",
        "working_set_bytes": None if method == "wall" else 400_000_000,
        "calls_per_sample": 1 if method == "wall" else 10,
        "kernels": None if method == "wall" else 2,
        "samples": [{"round": i, "us": round(us * rng.gauss(1.0, 0.004), 4), "throttled": False} for i in range(n)],
    }


def profiled(records: Sequence[rec.Record], *, run_id: str) -> list[rec.Record]:
    """What a run of method ``kernels`` adds to these records: its run, and a breakdown for each implementation."""
    parts = {
        "calls": 9,
        "kernels": [{"name": "split", "us": 10.0}, {"name": "combine", "us": 2.0}],
        "gap_us": 0.5,
        "between_us": 1.0,
        "traced_us": 13.5,
        "total_us": 13.4,
    }
    found = [records[0] | {"run_id": run_id}]
    for record in records:
        if record.get("role") == "impl" and record["status"] == "ok":
            timing = record["timing"] | {"method": "kernels", "breakdown": parts}
            found.append(record | {"run_id": run_id, "timing": timing})
    return found


def split_profiles(records: Sequence[rec.Record], *, run_id: str) -> list[rec.Record]:
    """What a run of method ``kernels`` adds to :func:`split_records`; traced calls take as long as timed ones.

    Ours merge as their configuration says: a combine kernel takes 2 µs and 0.05 a split, after it has waited for
    all of the split kernel; inside of that one nothing is seen of it, but each call waits for the one before.
    """
    found = [records[0] | {"run_id": run_id}]
    for record in (r for r in records if r.get("role") == "impl" and r["status"] == "ok"):
        us = statistics.median(sample["us"] for sample in record["timing"]["samples"])
        gap, between = 0.0, 0.0
        if record["impl"] == "flash-attn-3":
            gap, between = -1.0, 0.5
            kernels = [("prepare", 2.0), ("attention", us - 4.5), ("combine", 3.0)]
        elif record["config"].get("merge") == "combine":
            merging = 2.0 + 0.05 * record["config"]["splits_max"]
            gap, kernels = merging - us, [("split", us - merging), ("combine", us)]
        else:
            between, kernels = -0.75 * us, [("split", 1.75 * us)]
        parts = {"calls": 9, "kernels": [{"name": name, "us": took} for name, took in kernels]}
        parts |= {"gap_us": gap, "between_us": between, "traced_us": us, "total_us": us}
        timing = record["timing"] | {"method": "kernels", "breakdown": parts}
        found.append(record | {"run_id": run_id, "timing": timing})
    return found


def merging(records: Sequence[rec.Record]) -> list[rec.Record]:
    """The records of :func:`split_records`, with how our kernels' splits merge: not at 1, up to 16 by exchange."""
    found = []
    for record in records:
        splits = (record.get("config") or {}).get("splits_max")
        if record.get("role") == "impl" and splits is not None:
            how = None if splits == 1 else "exchange" if splits <= 16 else "combine"
            record = record | {"config": record["config"] | {"merge": how, "block_h": 16}}
        found.append(record)
    return found


def with_everyone(records: Sequence[rec.Record]) -> list[rec.Record]:
    """The records, and those of every implementation of the catalog that they lack: a slower copy of another's."""
    found = list(records)
    here = list(SPEEDS)
    for i, impl in enumerate(name for name in IMPLS if name not in SPEEDS):
        for record in (r for r in records if r.get("impl") == here[i % len(here)]):
            copied = deepcopy(record) | {"impl": impl}
            for sample in (copied["timing"] or {"samples": []})["samples"]:
                sample["us"] *= 1.04 + 0.05 * i
            found.append(copied)
    return found


def on_gpu(records: Sequence[rec.Record], gpu: str) -> list[rec.Record]:
    """The records, made on another GPU."""
    return [r | {"env": r["env"] | {"gpu": gpu}} if r["kind"] == "run" else r for r in records]


SPLIT_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)


def split_records(
    cases: Mapping[str, DecodeProblem] | None = None, *, counts: Sequence[int] = SPLIT_COUNTS, n: int = 20
) -> list[rec.Record]:
    """One run on a GPU of our kernels and flash-attn 3 at fixed split counts and with their own choice.

    Time is bytes over the share of the device that ``splits × batch × heads_kv`` CTAs fill, plus a merge that
    grows with the splits. flash-attn 3 does not report what it chose.
    """
    cases = {name: GPU_CASES[name] for name in ("b1_1k", "b1_8k", "b64_4k")} if cases is None else cases
    rng = Random(2)
    records = [r for r in gpu_records(cases, study="h200-splits", n=n) if r.get("impl") not in SPEEDS]
    for case, p in cases.items():
        for impl in ("tilelang-splitkv", "triton-splitkv", "flash-attn-3"):
            own = max(1, 132 // (p.batch * p.heads_kv))
            for asked in (None, *counts):
                splits = own if asked is None else asked
                full = min(1.0, splits * p.batch * p.heads_kv / 132)
                us = (
                    SPEEDS[impl].launch_us
                    + p.kv_bytes / CEILING_GBPS / 1e3 / full / SPEEDS[impl].share
                    + 0.06 * splits
                )
                record = _impl_record("20261130T101500Z-3fa2", case, p, impl, us, n, "graph", {}, rng)
                config = record["config"] | {"splits_max": splits, "work_items": splits * p.batch * p.heads_kv}
                if impl == "flash-attn-3":
                    config |= {"splits_max": None, "work_items": None}
                config |= {} if asked is None else {"asked": {"num_splits": asked}, "num_splits": asked}
                records.append(record | {"config": config})
    return records
