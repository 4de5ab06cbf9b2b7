"""The loop of a tuning, with fakes of known fate in place of kernels, timer and bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import record
from harness.compiler import Compiler, variant
from harness.loop import Display
from harness.runner import RunError
from harness.study import Study
from harness.tune import Summary, told, tune_study
from harness.worker import Row, Setup, WorkerLost
from impls.problem import DecodeProblem
from impls.space import Configuration
from tests.harness.fake_tunable import LOG_VARIABLE
from tests.harness.test_runner import FIRST, SECOND, interrupt_when, make_study

SETUP = Setup(
    device="cpu",
    catalog={
        **{name: f"tests.harness.fake_tunable:{name}" for name in ("Tunable", "BestAlready", "OwnChoiceIsWrong")},
        **{name: f"tests.harness.fakes:{name}" for name in ("Right", "Missing")},
    },
    timer="tests.harness.fake_tunable:StrictTimer",
    bound="tests.harness.fakes:Bound",
)


def tune(study: Study, *impls: str, jobs: int = 1, **more: Any) -> Summary:
    return tune_study(study, impls=impls, jobs=jobs, setup=SETUP, deadline_s=20.0, **more)


def trials(study: Study, stage: str) -> list[dict[str, Any]]:
    return [r for r in record.read(study.folder / "tuning.jsonl") if r.get("stage") == stage]


def by_tile(rows: list[dict[str, Any]]) -> dict[tuple[str, int | None], dict[str, Any]]:
    found = {(r["tuning"].get("tile", "own"), r["tuning"].get("num_splits")): r for r in rows}
    assert len(found) == len(rows), "a configuration was written twice"
    return found


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """One case, tuned; compiled in two other processes."""
    study = make_study(tmp_path_factory.mktemp("tuned"), "Right", cases=(FIRST,))
    summary = tune(study, "Tunable", jobs=2)
    assert summary.succeeded
    return study


def test_every_configuration_has_one_record_with_its_fate(study: Study) -> None:
    rows = by_tile(trials(study, "screen"))
    assert {key: row["status"] for key, row in rows.items()} == {
        ("own", None): "ok",
        **{(tile, n): "ok" for tile in ("slow", "fast", "middling") for n in (1, 2, 3)},
        **{("wrong", n): "wrong" for n in (1, 2, 3)},
        **{("dies", n): "failed" for n in (1, 2, 3)},
        **{("does-not-compile", n): "failed" for n in (1, 2, 3)},
        **{("too-fast", n): "invalid" for n in (1, 2, 3)},
        ("large", None): "unsupported",
    }
    assert rows["large", None]["reason"] == "shared memory: expected <= 10 bytes a CTA, got 20"
    assert rows["does-not-compile", 2]["reason"] == "compile: RuntimeError: ptxas: out of registers"
    assert rows["dies", 1]["reason"] == "check: the process ended with exit code 7"
    assert rows["dies", 3]["reason"] == "not tried: its kernel took 2 workers with it"
    assert "faster than memory" in rows["too-fast", 1]["reason"]


def test_a_record_names_the_shape_and_its_run_the_device_and_libraries(study: Study) -> None:
    run, *rows = record.read(study.folder / "tuning.jsonl")
    assert (run["kind"], run["study"]) == ("run", study.name)
    assert {"device", "gpu", "driver", "torch", "triton", "tilelang", "git"} <= run["env"].keys()
    assert (run["env"]["method"], run["env"]["cache"]) == ("fake", "cold")
    for row in rows:
        assert row["run_id"] == run["run_id"]
        assert DecodeProblem.from_dict(row["problem"]) == FIRST.problem
        assert row["seed"] == FIRST.seed


def test_the_same_plan_is_not_timed_twice(study: Study) -> None:
    rows = by_tile(trials(study, "screen"))
    for tile in ("slow", "fast", "middling"):
        assert rows[tile, 3]["same_as"] == {"tile": tile, "num_splits": 2}
        assert rows[tile, 3]["timing"] is None
        assert rows[tile, 2]["timing"]["samples"]
    assert rows["wrong", 3]["status"] == "wrong"  # as its twin


def test_what_is_wrong_is_never_timed_and_never_compared(study: Study) -> None:
    # The timer ends the process that times a wrong plan: then the status would be failed.
    rows = trials(study, "screen")
    assert [r["timing"] for r in rows if r["tuning"].get("tile") == "wrong"] == [None] * 3
    compared = [r["tuning"].get("tile", "own") for r in trials(study, "final")]
    assert set(compared) == {"own", "fast", "middling"}
    assert {r["status"] for r in trials(study, "final")} == {"ok"}


def test_the_best_are_compared_with_the_own_choice_in_shared_rounds(study: Study) -> None:
    rows = trials(study, "final")
    assert rows[0]["tuning"] == {}
    assert [r["tuning"] for r in rows[1:]] == [
        {"tile": "fast", "num_splits": 1},
        {"tile": "fast", "num_splits": 2},
        {"tile": "middling", "num_splits": 1},
        {"tile": "middling", "num_splits": 2},
    ]
    rounds = [[s["round"] for s in r["timing"]["samples"]] for r in rows]
    assert rounds == [rounds[0]] * 5
    assert len(rounds[0]) >= 4


def test_a_finished_tuning_is_left_alone_unless_it_is_asked_for_anew(study: Study) -> None:
    path = study.folder / "tuning.jsonl"
    before = path.read_bytes()
    again = tune(study, "Tunable")
    assert path.read_bytes() == before
    assert [row.regret.median for row in again.tuned if row.regret] == [2.0]


def test_an_interrupted_tuning_tries_only_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "log"))
    study = make_study(tmp_path, "Right", cases=(SECOND,))
    tune(study, "BestAlready")
    path = tmp_path / "tuning.jsonl"
    whole = path.read_text(encoding="utf-8").splitlines(keepends=True)
    assert [line.startswith('{"kind":"run"') for line in whole] == [True, False, False, False, False]

    (tmp_path / "log").unlink()
    path.write_text("".join(whole[:2]) + whole[2][:50], encoding="utf-8")  # killed as it wrote its second trial
    with pytest.warns(record.RecordWarning, match="half-written"):
        tune(study, "BestAlready")
    assert [r["tuning"] for r in trials(study, "screen")] == [{}, {"tile": "slow"}]
    assert [r["tuning"] for r in trials(study, "final")] == [{}, {"tile": "slow"}]
    assert len({r["run_id"] for r in record.read(path)}) == 1
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["plan 3 slow 1", "time 3 slow 1"]  # and not its own choice, which was there


def test_no_case_is_begun_after_the_budget(tmp_path: Path) -> None:
    study = make_study(tmp_path, "Right")
    summary = tune(study, "BestAlready", budget_s=0.0)
    assert summary.left == ("first", "second")
    assert (summary.tuned, summary.succeeded) == ((), False)
    summary = tune(study, "BestAlready", cases=["second"])
    assert ([row.case for row in summary.tuned], summary.left) == (["second"], ())


def test_the_own_choice_may_be_the_best(tmp_path: Path) -> None:
    (row,) = tune(make_study(tmp_path, "Right", cases=(FIRST,)), "BestAlready").tuned
    assert row.regret is not None
    assert (row.best, row.regret.median, row.regret.low, row.regret.high) == ({}, 1.0, 1.0, 1.0)
    assert told(row).endswith(" µs, and nothing tried is faster")


def test_without_a_right_own_choice_there_is_no_regret(tmp_path: Path) -> None:
    summary = tune(make_study(tmp_path, "Right", cases=(SECOND,)), "OwnChoiceIsWrong")
    (row,) = summary.tuned
    assert row.regret is None
    assert row.reason is not None
    assert row.reason.startswith("own choice: wrong: ")
    assert not summary.succeeded


def test_what_has_no_space_or_is_not_here_says_so(tmp_path: Path) -> None:
    summary = tune(make_study(tmp_path, "Right", cases=(FIRST,)), "Right", "Missing")
    assert [row.reason for row in summary.tuned] == [
        "own choice: unsupported: Right: expected an implementation that declares a space, got none",
        "own choice: unsupported: import no_such_library: not here",
    ]
    assert told(summary.tuned[1]) == "no comparison: own choice: unsupported: import no_such_library: not here"


def test_a_new_run_takes_the_place_of_the_old_case_and_no_other(tmp_path: Path) -> None:
    study = make_study(tmp_path, "Right")
    first = tune(study, "BestAlready").run_id
    second = tune(study, "BestAlready", fresh=True, cases=["first"]).run_id
    rows = [r for r in record.read(tmp_path / "tuning.jsonl") if r["kind"] == "trial"]
    assert {(r["case"], r["run_id"]) for r in rows} == {("second", first), ("first", second)}
    assert len(rows) == 8


def test_a_case_with_another_problem_is_tuned_again(tmp_path: Path) -> None:
    study = make_study(tmp_path, "Right", cases=(FIRST,))
    tune(study, "BestAlready")
    longer = replace(FIRST, problem=replace(FIRST.problem, kv_lens=(40,)))
    tune(replace(study, cases=(longer,)), "BestAlready")
    rows = [r for r in record.read(tmp_path / "tuning.jsonl") if r["kind"] == "trial"]
    assert [r["problem"]["kv_lens"] for r in rows] == [[40]] * 4


def test_an_unknown_case_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^--cases: expected some of first, second, got 'third'$"):
        tune(make_study(tmp_path, "Right"), "Tunable", cases=["third"])


def point(x: int, splits: int = 1) -> Configuration:
    """A configuration with a tile of its own kernel."""
    return Configuration({"x": x}, {"num_splits": splits}, kernel=f"kernel {x}")


def test_kernels_are_compiled_for_a_shape_and_not_for_lengths_or_splits() -> None:
    one = variant(FIRST.problem, "a", point(1))
    assert variant(replace(FIRST.problem, kv_lens=(9, 9)), "a", point(1, splits=2)) == one
    others = [
        variant(replace(FIRST.problem, head_dim=128), "a", point(1)),
        variant(replace(FIRST.problem, dtype="bfloat16"), "a", point(1)),
        variant(FIRST.problem, "b", point(1)),
        variant(FIRST.problem, "a", point(2)),
    ]
    assert len({one, *others}) == 5


class Pool:
    """In place of a worker pool: does not start, or dies in its first task."""

    def __init__(self, *, starts: bool) -> None:
        self.starts = starts
        self.asked: list[object] = []

    @property
    def ready(self) -> object:
        if not self.starts:
            raise WorkerLost(None, "start: no answer within 300 s")
        return object()

    def ask(self, task: object) -> Iterator[Row]:
        self.asked.append(task)
        if len(self.asked) == 1:
            raise WorkerLost(0, "compile: the process died of SIGSEGV")
        yield Row(who=0, status="ok", compile_ms=1.0)


class StallingPool(Pool):
    """Compiles until it is killed, or for longer than a test should take."""

    def __init__(self) -> None:
        super().__init__(starts=True)
        self.killed = threading.Event()

    def ask(self, task: object) -> Iterator[Row]:
        self.asked.append(task)
        self.killed.wait(30)
        raise WorkerLost(0, "compile: the process died of SIGKILL")
        yield

    def kill(self) -> None:
        self.killed.set()


def test_compiling_is_interrupted_whichever_thread_the_signal_reaches() -> None:
    pools: Any = [StallingPool(), StallingPool()]
    interrupted = interrupt_when(lambda: all(pool.asked for pool in pools))
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Compiler(pools, Display(None, total=1)).compile(FIRST, [("a", point(n)) for n in range(9)])
    assert time.monotonic() - started < 20
    assert interrupted.is_set()
    assert all(pool.killed.is_set() for pool in pools)
    assert sum(len(pool.asked) for pool in pools) == len(pools)  # what was waiting is not begun


def test_a_compiler_that_does_not_start_is_no_fault_of_the_kernel() -> None:
    pool: Any = Pool(starts=False)
    assert Compiler([pool], Display(None, total=1)).compile(FIRST, [("a", point(1))]) == {}
    assert pool.asked == []


def test_a_kernel_is_compiled_once_for_all_cases_of_a_shape_and_what_kills_its_compiler_is_remembered() -> None:
    pool: Any = Pool(starts=True)
    compiler = Compiler([pool], Display(None, total=1))
    wanted = [("a", point(1)), ("a", point(2)), ("a", point(1, splits=2))]
    bad = {variant(FIRST.problem, "a", point(1)): "compile: the process died of SIGSEGV"}
    assert compiler.compile(FIRST, wanted) == bad
    assert compiler.compile(SECOND, [*wanted, ("a", point(3))]) == bad
    assert [(task.case, task.entry.tuning) for task in pool.asked] == [
        (FIRST, {"x": 1, "num_splits": 1}),
        (FIRST, {"x": 2, "num_splits": 1}),
        (SECOND, {"x": 3, "num_splits": 1}),
    ]
