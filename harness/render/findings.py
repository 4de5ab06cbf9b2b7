"""What a report says in sentences: the answer at its head, and verdicts; see captions for those of figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from harness import stats
from harness.render.checks import in_short
from harness.render.decisions import leaders, on_devices, paired, splits_text
from harness.render.frame import Comparison, impl_of
from harness.render.groups import curves_of
from harness.render.text import cases_text, code, escape, join, linked, number_text, percent_text
from impls.catalog import ABLATIONS, OURS

FEW_PEERS = 3
"""From so many peers on, a sentence does not name them."""

ALIKE = "at the same commit and on a GPU of the same name"
"""What a report that another one points to has in common with it."""

DEEP = "deep"
"""The anchor of the section on what ``splitkv check`` found."""


def headline(comparison: Comparison) -> list[str]:
    """The answer in a few sentences, from the verdicts, with counts and directions.

    A study of split counts begins with those; then who is fastest, how far ahead of peers, and who is right."""
    rows = comparison.impls
    m = len(comparison.cases)
    ours = [label for label in comparison.shown if impl_of(label) in OURS]
    if not (rows["status"] == "ok").any():
        return [f"No implementation succeeded on any of {cases_text(m)}; the reasons are below."]
    if comparison.functional:
        right = [f"{code(label)} on {passed(rows, label)}" for label in ours or comparison.shown]
        return [
            "This is a functional run on a CPU: it shows which kernels run and are right, and makes no claim"
            " about speed.",
            f"Within the error budget, of {cases_text(m)}: {join(right)}.",
            *_in_depth(comparison),
        ]
    about = [said] if (said := own_counts(comparison)) else []
    speed = [_who_leads(comparison), *_against_peers(comparison, ours), *_plans(comparison, ours)]
    return [*about, *speed, *_in_depth(comparison)]


def _plans(comparison: Comparison, ours: Sequence[str]) -> list[str]:
    """What times leave out that comes with new lengths."""
    rows = comparison.impls[comparison.impls["label"] == comparison.impls["impl"]]
    cost = rows.groupby("impl", sort=False)["plan_us"].median().dropna().to_dict()
    own = [f"{number_text(cost[impl], 3)} µs ({code(impl)})" for impl in ours if impl in cost]
    peers = [cost[impl] for impl in peers_of(comparison) if impl in cost]
    if not own:
        return []
    others = (
        f"; peers take {number_text(min(peers), 3)} to {number_text(max(peers), 3)} µs" if len(peers) > 1 else ""
    )
    return [
        "Times are of calls with a plan that is made: new lengths want a new one, once for all calls with them,"
        f" which takes the host {join(own)} in the median{others}."
    ]


def _who_leads(comparison: Comparison) -> str:
    m = len(comparison.cases)
    ranked = leaders(comparison)
    if not ranked:
        return f"Nothing has a time on any of {cases_text(m)}."
    (best, n), *others = ranked
    rest = f" ({join([f'{code(impl)} on {count}' for impl, count in others])})" if others else ""
    how = "By its own choice of splits, " if comparison.has_fixed else ""
    return f"{how}{code(best)} is the fastest, or ties with the fastest, on {n} of {cases_text(m)}{rest}."


def _best_peer(comparison: Comparison) -> str:
    """Whom a ratio holds our kernels against, by name where there are few."""
    names = peers_of(comparison)
    if len(names) >= FEW_PEERS:
        return "the best peer of each case"
    which = (
        code(names[0]) if len(names) == 1 else f"the faster of {join([code(name) for name in names])} on each case"
    )
    counts = " at its fastest split count" if comparison.has_fixed else ""
    return f"{which}{counts}, the only peer{'s' if len(names) > 1 else ''} in this study"


def peers_of(comparison: Comparison) -> list[str]:
    """The implementations with a time that this project did not write."""
    rows = comparison.impls[comparison.impls["us"].notna()]
    return [impl for impl in dict.fromkeys(rows["impl"]) if impl not in (*OURS, *ABLATIONS)]


def own_counts(comparison: Comparison) -> str:
    """How good the split counts are that implementations choose; empty without several fixed ones to compare."""
    curves = [curve for curve in curves_of(comparison) if curve.own is not None]
    ratios = [(ratio.median, curve) for curve in curves if (ratio := paired(curve.own, curve.best)) is not None]
    if not ratios:
        return ""
    smallest = comparison.smallest_effect
    near = sum(ratio <= 1 + smallest for ratio, _ in ratios)
    worst, curve = max(ratios, key=lambda pair: pair[0])
    text = (
        f"The split count that an implementation chooses by itself is within {100 * smallest:g} % of the best fixed"
        f" count tried, or ahead of it, on {near} of {len(ratios)} (implementation, case) pairs"
    )
    if worst <= 1 + smallest:
        return f"{text}."
    return (
        f"{text}; the worst is {percent_text(worst)} % slower ({code(curve.family)} on {code(curve.case)}:"
        f" {splits_text(curve.own)}, where {curve.best.asked_splits} is best)."
    )


def _in_depth(comparison: Comparison) -> list[str]:
    """Who is right in the check before each timing, and in that of ``splitkv check``, where there was one."""
    rows = comparison.impls
    before = _faulty(comparison, "status", ("wrong",))
    first = f"In the check before each timing {before}" if before else "Right in the check before each timing"
    if rows["deep"].isna().all():
        return [f"{first}; {_deeper_elsewhere(comparison)}.", *_what_it_means(comparison)]
    deeper = linked("deeper check", deep_anchor(comparison))
    later = _faulty(comparison, "deep", ("wrong", "failed", "invalid"))
    said = f"{first}; in the {deeper} {later}." if later else f"{first}, and in the {deeper}."
    return [said, *_what_it_means(comparison)]


def _what_it_means(comparison: Comparison) -> list[str]:
    """What is wrong with each implementation that the deeper check found wrong, in a clause each."""
    if not comparison.faulty or len(comparison.folders) != 1:
        return []
    [own] = comparison.folders.values()
    other = comparison.elsewhere
    short = in_short(own) if other is None else in_short(other.folder, other.runs)
    wrong = [label for label in comparison.shown if label in short and label in comparison.faulty]
    told = [f"How {code(label)} is wrong, at worst: {short[label]}." for label in wrong]
    return [" ".join(told)] if told else []


def _deeper_elsewhere(comparison: Comparison) -> str:
    """Where the deeper check of the same kernels stands, for a study without one of its own."""
    found = comparison.elsewhere
    if found is None:
        return "no deeper check was recorded"
    told = [
        f"{code(impl)} is right on {right} of {tried}{'' if i else ' cases'}"
        for i, (impl, (right, tried)) in enumerate(found.counts.items())
    ]
    return (
        f"the deeper check of the same kernels, {ALIKE}, stands in {beside(found.folder, DEEP)}, where {join(told)}"
    )


def beside(folder: Path, anchor: str, text: str = "") -> str:
    """A link to a place in the report of a folder beside this one, called by its name unless there is a text."""
    return f"[{escape(text or folder.name)}](../{quote(folder.name)}/README.md#{anchor})"


def _faulty(comparison: Comparison, column: str, words: Sequence[str]) -> str:
    """``a is wrong on 2 of 3 cases and b on 1 of 3``, most cases first; empty where nothing is."""
    rows = comparison.impls[comparison.impls[column].notna()]
    told: list[str] = []
    for word in words:
        counts = {s: int((rows.loc[rows["label"] == s, column] == word).sum()) for s in comparison.series}
        verb = word if word == "failed" else f"is {word}"
        for label in sorted((s for s, n in counts.items() if n), key=lambda s: -counts[s]):
            m = int((rows["label"] == label).sum())
            told.append(
                f"{code(label)} {f'{verb} ' if verb else ''}on {counts[label]} of {m}{'' if told else ' cases'}"
            )
            verb = ""
    return join(told) if told else ""


def deep_anchor(comparison: Comparison) -> str | None:
    """Where a report says what ``splitkv check`` found; a comparison of several studies has no such section."""
    return DEEP if len(comparison.folders) == 1 else None


def faulty_in_depth(rows: pd.DataFrame) -> pd.Series[Any]:
    """Which rows ``splitkv check`` tried and did not find right."""
    return rows["deep"].notna() & (rows["deep"] != "ok")


def deep_mark(row: Any) -> str:
    """The mark of a row that is not right in the deeper check; :func:`deep_note` says what it means."""
    return "†" if row.deep not in (None, "ok") else ""


def faulty_note(comparison: Comparison, labels: Iterable[str], *, cells: bool = False) -> str:
    """What the mark beside a name means (:func:`harness.render.looks.named`), where one of the labels has it."""
    if not comparison.faulty.intersection(labels):
        return ""
    found = comparison.elsewhere
    if found is not None:
        where = beside(found.folder, DEEP, "deeper check")
        return f"† not right on some case of the {where} of the same kernels, in {code(found.folder.name)}."
    on = ": beside a name on some case, in a cell on that case" if cells else " on some case"
    return f"† not right in the {linked('deeper check', deep_anchor(comparison))}{on}."


def deep_note(comparison: Comparison, rows: pd.DataFrame) -> str:
    """What :func:`deep_mark` means, where one of the rows has it."""
    if not faulty_in_depth(rows).any():
        return ""
    return f"† not right in the {linked('deeper check', deep_anchor(comparison))}."


def _against_peers(comparison: Comparison, ours: list[str]) -> list[str]:
    """A sentence a device, and one on who has no peer."""
    sentences = []
    several = len(comparison.devices) > 1
    for device, rows, m in on_devices(comparison):
        told = [_against_peer(rows[rows["label"] == label], label, m) for label in ours]
        known = [text for text in told if text]
        if known:
            where = f"On {device}, against" if several else "Against"
            sentences.append(f"{where} {_best_peer(comparison)}, in speed (geometric mean): {join(known)}.")
    if not sentences and ours:
        counts = [f"{code(label)} is ok on {passed(comparison.impls, label)}" for label in ours]
        sentences.append(f"With no peer to compare, of {cases_text(len(comparison.cases))}: {join(counts)}.")
    return sentences


def _against_peer(mine: pd.DataFrame, label: str, m: int) -> str:
    if mine["ahead"].isna().all():
        return ""
    told = mine["verdict"].value_counts()
    counts = [f"{told.get(word, 0)} {word}" for word in (stats.FASTER, stats.TIE, stats.SLOWER)]
    return f"{code(label)} {mean_text(mine['ahead_rounds'], m, '×')} ({', '.join(counts)})"


def mean_text(rounds: pd.Series[Any], m: int, unit: str) -> str:
    """The geometric mean over cases of ratios, with its interval and n of ``m``; a dash where there is none."""
    known = list(rounds.dropna())
    if not known:
        return "–"
    mean = stats.geometric_mean_interval(known)
    places = 3 if unit == "×" else 1
    span = f"{mean.low:.{places}f}, {mean.high:.{places}f}"
    return f"{mean.median:.{places}f}{unit} [{span}] over {mean.n} of {m}"


def against_peer(row: Any, mark: str = "") -> str:
    """What may be said of an implementation beside its best peer, which ``mark`` follows; the row has a verdict."""
    if row.verdict == stats.TIE:
        low, high = 100 * (row.ahead_low - 1), 100 * (row.ahead_high - 1)
        return f"tie with {code(row.peer)}{mark} ({low:+z.1f} to {high:+z.1f} %)"
    # How much more time the slower of the two takes, whichever it is.
    low, by, high = row.ahead_low, row.ahead, row.ahead_high
    if row.verdict == stats.SLOWER:
        low, by, high = 1 / high, 1 / by, 1 / low
    span = f"[{percent_text(low)}, {percent_text(high)}]"
    return f"**{row.verdict}** than {code(row.peer)}{mark} by {percent_text(by)} % {span}"


def passed(rows: pd.DataFrame, label: str) -> int:
    """On how many cases a series is ``ok``."""
    return int(((rows["label"] == label) & (rows["status"] == "ok")).sum())


def reconciled(row: Any) -> bool:
    """Whether the traced parts of a call add up to its untraced time within 5 % or 1 µs."""
    return bool(abs(row.traced_us - row.profiled_us) <= max(1.0, 0.05 * row.profiled_us))
