"""What a report says of a study's tuning: for each case and kernel, what its own choice loses to the best found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import stats
from harness.record import TUNING_FILE, Record, read
from harness.render.rows import device_of, smallest_effect
from harness.render.template import Table
from harness.render.text import ABSENT, cases_text, code, escape, interval_text, join, us_text
from harness.tuning import Total, Tuned, totals, tuned, tuning_text
from impls.problem import DecodeProblem


def tuning_section(folder: Path) -> dict[str, Any] | None:
    """What the template fills in; None without a tuning on a GPU: one on a CPU makes no claim about speed."""
    path = folder / TUNING_FILE
    if not path.is_file():
        return None
    records = read(path)
    runs = {r["run_id"]: r for r in records if r["kind"] == "run"}
    found = [row for row in tuned(records) if runs[row.run_id]["env"].get("device") == "cuda"]
    if not found:
        return None
    found.sort(key=lambda row: (DecodeProblem.from_dict(row.problem).kv_bytes, row.case, row.impl))
    smallest = max(smallest_effect(runs[row.run_id]) for row in found)
    overall = sorted(totals(found, smallest), key=lambda total: total.impl)
    return {
        "headline": [_sentence(total) for total in overall],
        "totals": _totals(overall, found),
        "cases": _cases(found, smallest),
        "reasons": [f"{code(row.impl)} on {code(row.case)}: {escape(row.reason)}" for row in found if row.reason],
        "runs": join([_run(runs[run_id]) for run_id in dict.fromkeys(row.run_id for row in found)]),
        "smallest": f"{100 * smallest:g}",
        "confidence": round(100 * stats.CONFIDENCE),
    }


def _sentence(total: Total) -> str:
    worst = total.worst
    assert worst.regret is not None
    text = (
        f"The own choice of {code(total.impl)} takes {_ratio(total.mean)} times as long as the best configuration"
        f" found, in the geometric mean over {cases_text(total.cases)}"
    )
    if worst.regret.median > 1:
        text += f"; at worst {_ratio(worst.regret)} times, on {code(worst.case)}"
    return text + f". It ties with the best on {total.ties}."


def _ratio(estimate: stats.Estimate) -> str:
    return interval_text(estimate.median, estimate.low, estimate.high)


def _totals(overall: Sequence[Total], found: Sequence[Tuned]) -> Table:
    rows = []
    for total in overall:
        worst = total.worst
        assert worst.regret is not None
        asked = len({row.case for row in found if row.impl == total.impl})
        rows.append(
            [
                code(total.impl),
                f"{_ratio(total.mean)} over {total.cases} of {asked}",
                f"{_ratio(worst.regret)} ({code(worst.case)})",
                f"{total.ties}",
            ]
        )
    return Table(["implementation", "regret, geometric mean", "worst regret", "ties with the best"], "lrrr", rows)


def _cases(found: Sequence[Tuned], smallest: float) -> Table:
    times = ("own choice, µs", "best found, µs", "regret")
    header = ["case", "implementation", *times, "own choice is", "best found", "tried"]
    return Table(header, "llrrrlll", [_case(row, smallest) for row in found])


def _case(row: Tuned, smallest: float) -> list[str]:
    regret, verdict = row.regret, row.verdict(smallest)
    return [
        code(row.case),
        code(row.impl),
        us_text(row.default_us),
        us_text(row.best_us),
        ABSENT if regret is None else _ratio(regret),
        ABSENT if verdict is None else _words(row, verdict),
        ABSENT if row.best is None else escape(tuning_text(row.best)),
        _tried(row.tried, row.distinct),
    ]


def _words(row: Tuned, verdict: str) -> str:
    if not row.best:
        return "the best"
    return "as good" if verdict == stats.TIE else f"**{verdict}**"


def _tried(counts: Mapping[str, int], distinct: int) -> str:
    """How many configurations there were, and what became of those that were not timed."""
    others = [f"{n} {status}" for status, n in counts.items() if status != "ok"]
    return f"{sum(counts.values())}: {', '.join([f'{distinct} timed', *others])}"


def _run(run: Record) -> str:
    env = run["env"]
    versions = [f"{key} {env[key]}" for key in ("torch", "triton", "tilelang") if env.get(key)]
    how = f"method `{env.get('method')}`, cache `{env.get('cache')}`"
    return escape(f"{device_of(run)}, {', '.join(versions)}") + f", {how} (run `{run['run_id']}`)"
