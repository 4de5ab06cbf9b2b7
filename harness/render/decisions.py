"""What to run: for each case the fastest implementation, its splits, its margin over the next, and who ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness import stats
from harness.render.frame import Comparison, each, impl_of
from harness.render.text import ABSENT, code, join, linked, number_text, percent_text
from impls.catalog import ABLATIONS, OURS


@dataclass(frozen=True)
class Decision:
    """The answer for one case.

    Args:
        case: the case.
        best: the row to run: the fastest of any split count; where that ties with it, one of this project's
            kernels rather than an ablation, and an implementation's own choice of splits. None where nothing has a
            time.
        own: the row of the same implementation with its own choice, where ``best`` is another one.
        next: the fastest row of another implementation, None where there is none.
        margin: the time of ``next`` over that of ``best``.
        ties: the other implementations whose fastest row :func:`harness.stats.verdict` cannot tell from ``best``.
    """

    case: str
    best: Any | None = None
    own: Any | None = None
    next: Any | None = None
    margin: stats.Estimate | None = None
    ties: tuple[str, ...] = ()


def decide(comparison: Comparison) -> list[Decision]:
    """The answer for every case, in their order; none from a run on a CPU, which tells nothing about speed."""
    if comparison.functional:
        return []
    by_case: dict[str, list[Any]] = {case: [] for case in comparison.cases}
    for row in each(comparison.impls[comparison.impls["us"].notna()]):
        by_case[row.case].append(row)
    return [_decide(case, rows, comparison.smallest_effect) for case, rows in by_case.items()]


def _decide(case: str, rows: Sequence[Any], smallest: float) -> Decision:
    if not rows:
        return Decision(case)
    best, *others = sorted(rows, key=lambda row: float(row.us))
    if best.impl in ABLATIONS:
        alike = [row for row in others if row.impl in OURS and _tied(row, best, smallest)]
        if alike:  # what the project recommends, before what it tries with one choice undone
            first = min(alike, key=lambda row: OURS.index(row.impl))
            best, others = first, [best, *(row for row in others if row is not first)]
    own = None
    if best.asked_splits is not None:
        own = next((row for row in others if row.family == best.family and row.asked_splits is None), None)
        if own is not None and _tied(own, best, smallest):
            best, own = own, None
    fastest: dict[str, Any] = {}
    for row in others:
        if row.impl != best.impl:
            fastest.setdefault(row.impl, row)
    ratios = {impl: ratio for impl, row in fastest.items() if (ratio := paired(row, best)) is not None}
    ties = tuple(impl for impl, ratio in ratios.items() if stats.verdict(ratio, smallest) == stats.TIE)
    after = next((fastest[impl] for impl in ratios), None)
    return Decision(case, best, own, after, None if after is None else ratios[after.impl], ties)


def _tied(row: Any, other: Any, smallest: float) -> bool:
    ratio = paired(row, other)
    return ratio is not None and stats.verdict(ratio, smallest) == stats.TIE


def splits_text(row: Any) -> str:
    """The split count that a row asked for, or what its own choice came to."""
    if row.asked_splits is not None:
        return f"{row.asked_splits}"
    if math.isnan(row.splits_max):
        return "its own choice" if row.splits_note is not None else ABSENT
    count = f"{row.splits_max:.0f}"
    even = row.batch * row.max_kv == row.total_kv
    return f"auto: {count}" if even or count == "1" else f"auto: up to {count}"


def against_own_text(decision: Decision) -> str:
    """What the implementation's own choice of splits costs against a better fixed count."""
    own, best = decision.own, decision.best
    ratio = None if own is None else paired(own, best)
    return "" if ratio is None else f" ({splits_text(own)} is {percent_text(ratio.median)} % slower)"


def margin_text(decision: Decision) -> str:
    """How much slower the next implementation is, with the interval; or with whom it is a tie."""
    row, margin = decision.next, decision.margin
    if row is None or margin is None:
        return "nothing to compare with"
    low, high = percent_text(margin.low), percent_text(margin.high)
    if decision.ties:
        by = linked(f"{low} to {high} %", row.anchor)
        return f"**tie** with {join([code(impl) for impl in decision.ties])} ({by})"
    return f"{linked(f'{percent_text(margin.median)} % [{low}, {high}]', row.anchor)}: {code(row.label)}"


def share_text(row: Any) -> str:
    """The share of the bound, with its interval's ends where they differ."""
    return ABSENT if math.isnan(row.share) else f"{number_text(row.share, 3)} %"


def leaders(comparison: Comparison) -> list[tuple[str, int]]:
    """Implementation -> on how many cases it is the fastest or ties with it, most first; without those on none.

    By their own choice of splits, where they are here with one."""
    rows = comparison.impls[comparison.impls["slowdown"].notna() & comparison.impls["label"].isin(comparison.shown)]
    leads = rows[(rows["slowdown"] == 1.0) | rows["tied"].eq(True)]
    counts = leads.groupby("impl", sort=False)["case"].nunique()
    order = list(dict.fromkeys(impl_of(label) for label in comparison.series))
    return sorted(((str(impl), int(n)) for impl, n in counts.items()), key=lambda x: (-x[1], order.index(x[0])))


def paired(row: Any, other: Any) -> stats.Estimate | None:
    """The time of one row over that of another of the same run and case, paired by round."""
    if row.run_id != other.run_id or row.samples is None or other.samples is None:
        return None
    return stats.ratio_interval(row.samples, other.samples)


def on_devices(comparison: Comparison) -> Sequence[tuple[str, pd.DataFrame, int]]:
    """(device, its implementations' rows, its number of cases); times of two devices are never averaged."""
    rows = comparison.impls
    found = []
    for device in comparison.devices:
        mine = rows[rows["device"] == device]
        found.append((device, mine, int(mine["case"].nunique())))
    return found
