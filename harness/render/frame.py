"""Records to one long data frame: a row for each implementation, and for the bound, on each case.

All arithmetic on measurements is here; figures and tables only arrange it. Ratios are formed inside one
run, case, method and cache state, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from harness import cost, stats
from harness.record import (
    READ_CEILING,
    STATUSES,
    STREAM_READ,
    Record,
    RecordError,
    read,
    records_file,
    series_label,
)
from impls.catalog import ABLATIONS, IMPLS, OURS
from impls.problem import DecodeProblem

NO_RECORD = "no record"
"""The status of an implementation that has rows on other cases of the study, but none on this one."""

WORDS = (*STATUSES, NO_RECORD)
"""What a report may say of an implementation on a case."""

COLUMNS: Mapping[str, type] = {
    "study": str,
    "run_id": str,
    "case": str,
    "impl": str,
    "label": str,
    "role": str,
    "status": str,
    "reason": str,
    "dtype": str,
    "batch": int,
    "heads_q": int,
    "heads_kv": int,
    "head_dim": int,
    "total_kv": int,
    "max_kv": int,
    "kv_bytes": int,
    "method": str,
    "cache": str,
    "working_set_bytes": float,
    "kernels": float,
    "n": float,
    "n_throttled": float,
    "us": float,
    "us_low": float,
    "us_high": float,
    "gbps": float,
    "tflops": float,
    "share": float,
    "share_low": float,
    "share_high": float,
    "share_rounds": object,
    "slowdown": float,
    "slowdown_low": float,
    "slowdown_high": float,
    "slowdown_rounds": object,
    "tied": object,
    "ahead": float,
    "ahead_low": float,
    "ahead_high": float,
    "ahead_rounds": object,
    "peer": str,
    "verdict": str,
    "host_launch_us": float,
    "host_total_us": float,
    "profiled_us": float,
    "traced_us": float,
    "main_us": float,
    "others_us": float,
    "gap_us": float,
    "between_us": float,
    "kernel_names": object,
    "compile_ms": float,
    "plan_us": float,
    "num_splits": object,
    "splits_max": float,
    "work_items": float,
    "splits_note": str,
    "config": str,
    "rel_l2": float,
    "worst_row": float,
    "lse_err": float,
}
"""The columns of :attr:`Comparison.rows`; floats are NaN and the rest None where there is nothing to say."""

PROBLEM_COLUMNS = ("dtype", "batch", "heads_q", "heads_kv", "head_dim", "total_kv", "max_kv", "kv_bytes")

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """What a report is made of.

    Args:
        name: the study's name, or those of several joined by `` + ``.
        runs: the ``run`` records behind the rows, in the order of the files.
        cases: case names, by KV bytes and then as recorded.
        series: labels of the implementations (the id, and what the study asked of it): in catalog order,
            then unknown ones by name.
        rows: one row for each case and series, nothing missing, and one for each case's bound, in the order
            of ``cases`` and ``series``. Times are µs (``us`` is a median, ``us_low`` and ``us_high`` its
            95 % interval) and are there for status ``ok`` alone; sizes are bytes. ``share`` is the bound's
            time over this one, in %; ``slowdown`` this time over that of the case's fastest
            implementation, and ``tied`` whether :func:`harness.stats.verdict` calls that a tie; ``ahead``
            the time of the case's fastest ``peer`` over this one, for the kernels of this project, and
            ``verdict`` what that makes this one. Each of the three has its interval in ``_low`` and
            ``_high``, and its values round by round in ``_rounds``. What ``profiled_us`` (a call, untraced)
            consists of is from a run of method ``kernels``: the longest kernel in ``main_us``, all others in
            ``others_us``, ``gap_us`` among them and ``between_us`` to the next call, in all ``traced_us``.
        ceilings: the device's read ceiling in GB/s, by run id.
    """

    name: str
    runs: tuple[Record, ...]
    cases: tuple[str, ...]
    series: tuple[str, ...]
    rows: pd.DataFrame
    ceilings: Mapping[str, float]

    @property
    def smallest_effect(self) -> float:
        """The difference, as a share, below which a verdict is a tie; the largest that a run states."""
        return max(map(smallest_effect, self.runs))

    @property
    def impls(self) -> pd.DataFrame:
        """The rows of implementations."""
        return self.rows[self.rows["role"] == "impl"]

    @property
    def bounds(self) -> pd.DataFrame:
        """The rows of the bound that have a time."""
        return self.rows[(self.rows["impl"] == STREAM_READ) & self.rows["us"].notna()]

    @property
    def functional(self) -> bool:
        """Whether every run was on a CPU, so that times show that kernels run and not how fast they are."""
        return all(run["env"].get("device") == "cpu" for run in self.runs)

    def table(self, column: str) -> pd.DataFrame:
        """``[cases, series]`` of one column of the implementations' rows."""
        table = self.impls.pivot(index="case", columns="label", values=column)
        return table.reindex(index=list(self.cases), columns=list(self.series))


