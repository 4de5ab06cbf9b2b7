"""The loop, with fakes in place of kernels, timer and bound: continuing, checking, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import record
from harness.runner import RunError, RunSummary, _jobs_that_fit, check_study, run_study
from harness.study import Case, Entry, Study
from harness.worker import Setup
from impls.problem import DecodeProblem
from tests.harness import fakes

ROOT = Path(__file__).parents[2]

CATALOG = {
    "right": "Right",
    "other": "Right",
    "wrong": "Wrong",
    "forgets": "Forgets",
    "raises": "Raises",
    "raises-later": "RaisesLater",
    "out-of-memory": "OutOfMemory",
    "refuses": "Refuses",
    "unsupported": "Unsupported",
    "missing": "Missing",
    "no-such-file": "NoSuchClass",
    "kills-on-import": "KillsOnImport",
    "dies": "Dies",
    "dies-later": "DiesLater",
    "hangs": "Hangs",
    "stalls": "Stalls",
    "nan-time": "NanTime",
    "zero-time": "ZeroTime",
    "negative-time": "NegativeTime",
    "too-fast": "TooFast",
}

SETUP = Setup(
    device="cpu",
    catalog={name: f"tests.harness.fakes:{cls}" for name, cls in CATALOG.items()},
    timer="tests.harness.fakes:Timer",
    bound="tests.harness.fakes:Bound",
)

DEADLINE_S = 6.0

FIRST = Case(
    name="first",
    problem=DecodeProblem(kv_lens=(37,), heads_q=2, heads_kv=1, head_dim=64, dtype="float16"),
    seed=1,
)
SECOND = Case(name="second", problem=replace(FIRST.problem, kv_lens=(5, 0, 12)), seed=2)


def make_study(folder: Path, *impls: str | Entry, cases: tuple[Case, ...] = (FIRST, SECOND)) -> Study:
    entries = tuple(item if isinstance(item, Entry) else Entry(impl=item, tuning={}) for item in impls)
    folder.mkdir(parents=True, exist_ok=True)
    return Study(name=folder.name, title="A study", cases=cases, entries=entries, path=folder / "study.toml")


def run(study: Study, *, fresh: bool = False, setup: Setup = SETUP, console: Console | None = None) -> RunSummary:
    return run_study(study, fresh=fresh, setup=setup, deadline_s=DEADLINE_S, console=console)


def measurements(study: Study) -> dict[tuple[str | None, str], dict[str, Any]]:
    rows = [r for r in record.read(study.folder / "records.jsonl") if r["kind"] == "measurement"]
    by_name = {(r["case"], r["impl"]): r for r in rows}
    assert len(by_name) == len(rows), "a row was written twice"
    return by_name


# --- repeating -------------------------------------------------------------------------------------------


def repeat(study: Study, *, fresh: bool = False, setup: Setup = SETUP) -> RunSummary:
    return run_study(study, fresh=fresh, repeat=True, setup=setup, deadline_s=DEADLINE_S)


def test_a_repeat_has_a_file_of_its_own_and_is_continued_like_a_run(tmp_path: Path) -> None:
    study = make_study(tmp_path, "right", "other")
    first = run(study)
    before = first.records.read_bytes()
    second = repeat(study)
    assert (second.records, second.resumed) == (tmp_path / "repeat.jsonl", 0)
    assert second.run_id != first.run_id
    assert first.records.read_bytes() == before
    assert [(r["case"], r["impl"]) for r in second.rows] == [(r["case"], r["impl"]) for r in first.rows]
    assert (repeat(study).run_id, repeat(study).resumed) == (second.run_id, 2)
    third = repeat(study, fresh=True)
    assert {r["run_id"] for r in record.read(third.records)} == {third.run_id}
    assert first.records.read_bytes() == before


def test_what_is_no_repeat_of_the_records_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    study = make_study(tmp_path, "right")
    records = re.escape(str(tmp_path / "records.jsonl"))
    with pytest.raises(RunError, match=f"{records}: expected the records of a run to repeat, got no such file"):
        repeat(study)
    run(study)
    longer = replace(FIRST, problem=replace(FIRST.problem, kv_lens=(38,)))
    refused = {
        "another kv_lens": (longer, SECOND),
        "another seed": (replace(FIRST, seed=9), SECOND),
        "another kv_lens, seed": (replace(longer, seed=9), SECOND),
    }
    for told, cases in refused.items():
        reason = f"{records}: first: expected the problem that the study has now, to repeat it, got {told}$"
        with pytest.raises(RunError, match=reason):
            repeat(replace(study, cases=cases))
    with pytest.raises(RunError, match=f"{records}: expected records of third to repeat, got none"):
        repeat(replace(study, cases=(FIRST, replace(SECOND, name="third"))))
    other_way = replace(SETUP, timer="tests.harness.fakes:WarmTimer")
    with pytest.raises(RunError, match=r"expected method fake, cache \w+, got method fake, cache warm"):
        repeat(study, setup=other_way)
    assert not (tmp_path / "repeat.jsonl").exists()


# --- continuing ------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_run_again_unless_asked_to(tmp_path: Path) -> None:
    study = make_study(tmp_path, "right", Entry(impl="other", tuning={"num_splits": 4}), "missing")
    first = run(study)
    before = (tmp_path / "records.jsonl").read_bytes()
    assert measurements(study)["first", "other"]["config"]["asked"] == {"num_splits": 4}

    again = run(study)
    assert (again.run_id, again.resumed, again.counts) == (first.run_id, 2, first.counts)
    assert (tmp_path / "records.jsonl").read_bytes() == before

    anew = run(study, fresh=True)
    assert anew.run_id != first.run_id
    assert anew.resumed == 0
    assert {r["run_id"] for r in record.read(anew.records)} == {anew.run_id}
    assert len(measurements(study)) == 2 * 4 + 1


def test_a_case_is_run_again_when_it_is_asked_for_differently(tmp_path: Path) -> None:
    study = make_study(tmp_path, "right")
    run_id = run(study).run_id
    other_seed = replace(study, cases=(FIRST, replace(SECOND, seed=3)))
    assert run(other_seed).resumed == 1
    other_tuning = replace(other_seed, entries=(Entry(impl="right", tuning={"num_splits": 2}),))
    assert run(other_tuning).resumed == 0
    assert {r["run_id"] for r in measurements(study).values()} == {run_id}
    assert measurements(study)["second", "right"]["seed"] == 3


def test_another_environment_begins_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = make_study(tmp_path, "right", cases=(FIRST,))
    first = run(study)
    rows = record.read(first.records)
    rows[0]["env"]["torch"] = "1.0"
    first.records.unlink()
    for row in rows:
        record.append(first.records, row)
    second = run(study)
    assert second.run_id != first.run_id
    assert {r["run_id"] for r in record.read(second.records)} == {second.run_id}


def is_running(pid: str) -> bool:
    """Whether a process is there and no zombie: nobody may reap the orphans of a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_run_loses_nothing_and_is_continued(tmp_path: Path) -> None:
    study = make_study(tmp_path, "missing", "right", "stalls")
    records = tmp_path / "records.jsonl"
    script = (
        "import sys; from pathlib import Path; from tests.harness.test_runner import *\n"
        "if __name__ == '__main__': run(make_study(Path(sys.argv[1]), 'missing', 'right', 'stalls'))"
    )
    path = tmp_path / "go.py"
    path.write_text(script)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # the same libraries: the same environment
    env = {**os.environ, fakes.STALL_VARIABLE: "1", "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen([sys.executable, str(path), str(tmp_path)], cwd=ROOT, env=env)
    try:
        # The second case stalls: wait until its first row, which needs no timing, has been written.
        deadline = time.monotonic() + 120
        while not (records.exists() and b'"second"' in records.read_bytes()):
            assert process.poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline, "the second case was never begun"
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert children
    while any(is_running(pid) for pid in children):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.05)
    whole = records.read_bytes()
    with records.open("ab") as file:
        file.write(b'{"kind":"measurement","schema":1,"run_id":"2026')  # as if killed while writing

    with pytest.warns(record.RecordWarning, match="half-written"):
        summary = run(study)
    assert (summary.resumed, summary.counts) == (1, {"ok": 4, "unavailable": 2})
    kept = [line for line in whole.splitlines() if b'"case":"second"' not in line]
    assert records.read_bytes().splitlines()[: len(kept)] == kept
    assert len(measurements(study)) == 2 * 4 + 1


