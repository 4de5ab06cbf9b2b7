"""What a report says in sentences: its headline, and a caption for each figure, all generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from harness import cost
from harness.render.frame import Comparison, impl_of
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
            won = int((ahead > 1).sum())
            sentences.append(
                f"{code(label)} is faster than the best peer, by median, on {won} of {_cases(m)}:"
                f" {cost.geometric_mean(ahead):.2f}× its speed (geometric mean over {len(ahead)} of {m})."
            )
    return sentences or [_slowdown(comparison)]


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
    text += " A cell is latency over that of the case's fastest."
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


CAPTIONS: Mapping[str, tuple[str, Callable[[Comparison], str]]] = {
    "share": ("Achieved read bandwidth as % of the bound, by case and implementation", _share),
    "slowdown": ("Latency relative to the fastest implementation of each case, as a heat map", _slowdown),
    "latency": ("Latency against bytes of K and V, both on log axes", _latency),
    "error": ("Relative L2 error, and the worst row's error over its budget, against the longest sequence", _error),
    "support": ("Status of every implementation on every case", _support),
}
"""Name of a figure -> its alternative text, and what writes its caption."""


def _without_keys(comparison: Comparison, column: str) -> str:
    empty = comparison.impls.loc[comparison.impls[column] == 0, "case"].unique()
    return f" Without keys, so not on a log axis: {', '.join(map(code, empty))}." if len(empty) else ""


def _cases(n: int) -> str:
    return f"{n} case" + ("s" if n != 1 else "")
