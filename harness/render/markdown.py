"""The text of a report: sentences and tables from a comparison, put together by a template."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.record import STREAM_READ, flatten
from harness.render.figures import Drawn, bytes_text
from harness.render.findings import (
    against_peer,
    caption,
    code,
    escape,
    headline,
    join,
    mean_text,
    passed,
    reconciled,
)
from harness.render.frame import WORDS, Comparison, each, impl_of
from harness.stats import CONFIDENCE, FASTER, SLOWER, TIE
from impls.catalog import OURS

MAX_REASON = 300
"""Characters of a reason that a report prints; the record holds all of it."""

METHODS: Mapping[str, str] = {
    "graph": "Method `graph`: a CUDA graph holds one call for each of several input sets and is replayed as a"
    " whole; a sample is the replay's time by CUDA events, divided by the calls. Gaps between launches,"
    " compilation and planning are not in it. Before each timed replay comes an untimed one.",
    "graph-warm": "Method `graph-warm`: as `graph`, with a single input set.",
    "events": "Method `events`: one launch at a time between two CUDA events, after 256 MB were written outside of"
    " them; 25 ms of warm-up, 100 ms measured. Where the host cannot queue a launch in time, its delay counts.",
    "kernels": "Method `kernels`: the graph of `graph`, traced by CUPTI; a sample is the time in which at least one"
    " kernel of a call runs.",
    "wall": "Method `wall`: host time around a call, repeated. It shows that a kernel runs, not how fast it could.",
}
CACHES: Mapping[str, str] = {
    "cold": "Cache `cold`: input sets rotate, so that between two uses of one set at least three times the"
    " device's L2 cache of other data is read.",
    "warm": "Cache `warm`: what of the inputs fits the L2 cache is there.",
    "flushed": "Cache `flushed`: the L2 cache holds what was written just before.",
}


@dataclass(frozen=True)
class Table:
    """A Markdown table: header, alignment of each column (``l``, ``r`` or ``c``) and rows of cell texts."""

    header: Sequence[str]
    sides: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A figure as the report embeds it."""

    name: str
    alt: str
    caption: str


def write_report(
    comparison: Comparison, drawn: Mapping[str, Drawn], folder: Path, *, deep: Mapping[str, Any] | None = None
) -> Path:
    """Write the report's ``README.md`` into ``folder`` and return its path.

    ``deep`` is what :func:`harness.render.checks.deep_check` has to say, if anything.
    """
    return fill("report.md.j2", {**context(comparison, drawn), "deep": deep}, folder)


