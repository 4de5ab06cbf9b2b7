"""The tables of a report, from a comparison; a cell that is a measurement links to its line below."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from harness.record import STREAM_READ, flatten, records_file
from harness.render.decisions import (
    against_own_text,
    decide,
    leading,
    leading_text,
    margin_text,
    on_devices,
    same_text,
    share_text,
    splits_text,
    spread_text,
)
from harness.render.findings import (
    against_peer,
    deep_anchor,
    deep_mark,
    deep_note,
    faulty_note,
    mean_text,
    passed,
    reconciled,
)
from harness.render.frame import WORDS, Comparison, each, impl_of
from harness.render.template import Table
from harness.render.text import (
    ABSENT,
    bytes_text,
    code,
    escape,
    interval_text,
    join,
    lengths_text,
    linked,
    number_text,
    small_text,
    us_interval_text,
    us_text,
)
from harness.stats import CONFIDENCE, FASTER, SLOWER, TIE
from impls.catalog import DESCRIPTIONS, OURS

MAX_REASON = 300
"""Characters of a reason that a report prints; the record holds all of it."""

NOT_TRACED = "not traced"
"""What is said of a time on the device of which no trace says what it consists of."""

FIRST_PLAN = "first plan, ms (caches warm or cold, not told apart)"
"""The header of what a record calls ``compile_ms``: no record says what a cache on disk held before."""

MEASUREMENTS = "measurements"
"""The anchor of the table of all measurements."""


def decisions(comparison: Comparison) -> Table | None:
    """What to run on each case, and how sure that is; None from a run that says nothing about speed."""
    found = decide(comparison)
    if not found:
        return None
    of_case = {row.case: row for row in each(comparison.impls.drop_duplicates("case"))}
    bounds = {row.case: row for row in each(comparison.bounds)}
    lines = []
    for decision in found:
        case = of_case[decision.case]
        line = [code(decision.case), lengths_text(case.batch, case.total_kv, case.max_kv)]
        best = decision.best
        if best is None:
            line += ["nothing has a time", *[ABSENT] * 5]
        else:
            bound = bounds.get(decision.case)
            splits = splits_text(best) + spread_text(best) + against_own_text(decision)
            line += [code(best.impl) + deep_mark(best), splits, linked(us_text(best.us), best.anchor)]
            line.append(ABSENT if bound is None else linked(us_text(bound.us), bound.anchor))
            line += [share_text(best), margin_text(decision)]
        lines.append([*line, _shape(case)])
    header = [
        "case",
        "keys",
        "run",
        "splits",
        "µs",
        "bound, µs",
        "% of bound",
        "how much slower the next is",
        "heads q / kv, dim",
    ]
    return Table(header, "llllrrrll", lines)


def runs(comparison: Comparison) -> Table:
    """What each implementation calls, in which version, and what one must know of it."""
    rows = comparison.impls
    lines = []
    for impl in dict.fromkeys(map(impl_of, comparison.series)):
        mine = rows[rows["impl"] == impl]
        named = mine[mine["version"].notna()]
        versions = dict.fromkeys(
            version if library is None or str(version).startswith(f"{library} ") else f"{library} {version}"
            for library, version in zip(named["library"], named["version"], strict=True)
        )
        functions = mine["function"].dropna().unique()
        lines.append(
            [
                code(impl),
                ", ".join(map(code, functions)) or ABSENT,
                escape(", ".join(versions)) or ABSENT,
                escape(DESCRIPTIONS.get(impl, ABSENT)),
            ]
        )
    return Table(["implementation", "what it calls", "version", "to know"], "llll", lines)


def _shape(row: Any) -> str:
    return f"{row.heads_q} / {row.heads_kv}, {row.head_dim}"


def summary(comparison: Comparison) -> Table:
    """A row an implementation (and device): counts, geometric means, errors, compiling and planning."""
    speed, several = not comparison.functional, len(comparison.devices) > 1
    deep = bool(comparison.impls["deep"].notna().any())
    header = [
        "implementation",
        *(["device"] if several else []),
        "ok",
        *(["ok in the deeper check"] if deep else []),
    ]
    anchor = deep_anchor(comparison)
    if speed:
        header += [
            "fastest or tied on",
            "lowest median on",
            "× the fastest, geo. mean",
            "× ahead of the best peer, geo. mean",
            "% of bound, geo. mean",
            "lowest % of bound",
        ]
    header += ["worst row ÷ budget", f"{FIRST_PLAN}, longest", "plan µs, median"]
    lines = []
    for label in comparison.shown:
        for device, rows, m in on_devices(comparison):
            mine = rows[rows["label"] == label]
            deeply = [_deeply(mine, anchor)] if deep else []
            lines.append(_summary_line(mine, label, m, device if several else None, deeply, speed=speed))
    return Table(header, "l" * (2 if several else 1) + "r" * (len(header) - (2 if several else 1)), lines)


def _deeply(mine: pd.DataFrame, anchor: str | None) -> str:
    """On how many of the cases that the deeper check tried it is right; bold where not on all."""
    tried = mine["deep"].dropna()
    right = int((tried == "ok").sum())
    if tried.empty:
        return ABSENT
    text = linked(f"{right} of {len(tried)}", anchor)
    return text if right == len(tried) else f"**{text}**"


def _summary_line(
    mine: pd.DataFrame, label: str, m: int, device: str | None, deeply: Sequence[str], *, speed: bool
) -> list[str]:
    line = [code(label), *([escape(device)] if device is not None else [])]
    line.append(linked(f"{passed(mine, label)} of {m}", MEASUREMENTS))
    line += deeply
    if speed:
        line += [
            f"{int(leading(mine).sum())} of {m}",
            f"{int((mine['slowdown'] == 1.0).sum())} of {m}",
            mean_text(mine["slowdown_rounds"], m, "×"),
            mean_text(mine["ahead_rounds"], m, "×") if impl_of(label) in OURS else "",
            mean_text(mine["share_rounds"], m, " %"),
            _lowest(mine),
        ]
    checked = mine.loc[mine["status"] == "ok", "worst_row"]
    line += [
        number_text(checked.max(), 2),
        number_text(mine["compile_ms"].dropna().max(), 3),
        number_text(mine["plan_us"].dropna().median(), 3),
    ]
    return line


def _lowest(mine: pd.DataFrame) -> str:
    known = mine[mine["share"].notna()]
    if known.empty:
        return ABSENT
    low = known.nsmallest(1, "share").iloc[0]
    share = f"{low['share']:.1f} %"
    return f"{linked(share, low['anchor'])} ({code(low['case'])})"


def latency(comparison: Comparison, marks: Mapping[str, str]) -> Table:
    """Median µs, case by implementation, beside the bound; ``marks`` are those of notes on splits."""
    header = ["case", "KV"]
    has_bound = len(comparison.bounds) > 0
    bounds = {row.case: row for row in each(comparison.bounds)}
    if has_bound:
        header.append("`stream-read` (the bound)")
    lines: dict[str, list[str]] = {}
    for row in each(comparison.impls[comparison.impls["label"].isin(comparison.shown)]):
        if row.case not in lines:
            lines[row.case] = [code(row.case), bytes_text(row.kv_bytes)]
            if has_bound:
                bound = bounds.get(row.case)
                lines[row.case].append(ABSENT if bound is None else linked(us_text(bound.us), bound.anchor))
        if row.status != "ok":
            text = linked(f"*{row.status}*", row.anchor)
        elif math.isnan(row.us):
            text = linked("*no finite sample*", row.anchor)
        else:
            text = linked(us_text(row.us), row.anchor) + marks.get(row.splits_note, "")
        lines[row.case].append(f"**{text}**" if row.tied is True and not comparison.functional else text)
    sides = "l" + "r" * (len(header) - 1 + len(comparison.shown))
    return Table([*header, *(code(s) for s in comparison.shown)], sides, list(lines.values()))


def against(comparison: Comparison) -> dict[str, Any] | None:
    """The kernels of this project, each beside the fastest other implementation of the case, in words."""
    ours = [label for label in comparison.shown if impl_of(label) in OURS]
    rows = comparison.impls[comparison.impls["label"].isin(ours)]
    if comparison.functional or rows["verdict"].isna().all():
        return None
    found = comparison.elsewhere is not None
    marks = {
        (row.case, row.label): "†" if found and row.label in comparison.faulty else deep_mark(row)
        for row in each(comparison.impls)
    }
    with_verdict = rows[rows["verdict"].notna()]
    told = {
        (row.case, row.label): linked(against_peer(row, marks[row.case, row.peer]), row.anchor)
        for row in each(with_verdict)
    }
    lines = [[code(case), *(told.get((case, label), ABSENT) for label in ours)] for case in comparison.cases]
    met = set(zip(with_verdict["case"], with_verdict["peer"], strict=True))
    peers = comparison.impls[
        [pair in met for pair in zip(comparison.impls["case"], comparison.impls["label"], strict=True)]
    ]
    note = faulty_note(comparison, set(peers["label"])) if found else deep_note(comparison, peers)
    counts = rows["verdict"].value_counts()
    words = join([f"{counts.get(word, 0)} {word}" for word in (FASTER, TIE, SLOWER)])
    return {
        "table": Table(["case", *(code(label) for label in ours)], "l" * (1 + len(ours)), lines),
        "note": f"Verdicts: {words}. A tie is a difference whose {round(100 * CONFIDENCE)} % interval contains 0,"
        f" or one under {100 * comparison.smallest_effect:g} %. A percentage is how much more time the slower of"
        f" the two takes, paired by round, with its interval. {note}".rstrip(),
    }


def parts(comparison: Comparison) -> Table | None:
    """Where the time goes: on the host before a call, and on the device in it."""
    rows = comparison.impls[comparison.impls["host_total_us"].notna() | comparison.impls["traced_us"].notna()]
    if rows.empty:
        return None
    header = ["case", "implementation", FIRST_PLAN, "plan µs", "host launch", "host, end to end", "device"]
    profiled = bool(rows["traced_us"].notna().any())
    if profiled:
        header += ["kernels", "split (longest)", "combine (others)", "gaps", "to the next call", "sum", "untraced"]
        header += ["adds up", *(["split (longest), with waiting"] if waits(rows).any() else [])]
    lines = []
    for row in each(rows):
        line = [code(row.case), code(row.label), number_text(row.compile_ms, 3), number_text(row.plan_us, 3)]
        line += [us_text(row.host_launch_us), us_text(row.host_total_us), linked(us_text(row.us), row.anchor)]
        if profiled and math.isnan(row.traced_us):
            line += [NOT_TRACED, *[ABSENT] * (len(header) - len(line) - 1)]
        elif profiled:
            line += [str(len(row.kernel_names)), us_text(row.main_net_us), us_text(row.others_net_us)]
            line += [f"{row.gap_net_us:.2f}", f"{row.between_net_us:.2f}"]
            line += [us_text(row.traced_us), us_text(row.profiled_us), "yes" if reconciled(row) else "**no**"]
            same = us_text(row.main_us) == us_text(row.main_net_us)
            line += [ABSENT if same else us_text(row.main_us)][: len(header) - len(line)]
        lines.append(line)
    return Table(header, "ll" + "r" * (len(header) - 2), lines)


def waits(rows: pd.DataFrame) -> pd.Series[bool]:
    """In which rows a kernel is in place, and waits, while the one before it still runs."""
    return (rows["gap_us"] < 0) | (rows["between_us"] < 0)


def waiting_text(comparison: Comparison) -> str:
    """What is taken off traced durations for them to add up; empty where nothing overlaps."""
    if not waits(comparison.impls).any():
        return ""
    return (
        "A kernel may be put in place while the one before it still runs (programmatic dependent launch), and then"
        " waits within its own traced time. That wait is taken off: off the split kernel (of others the longest)"
        " where it waits for the call before, off the others where they wait within a call, and no gap is left"
        " below zero."
    )


def support(comparison: Comparison) -> Table:
    """The status of every series on every case; the longer of the two goes down."""
    cells = {
        (row.case, row.label): linked(row.status if row.status == "ok" else f"**{row.status}**", row.anchor)
        + deep_mark(row)
        for row in each(comparison.impls)
    }
    names = {s: code(s) + "†" * (s in comparison.faulty) for s in comparison.series}
    if len(comparison.series) <= len(comparison.cases):
        lines = [[code(case), *(cells[case, s] for s in comparison.series)] for case in comparison.cases]
        return Table(["case", *names.values()], "l" + "c" * len(comparison.series), lines)
    lines = [[names[s], *(cells[case, s] for case in comparison.cases)] for s in comparison.series]
    return Table(["implementation", *map(code, comparison.cases)], "l" + "c" * len(comparison.cases), lines)


PAIRED = (
    "µs are medians over the rounds. What is relative (% of bound, how much slower, and the ratios in the sentences"
    " at the head) is the median of ratios formed round by round, so it need not be the quotient of the two medians"
    " beside it."
)
"""Which numbers of a report are medians and which are paired; said once, under the table of decisions."""

BACK_TO_BACK = (
    "µs are time on the device for a call, one call after the other in a CUDA graph: without the plan that new"
    " lengths need and without the host's launch (both under *Where the time goes*). A kernel that is put in place"
    " early (PDL), as ours are, overlaps with the call before; the bound's is not put in place early."
)
"""What a time of method ``graph`` leaves out; said in the same place."""


def decisions_note(comparison: Comparison) -> str:
    """What is paired, what *fastest or tied* means, what runs the same as another, and what a mark means."""
    best = {decision.best.anchor for decision in decide(comparison) if decision.best is not None}
    marks = deep_note(comparison, comparison.impls[comparison.impls["anchor"].isin(best)])
    timed = BACK_TO_BACK if set(comparison.impls["method"].dropna()) == {"graph"} else ""
    return " ".join(filter(None, [PAIRED, timed, leading_text(comparison), same_text(comparison), marks]))


def support_note(comparison: Comparison) -> str:
    """What the mark of a name or a cell in :func:`support` means, where one has it."""
    return faulty_note(comparison, comparison.series, cells=True)


def support_counts(comparison: Comparison) -> str:
    """How many measurements came to which status."""
    counts = comparison.impls["status"].value_counts()
    return ", ".join(f"{counts[word]} {word}" for word in WORDS if word in counts)


def reasons(comparison: Comparison) -> list[str]:
    """Why something is not ``ok``, each reason once, with the cases it holds for."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in each(comparison.rows[comparison.rows["status"] != "ok"]):
        groups.setdefault((row.label, row.status, row.reason), []).append(linked(code(row.case), row.anchor))
    lines = []
    order = (*comparison.series, STREAM_READ)
    for (label, status, reason), cases in sorted(groups.items(), key=lambda group: order.index(group[0][0])):
        short = reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + " …"
        lines.append(f"{code(label)} {status} ({_where(comparison, cases)}): {escape(short)}")
    return lines


