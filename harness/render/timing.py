"""The report of the harness's measurements of itself.

False verdicts, differences found, timers of others, planning, TileLang's example, and liars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness import stats
from harness.cost import CEILING_SLACK
from harness.record import SELFTEST_FILE, Record, RecordError, read
from harness.render.looks import ALARM_COLOUR, WIDTH, save, style
from harness.render.template import Picture, Table, fill
from harness.render.text import code, escape, hosts_sentence, join, versions
from harness.render.timing_tables import (
    duration,
    example_note,
    example_reasons,
    example_table,
    liars_sentence,
    liars_table,
    paired,
    planning_reasons,
    planning_table,
    us_text,
)
from harness.stats import CONFIDENCE, SMALLEST_EFFECT, Estimate

SIZES: Mapping[str, float] = {"under 64 MB of K and V": 64e6, "64 to 400 MB": 400e6, "over 400 MB": float("inf")}
"""Size class -> the KV bytes below which a case belongs to it; the first is about what an L2 holds."""

FOUND_SHARE = 0.95
"""The share of trials in which a difference must be found to count as detectable."""

AGREEMENT, AGREEMENT_US = 0.03, 1.0
"""How far apart two timers may be that claim to measure the same thing: this share, or this many µs."""

HOST_US = 25.0
"""What one launch at a time may take beyond a graph's: more than launch latencies and lines to be written back."""


@dataclass(frozen=True)
class Group:
    """Timers of one kind, ours first; ``alike`` says whether they claim to measure the same thing."""

    title: str
    note: str
    timers: tuple[str, ...]
    alike: bool = True


SECTIONS = ("identical", "sensitivity", "timers", "planning", "example", "liars")
"""What the trials' ``experiment`` may be, in the order of the report."""

TRIED_BY: Mapping[str, str] = {
    "nvbench": "nvbench",
    **dict.fromkeys(("kernels", "kernels and gaps", "tilelang do_bench, cupti"), "profilers"),
}
"""Timer -> the experiment that tries it; all others are of ``timers``."""

NO_REASON = "the run left no record of it there, nor of why"
"""What is said of a time that is missing without a reason."""

GROUPS = (
    Group(
        "Kernels of a call, launched from a graph, cold",
        "Gaps between the kernels of a call and from call to call count. No timer of others does this: they leave"
        " the L2 warm, or time single launches. So it is held against another clock, on the same graph.",
        ("graph", "kernels and gaps"),
    ),
    Group(
        "Kernels of a call, launched from a graph, warm",
        "One input set again and again: what fits the L2 is read from there, and small cases look faster than"
        " memory. Where K and V take about half the L2 (`b1_8k` on an H200), how much of them stays differs from"
        " timer to timer.",
        ("graph-warm", "triton do_bench_cudagraph"),
    ),
    Group(
        "One launch at a time, flushed",
        "From an event before the launch to one after it: launch latencies, and what the host cannot queue in time,"
        f" count. *Host*: `events` is over `graph` by more than {HOST_US:g} µs, most of which is the host's; these"
        " timers, but for nvbench, then tell how fast the host is, which differs from one moment to the next.",
        ("events", "triton do_bench", "tilelang do_bench", "nvbench"),
    ),
    Group(
        "Kernels alone, by CUPTI",
        "No gaps and no launches. Two different things, side by side: ours is of calls in a graph over rotated"
        " inputs, TileLang's of single calls that find the L2 full of lines to be written back.",
        ("kernels", "tilelang do_bench, cupti"),
        alike=False,
    ),
)

DIFFERENCES: Mapping[str, str] = {
    "events": "256 MB are written before each call, outside of its time; 25 ms of warm-up, 100 ms measured; the"
    " events are made before the first launch, and a sample is the median of its calls.",
    "kernels and gaps": "the graph of `graph` with CUPTI attached: its kernels by the device's own clock, and the"
    " gaps between them as they are while it is traced, perhaps longer than untraced; where kernels overlap, the"
    " gap is below 0.",
    "triton do_bench_cudagraph": "as many calls as make 20 ms in one graph, ten replays, each from one event to"
    " another; no untimed replay before the timed one.",
    "triton do_bench": "256 MB are written before each call; 25 ms of warm-up without that; the median of single"
    " calls, where `events` shares 100 ms out to its rounds.",
    "tilelang do_bench": "as Triton's, in TileLang's own loop.",
    "nvbench": "the L2 is flushed, and a kernel blocks the stream until the host has queued the call: what the host"
    " takes does not count, which it does in `events` where a call is shorter than its launches; the mean.",
    "tilelang do_bench, cupti": "single calls after 256 MB were written, not a graph; times of kernels are added"
    " up, also where they overlap, as under programmatic dependent launch; the mean.",
}
"""Timer -> what it does otherwise than ours of its group; of ``events``, what others may do otherwise."""


