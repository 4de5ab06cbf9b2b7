"""The section on regret: numbers of known truth, and nothing where there is nothing to say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import record
from harness.record import Record
from harness.render import render_study
from tests.harness.fake_records import GPU_CASES, GPU_ENV, gpu_records, write
from tests.harness.fake_trials import FAST, drifting, trial

ENV = {**GPU_ENV, "method": "graph", "cache": "cold"}
TITLE = "## What the own choice loses\n"


def trials(run_id: str = "r1") -> list[Record]:
    """Of one kernel: 20 % lost, nothing lost, 0.4 % lost, no comparison; of the other nothing lost."""
    found = [
        trial("screen", {}, [12.0], run_id=run_id),
        trial("screen", FAST, [10.0], run_id=run_id),
        trial("screen", {"block_n": 16}, None, status="wrong", run_id=run_id),
        trial("screen", {"block_n": 32}, None, same_as=FAST, run_id=run_id),
    ]
    for case, factor in (("b1_8k", 1.2), ("b1_1k", 1.0), ("b8_512", 1.004)):
        found.append(trial("final", {}, drifting(factor), case=case, run_id=run_id))
        if factor > 1:
            found.append(trial("final", FAST, drifting(1.0), case=case, run_id=run_id))
    found.append(trial("final", {}, None, case="b1_32k", status="failed", run_id=run_id))
    found.append(trial("final", {}, drifting(1.0), impl="tilelang-splitkv", run_id=run_id))
    return found


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write(tmp_path_factory.mktemp("tuned"), gpu_records())
    run = record.run_record("r1", "h200-decode", ENV, smallest_effect=0.01)
    record.append(folder / "tuning.jsonl", run, *trials())
    text = render_study([folder]).read_text(encoding="utf-8")
    assert text.count(TITLE) == 1
    return text.partition(TITLE)[2].partition("\n## ")[0]


def cells(section: str, *first: str) -> list[str]:
    (line,) = [line for line in section.splitlines() if line.startswith("| " + " | ".join(first) + " |")]
    return [cell.strip() for cell in line.strip("| ").split(" | ")][len(first) :]


def test_a_case_states_regret_verdict_and_the_best_configuration(section: str) -> None:
    assert cells(section, "`b1_8k`", "`triton-splitkv`") == [
        *("17.7", "14.8", "1.200 [1.200, 1.200]", "**slower**", r"block\_n=128", r"block\_n=64"),
        "4: 2 timed, 1 wrong",
    ]
    assert cells(section, "`b8_512`", "`triton-splitkv`")[2:4] == ["1.004 [1.004, 1.004]", "as good"]
    own, plan, best = cells(section, "`b1_1k`", "`triton-splitkv`")[3:6]
    assert (own, best) == ("the best", "own choice")
    assert plan == r"block\_n=128"
    assert cells(section, "`b1_32k`", "`triton-splitkv`")[:6] == ["–"] * 6
    assert "- `triton-splitkv` on `b1_32k`: own choice: failed: because\n" in section


def test_the_means_name_the_worst_case_and_the_ties(section: str) -> None:
    mean = (1.2 * 1.0 * 1.004) ** (1 / 3)
    assert cells(section, "`triton-splitkv`") == [
        f"{mean:.3f} [{mean:.3f}, {mean:.3f}] over 3 of 4",
        "1.200 [1.200, 1.200] (`b1_8k`)",
        "2",
    ]
    assert (
        f"The own choice of `triton-splitkv` takes {mean:.3f} [{mean:.3f}, {mean:.3f}] times as long as the best "
        "configuration found, in the geometric mean over 3 cases; at worst 1.200 [1.200, 1.200] times, on `b1_8k`. "
        "It ties with the best on 2.\n"
    ) in section
    assert "The own choice of `tilelang-splitkv` takes 1.000 [1.000, 1.000] times" in section


def test_the_section_names_its_device_versions_and_method(section: str) -> None:
    versions = r"H200, torch 2\.11\.0, triton 3\.6\.0, tilelang 0\.1\.15, commit (`\w+`|unknown)"
    assert re.search(versions + r", method `graph`, cache `cold` \(run `r1`\)", section)
    assert "[tuning.jsonl](tuning.jsonl)" in section


def test_an_own_choice_that_has_changed_since_is_named(tmp_path: Path) -> None:
    records = [
        r | {"config": r["config"] | {"block_n": 64 if r["case"] == "b1_8k" else 128}}
        if r.get("impl") == "triton-splitkv"
        else r
        for r in gpu_records()
    ]
    folder = write(tmp_path, records)
    run = record.run_record("r1", "h200-decode", ENV, smallest_effect=0.01)
    record.append(folder / "tuning.jsonl", run, *trials())
    text = render_study([folder]).read_text(encoding="utf-8")
    (said,) = re.findall(r"The measurements above ran another own choice than was tuned here: (.*)\.$", text, re.M)
    assert r"`triton-splitkv` on `b1_8k` (block\_n 64, here 128)" in said
    assert "`b1_1k`" not in said  # the same choice


def test_only_own_choices_that_are_other_ones_are_named(section: str) -> None:
    (said,) = re.findall(
        r"The measurements above ran another own choice than was tuned here: (.*)\.$", section, re.M
    )
    assert said == r"`triton-splitkv` on `b8_512` (splits\_max 2, here 16)"


@pytest.mark.parametrize("what", ["nothing", "cpu", "begun"])
def test_without_a_tuning_on_a_gpu_there_is_no_section(tmp_path: Path, what: str) -> None:
    folder = write(tmp_path, gpu_records({"b1_8k": GPU_CASES["b1_8k"]}))
    if what == "cpu":
        record.append(folder / "tuning.jsonl", record.run_record("r1", "x", {"device": "cpu"}), *trials())
    elif what == "begun":
        record.append(folder / "tuning.jsonl", record.run_record("r1", "x", ENV), *trials()[:4])
    assert TITLE not in render_study([folder]).read_text(encoding="utf-8")
