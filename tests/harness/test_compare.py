"""Two files against each other: synthetic records in which it is known what changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness import cli
from harness import record as rec
from harness.compare import GONE, CompareError, compare_files, markdown
from tests.harness import fake_records as fake

CASES = {name: fake.GPU_CASES[name] for name in ("b1_8k", "b16_8k")}


def write(path: Path, records: Sequence[rec.Record]) -> Path:
    rec.replace_cases(path, records)
    return path


def old(tmp_path: Path) -> Path:
    return write(tmp_path / "old.jsonl", fake.gpu_records(CASES, run_id="run-old"))


def new(tmp_path: Path, change: Callable[[rec.Record], None] = lambda record: None, **env: object) -> Path:
    """The same study on another day: other noise, everything 4 % slower, the bound too."""
    records = fake.gpu_records({**CASES}, run_id="run-new", n=25)
    for record in records:
        for sample in (record.get("timing") or {"samples": ()})["samples"]:
            sample["us"] *= 1.04
        change(record)
    records[0]["env"] = {**records[0]["env"], **env}
    return write(tmp_path / "new.jsonl", records)


def slower(case: str, impl: str, factor: float) -> Callable[[rec.Record], None]:
    def change(record: rec.Record) -> None:
        if (record.get("case"), record.get("impl")) == (case, impl):
            for sample in record["timing"]["samples"]:
                sample["us"] *= factor

    return change


def run(*arguments: object) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["compare", *map(str, arguments)])
    return stopped.value.code


def test_a_slower_day_is_no_slowdown(tmp_path: Path) -> None:
    result = compare_files(old(tmp_path), new(tmp_path))
    assert not result.failed
    assert {c.verdict for c in result.changes} == {"tie"}
    assert all(c.ratio is not None and c.bounded and c.ratio.low <= 1.0 <= c.ratio.high for c in result.changes)
    assert len(result.changes) == len(CASES) * len(fake.SPEEDS)
    assert result.method == "graph, cache cold"


@pytest.mark.parametrize(
    ("factor", "allow", "verdict", "failed"),
    [
        (1.06, 0.03, "slower", True),
        (1.06, 0.08, "slower", False),
        (1.02, 0.03, "slower", False),
        (0.90, 0.03, "faster", False),
    ],
)
def test_one_change_is_found_and_judged(
    factor: float, allow: float, verdict: str, failed: bool, tmp_path: Path
) -> None:
    changed = new(tmp_path, slower("b16_8k", "triton-splitkv", factor))
    result = compare_files(old(tmp_path), changed, allow=allow)
    assert result.failed == failed
    for change in result.changes:
        ours = (change.case, change.label) == ("b16_8k", "triton-splitkv")
        assert (change.verdict, change.failed) == ((verdict, failed) if ours else ("tie", False))
        if ours:
            assert change.ratio is not None
            assert change.ratio.low <= factor <= change.ratio.high
            assert change.ratio.median == pytest.approx(factor, rel=0.01)


def test_what_stopped_being_ok_fails_and_what_became_ok_does_not(tmp_path: Path) -> None:
    def breaks(record: rec.Record) -> None:
        if (record.get("case"), record.get("impl")) == ("b1_8k", "flash-attn-3"):
            record.update(status="failed", reason="it hung", timing=None)

    broken = new(tmp_path, breaks)
    result = compare_files(old(tmp_path), broken)
    [failed] = [c for c in result.changes if c.failed]
    assert (failed.case, failed.label, failed.old, failed.new) == ("b1_8k", "flash-attn-3", "ok", "failed")
    assert "| ok → failed |" in markdown(result)
    assert not compare_files(broken, old(tmp_path)).failed


def test_a_row_that_is_gone_fails_and_a_new_one_is_listed(tmp_path: Path) -> None:
    few = fake.gpu_records({"b1_8k": CASES["b1_8k"]}, run_id="run-few")
    fewer = write(tmp_path / "few.jsonl", few)
    result = compare_files(old(tmp_path), fewer)
    gone = [c for c in result.changes if c.case == "b16_8k"]
    assert len(gone) == len(fake.SPEEDS)
    assert all(c.failed and c.new == GONE for c in gone)
    back = compare_files(fewer, old(tmp_path))
    assert not back.failed
    assert sum(c.old == GONE for c in back.changes) == len(fake.SPEEDS)


def test_throttled_samples_do_not_count(tmp_path: Path) -> None:
    def throttles(record: rec.Record) -> None:
        for sample in (record.get("timing") or {"samples": ()})["samples"][:8]:
            sample.update(us=sample["us"] * (3 if record["role"] == "impl" else 1), throttled=True)

    assert not compare_files(old(tmp_path), new(tmp_path, throttles)).failed


def test_without_a_bound_times_are_compared_as_they_are(tmp_path: Path) -> None:
    before = write(tmp_path / "a.jsonl", fake.cpu_records(run_id="run-a"))
    result = compare_files(before, before)
    assert not result.failed
    assert all(not c.bounded for c in result.changes)
    assert "*unbounded*" in markdown(result)


def test_what_changed_in_the_environment_is_listed(tmp_path: Path) -> None:
    result = compare_files(old(tmp_path), new(tmp_path, torch="2.12.0", gpu=None))
    assert result.environment == {"gpu": ("NVIDIA H200", "–"), "torch": ("2.11.0", "2.12.0")}
    assert "| torch | 2.11.0 | 2.12.0 |" in markdown(result)


@pytest.mark.parametrize("key", ["method", "cache"])
def test_mixed_methods_are_refused(key: str, tmp_path: Path) -> None:
    def other(record: rec.Record) -> None:
        if record.get("timing"):
            record["timing"][key] = "other"

    with pytest.raises(
        CompareError, match=r"method: expected one on both sides, got graph, cache cold \(.*old.jsonl"
    ):
        compare_files(old(tmp_path), new(tmp_path, other))


def test_another_problem_under_the_same_name_is_refused(tmp_path: Path) -> None:
    def other(record: rec.Record) -> None:
        if record.get("case") == "b1_8k":
            record["problem"] = {**record["problem"], "kv_lens": [8191]}

    with pytest.raises(CompareError, match="b1_8k: expected the same problem on both sides, got another kv_lens"):
        compare_files(old(tmp_path), new(tmp_path, other))


def test_the_verb_prints_a_table_and_its_exit_code_is_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = old(tmp_path)
    assert run(before, new(tmp_path)) == 0
    text = capsys.readouterr().out
    assert text.startswith("Of 12 rows: 0 faster, 12 tie, 0 slower; 0 slower by more than 3 %, 0 no longer ok.")
    assert "| `b1_8k` | `triton-splitkv` | ok | " in text
    slow = new(tmp_path, slower("b1_8k", "triton-splitkv", 1.06))
    assert run(before, slow) == 1
    assert "**slower**" in capsys.readouterr().out
    assert run(before, slow, "--allow", "8") == 0


def test_files_that_cannot_be_compared_are_one_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = write(tmp_path / "empty.jsonl", [])
    assert run(old(tmp_path), empty) == 2
    assert "empty.jsonl: expected measurements of a case, got 0 other records" in capsys.readouterr().err
    assert run(old(tmp_path), tmp_path / "none.jsonl") == 2
    assert "none.jsonl" in capsys.readouterr().err
