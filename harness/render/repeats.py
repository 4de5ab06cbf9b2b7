"""What a report says of a second run of its study: how far times move from run to run.

The two runs are compared as ``splitkv compare`` compares two files (:mod:`harness.render.changes`).
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from harness import stats
from harness.record import REPEAT_FILE, STREAM_READ, Record, RecordError, read, records_file
from harness.render.changes import Change, Key, Result, compare_files
from harness.render.findings import ALIKE, beside
from harness.render.frame import Comparison, each, load
from harness.render.rows import repeated_elsewhere
from harness.render.template import Table
from harness.render.text import (
    ABSENT,
    code,
    escape,
    host_text,
    interval_text,
    join,
    linked,
    percent_text,
    us_interval_text,
    us_text,
)
from impls.catalog import OURS

NOT_RECORDED = "not recorded"

ANCHOR = "run-to-run"
"""Where a report says what differs from run to run."""

TITLE, TITLE_APART = "From run to run", "A second run, not alike"
"""The heading of that section, where the two runs are alike in what a time comes from, and where they are not."""

SOFTWARE = ("driver", "torch", "triton", "tilelang", "flash_attn", "flash_attn_3", "flashinfer")
"""The keys of an environment that tell what else than the code and the GPU a time may come from."""

HOST_DIFFERENCE = 1.25
"""How many times another host time may be before the report remarks on it."""

HOST_TIMES: Mapping[str, str] = {
    "plan_us": "plan µs",
    "host_launch_us": "host launch µs",
    "host_total_us": "host, end to end µs",
}
"""Column -> what it is called in the tables of a report."""


@dataclass(frozen=True)
class Repeat:
    """A study's two runs.

    Args:
        first: what the report is made of.
        second: the same from :data:`harness.record.REPEAT_FILE`; its anchors begin with ``p``.
        result: the comparison of the two files.
        path: from the report to the file of the second.
    """

    first: Comparison
    second: Comparison
    result: Result
    path: str

    @cached_property
    def pairs(self) -> Mapping[Key, tuple[Any, Any]]:
        """(case, label) -> its rows in the two runs, those of the bound included, where both have a time."""
        later = {(row.case, row.label): row for row in each(self.second.rows) if not math.isnan(row.us)}
        return {
            (row.case, row.label): (row, later[row.case, row.label])
            for row in each(self.first.rows)
            if not math.isnan(row.us) and (row.case, row.label) in later
        }

    @cached_property
    def apart(self) -> Sequence[str]:
        """What else than the run differs, or may: the commit, the GPU, other software; nothing on a CPU.

        Each as ``of another commit (a → b)``. Code with local changes, or of no recorded commit, may be any.
        """
        if self.first.functional:
            return []
        ways: dict[str, Callable[[Mapping[str, Any]], str]] = {"of another commit": _commit, "on another GPU": _gpu}
        ways |= {f"with another {key}": _version(key) for key in SOFTWARE}
        found = []
        for how, text in ways.items():
            old, new = (list(dict.fromkeys(text(run["env"]) for run in s.runs)) for s in (self.first, self.second))
            if set(old) != set(new):
                found.append(f"{how} ({join(old)} → {join(new)})")
            elif text is _commit and any(map(_is_unsure, (*self.first.runs, *self.second.runs))):
                found.append(f"perhaps of other code ({join(old)} both times)")
        return found

    @cached_property
    def changes(self) -> Mapping[Key, Change]:
        """(case, label) -> what the comparison says of it."""
        return {(change.case, change.label): change for change in self.result.changes}


def read_repeat(first: Comparison, folder: Path) -> Repeat | None:
    """The second run of a study whose report goes into ``folder``; None where it has none.

    A comparison of several studies has none either: its folder holds no records.

    Raises:
        harness.record.RecordError: if the second run is the first one, or of other problems, seeds or another
            method; or for a line that is no record.
    """
    old, new = folder / records_file(), folder / REPEAT_FILE
    if len(first.folders) > 1 or not new.is_file():
        return None
    seeds: dict[str, int] = {}
    runs: set[str] = set()
    for record in read(old):
        runs.add(record["run_id"])
        if record["kind"] == "measurement" and record["case"] is not None:
            seeds[record["case"]] = record["seed"]
    second = read(new)
    for record in second:
        if record["run_id"] in runs:
            raise RecordError(f"{new}: expected a second run, got {record['run_id']}, which {old.name} holds")
        if record["kind"] == "measurement" and record["seed"] != seeds.get(record["case"], record["seed"]):
            told = f"expected seed {seeds[record['case']]} as in {old.name}, got {record['seed']}"
            raise RecordError(f"{new}: {record['case']}: {told}")
    if not any(record["kind"] == "measurement" and record["role"] == "impl" for record in second):
        return None  # interrupted before its first case was done
    result = compare_files(old, new)
    path = Path(os.path.relpath(new.resolve(), folder.resolve())).as_posix()
    return Repeat(first, load([folder], file=REPEAT_FILE, anchor="p"), result, path)


def within_rounds(comparison: Comparison, repeat: Repeat | None) -> str:
    """What the intervals of a report leave out, and where it is told."""
    if repeat is None or not (told := _ours(repeat)):
        text = "Intervals are of the rounds of one run: what differs from run to run is not in them"
        where = None
        if repeat is None and not comparison.functional and len(comparison.folders) == 1:
            [folder] = comparison.folders.values()
            impls = list(dict.fromkeys(comparison.impls["impl"]))
            where = repeated_elsewhere(folder, comparison.runs, impls, comparison.problems)
        return f"{text}." if where is None else f"{text}; {beside(where, ANCHOR)} tells of two runs, {ALIKE}."
    if repeat.apart:
        return (
            "Intervals are of the rounds of one run: what differs from run to run is not in them. A"
            f" {linked('second run', ANCHOR)} is {join(repeat.apart)}, so that what differs from it may be due to"
            f" that: {told}."
        )
    return (
        "Intervals are of the rounds of one run; what differs"
        f" {linked('from run to run', ANCHOR)} comes on top: {told}."
    )


def repeat_section(repeat: Repeat) -> dict[str, Any]:
    """What the template fills in."""
    functional = repeat.first.functional
    host, farthest = (None, "") if functional else _host(repeat)
    return {
        "anchor": ANCHOR,
        "title": TITLE_APART if repeat.apart else TITLE,
        "sentences": _sentences(repeat),
        "times": None if functional else _times(repeat),
        "reading": "*No comparison: a run on a CPU makes no claim about speed.*"
        if functional
        else _reading(repeat),
        "changes": _status_changes(repeat),
        "host": host,
        "host_note": farthest,
        "environment": _environment(repeat),
        "timings": _timings(repeat),
    }


def _sentences(repeat: Repeat) -> list[str]:
    first, second = (join([code(run["run_id"]) for run in side.runs]) for side in (repeat.first, repeat.second))
    sentences = [
        f"The study was run a second time, as {second} ([{REPEAT_FILE}]({repeat.path})); the report is of {first}."
    ]
    if repeat.apart:
        sentences.append(
            f"The second is {join(repeat.apart)}: what differs between the two may be due to that, and how far"
            " times move from run to run, with nothing changed, cannot be told from them."
        )
    if told := _ours(repeat):
        sentences.append(f"{told[0].upper()}{told[1:]}.")
    if told := _bound_moved(repeat):
        sentences.append(told)
    return sentences


def _is_unsure(run: Record) -> bool:
    """Whether nobody can tell which code a run was of."""
    return not run["env"].get("git") or bool(run["env"].get("dirty"))


def _commit(env: Mapping[str, Any]) -> str:
    if not env.get("git"):
        return NOT_RECORDED
    return code(str(env["git"])[:12]) + (" with local changes" if env.get("dirty") else "")


def _gpu(env: Mapping[str, Any]) -> str:
    return escape(str(env.get("gpu") or env.get("device") or NOT_RECORDED))


def _version(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda env: escape(str(env.get(key) or NOT_RECORDED))


def _bound_moved(repeat: Repeat) -> str:
    """On which case the bound itself differs most, which every time over it shows; empty where it does not."""
    plain = {} if repeat.first.functional else _as_they_are(repeat, STREAM_READ)
    if not plain:
        return ""
    case = max(plain, key=lambda name: abs(math.log(plain[name])))
    if (by := _percent(plain[case])) == _percent(1.0):
        return ""
    old, new = repeat.pairs[case, STREAM_READ]
    ratios = [found for label in repeat.first.shown if (found := _over_bound(repeat, label))]
    # The bound is what differs where a ratio to it goes the other way.
    there = sum(
        max(found, key=lambda name: abs(math.log(found[name]))) == case
        and _percent(found[case]) != _percent(1.0)
        and (found[case] > 1) != (plain[case] > 1)
        for found in ratios
    )
    first, second = linked(us_text(old.us), old.anchor), linked(us_text(new.us), new.anchor)
    text = (
        f"The bound itself differs most on {code(case)}, {first} → {second} µs ({by}), which every time ÷ bound of"
        " that case has in it"
    )
    return f"{text}: {there} of {len(ratios)} implementations differ most there." if there else f"{text}."


def _ours(repeat: Repeat) -> str:
    """By how much the times of our kernels differ at most, over the bound and as they are; empty where unknown."""
    if repeat.first.functional:
        return ""
    told = []
    for label in (label for label in repeat.first.shown if label in OURS):
        relative, plain = _over_bound(repeat, label), _as_they_are(repeat, label)
        ways = []
        for ratios, unit in ((relative, "over the bound"), (plain, "in µs")):
            if ratios:
                case = max(ratios, key=lambda name: abs(math.log(ratios[name])))
                where = linked(code(case), repeat.pairs[case, label][1].anchor)
                ways.append(f"{_percent(ratios[case]).lstrip('+-')} {unit} ({where})")
        if ways:
            told.append(f"{code(label)} differs by at most {join(ways)}")
    if lead := _lead(repeat):
        told.append(lead)
    return f"between the two runs {'; '.join(told)}" if told else ""


def _lead(repeat: Repeat) -> str:
    """By how much the time of one of our kernels over that of the other changes at most; empty where unknown."""
    first, other = OURS
    leads = {
        case: [repeat.pairs[case, other][run].us / repeat.pairs[case, first][run].us for run in (0, 1)]
        for case in repeat.first.cases
        if {(case, first), (case, other)} <= repeat.pairs.keys()
    }
    if not leads:
        return ""
    case = max(leads, key=lambda name: abs(leads[name][1] - leads[name][0]))
    was, then = (f"{percent_text(lead)} %" for lead in leads[case])
    points = f"{100 * abs(leads[case][1] - leads[case][0]):.1f}"
    return (
        f"how much slower {code(other)} is than {code(first)} changes by at most {points} points"
        f" ({linked(code(case), repeat.pairs[case, other][1].anchor)}, {was} and {then})"
    )


def _over_bound(repeat: Repeat, label: str) -> dict[str, float]:
    """Case -> the second time over the first, each over that of its own run's bound."""
    return {
        case: change.ratio.median
        for (case, name), change in repeat.changes.items()
        if name == label and change.ratio is not None and change.bounded
    }


