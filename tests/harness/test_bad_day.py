"""One bad day, looked at from all sides: every way to fail in one run of the loop, and what stays true then."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from harness.runner import RunSummary
from tests.harness import fakes
from tests.harness.test_runner import CATALOG, FIRST, make_study, measurements, run

pytestmark = pytest.mark.xdist_group("bad day")  # it is long: one worker lives through it, once


@pytest.fixture(scope="module")
def bad_day(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[RunSummary, Mapping[tuple[str | None, str], Any], str]:
    """All fakes but the stalling one, on two cases; the lethal ones strike on the first."""
    study = make_study(tmp_path_factory.mktemp("bad-day"), *(name for name in CATALOG if name != "stalls"))
    console = Console(file=io.StringIO(), width=200)
    summary = run(study, console=console)
    assert isinstance(console.file, io.StringIO)
    return summary, measurements(study), console.file.getvalue()


@pytest.mark.parametrize(
    ("impl", "status", "reason"),
    [
        ("right", "ok", None),
        ("wrong", "wrong", "row"),
        ("forgets", "wrong", "after the timed calls: "),
        ("raises", "failed", "check: ValueError: no such stride"),
        ("raises-later", "failed", "time: RuntimeError: launch failed"),
        ("out-of-memory", "failed", "check: out of memory: tried to allocate 3 GiB"),
        ("refuses", "unsupported", "workspace: expected at most 10 bytes, got 20"),
        ("unsupported", "unsupported", "head_dim: expected 256, got 64"),
        ("missing", "unavailable", "import no_such_library: not here"),
        ("no-such-file", "unavailable", "NoSuchClass"),
        ("kills-on-import", "unavailable", "import: the process died of SIGSEGV"),
        ("nan-time", "invalid", "samples[0]: expected a finite time > 0, got nan"),
        ("zero-time", "invalid", "got 0 µs"),
        ("negative-time", "invalid", "got -3 µs"),
    ],
)
def test_each_fault_has_its_status_and_reason_on_every_case(
    bad_day: Any, impl: str, status: str, reason: str | None
) -> None:
    for case in ("first", "second"):
        row = bad_day[1][case, impl]
        assert row["status"] == status, row["reason"]
        assert (row["reason"] is None) if reason is None else (reason in row["reason"])


@pytest.mark.parametrize(
    ("impl", "reason"),
    [
        ("dies", "check: the process ended with exit code 7"),
        ("dies-later", "time: the process died of SIGABRT"),
        ("hangs", "check: no answer within 6 s; the process was killed"),
    ],
)
def test_who_takes_the_worker_along_fails_alone_and_only_there(bad_day: Any, impl: str, reason: str) -> None:
    assert (bad_day[1]["first", impl]["status"], bad_day[1]["first", impl]["reason"]) == ("failed", reason)
    assert bad_day[1]["second", impl]["status"] == "ok"


def test_faster_than_memory_is_invalid_where_there_is_something_to_read(bad_day: Any) -> None:
    row = bad_day[1]["first", "too-fast"]
    assert FIRST.problem.kv_bytes == 9472  # at 1.03 x 1 GB/s
    assert row["status"] == "invalid"
    assert "faster than memory: expected at least 9.2 µs for 9472 bytes" in row["reason"]
    assert [sample["us"] for sample in row["timing"]["samples"]] == [0.008] * 4


def test_a_time_that_is_no_number_is_kept_as_null(bad_day: Any) -> None:
    assert [sample["us"] for sample in bad_day[1]["first", "nan-time"]["timing"]["samples"]] == [None] * 4


def test_only_ok_and_invalid_rows_have_times(bad_day: Any) -> None:
    for row in bad_day[1].values():
        assert (row["timing"] is not None) == (row["status"] in ("ok", "invalid"))


def test_an_ok_row_says_how_it_came_about(bad_day: Any) -> None:
    row = bad_day[1]["first", "right"]
    assert row["role"] == "impl"
    assert row["config"] == {"num_splits": "auto", "us": "20", "workspace_bytes": 32}
    assert row["compile_ms"] > 0
    assert row["plan_us"] > 0
    assert row["check"]["finite"] is True
    assert 0 <= row["check"]["worst_row"] <= 1
    assert row["timing"] == {
        "method": "fake",
        "cache": "cold",
        "working_set_bytes": 3 * fakes.inputs_bytes(FIRST.problem),
        "input_sets": 3,
        "calls_per_sample": 10,
        "kernels": 2,
        "host": None,
        "breakdown": None,
        "clocks": {
            "sm_mhz": [[1980, 1980, 1980]] * 4,
            "memory_mhz": [[3201, 3201, 3201]] * 4,
            "temperature_c": [[40, 40, 40]] * 4,
            "power_w": [[500.0, 500.0, 500.0]] * 4,
            "reasons": [[[], [], []]] * 4,
        },
        "samples": [{"round": i, "us": 20.0, "throttled": False} for i in range(4)],
    }


def test_the_bound_is_the_fastest_of_its_sweep_and_shares_the_rounds(bad_day: Any) -> None:
    row = bad_day[1]["second", "stream-read"]
    assert (row["role"], row["status"], row["check"]) == ("bound", "ok", None)
    assert row["config"]["us"] == "32"
    assert [config["us"] for config in row["config"]["sweep"]] == [40.0, 32.0, 36.0]
    assert [sample["round"] for sample in row["timing"]["samples"]] == [0, 1, 2, 3]


def test_the_read_ceiling_is_measured_once(bad_day: Any) -> None:
    row = bad_day[1][None, "read-ceiling"]
    assert (row["role"], row["status"], row["config"]["bytes"]) == ("bound", "ok", 32000)
    assert len(row["timing"]["samples"]) == 4


def test_the_summary_counts_what_the_records_hold(bad_day: Any) -> None:
    summary, rows, _ = bad_day
    assert summary.succeeded
    assert summary.resumed == 0
    assert sum(summary.counts.values()) == 2 * (len(CATALOG) - 1) == len(rows) - 3
    assert list(summary.counts) == ["ok", "wrong", "unsupported", "unavailable", "failed", "invalid"]
    assert (summary.ok_cases("right"), summary.ok_cases("hangs"), summary.ok_cases("wrong")) == (2, 1, 0)


def test_the_console_shows_each_row(bad_day: Any) -> None:
    lines = [" ".join(line.split()) for line in bad_day[2].splitlines()]
    assert "first right ok 20 µs" in lines
    assert "second missing unavailable import no_such_library: not here" in lines