def each(rows: pd.DataFrame) -> Iterable[Any]:
    """The rows one by one, a column an attribute."""
    return rows.itertuples()


def smallest_effect(run: Record) -> float:
    """The difference, as a share, that a run's study calls the smallest that matters."""
    effect: float = run.get("smallest_effect", stats.SMALLEST_EFFECT)
    return effect


def impl_of(label: str) -> str:
    """The implementation id of a series."""
    return label.split(" ", 1)[0]


def load(folders: Sequence[Path]) -> Comparison:
    """The comparison that the ``records.jsonl`` of one or more study folders hold.

    Where a case was recorded more than once, its newest run counts. With several folders, the name of
    each case begins with that of its folder.

    Raises:
        harness.record.RecordError: for a folder without records or measurements, a line that is not a record,
            or a row whose run is not recorded.
        ValueError: for no folder.
    """
    if not folders:
        raise ValueError("folders: expected at least one, got none")
    runs: dict[str, Record] = {}
    rows: list[Row] = []
    ceilings: dict[str, float] = {}
    for folder in folders:
        path = folder / "records.jsonl"
        if not path.is_file():
            raise RecordError(f"{path}: expected the records of a run, got no such file")
        records = read(path)
        runs |= {r["run_id"]: r for r in records if r["kind"] == "run"}
        newest = _newest(r for r in records if r["kind"] == "measurement")
        profiles = _profiles(folder)
        if all(record["impl"] == READ_CEILING for record in newest):
            raise RecordError(f"{path}: expected measurements of a case, got {len(records)} other records")
        for record in newest:
            if record["run_id"] not in runs:
                raise RecordError(f"{path}: expected a run record of {record['run_id']}, got none")
            if record["impl"] == READ_CEILING:
                if (us := _times(record).get("us")) is not None:
                    ceilings[record["run_id"]] = cost.gbps(record["config"]["bytes"], us)
                continue
            case = record["case"] if len(folders) == 1 else f"{folder.name}/{record['case']}"
            parts = profiles.get((record["case"], series_label(record)), {})
            rows.append(_row(record) | parts | {"study": folder.name, "case": case})

    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["case"], row)
    cases = tuple(sorted(first, key=lambda case: int(first[case]["kv_bytes"])))
    series = _series(rows)
    rows = _in_order(rows, first, cases, series)
    _add_ratios(rows, {run_id: smallest_effect(run) for run_id, run in runs.items()})
    used = {row["run_id"] for row in rows}
    return Comparison(
        name=" + ".join(folder.name for folder in folders),
        runs=tuple(run for run_id, run in runs.items() if run_id in used),
        cases=cases,
        series=series,
        rows=_frame(rows),
        ceilings={run_id: gbps for run_id, gbps in ceilings.items() if run_id in used},
    )


def _newest(measurements: Iterable[Record]) -> list[Record]:
    """Each case's rows of its newest run alone, and the later of two rows of one series."""
    by_case: dict[str, dict[str, Record]] = {}
    for record in measurements:
        # The read ceiling has no case; it is one "case" of each run.
        key = record["case"] or f"{READ_CEILING} of {record['run_id']}"
        kept = by_case.setdefault(key, {})
        if any(r["run_id"] != record["run_id"] for r in kept.values()):
            kept.clear()
        kept[series_label(record)] = record
    return [record for kept in by_case.values() for record in kept.values()]


def _row(record: Record) -> Row:
    problem = DecodeProblem.from_dict(record["problem"])
    config, check = record["config"], record["check"] or {}
    row: Row = {key: record[key] for key in ("run_id", "impl", "role", "status", "reason", "compile_ms", "plan_us")}
    row |= {key: getattr(problem, key) for key in PROBLEM_COLUMNS}
    row |= {key: check.get(key) for key in ("rel_l2", "worst_row", "lse_err")}
    row |= {key: config.get(key) for key in ("num_splits", "splits_max", "work_items", "splits_note")}
    row |= {"label": series_label(record), "config": _settings(config)} | _times(record)
    if (us := row.get("us")) is not None:
        is_bound = record["role"] == "bound"
        row["gbps"] = cost.gbps(problem.kv_bytes if is_bound else cost.io_bytes(problem), us)
        row["tflops"] = None if is_bound else cost.tflops(cost.flops(problem), us)
    return row


def _profiles(folder: Path) -> dict[tuple[str, str], Row]:
    """(case, label) -> where the time of its calls went, as far as a run of method ``kernels`` told."""
    path = folder / records_file("kernels")
    if not path.exists():
        return {}
    profiles = {}
    for record in _newest(r for r in read(path) if r["kind"] == "measurement"):
        found = (record["timing"] or {}).get("breakdown")
        if found is not None and record["status"] == "ok" and record["case"] is not None:
            times = [kernel["us"] for kernel in found["kernels"]]
            profiles[record["case"], series_label(record)] = {
                "profiled_us": found["total_us"],
                "traced_us": found["traced_us"],
                "main_us": max(times),
                "others_us": sum(times) - max(times),
                "gap_us": found["gap_us"],
                "between_us": found["between_us"],
                "kernel_names": tuple(kernel["name"] for kernel in found["kernels"]),
            }
    return profiles