def write_timing_report(folder: Path) -> Path:
    """Write ``README.md`` and figures of the trials in ``folder``; returns the path of the former.

    Raises:
        harness.record.RecordError: for a line that is no record, or a file without a finished trial.
    """
    path = folder / SELFTEST_FILE
    records = read(path)
    runs = [r for r in records if r["kind"] == "run"]
    trials = [r for r in records if r["kind"] == "trial" and r["experiment"] in SECTIONS]
    if not runs or not trials:
        raise RecordError(f"{path}: expected a run and its trials, got {len(records)} records")
    trials = [r for r in trials if r["run_id"] == runs[-1]["run_id"]]
    by = {name: [r for r in trials if r["experiment"] == name] for name in SECTIONS}
    markers = [r for r in records if r.get("experiment") == "done" and r["run_id"] == runs[-1]["run_id"]]
    (folder / "figures").mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "headline": _headline(by),
        "environment": _environment(runs[-1]),
        "confidence": round(100 * CONFIDENCE),
        "smallest": f"{100 * SMALLEST_EFFECT:g}",
        "identical": _identical(by["identical"]) if by["identical"] else None,
        "sensitivity": _sensitivity(by["sensitivity"]) if by["sensitivity"] else None,
        "smallest_found": _smallest_found(by["sensitivity"]) if by["sensitivity"] else None,
        "timers": _timers(by["timers"], hosts_sentence(runs[-1:]), _failures(records, runs[-1]["run_id"])),
        "reasons": _reasons(by["timers"]) if by["timers"] else [],
        "planning": planning_table(by["planning"]) if by["planning"] else None,
        "planning_reasons": planning_reasons(by["planning"]),
        "example": example_table(by["example"]) if by["example"] else None,
        "example_reasons": example_reasons(by["example"]),
        "liars": liars_table(by["liars"]) if by["liars"] else None,
        "liars_sentence": liars_sentence(by["liars"]) if by["liars"] else None,
        "example_note": example_note(by["example"]),
        "hosts": hosts_sentence(runs[-1:]),
        "has_ceiling": runs[-1]["env"].get("device") == "cuda",
        "slack": f"{CEILING_SLACK:g}",
        "duration": duration(markers),
    }
    figures = {"identical": _draw_identical, "sensitivity": _draw_sensitivity}
    for name, draw in figures.items():
        values[f"{name}_figure"] = None
        if by[name]:
            with style():
                figure, alt, caption = draw(by[name])
                save(figure, folder / "figures" / f"{name}.png", folder / "figures" / f"{name}.svg")
            values[f"{name}_figure"] = Picture(name, alt, caption)
    return fill("timing.md.j2", values, folder)


def ratio_of(trial: Record) -> Estimate:
    """The time of ``b`` over that of ``a``, paired by round; throttled rounds are left out."""
    ratio = paired(trial["b"], trial["a"])
    if ratio is None:
        raise RecordError(f"{trial['case']}: expected rounds that both sides share, got none")
    return ratio


def _false(trials: Iterable[Record], smallest_effect: float) -> int:
    return sum(stats.verdict(ratio_of(trial), smallest_effect) != stats.TIE for trial in trials)


def _found(trials: Sequence[Record], smallest_effect: float) -> int:
    return sum(stats.verdict(ratio_of(trial), smallest_effect) == stats.SLOWER for trial in trials)


def _rate(hits: int, of: int) -> str:
    low, high = stats.share_interval(hits, of)
    return f"{hits} of {of}: {100 * hits / of:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def _headline(by: Mapping[str, Sequence[Record]]) -> list[str]:
    sentences = []
    if same := by["identical"]:
        sentences.append(
            f"The same kernel entered under two names gets a false verdict in {_rate(_false(same, 0), len(same))}"
            f" with the threshold off, and in {_rate(_false(same, SMALLEST_EFFECT), len(same))} with it on."
        )
    if by["sensitivity"]:
        sentences.append(_smallest_found(by["sensitivity"]))
    if agreement := _agreement_sentence(by["timers"]):
        sentences.append(agreement)
    if by["liars"]:
        sentences.append(liars_sentence(by["liars"]))
    return sentences


