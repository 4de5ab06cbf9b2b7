import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness import record as rec
from impls.problem import DecodeProblem

PROBLEM = DecodeProblem(kv_lens=(8192, 0), heads_q=32, heads_kv=8, head_dim=128)
CHECK = {"rel_l2": 0.0022, "worst_row": 0.41, "lse_err": 1e-6, "finite": True}
TIMING = {
    "method": "graph",
    "cache": "cold",
    "working_set_bytes": 402653184,
    "calls_per_sample": 10,
    "kernels": 2,
    "samples": [{"round": 0, "us": 17.9, "throttled": False}, {"round": 1, "us": None, "throttled": None}],
}


def measurement(case: str = "b2", run_id: str = "run-1", **changes: Any) -> rec.Record:
    fields: dict[str, Any] = {
        "run_id": run_id,
        "case": case,
        "impl": "triton-splitkv",
        "status": "ok",
        "problem": PROBLEM,
        "seed": 0,
        "config": {"num_splits": "auto", "asked": {"num_splits": "auto"}},
        "compile_ms": 812.4,
        "plan_us": 35.0,
        "check": CHECK,
        "timing": TIMING,
    }
    return rec.measurement_record(**(fields | changes))


def failed(case: str = "b2", run_id: str = "run-1", **changes: Any) -> rec.Record:
    return measurement(case, run_id, status="failed", check=None, timing=None, **({"reason": "it hung"} | changes))


def ceiling(run_id: str = "run-1") -> rec.Record:
    return rec.measurement_record(
        run_id=run_id, case=None, impl=rec.READ_CEILING, role="bound", status="ok", problem=None, seed=None,
        config={"bytes": 4 * 10**9}, timing=TIMING,
    )  # fmt: skip


def changed(record: rec.Record, path: str, value: object) -> rec.Record:
    """A deep copy of ``record`` with the value at ``path`` (``a.b.0``) replaced, or removed for ``...``."""
    copy: Any = json.loads(json.dumps(record))
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    target = copy
    for part in parents:
        target = target[part]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return copy


def test_run_ids_sort_by_time_and_differ() -> None:
    ids = {rec.new_run_id() for _ in range(20)}
    assert len(ids) > 1
    assert all(re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{4}", run_id) for run_id in ids)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    records = [
        rec.run_record("run-1", "h200-decode", {"gpu": "NVIDIA H200", "clocks": {"sm_mhz": 1980}}),
        ceiling(),
        measurement(),
        failed(reason="µs × “quoted”\nsecond line\u2028third"),
    ]
    for record in records:
        rec.append(path, record)
    assert rec.read(path) == records
    assert len(path.read_bytes().splitlines()) == len(records)


def test_unknown_keys_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    rec.append(path, measurement() | {"later": {"k": [1, 2]}})
    assert rec.read(path)[0]["later"] == {"k": [1, 2]}


def checked(**changes: Any) -> rec.Record:
    numbers = {"rel_l2": 0.1, "worst_row": None, "lse_err": None, "finite": True}
    row = {
        "run_id": "r",
        "case": "b2",
        "impl": "x",
        "status": "ok",
        "problem": PROBLEM,
        "seed": 3,
        "check": numbers,
    }
    return rec.check_record(**{**row, **changes})


def test_a_check_is_kept_with_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "checks.jsonl"
    rec.append(path, checked(), checked(impl="y", status="wrong", reason="row 3", config={"num_splits": 4}))
    first, second = rec.read(path)
    assert (first["kind"], first["config"], first["check"]["rel_l2"]) == ("check", {}, 0.1)
    assert (second["reason"], second["config"]) == ("row 3", {"num_splits": 4})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "wrong"}, "reason: expected a non-empty string, for status wrong, got None"),
        ({"seed": None}, "seed: expected an integer, got None"),
        (
            {"check": {"finite": 1, "rel_l2": 0, "worst_row": 0, "lse_err": 0}},
            "check.finite: expected true or false",
        ),
    ],
)
def test_a_check_that_breaks_the_schema_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(rec.RecordError, match=re.escape(message)):
        checked(**changes)


