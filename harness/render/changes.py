"""Two record files against each other: what became faster, what slower, and what is no longer right.

Two sessions of one GPU differ by a few per cent as a whole: other clocks, another chip of the same name. So
what is compared is each side's time over that of its own bound, the reading of the same bytes in the same
rounds. Where a side has no bound (a CPU, a bound that failed), times are compared as they are, and the table
says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from harness import stats
from harness.record import STREAM_READ, Record, RecordError, flatten, read, series_label

ALLOWED_SLOWDOWN = 0.03
"""The slowdown, as a share, that a comparison lets pass unless it is told otherwise."""

GONE = "no record"
"""Stands for the status of a row that a side does not have."""

Key: TypeAlias = tuple[str, str]
"""A case, and an implementation with what was asked of it."""


class CompareError(RecordError):
    """Two files that must not be compared; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One implementation on one case, before and after.

    Args:
        case: the case's name.
        label: the implementation, and what was asked of it.
        old: its status before, or :data:`GONE`.
        new: its status after, likewise.
        ratio: its time after over that before, each over its own bound if ``bounded``; None unless both are
            ``ok``.
        bounded: whether both sides have a bound for it.
        verdict: of :func:`harness.stats.verdict`; None without a ratio.
        failed: whether it became slower by more than is allowed, or stopped being ``ok``.
    """

    case: str
    label: str
    old: str
    new: str
    ratio: stats.Estimate | None
    bounded: bool
    verdict: str | None
    failed: bool


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a comparison found.

    Args:
        changes: in the order of the old file, then what only the new one has.
        environment: key -> (before, after), for what differs.
        method: how both were timed; None where nothing was.
        allow: the slowdown, as a share, that passes.
    """

    changes: tuple[Change, ...]
    environment: Mapping[str, tuple[str, str]]
    method: str | None
    allow: float

    @property
    def failed(self) -> bool:
        """Whether any change fails the comparison."""
        return any(change.failed for change in self.changes)


def compare_files(old: Path, new: Path, *, allow: float = ALLOWED_SLOWDOWN) -> Result:
    """Compare the newest rows of every case in two record files.

    Args:
        old: what was.
        new: what is.
        allow: the slowdown, as a share, that passes; one beyond it fails if its interval leaves 1 out.

    Raises:
        CompareError: for another method or cache state, or another problem under the same name.
        FileNotFoundError: for a file that is not there.
        harness.record.RecordError: for a line that is no record, or a file without measurements.
    """
    before, after = _Side.read(old), _Side.read(new)
    how = _same_method(before, after)
    keys = dict.fromkeys([*before.rows, *after.rows])
    return Result(
        changes=tuple(_change(key, before, after, allow) for key in keys),
        environment=_differences(before.environment, after.environment),
        method=how,
        allow=allow,
    )


@dataclass(frozen=True)
class _Side:
    path: Path
    rows: Mapping[Key, Record]
    bounds: Mapping[str, Record]
    environment: Mapping[str, str]
    smallest_effect: float

    @classmethod
    def read(cls, path: Path) -> _Side:
        records = read(path)
        runs = {r["run_id"]: r for r in records if r["kind"] == "run"}
        newest: dict[str, str] = {}
        measured = [r for r in records if r["kind"] == "measurement" and r["case"] is not None]
        for record in measured:
            newest[record["case"]] = record["run_id"]
        measured = [r for r in measured if r["run_id"] == newest[r["case"]]]
        rows = {(r["case"], series_label(r)): r for r in measured if r["role"] == "impl"}
        if not rows:
            raise RecordError(f"{path}: expected measurements of a case, got {len(records)} other records")
        used = [runs[run_id] for run_id in dict.fromkeys(newest.values()) if run_id in runs]
        environment: dict[str, str] = {}
        for run in used:
            for name, value in flatten(run["env"]):
                told = environment.get(name)
                environment[name] = value if told in (None, value) else f"{told}, {value}"
        smallest = max((run.get("smallest_effect", stats.SMALLEST_EFFECT) for run in used), default=0.0)
        bounds = {r["case"]: r for r in measured if r["impl"] == STREAM_READ and r["status"] == "ok"}
        return cls(path, rows, bounds, environment, smallest)


def _same_method(before: _Side, after: _Side) -> str | None:
    """The one method of both sides.

    Raises:
        CompareError: if there are several.
    """
    ways: dict[str, str] = {}
    for side in (before, after):
        for (case, name), row in side.rows.items():
            if row["timing"] is not None:
                way = f"{row['timing']['method']}, cache {row['timing']['cache']}"
                ways.setdefault(way, f"{side.path}: {name} on {case}")
    if len(ways) > 1:
        told = "; ".join(f"{way} ({where})" for way, where in ways.items())
        raise CompareError(f"method: expected one on both sides, got {told}")
    return next(iter(ways), None)


def _change(key: Key, before: _Side, after: _Side, allow: float) -> Change:
    case, name = key
    old, new = before.rows.get(key), after.rows.get(key)
    if old is not None and new is not None and old["problem"] != new["problem"]:
        differ = [name for name in old["problem"] if old["problem"][name] != new["problem"].get(name)]
        raise CompareError(f"{case}: expected the same problem on both sides, got another {', '.join(differ)}")
    was, now = (GONE if row is None else row["status"] for row in (old, new))
    ratio, bounded = None, False
    if old is not None and new is not None and was == now == "ok":
        bounded = case in before.bounds and case in after.bounds
        ratio = stats.quotient_interval(
            _times(new, after.bounds[case] if bounded else None),
            _times(old, before.bounds[case] if bounded else None),
        )
    verdict = None if ratio is None else stats.verdict(ratio, before.smallest_effect)
    slower = ratio is not None and verdict == stats.SLOWER and ratio.median > 1 + allow
    return Change(
        case=case,
        label=name,
        old=was,
        new=now,
        ratio=ratio,
        bounded=bounded,
        verdict=verdict,
        failed=slower or (was == "ok" and now != "ok"),
    )


def _times(row: Record, bound: Record | None) -> list[float]:
    """The times of a row, over those of the bound in the same rounds where there is one."""
    times = _by_round(row)
    if bound is None:
        return list(times.values())
    limit = _by_round(bound)
    return [us / limit[i] for i, us in times.items() if i in limit]


def _by_round(row: Record) -> dict[int, float]:
    samples = row["timing"]["samples"]
    # As in a report: throttled samples do not count, unless there are no others.
    kept = [s for s in samples if not s["throttled"]] or samples
    return {s["round"]: s["us"] for s in kept}


def _differences(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    pairs = {name: (old.get(name, "–"), new.get(name, "–")) for name in dict.fromkeys([*old, *new])}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
