"""What a tuning tells: for each case and kernel, how much the kernel's own choice loses to the best one found.

Computed from the trials of a ``tuning.jsonl`` alone. The *regret* of a case is the time of the own choice over that
of the fastest configuration, paired by round: both were timed in the same rounds. It is at least 1. Choosing the
fastest of a few by the same samples flatters it a little, so a regret is rather stated too large than too small.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import stats
from harness.record import Record

DEFAULT: Mapping[str, Any] = {}
"""The tuning that leaves an implementation its own choice."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What is known of one implementation on one case.

    Args:
        case: the case's name.
        impl: implementation id.
        run_id: the run whose rounds these are.
        problem: of the case, as in a record.
        tried: configurations of the space, by status; those refused up front are ``unsupported``.
        distinct: configurations that came to a plan of their own and were timed.
        best: the fastest configuration; empty where that is the own choice. None where nothing was compared.
        best_config: what its plan came to.
        best_us: its median time.
        default_us: of the own choice; None where that has no time.
        default_config: what its plan came to.
        regret: the own choice's time over that of the best; None where either is missing.
        rounds: the same, round by round.
        reason: why there is no regret.
    """

    case: str
    impl: str
    run_id: str
    problem: Mapping[str, Any]
    tried: Mapping[str, int]
    distinct: int
    best: Mapping[str, Any] | None = None
    best_config: Mapping[str, Any] | None = None
    best_us: float | None = None
    default_us: float | None = None
    default_config: Mapping[str, Any] | None = None
    regret: stats.Estimate | None = None
    rounds: Sequence[float] = ()
    reason: str | None = None

    def verdict(self, smallest_effect: float = stats.SMALLEST_EFFECT) -> str | None:
        """:func:`harness.stats.verdict` on the own choice against the best."""
        return None if self.regret is None else stats.verdict(self.regret, smallest_effect)


def tuned(records: Iterable[Record]) -> list[Tuned]:
    """The newest tuning of each case and implementation that came to a comparison, in the order of the file."""
    trials = [r for r in records if r["kind"] == "trial" and "stage" in r]
    newest = {(r["case"], r["impl"]): r["run_id"] for r in trials if r["stage"] == "final"}
    found = []
    for (case, impl), run_id in newest.items():
        mine = [r for r in trials if (r["case"], r["impl"], r["run_id"]) == (case, impl, run_id)]
        found.append(_tuned(mine))
    return found


def _tuned(trials: Sequence[Record]) -> Tuned:
    screened = [r for r in trials if r["stage"] == "screen"]
    finals = [r for r in trials if r["stage"] == "final"]
    known = Tuned(
        case=finals[0]["case"],
        impl=finals[0]["impl"],
        run_id=finals[0]["run_id"],
        problem=finals[0]["problem"],
        tried=dict(Counter(r["status"] for r in screened)),
        distinct=sum(r["status"] == "ok" and r["same_as"] is None for r in screened),
    )
    ok = [r for r in finals if r["status"] == "ok"]
    own = next((r for r in finals if r["tuning"] == DEFAULT), None)
    if own is None or own["status"] != "ok":
        why = "not timed" if own is None else f"{own['status']}: {own['reason']}"
        return _with(known, reason=f"own choice: {why}")
    best = min(ok, key=lambda r: statistics.median(times_of(r).values()))
    mine, other = times_of(own), times_of(best)
    regret = stats.ratio_interval(mine, other)
    return _with(
        known,
        best=best["tuning"],
        best_config=best["config"],
        best_us=statistics.median(other.values()),
        default_us=statistics.median(mine.values()),
        default_config=own["config"],
        regret=regret,
        rounds=[mine[i] / other[i] for i in sorted(mine.keys() & other.keys())],
        reason=None if regret is not None else "own choice and best share no round",
    )


def _with(known: Tuned, **more: Any) -> Tuned:
    return Tuned(**{**vars(known), **more})


def times_of(record: Record) -> dict[int, float]:
    """Round -> µs of a record that is ``ok``; throttled rounds are left out unless all are."""
    samples = record["timing"]["samples"]
    kept = [s for s in samples if not s["throttled"]] or samples
    return {s["round"]: s["us"] for s in kept}


def finalists(screened: Iterable[Record], count: int) -> list[Mapping[str, Any]]:
    """The tunings to compare: the own choice, and the ``count`` fastest others that are right and no other's twin.

    Args:
        screened: the trials of one case and implementation, of stage ``screen``.
        count: the most to take beside the own choice.
    """
    timed = [r for r in screened if r["status"] == "ok" and r["same_as"] is None and r["tuning"] != DEFAULT]
    timed.sort(key=lambda r: statistics.median(times_of(r).values()))
    return [DEFAULT, *(r["tuning"] for r in timed[:count])]


@dataclass(frozen=True, kw_only=True)
class Total:
    """Regret of one implementation over all its cases.

    Args:
        impl: implementation id.
        cases: with a regret.
        mean: their geometric mean.
        worst: the case with the largest.
        ties: cases on which the own choice cannot be told from the best found.
    """

    impl: str
    cases: int
    mean: stats.Estimate
    worst: Tuned
    ties: int


def totals(found: Sequence[Tuned], smallest_effect: float = stats.SMALLEST_EFFECT) -> list[Total]:
    """One total an implementation, in the order in which they occur; none for one without a regret."""
    made = []
    for impl in dict.fromkeys(row.impl for row in found):
        mine = [row for row in found if row.impl == impl and row.regret is not None]
        if mine:
            made.append(
                Total(
                    impl=impl,
                    cases=len(mine),
                    mean=stats.geometric_mean_interval([row.rounds for row in mine]),
                    worst=max(mine, key=lambda row: row.regret.median if row.regret else 0.0),
                    ties=sum(row.verdict(smallest_effect) == stats.TIE for row in mine),
                )
            )
    return made


def tuning_text(tuning: Mapping[str, Any]) -> str:
    """A configuration in words, e.g. ``block_n=64 num_stages=3 num_splits=8``; what is None is left out."""
    return " ".join(f"{key}={value}" for key, value in tuning.items() if value is not None) or "own choice"