def fill(template: str, values: Mapping[str, Any], folder: Path) -> Path:
    """Write a ``README.md`` from a template into ``folder`` and return its path."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    text = environment.get_template(template).render(values)
    path = folder / "README.md"
    path.write_text(re.sub(r"\n{3,}", "\n\n", text).strip() + "\n", encoding="utf-8")
    return path


def context(comparison: Comparison, drawn: Mapping[str, Drawn]) -> dict[str, Any]:
    """What the template fills in."""
    notes, marks = _notes(comparison)
    pictures = {name: _picture(comparison, figure) for name, figure in drawn.items()}
    return {
        "title": f"{escape(comparison.name)}: split-KV decode attention compared",
        "headline": headline(comparison),
        "environment_line": _environment_line(comparison),
        "share": pictures.get("share"),
        "summary": _summary(comparison),
        "summary_note": _summary_note(comparison),
        "latency_note": _latency_note(comparison),
        "latency": _latency(comparison, marks),
        "notes": notes,
        "against": _against(comparison),
        "parts": pictures.get("parts"),
        "parts_table": _parts(comparison),
        "figures": [pictures[name] for name in ("slowdown", "latency", "error") if name in pictures],
        "support": pictures["support"],
        "support_counts": _support_counts(comparison),
        "support_table": _support(comparison),
        "reasons": _reasons(comparison),
        "cases": _cases(comparison),
        "method": _method(comparison),
        "command": _command(comparison),
        "variables": _variables(comparison),
        "confidence": round(100 * CONFIDENCE),
        "timings": _timings(comparison),
        "checks": _checks(comparison),
        "configs": _configs(comparison),
    }


def _picture(comparison: Comparison, drawn: Drawn) -> Picture:
    alt, text = caption(comparison, drawn.name)
    if drawn.left_out:
        text += f" {drawn.left_out} of {len(comparison.cases)} cases are not drawn; the tables have all."
    return Picture(drawn.name, alt, text)


def _environment_line(comparison: Comparison) -> str:
    lines = []
    for run in comparison.runs:
        env = run["env"]
        device = env.get("gpu") or env.get("cpu") or env.get("device") or "unknown device"
        parts = [str(device)]
        if env.get("sm_count"):
            parts.append(f"{env['sm_count']} SMs")
        parts += [f"{key} {env[key]}" for key in ("driver", "torch", "triton", "tilelang") if env.get(key)]
        if env.get("git"):
            parts.append(f"commit {str(env['git'])[:12]}{' with local changes' if env.get('dirty') else ''}")
        lines.append(escape(", ".join(parts)) + f" (run `{run['run_id']}`).")
    return "<br>\n".join(lines)


def _summary(comparison: Comparison) -> Table:
    rows, m = comparison.impls, len(comparison.cases)
    header, sides = ["implementation", "ok"], "lr"
    speed = not comparison.functional
    if speed:
        header += [
            "fastest on",
            "tied with the fastest on",
            "× the fastest, geo. mean",
            "× ahead of the best peer, geo. mean",
            "% of bound, geo. mean",
            "lowest % of bound",
        ]
        sides += "rrrrrr"
    header += ["worst row ÷ budget", "compile ms, median", "plan µs, median"]
    sides += "rrr"
    lines = []
    for label in comparison.series:
        mine = rows[rows["label"] == label]
        line = [code(label), f"{passed(rows, label)} of {m}"]
        if speed:
            line += [
                f"{int((mine['slowdown'] == 1.0).sum())} of {m}",
                f"{int((mine['tied'].eq(True) & (mine['slowdown'] != 1.0)).sum())} of {m}",
                mean_text(mine["slowdown_rounds"], m, "×"),
                mean_text(mine["ahead_rounds"], m, "×") if impl_of(label) in OURS else "",
                mean_text(mine["share_rounds"], m, " %"),
                _lowest(mine),
            ]
        checked = mine.loc[mine["status"] == "ok", "worst_row"]
        line += [
            _number(checked.max(), 2),
            _number(mine["compile_ms"].dropna().median(), 3),
            _number(mine["plan_us"].dropna().median(), 3),
        ]
        lines.append(line)
    return Table(header, sides, lines)


def _summary_note(comparison: Comparison) -> str:
    if comparison.functional:
        return ""
    return (
        "Means are over the cases in which the row and what it is divided by are both `ok`, n of m as stated, with"
        f" {round(100 * CONFIDENCE)} % intervals. Below 1 × ahead means that the peer is faster. Ratios are formed"
        " inside one run and case only, and paired by round."
    )


def _against(comparison: Comparison) -> dict[str, Any] | None:
    """The kernels of this project, each beside the fastest other implementation of the case, in words."""
    ours = [label for label in comparison.series if impl_of(label) in OURS]
    rows = comparison.impls
    if comparison.functional or rows["verdict"].isna().all():
        return None
    told = {(row.case, row.label): against_peer(row) for row in each(rows[rows["verdict"].notna()])}
    lines = [[code(case), *(told.get((case, label), "–") for label in ours)] for case in comparison.cases]
    counts = rows["verdict"].value_counts()
    words = join([f"{counts.get(word, 0)} {word}" for word in (FASTER, TIE, SLOWER)])
    return {
        "table": Table(["case", *(code(label) for label in ours)], "l" * (1 + len(ours)), lines),
        "note": f"Verdicts: {words}. A tie is a difference whose {round(100 * CONFIDENCE)} % interval holds 0, or"
        f" one under {100 * comparison.smallest_effect:g} %. A percentage is what the slower of the two takes"
        " longer, paired by round, with its interval.",
    }


def _parts(comparison: Comparison) -> Table | None:
    """Where the time goes: on the host before a call, and on the device in it."""
    rows = comparison.impls[comparison.impls["host_total_us"].notna() | comparison.impls["traced_us"].notna()]
    if rows.empty:
        return None
    header = ["case", "implementation", "compile ms", "plan µs", "host launch", "host, end to end", "device"]
    profiled = bool(rows["traced_us"].notna().any())
    if profiled:
        header += [
            "kernels",
            "longest kernel",
            "other kernels",
            "gaps",
            "to the next call",
            "sum",
            "untraced",
            "adds up",
        ]
    lines = []
    for row in each(rows):
        line = [code(row.case), code(row.label), _number(row.compile_ms, 3), _number(row.plan_us, 3)]
        line += [_us(row.host_launch_us), _us(row.host_total_us), _us(row.us)]
        if profiled and math.isnan(row.traced_us):
            line += ["–"] * 8
        elif profiled:
            line += [str(len(row.kernel_names)), _us(row.main_us), _us(row.others_us), f"{row.gap_us:.2f}"]
            line += [f"{row.between_us:.2f}", _us(row.traced_us), _us(row.profiled_us)]
            line += ["yes" if reconciled(row) else "**no**"]
        lines.append(line)
    return Table(header, "ll" + "r" * (len(header) - 2), lines)


def _lowest(mine: pd.DataFrame) -> str:
    known = mine[mine["share"].notna()]
    if known.empty:
        return "–"
    low = known.nsmallest(1, "share").iloc[0]
    return f"{low['share']:.1f} % ({code(low['case'])})"


def _notes(comparison: Comparison) -> tuple[list[str], dict[str, str]]:
    """Notes on splits, printed under the table of latencies, and the mark of each."""
    texts = comparison.impls["splits_note"].dropna().unique()
    marks = {text: f"<sup>{i}</sup>" for i, text in enumerate(texts, start=1)}
    return [f"{mark} {escape(text)}" for text, mark in marks.items()], marks


def _latency_note(comparison: Comparison) -> str:
    keys = sorted({(m, c) for m, c in zip(comparison.impls["method"], comparison.impls["cache"], strict=True) if m})
    how = join([f"method `{method}`, cache `{cache}`" for method, cache in keys])
    best = "" if comparison.functional else " The fastest of a case is bold, and so is what ties with it."
    return f"Median µs by case and implementation ({how}).{best}" if keys else "Nothing was timed."


def _latency(comparison: Comparison, marks: Mapping[str, str]) -> Table:
    header = ["case", "KV"]
    bounds = comparison.bounds.set_index("case")["us"] if len(comparison.bounds) else None
    if bounds is not None:
        header.append("`stream-read` (the bound)")
    lines: dict[str, list[str]] = {}
    for row in each(comparison.impls):
        if row.case not in lines:
            lines[row.case] = [code(row.case), bytes_text(row.kv_bytes)]
            if bounds is not None:
                lines[row.case].append(_us(bounds.get(row.case)))
        text = _us(row.us) + marks.get(row.splits_note, "") if row.status == "ok" else f"*{row.status}*"
        lines[row.case].append(f"**{text}**" if row.tied is True and not comparison.functional else text)
    sides = "l" + "r" * (len(header) - 1 + len(comparison.series))
    return Table([*header, *(code(s) for s in comparison.series)], sides, list(lines.values()))


def _support(comparison: Comparison) -> Table:
    table = comparison.table("status")
    lines = [
        [code(str(case)), *(word if word == "ok" else f"**{word}**" for word in row)]
        for case, row in zip(table.index, table.to_numpy(), strict=True)
    ]
    return Table(["case", *(code(s) for s in comparison.series)], "l" + "c" * len(comparison.series), lines)


def _support_counts(comparison: Comparison) -> str:
    counts = comparison.impls["status"].value_counts()
    return ", ".join(f"{counts[word]} {word}" for word in WORDS if word in counts)


def _reasons(comparison: Comparison) -> list[str]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in each(comparison.rows[comparison.rows["status"] != "ok"]):
        groups.setdefault((row.label, row.status, row.reason), []).append(code(row.case))
    lines = []
    order = (*comparison.series, STREAM_READ)
    for (label, status, reason), cases in sorted(groups.items(), key=lambda group: order.index(group[0][0])):
        short = reason if len(reason) <= MAX_REASON else reason[:MAX_REASON] + " …"
        lines.append(f"{code(label)} {status} ({_where(comparison, cases)}): {escape(short)}")
    return lines


def _where(comparison: Comparison, cases: Sequence[str]) -> str:
    return "all cases" if len(cases) == len(comparison.cases) else ", ".join(cases)


def _cases(comparison: Comparison) -> Table:
    first = comparison.impls.drop_duplicates("case")
    lines = [
        [
            code(row.case),
            str(row.batch),
            f"{row.total_kv:,}",
            f"{row.max_kv:,}",
            f"{row.heads_q} / {row.heads_kv}",
            str(row.head_dim),
            row.dtype,
            bytes_text(row.kv_bytes),
        ]
        for row in each(first)
    ]
    return Table(
        ["case", "sequences", "keys", "longest", "heads q / kv", "head dim", "dtype", "KV"], "lrrrrrlr", lines
    )


def _method(comparison: Comparison) -> list[str]:
    rows = comparison.impls
    paragraphs = [
        "Every output is checked against a float64 reference of the same rounded inputs before it is timed; only"
        " a result within its budget has a time."
    ]
    paragraphs += [METHODS[method] for method in sorted(set(rows["method"].dropna())) if method in METHODS]
    paragraphs += [CACHES[state] for state in sorted(set(rows["cache"].dropna())) if state in CACHES]
    sizes = sorted(set(rows["working_set_bytes"].dropna()))
    if sizes:
        ends = dict.fromkeys(map(bytes_text, (sizes[0], sizes[-1])))
        paragraphs.append(f"Working sets: {' to '.join(ends)}.")
    if len(comparison.bounds):
        ceilings = [f"{gbps:,.0f} GB/s (run `{run_id}`)" for run_id, gbps in comparison.ceilings.items()]
        paragraphs.append(
            f"The bound of a case, `{STREAM_READ}`, is a kernel that reads the case's K and V bytes and does"
            " nothing else, timed in the same rounds."
            + (f" The device's read ceiling, over a larger buffer: {join(ceilings)}." if ceilings else "")
        )
    if throttled := int(rows["n_throttled"].sum()):
        paragraphs.append(
            f"{throttled} samples were throttled. They are counted beside n, and left out of a median unless all"
            " of its samples were."
        )
    units = "Units: µs per call"
    if not comparison.functional:
        units += "; GB/s with 1e9 bytes, of K, V, q and output (of K and V alone for the bound)"
        units += "; TFLOP/s of 4 · heads\\_q · keys · head\\_dim operations"
    paragraphs.append(f"{units}.")
    return paragraphs


def _command(comparison: Comparison) -> str:
    studies = comparison.rows["study"].unique()
    lines = [f"splitkv run reports/{study}" for study in studies]
    return "\n".join([*lines, "splitkv render " + " ".join(f"reports/{study}" for study in studies)])


def _variables(comparison: Comparison) -> Table:
    columns = [dict(flatten(run["env"])) for run in comparison.runs]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    cases = comparison.rows.groupby("run_id")["case"].nunique()
    lines = [["cases", *(str(cases[run["run_id"]]) for run in comparison.runs)]]
    lines += [[escape(key), *(escape(column.get(key, "–")) for column in columns)] for key in keys]
    return Table(["variable", *(f"`{run['run_id']}`" for run in comparison.runs)], "l" + "l" * len(columns), lines)


def _timings(comparison: Comparison) -> Table:
    header = ["case", "implementation", "status", "µs", "interval", "GB/s", "TFLOP/s", "% of bound", "× fastest"]
    header += ["n", "method", "cache", "kernels"]
    if comparison.functional:
        # A CPU's rates and ratios would be claims about speed.
        header = [h for h in header if h not in ("GB/s", "TFLOP/s", "% of bound", "× fastest")]
    lines = []
    for row in each(comparison.rows):
        timed = not math.isnan(row.us)
        cells = {
            "case": code(row.case),
            "implementation": code(row.label),
            "status": row.status,
            "µs": _us(row.us),
            "interval": f"{_us(row.us_low)} … {_us(row.us_high)}" if timed else "–",
            "GB/s": _number(row.gbps, 4),
            "TFLOP/s": _number(row.tflops, 3),
            "% of bound": _with_interval(row.share, row.share_low, row.share_high, places=1),
            "× fastest": _with_interval(row.slowdown, row.slowdown_low, row.slowdown_high),
            "n": _samples(row.n, row.n_throttled),
            "method": row.method or "–",
            "cache": row.cache or "–",
            "kernels": _number(row.kernels, 3),
        }
        lines.append([cells[h] for h in header])
    return Table(
        header,
        "".join("l" if h in ("case", "implementation", "status", "method", "cache") else "r" for h in header),
        lines,
    )


def _checks(comparison: Comparison) -> Table:
    header = ["case", "implementation", "splits asked", "splits", "work items", "compile ms", "plan µs"]
    header += ["rel. L2", "worst row ÷ budget", "LSE error", "note"]
    lines = [
        [
            code(row.case),
            code(row.label),
            "–" if row.num_splits is None else str(row.num_splits),
            _number(row.splits_max, 4),
            _number(row.work_items, 6),
            _number(row.compile_ms, 3),
            _number(row.plan_us, 3),
            _small(row.rel_l2),
            _number(row.worst_row, 2),
            _small(row.lse_err),
            escape(row.splits_note or ""),
        ]
        for row in each(comparison.impls)
    ]
    return Table(header, "llrrrrrrrrl", lines)


def _configs(comparison: Comparison) -> Table:
    groups: dict[tuple[str, str], list[str]] = {}
    for row in each(comparison.impls[comparison.impls["config"].notna()]):
        groups.setdefault((row.label, row.config), []).append(code(row.case))
    order = comparison.series
    lines = [
        [code(label), escape(config), _where(comparison, cases)]
        for (label, config), cases in sorted(groups.items(), key=lambda group: order.index(group[0][0]))
    ]
    return Table(["implementation", "configuration", "cases"], "lll", lines)


def _with_interval(value: float, low: float, high: float, places: int = 3) -> str:
    return "–" if math.isnan(value) else f"{value:.{places}f} [{low:.{places}f}, {high:.{places}f}]"


def _samples(n: float, throttled: float) -> str:
    if math.isnan(n):
        return "–"
    return f"{n:.0f}" + (f" ({throttled:.0f} throttled)" if throttled else "")


def _us(us: float | None) -> str:
    if us is None or math.isnan(us):
        return "–"
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:,.0f}"


def _number(value: float | None, digits: int) -> str:
    """``value`` to that many significant digits, in full rather than with an exponent."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}" if value != int(value) or places == 0 else f"{value:,.0f}"


def _small(value: float) -> str:
    return "–" if math.isnan(value) else "0" if value == 0 else f"{value:.1e}"
