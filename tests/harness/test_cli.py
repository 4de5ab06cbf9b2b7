"""The verbs: what they ask for, what they print, and how they exit. The loop itself is replaced by fakes."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import harness.cli
import harness.tune
from harness.cli import main
from harness.runner import Outcome, RunError, RunSummary
from harness.stats import Estimate
from harness.study import Study, load_study
from harness.tuning import Tuned
from impls.catalog import IMPLS, OURS

ROOT = Path(__file__).parents[2]

STUDY = """\
impls = ["tilelang-splitkv", {impl = "triton-splitkv", num_splits = 8}, "torch-sdpa"]
[[case]]
name = "a"
kv_lens = "2x8"
model = "Llama-3.1-8B"
[[case]]
name = "b"
kv_lens = [5]
model = "Llama-3.1-8B"
"""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study file, in an empty current folder, and a console too wide to wrap."""
    monkeypatch.chdir(tmp_path)
    for console in (harness.cli.console, harness.cli.progress):
        monkeypatch.setattr(console, "width", 400)
    path = tmp_path / "mine.toml"
    path.write_text(STUDY, encoding="utf-8")
    return path


def exit_code(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_help_names_the_verbs_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom harness.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit as error:\n"
        "    print('exit', error.code, *sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *text, last = done.stdout.splitlines()
    assert last.split()[:2] == ["exit", "0"]
    assert not {"torch", "triton", "tilelang", "numpy", "pandas", "matplotlib", "seaborn"} & set(last.split())
    shown = [line.split()[1] for line in text if line.startswith("│ ")]
    verbs = [command.callback.__name__ for command in harness.cli.app.registered_commands if command.callback]
    assert verbs == [
        "doctor",
        "check",
        "run",
        "render",
        "export",
        "compare",
        "selftest",
        "tune",
        "recommend",
        "expand",
    ]
    assert set(verbs) <= set(shown)


def test_the_module_is_the_same_command(study: Path) -> None:
    command = [sys.executable, "-m", "harness", "expand", str(study)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith('title = "mine"\n')


def test_expand_prints_a_study_that_loads_to_the_same_cases(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("expand", study) == 0
    plain = study.with_name("plain.toml")
    plain.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_study(plain).cases == load_study(study).cases
    assert load_study(plain).entries == load_study(study).entries


@pytest.mark.parametrize("verb", ["check", "run", "expand"])
def test_a_bad_study_is_one_line_with_file_case_and_key(
    study: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    study.write_text(STUDY.replace("[5]", "[-5]"), encoding="utf-8")
    assert exit_code(verb, study) == 2
    assert capsys.readouterr() == ("", f"error: {study}: case 'b': kv_lens[0]: expected >= 0, got -5\n")


@pytest.mark.parametrize("verb", ["check", "run", "expand", "render"])
def test_a_missing_study_is_one_line(study: Path, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert exit_code(verb, "nowhere") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.endswith("got 'nowhere'\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "gone.jsonl"), "gone.jsonl: No such file or directory"),
        (OSError("Cannot save file into a non-existent directory: '/nope'"), "Cannot save file into"),
        (RunError("start: RuntimeError: method: expected one of wall on cpu, got 'graph'"), "method: expected one"),
    ],
)
def test_what_cannot_be_done_is_said_without_python_or_workers(
    study: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    said: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(harness.cli, "run_study", fail)
    assert exit_code("run", study) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_ctrl_c_says_how_to_go_on(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(harness.cli, "run_study", interrupt)
    assert exit_code("run", study) == harness.cli.INTERRUPTED
    assert "the same command, without --fresh, goes on" in capsys.readouterr().err


class FakeRun:
    """In place of ``run_study``: remembers what it was asked, and gives each implementation one status."""

    def __init__(self, **statuses: str) -> None:
        self.statuses = statuses
        self.asked: dict[str, Any] = {}

    def __call__(self, study: Study, **asked: Any) -> RunSummary:
        self.asked = asked
        rows = [
            {"impl": entry.impl, "case": case.name, "status": status, "reason": None if status == "ok" else "[why]"}
            for case in study.cases
            for entry in study.entries
            for status in [self.statuses.get(entry.impl.replace("-", "_"), "unavailable")]
        ]
        return RunSummary(run_id="R1", records=study.folder / "records.jsonl", rows=tuple(rows), resumed=0)


def test_run_passes_on_what_was_asked(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun(torch_sdpa="ok")
    monkeypatch.setattr(harness.cli, "run_study", fake)
    assert exit_code("run", study) == 0
    assert (fake.asked["device"], fake.asked["fresh"], fake.asked["repeat"]) == (None, False, False)
    assert exit_code("run", study, "--device", "cpu", "--fresh") == 0
    assert (fake.asked["device"], fake.asked["fresh"]) == ("cpu", True)
    assert exit_code("run", study, "--repeat") == 0
    assert fake.asked["repeat"] is True
    assert exit_code("run", study, "--device", "tpu") == 2


def test_run_says_what_came_of_each_implementation(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness.cli, "run_study", FakeRun(tilelang_splitkv="failed", torch_sdpa="ok"))
    assert exit_code("run", study) == 0
    assert lines(capsys.readouterr().out) == [
        ["implementation", "status", "cases", "reason"],
        ["tilelang-splitkv", "failed", "2", "[why]"],
        ["triton-splitkv", "unavailable", "2", "[why]"],
        ["torch-sdpa", "ok", "2"],
        ["R1", "is", "in", "reports/mine/records.jsonl"],
    ]


def test_run_fails_if_nothing_succeeded(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.cli, "run_study", FakeRun(torch_sdpa="invalid", tilelang_splitkv="wrong"))
    assert exit_code("run", study) == 1


@pytest.mark.parametrize(
    ("ok", "required", "missing"),
    [
        (["tilelang-splitkv", "triton-splitkv"], ["ours"], ""),
        (["tilelang-splitkv"], ["ours"], "triton-splitkv"),
        (["torch-sdpa"], ["ours"], "tilelang-splitkv, triton-splitkv"),
        (["torch-sdpa"], ["torch-sdpa"], ""),
        (["triton-splitkv"], ["torch-sdpa", "triton-splitkv"], "torch-sdpa"),
    ],
)
def test_run_can_insist_on_implementations(
    study: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ok: list[str],
    required: list[str],
    missing: str,
) -> None:
    monkeypatch.setattr(harness.cli, "run_study", FakeRun(**{name.replace("-", "_"): "ok" for name in ok}))
    options = [word for name in required for word in ("--require", name)]
    assert exit_code("run", study, *options) == (1 if missing else 0)
    assert capsys.readouterr().err == (f"error: required, but ok on no case: {missing}\n" if missing else "")


def test_run_refuses_to_insist_on_what_is_not_in_the_study(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeRun(torch_sdpa="ok")
    monkeypatch.setattr(harness.cli, "run_study", fake)
    assert exit_code("run", study, "--require", "flash-attn-2") == 2
    known = ", ".join([*OURS, "torch-sdpa"])
    assert capsys.readouterr().err == f"error: --require: expected ours or one of {known}, got 'flash-attn-2'\n"
    assert fake.asked == {}


def test_a_run_that_cannot_begin_is_one_line(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_device(study: Study, **_: Any) -> RunSummary:
        raise RunError("device: expected a CUDA device, got none")

    monkeypatch.setattr(harness.cli, "run_study", no_device)
    assert exit_code("run", study, "--device", "cuda") == 2
    assert capsys.readouterr().err == "error: device: expected a CUDA device, got none\n"


def fake_check(*statuses: str) -> Any:
    """In place of ``check_study``: these statuses, case by case and entry by entry."""

    def check(study: Study, **_: Any) -> tuple[Outcome, ...]:
        places = [(case, entry) for case in study.cases for entry in study.entries]
        return tuple(
            Outcome(
                case=case.name,
                entry=entry,
                status=status,
                reason=None if status == "ok" else f"{status} [0] because",
                config={},
                check={"worst_row": 0.254} if status in ("ok", "wrong") else None,
            )
            for (case, entry), status in zip(places, statuses, strict=True)
        )

    return check


def test_check_prints_the_matrix_and_the_reasons(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses = ("ok", "ok", "unavailable", "ok", "unsupported", "unavailable")
    monkeypatch.setattr(harness.cli, "check_study", fake_check(*statuses))
    assert exit_code("check", study) == 0
    assert lines(capsys.readouterr().out) == [
        ["case", "tilelang-splitkv", "triton-splitkv", "num_splits=8", "torch-sdpa"],
        ["a", "ok", "0.25", "ok", "0.25", "unavailable"],
        ["b", "ok", "0.25", "unsupported", "unavailable"],
        [],
        ["implementation", "status", "cases", "reason"],
        ["tilelang-splitkv", "ok", "2"],
        ["triton-splitkv", "num_splits=8", "ok", "1"],
        ["triton-splitkv", "num_splits=8", "unsupported", "1", "unsupported", "[0]", "because"],
        ["torch-sdpa", "unavailable", "2", "unavailable", "[0]", "because"],
        ["records", "are", "in", "reports/mine/checks.jsonl"],
    ]


def test_check_takes_known_families_alone(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def check(study: Study, *, families: list[str], **_: Any) -> tuple[Outcome, ...]:
        asked.append(families)
        return ()

    monkeypatch.setattr(harness.cli, "check_study", check)
    exit_code("check", study, "--families", "needles,exact")
    assert asked == [["needles", "exact"]]
    assert exit_code("check", study, "--families", "needles,gauss") == 2
    assert "--families: expected some of normal, needles, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (("ok", "ok", "ok", "ok", "ok", "wrong"), 1),
        (("ok", "ok", "failed", "ok", "ok", "ok"), 1),
        (("unsupported", "unsupported", "unavailable", "unsupported", "unsupported", "unavailable"), 1),
        (("unsupported", "unsupported", "unavailable", "unsupported", "ok", "unavailable"), 0),
    ],
)
def test_check_fails_on_a_wrong_result_or_none(
    study: Path, monkeypatch: pytest.MonkeyPatch, statuses: tuple[str, ...], code: int
) -> None:
    monkeypatch.setattr(harness.cli, "check_study", fake_check(*statuses))
    assert exit_code("check", study) == code


class FakePool:
    """In place of the worker: one that knows its environment."""

    def __init__(self, setup: object) -> None:
        clocks = {"sm_mhz": 1980, "memory_mhz": 3201}
        self.ready = SimpleNamespace(env={"device": "cuda", "clocks": clocks, "flash_attn": None})

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_doctor_shows_the_environment_and_every_implementation(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def check(study: Study, *, device: str, families: tuple[str, ...], console: object) -> tuple[Outcome, ...]:
        asked.append(device)
        statuses = ["unavailable" if entry.impl == "flash-attn-2" else "ok" for entry in study.entries]
        outcomes: tuple[Outcome, ...] = fake_check(*statuses * len(study.cases))(study)
        return outcomes

    monkeypatch.setattr(harness.cli, "WorkerPool", FakePool)
    monkeypatch.setattr(harness.cli, "check_study", check)
    assert exit_code("doctor") == 0
    assert asked == ["cuda"]
    shown = lines(capsys.readouterr().out)
    assert shown[:4] == [
        ["environment", "here"],
        ["device", "cuda"],
        ["clocks", "sm_mhz", "1980,", "memory_mhz", "3201"],
        ["flash_attn", "-"],
    ]
    assert shown[4:6] == [[], ["implementation", "float16", "bfloat16", "float32"]]
    assert [row[0] for row in shown[6 : 6 + len(IMPLS)]] == list(IMPLS)
    assert ["torch-sdpa", "ok", "0.25", "ok", "0.25", "ok", "0.25"] in shown
    assert [row[0] for row in shown[-len(IMPLS) :]] == list(IMPLS)
    assert ["flash-attn-2", "unavailable", "3", "unavailable", "[0]", "because"] in shown
    assert ["torch-sdpa", "ok", "3"] in shown


def test_doctor_really_works_on_this_machine(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("doctor", "--device", "cpu") == 0
    shown = lines(capsys.readouterr().out)
    assert ["device", "cpu"] in shown
    assert ["torch-sdpa", "ok", "3"] in shown
    assert {row[0] for row in shown if row} >= set(IMPLS)


@pytest.mark.parametrize("arguments", [[], ["--html"]])
def test_render_is_asked_for_the_folders_of_the_studies(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    asked: list[Path] = []

    def render_study(folders: list[Path], *, page: bool) -> Path:
        asked.extend(folders)
        assert page is ("--html" in arguments)
        return folders[0] / "README.md"

    monkeypatch.setattr("harness.render.render_study", render_study, raising=False)
    assert exit_code("render", study, ROOT / "reports" / "quick", *arguments) == 0
    assert asked == [Path("reports/mine"), ROOT / "reports" / "quick"]
    assert capsys.readouterr().out == "reports/mine/README.md\n"


# --- tune -------------------------------------------------------------------------------------------------


class FakeTuning:
    """In place of ``tune_study``: remembers what it was asked, and has one case done."""

    def __init__(self, *, regret: bool = True, left: tuple[str, ...] = ()) -> None:
        self.regret = regret
        self.left = left
        self.asked: dict[str, Any] = {}

    def __call__(self, study: Study, **asked: Any) -> harness.tune.Summary:
        self.asked = asked
        row = Tuned(
            case="a",
            impl="triton-splitkv",
            run_id="R1",
            problem={},
            tried={"ok": 60, "unsupported": 3},
            distinct=50,
            best={"block_n": 64, "num_splits": 8},
            best_us=10.0,
            default_us=11.0,
            regret=Estimate(1.1, 1.09, 1.11, 20) if self.regret else None,
            reason=None if self.regret else "own choice: wrong: row 1",
        )
        return harness.tune.Summary(
            run_id="R1", records=study.folder / "tuning.jsonl", tuned=(row,), left=self.left
        )


def test_tune_passes_on_what_was_asked(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTuning()
    monkeypatch.setattr(harness.tune, "tune_study", fake)
    assert exit_code("tune", study) == 0
    assert (fake.asked["impls"], fake.asked["cases"], fake.asked["budget_s"]) == (list(OURS), None, math.inf)
    options = ("--impls", "triton-splitkv", "--cases", "a,b", "--budget-s", "90", "--jobs", "3", "--fresh")
    assert exit_code("tune", study, *options) == 0
    assert (fake.asked["impls"], fake.asked["cases"]) == (["triton-splitkv"], ["a", "b"])
    assert (fake.asked["budget_s"], fake.asked["jobs"], fake.asked["fresh"]) == (90.0, 3, True)


def test_tune_prints_the_regret_and_what_is_left(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness.tune, "tune_study", FakeTuning(left=("b",)))
    assert exit_code("tune", study) == 0
    out = [" ".join(line) for line in lines(capsys.readouterr().out)]
    assert out[1:] == [
        "a triton-splitkv 60 ok, 3 unsupported; own choice 11 µs, 1.100 [1.090, 1.110] times the best: block_n=64 "
        "num_splits=8",
        "no time for: b; the same command goes on with them",
        "R1 is in reports/mine/tuning.jsonl",
    ]


def test_tune_fails_if_nothing_could_be_compared(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness.tune, "tune_study", FakeTuning(regret=False))
    assert exit_code("tune", study) == 1
    assert "no comparison: own choice: wrong: row 1" in capsys.readouterr().out
    assert exit_code("tune", study, "--impls", "mine") == 2
    assert "error: --impls: expected some of " in capsys.readouterr().err