def _as_they_are(repeat: Repeat, label: str) -> dict[str, float]:
    """Case -> the second median over the first."""
    return {case: new.us / old.us for (case, name), (old, new) in repeat.pairs.items() if name == label}


def _percent(ratio: float) -> str:
    text = percent_text(ratio)
    return f"{'' if text.startswith('-') else '+'}{text} %"


def _times(repeat: Repeat) -> Table:
    header = ["implementation", "÷ bound, geo. mean", "most up", "most down", "µs, geo. mean", "most up"]
    header += ["most down", "verdicts"]
    m = len(repeat.first.cases)
    lines = []
    for label in (*repeat.first.shown, *([STREAM_READ] if len(repeat.first.bounds) else [])):
        relative, plain = _over_bound(repeat, label), _as_they_are(repeat, label)
        line = [code(label)]
        for ratios, cell in ((relative, _relative_cell), (plain, _plain_cell)):
            line += [_mean(list(ratios.values()), m), *_extremes(repeat, label, ratios, cell)]
        told = [change.verdict for (_, name), change in repeat.changes.items() if name == label]
        words = ", ".join(f"{told.count(word)} {word}" for word in (stats.FASTER, stats.TIE, stats.SLOWER))
        lines.append([*line, words if any(told) else ABSENT])
    return Table(header, "lrllrlll", lines)