def _where(comparison: Comparison, cases: Sequence[str]) -> str:
    return "all cases" if len(cases) == len(comparison.cases) else ", ".join(cases)


def cases(comparison: Comparison) -> Table:
    """What each case computes."""
    several = len(comparison.devices) > 1
    lines = [
        [
            code(row.case),
            *([escape(row.device)] if several else []),
            str(row.batch),
            f"{row.total_kv:,}",
            f"{row.max_kv:,}",
            f"{row.heads_q} / {row.heads_kv}",
            str(row.head_dim),
            row.dtype,
            bytes_text(row.kv_bytes),
        ]
        for row in each(comparison.impls.drop_duplicates("case"))
    ]
    header = ["case", *(["device"] if several else []), "sequences", "keys", "longest", "heads q / kv", "head dim"]
    return Table([*header, "dtype", "KV"], "l" * (2 if several else 1) + "rrrrrlr", lines)


def variables(comparison: Comparison) -> Table:
    """The environment of each run."""
    columns = [dict(flatten(run["env"])) for run in comparison.runs]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    counts = comparison.rows.groupby("run_id")["case"].nunique()
    lines = [["cases", *(str(counts[run["run_id"]]) for run in comparison.runs)]]
    lines += [[escape(key), *(escape(column.get(key, ABSENT)) for column in columns)] for key in keys]
    return Table(["variable", *(f"`{run['run_id']}`" for run in comparison.runs)], "l" + "l" * len(columns), lines)


