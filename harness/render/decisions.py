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
        same: the other implementations that ran the very same as ``best``: neither next nor a tie, but a copy.
    """

    case: str
    best: Any | None = None
    own: Any | None = None
    next: Any | None = None
    margin: stats.Estimate | None = None
    ties: tuple[str, ...] = ()
    same: tuple[str, ...] = ()


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
        alike = [row for row in others if row.impl in OURS and (_same(row, best) or _tied(row, best, smallest))]
        if alike:  # what the project recommends, before what it tries with one choice undone
            first = min(alike, key=lambda row: OURS.index(row.impl))
            best, others = first, [best, *(row for row in others if row is not first)]
    own = None
    if best.asked_splits is not None:
        own = next((row for row in others if row.family == best.family and row.asked_splits is None), None)
        if own is not None and _tied(own, best, smallest):
            best, own = own, None
    fastest: dict[str, Any] = {}
    same = tuple(dict.fromkeys(row.impl for row in others if row.impl != best.impl and _same(row, best)))
    for row in others:
        if row.impl != best.impl and not _same(row, best):
            fastest.setdefault(row.impl, row)
    ratios = {impl: ratio for impl, row in fastest.items() if (ratio := paired(row, best)) is not None}
    ties = tuple(impl for impl, ratio in ratios.items() if stats.verdict(ratio, smallest) == stats.TIE)
    after = next((fastest[impl] for impl in ratios), None)
    return Decision(case, best, own, after, None if after is None else ratios[after.impl], ties, same)


def _same(row: Any, other: Any) -> bool:
    """Whether two rows of a case are of one kernel, in one configuration and with the same splits."""
    return row.ran is not None and row.ran == other.ran


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


def spread_text(row: Any) -> str:
    """How the splits of an uneven batch are spread over its sequences, as far as a record tells."""
    if math.isnan(row.splits_total) or row.splits_max == 1 or row.batch * row.max_kv == row.total_kv:
        return ""
    # Every sequence has a split; where the others of one of them are all that is left, the rest has one each.
    if row.splits_total - row.batch == row.splits_max - 1:
        return f"; {row.batch - 1} of {row.batch} sequences get 1"
    return f"; {row.splits_total:.0f} for {row.batch} sequences"


def against_own_text(decision: Decision) -> str:
    """What the implementation's own choice of splits costs against a better fixed count."""
    own, best = decision.own, decision.best
    ratio = None if own is None else paired(own, best)
    return "" if ratio is None else f" ({splits_text(own)} is {percent_text(ratio.median)} % slower)"


def margin_text(decision: Decision) -> str:
    """How much slower the next implementation is, with its interval, or that it ties; and who runs the same."""
    row, margin = decision.next, decision.margin
    if row is None or margin is None:
        text = "nothing to compare with"
    else:
        low, high = percent_text(margin.low), percent_text(margin.high)
        text = f"{linked(f'{percent_text(margin.median)} % [{low}, {high}]', row.anchor)}: {code(row.label)}"
        if decision.ties:
            by = linked(f"{low} to {high} %", row.anchor)
            text = f"**tie** with {join([code(impl) for impl in decision.ties])} ({by})"
    verb = "runs" if len(decision.same) == 1 else "run"
    return text + (f"; {join([code(impl) for impl in decision.same])} {verb} the same" if decision.same else "")


def share_text(row: Any) -> str:
    """The share of the bound, with its interval's ends where they differ."""
    return ABSENT if math.isnan(row.share) else f"{number_text(row.share, 3)} %"


def leaders(comparison: Comparison) -> list[tuple[str, int]]:
    """Implementation -> on how many cases it is the fastest or ties with it, most first; without those on none.

    By their own choice of splits, where they are here with one."""
    leads = comparison.impls[comparison.impls["label"].isin(comparison.shown) & leading(comparison.impls)]
    counts = leads.groupby("impl", sort=False)["case"].nunique()
    order = list(dict.fromkeys(impl_of(label) for label in comparison.series))
    return sorted(((str(impl), int(n)) for impl, n in counts.items()), key=lambda x: (-x[1], order.index(x[0])))


def leading(rows: pd.DataFrame) -> pd.Series[Any]:
    """Which rows are the fastest of their case or tie with it: :func:`leading_text` says what that means.

    What ran the very same as one of our kernels is not counted beside it."""
    ahead = (rows["slowdown"] == 1.0) | rows["tied"].eq(True)
    return rows["slowdown"].notna() & ahead & rows["same_as"].isna()


def leading_text(comparison: Comparison) -> str:
    """What fastest or tied means, the same wherever a report counts it."""
    own = ", with the splits that it chooses by itself," if comparison.has_fixed else ""
    return (
        f"An implementation{own} is *fastest or tied* on a case if its median is the lowest there, or if the"
        " difference from the lowest is a tie; so it is counted above, below and under figures."
    )


def same_text(comparison: Comparison) -> str:
    """Which ablations ran the very same as one of our kernels, and on which cases; empty where none did."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in each(comparison.impls[comparison.impls["same_as"].notna()]):
        groups.setdefault((row.label, row.same_as), []).append(code(row.case))
    told = [
        f"{code(label)} runs the same as {code(same)} on {join(cases)}" for (label, same), cases in groups.items()
    ]
    how = "one kernel, in one configuration and with the same splits"
    return f"{'; '.join(told)} ({how}), and does not count there." if told else ""


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
