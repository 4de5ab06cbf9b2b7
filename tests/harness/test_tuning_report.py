"""The report of a study that was tuned but not run, and what is said where there is nothing to report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from matplotlib.text import Text

from harness import record
from harness.record import Record, RecordError
from harness.render import render_study
from harness.render.looks import style
from harness.render.page import PAGE_FILE
from harness.render.plots_tuning import MAX_CASES, cases_drawn, draw_regret
from harness.render.tuning import read_tuning
from impls.problem import DecodeProblem
from tests.harness.fake_records import GPU_CASES, GPU_ENV, gpu_records, problem, write
from tests.harness.fake_trials import FAST, drifting, trial

ENV = {**GPU_ENV, "method": "graph", "cache": "cold"}
CASES = {
    "even": problem([1024] * 2, head_dim=64),
    "odd": problem([8192, 100]),
    "wide": problem([4096], head_dim=256),
}
STUDY = """\
# Drawn by lot: the kind_of a problem in turn.
# No one saw them.
title = "3 problems drawn from a hat"
""" + "".join(
    f'[[case]]\nname = "{name}"\nsource = "drawn: {kind}"\nkv_lens = {list(p.kv_lens)}\nheads_q = {p.heads_q}\n'
    f'heads_kv = {p.heads_kv}\nhead_dim = {p.head_dim}\ndtype = "{p.dtype}"\n'
    for (name, p), kind in zip(CASES.items(), ("uniform", "skewed", "uniform"), strict=True)
)


def finals(factor: float, case: str, impl: str = "triton-splitkv", of: DecodeProblem | None = None) -> list[Record]:
    """A case on which the own choice takes ``factor`` times as long as the best."""
    what = {"case": case, "impl": impl, "of": of or CASES[case]}
    made = [trial("final", {}, drifting(factor), **what)]
    return made if factor == 1 else [*made, trial("final", FAST, drifting(1.0), **what)]


def tuned_folder(folder: Path, trials: list[Record], env: Mapping[str, object] = ENV, study: str = STUDY) -> Path:
    folder.mkdir()
    (folder / "study.toml").write_text(study, encoding="utf-8")
    record.append(folder / record.TUNING_FILE, record.run_record("r1", "mine", env, smallest_effect=0.01), *trials)
    return folder


def some_trials() -> list[Record]:
    """Of one kernel 20 % and 5 % lost, of the other nothing; ``wide`` was not reached by that one."""
    losses = [finals(1.2, "even"), finals(1.05, "odd"), finals(1.0, "wide")]
    losses += [finals(1.0, case, "tilelang-splitkv") for case in ("even", "odd")]
    return [found for made in losses for found in made]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tuned_folder(tmp_path_factory.mktemp("reports") / "mine", some_trials())
    render_study([made])
    return made


@pytest.fixture(scope="module")
def report(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def test_it_says_what_is_lost_where_and_by_which_code(report: str) -> None:
    assert "# mine: what the own choice of our kernels loses\n" in report
    mean = (1.2 * 1.05) ** (1 / 3)
    assert f"The own choice of `triton-splitkv` takes {mean:.3f} [{mean:.3f}, {mean:.3f}] times as long" in report
    assert "NVIDIA H200, 132 SMs, driver " in report
    assert f"commit {str(GPU_ENV['git'])[:12]} (run `r1`).\n" in report
    assert "splitkv tune reports/mine\n" in report
    assert "Method `graph`: " in report
    assert "Cache `cold`: " in report


def test_it_quotes_the_study_and_names_what_was_not_tuned(report: str) -> None:
    assert "\n3 problems drawn from a hat.\n" in report
    assert "\n> Drawn by lot: the kind\\_of a problem in turn.\n> No one saw them.\n\n" in report
    assert (
        "\n2 of the study's 3 cases were tuned for `tilelang-splitkv`; `wide` was not."
        " All 3 cases of the study were tuned for `triton-splitkv`.\n"
    ) in report


def test_it_says_what_kind_of_problem_loses(report: str) -> None:
    mean = f"{1.2**0.5:.3f}"
    assert f"| uniform | 1.000 [1.000, 1.000] over 1 | {mean} [{mean}, {mean}] over 2 |\n" in report
    assert "| skewed | 1.000 [1.000, 1.000] over 1 | 1.050 [1.050, 1.050] over 1 |\n" in report
    assert "| head dim 64 | 1.000 [1.000, 1.000] over 1 | 1.200 [1.200, 1.200] over 1 |\n" in report
    assert "| head dim 256 | – | 1.000 [1.000, 1.000] over 1 |\n" in report


def test_cases_stand_by_bytes_with_what_they_are(report: str) -> None:
    lines = [line for line in report.splitlines() if line.startswith('| <a id="')]
    assert [re.findall(r"`(\w+)`", line)[0] for line in lines] == ["even", "even", "wide", "odd", "odd"]
    assert lines[1].startswith(
        '| <a id="t2"></a>`even` | 2 × 1,024 | 32 / 8 | 64 | bfloat16 | 4.19 MB | `triton-splitkv` | 17.7 | 14.8 |'
    )
    assert "| 2 sequences, 8,292 in all, longest 8,192 |" in lines[4]


def test_marks_lead_to_lines_and_the_bytes_are_the_same_each_time(folder: Path, report: str) -> None:
    files = [folder / "README.md", *(folder / "figures").iterdir()]
    assert sorted(path.name for path in files) == ["README.md", "regret.png", "regret.svg"]
    links = re.findall(r'href="\.\./README\.md#(\w+)"', (folder / "figures" / "regret.svg").read_text("utf-8"))
    assert sorted(links) == re.findall(r'<a id="(t\d+)">', report) == ["t1", "t2", "t3", "t4", "t5"]
    before = [path.read_bytes() for path in files]
    render_study([folder])
    assert [path.read_bytes() for path in files] == before


def test_the_figure_has_the_largest_regret_first_and_no_text_over_another(tmp_path: Path) -> None:
    cases = {f"a_case_with_a_name_{i}": problem([128 + i], heads=(40, 10)) for i in range(MAX_CASES + 3)}
    trials = [found for i, name in enumerate(cases) for found in finals(1 + i / 50, name, of=cases[name])]
    tuning = read_tuning(tuned_folder(tmp_path / "mine", trials))
    assert tuning is not None
    drawn = cases_drawn(tuning)
    assert drawn == list(cases)[:2:-1]
    with style():
        figure = draw_regret(tuning, drawn, {(row.case, row.impl): "t" for row in tuning.found})
        figure.draw_without_rendering()
    [ax] = figure.axes
    assert ax.get_yticklabels()[0].get_text() == f"{drawn[0]}  40/10, 128  (1.08 MB)"
    texts: list[Text] = [
        *ax.get_xticklabels(),
        *ax.get_yticklabels(),
        ax.xaxis.label,
        *figure.legends[0].get_texts(),
    ]
    boxes = [text.get_window_extent() for text in texts]
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
    render_study([tmp_path / "mine"])
    assert "The 3 cases that lose least are not drawn: 80 are." in (tmp_path / "mine" / "README.md").read_text(
        "utf-8"
    )


@pytest.mark.parametrize("why", ["on a CPU", "begun"])
def test_without_a_case_tuned_on_a_gpu_there_is_no_report(tmp_path: Path, why: str) -> None:
    trials = some_trials() if why == "on a CPU" else [trial("screen", {}, [12.0])]
    folder = tuned_folder(tmp_path / "mine", trials, {"device": "cpu"} if why == "on a CPU" else ENV)
    with pytest.raises(
        RecordError, match=r"tuning.jsonl: expected a case that was tuned on a GPU, since there is no"
    ):
        render_study([folder])
    assert not (folder / "README.md").exists()


def test_an_own_choice_that_failed_is_said_and_has_no_mark(tmp_path: Path) -> None:
    failed = trial("final", {}, None, case="even", of=CASES["even"], status="failed")
    folder = tuned_folder(tmp_path / "mine", [failed])
    (folder / "study.toml").unlink()
    render_study([folder])
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "- `triton-splitkv` on `even`: own choice: failed: because\n" in text
    assert "## The problems" not in text, "nobody says what they are"
    assert "figures/" not in text
    assert not (folder / "figures").exists()


def test_it_is_not_one_of_several_that_are_compared(folder: Path, tmp_path: Path) -> None:
    ran = write(tmp_path / "ran", gpu_records({"b1_8k": GPU_CASES["b1_8k"]}))
    with pytest.raises(RecordError, match=r"mine: expected the records.jsonl of a run.*got a tuning.jsonl alone"):
        render_study([ran, folder])


@pytest.mark.pinned
def test_a_page_of_it_has_its_figure_and_its_links(folder: Path) -> None:
    render_study([folder], page=True)
    page = (folder / PAGE_FILE).read_text(encoding="utf-8")
    assert '<figure id="figure-regret">' in page
    assert (
        set(re.findall(r'<a xlink:href="#(\w+)"', page))
        == {"t1", "t2", "t3", "t4", "t5"}
        <= set(re.findall(r'<a id="(\w+)"', page))
    )
    (folder / PAGE_FILE).unlink()


def test_once_the_study_was_run_its_report_has_the_kinds_and_no_figure_of_before(tmp_path: Path) -> None:
    folder = tuned_folder(tmp_path / "mine", some_trials())
    render_study([folder])
    write(folder, gpu_records(CASES))
    render_study([folder])
    text = (folder / "README.md").read_text(encoding="utf-8")
    section = text.partition("## What the own choice loses\n")[2].partition("\n## ")[0]
    assert (
        "By what was drawn, geometric means:\n\n| problems | `tilelang-splitkv` | `triton-splitkv` |\n" in section
    )
    assert "<a id=" not in section
    assert list((folder / "figures").glob("regret.*")) == []
