"""Cases that belong together: sweeps of the batch size, uneven batches beside even ones, sweeps of split counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pandas as pd

from harness.render.frame import Comparison, each

T = TypeVar("T")

MIN_BATCHES = 3
"""The fewest batch sizes of one length that show where a kernel falls off."""

MIN_COUNTS = 3
"""The fewest fixed split counts that make a curve."""

ABOUT_EQUAL = 1.5
"""How many times the bytes of the other one batch may hold for the two to stand side by side."""

MIN_SEQUENCES = 0.5
"""The share of an uneven batch's sequences that the uniform one beside it must have: one sequence is no batch."""

MIN_BOUNDS = 3
"""The fewest sizes of the bound from which its launch floor is extrapolated."""

MAX_PANELS = 8
"""The most sweeps, cases of split counts, or pairs that one figure shows; tables and records have all."""

_SHAPE = ("heads_q", "heads_kv", "head_dim", "dtype", "device", "study")


@dataclass(frozen=True)
class Sweep:
    """One length of one shape at several batch sizes: a title, and the rows that have a share of the bound."""

    title: str
    rows: pd.DataFrame


@dataclass(frozen=True)
class Pair:
    """An uneven batch and the uniform one of the same shape that is nearest in bytes."""

    uneven: str
    even: str


@dataclass(frozen=True)
class Curve:
    """One implementation on one case, at several fixed split counts and with its own choice.

    Args:
        case: the case.
        family: the label without a split count.
        fixed: its rows with a fixed count and a time, by count.
        own: its row with its own choice, None where that has no time.
    """

    case: str
    family: str
    fixed: Sequence[Any]
    own: Any | None

    @property
    def best(self) -> Any:
        """The fastest row of a fixed count."""
        return min(self.fixed, key=lambda row: row.us)


def launch_floor(bounds: pd.DataFrame) -> float | None:
    """What a launch takes however little it reads, in µs: where the bound's time would end at no bytes.

    From the two smallest sizes of the bound, extrapolated; None with fewer than :data:`MIN_BOUNDS` sizes, or
    where that gives nothing above 0.
    """
    times = bounds.groupby("kv_bytes")["us"].median()
    if len(times) < MIN_BOUNDS:
        return None
    (x0, x1), (y0, y1) = times.index[:2], times.iloc[:2]
    floor = float(y0 - x0 * (y1 - y0) / (x1 - x0))
    return floor if 0 < floor <= y0 else None


def sweeps_of(comparison: Comparison) -> list[Sweep]:
    """The lengths that the comparison holds at :data:`MIN_BATCHES` batch sizes or more, shortest first."""
    rows = _even(with_share(comparison))
    found = []
    for key, mine in rows.groupby(["max_kv", *_SHAPE], sort=True):
        if mine["batch"].nunique() < MIN_BATCHES:
            continue
        max_kv, heads_q, heads_kv, head_dim, dtype, device, study = key
        title = f"{max_kv:,} keys each, heads {heads_q}/{heads_kv}, head dim {head_dim}, {dtype}"
        if len(comparison.devices) > 1:
            title += f"\n{study}, {device}"
        found.append(Sweep(title, mine.sort_values("batch", kind="stable")))
    return found


def uneven_cases(comparison: Comparison) -> list[str]:
    """The cases whose sequences differ in length, and that have a share of the bound."""
    rows = with_share(comparison)
    uneven = set(rows.loc[rows["batch"] * rows["max_kv"] != rows["total_kv"], "case"])
    return [case for case in comparison.cases if case in uneven]


def pairs_of(comparison: Comparison) -> list[Pair]:
    """Each uneven batch with the nearest uniform one of its shape, of about its bytes and enough sequences."""
    cases = with_share(comparison).drop_duplicates("case")[
        ["case", "batch", "kv_bytes", "max_kv", "total_kv", *_SHAPE]
    ]
    even: dict[tuple[Any, ...], list[Any]] = {}
    for row in each(_even(cases)):
        even.setdefault(_shape(row), []).append(row)
    of_case = {row.case: row for row in each(cases)}
    pairs = []
    for case in uneven_cases(comparison):
        mine = of_case[case]
        enough = [row for row in even.get(_shape(mine), ()) if row.batch >= MIN_SEQUENCES * mine.batch]
        alike = [(_apart(row.kv_bytes, mine.kv_bytes), row) for row in enough]
        near = [(far, row) for far, row in alike if far <= math.log(ABOUT_EQUAL)]
        if near:
            # Of several of the same bytes, the one of the most similar number of sequences.
            _, row = min(near, key=lambda found: (round(found[0], 6), _apart(found[1].batch, mine.batch)))
            pairs.append(Pair(case, row.case))
    return pairs


def _shape(row: Any) -> tuple[Any, ...]:
    return tuple(getattr(row, column) for column in _SHAPE)


def _apart(size: float, other: float) -> float:
    """How far two sizes above 0 lie apart, on a log scale."""
    return abs(math.log(size / other))


def curves_of(comparison: Comparison) -> list[Curve]:
    """Every implementation and case at :data:`MIN_COUNTS` fixed split counts or more, cases in their order."""
    if comparison.functional:
        return []
    timed: dict[tuple[str, str], list[Any]] = {}
    for row in each(comparison.impls[comparison.impls["us"].notna()]):
        timed.setdefault((row.case, row.family), []).append(row)
    curves = []
    for (case, family), rows in timed.items():
        fixed = sorted((row for row in rows if row.asked_splits is not None), key=lambda row: row.asked_splits)
        if len({row.asked_splits for row in fixed}) >= MIN_COUNTS:
            own = next((row for row in rows if row.asked_splits is None), None)
            curves.append(Curve(case, family, tuple(fixed), own))
    return curves


def by_case(curves: Sequence[Curve]) -> Mapping[str, list[Curve]]:
    """The curves of each case."""
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.case, []).append(curve)
    return found


def thinned(items: Sequence[T]) -> list[T]:
    """All of them, or :data:`MAX_PANELS` evenly spaced ones."""
    n = len(items)
    return list(items) if n <= MAX_PANELS else [items[i * (n - 1) // (MAX_PANELS - 1)] for i in range(MAX_PANELS)]


def thinned_text(n: int, what: str) -> str:
    """A sentence on what a figure leaves out, where it does."""
    return f" {MAX_PANELS} of {n} {what} are drawn." if n > MAX_PANELS else ""


def with_share(comparison: Comparison) -> pd.DataFrame:
    """The rows of a figure that have a share of the bound."""
    rows = comparison.impls
    return rows[rows["share"].notna() & rows["label"].isin(comparison.shown)]


def _even(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["batch"] * rows["max_kv"] == rows["total_kv"]) & (rows["total_kv"] > 0)]
