"""Records to one long data frame: a row for each implementation, and for the bound, on each case.

All arithmetic on measurements is here and in :mod:`harness.render.rows`; figures and tables only arrange it.
Ratios are formed inside one run, case, method and cache state, and nowhere else.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from harness import cost
from harness.record import (
    READ_CEILING,
    STATUSES,
    STREAM_READ,
    Record,
    RecordError,
    read_numbered,
    records_file,
    series_label,
)
from harness.render.rows import (
    PROBLEM_COLUMNS,
    CheckedElsewhere,
    Row,
    add_ratios,
    checked_elsewhere,
    deep_checks_of,
    device_of,
    newest,
    own_choices,
    profiles_of,
    row_of,
    smallest_effect,
    times_of,
    traced_alike,
)
from impls.catalog import IMPLS
from impls.problem import DecodeProblem

NO_RECORD = "no record"
"""The status of an implementation that has rows on other cases of the study, but none on this one."""

WORDS = (*STATUSES, NO_RECORD)
"""What a report may say of an implementation on a case."""

COLUMNS: Mapping[str, type] = {
    "study": str,
    "run_id": str,
    "line": object,
    "anchor": str,
    "device": str,
    "sm_count": float,
    "case": str,
    "impl": str,
    "label": str,
    "family": str,
    "asked_splits": object,
    "role": str,
    "status": str,
    "reason": str,
    "problem": object,
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
    "samples": object,
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
    "same_as": str,
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
    "main_net_us": float,
    "others_net_us": float,
    "gap_net_us": float,
    "between_net_us": float,
    "kernel_names": object,
    "traced_alike": object,
    "traced_run": str,
    "traced_git": str,
    "compile_ms": float,
    "plan_us": float,
    "num_splits": object,
    "splits_max": float,
    "work_items": float,
    "splits_total": float,
    "ran": object,
    "chosen": object,
    "merge": str,
    "splits_note": str,
    "config": str,
    "library": str,
    "version": str,
    "function": str,
    "rel_l2": float,
    "worst_row": float,
    "lse_err": float,
    "deep": str,
}
"""The columns of :attr:`Comparison.rows`; floats are NaN and the rest None where there is nothing to say."""


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
            of ``cases`` and ``series``. ``line`` is the record's in its file and ``anchor`` what the report calls
            it. ``asked_splits`` is a fixed split count that the study asks for, and ``family`` the label
            without it. Times are µs (``us`` is a median, ``us_low`` and ``us_high`` its
            95 % interval) and are there for status ``ok`` alone; sizes are bytes. ``share`` is the bound's
            time over this one, in %; ``slowdown`` this time over that of the case's fastest
            among :attr:`shown`, and ``tied`` whether :func:`harness.stats.verdict` calls that a tie; ``same_as``
            is, for an ablation, which of our kernels ran the very same there (``ran`` is equal), and such a row is
            no case's fastest; ``ahead``
            the time of the case's fastest ``peer`` over this one, for the kernels of this project, and
            ``verdict`` what that makes this one. Each of the three has its interval in ``_low`` and
            ``_high``, and its values round by round in ``_rounds``. What ``profiled_us`` (a call, untraced)
            consists of is from a run of method ``kernels``: the split kernel of ours, or the longest of another
            implementation, in ``main_us``, all others in
            ``others_us``, ``gap_us`` among them and ``between_us`` to the next call, in all ``traced_us``; and
            in ``main_net_us`` and so on without the time in which a kernel waits for the one before it;
            ``traced_run`` and ``traced_git`` are that run and its commit, and ``traced_alike`` says whether its
            plan came to the same.
            ``splits_total`` is how many splits all sequences have and ``merge`` how they merge, for our kernels.
            ``deep`` is the status that ``splitkv check`` gave it, None where that did not try it.
        ceilings: the device's read ceiling in GB/s, by run id.
        folders: what each study is called -> its folder.
    """

    name: str
    runs: tuple[Record, ...]
    cases: tuple[str, ...]
    series: tuple[str, ...]
    rows: pd.DataFrame
    ceilings: Mapping[str, float]
    folders: Mapping[str, Path]

    @property
    def smallest_effect(self) -> float:
        """The difference, as a share, below which a verdict is a tie; the largest that a run states."""
        return max(map(smallest_effect, self.runs))

    @property
    def impls(self) -> pd.DataFrame:
        """The rows of implementations."""
        return self.rows[self.rows["role"] == "impl"]

    @cached_property
    def _first(self) -> list[dict[Hashable, Any]]:
        """The first row of each series."""
        columns = ["label", "family", "asked_splits", "role"]
        return self.impls.drop_duplicates("label")[columns].to_dict("records")

    @property
    def shown(self) -> tuple[str, ...]:
        """The series of a figure: without fixed split counts of what is also here with its own choice.

        Those have figures and tables of their own; :attr:`series` has all.
        """
        chosen = own_choices(self._first)
        return tuple(label for label in self.series if label in chosen)

    def plans_chosen(self) -> dict[tuple[str, str], Mapping[str, Any]]:
        """(case, implementation) -> what our rules have chosen there, where nothing was asked for."""
        own = self.impls[(self.impls["label"] == self.impls["impl"]) & self.impls["chosen"].notna()]
        return {(row.case, row.impl): row.chosen for row in each(own)}

    @property
    def has_fixed(self) -> bool:
        """Whether something is here at fixed split counts beside its own choice."""
        return len(self.shown) < len(self.series)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of the rows, each once, in the order of the runs."""
        here = set(self.rows["device"])
        return tuple(dict.fromkeys(device for device in map(device_of, self.runs) if device in here))

    @property
    def bounds(self) -> pd.DataFrame:
        """The rows of the bound that have a time."""
        return self.rows[(self.rows["impl"] == STREAM_READ) & self.rows["us"].notna()]

    @property
    def functional(self) -> bool:
        """Whether every run was on a CPU, so that times show that kernels run and not how fast they are."""
        return all(run["env"].get("device") == "cpu" for run in self.runs)

    @cached_property
    def problems(self) -> Mapping[str, DecodeProblem]:
        """Case -> its problem."""
        first = self.impls.drop_duplicates("case")
        return dict(zip(first["case"], first["problem"], strict=True))

    @cached_property
    def elsewhere(self) -> CheckedElsewhere | None:
        """The deeper check of the same kernels in a study beside this one, where this one has none of its own."""
        if len(self.folders) != 1 or self.impls["deep"].notna().any():
            return None
        [folder] = self.folders.values()
        impls = list(dict.fromkeys(map(impl_of, self.series)))
        return checked_elsewhere(folder, self.runs, impls, self.problems)

    @cached_property
    def faulty(self) -> frozenset[str]:
        """The series that the deeper check, or else :attr:`elsewhere`, did not find right on all cases it tried."""
        rows = self.impls[self.impls["deep"].notna() & (self.impls["deep"] != "ok")]
        if self.elsewhere is None:
            return frozenset(rows["label"])
        wrong = {impl for impl, (right, tried) in self.elsewhere.counts.items() if right < tried}
        return frozenset(label for label in self.series if impl_of(label) in wrong)

    def table(self, column: str) -> pd.DataFrame:
        """``[cases, series]`` of one column of the implementations' rows."""
        table = self.impls.pivot(index="case", columns="label", values=column)
        return table.reindex(index=list(self.cases), columns=list(self.series))


