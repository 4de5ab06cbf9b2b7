"""A comparison of two record files as Markdown, for ``splitkv compare``; see :mod:`harness.render.changes`."""

from __future__ import annotations

from collections.abc import Sequence

from harness import stats
from harness.render.changes import ALLOWED_SLOWDOWN, GONE, Change, CompareError, Result, compare_files

__all__ = ["ALLOWED_SLOWDOWN", "GONE", "Change", "CompareError", "Result", "compare_files", "markdown"]


def markdown(result: Result) -> str:
    """The comparison as a Markdown text."""
    lines = [_headline(result), "", "### Environment", ""]
    if result.environment:
        lines += _table(["", "old", "new"], [[k, *pair] for k, pair in result.environment.items()])
    else:
        lines.append("No difference.")
    lines += ["", "### Changes", "", _explanation(result), ""]
    rows = [
        [
            f"`{c.case}`",
            f"`{c.label}`",
            _status(c),
            _ratio(c),
            f"**{c.verdict}**" if c.failed else c.verdict or "",
        ]
        for c in result.changes
    ]
    lines += _table(["case", "implementation", "status", "new / old", "verdict"], rows)
    return "\n".join(lines) + "\n"


def _headline(result: Result) -> str:
    told = [change.verdict for change in result.changes]
    counts = ", ".join(f"{told.count(word)} {word}" for word in (stats.FASTER, stats.TIE, stats.SLOWER))
    lost = sum(change.old == "ok" and change.new != "ok" for change in result.changes)
    slowed = sum(change.failed for change in result.changes) - lost
    return (
        f"Of {len(told)} rows: {counts}; {slowed} slower by more than {100 * result.allow:g} %,"
        f" {lost} no longer ok."
    )


def _explanation(result: Result) -> str:
    how = f"Method {result.method}. " if result.method else "Nothing was timed on both sides. "
    return (
        how + "new / old: the time over that of the bound of the same run, after over before; above 1 is slower."
        " Where a side has no bound, times are compared as they are: *unbounded*."
    )


def _status(change: Change) -> str:
    return change.new if change.old == change.new else f"{change.old} → {change.new}"


def _ratio(change: Change) -> str:
    if change.ratio is None:
        return "–"
    text = f"{change.ratio.median:.3f} [{change.ratio.low:.3f}, {change.ratio.high:.3f}]"
    return text if change.bounded else f"{text} *unbounded*"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, [":---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
