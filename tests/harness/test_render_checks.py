"""The report of what the check catches, and a study's section of its checks: from records alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import record
from harness.record import CHECKS_FILE, FINDINGS_FILE, IMPOSTORS_FILE, RANDOM_FILE, RecordError
from harness.render import render_study
from harness.render.checks import deep_check
from impls.problem import DecodeProblem

P = DecodeProblem(kv_lens=(63, 0), heads_q=2, heads_kv=1, head_dim=64)
NUMBERS = {
    "rel_l2": 0.002,
    "worst_row": 0.4,
    "lse_err": 1e-6,
    "finite": True,
    "worst_element": 0.5,
    "worst_lse": 0.1,
    "rel_row": 0.003,
}
OVER = {**NUMBERS, "worst_row": 3.0}
RUN = record.run_record(
    "r", "check", {"gpu": "NVIDIA H200", "torch": "2.11", "git": "0123456789abcdef", "dirty": False}
)


def check(case: str, impl: str, *, status: str = "ok", config: Any = None, check: Any = None) -> record.Record:
    reason = None if status == "ok" else "row (sequence 0, head 1): over"
    given = NUMBERS if check is None else check
    return record.check_record(
        run_id="r",
        case=case,
        impl=impl,
        status=status,
        reason=reason,
        problem=P,
        seed=5,
        config=config,
        check=given,
    )


def impostor(
    name: str, length: int, caught: list[str], *, counts: bool = True, excess: float | None = 9.0
) -> record.Record:
    config = {"role": "impostor", "around": "simulated", "length": length, "counts": counts, "excess": excess}
    return check(
        f"simulated {length}",
        name,
        status="wrong" if caught else "ok",
        config=config,
        check={**OVER, "caught": caught},
    )


FLOOR = check(
    "honest bfloat16 63",
    "honest",
    config={"role": "floor", "length": 63},
    check={**NUMBERS, "probes": [{"family": f, **NUMBERS} for f in ("normal", "needles", "exact")]},
)


def rendered(folder: Path, impostors: list[record.Record], random: list[record.Record] | None = None) -> str:
    record.append(folder / IMPOSTORS_FILE, RUN, *impostors)
    if random is not None:
        record.append(folder / RANDOM_FILE, RUN, *random)
    readme = render_study([folder])
    assert readme == folder / "README.md"
    return readme.read_text(encoding="utf-8")


def test_a_table_of_what_caught_each_impostor(tmp_path: Path) -> None:
    every = ["normal", "needles", "tagged", "exact", "extreme", "buried", "equal"]
    text = rendered(
        tmp_path,
        [
            impostor("zeros", 63, ["normal", "normal memory", *every[1:]], excess=None),
            impostor("zeros", 200, ["needles"]),
            impostor("guard row read", 63, ["normal memory"]),
            impostor("guard row read", 200, [], counts=False, excess=1.0),
            FLOOR,
        ],
    )
    assert (
        "2 wrong kernels were tried at 63 and 200 keys, 3 times with an error that is visible at all: all" in text
    )
    assert "| wrong kernel | 63 keys | 200 keys |" in text
    assert "| zeros | every family | needles |" in text
    assert "| guard row read | memory | – |" in text
    assert "| guard row read | 200 | 1 × | right: nothing of what it does wrong happens at this length |" in text
    assert "| simulated | 200 | 2 | 1 | 1 |" in text
    assert "| bfloat16 | 63 | 0.003 | 0.4 | 1e-06 | 0.1 | 0.003 |" in text
    assert "NVIDIA H200, torch 2.11, commit 0123456789ab (run `r`, check)." in text
    assert "Random problems" not in text


def test_a_missed_impostor_is_not_hidden(tmp_path: Path) -> None:
    text = rendered(tmp_path, [impostor("sly", 63, [])])
    assert "**1 were missed**" in text
    assert "| sly | **missed** |" in text


def test_false_alarms_and_true_failures_are_told_apart(tmp_path: Path) -> None:
    config = {"num_splits": 3, "sequence": 0}
    text = rendered(
        tmp_path,
        [impostor("zeros", 63, ["normal"])],
        [
            check("random_00000", "a", config=config),
            check("random_00000", "b", status="wrong", config={**config, "again": NUMBERS}, check=OVER),
            check("random_00001", "b", status="wrong", config={**config, "again": OVER}, check=OVER),
            check("random_00002", "b", status="wrong", config=config, check={**OVER, "finite": False}),
        ],
    )
    assert "3 random problems gave 4 answers: 2 false alarms, 1 true failure." in text
    assert "| `a` | 1 | 0 | 0 | 0 | 0 | 0.50 |" in text
    assert "| `b` | 0 | 2 | 1 | 0 | 0 | – |" in text
    assert "split counts 3." in text
    assert "`python -m harness.fuzz --only 1 --seed 0 --impls b`" in text


def test_a_report_without_an_impostor_is_refused(tmp_path: Path) -> None:
    record.append(tmp_path / IMPOSTORS_FILE, RUN, FLOOR)
    with pytest.raises(RecordError, match="expected a check of an impostor, got none"):
        render_study([tmp_path])


# --- the checks of a study --------------------------------------------------------------------------------


def studied(case: str, impl: str, entry: int, apart: float, **config: Any) -> record.Record:
    probes = [{"family": "normal", "probe": name, "ok": True, **NUMBERS} for name in ("values", "memory")]
    facts = {"same_input_ulp": 0, "other_batch_ulp": 7, "one_split_ulp": None}
    pairs = [{"impl": "other", "entry": 1 - entry, "rel_l2": apart, "worst_row": 0.25}]
    return check(
        case, impl, config=config, check={**NUMBERS, **facts, "probes": probes, "entry": entry, "pairs": pairs}
    )


def test_a_study_says_how_far_right_answers_are_apart(tmp_path: Path) -> None:
    assert deep_check(tmp_path) is None
    record.append(
        tmp_path / CHECKS_FILE,
        RUN,
        studied("one", "a", 0, 0.001, asked={"num_splits": 8}),
        studied("one", "b", 1, 0.001),
        studied("two", "a", 0, 0.002, asked={"num_splits": 8}),
        studied("two", "b", 1, 0.002),
        check(
            "two",
            "c",
            status="wrong",
            check={**OVER, "probes": [{"family": "normal", "probe": "values", "ok": False, **OVER}]},
        ),
    )
    deep = deep_check(tmp_path)
    assert deep is not None
    assert deep["note"] == "2 cases, 5 checks, 1 wrong (`c` on 1)."
    assert deep["families"].header == ["implementation", "normal", "memory"]
    assert deep["families"].rows == [
        ["`a num_splits=8`", "0.40", "0.40"],
        ["`b`", "0.40", "0.40"],
        ["`c`", "**1 wrong**", "–"],
    ]
    assert deep["pairs"].rows == [
        ["`a num_splits=8`", "0.002", "", "0.002 (0.25)"],
        ["`b`", "0.002", "0.002 (0.25)", ""],
    ]
    assert deep["determinism"].rows == [["`a num_splits=8`", "0", "7", "–"], ["`b`", "0", "7", "–"]]


def test_a_wrong_answer_is_told_with_what_repeats_it_on_the_smallest_failing_problem(tmp_path: Path) -> None:
    fault = check("case", "b", status="wrong", check={**OVER, "family": "normal memory", "probes": [], "pairs": []})
    record.append(tmp_path / CHECKS_FILE, RUN, fault)
    deep = deep_check(tmp_path)
    assert deep is not None
    (told,) = deep["faults"]
    assert (
        told["text"]
        == "`b` is wrong by `memory` (inputs: `normal`), on `case` for example: row (sequence 0, head 1): over"
    )
    assert "kv_lens=(63, 0), heads_q=2" in told["snippet"]

    least = {**fault, "case": "case: normal memory", "config": {"role": "finding", "probe": "normal memory"}}
    least["problem"] = {**least["problem"], "kv_lens": [1, 1]}
    record.append(tmp_path / FINDINGS_FILE, RUN, least)
    deep = deep_check(tmp_path)
    assert deep is not None
    (told,) = deep["faults"]
    assert told["text"].endswith("; smallest failing problem:")
    assert "kv_lens=(1, 1), heads_q=2" in told["snippet"]
    compile(told["snippet"], "snippet", "exec")

    record.replace_cases(tmp_path / FINDINGS_FILE, [{**least, "status": "ok", "reason": None}])
    deep = deep_check(tmp_path)
    assert deep is not None
    assert deep["faults"][0]["text"].endswith("; right when tried again")


@pytest.mark.parametrize(
    ("probe", "numbers", "clean", "meaning"),
    [
        (
            "values",
            {"worst_element": 1.8},
            True,
            "off by up to 1.80 times the rounding that the dtype makes unavoidable",
        ),
        (
            "values",
            {"worst_row": 500.0, "rel_row": 5.5},
            True,
            "off by up to 500 budgets, a row by up to 550 % of its own size",
        ),
        ("values", {"worst_element": 174.0}, True, "single elements are off by up to 174 times"),
        ("graph", {"worst_row": 3.0}, True, "makes unavoidable, only when replayed from a CUDA graph"),
        ("graph", {"worst_row": 3.0}, False, "makes unavoidable"),
        (
            "memory",
            {"finite": False, "reason": "expected finite values"},
            True,
            "reach its output; with finite numbers",
        ),
        (
            "memory",
            {"finite": False, "reason": "expected finite values"},
            False,
            "rows that do not belong to a sequence",
        ),
        (
            "memory",
            {"reason": "memory: expected the same bits"},
            True,
            "within the budgets, and wrong in what else",
        ),
        (
            "values",
            {"finite": False, "reason": "out: expected shape"},
            True,
            "cannot be compared with the reference",
        ),
    ],
)
def test_what_a_wrong_answer_means_follows_from_its_probe_and_numbers(
    tmp_path: Path, probe: str, numbers: dict[str, Any], clean: bool, meaning: str
) -> None:
    numbers = {**NUMBERS, "rel_row": 0.002, "finite": True, "reason": "row: over", **numbers}
    probes = [{"family": "normal", "probe": probe, "ok": False, **numbers}]
    if clean and probe != "values":
        probes.insert(0, {"family": "normal", "probe": "values", "ok": True, **NUMBERS})
    record.append(tmp_path / CHECKS_FILE, RUN, check("one", "a", status="wrong", check={**OVER, "probes": probes}))
    deep = deep_check(tmp_path)
    assert deep is not None
    assert deep["probes"][0].startswith(
        "`normal`: zero-mean" if clean or probe == "values" else f"`{probe}` (inputs:"
    )
    [line] = deep["wrong"].rows
    assert line[:3] == ["`a`", "normal" if probe == "values" else probe, "1 of 1"]
    assert meaning in line[7]
    assert clean or not line[7].endswith("right")
    assert line[8] == "`one`"
