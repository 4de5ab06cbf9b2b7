"""What a report says of a study's tuning: for each case and kernel, what its own choice loses to the best found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import stats
from harness.record import TUNING_FILE, Record, read
from harness.render.rows import device_of, smallest_effect
from harness.render.template import Table
from harness.render.text import (
    ABSENT,
    bytes_text,
    cases_text,
    code,
    escape,
    interval_text,
    join,
    lengths_text,
    us_text,
)
from harness.study import STUDY_FILE, Study, load_study
from harness.tuning import Total, Tuned, totals, tuned, tuning_text
from impls.problem import DecodeProblem

DRAWN = "drawn: "
"""How the source of a case begins whose problem was drawn; the kind that was drawn follows."""


@dataclass(frozen=True)
class Tuning:
    """What a folder's tunings on a GPU came to.

    Args:
        found: each implementation on each case, by KV bytes; at least one.
        runs: the ``run`` records behind them, by run id, in the order of ``found``.
        study: what they are a tuning of; None where the folder holds no ``study.toml``.
    """

    found: Sequence[Tuned]
    runs: Mapping[str, Record]
    study: Study | None

    @property
    def smallest(self) -> float:
        """The smallest difference that counts, as a share."""
        return max(map(smallest_effect, self.runs.values()))

    @property
    def overall(self) -> list[Total]:
        """Of each implementation with a regret, by name."""
        return sorted(totals(self.found, self.smallest), key=lambda total: total.impl)

    def kinds(self) -> dict[str, str]:
        """Case -> the kind of problem that was drawn for it, in the order of the study; none where none was."""
        sources = {} if self.study is None else {case.name: case.source or "" for case in self.study.cases}
        return {name: text.removeprefix(DRAWN) for name, text in sources.items() if text.startswith(DRAWN)}

    def left(self) -> dict[str, list[str]]:
        """Implementation -> the cases of the study, as it stands, on which it was not tuned."""
        cases = () if self.study is None else self.study.cases
        done = {(row.impl, row.case, problem_of(row)) for row in self.found}
        return {
            impl: [case.name for case in cases if (impl, case.name, case.problem) not in done]
            for impl in sorted({row.impl for row in self.found})
        }


def problem_of(row: Tuned) -> DecodeProblem:
    """The problem of a row's case."""
    return DecodeProblem.from_dict(row.problem)


def read_tuning(folder: Path) -> Tuning | None:
    """The tuning of a study's folder; None without one on a GPU: one on a CPU makes no claim about speed.

    Raises:
        harness.record.RecordError: for a line that is no record.
        harness.study.StudyError: for a ``study.toml`` that cannot be read.
    """
    path = folder / TUNING_FILE
    if not path.is_file():
        return None
    records = read(path)
    runs = {r["run_id"]: r for r in records if r["kind"] == "run"}
    found = [row for row in tuned(records) if runs[row.run_id]["env"].get("device") == "cuda"]
    if not found:
        return None
    found.sort(key=lambda row: (problem_of(row).kv_bytes, row.case, row.impl))
    study = load_study(folder / STUDY_FILE) if (folder / STUDY_FILE).is_file() else None
    return Tuning(found, {row.run_id: runs[row.run_id] for row in found}, study)