# --- other ends ------------------------------------------------------------------------------------------


def test_nothing_succeeded_is_said(tmp_path: Path) -> None:
    summary = run(make_study(tmp_path, "missing", "wrong", cases=(FIRST,)))
    assert not summary.succeeded
    assert summary.counts == {"wrong": 1, "unavailable": 1}


def test_a_bound_that_dies_takes_no_implementation_along(tmp_path: Path) -> None:
    study = make_study(tmp_path, "right", cases=(FIRST,))
    run(study, setup=replace(SETUP, bound="tests.harness.fakes:DyingBound"))
    rows = measurements(study)
    for key in ((None, "read-ceiling"), ("first", "stream-read")):
        assert (rows[key]["status"], rows[key]["reason"]) == ("failed", "sweep: the process ended with exit code 9")
    assert rows["first", "right"]["status"] == "ok"


def test_no_keys_at_all_is_measured_without_a_bound(tmp_path: Path) -> None:
    empty = Case(name="empty", problem=replace(FIRST.problem, kv_lens=(0, 0)), seed=0)
    none = Case(name="none", problem=replace(FIRST.problem, kv_lens=()), seed=0)
    study = make_study(tmp_path, "right", cases=(empty, none))
    assert run(study).counts == {"ok": 2}
    assert measurements(study)["empty", "stream-read"]["status"] == "unsupported"