def each(rows: pd.DataFrame) -> Iterable[Any]:
    """The rows one by one, a column an attribute."""
    names = tuple(rows.columns)
    return map(_row_class(names)._make, zip(*(rows[name].tolist() for name in names), strict=True))


@cache
def _row_class(names: tuple[str, ...]) -> Any:
    # pandas' own itertuples makes a class each time, which takes longer than the rows of a case.
    return namedtuple("_Row", names)


def impl_of(label: str) -> str:
    """The implementation id of a series."""
    return label.split(" ", 1)[0]


def load(folders: Sequence[Path], *, file: str | None = None, anchor: str = "r") -> Comparison:
    """The comparison that the record files of one or more study folders hold.

    Where a case was recorded more than once, its newest run counts. With several folders, the name of
    each case begins with that of its folder.

    Args:
        folders: of the studies.
        file: the name of the record file in each; None is that of a run by the default method.
        anchor: what the anchors of its lines begin with.

    Raises:
        harness.record.RecordError: for a folder without records or measurements, a line that is not a record,
            or a row whose run is not recorded.
        ValueError: for no folder, or the same one twice.
    """
    names = folder_names(folders)
    runs: dict[str, Record] = {}
    rows: list[Row] = []
    ceilings: dict[str, float] = {}
    for i, (name, folder) in enumerate(names.items()):
        found = _read_folder(folder, file, anchor)
        runs |= found.runs
        ceilings |= found.ceilings
        for row in found.rows:
            row["study"] = name
            if len(folders) > 1:
                row |= {"case": f"{name}/{row['case']}", "anchor": f"s{i}{row['anchor']}"}
        rows += found.rows

    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["case"], row)
    cases = tuple(sorted(first, key=lambda case: int(first[case]["kv_bytes"])))
    series = _series(rows)
    rows = _in_order(rows, first, cases, series)
    add_ratios(rows, {run_id: smallest_effect(run) for run_id, run in runs.items()}, own_choices(rows))
    used = {row["run_id"] for row in rows}
    return Comparison(
        name=" + ".join(names),
        runs=tuple(run for run_id, run in runs.items() if run_id in used),
        cases=cases,
        series=series,
        rows=_frame(rows),
        ceilings={run_id: gbps for run_id, gbps in ceilings.items() if run_id in used},
        folders=names,
    )