def _settings(config: Mapping[str, Any]) -> str | None:
    """What a plan came to beyond the columns of its own and what varies with the lengths, as text."""
    apart = ("asked", "num_splits", "splits_max", "work_items", "splits_note", "workspace_bytes")
    return ", ".join(f"{key}={value}" for key, value in config.items() if key not in apart) or None


def _times(record: Record) -> Row:
    """How a record was timed and, for status ``ok``, its median; throttled samples are counted, not used."""
    timing = record["timing"]
    if timing is None:
        return {}
    finite = [s for s in timing["samples"] if s["us"] is not None]
    throttled = sum(bool(s["throttled"]) for s in finite)
    # Where every sample was throttled, their median is still the best that is known; the count says so.
    used = {s["round"]: s["us"] for s in finite if not s["throttled"] or throttled == len(finite)}
    times: Row = {key: timing[key] for key in ("method", "cache", "working_set_bytes", "kernels")}
    host = timing.get("host") or {}
    times |= {"n": len(used), "n_throttled": throttled}
    times |= {"host_launch_us": host.get("launch_us"), "host_total_us": host.get("end_to_end_us")}
    if record["status"] == "ok" and used:
        estimate = stats.median_interval(list(used.values()))
        times |= {"us": estimate.median, "us_low": estimate.low, "us_high": estimate.high, "samples": used}
    return times


def _series(rows: Iterable[Row]) -> tuple[str, ...]:
    known = list(IMPLS)

    def place(label: str) -> tuple[int, str, int, str]:
        impl = impl_of(label)
        # By length before text, so that num_splits=16 follows num_splits=8.
        return (known.index(impl) if impl in known else len(known), impl, len(label), label)

    return tuple(sorted({row["label"] for row in rows if row["role"] == "impl"}, key=place))


def _in_order(
    rows: Iterable[Row], first: Mapping[str, Row], cases: Sequence[str], series: Sequence[str]
) -> list[Row]:
    """All rows by case and series, with a row that says so for each that was not recorded."""
    here = {(row["case"], row["label"]): row for row in rows}
    ordered = []
    for case in cases:
        for label in (STREAM_READ, *series):
            if (row := here.get((case, label))) is not None:
                ordered.append(row)
            elif label != STREAM_READ:
                gap = {key: first[case][key] for key in ("study", "run_id", "case", *PROBLEM_COLUMNS)}
                gap |= {"label": label, "impl": impl_of(label), "role": "impl"}
                ordered.append(gap | {"status": NO_RECORD, "reason": "its run left no record of it on this case"})
    return ordered


def _add_ratios(rows: Iterable[Row], smallest_effects: Mapping[str, float]) -> None:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.get("us") is not None:
            key = tuple(row[column] for column in ("study", "run_id", "case", "method", "cache"))
            groups.setdefault(key, []).append(row)
    for group in groups.values():
        bound = next((row for row in group if row["impl"] == STREAM_READ), None)
        impls = [row for row in group if row["role"] == "impl"]
        best = min(impls, key=lambda row: row["us"], default=None)
        peers = [row for row in impls if row["impl"] not in (*OURS, *ABLATIONS)]
        peer = min(peers, key=lambda row: row["us"], default=None)
        for row in impls:
            smallest = smallest_effects[row["run_id"]]
            if best is not None and (slowdown := _set_ratio(row, "slowdown", row, best)) is not None:
                row["tied"] = stats.verdict(slowdown, smallest) == stats.TIE
            if bound is not None:
                _set_ratio(row, "share", bound, row, factor=100)
            if peer is not None and row["impl"] in OURS:
                ahead = _set_ratio(row, "ahead", peer, row)
                if ahead is not None:
                    row |= {"peer": peer["label"], "verdict": stats.verdict(ahead.inverse(), smallest)}


def _set_ratio(row: Row, name: str, over: Row, under: Row, *, factor: float = 1.0) -> stats.Estimate | None:
    """Put ``factor`` times the time of ``over`` over that of ``under`` into a row, paired by round."""
    ratio = stats.ratio_interval(over["samples"], under["samples"])
    if ratio is None:
        return None
    ratio = ratio.scaled(factor)
    row |= {name: ratio.median, f"{name}_low": ratio.low, f"{name}_high": ratio.high}
    shared = sorted(over["samples"].keys() & under["samples"].keys())
    row[f"{name}_rounds"] = [factor * over["samples"][i] / under["samples"][i] for i in shared]
    return ratio


def _frame(rows: Sequence[Row]) -> pd.DataFrame:
    columns = {}
    for name, kind in COLUMNS.items():
        values = [row.get(name) for row in rows]
        columns[name] = pd.Series(values, dtype=kind if kind in (int, float) else object)
    return pd.DataFrame(columns)