def _mean(ratios: Sequence[float], m: int) -> str:
    if not ratios:
        return ABSENT
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.3f}× over {len(ratios)} of {m}"


def _extremes(
    repeat: Repeat, label: str, ratios: Mapping[str, float], cell: Callable[[Any, Any, float], str]
) -> list[str]:
    """The case that became slower by the most, and the one that became faster by the most."""
    if not ratios:
        return [ABSENT, ABSENT]
    slowest, fastest = max(ratios, key=lambda case: ratios[case]), min(ratios, key=lambda case: ratios[case])
    return [
        cell(*repeat.pairs[case, label], ratios[case]) if differs else ABSENT
        for case, differs in ((slowest, ratios[slowest] > 1), (fastest, ratios[fastest] < 1))
    ]


def _relative_cell(old: Any, new: Any, ratio: float) -> str:
    return f"{linked(_percent(ratio), new.anchor)} ({code(old.case)})"


def _plain_cell(old: Any, new: Any, ratio: float) -> str:
    first, second = linked(us_text(old.us), old.anchor), linked(us_text(new.us), new.anchor)
    return f"{first} → {second}, {_percent(ratio)} ({code(old.case)})"


def _reading(repeat: Repeat) -> str:
    text = (
        "Second run over first, above 1× and up is slower. ÷ bound: each time over that of its own run's bound,"
        " which leaves out what all kernels share, such as another clock; µs: the medians as they are. Verdicts are"
        " those of `splitkv compare`, on times over the bound where there is one."
    )
    if repeat.first.has_fixed:
        text += f" Fixed split counts are in the {linked('table of all measurements', 'measurements')}."
    return text