def folder_names(folders: Sequence[Path]) -> dict[str, Path]:
    """What each folder is called in a report: its own name, with its parent's where two share one.

    Raises:
        ValueError: for no folder, or the same one twice (a RecordError).
    """
    if not folders:
        raise ValueError("folders: expected at least one, got none")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [f"{folder.resolve().parent.name}-{folder.resolve().name}" for folder in folders]
    if len(set(names)) < len(names):
        raise RecordError(f"folders: expected each once, got {', '.join(map(str, folders))}")
    return dict(zip(names, folders, strict=True))


@dataclass(frozen=True)
class _Found:
    """What one folder holds."""

    runs: Mapping[str, Record]
    rows: Sequence[Row]
    ceilings: Mapping[str, float]


def _read_folder(folder: Path, file: str | None, anchor: str) -> _Found:
    path = folder / (file or records_file())
    if not path.is_file():
        raise RecordError(f"{path}: expected the records of a run, got no such file")
    numbered = read_numbered(path)
    lines = {id(record): number for number, record in numbered}
    records = [record for _, record in numbered]
    runs = {r["run_id"]: r for r in records if r["kind"] == "run"}
    measured = newest(r for r in records if r["kind"] == "measurement")
    if all(record["impl"] == READ_CEILING for record in measured):
        raise RecordError(f"{path}: expected measurements of a case, got {len(records)} other records")
    profiles, deep = profiles_of(folder), deep_checks_of(folder)
    rows: list[Row] = []
    ceilings: dict[str, float] = {}
    for record in measured:
        run = runs.get(record["run_id"])
        if run is None:
            raise RecordError(f"{path}: expected a run record of {record['run_id']}, got none")
        if record["impl"] == READ_CEILING:
            if (us := times_of(record).get("us")) is not None:
                ceilings[record["run_id"]] = cost.gbps(record["config"]["bytes"], us)
            continue
        line, device = lines[id(record)], device_of(run)
        parts = profiles.get((record["case"], series_label(record), device), {})
        if parts:
            parts = parts | {"traced_alike": traced_alike(record, parts)}
        place = {"case": record["case"], "line": line, "anchor": f"{anchor}{line}", "device": device}
        told = {"sm_count": run["env"].get("sm_count"), "deep": deep.get((record["case"], series_label(record)))}
        rows.append(row_of(record) | parts | place | told)
    return _Found(runs, rows, ceilings)


def _series(rows: Iterable[Row]) -> tuple[str, ...]:
    known = list(IMPLS)

    def place(label: str) -> tuple[int, str, int, str]:
        impl = impl_of(label)
        # By length before text, so that num_splits=16 follows num_splits=8.
        return (known.index(impl) if impl in known else len(known), impl, len(label), label)

    return tuple(sorted({row["label"] for row in rows if row["role"] == "impl"}, key=place))


_OF_CASE = ("study", "run_id", "case", "device", "sm_count")


def _in_order(
    rows: Iterable[Row], first: Mapping[str, Row], cases: Sequence[str], series: Sequence[str]
) -> list[Row]:
    """All rows by case and series, with a row that says so for each that was not recorded."""
    here = {(row["case"], row["label"]): row for row in rows}
    named = {row["label"]: row for row in here.values()}
    ordered = []
    for case in cases:
        for label in (STREAM_READ, *series):
            if (row := here.get((case, label))) is not None:
                ordered.append(row)
            elif label != STREAM_READ:
                gap = {key: first[case][key] for key in (*_OF_CASE, "problem", *PROBLEM_COLUMNS)}
                gap |= {key: named[label][key] for key in ("label", "impl", "role", "family", "asked_splits")}
                ordered.append(gap | {"status": NO_RECORD, "reason": "its run left no record of it on this case"})
    return ordered


def _frame(rows: Sequence[Row]) -> pd.DataFrame:
    columns = {}
    for name, kind in COLUMNS.items():
        values = [row.get(name) for row in rows]
        columns[name] = pd.Series(values, dtype=kind if kind in (int, float) else object)
    return pd.DataFrame(columns)