def test_kinds_of_later_use_are_read(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    record = {"kind": "trial", "schema": 1, "run_id": "r", "case": "b2", "impl": "x", "verdict": "ok"}
    rec.append(path, record)
    assert rec.read(path) == [record]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("kind", "note", "kind: expected one of run, measurement, check, trial, got 'note'"),
        ("kind", ..., "kind: expected one of run, measurement, check, trial, got nothing"),
        ("schema", 2, "schema: expected 1, got 2"),
        ("run_id", "", "run_id: expected a non-empty string, got ''"),
        ("status", "good", "status: expected one of ok, wrong, unsupported"),
        ("role", "peer", "role: expected one of impl, bound, got 'peer'"),
        ("reason", "because", "reason: expected null, for status ok, got 'because'"),
        ("case", None, "case: expected a non-empty string, got None"),
        ("seed", 0.5, "seed: expected an integer, got 0.5"),
        ("problem.heads_kv", 7, "problem: heads_q: expected a multiple of heads_kv = 7, got 32"),
        ("problem", None, "problem: expected an object, got None"),
        ("config", [], "config: expected an object, got []"),
        ("compile_ms", -1, "compile_ms: expected a number >= 0 or null, got -1"),
        ("plan_us", "fast", "plan_us: expected a number >= 0 or null, got 'fast'"),
        ("check", None, "check: expected an object, for status ok, got None"),
        ("check.worst_row", ..., "check.worst_row: expected a number or null, got nothing"),
        ("check.finite", 1, "check.finite: expected true or false, got 1"),
        ("timing", None, "timing: expected an object, for status ok, got None"),
        ("timing.calls_per_sample", 0, "timing.calls_per_sample: expected an integer >= 1, got 0"),
        ("timing.cache", ..., "timing.cache: expected a non-empty string, got nothing"),
        ("timing.samples", {}, "timing.samples: expected an array, got {}"),
        ("timing.samples.1", 17.9, "timing.samples[1]: expected an object, got 17.9"),
        ("timing.samples.1.us", "17.9", "timing.samples[1].us: expected a number or null, got '17.9'"),
        ("timing.samples.0.throttled", 0, "timing.samples[0].throttled: expected true, false or null, got 0"),
    ],
)
def test_a_fault_is_named_with_its_line_and_key(path: str, value: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    rec.append(file, measurement())
    with file.open("a") as out:
        out.write(json.dumps(changed(measurement(), path, value)) + "\n")
    with pytest.raises(rec.RecordError, match=re.escape(f"{file}:2: {message}")):
        rec.read(file)


@pytest.mark.parametrize("status", ["wrong", "unsupported", "unavailable", "failed"])
def test_only_a_passed_check_has_a_timing(status: str) -> None:
    with pytest.raises(rec.RecordError, match=f"timing: expected null, for status {status}"):
        measurement(status=status, reason="why")
    with pytest.raises(rec.RecordError, match=f"reason: expected a non-empty string, for status {status}"):
        measurement(status=status, timing=None)


def test_an_invalid_timing_keeps_its_samples() -> None:
    record = measurement(status="invalid", reason="faster than memory")
    assert record["timing"] == TIMING


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_cannot_say_are_refused(value: float, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with pytest.raises(rec.RecordError, match=re.escape("check.rel_l2: expected a finite number")):
        measurement(check=CHECK | {"rel_l2": value})
    with pytest.raises(rec.RecordError, match=re.escape("timing.samples[0].us: expected a finite number")):
        rec.append(path, changed(measurement(), "timing.samples.0.us", None) | {"timing": TIMING | {
            "samples": [{"round": 0, "us": value, "throttled": False}]}})  # fmt: skip
    assert not path.exists()
    path.write_text(json.dumps(measurement() | {"plan_us": value}) + "\n")
    with pytest.raises(rec.RecordError, match=re.escape(f"{path}:1: expected strict JSON, got ")):
        rec.read(path)


def test_what_is_no_json_value_is_refused() -> None:
    with pytest.raises(rec.RecordError, match=re.escape("config.dtype: expected a JSON value, got type")):
        measurement(config={"dtype": int})
    with pytest.raises(rec.RecordError, match=re.escape("config: expected keys that are strings, got 3")):
        measurement(config={3: "x"})


@pytest.mark.parametrize("kept", [1, 25, -2])
def test_a_half_written_last_line_is_skipped_and_then_cut_off(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    rec.append(path, measurement("whole"))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:kept])
    with pytest.warns(rec.RecordWarning, match=re.escape(f"{path}:2: skipped a half-written last line")):
        records = rec.read(path)
    assert [r["case"] for r in records] == ["whole"]
    with pytest.warns(rec.RecordWarning, match="cut off a half-written last line"):
        rec.append(path, measurement("next"))
    assert [r["case"] for r in rec.read(path)] == ["whole", "next"]


def test_a_last_line_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    rec.append(path, measurement("first"))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    rec.append(path, measurement("next"))
    assert [r["case"] for r in rec.read(path)] == ["first", "next"]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    rec.append(path, measurement())
    path.write_bytes(b'{"kind":\n' + path.read_bytes())
    with pytest.raises(rec.RecordError, match=re.escape(f"{path}:1: expected one JSON object")):
        rec.read(path)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        rec.read(tmp_path / "records.jsonl")


def test_a_re_recorded_case_replaces_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    old = [rec.run_record("run-1", "s", {}), ceiling(), measurement("a"), measurement("b"), failed("a", impl="x")]
    for record in old:
        rec.append(path, record)
    new = [rec.run_record("run-2", "s", {}), ceiling("run-2"), measurement("a", "run-2")]
    rec.replace_cases(path, new)
    assert rec.read(path) == [old[0], old[1], old[3], *new]

    both = [rec.run_record("run-3", "s", {}), measurement("b", "run-3")]
    rec.replace_cases(path, both)
    assert rec.read(path) == [*new, *both], "run-1 has no case left: its environment and ceiling go with it"
    assert [p.name for p in tmp_path.iterdir()] == ["records.jsonl"]


def test_replacing_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    rec.append(path, measurement("a"))
    before = path.read_bytes()
    with pytest.raises(rec.RecordError, match="seed"):
        rec.replace_cases(path, [measurement("a", "run-2"), measurement("a", "run-2") | {"seed": None}])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["records.jsonl"]


def test_replacing_makes_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    rec.replace_cases(path, [measurement("a")])
    assert rec.read(path) == [measurement("a")]


def test_a_replaced_file_can_be_read_by_whom_an_appended_one_can(tmp_path: Path) -> None:
    appended, replaced = tmp_path / "appended.jsonl", tmp_path / "replaced.jsonl"
    rec.append(appended, measurement("a"))
    rec.replace_cases(replaced, [measurement("a")])
    assert replaced.stat().st_mode == appended.stat().st_mode