def tuning_section(folder: Path, ran: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the template fills in; None where :func:`read_tuning` has nothing.

    Args:
        folder: of the study.
        ran: (case, implementation) -> what the own choice was in the records of the same report, of :data:`CHOSEN`.
    """
    tuning = read_tuning(folder)
    return None if tuning is None else section_of(tuning) | {"changed": _changed(tuning.found, ran)}


def _changed(found: Sequence[Tuned], ran: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    """Where the own choice that was tuned is not the one that the records ran; empty where it is everywhere."""
    told = []
    for row in found:
        was, now = row.default_config or {}, ran.get((row.case, row.impl), {})
        keys = [key for key in now if key in was and was[key] != now[key]]
        if keys:
            how = join([f"{escape(key)} {now[key]}, here {was[key]}" for key in keys])
            told.append(f"{code(row.impl)} on {code(row.case)} ({how})")
    return f"The measurements above ran another own choice than was tuned here: {join(told)}." if told else ""


def section_of(tuning: Tuning, anchors: Mapping[tuple[str, str], str] | None = None) -> dict[str, Any]:
    """What a template says of a tuning.

    Args:
        tuning: of a study.
        anchors: (case, implementation) -> what the line is called that others link to. With them each line says
            what its case is, for a report that has no other table of the cases.
    """
    found, smallest, overall = tuning.found, tuning.smallest, tuning.overall
    return {
        "headline": [_sentence(total) for total in overall],
        "totals": _totals(overall, found),
        "kinds": _by_kind(tuning),
        "cases": _cases(found, smallest, anchors),
        "reasons": [f"{code(row.impl)} on {code(row.case)}: {escape(row.reason)}" for row in found if row.reason],
        "runs": join([_run(run) for run in tuning.runs.values()]),
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


def _by_kind(tuning: Tuning) -> Table | None:
    """Geometric means by what was drawn: the kind, and the head dim; None where nothing was."""
    kinds = tuning.kinds()
    drawn = [row for row in tuning.found if row.case in kinds]
    if not drawn:
        return None
    groups = {kind: [row for row in drawn if kinds[row.case] == kind] for kind in dict.fromkeys(kinds.values())}
    for dim in sorted({problem_of(row).head_dim for row in drawn}):
        groups[f"head dim {dim}"] = [row for row in drawn if problem_of(row).head_dim == dim]
    impls = sorted({row.impl for row in drawn})
    lines = []
    for name, rows in groups.items():
        means = {total.impl: f"{_ratio(total.mean)} over {total.cases}" for total in totals(rows, tuning.smallest)}
        lines.append([escape(name), *(means.get(impl, ABSENT) for impl in impls)])
    return Table(["problems", *map(code, impls)], "l" + "r" * len(impls), lines)


def _cases(found: Sequence[Tuned], smallest: float, anchors: Mapping[tuple[str, str], str] | None) -> Table:
    what = [] if anchors is None else ["sequences × keys", "heads q / kv", "head dim", "dtype", "KV"]
    times = ("own choice, µs", "best found, µs", "regret")
    header = ["case", *what, "implementation", *times, "own choice is", "own choice was", "best found", "tried"]
    rows = []
    for row in found:
        name, *measured = _case(row, smallest)
        if anchors is None:
            rows.append([name, *measured])
        else:
            rows.append([f'<a id="{anchors[row.case, row.impl]}"></a>{name}', *_what(problem_of(row)), *measured])
    return Table(header, "l" + "lrrlr"[: len(what)] + "lrrrllll", rows)


def _what(problem: DecodeProblem) -> list[str]:
    """What a case computes, in the columns of :func:`_cases`."""
    return [
        lengths_text(problem.batch, problem.total_kv, max(problem.kv_lens)),
        f"{problem.heads_q} / {problem.heads_kv}",
        str(problem.head_dim),
        problem.dtype,
        bytes_text(problem.kv_bytes),
    ]


def _case(row: Tuned, smallest: float) -> list[str]:
    regret, verdict = row.regret, row.verdict(smallest)
    return [
        code(row.case),
        code(row.impl),
        us_text(row.default_us),
        us_text(row.best_us),
        ABSENT if regret is None else _ratio(regret),
        ABSENT if verdict is None else _words(row, verdict),
        _plan_text(row.default_config or {}),
        ABSENT if row.best is None else escape(tuning_text(row.best)),
        _tried(row.tried, row.distinct),
    ]


def _plan_text(config: Mapping[str, Any]) -> str:
    """What an own choice came to, as far as its plan says: tile and CTAs."""
    told = [f"{key}={config[key]}" for key in ("block_n", "num_stages", "eager") if config.get(key) is not None]
    ctas = config.get("work_items")
    text = ", ".join(filter(None, [" ".join(told), "" if ctas is None else f"{ctas:,} CTAs"]))
    return escape(text) or ABSENT


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
    git = env.get("git")
    commit = code(str(git)[:12]) if git else "unknown"
    how = f"commit {commit}, method `{env.get('method')}`, cache `{env.get('cache')}`"
    return escape(f"{device_of(run)}, {', '.join(versions)}") + f", {how} (run `{run['run_id']}`)"