def _status_changes(repeat: Repeat) -> list[str]:
    """What came to another status, or is in one run alone."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for change in repeat.result.changes:
        if change.old != change.new:
            groups.setdefault((change.label, change.old, change.new), []).append(code(change.case))
    return [
        f"{code(label)}: {old} in the first run, {new} in the second, on {join(cases)}"
        for (label, old, new), cases in groups.items()
    ]


def _host(repeat: Repeat) -> tuple[Table | None, str]:
    """Host times of the two runs, and a sentence on how far they are apart."""
    lines, found = [], []
    for label in repeat.first.shown:
        pairs = [pair for (_, name), pair in repeat.pairs.items() if name == label]
        line = [code(label)]
        for column, title in HOST_TIMES.items():
            times = [(getattr(old, column), getattr(new, column)) for old, new in pairs]
            known = [(old, new) for old, new in times if old > 0 and new > 0]  # NaN is not
            if not known:
                line.append(ABSENT)
                continue
            ratio = math.exp(math.fsum(math.log(new / old) for old, new in known) / len(known))
            found.append((ratio, title, label))
            first, second = (us_text(statistics.median(side)) for side in zip(*known, strict=True))
            line.append(f"{first} → {second} ({ratio:.2f}×)")
        lines.append(line)
    if not found:
        return None, ""
    ratio, title, label = max(found, key=lambda item: abs(math.log(item[0])))
    most = max(ratio, 1 / ratio)
    where = f"{most:.2f}× ({title.removesuffix(' µs')} of {code(label)})"
    first, second = (_hosts(side) for side in (repeat.first, repeat.second))
    machines = f"first run: {first}; second: {second}"
    note = f"They differ by at most {where} ({machines})."
    if most > HOST_DIFFERENCE:
        note = (
            f"They differ by up to {where}: host times depend on the machine's CPU and on what else it does"
            f" ({machines})."
        )
    return Table(["implementation", *HOST_TIMES.values()], "lrrr", lines), note


def _hosts(comparison: Comparison) -> str:
    told = dict.fromkeys(host_text(run["env"]) or "a CPU that was not recorded" for run in comparison.runs)
    return join(list(told))


def _environment(repeat: Repeat) -> Table | None:
    """What differs, as ``splitkv compare`` prints it; None where nothing does."""
    lines = [[escape(key), escape(old), escape(new)] for key, (old, new) in repeat.result.environment.items()]
    return Table(["variable", "old", "new"], "lll", lines) if lines else None


def _timings(repeat: Repeat) -> Table:
    """Every measurement of the second run, with the anchor that the section links to."""
    header = ["line", "case", "implementation", "status", "µs, first", "µs, second", "interval"]
    header += ["second ÷ first", "verdict", "run"]
    pairs, changes = repeat.pairs, repeat.changes
    lines = []
    for row in each(repeat.second.rows):
        if row.line is None:
            continue
        key = (row.case, row.label)
        old, _ = pairs.get(key, (None, None))
        change = None if repeat.first.functional else changes.get(key)
        ratio = change.ratio if change is not None and change.bounded else None
        lines.append(
            [
                f'<a id="{row.anchor}"></a>[{row.line}]({repeat.path}#L{row.line})',
                code(row.case),
                code(row.label),
                row.status,
                ABSENT if old is None else linked(us_text(old.us), old.anchor),
                us_text(row.us),
                ABSENT if math.isnan(row.us) else us_interval_text(row.us_low, row.us_high),
                ABSENT if ratio is None else interval_text(ratio.median, ratio.low, ratio.high),
                ABSENT if change is None or change.verdict is None else change.verdict,
                code(row.run_id),
            ]
        )
    return Table(header, "rlllrrrrll", lines)
