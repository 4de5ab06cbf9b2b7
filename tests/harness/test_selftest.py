"""The harness's measurements of itself: the parent with fake experiments, the report with trials of known truth."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from harness import record, selftest
from harness.render import render_study
from harness.render.timing import SIZES
from harness.runner import RunError
from harness.selftest import ALONE, ANEW, EXAMPLE_CASES, EXPERIMENTS, OF_STUDY, run_selftest
from harness.study import Case, Entry, Study, load_study
from impls.problem import DecodeProblem
from tests.harness import fake_experiments
from tests.harness import fake_records as fake
from tests.harness.test_render import tables_of

PROBLEM = DecodeProblem(kv_lens=(64,), heads_q=2, heads_kv=1, head_dim=64, dtype="float16")
STUDY = Study(
    name="some",
    title="Some",
    cases=tuple(Case(name=name, problem=PROBLEM, seed=0) for name in ("b1_1k", "b1_8k", "other")),
    entries=(Entry(impl="torch-sdpa", tuning={}),),
    path=Path("some.toml"),
)
BOTH = ("b1_1k", "b1_8k")


def run(
    folder: Path,
    *experiments: str,
    said: list[str] | None = None,
    target: str = "serve",
    fresh: bool = False,
    study: Study = STUDY,
) -> bool:
    return run_selftest(
        study,
        folder,
        experiments=experiments or EXPERIMENTS,
        say=(said if said is not None else []).append,
        target=f"tests.harness.fake_experiments:{target}",
        fresh=fresh,
        device="cuda",
        liars=fake_experiments.liars,
    )


def rows(folder: Path) -> list[dict[str, Any]]:
    return [r for r in record.read(folder / record.SELFTEST_FILE) if r["kind"] == "trial"]


def trials(folder: Path) -> list[tuple[str, str]]:
    return [(r["experiment"], r["case"]) for r in rows(folder) if r["experiment"] not in ("done", "failed")]


def test_every_experiment_takes_its_cases_and_none_twice(tmp_path: Path) -> None:
    assert run(tmp_path)
    cases = {
        **dict.fromkeys(("identical", "sensitivity", "timers", "profilers", "nvbench"), BOTH),
        "planning": ("b1_8k",),
        "example": tuple(case.name for case in EXAMPLE_CASES),
        "liars": ("liars_small", "liars_large"),
    }
    wanted = [(name, case) for name in EXPERIMENTS for case in cases[name]]
    assert trials(tmp_path) == wanted
    markers = [r for r in rows(tmp_path) if r["experiment"] == "done"]
    assert [(r["impl"], r["case"]) for r in markers] == wanted
    assert all(r["seconds"] >= 0 for r in markers)
    assert len({r["run_id"] for r in markers}) == 1
    before = (tmp_path / record.SELFTEST_FILE).read_bytes()
    said: list[str] = []
    assert run(tmp_path, "identical", "liars", said=said)
    assert said == []
    assert (tmp_path / record.SELFTEST_FILE).read_bytes() == before
    assert run(tmp_path, "identical", fresh=True)
    assert trials(tmp_path) == wanted[:2]


def test_profilers_share_their_process_with_nobody(tmp_path: Path) -> None:
    assert run(tmp_path)
    processes: dict[str, set[int]] = {}
    for row in rows(tmp_path):
        if "pid" in row:
            processes.setdefault(row["experiment"], set()).add(row["pid"])
    shared = [pids for name, pids in processes.items() if name not in ALONE]
    assert all(pids == shared[0] for pids in shared)
    assert len(shared[0]) == 1
    for name in ALONE:
        assert len(processes[name]) == (2 if name in ANEW else 1), "nvbench runs once in a process: two cases, two"
        others = set[int]().union(*(pids for other, pids in processes.items() if other != name))
        assert processes[name].isdisjoint(others)


def test_a_study_without_the_chosen_cases_gives_all_of_its_own(tmp_path: Path) -> None:
    study = Study(
        name="own",
        title="Own",
        cases=(Case(name="mine", problem=PROBLEM, seed=0),),
        entries=STUDY.entries,
        path=STUDY.path,
    )
    assert run(tmp_path, *OF_STUDY, study=study)
    assert trials(tmp_path) == [(name, "mine") for name in OF_STUDY]


def test_the_chosen_cases_are_of_the_default_study() -> None:
    cases = {case.name: case.problem for case in load_study("h200-decode").cases}
    for names in OF_STUDY.values():
        assert set(names) <= set(cases)
    sizes = [cases[name].kv_bytes for name in selftest.COMPARED_CASES]
    assert [sum(n < most for n in sizes) for most in SIZES.values()] == [3, 6, 9]
    assert len({(cases[n].heads_q, cases[n].heads_kv, cases[n].head_dim) for n in selftest.COMPARED_CASES}) == 1
    assert not any(n % 64 for name in selftest.PLANNED_CASES for n in cases[name].kv_lens)


@pytest.mark.parametrize(
    ("how", "reason"), [("raise", "identical: b1_8k: ValueError: no such luck"), ("die", "b1_8k: the process died")]
)
def test_what_was_complete_is_kept_and_the_rest_is_done_later(
    how: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fake_experiments.BAD, how)
    said: list[str] = []
    assert not run(tmp_path, "identical", said=said)
    assert reason in said[-1]
    assert trials(tmp_path) == [("identical", "b1_1k")]
    failed = [(r["impl"], r["case"], r["reason"]) for r in rows(tmp_path) if r["experiment"] == "failed"]
    assert failed == [("identical", "b1_8k", reason.removeprefix("identical: "))]
    monkeypatch.delenv(fake_experiments.BAD)
    assert run(tmp_path, "identical")
    assert trials(tmp_path) == [("identical", "b1_1k"), ("identical", "b1_8k")]
    assert len({r["run_id"] for r in record.read(tmp_path / record.SELFTEST_FILE)}) == 1


def test_a_process_that_died_takes_no_other_experiment_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fake_experiments.BAD, "die")
    assert not run(tmp_path, "identical", "sensitivity", "example")
    assert trials(tmp_path) == [
        ("identical", "b1_1k"),
        ("sensitivity", "b1_1k"),
        *(("example", case.name) for case in EXAMPLE_CASES),
    ]


def test_without_a_gpu_nothing_is_written(tmp_path: Path) -> None:
    said: list[str] = []
    assert not run(tmp_path, "identical", said=said, target="refuse")
    assert "expected a CUDA device" in said[0]
    assert not (tmp_path / record.SELFTEST_FILE).exists()


def test_an_unknown_experiment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"experiment: expected one of identical, .*, got 'x'"):
        run(tmp_path, "x")


def test_only_an_experiment_that_answers_too_late_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "STEP_DEADLINE_S", 0.0)
    said: list[str] = []
    assert not run(tmp_path, "identical", "sensitivity", said=said)
    assert said == [f"{name}: start: no answer within 0 s" for name in ("identical", "sensitivity")]


def test_on_a_cpu_the_liars_go_through_the_real_loop(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        assert run_selftest(STUDY, tmp_path, experiments=["liars"], device="cpu", say=said.append)
    assert said == ["liars: liars_small, liars_large"]
    found = [r for r in rows(tmp_path) if r["experiment"] == "liars"]
    assert {r["status"] for r in found if r["control"]} == {"ok"}
    assert {r["status"] for r in found if not r["control"]} == {"wrong", "invalid"}
    text = render_study([tmp_path]).read_text()
    assert "All 5 liars ended as `wrong` or `invalid` on every case they were tried on" in text
    assert "| `clock-zero` | its timer says 0 | `liars_small` | invalid |" in text


# The report


def samples(rng: Random, us: float, n: int = 20) -> list[float | None]:
    return [us * rng.gauss(1.0, 0.002) for _ in range(n)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timing")
    rng = Random(3)
    path = folder / record.SELFTEST_FILE
    rows = [record.run_record("run-1", "h200-decode", fake.GPU_ENV)]
    for case, kv_bytes in (("small", 4e6), ("large", 6e8)):
        head = {"kind": "trial", "schema": 1, "run_id": "run-1", "case": case, "kv_bytes": kv_bytes}
        for trial in range(60):
            us = 20.0 if case == "small" else 150.0
            pair = {"a": samples(rng, us), "b": samples(rng, us)}
            if trial == 7:
                pair["a"][3] = None  # a throttled round
            rows.append(head | {"impl": "triton-splitkv", "experiment": "identical", "trial": trial} | pair)
        for effect in (0.0005, 0.005, 0.05):
            for trial in range(20):
                pair = {"a": samples(rng, 20.0), "b": samples(rng, 20.0 * (1 + effect))}
                about = {"impl": "spinning-read", "experiment": "sensitivity", "trial": trial, "effect": effect}
                rows.append(head | about | pair)
        for timer, us in (("graph", 14.0), ("events", 16.0), ("triton do_bench", 16.5), ("nvbench", None)):
            row = head | {"impl": "triton-splitkv", "experiment": "timers", "timer": timer, "us": us}
            rows.append(row | ({"reason": "ImportError: no cuda"} if us is None else {}))
        rows.append(head | {"impl": "flash-attn-3", "experiment": "timers", "timer": "events", "us": 30.0})
        rows.append(head | {"impl": "flash-attn-3", "experiment": "timers", "timer": "triton do_bench", "us": 40.0})
        rows.append(head | {"impl": "identical", "experiment": "done"})
    for row in rows:
        record.append(path, row)
    render_study([folder])
    return folder


def test_false_verdicts_are_counted_with_the_threshold_off_and_on(report: Path) -> None:
    [same, *_] = tables_of((report / "README.md").read_text())
    hits = int(same[2][1].split(" of ")[0])
    assert same[2][1].startswith(f"{hits} of 120: {hits / 1.2:.1f} % [")
    assert 0 <= hits <= 14
    assert same[2][2].startswith("0 of 120: 0.0 %")
    assert same[-1][0] == "all"


def test_the_smallest_slowdown_that_is_found_is_stated_by_size(report: Path) -> None:
    text = (report / "README.md").read_text()
    assert (
        "The smallest slowdown found in 95 % of trials, of those tried: with the threshold off 0.5 % (under 64 MB"
        " of K and V) and 0.5 % (over 400 MB); with it on 5 % (under 64 MB of K and V) and 5 % (over 400 MB)."
        in text
    )
    table = tables_of(text)[1]
    assert table[0] == ["size", "slowed by", "found, threshold off", "found, threshold on", "measured, median"]
    found = {line[1]: (line[2].split(":")[0], line[3].split(":")[0]) for line in table[2:]}
    assert found["5 %"] == ("20 of 20", "20 of 20")
    assert found["0.5 %"] == ("20 of 20", "0 of 20")
    measured = [float(line[4].split()[0]) for line in table[2:] if line[1] == "5 %"]
    assert measured == pytest.approx([5.0, 5.0], abs=0.1)


def test_timers_are_grouped_by_what_they_claim_to_measure(report: Path) -> None:
    text = (report / "README.md").read_text()
    graph, events = tables_of(text)[2:]
    assert graph[0] == ["case", "implementation", "`graph`"]
    assert events[0] == ["case", "implementation", "`events`", "`triton do_bench`", "agree with ours"]
    assert [line[-1] for line in events[2:4]] == ["1 of 1 (farthest +3.1 %)", "**0 of 1 (farthest +33.3 %)**"]
    assert "- `nvbench` did not work, so nothing was timed with it: ImportError: no cuda." in text
    assert "Kernels alone" not in text


def test_the_report_has_its_figures_and_is_the_same_twice(report: Path) -> None:
    names = sorted(p.name for p in (report / "figures").iterdir())
    assert names == ["identical.png", "identical.svg", "sensitivity.png", "sensitivity.svg"]
    before = {path: path.read_bytes() for path in report.rglob("*") if path.is_file()}
    render_study([report])
    assert {path: path.read_bytes() for path in report.rglob("*") if path.is_file()} == before


def test_a_file_without_trials_is_named(tmp_path: Path) -> None:
    record.append(tmp_path / record.SELFTEST_FILE, record.run_record("run-1", "x", fake.GPU_ENV))
    with pytest.raises(record.RecordError, match=r"selftest.jsonl: expected a run and its trials, got 1 records"):
        render_study([tmp_path])


# The newer sections


def more(folder: Path, *trials: dict[str, Any]) -> str:
    path = folder / record.SELFTEST_FILE
    record.append(path, record.run_record("run-1", "h200-decode", fake.GPU_ENV))
    for trial in trials:
        record.append(path, {"kind": "trial", "schema": 1, "run_id": "run-1", **trial})
    return render_study([folder]).read_text()


def liar(name: str, status: str, *, control: bool = False, us: float | None = None) -> dict[str, Any]:
    reason = None if status == "ok" else "as | it must"
    about = {"case": "liars_small", "impl": name, "experiment": "liars", "does": f"does {name}", "control": control}
    return about | {"status": status, "reason": reason, "us": us}


def test_liars_are_listed_with_how_they_ended_and_why(tmp_path: Path) -> None:
    text = more(
        tmp_path, liar("honest", "ok", control=True, us=20.0), liar("skips", "wrong"), liar("zero", "invalid")
    )
    assert text.count("All 2 liars ended as `wrong` or `invalid` on every case they were tried on") == 2
    (table,) = tables_of(text)
    assert table[2] == ["`honest`", "does honest", "`liars_small`", "ok", "20.00", ""]
    assert table[3][:5] == ["`skips`", "does skips", "`liars_small`", "wrong", "–"]
    assert "as" in table[3][5]


@pytest.mark.parametrize(
    ("trial", "told"),
    [
        (liar("quick", "ok", us=0.01), "`quick` on `liars_small` (`ok`)"),
        (liar("elsewhere", "failed"), "`elsewhere` on `liars_small` (`failed`)"),
        (liar("honest", "wrong", control=True), "`honest` on `liars_small` (`wrong`)"),
    ],
)
def test_a_liar_that_is_not_caught_is_told_in_bold(trial: dict[str, Any], told: str, tmp_path: Path) -> None:
    text = more(tmp_path, liar("skips", "wrong"), trial)
    assert f"**Of 2 outcomes of liars and their control, 1 should not be: {told}.**" in text
    assert tables_of(text)[0][3][3] == f"**{trial['status']}**"


def test_plans_made_before_and_inside_stand_side_by_side(tmp_path: Path) -> None:
    rng = Random(5)
    head = {"case": "b1_8k", "experiment": "planning", "problem": PROBLEM.to_dict(), "kv_bytes": 4}
    ours = head | {
        **{"impl": "triton-splitkv", "plan_us": 260.0, "before": samples(rng, 14.0), "inside": None, "alone": None},
        **{"kernels": {"before": 2, "inside": None}, "host": {"before": 75.0, "inside": 330.0}},
    }
    paged = head | {
        **{"impl": "flash-attn-3 kvcache, page 64", "plan_us": 25.0, "before": samples(rng, 20.0)},
        **{"inside": [None, *samples(rng, 23.0, 19)], "alone": samples(rng, 2.5)},
        **{"kernels": {"before": 2, "inside": 3}, "host": {"before": 120.0, "inside": 125.0}},
    }
    refused = head | {"impl": "flash-attn-3", "reason": "import flash_attn_interface: not here"}
    text = more(tmp_path, ours, paged, refused)
    (table,) = tables_of(text)
    assert table[2][:2] == ["`b1_8k`", "triton-splitkv"]
    assert [table[2][i] for i in (2, 3, 5, 6, 7, 8, 9)] == ["260.0", "–", "–", "–", "2 / –", "75.00", "330.0"]
    assert table[3][7:] == ["2 / 3", "120.0", "125.0"]
    ratio, verdict = float(table[3][6].split()[0]), table[3][6].split()[-1]
    assert ratio == pytest.approx(1.15, abs=0.01)
    assert verdict == "slower"
    assert "- `b1_8k`, flash-attn-3: import flash\\_attn\\_interface: not here" in text


def test_the_example_has_microseconds_and_tflops(tmp_path: Path) -> None:
    case = EXAMPLE_CASES[0]
    head = {"case": case.name, "experiment": "example", "problem": case.problem.to_dict(), "kv_bytes": 33554432}
    good = head | {"impl": "tilelang-splitkv", "timer": "tilelang do_bench(warmup=500)", "us": 20.0}
    bad = head | {"impl": "triton-splitkv", "timer": None, "us": None, "reason": "wrong: out"}
    text = more(tmp_path, good, bad)
    (table,) = tables_of(text)
    assert table[2:] == [["1 × 8192", "`tilelang-splitkv`", "`tilelang do_bench(warmup=500)`", "20.00", "6.71"]]
    assert "- `example_1x8192`, `triton-splitkv`: wrong: out" in text


def test_what_timers_do_otherwise_is_said_and_agreement_counted(tmp_path: Path) -> None:
    head = {"case": "b1_8k", "impl": "triton-splitkv", "experiment": "timers", "kv_bytes": 4}
    times = {"graph": 14.0, "kernels and gaps": 14.3, "events": 16.0, "nvbench": 25.0, "kernels": 12.0}
    done = {"case": "b1_8k", "impl": "timers", "experiment": "done", "seconds": 12.3}
    text = more(tmp_path, *(head | {"timer": timer, "us": us} for timer, us in times.items()), done)
    assert "agree with them within 3 % or 1 µs in 1 of 2 pairs." in text
    assert "- `nvbench`: the L2 is flushed" in text
    assert "- `nvbench` was installed; its times stand beside those of `events`." in text
    assert "- `triton do_bench`" not in text
    assert "a sample is the median of its calls. The times here were recorded before that" in text
    assert "The experiments took 12 s, without the start of their processes: `timers` 12 s." in text


def test_events_are_told_as_they_are_recorded_now(tmp_path: Path) -> None:
    head = {"case": "b1_8k", "impl": "triton-splitkv", "experiment": "timers", "kv_bytes": 4}
    text = more(tmp_path, head | {"timer": "events", "us": 16.0, "of_calls": "median"})
    assert "the events are made before the first launch, and a sample is the median of its calls.\n" in text
    assert "recorded before that" not in text
    assert "- `nvbench` was not tried." in text


def test_a_missing_nvbench_was_not_installed(tmp_path: Path) -> None:
    head = {"case": "b1_8k", "impl": "triton-splitkv", "experiment": "timers", "kv_bytes": 4}
    missing = head | {"timer": "nvbench", "us": None, "reason": "ModuleNotFoundError: No module named 'cuda.bench'"}
    text = more(tmp_path, head | {"timer": "graph", "us": 16.0}, missing)
    assert "- `nvbench` was not installed, so nothing was timed with it: ModuleNotFoundError:" in text


@pytest.mark.parametrize(
    ("experiment", "told"), [("failed", "b1\\_1k: the process died"), ("done", None), (None, None)]
)
def test_a_time_that_is_missing_has_its_reason_under_the_table(
    experiment: str | None, told: str | None, tmp_path: Path
) -> None:
    head = {"experiment": "timers", "kv_bytes": 4}
    both = [head | {"case": case, "impl": impl} for case in ("b1_8k", "b1_1k") for impl in ("a-kernel", "b-kernel")]
    times = [row | {"timer": "events", "us": 16.0} for row in both]
    times += [row | {"timer": "nvbench", "us": 15.0} for row in both if row["case"] == "b1_8k"]
    times += [both[0] | {"timer": "triton do_bench", "us": 15.5}]
    times += [both[1] | {"timer": "triton do_bench", "us": None, "reason": "RuntimeError: no"}]
    marker = {"case": "b1_1k", "impl": "nvbench", "experiment": "failed", "reason": "b1_1k: the process died"}
    markers = [marker] if experiment else []
    markers += [marker | {"experiment": "done"}] if experiment == "done" else []
    text = more(tmp_path, *times, *markers)
    (table,) = tables_of(text)
    assert table[0][2:5] == ["`events`", "`triton do_bench`", "`nvbench`"]
    assert [line[3:5] for line in table[2:]] == [
        ["15.50", "15.00"],
        ["–<sup>1</sup>", "15.00"],
        ["–<sup>2</sup>", "–<sup>3</sup>"],
        ["–<sup>2</sup>", "–<sup>3</sup>"],
    ]
    why = told or "the run left no record of it there, nor of why"
    assert "<sup>1</sup> `triton do_bench` on `b1_8k`: RuntimeError: no\n" in text
    assert f"<sup>3</sup> `nvbench` on `b1_1k`: {why}\n" in text


def test_a_library_that_is_not_there_says_so_once_a_case(tmp_path: Path) -> None:
    head = {"experiment": "timers", "kv_bytes": 4}
    rows = [
        head | {"case": "b1_8k", "impl": impl, "timer": "events", "us": 16.0} for impl in ("a-kernel", "b-kernel")
    ]
    rows += [
        head | {"case": "b1_1k", "impl": impl, "timer": "events", "us": 16.0} for impl in ("a-kernel", "b-kernel")
    ]
    rows += [head | {"case": "b1_8k", "impl": "a-kernel", "timer": "nvbench", "us": 15.0}]
    rows += [
        head | {"case": "b1_1k", "impl": "a-kernel", "timer": "nvbench", "us": None, "reason": "ImportError: x"}
    ]
    (table,) = tables_of(text := more(tmp_path, *rows))
    assert [line[3] for line in table[2:]] == ["15.00", "–<sup>1</sup>", "–<sup>2</sup>", "–<sup>2</sup>"]
    assert "<sup>2</sup> `nvbench` on `b1_1k`: ImportError: x\n" in text


@pytest.mark.parametrize(("device", "told"), [("cuda", True), ("cpu", False)])
def test_how_the_memory_ceiling_is_known_is_said_where_there_is_one(
    device: str, told: bool, tmp_path: Path
) -> None:
    env = fake.GPU_ENV if device == "cuda" else fake.CPU_ENV
    path = tmp_path / record.SELFTEST_FILE
    record.append(path, record.run_record("run-1", "x", env))
    record.append(path, {"kind": "trial", "schema": 1, "run_id": "run-1", **liar("skips", "wrong")})
    text = render_study([tmp_path]).read_text()
    assert (
        "their bytes at 1.03 × the device's read ceiling. The ceiling is the fastest read of 4 GiB" in text
    ) == told


def test_what_launches_wait_for_is_told_beside_the_host(tmp_path: Path) -> None:
    env = {**fake.GPU_ENV, "cpu": "Some CPU", "cpu_count": 4}
    path = tmp_path / record.SELFTEST_FILE
    head = {"case": "b1_8k", "impl": "triton-splitkv", "experiment": "timers", "kv_bytes": 4}
    record.append(path, record.run_record("run-1", "x", env))
    for timer in ("graph", "events"):
        record.append(path, {"kind": "trial", "schema": 1, "run_id": "run-1", **head, "timer": timer, "us": 16.0})
    text = render_study([tmp_path]).read_text()
    assert text.count("Host: Some CPU, 4 logical cores.") == 1
    assert "differs from one moment to the next. Host: Some CPU, 4 logical cores." in text
