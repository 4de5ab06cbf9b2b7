"""Tables of the selftest's report: liars, planning, and the shape of TileLang's example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from harness import stats
from harness.cost import flops, tflops
from harness.record import Record
from harness.render.template import Table
from harness.render.text import code, escape, join
from impls.problem import DecodeProblem

CAUGHT = ("invalid", "wrong")
"""How a liar must end."""

REASON_CHARS = 160
"""Characters of a reason that a table holds; the record has all of it."""


def liars_table(trials: Sequence[Record]) -> Table:
    """Every liar on every case: what it does and how it ended; in bold what should not be."""
    lines = [
        [
            code(t["impl"]),
            escape(t["does"]),
            code(t["case"]),
            t["status"] if _is_as_wanted(t) else f"**{t['status']}**",
            us_text(t["us"]),
            escape(_cut(t["reason"] or "")),
        ]
        for t in trials
    ]
    return Table(["liar", "what it does", "case", "ended as", "µs claimed", "why"], "lllcrl", lines)


def liars_sentence(trials: Sequence[Record]) -> str:
    """Whether all were caught, and the control was not."""
    liars = [t for t in trials if not t["control"]]
    missed = [t for t in trials if not _is_as_wanted(t)]
    names = list(dict.fromkeys(t["impl"] for t in liars))
    if missed:
        told = join([f"{code(t['impl'])} on {code(t['case'])} (`{t['status']}`)" for t in missed])
        return f"**Of {len(trials)} outcomes of liars and their control, {len(missed)} should not be: {told}.**"
    return (
        f"All {len(names)} liars ended as `wrong` or `invalid` on every case they were tried on,"
        " and their honest control as `ok`."
    )


def planning_table(trials: Sequence[Record]) -> Table:
    """Plans made before the call and inside of it, side by side; what has a reason is not in it."""
    lines = []
    for t in trials:
        if "reason" in t:
            continue
        lines.append(
            [
                code(t["case"]),
                escape(t["impl"]),
                us_text(t["plan_us"]),
                us_text(median(t["alone"])),
                us_text(median(t["before"])),
                us_text(median(t["inside"])),
                _ratio(t["inside"], t["before"]),
                " / ".join("–" if (n := t["kernels"][when]) is None else str(n) for when in ("before", "inside")),
                us_text(t["host"]["before"]),
                us_text(t["host"]["inside"]),
            ]
        )
    header = [
        *("case", "implementation", "plan, host µs", "kernel that plans, µs"),
        *("call, planned before, µs", "planned inside, µs", "inside ÷ before", "kernels, before / inside"),
        *("whole call, host µs, planned before", "planned inside"),
    ]
    return Table(header, "llrrrrrcrr", lines)


def planning_reasons(trials: Sequence[Record]) -> list[str]:
    """Why something is not in the table."""
    return [f"{code(t['case'])}, {escape(t['impl'])}: {escape(_cut(t['reason']))}" for t in trials if "reason" in t]


def example_table(trials: Sequence[Record]) -> Table:
    """Times and TFLOP/s of each protocol."""
    lines = []
    for t in trials:
        if t["us"] is None:
            continue
        problem = DecodeProblem.from_dict(t["problem"])
        shape = f"{problem.batch} × {problem.max_kv}"
        rate = tflops(flops(problem), t["us"])
        lines.append([shape, code(t["impl"]), code(t["timer"]), us_text(t["us"]), f"{rate:.2f}"])
    return Table(["sequences × keys", "implementation", "protocol", "µs", "TFLOP/s"], "rllrr", lines)


def example_note(trials: Sequence[Record]) -> str:
    """What a time of each protocol is of its calls."""
    of_calls = {t.get("of_calls", "mean") for t in trials if t["timer"] == "events"}
    if not of_calls:
        return ""
    words = join([f"{word}s" for word in sorted(of_calls)])
    return f"`do_bench` gives the mean of its calls, `events` the mean of samples that are {words} of theirs."


def example_reasons(trials: Sequence[Record]) -> list[str]:
    """Why something is not in the table."""
    return [f"{code(t['case'])}, {code(t['impl'])}: {escape(_cut(t['reason']))}" for t in trials if t["us"] is None]


def duration(markers: Sequence[Record]) -> str | None:
    """How long the experiments took; None where the records do not say."""
    seconds: dict[str, float] = {}
    for marker in markers:
        if "seconds" in marker:
            seconds[marker["impl"]] = seconds.get(marker["impl"], 0.0) + marker["seconds"]
    if not seconds:
        return None
    told = join([f"{code(name)} {s:.0f} s" for name, s in seconds.items()])
    return f"The experiments took {sum(seconds.values()):.0f} s, without the start of their processes: {told}."


def paired(times: Sequence[float | None] | None, others: Sequence[float | None] | None) -> stats.Estimate | None:
    """``times`` over ``others``, paired by round; throttled rounds are left out; None where nothing is shared."""
    sides: list[Mapping[int, float]] = [
        {i: us for i, us in enumerate(side or ()) if us is not None} for side in (times, others)
    ]
    return stats.ratio_interval(*sides)


def median(times: Sequence[float | None] | None) -> float | None:
    """The median of those that are there."""
    there = [us for us in times or () if us is not None]
    return float(np.median(there)) if there else None


def us_text(us: float | None) -> str:
    """A time in µs, or a dash."""
    return "–" if us is None else f"{us:.2f}" if us < 100 else f"{us:.1f}"


def _ratio(times: Any, others: Any) -> str:
    ratio = paired(times, others)
    if ratio is None:
        return "–"
    return f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] {stats.verdict(ratio)}"


def _is_as_wanted(trial: Record) -> bool:
    return trial["status"] == "ok" if trial["control"] else trial["status"] in CAUGHT


def _cut(text: str) -> str:
    return text if len(text) <= REASON_CHARS else text[: REASON_CHARS - 1] + "…"