def _agreement_sentence(trials: Sequence[Record]) -> str | None:
    """Of all pairs of one of our timers and another of its group, how many agree; None where there is no pair."""
    every = [
        (times[group.timers[0]], times[other], _waits_for_host(group, times))
        for times in _times(trials).values()
        for group in GROUPS
        if group.alike
        for other in group.timers[1:]
        if times.get(group.timers[0]) is not None and times.get(other) is not None
    ]
    if not every:
        return None
    pairs = [(ours, us) for ours, us, host in every if not host]
    agree = sum(_agrees(ours, us) for ours, us in pairs)
    text = (
        f"Timers that claim to measure the same as ours agree with them within {100 * AGREEMENT:g} % or"
        f" {AGREEMENT_US:g} µs in {agree} of {len(pairs)} pairs"
    )
    if host := len(every) - len(pairs):
        near = sum(_agrees(ours, us) for ours, us, told in every if told)
        text += (
            f"; {host} more ({near} of them agree) are of calls that take over {HOST_US:g} µs longer when launched"
            " one at a time than in a graph, most of which is the host's"
        )
    return f"{text}."


def _waits_for_host(group: Group, times: Mapping[str, float | None]) -> bool:
    """Whether launches, one at a time, take so much longer than in a graph that it is the host that is timed."""
    single, graph = times.get("events"), times.get("graph")
    known = single is not None and graph is not None
    return "events" in group.timers and known and single > graph + HOST_US  # type: ignore[operator]


def _environment(run: Record) -> str:
    env = run["env"]
    device = str(env.get("gpu") or env.get("cpu") or env.get("device"))
    parts = [device, *versions(env, ("driver", "torch", "triton"))]
    return escape(", ".join(parts)) + f" (run `{run['run_id']}`)."


def _identical(trials: Sequence[Record]) -> Table:
    lines = []
    for name in dict.fromkeys(trial["impl"] for trial in trials):
        mine = [trial for trial in trials if trial["impl"] == name]
        lines.append(_identical_line(code(name), mine))
    lines.append(_identical_line("all", trials))
    header = ["kernel", "false verdicts, threshold off", "threshold on", "half-width, median", "largest difference"]
    return Table(header, "lrrrr", lines)


def _identical_line(name: str, trials: Sequence[Record]) -> list[str]:
    ratios = [ratio_of(trial) for trial in trials]
    return [
        name,
        _rate(_false(trials, 0), len(trials)),
        _rate(_false(trials, SMALLEST_EFFECT), len(trials)),
        f"{100 * float(np.median([ratio.half_width for ratio in ratios])):.2f} %",
        f"{100 * max(abs(ratio.median - 1) for ratio in ratios):.2f} %",
    ]


def _by_size(trials: Sequence[Record]) -> dict[str, list[Record]]:
    sizes: dict[str, list[Record]] = {name: [] for name in SIZES}
    for trial in trials:
        sizes[next(name for name, most in SIZES.items() if trial["kv_bytes"] < most)].append(trial)
    return {name: mine for name, mine in sizes.items() if mine}


def _effects(trials: Iterable[Record]) -> dict[float, list[Record]]:
    effects: dict[float, list[Record]] = {}
    for trial in trials:
        effects.setdefault(trial["effect"], []).append(trial)
    return dict(sorted(effects.items()))


def _sensitivity(trials: Sequence[Record]) -> Table:
    lines = []
    for size, mine in _by_size(trials).items():
        for effect, same in _effects(mine).items():
            measured = float(np.median([ratio_of(trial).median for trial in same]))
            found = [_rate(_found(same, smallest), len(same)) for smallest in (0, SMALLEST_EFFECT)]
            lines.append([size, f"{100 * effect:g} %", *found, f"{100 * (measured - 1):.2f} %"])
    header = ["size", "slowed by", "found, threshold off", "found, threshold on", "measured, median"]
    return Table(header, "lrrrr", lines)


def _smallest_found(trials: Sequence[Record]) -> str:
    off, on = _smallest_by_size(trials, 0), _smallest_by_size(trials, SMALLEST_EFFECT)
    return (
        f"The smallest slowdown found in {100 * FOUND_SHARE:g} % of trials, of those tried: with the threshold off"
        f" {off}; with it on {on}."
    )


def _smallest_by_size(trials: Sequence[Record], smallest_effect: float) -> str:
    told = []
    for size, mine in _by_size(trials).items():
        shares = {effect: _found(same, smallest_effect) / len(same) for effect, same in _effects(mine).items()}
        found = [effect for effect, share in shares.items() if share >= FOUND_SHARE]
        told.append(f"{100 * min(found):g} % ({size})" if found else f"none ({size})")
    return join(told)