def test_a_worker_that_cannot_start_is_an_error_with_its_reason(tmp_path: Path) -> None:
    study = make_study(tmp_path, "right")
    with pytest.raises(RunError, match="start: RuntimeError: device: expected a better one"):
        run(study, setup=replace(SETUP, timer="tests.harness.fakes:NoTimer"))
    assert not (tmp_path / "records.jsonl").exists()


def test_checking_times_nothing_and_records_only_where_it_is_told_to(tmp_path: Path) -> None:
    study = make_study(tmp_path, "right", "wrong", "missing", "dies", "zero-time")
    outcomes = check_study(study, families=("normal", "exact"), setup=SETUP, deadline_s=DEADLINE_S)
    assert [(o.case, o.entry.impl, o.status) for o in outcomes] == [
        ("first", "right", "ok"),
        ("first", "wrong", "wrong"),
        ("first", "missing", "unavailable"),
        ("first", "dies", "failed"),
        ("first", "zero-time", "ok"),
        ("second", "right", "ok"),
        ("second", "wrong", "wrong"),
        ("second", "missing", "unavailable"),
        ("second", "dies", "failed"),  # when a sequence of the case is tried alone, as in the first case
        ("second", "zero-time", "ok"),
    ]
    assert outcomes[8].reason is not None
    assert outcomes[8].reason.startswith("determinism: ")
    assert list(tmp_path.iterdir()) == []


def test_cases_are_checked_side_by_side_with_the_same_outcome(tmp_path: Path) -> None:
    study = make_study(tmp_path, "right", "wrong", "missing", "dies", "zero-time")
    alone, together = (
        check_study(study, families=("normal",), jobs=jobs, setup=SETUP, deadline_s=DEADLINE_S) for jobs in (1, 2)
    )
    assert together == alone
    path = tmp_path / "checks.jsonl"
    check_study(study, families=("normal",), records=path, jobs=2, setup=SETUP, deadline_s=DEADLINE_S)
    kinds = [r["kind"] for r in record.read(path)]
    assert kinds == ["run", *["check"] * len(alone)]


def test_a_check_says_where_the_time_went(tmp_path: Path) -> None:
    study = make_study(tmp_path, "right", "hangs", cases=(FIRST,))
    console = Console(record=True, width=200)
    check_study(study, families=("normal",), setup=SETUP, deadline_s=3, console=console)
    (line,) = (line for line in console.export_text().splitlines() if line.startswith("seconds by step"))
    assert re.search(r": (normal|plan) \d+", line), line


def interrupt_when(complete: Callable[[], bool]) -> threading.Event:
    """Send this process Ctrl-C once something is complete; the event is set right before."""
    interrupted = threading.Event()

    def interrupt() -> None:
        while not complete():
            time.sleep(0.05)
        interrupted.set()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # not to the main thread, which waits

    threading.Thread(target=interrupt, daemon=True).start()
    return interrupted


def test_a_check_that_is_interrupted_ends_at_once_and_keeps_what_was_complete(tmp_path: Path, monkeypatch) -> None:
    """The second case stalls for good; the first, without keys, is complete when Ctrl-C comes."""
    monkeypatch.setenv(fakes.STALL_VARIABLE, "1")
    first = replace(FIRST, problem=replace(FIRST.problem, kv_lens=(0,)))
    study = make_study(tmp_path, "right", "stalls", cases=(first, SECOND))
    path = tmp_path / "checks.jsonl"
    interrupted = interrupt_when(lambda: path.exists() and path.read_bytes().count(b'"first"') == 2)
    with pytest.raises(KeyboardInterrupt):
        check_study(study, families=("normal",), records=path, jobs=2, setup=SETUP, deadline_s=600)
    assert interrupted.is_set()
    assert [r["case"] for r in record.read(path) if r["kind"] == "check"] == ["first", "first"]


