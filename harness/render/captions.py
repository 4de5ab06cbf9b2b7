"""The caption of each figure: a generated sentence of what it found, then how to read it; or why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd

from harness.render.decisions import leaders, same_text
from harness.render.findings import ALIKE, beside, own_counts, passed, reconciled
from harness.render.frame import Comparison, each
from harness.render.groups import (
    ABOUT_EQUAL,
    MIN_BATCHES,
    MIN_COUNTS,
    MIN_SEQUENCES,
    by_case,
    curves_of,
    launch_floor,
    pairs_of,
    sweeps_of,
    thinned_text,
    uneven_cases,
    with_share,
)
from harness.render.plots_detail import parts_cases
from harness.render.rows import split_counts_elsewhere
from harness.render.split_costs import explained, is_traced, traced_by
from harness.render.tables import waiting_text, waits
from harness.render.text import cases_text, code, hosts_sentence, join, us_text
from harness.stats import CONFIDENCE

FAR_APART = 1.25
"""From so many times the smallest sample on a caption tells the largest; with such a step they are in groups."""

NAMED = 3
"""So many measurements a caption names."""

COUNTS = "counts"
"""The anchor of the section on split counts."""

CPU_ONLY = "a run on a CPU makes no claim about speed"


@dataclass(frozen=True)
class Caption:
    """What stands beside a figure.

    Args:
        alt: what the picture shows, for a reader who does not see it.
        finding: one sentence of what was found.
        reading: how to read the figure.
        absent: why a report has no such figure, as the end of a sentence.
    """

    alt: str
    finding: Callable[[Comparison], str]
    reading: Callable[[Comparison], str]
    absent: Callable[[Comparison], str]


def _share(comparison: Comparison) -> str:
    rows = with_share(comparison)
    known = set(rows["impl"])
    impl, count = next(((impl, n) for impl, n in leaders(comparison) if impl in known), (min(known), 0))
    mine = rows[rows["impl"] == impl]
    low, high = mine.nsmallest(1, "share").iloc[0], mine.nlargest(1, "share").iloc[0]
    return (
        f"{code(impl)} is fastest or tied on {count} of {cases_text(len(comparison.cases))}, and reaches"
        f" {low['share']:.0f} % of the bound ({code(low['case'])}) to {high['share']:.0f} % ({code(high['case'])})."
    )


def _share_reading(comparison: Comparison) -> str:
    return (
        "The bound is the time of only reading the same K and V bytes, measured in the same rounds; 100 % is its"
        f" speed, {memory_text(comparison)}. Cases by KV bytes; bars are {round(100 * CONFIDENCE)} % intervals of"
        " the median, mostly smaller than the marks."
    )


def memory_text(comparison: Comparison) -> str:
    """How fast the bound reads, from the smallest case to the largest, and the device at best."""
    told = []
    for device in comparison.devices:
        bounds = comparison.bounds[comparison.bounds["device"] == device]
        if bounds.empty:
            continue
        text = f"{bounds['gbps'].min():,.0f} to {bounds['gbps'].max():,.0f} GB/s from case to case"
        ceilings = [comparison.ceilings[run] for run in bounds["run_id"].unique() if run in comparison.ceilings]
        if ceilings:
            text += f" where the device reads {max(ceilings):,.0f} GB/s at best"
        told.append(f"{text} ({device})" if len(comparison.devices) > 1 else text)
    return join(told)


def _slowdown(comparison: Comparison) -> str:
    counts = [f"{code(impl)} on {count}" for impl, count in leaders(comparison)]
    return f"Fastest or tied, of {cases_text(len(comparison.cases))}: {join(counts)}."


def _slowdown_reading(comparison: Comparison) -> str:
    rows = comparison.impls
    text = "A cell is latency over that of the case's fastest, paired by round; grey cells tie with it."
    text += f" {same}" if (same := same_text(comparison)) else ""
    if comparison.has_fixed:
        text += " Each chooses its splits by itself here."
    if (rows["slowdown"].notna() & rows["splits_note"].notna()).any():
        text += " * a note on its splits stands under the table of latencies."
    return text


def _latency(comparison: Comparison) -> str:
    if comparison.functional:
        return f"Latency against bytes of K and V; {CPU_ONLY}."
    rows = comparison.impls[comparison.impls["us"].notna() & (comparison.impls["kv_bytes"] > 0)]
    rows = rows[rows["label"].isin(comparison.shown)]
    small = rows[rows["kv_bytes"] == rows["kv_bytes"].min()]
    best = small.nsmallest(1, "us").iloc[0]
    text = f"On the smallest case ({code(best['case'])}) the fastest takes {us_text(best['us'])} µs"
    bound = comparison.bounds[comparison.bounds["case"] == best["case"]]
    if len(bound):
        text += f" where only reading takes {us_text(bound['us'].iloc[0])}"
    floors = []
    for device in comparison.devices:
        floor = launch_floor(comparison.bounds[comparison.bounds["device"] == device])
        if floor is not None:
            floors.append(f"{floor:.1f} µs" + (f" ({device})" if len(comparison.devices) > 1 else ""))
    return text + (f", of which {join(floors)} is the launch." if floors and len(bound) else ".")


def _latency_reading(comparison: Comparison) -> str:
    text = ""
    if len(comparison.bounds):
        text = (
            "Marks of one case stand side by side over a short stroke, which is its bound; those of this project's"
            " kernels lie on top. The launch floor is the bound's time extrapolated from its two smallest sizes to"
            " no bytes: what a kernel takes however little it reads."
        )
    return text + _without_keys(comparison, "kv_bytes")


def _splits(comparison: Comparison) -> str:
    if said := own_counts(comparison):
        return said
    best = [curve.best for curve in curves_of(comparison)]
    told = [f"{row.asked_splits} ({code(row.case)}, {code(row.impl)})" for row in best]
    return f"Best fixed counts: {join(told)}."


def _splits_reading(comparison: Comparison) -> str:
    return (
        "Fixed counts cut every sequence into that many equal splits; a peer makes of them what it will. A ring is"
        " the default: its largest count and its latency; a star is the best fixed count. Of several in one place,"
        " rings are larger and stars smaller from one implementation to the next. Where the default's largest count"
        " is none of the fixed ones (it may cut longer sequences into more splits), a dotted line joins it to the"
        " best fixed count. The table below says what too few and too many cost."
        + explained(comparison)
        + _without_curve(comparison)
    ) + thinned_text(len(by_case(curves_of(comparison))), "cases")


def _without_curve(comparison: Comparison) -> str:
    families = {curve.family for curve in curves_of(comparison)}
    others = [label for label in comparison.shown if label not in families]
    return f" Not at several fixed counts in this study: {', '.join(map(code, others))}." if others else ""


def _parts(comparison: Comparison) -> str:
    case = parts_cases(comparison)[0]
    rows = comparison.impls[(comparison.impls["case"] == case) & comparison.impls["label"].isin(comparison.shown)]
    host = rows[rows["host_total_us"].notna() & rows["us"].notna()]
    if host.empty:
        return "What a call consists of on the device."
    times = host["host_total_us"] / host["us"]
    return (
        f"On {code(case)} one call takes {times.min():.0f} to {times.max():.0f} × its time on the device when the"
        " host launches it by itself."
    )


def _parts_reading(comparison: Comparison) -> str:
    rows = comparison.impls[comparison.impls["traced_us"].notna()]
    text = (
        "Above: on the device. Below: on the host, a later plan for other lengths, the launch until it returns, and"
        f" the wait for the device. {hosts_sentence(comparison.runs)}"
    ).rstrip()
    if rows.empty:
        return text + (
            " The device's time is one bar: no record says which kernels it went to. `splitkv run STUDY --method"
            " kernels` records that."
        )
    off = [row for row in each(rows) if not reconciled(row)]
    m = f"{len(rows)} traced measurements"
    sums = f"on all of {m}" if not off else f"on {len(rows) - len(off)} of {m}, and not for {_apart(off)}"
    waiting = f" {waiting_text(comparison)}" if waits(comparison.impls).any() else ""
    return text + (
        f" Kernels are traced by CUPTI in a run of its own.{traced_by(comparison, list(each(rows)))}{_other(rows)}"
        f"{waiting} The parts add up to the untraced time within 5 % or 1 µs {sums}.{_untraced(comparison)}"
    )


def _other(rows: pd.DataFrame) -> str:
    """What was traced with another plan than it was timed with."""
    other = [f"{code(row.label)} on {code(row.case)}" for row in each(rows) if not is_traced(row)]
    return f" Traced in another version or configuration than timed: {join(other)}." if other else ""


def _apart(off: Sequence[Any]) -> str:
    """The measurements whose parts do not add up, and how far apart their samples lie where that is far."""
    told, far = [], False
    for row in off[:NAMED]:
        samples = sorted((row.samples or {}).values())
        text = f"{code(row.label)} on {code(row.case)}"
        if samples and samples[-1] > FAR_APART * samples[0]:
            far = far or any(b > FAR_APART * a for a, b in pairwise(samples))
            text += f" (samples from {us_text(samples[0])} to {us_text(samples[-1])} µs)"
        told.append(text)
    if len(off) > NAMED:
        told.append(f"{len(off) - NAMED} more")
    why = "; times so far apart fall into separate groups, and a trace may meet another one than the time beside it"
    return join(told) + (why if far else "")


def _untraced(comparison: Comparison) -> str:
    """What has a time on the device and no trace of it, where something else has one."""
    rows = comparison.impls[comparison.impls["label"].isin(comparison.shown) & comparison.impls["us"].notna()]
    missing = rows[rows["traced_us"].isna()]
    if missing.empty:
        return ""
    drawn = missing[missing["case"].isin(parts_cases(comparison))]
    counts = drawn["label"].value_counts()
    told = [f"{code(label)} on {cases_text(int(counts[label]))}" for label in comparison.shown if label in counts]
    text = f" Not traced, and drawn as one bar: {join(told)}." if told else ""
    others = [code(case) for case in comparison.cases if case in set(missing["case"]) - set(drawn["case"])]
    return text + (f" In the table alone, something was not traced on {join(others)}." if others else "")


def _batch(comparison: Comparison) -> str:
    drops = [
        (float(before.share - after.share), before, after)
        for sweep in sweeps_of(comparison)
        for before, after in pairwise(each(sweep.rows.sort_values(["label", "batch"], kind="stable")))
        if before.label == after.label
    ]
    drop, before, after = max(drops, key=lambda found: found[0])
    if drop <= 0:
        return "No implementation falls off from one batch size to the next larger one."
    return (
        f"The steepest cliff is {code(before.label)}'s: from {before.share:.0f} % of the bound at {before.batch} to"
        f" {after.share:.0f} % at {after.batch} sequences of {before.max_kv:,} keys."
    )


def _batch_reading(comparison: Comparison) -> str:
    return "Lines join the batches of one length." + thinned_text(len(sweeps_of(comparison)), "lengths")


def _error(comparison: Comparison) -> str:
    right = comparison.impls[(comparison.impls["status"] == "ok") & comparison.impls["worst_row"].notna()]
    if right.empty:
        return "No result is within its budget."
    worst = right.nlargest(1, "worst_row").iloc[0]
    return (
        f"The largest error that passed is {worst['worst_row']:.2f} of its row's budget"
        f" ({code(worst['label'])}, {code(worst['case'])})."
    )


def _error_reading(comparison: Comparison) -> str:
    return (
        "Above: over the whole output, against a float64 reference; dashed is what rounding normal variates to the"
        " dtype alone costs, which no output of it is below. Below: of the worst row, over its budget."
        " Cases stand over the power of two that their longest sequence does not exceed, implementations beside"
        " one another." + _without_keys(comparison, "max_kv")
    )


def _skew(comparison: Comparison) -> str:
    rows = with_share(comparison)
    share = rows.set_index(["case", "label"])["share"].to_dict()
    pairs = pairs_of(comparison)
    losses = [
        max(mine, key=lambda loss: loss[0])  # what each loses on its own worst pair
        for label in comparison.shown
        if (
            mine := [
                (share[pair.even, label] / share[pair.uneven, label], label, pair)
                for pair in pairs
                if (pair.even, label) in share and (pair.uneven, label) in share
            ]
        )
    ]
    if not losses:
        return "No implementation has a time on both of a pair."
    (least, best, _), (most, worst, pair) = min(losses, key=lambda x: x[0]), max(losses, key=lambda x: x[0])
    text = (
        f"Uneven lengths cost {code(worst)} a factor of {most:.1f} ({share[pair.even, worst]:.0f} % of the bound on"
        f" {code(pair.even)}, {share[pair.uneven, worst]:.0f} % on {code(pair.uneven)})"
    )
    return f"{text}, and {code(best)} the least: {least:.2f} at most." if len(losses) > 1 else f"{text}."


def _skew_reading(comparison: Comparison) -> str:
    text = (
        "Beside each uneven batch the uniform one of its shape that is nearest in bytes, within"
        f" {ABOUT_EQUAL} ×, and has at least {MIN_SEQUENCES:g} × its sequences."
    )
    paired_cases = {pair.uneven for pair in pairs_of(comparison)}
    text += thinned_text(len(paired_cases), "pairs")
    alone = [case for case in uneven_cases(comparison) if case not in paired_cases]
    if alone:
        text += f" Without one in the study: {', '.join(map(code, alone))}."
    return text


def _support(comparison: Comparison) -> str:
    counts = [f"{code(label)} on {passed(comparison.impls, label)}" for label in comparison.shown]
    return f"Ok, of {cases_text(len(comparison.cases))}: {join(counts)}."


def _nothing(comparison: Comparison) -> str:
    return ""


def _no_time(comparison: Comparison) -> str:
    return CPU_ONLY if comparison.functional else "nothing has a time"


def _no_bound(comparison: Comparison) -> str:
    return CPU_ONLY if comparison.functional else "no time has the bound's beside it"


def _no_curve(comparison: Comparison) -> str:
    if comparison.functional:
        return CPU_ONLY
    text = "the study asks for no case at several fixed split counts"
    if len(comparison.folders) != 1:
        return text
    [folder] = comparison.folders.values()
    found = split_counts_elsewhere(folder, comparison.runs, comparison.problems, MIN_COUNTS)
    if found is None:
        return text
    where, cases = found
    return f"{text}; {beside(where, COUNTS)} does for {cases} of these {cases_text(len(comparison.cases))}, {ALIKE}"


def _no_sweep(comparison: Comparison) -> str:
    if comparison.functional:
        return CPU_ONLY
    return f"the study holds no length at {MIN_BATCHES} batch sizes or more with a time and the bound's"


def _no_pair(comparison: Comparison) -> str:
    if comparison.functional:
        return CPU_ONLY
    alone = uneven_cases(comparison)
    if not alone:
        return "the study times no batch of different lengths beside its bound"
    return (
        f"the study times no uniform batch of the shape, about the bytes (within {ABOUT_EQUAL} ×) and at least"
        f" {MIN_SEQUENCES:g} × the sequences of {', '.join(map(code, alone))}"
    )


def _no_parts(comparison: Comparison) -> str:
    return CPU_ONLY if comparison.functional else "no record says what a call consists of"


CAPTIONS: Mapping[str, Caption] = {
    "share": Caption(
        "Achieved read bandwidth as % of the bound, by case and implementation", _share, _share_reading, _no_bound
    ),
    "slowdown": Caption(
        "Latency relative to the fastest implementation of each case, as a heat map",
        _slowdown,
        _slowdown_reading,
        _no_time,
    ),
    "latency": Caption("Latency against bytes of K and V, both on log axes", _latency, _latency_reading, _no_time),
    "splits": Caption(
        "Latency against the split count, a panel a case, with the default's choice and the best count marked",
        _splits,
        _splits_reading,
        _no_curve,
    ),
    "parts": Caption(
        "What a call consists of on the device and on the host, for a small case, a middle one and a large one",
        _parts,
        _parts_reading,
        _no_parts,
    ),
    "batch": Caption(
        "Share of the bound against the batch size, a panel a length", _batch, _batch_reading, _no_sweep
    ),
    "error": Caption(
        "Relative L2 error, and the worst row's error over its budget, against the longest sequence",
        _error,
        _error_reading,
        lambda _: "no output has an error above 0",
    ),
    "skew": Caption(
        "Uneven batches beside uniform ones of about the same bytes, as % of the bound",
        _skew,
        _skew_reading,
        _no_pair,
    ),
    "support": Caption("Status of every implementation on every case", _support, _nothing, _nothing),
}
"""Name of a figure -> what stands beside it."""


def _without_keys(comparison: Comparison, column: str) -> str:
    empty = comparison.impls.loc[comparison.impls[column] == 0, "case"].unique()
    return f" Without keys, so not on a log axis: {', '.join(map(code, empty))}." if len(empty) else ""