def _times(trials: Sequence[Record]) -> dict[tuple[str, str], dict[str, float | None]]:
    """(case, implementation) -> timer -> µs, in the order of the trials."""
    times: dict[tuple[str, str], dict[str, float | None]] = {}
    for t in trials:
        times.setdefault((t["case"], t["impl"]), {})[t["timer"]] = t["us"]
    return times


def _failures(records: Iterable[Record], run_id: str) -> dict[tuple[str, str], str]:
    """(experiment, case) -> why a run has no trials of it, where it did not come to its end later."""
    found: dict[tuple[str, str], str] = {}
    for r in records:
        if r["kind"] == "trial" and r["run_id"] == run_id:
            if r["experiment"] == "failed":
                found[r["impl"], r["case"]] = r["reason"]
            elif r["experiment"] == "done":
                found.pop((r["impl"], r["case"]), None)
    return found


class _Missing:
    """Why a timer has no time of something, each reason once and with the mark of a note under its table.

    Args:
        trials: of all timers.
        failures: of :func:`_failures`.
    """

    def __init__(self, trials: Sequence[Record], failures: Mapping[tuple[str, str], str]) -> None:
        self._failures = failures
        self._reasons = {(t["case"], t["impl"], t["timer"]): t["reason"] for t in trials if t["us"] is None}
        self._timed = {(t["case"], t["timer"]) for t in trials if t["us"] is not None}
        self._found: dict[tuple[str, str], dict[str, None]] = {}

    def mark(self, case: str, impl: str, timer: str) -> str:
        """The mark that stands in the place of a time."""
        key = (timer, self._reason(case, impl, timer))
        self._found.setdefault(key, {})[code(case)] = None
        return f"–<sup>{list(self._found).index(key) + 1}</sup>"

    def notes(self) -> list[str]:
        """What the marks mean, in their order."""
        return [
            f"<sup>{i}</sup> {code(timer)} on {join(list(cases))}: {escape(reason)}"
            for i, ((timer, reason), cases) in enumerate(self._found.items(), start=1)
        ]

    def _reason(self, case: str, impl: str, timer: str) -> str:
        if (case, impl, timer) in self._reasons:
            return str(self._reasons[case, impl, timer])
        of_case = [why for (where, _, name), why in self._reasons.items() if (where, name) == (case, timer)]
        if of_case and (case, timer) not in self._timed:
            return str(of_case[0])  # a library that is not there says so once a case
        return self._failures.get((TRIED_BY.get(timer, "timers"), case), NO_REASON)


def _timers(trials: Sequence[Record], hosts: str, failures: Mapping[tuple[str, str], str]) -> list[dict[str, Any]]:
    """The tables of timers.

    Args:
        trials: of all timers.
        hosts: says what machine queued their launches.
        failures: of :func:`_failures`.
    """
    rows = _times(trials)
    groups = []
    for group in GROUPS:
        present = [timer for timer in group.timers if any(times.get(timer) for times in rows.values())]
        if not present:
            continue
        lines, missing = [], _Missing(trials, failures)
        for (case, impl), times in rows.items():
            found = [times.get(timer) for timer in present]
            if any(us is not None for us in found):
                agreement = _agreement(found) if group.alike else []
                if agreement and _waits_for_host(group, times):
                    agreement = [f"host ({agreement[0].strip('*')})"]
                cells = [
                    missing.mark(case, impl, timer) if us is None else us_text(us)
                    for timer, us in zip(present, found, strict=True)
                ]
                lines.append([code(case), code(impl), *cells, *agreement])
        header = ["case", "implementation", *map(code, present)]
        if len(present) > 1 and group.alike:
            header.append("agree with ours")
        groups.append(
            {
                "title": group.title,
                "note": group.note + (f" {hosts}".rstrip() if "events" in group.timers else ""),
                "table": Table(header, "ll" + "r" * (len(header) - 2), lines),
                "missing": missing.notes(),
                "differences": [
                    f"{code(t)}: {DIFFERENCES[t]}" + (_of_calls(trials) if t == "events" else "")
                    for t in present
                    if t in DIFFERENCES
                ],
            }
        )
    return groups


