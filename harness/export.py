"""Records as one long table, a row a sample: a data frame, CSV or Parquet, for whoever has tools of their own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.record import Record, RecordError, read_numbered, records_file, series_label
from impls.problem import DecodeProblem

COLUMNS: Mapping[str, tuple[str, str]] = {
    "study": ("string", "the study's name"),
    "run_id": ("string", "the run; ratios are formed inside one run and case only"),
    "line": ("Int64", "the record's line in its file, from 1"),
    "case": ("string", "the case; missing for the device's read ceiling"),
    "impl": ("string", "implementation id, or stream-read (the bound of a case), or read-ceiling"),
    "label": ("string", "the id and what the study asked of it, e.g. triton-splitkv num_splits=8"),
    "role": ("string", "impl or bound"),
    "status": ("string", "ok, wrong, unsupported, unavailable, failed or invalid; times of ok alone count"),
    "reason": ("string", "why the status is not ok"),
    "device": ("string", "cuda or cpu"),
    "gpu": ("string", "the GPU's name"),
    "driver": ("string", "its driver"),
    "torch": ("string", "version"),
    "triton": ("string", "version"),
    "tilelang": ("string", "version"),
    "git": ("string", "commit of this project"),
    "dtype": ("string", "of q, k, v and the output"),
    "batch": ("Int64", "sequences"),
    "heads_q": ("Int64", "query heads"),
    "heads_kv": ("Int64", "KV heads"),
    "head_dim": ("Int64", "elements of a head"),
    "total_kv": ("Int64", "keys of all sequences"),
    "max_kv": ("Int64", "keys of the longest sequence"),
    "kv_bytes": ("Int64", "bytes of K and V"),
    "kv_lens": ("string", "keys of each sequence, a JSON list"),
    "seed": ("Int64", "of the random inputs"),
    "num_splits": ("string", "the split count asked for, or auto"),
    "splits_max": ("Int64", "the most splits of a sequence that ran"),
    "work_items": ("Int64", "CTAs of the split kernel"),
    "config": ("string", "all that the plan says of itself, a JSON object"),
    "compile_ms": ("Float64", "the first plan, ms"),
    "plan_us": ("Float64", "a later plan, for other lengths of the same batch size, µs"),
    "rel_l2": ("Float64", "relative L2 error of the output against float64"),
    "worst_row": ("Float64", "the worst row's error over its budget; above 1 is wrong"),
    "lse_err": ("Float64", "the largest absolute error of the log-sum-exp"),
    "method": ("string", "how it was timed; times of different methods are never compared"),
    "cache": ("string", "cold, warm or flushed"),
    "working_set_bytes": ("Int64", "bytes that rotate through the cache"),
    "calls_per_sample": ("Int64", "calls that one sample averages over"),
    "kernels": ("Int64", "kernels of a call"),
    "host_launch_us": ("Float64", "host time until a call returns, µs"),
    "host_total_us": ("Float64", "host time until the device is done too, µs"),
    "round": ("Int64", "of the sample; samples of one round are paired"),
    "us": ("Float64", "the sample, µs per call; missing where it was not finite"),
    "throttled": ("boolean", "whether the clock was held down meanwhile"),
}
"""Column -> (pandas dtype, what it holds); a measurement without samples has one row without the last three."""

SUFFIXES = (".csv", ".parquet")


def to_pandas(*where: str | Path) -> pd.DataFrame:
    """The measurements of record files as one long data frame with the columns of :data:`COLUMNS`.

    Args:
        where: record files, or folders that hold a ``records.jsonl``. The ``repeat.jsonl`` of a folder is in the
            frame only where it is named itself, so that a median over a study is that of one run; its rows have a
            ``run_id`` of their own.

    Returns:
        A row a sample, in the order of the files; none is left out, so filter by ``status``, ``method`` and
        ``throttled`` before you average.

    Raises:
        FileNotFoundError: where there is no such file.
        harness.record.RecordError: for a line that is not a record, or a measurement whose run is not recorded.
    """
    rows = [row for path in where for row in _rows(_file(Path(path)))]
    columns = {name: pd.Series([row.get(name) for row in rows], dtype=kind) for name, (kind, _) in COLUMNS.items()}
    return pd.DataFrame(columns)


def export(where: Sequence[str | Path], target: Path) -> int:
    """Write the frame of :func:`to_pandas` as CSV or Parquet, by the suffix of ``target``.

    Returns:
        How many rows were written.

    Raises:
        ImportError: for Parquet without pyarrow, naming the extra that brings it.
        harness.record.RecordError: for another suffix, and as for :func:`to_pandas`.
    """
    if target.suffix not in SUFFIXES:
        raise RecordError(f"{target}: expected a file ending in {' or '.join(SUFFIXES)}, got {target.suffix!r}")
    frame = to_pandas(*where)
    if target.suffix == ".csv":
        frame.to_csv(target, index=False)
        return len(frame)
    try:
        frame.to_parquet(target, engine="pyarrow", index=False)
    except ImportError as error:
        raise ImportError("Parquet needs pyarrow: pip install '.[parquet]'") from error
    return len(frame)


def _file(path: Path) -> Path:
    return path / records_file() if path.is_dir() else path


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    numbered = read_numbered(path)
    runs = {record["run_id"]: record for _, record in numbered if record["kind"] == "run"}
    for line, record in numbered:
        if record["kind"] != "measurement":
            continue
        if record["run_id"] not in runs:
            raise RecordError(f"{path}:{line}: expected a run record of {record['run_id']}, got none")
        row = _measurement(runs[record["run_id"]], record) | {"line": line}
        for sample in (record["timing"] or {}).get("samples") or [{}]:
            yield row | {key: sample.get(key) for key in ("round", "us", "throttled")}


def _measurement(run: Record, record: Record) -> dict[str, Any]:
    env, config = run["env"], record["config"]
    check, timing = record["check"] or {}, record["timing"] or {}
    host = timing.get("host") or {}
    row = {key: record[key] for key in ("run_id", "case", "impl", "role", "status", "reason", "seed")}
    row |= {key: record[key] for key in ("compile_ms", "plan_us")}
    row |= {"study": run["study"], "label": series_label(record), "config": json.dumps(config, ensure_ascii=False)}
    row |= {key: env.get(key) for key in ("device", "gpu", "driver", "torch", "triton", "tilelang", "git")}
    row |= {key: check.get(key) for key in ("rel_l2", "worst_row", "lse_err")}
    row |= {key: timing.get(key) for key in ("method", "cache", "working_set_bytes", "calls_per_sample", "kernels")}
    row |= {"host_launch_us": host.get("launch_us"), "host_total_us": host.get("end_to_end_us")}
    row |= {key: config.get(key) for key in ("splits_max", "work_items")}
    splits = config.get("num_splits")
    row["num_splits"] = None if splits is None else str(splits)
    if record["problem"] is not None:
        problem = DecodeProblem.from_dict(record["problem"])
        shape = ("dtype", "batch", "heads_q", "heads_kv", "head_dim", "total_kv", "max_kv", "kv_bytes")
        row |= {key: getattr(problem, key) for key in shape}
        row["kv_lens"] = json.dumps(problem.kv_lens)
    return row
