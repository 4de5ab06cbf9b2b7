"""Study files: what they may say, what is refused and by which words (behaviour 18), and their expansion."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.study import Case, Entry, Study, StudyError, expand_study, load_study
from impls.catalog import IMPLS, OURS
from impls.problem import DecodeProblem

ROOT = Path(__file__).parents[2]

CASE = 'name = "a"\nkv_lens = "2x8"\nheads_q = 8\nheads_kv = 2\nhead_dim = 64\n'


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def with_case(**changes: str | None) -> str:
    """A study of one good case, with keys replaced by TOML text, added, or (None) left out."""
    keys: dict[str, str | None] = dict(line.split(" = ", 1) for line in CASE.splitlines())
    keys |= changes
    return "[[case]]\n" + "\n".join(f"{key} = {value}" for key, value in keys.items() if value is not None)


def test_defaults_and_overrides(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'title = "T"\ndtype = "float16"\nseed = 3\n'
        'impls = ["torch-sdpa", {impl = "triton-splitkv", num_splits = 8}]\n'
        f"[[case]]\n{CASE}\n"
        '[[case]]\nname = "b"\nkv_lens = [5, 0]\nmodel = "Llama-3.1-70B"\ntp = 8\n'
        'dtype = "float32"\nscale = 0.5\nseed = 4\nsource = "made up"\n',
    )
    small = DecodeProblem(kv_lens=(8, 8), heads_q=8, heads_kv=2, head_dim=64, dtype="float16")
    large = DecodeProblem(kv_lens=(5, 0), heads_q=8, heads_kv=1, head_dim=128, dtype="float32", scale=0.5)
    assert load_study(path) == Study(
        name="mine",
        title="T",
        cases=(
            Case(name="a", problem=small, seed=3),
            Case(name="b", problem=large, seed=4, source="made up; heads of Llama-3.1-70B on one of 8 GPUs"),
        ),
        entries=(
            Entry(impl="torch-sdpa", tuning={}),
            Entry(impl="triton-splitkv", tuning={"num_splits": 8}),
        ),
        path=path,
    )


def test_least_study(tmp_path: Path) -> None:
    study = load_study(write(tmp_path, f"[[case]]\n{CASE}"))
    assert (study.title, study.cases[0].seed, study.cases[0].problem.dtype) == ("mine", 0, "bfloat16")
    assert [entry.impl for entry in study.entries] == list(IMPLS)
    assert all(entry.tuning == {} for entry in study.entries)


def test_a_study_is_found_by_file_folder_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "reports" / "one"
    folder.mkdir(parents=True)
    write(folder, f"[[case]]\n{CASE}", "study.toml")
    write(tmp_path, f"[[case]]\n{CASE}", "other.toml")
    monkeypatch.chdir(tmp_path)
    for where in ("one", "reports/one", "reports/one/study.toml", folder):
        study = load_study(where)
        assert (study.name, study.folder.resolve()) == ("one", folder)
    study = load_study("other.toml")
    assert (study.name, study.folder) == ("other", Path("reports/other"))
    with pytest.raises(StudyError, match=r"^study: expected a TOML file, .* under reports/ \(one\), got 'two'$"):
        load_study("two")


def test_a_study_of_the_checkout_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_study("quick").folder == ROOT / "reports" / "quick"
    with pytest.raises(StudyError, match=r"/reports/ \(.*quick.*\), got 'two'$"):
        load_study("two")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": None}, "case 'number 1': name: expected one, got nothing"),
        ({"name": "5"}, "case 5: name: expected letters, digits, '_', '-' and '.', got 5"),
        ({"name": '"a b"'}, "case 'a b': name: expected letters, digits, '_', '-' and '.', got 'a b'"),
        ({"kv_lens": None}, "case 'a': kv_lens: expected one, got nothing"),
        ({"kv_lens": '"2y8"'}, "case 'a': kv_lens: expected COUNTxLENGTH"),
        ({"kv_lens": "[4, -7]"}, "case 'a': kv_lens[1]: expected >= 0, got -7"),
        ({"kv_lens": "[4, 1.5]"}, "case 'a': kv_lens[1]: expected an integer, got 1.5"),
        ({"kv_lens": "8"}, "case 'a': kv_lens: expected a list of lengths, a string"),
        (
            {"kv_lens": '{distribution = "uniform", batch = 2, low = 1}'},
            "case 'a': kv_lens.high: expected a length",
        ),
        ({"heads_q": "7"}, "case 'a': heads_q: expected a multiple of heads_kv = 2, got 7"),
        ({"heads_kv": None}, "case 'a': heads_kv: expected heads_q, heads_kv, head_dim or a model, got nothing"),
        ({"head_dim": '"64"'}, "case 'a': head_dim: expected an integer >= 1, got '64'"),
        ({"model": '"Llama-3.1-8B"'}, "case 'a': heads_q: expected either a model or heads_q, heads_kv, head_dim"),
        ({"tp": "2"}, "case 'a': tp: expected only beside a model"),
        ({"dtype": '"int8"'}, "case 'a': dtype: expected one of float16, bfloat16, float32, got 'int8'"),
        ({"dtype": '["float16"]'}, "case 'a': dtype: expected one of float16, bfloat16, float32, got ['float16']"),
        ({"scale": "-1.0"}, "case 'a': scale: expected a finite number > 0 or None, got -1.0"),
        ({"seed": "-1"}, "case 'a': seed: expected an integer >= 0, got -1"),
        ({"seed": "true"}, "case 'a': seed: expected an integer >= 0, got True"),
        ({"source": "1"}, "case 'a': source: expected a string, got 1"),
        ({"kv_len": '"2x8"'}, "case 'a': kv_len: expected the keys of a case (name, kv_lens, heads_q, "),
    ],
)
def test_a_bad_case_is_named_with_file_and_key(
    tmp_path: Path, changes: dict[str, str | None], message: str
) -> None:
    path = write(tmp_path, with_case(**changes))
    with pytest.raises(StudyError) as caught:
        load_study(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = ", "expected a TOML file, got "),
        ("title = 1", "title: expected a string, got 1"),
        (
            "titel = 'T'",
            "titel: expected the keys of a study (title, dtype, seed, smallest_effect, impls, case), got an",
        ),
        ("smallest_effect = 3", "smallest_effect: expected a share from 0 to 1, got 3"),
        ("smallest_effect = true", "smallest_effect: expected a share from 0 to 1, got True"),
        ("title = 'no cases'", "case: expected at least one [[case]] table, got []"),
        ("case = 3", "case: expected at least one [[case]] table, got 3"),
        (f"[[case]]\n{CASE}[[case]]\n{CASE}", "case 'a': name: expected one not used by a case above"),
        ("impls = []", "impls: expected a list of implementations, at least one, got []"),
        ("impls = 'torch-sdpa'", "impls: expected a list of implementations, at least one, got 'torch-sdpa'"),
        ("impls = [3]", "impls[0]: expected an implementation's name or a table"),
        ("impls = [{num_splits = 3}]", "impls[0]: expected an implementation's name or a table"),
        (
            "impls = [{impl = 'torch-sdpa', x = [1]}]",
            "impls[0]: x: expected a string, a number or a boolean, got [1]",
        ),
        (
            "impls = [{impl = 'torch-sdpa', x = nan}]",
            "impls[0]: x: expected a string, a number or a boolean, got nan",
        ),
        (
            "impls = ['torch-sdpa', 'torch-sdpa']",
            "impls[1]: expected one not listed above, got 'torch-sdpa' a second",
        ),
    ],
)
def test_a_bad_study_is_named_with_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(StudyError) as caught:
        load_study(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_an_unknown_implementation_lists_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path, f"impls = ['torch-sdpa', 'flash']\n[[case]]\n{CASE}")
    with pytest.raises(StudyError) as caught:
        load_study(path)
    assert str(caught.value) == f"{path}: impls[1]: implementation: expected one of {', '.join(IMPLS)}, got 'flash'"


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StudyError, match=r"mine.toml: expected a TOML file"):
        load_study(path)


def test_expansion_says_everything_in_numbers_and_loads_to_the_same_study(tmp_path: Path) -> None:
    write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.1,100,50\n", "t.csv")
    title = 'A \\ "title"\twith \x7f, µ and 😀'
    entries = '["torch-sdpa", {impl = "triton-splitkv", num_splits = 8, "odd key" = "x", eps = 1e-7, on = true}]'
    path = write(
        tmp_path,
        f'title = "A \\\\ \\"title\\"\\twith \\u007f, µ and 😀"\nimpls = {entries}\n[[case]]\n{CASE}\nscale = 0.1\n'
        '[[case]]\nname = "trace"\nmodel = "Qwen2.5-7B"\nsource = "ours, CC0"\n'
        'kv_lens = {trace = "t.csv", at_s = 1, ms_per_token = 40}\n'
        '[[case]]\nname = "drawn"\nmodel = "Llama-3.1-8B"\nseed = 9\n'
        'kv_lens = {distribution = "uniform", batch = 100, low = 0, high = 9999}\n'
        '[[case]]\nname = "none"\nkv_lens = []\nheads_q = 1\nheads_kv = 1\nhead_dim = 8\n',
    )
    study = load_study(path)
    assert study.title == title
    assert study.cases[1].source == "ours, CC0; t.csv at 1 s, 40 ms per token; heads of Qwen2.5-7B"
    text = expand_study(study)
    for word in ("trace =", "distribution =", "model =", "tp ="):
        assert word not in text
    assert max(map(len, text.splitlines())) < 116
    elsewhere = load_study(write(tmp_path, text, "plain.toml"))
    assert replace(elsewhere, name=study.name, path=study.path) == study
    assert expand_study(elsewhere) == text


def test_expansion_of_the_whole_catalog_stays_the_whole_catalog(tmp_path: Path) -> None:
    """A study that names no implementation is to take in those that come later."""
    assert "impls" not in expand_study(load_study(write(tmp_path, f"[[case]]\n{CASE}")))


def committed(name: str) -> Study:
    return load_study(ROOT / "reports" / name)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ROOT.glob("reports/*/study.toml")))
def test_committed_studies_load_and_hold_plain_lengths(name: str) -> None:
    study = committed(name)
    assert study.name == name
    assert "trace = " not in study.path.read_text(encoding="utf-8")


def test_the_quick_study_is_small_and_covers_the_branches() -> None:
    study = committed("quick")
    problems: dict[str, Any] = {case.name: case.problem for case in study.cases}
    assert set(OURS) <= {entry.impl for entry in study.entries}
    assert len(problems) <= 8
    assert sum(problem.total_kv for problem in problems.values()) <= 8192
    assert {problem.dtype for problem in problems.values()} == {"float16"}
    assert any(problem.batch == 1 for problem in problems.values())
    assert any(0 in problem.kv_lens for problem in problems.values())
    assert any(n % 2 for problem in problems.values() for n in problem.kv_lens)
    assert any(problem.max_kv > 20 * min(problem.kv_lens) for problem in problems.values())
    assert {64, 256} <= {problem.head_dim for problem in problems.values()}
    assert {1, 7} <= {problem.group for problem in problems.values()}
    assert any(problem.heads_kv == 1 for problem in problems.values())


def test_the_h200_study_holds_the_two_production_snapshots() -> None:
    cases = {case.name: case for case in committed("h200-decode").cases}
    assert len(cases) == 17
    conv, code = cases["trace_conv_600s"], cases["trace_code_1200s"]
    assert (conv.problem.batch, conv.problem.total_kv, conv.problem.max_kv) == (48, 62578, 4098)
    for case in (conv, code):
        assert (case.problem.heads_q, case.problem.heads_kv, case.problem.head_dim) == (32, 8, 128)
        assert case.source is not None
        assert "Azure LLM inference trace 2023, CC-BY 4.0" in case.source
