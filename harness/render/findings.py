"""What a report says in sentences: its headline, and a caption for each figure, all generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from harness import stats
from harness.render.frame import Comparison, each, impl_of
from harness.stats import CONFIDENCE
from impls.catalog import OURS


def headline(comparison: Comparison) -> list[str]:
    """One or two sentences: how our kernels stand, with counts and directions."""
    rows = comparison.impls
    m = len(comparison.cases)
    ours = [label for label in comparison.series if impl_of(label) in OURS]
    if not (rows["status"] == "ok").any():
        return [f"No implementation succeeded on any of {_cases(m)}; the reasons are below."]
    if comparison.functional:
        right = [f"{code(label)} on {passed(rows, label)}" for label in ours]
        return [
            "This is a functional run on a CPU: it shows which kernels run and are right, and makes no claim"
            " about speed.",
            f"Within the error budget, of {_cases(m)}: {join(right)}." if right else _support(comparison),
        ]
    sentences = []
    for label in ours:
        ahead = rows.loc[(rows["label"] == label) & rows["ahead"].notna(), "ahead"]
        if ahead.empty:
            sentences.append(f"{code(label)}: ok on {passed(rows, label)} of {_cases(m)}, with no peer to compare.")
        else:
            mine = rows[rows["label"] == label]
            told = mine["verdict"].value_counts()
            sentences.append(
                f"{code(label)} is faster than the best peer on {told.get(stats.FASTER, 0)} of {_cases(m)}, ties"
                f" with it on {told.get(stats.TIE, 0)} and is slower on {told.get(stats.SLOWER, 0)}; in speed,"
                f" {mean_text(mine['ahead_rounds'], m, '×')} (geometric mean)."
            )
    return sentences or [_slowdown(comparison)]


def mean_text(rounds: pd.Series[Any], m: int, unit: str) -> str:
    """The geometric mean over cases of ratios, with its interval and n of ``m``; a dash where there is none."""
    known = list(rounds.dropna())
    if not known:
        return "–"
    mean = stats.geometric_mean_interval(known)
    places = 3 if unit == "×" else 1
    span = f"{mean.low:.{places}f}, {mean.high:.{places}f}"
    return f"{mean.median:.{places}f}{unit} [{span}] over {mean.n} of {m}"


def against_peer(row: Any) -> str:
    """What may be said of an implementation beside its best peer, from a row that has a verdict."""
    if row.verdict == stats.TIE:
        low, high = 100 * (row.ahead_low - 1), 100 * (row.ahead_high - 1)
        return f"tie with {code(row.peer)} ({low:+.1f} to {high:+.1f} %)"
    # By how much the slower of the two takes longer, whichever it is.
    low, by, high = row.ahead_low, row.ahead, row.ahead_high
    if row.verdict == stats.SLOWER:
        low, by, high = 1 / high, 1 / by, 1 / low
    span = f"[{100 * (low - 1):.1f}, {100 * (high - 1):.1f}]"
    return f"**{row.verdict}** than {code(row.peer)} by {100 * (by - 1):.1f} % {span}"


def caption(comparison: Comparison, figure: str) -> tuple[str, str]:
    """The alternative text and the caption of one figure, by its name."""
    alt, write = CAPTIONS[figure]
    return alt, write(comparison)


def escape(text: str) -> str:
    """``text`` on one line, with what Markdown or a table would read as markup taken literally."""
    return re.sub(r"([\\`*_\[\]<>|#~])", r"\\\1", " ".join(text.split()))


def code(name: str) -> str:
    """``name`` as a code span that a table can hold."""
    return f"`{name.replace('|', chr(92) + '|')}`"


def passed(rows: pd.DataFrame, label: str) -> int:
    """On how many cases a series is ``ok``."""
    return int(((rows["label"] == label) & (rows["status"] == "ok")).sum())


def join(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _share(comparison: Comparison) -> str:
    rows = comparison.impls[comparison.impls["share"].notna()]
    count = rows.loc[rows.groupby("case")["share"].idxmax(), "label"].value_counts()
    label = next(label for label in comparison.series if count.get(label, 0) == count.max())
    mine = rows[rows["label"] == label]
    low, high = mine.nsmallest(1, "share").iloc[0], mine.nlargest(1, "share").iloc[0]
    return (
        f"{code(label)} is nearest to the bound on {count.max()} of {len(comparison.cases)} cases, from"
        f" {low['share']:.0f} % ({code(low['case'])}) to {high['share']:.0f} % ({code(high['case'])})."
        " The bound is the time of only reading the same K and V bytes, measured in the same rounds; 100 % is"
        f" its speed. Cases by KV bytes; bars are {round(100 * CONFIDENCE)} % intervals of the median, mostly"
        " smaller than the marks."
    )


def _slowdown(comparison: Comparison) -> str:
    rows = comparison.impls
    fastest = rows.loc[rows["slowdown"] == 1.0, "label"].value_counts()
    counts = [f"{code(label)} on {fastest[label]}" for label in comparison.series if label in fastest]
    text = f"Fastest by median, of {_cases(len(comparison.cases))}: {join(counts)}."
    text += " A cell is latency over that of the case's fastest, paired by round; grey cells tie with it."
    if (rows["slowdown"].notna() & rows["splits_note"].notna()).any():
        text += " * a note on its splits stands under the table of latencies."
    return text


def _latency(comparison: Comparison) -> str:
    if comparison.functional:
        text = (
            "Latency against bytes of K and V. A CPU run is functional: these times support no claim about speed."
        )
    else:
        times = comparison.impls["us"]
        text = f"Latency against bytes of K and V: medians from {times.min():.1f} to {times.max():,.1f} µs."
        if len(comparison.bounds):
            text += f" The bound itself takes {comparison.bounds['us'].min():.1f} µs on the smallest case."
    return text + _without_keys(comparison, "kv_bytes")


def _error(comparison: Comparison) -> str:
    right = comparison.impls[(comparison.impls["status"] == "ok") & comparison.impls["worst_row"].notna()]
    text = ""
    if len(right):
        worst = right.nlargest(1, "worst_row").iloc[0]
        text = f"The largest error that passed is {worst['worst_row']:.2f} of its row's budget"
        text += f" ({code(worst['label'])}, {code(worst['case'])}). "
    text += "Left: over the whole output, against a float64 reference. Right: of the worst row, over its budget."
    return text + _without_keys(comparison, "max_kv")


def _support(comparison: Comparison) -> str:
    counts = [f"{code(label)} on {passed(comparison.impls, label)}" for label in comparison.series]
    return f"Ok, of {_cases(len(comparison.cases))}: {join(counts)}."


def _parts(comparison: Comparison) -> str:
    rows = comparison.impls[comparison.impls["traced_us"].notna()]
    off = sum(not reconciled(row) for row in each(rows))
    sums = f"on all of {len(rows)} bars" if not off else f"on {len(rows) - off} of {len(rows)} bars"
    return (
        "What a call consists of on the device, traced by CUPTI in a run of its own. A gap below zero (kernels that"
        f" overlap) is not drawn. The parts add up to the untraced time within 5 % or 1 µs {sums}."
    )


def reconciled(row: Any) -> bool:
    """Whether the traced parts of a call add up to its untraced time within 5 % or 1 µs."""
    return bool(abs(row.traced_us - row.profiled_us) <= max(1.0, 0.05 * row.profiled_us))


CAPTIONS: Mapping[str, tuple[str, Callable[[Comparison], str]]] = {
    "share": ("Achieved read bandwidth as % of the bound, by case and implementation", _share),
    "slowdown": ("Latency relative to the fastest implementation of each case, as a heat map", _slowdown),
    "latency": ("Latency against bytes of K and V, both on log axes", _latency),
    "parts": ("The kernels of a call and the gaps between them, for small cases and large ones", _parts),
    "error": ("Relative L2 error, and the worst row's error over its budget, against the longest sequence", _error),
    "support": ("Status of every implementation on every case", _support),
}
"""Name of a figure -> its alternative text, and what writes its caption."""


def _without_keys(comparison: Comparison, column: str) -> str:
    empty = comparison.impls.loc[comparison.impls[column] == 0, "case"].unique()
    return f" Without keys, so not on a log axis: {', '.join(map(code, empty))}." if len(empty) else ""


def _cases(n: int) -> str:
    return f"{n} case" + ("s" if n != 1 else "")
