"""The harness's measurements of itself: the parent with fake experiments, the report with trials of known truth."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from harness import record, selftest
from harness.render import render_study
from harness.runner import RunError
from harness.selftest import EXPERIMENTS, run_selftest
from harness.study import Case, Entry, Study
from impls.problem import DecodeProblem
from tests.harness import fake_experiments
from tests.harness import fake_records as fake
from tests.harness.test_render import tables_of

PROBLEM = DecodeProblem(kv_lens=(64,), heads_q=2, heads_kv=1, head_dim=64, dtype="float16")
STUDY = Study(
    name="some",
    title="Some",
    cases=tuple(Case(name=name, problem=PROBLEM, seed=0) for name in ("b1_1k", "other")),
    entries=(Entry(impl="torch-sdpa", tuning={}),),
    path=Path("some.toml"),
)


def run(
    folder: Path, *experiments: str, said: list[str] | None = None, target: str = "serve", fresh: bool = False
) -> bool:
    say = (said if said is not None else []).append
    target = f"tests.harness.fake_experiments:{target}"
    return run_selftest(STUDY, folder, experiments=experiments or EXPERIMENTS, say=say, target=target, fresh=fresh)


def trials(folder: Path) -> list[tuple[str, str]]:
    rows = [r for r in record.read(folder / record.SELFTEST_FILE) if r["kind"] == "trial"]
    return [(r["experiment"], r["case"]) for r in rows if r["experiment"] != "done"]


def test_every_experiment_takes_its_cases_and_none_twice(tmp_path: Path) -> None:
    assert run(tmp_path)
    wanted = [("identical", "b1_1k"), ("identical", "other"), ("sensitivity", "b1_1k"), ("sensitivity", "other")]
    wanted += [(name, "b1_1k") for name in ("timers", "profilers", "nvbench")]
    assert trials(tmp_path) == wanted
    before = (tmp_path / record.SELFTEST_FILE).read_bytes()
    said: list[str] = []
    assert run(tmp_path, "identical", said=said)
    assert said == []
    assert (tmp_path / record.SELFTEST_FILE).read_bytes() == before
    assert run(tmp_path, "identical", fresh=True)
    assert trials(tmp_path) == wanted[:2]


@pytest.mark.parametrize(
    ("how", "reason"), [("raise", "identical: other: ValueError: no such luck"), ("die", "other: the process died")]
)
def test_what_was_complete_is_kept_and_the_rest_is_done_later(
    how: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fake_experiments.BAD, how)
    said: list[str] = []
    assert not run(tmp_path, "identical", said=said)
    assert reason in said[-1]
    assert trials(tmp_path) == [("identical", "b1_1k")]
    monkeypatch.delenv(fake_experiments.BAD)
    assert run(tmp_path, "identical")
    assert trials(tmp_path) == [("identical", "b1_1k"), ("identical", "other")]
    assert len({r["run_id"] for r in record.read(tmp_path / record.SELFTEST_FILE)}) == 1


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
        for effect in (0.0005, 0.05):
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
        "The smallest slowdown found in 95 % of trials, of those tried: 5 % (under 64 MB of K and V) and"
        " 5 % (over 400 MB)." in text
    )
    table = tables_of(text)[1]
    assert [line[2].split(":")[0] for line in table[2:] if line[1] == "5 %"] == ["20 of 20"] * 2
    measured = [float(line[3].split()[0]) for line in table[2:] if line[1] == "5 %"]
    assert measured == pytest.approx([5.0, 5.0], abs=0.1)


def test_timers_are_grouped_by_what_they_claim_to_measure(report: Path) -> None:
    text = (report / "README.md").read_text()
    graph, events = tables_of(text)[2:]
    assert graph[0] == ["case", "implementation", "`graph`"]
    assert events[0] == ["case", "implementation", "`events`", "`triton do_bench`", "agree with ours"]
    assert [line[-1] for line in events[2:4]] == ["1 of 1 (farthest +3.1 %)", "**0 of 1 (farthest +33.3 %)**"]
    assert "- `nvbench`: ImportError: no cuda" in text
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