def test_a_run_is_interrupted_whichever_thread_the_signal_reaches(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(fakes.STALL_VARIABLE, "1")
    first = replace(FIRST, problem=replace(FIRST.problem, kv_lens=(0,)))
    study = make_study(tmp_path, "right", "stalls", cases=(first, SECOND))
    path = tmp_path / "records.jsonl"
    interrupted = interrupt_when(lambda: path.exists() and b'"first"' in path.read_bytes())
    with pytest.raises(KeyboardInterrupt):
        run_study(study, setup=SETUP, deadline_s=600)
    assert interrupted.is_set()
    assert {r["case"] for r in record.read(path) if r["kind"] == "measurement" and r["case"]} == {"first"}


def test_as_many_cases_are_checked_side_by_side_as_the_device_holds(tmp_path: Path) -> None:
    problem = DecodeProblem(kv_lens=(4096,) * 64, heads_q=32, heads_kv=8, head_dim=128)
    cases = tuple(Case(name=f"case{i}", problem=problem, seed=0) for i in range(6))
    study = make_study(tmp_path, "right", cases=cases)
    cores = (os.cpu_count() or 1) // 2
    assert _jobs_that_fit(study, None) == 1
    assert _jobs_that_fit(study, 24 << 30) == 1
    assert _jobs_that_fit(study, 141 << 30) == max(1, min(6, cores))
    assert _jobs_that_fit(make_study(tmp_path, "right", cases=cases[:1]), 141 << 30) == 1


def test_check_records_say_what_every_probe_found(tmp_path: Path) -> None:
    study = make_study(tmp_path, "right", "wrong", "forgets", "zero-time")
    path = tmp_path / "checks.jsonl"
    check_study(study, families=("normal", "exact"), records=path, setup=SETUP, deadline_s=DEADLINE_S)
    run, *rows = record.read(path)
    assert run["kind"] == "run"
    assert [(r["case"], r["impl"], r["status"], r["check"]["family"]) for r in rows if r["case"] == "first"] == [
        ("first", "right", "ok", None),
        ("first", "wrong", "wrong", "normal"),
        ("first", "forgets", "wrong", "normal again"),
        ("first", "zero-time", "ok", None),
    ]
    right = rows[0]["check"]
    names = ["normal", "normal again", "normal memory", "normal layout", "normal repeat", "exact"]
    assert [f"{p['family']} {p['probe']}".removesuffix(" values") for p in right["probes"]] == names
    assert (right["same_input_ulp"], right["other_batch_ulp"], right["one_split_ulp"]) == (0, 0, 0)
    assert [(pair["impl"], pair["rel_l2"]) for pair in right["pairs"]] == [("zero-time", 0.0)]


@pytest.mark.gpu
@pytest.mark.alone
def test_the_real_timer_and_bound_go_on_past_a_lost_device(tmp_path: Path) -> None:
    catalog = {
        "poisons": "tests.harness.fakes:Poisons",
        "not-capturable": "tests.harness.fakes:NotCapturable",
        "copies": "tests.harness.fakes:Copies",
        "torch-sdpa": "impls.torch_attention:TorchSdpa",
    }
    problem = DecodeProblem(kv_lens=(4096, 100), heads_q=8, heads_kv=8, head_dim=128)
    study = make_study(tmp_path, *catalog, cases=(Case(name="case", problem=problem, seed=0),))
    run_study(study, setup=Setup(device="cuda", catalog=catalog))
    rows = measurements(study)
    assert rows["case", "poisons"]["status"] == "failed"
    assert "CUDA" in rows["case", "poisons"]["reason"]
    assert rows["case", "not-capturable"]["status"] == "failed"
    assert rows["case", "not-capturable"]["reason"].startswith("CUDA graph capture: ")
    assert rows["case", "copies"]["status"] == "wrong"
    for key in (("case", "torch-sdpa"), ("case", "stream-read"), (None, "read-ceiling")):
        assert rows[key]["status"] == "ok", rows[key]["reason"]
    bound, sdpa = rows["case", "stream-read"]["timing"], rows["case", "torch-sdpa"]["timing"]
    assert (bound["method"], bound["cache"], bound["kernels"]) == ("graph", "cold", 1)
    assert len(bound["samples"]) == len(sdpa["samples"]) >= 20
    assert bound["working_set_bytes"] == sdpa["working_set_bytes"] >= 3 * problem.kv_bytes