def timings(comparison: Comparison, target: Path) -> Table:
    """Every measurement, with the anchor that the rest of the report links to, its run and its line.

    Args:
        comparison: whose.
        target: the folder of the report, from which the record files are linked.
    """
    files = {name: _relative(folder / records_file(), target) for name, folder in comparison.folders.items()}
    header = ["line", "case", "implementation", "status", "µs", "interval", "GB/s", "TFLOP/s", "% of bound"]
    header += ["× fastest", "n", "method", "cache", "kernels", "run"]
    if comparison.functional:
        # A CPU's rates and ratios would be claims about speed.
        header = [h for h in header if h not in ("GB/s", "TFLOP/s", "% of bound", "× fastest")]
    lines = []
    for row in each(comparison.rows):
        cells = {
            "line": _line(row, files),
            "case": code(row.case),
            "implementation": code(row.label),
            "status": row.status,
            "µs": us_text(row.us),
            "interval": ABSENT if math.isnan(row.us) else us_interval_text(row.us_low, row.us_high),
            "GB/s": number_text(row.gbps, 4),
            "TFLOP/s": number_text(row.tflops, 3),
            "% of bound": interval_text(row.share, row.share_low, row.share_high, places=1),
            "× fastest": interval_text(row.slowdown, row.slowdown_low, row.slowdown_high),
            "n": _samples(row.n, row.n_throttled),
            "method": row.method or ABSENT,
            "cache": row.cache or ABSENT,
            "kernels": number_text(row.kernels, 3),
            "run": f"`{row.run_id}`",
        }
        lines.append([cells[h] for h in header])
    words = ("case", "implementation", "status", "method", "cache", "run")
    return Table(header, "".join("l" if h in words else "r" for h in header), lines)