def _agreement(found: Sequence[float | None]) -> list[str]:
    """How many of the others agree with the first, and by how much the farthest is off; nothing without others."""
    ours, others = found[0], [us for us in found[1:] if us is not None]
    if len(found) == 1:
        return []
    if ours is None or not others:
        return ["–"]
    agree = sum(_agrees(ours, us) for us in others)
    farthest = max(others, key=lambda us: abs(us - ours))
    text = f"{agree} of {len(others)} (farthest {100 * (farthest / ours - 1):+.1f} %)"
    return [text if agree == len(others) else f"**{text}**"]


def _agrees(ours: float | None, us: float | None) -> bool:
    assert ours is not None
    assert us is not None
    return abs(us - ours) <= max(AGREEMENT * ours, AGREEMENT_US)


def _of_calls(trials: Sequence[Record]) -> str:
    """Where the recorded times of ``events`` are of before its samples were medians."""
    if all("of_calls" in t for t in trials if t["timer"] == "events"):
        return ""
    return " The times here were recorded before that: their samples are means of calls, events made call by call."


def _reasons(trials: Sequence[Record]) -> list[str]:
    """Why a timer timed nothing at all."""
    # What has a column has its reasons under the table.
    timed = {t["timer"] for t in trials if t["us"] is not None} | {"nvbench"}
    told = dict.fromkeys((t["timer"], t["reason"]) for t in trials if t["timer"] not in timed)
    return [f"{code(timer)}: {escape(reason)}" for timer, reason in told] + [_nvbench(trials)]


def _nvbench(trials: Sequence[Record]) -> str:
    """Whether nvbench was there."""
    mine = [t for t in trials if t["timer"] == "nvbench"]
    if any(t["us"] is not None for t in mine):
        return "`nvbench` was installed; its times stand beside those of `events`."
    if not mine:
        return "`nvbench` was not tried."
    reason = str(mine[0]["reason"])
    what = "was not installed" if reason.startswith("ModuleNotFoundError") else "did not work"
    return f"`nvbench` {what}, so nothing was timed with it: {escape(reason)}."


def _draw_identical(trials: Sequence[Record]) -> tuple[Figure, str, str]:
    """Every comparison with its interval, sorted."""
    ratios = sorted((ratio_of(trial) for trial in trials), key=lambda ratio: ratio.median)
    figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
    ax = figure.subplots()
    for i, ratio in enumerate(ratios):
        colour = "#8FA3B5" if stats.verdict(ratio, 0) == stats.TIE else ALARM_COLOUR
        ax.plot([i, i], [100 * (ratio.low - 1), 100 * (ratio.high - 1)], color=colour, linewidth=1)
    ax.axhline(0, color="#333333", linewidth=0.8)
    for side in (-1, 1):
        ax.axhline(side * 100 * SMALLEST_EFFECT, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)))
    ax.set_xlabel("comparisons, sorted")
    ax.set_ylabel("difference, %")
    ax.grid(False, axis="x")
    return (
        figure,
        "Intervals of the difference of identical kernels, sorted, with those that leave out zero marked",
        f"{round(100 * CONFIDENCE)} % intervals of the difference. Red ones leave out 0: false verdicts with the"
        f" threshold off. Dashed: the threshold.",
    )


def _draw_sensitivity(trials: Sequence[Record]) -> tuple[Figure, str, str]:
    """Measured slowdown of every trial beside the true one, a panel a size class."""
    sizes = _by_size(trials)
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    axes = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for ax, (size, mine) in zip(axes, sizes.items(), strict=True):
        effects = _effects(mine)
        for place, (effect, same) in enumerate(effects.items()):
            measured = [100 * (ratio_of(trial).median - 1) for trial in same]
            offsets = np.linspace(-0.3, 0.3, len(measured))
            ax.scatter(place + offsets, measured, s=7, color="#0072B2", linewidth=0)
            ax.hlines(100 * effect, place - 0.4, place + 0.4, color=ALARM_COLOUR, linewidth=1.2)
        ax.set_xticks(range(len(effects)), [f"{100 * effect:g} %" for effect in effects])
        ax.set_title(size, fontsize=9.5)
        ax.set_xlabel("slowed by")
        ax.grid(False, axis="x")
    axes[0].set_ylabel("measured slowdown, %")
    handles = [
        Line2D([], [], color="#0072B2", marker="o", linestyle="none", markersize=4, label="one trial"),
        Line2D([], [], color=ALARM_COLOUR, label="what was put in"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return (
        figure,
        "Measured slowdown of every trial beside the slowdown that was put in, by size of the case",
        "Measured slowdown, a mark a trial; the line is what was put in.",
    )
