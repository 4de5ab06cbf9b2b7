"""The arithmetic of regret, on trials whose truth is known."""

from __future__ import annotations

from typing import Any

import pytest

from harness import record, stats
from harness.record import RecordError
from harness.tuning import finalists, totals, tuned, tuning_text
from tests.harness.fake_trials import FAST, drifting, trial


def test_regret_is_the_own_choice_over_the_best_round_by_round() -> None:
    trials = [
        trial("screen", {}, [11.0]),
        trial("screen", FAST, [10.0]),
        trial("screen", {"block_n": 32}, None, status="wrong"),
        trial("screen", {"block_n": 16}, None, same_as=FAST),
        trial("final", {}, drifting(1.2)),
        trial("final", FAST, drifting(1.0)),
        trial("final", {"block_n": 256}, drifting(1.1)),
    ]
    (row,) = tuned(trials)
    assert row.regret is not None
    assert (row.regret.median, row.regret.low, row.regret.high, row.regret.n) == (
        *[pytest.approx(1.2)] * 3,
        20,
    )
    assert (row.best, row.best_config, row.verdict()) == (FAST, {"block_n": 64, "splits_max": 16}, stats.SLOWER)
    assert (row.default_us, row.best_us) == (pytest.approx(1.2 * 14.75), pytest.approx(14.75))
    assert (row.tried, row.distinct) == ({"ok": 3, "wrong": 1}, 2)


def test_what_is_wrong_or_impossible_is_not_the_best_however_fast() -> None:
    trials = [
        trial("final", {}, drifting(1.2)),
        trial("final", FAST, drifting(1.0)),
        trial("final", {"block_n": 32}, drifting(0.001), status="invalid"),
        trial("final", {"block_n": 16}, None, status="wrong"),
    ]
    assert tuned(trials)[0].best == FAST


def test_throttled_rounds_do_not_count() -> None:
    spoilt = drifting(1.0)
    spoilt[3] *= 50
    trials = [trial("final", {}, drifting(1.2)), trial("final", FAST, spoilt, throttled=[3])]
    (row,) = tuned(trials)
    assert row.regret is not None
    assert (row.regret.n, row.regret.high) == (19, pytest.approx(1.2))


def test_the_newest_tuning_of_a_case_counts() -> None:
    old = [trial("final", {}, drifting(1.5)), trial("final", FAST, drifting(1.0))]
    begun = [trial("screen", {}, [1.0], run_id="r3")]
    new = [trial("final", {}, drifting(1.1), run_id="r2"), trial("final", FAST, drifting(1.0), run_id="r2")]
    (row,) = tuned([*old, *new, *begun])
    assert row.run_id == "r2"
    assert row.regret is not None
    assert row.regret.median == pytest.approx(1.1)


def test_no_own_choice_no_regret() -> None:
    (row,) = tuned([trial("final", {}, None, status="failed"), trial("final", FAST, drifting(1.0))])
    assert (row.regret, row.reason, row.verdict()) == (None, "own choice: failed: because", None)
    assert totals([row]) == []


def test_totals_are_geometric_means_with_the_worst_case_and_the_ties() -> None:
    trials = []
    for case, factor in (("a", 2.0), ("b", 1.0), ("c", 1.004)):
        trials += [
            trial("final", {}, drifting(factor), case=case),
            trial("final", FAST, drifting(1.0), case=case),
        ]
    trials.append(trial("final", {}, drifting(1.0), case="a", impl="tilelang-splitkv"))
    first, second = totals(tuned(trials))
    assert (first.impl, first.cases, first.ties, first.worst.case) == ("triton-splitkv", 3, 2, "a")
    assert first.mean.median == pytest.approx((2.0 * 1.0 * 1.004) ** (1 / 3))
    assert (second.impl, second.mean.median, second.worst.best) == ("tilelang-splitkv", 1.0, {})


def test_finalists_are_the_own_choice_and_the_fastest_right_ones_once_each() -> None:
    screened = [
        trial("screen", {}, [5.0]),
        trial("screen", {"block_n": 32}, [9.0, 7.0, 8.0]),
        trial("screen", {"block_n": 64}, [6.0]),
        trial("screen", {"block_n": 64, "waves": 1}, None, same_as={"block_n": 64}),
        trial("screen", {"block_n": 16}, None, status="wrong"),
        trial("screen", {"block_n": 256}, [0.001], status="invalid"),
        trial("screen", {"block_n": 128}, [7.0]),
    ]
    assert finalists(screened, 2) == [{}, {"block_n": 64}, {"block_n": 128}]
    assert finalists(screened[:1], 2) == [{}]


def test_a_configuration_in_words() -> None:
    assert tuning_text({}) == "own choice"
    assert tuning_text({"waves": None, "block_n": 64, "num_splits": 8}) == "block_n=64 num_splits=8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": "middle"}, "stage: expected one of screen, final, got 'middle'"),
        ({"tuning": None}, "tuning: expected an object, got None"),
        ({"check": None}, "check: expected an object, for status ok, got None"),
        ({"same_as": {}}, "timing: expected null, for what is the same as another"),
        ({"status": "wrong", "reason": "row 1"}, "timing: expected null, for status wrong"),
        ({"problem": {}}, "problem: problem: expected key head_dim, got none"),
    ],
)
def test_a_trial_that_breaks_the_schema_is_refused(change: dict[str, Any], message: str) -> None:
    good = trial("screen", {}, [1.0])
    with pytest.raises(RecordError) as caught:
        record.validate(good | change)
    assert str(caught.value).startswith(message)