def _line(row: Any, files: Mapping[str, str]) -> str:
    if row.line is None:
        return ABSENT
    return f'<a id="{row.anchor}"></a>[{row.line}]({files[row.study]}#L{row.line})'


def _relative(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()


def _samples(n: float, throttled: float) -> str:
    if math.isnan(n):
        return ABSENT
    return f"{n:.0f}" + (f" ({throttled:.0f} throttled)" if throttled else "")


def checks(comparison: Comparison) -> Table:
    """Plans and checks of every measurement."""
    header = ["case", "implementation", "splits asked", "splits", "work items", FIRST_PLAN, "plan µs"]
    header += ["rel. L2", "worst row ÷ budget", "LSE error", "note"]
    lines = [
        [
            linked(code(row.case), row.anchor),
            code(row.label),
            ABSENT if row.num_splits is None else str(row.num_splits),
            number_text(row.splits_max, 4),
            number_text(row.work_items, 6),
            number_text(row.compile_ms, 3),
            number_text(row.plan_us, 3),
            small_text(row.rel_l2),
            number_text(row.worst_row, 2),
            small_text(row.lse_err),
            escape(row.splits_note or ""),
        ]
        for row in each(comparison.impls)
    ]
    return Table(header, "llrrrrrrrrl", lines)


def configs(comparison: Comparison) -> Table:
    """What each plan came to, and on which cases."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in each(comparison.impls[comparison.impls["config"].notna()]):
        groups.setdefault((row.label, row.config), []).append(linked(code(row.case), row.anchor))
    order = comparison.series
    lines = [
        [code(label), escape(config), _where(comparison, found)]
        for (label, config), found in sorted(groups.items(), key=lambda group: order.index(group[0][0]))
    ]
    return Table(["implementation", "configuration", "cases"], "lll", lines)
