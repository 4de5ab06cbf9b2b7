"""The draw of unseen problems: it follows from a commit alone, and keeps to its rule."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.study import load_study
from harness.unseen import ALPHAS, DTYPES, HEAD_DIMS, HEADS, KEYS, KINDS, KV_BYTES, RULE, commit_of, draw, to_toml

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_commit_gives_one_study_and_another_commit_another(tmp_path: Path) -> None:
    text = to_toml(draw(COMMIT))
    assert to_toml(draw(COMMIT)) == text
    assert commit_of(text) == COMMIT
    others = draw("f" * 40).cases
    assert all(case.problem != other.problem for case, other in zip(draw(COMMIT).cases, others, strict=True))
    path = tmp_path / "study.toml"
    path.write_text(text, encoding="utf-8")
    assert load_study(path).cases == draw(COMMIT).cases


def test_the_module_prints_it_under_its_rule() -> None:
    command = [sys.executable, "-m", "harness.unseen", "--commit", COMMIT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == to_toml(draw(COMMIT))
    head = " ".join(line.removeprefix("# ") for line in done.stdout.splitlines() if line.startswith("#"))
    assert head == " ".join(RULE.split())


def test_draws_keep_to_the_rule_and_reach_all_of_it() -> None:
    cases = [case for digit in "0123456789" for case in draw(digit * 40).cases]
    problems = [case.problem for case in cases]
    assert len(cases) == 600
    assert all(KV_BYTES[0] <= p.kv_bytes <= KV_BYTES[1] for p in problems)
    assert all(KEYS[0] <= n <= KEYS[1] for p in problems for n in p.kv_lens)
    assert {(p.heads_q, p.heads_kv) for p in problems} == set(HEADS)
    assert {p.head_dim for p in problems} == set(HEAD_DIMS)
    assert {p.dtype for p in problems} == set(DTYPES)
    assert {p.batch for p in problems} >= {1, 2, 3}
    assert max(p.batch for p in problems) > 200
    for kind in KINDS:
        mine = [case.problem for case in cases if f"_{kind}_" in case.name]
        assert len(mine) == 150
        alike = [len(set(p.kv_lens)) == 1 for p in mine]
        assert all(alike) if kind == "uniform" else sum(alike) < 5
    skews = [max(p.kv_lens) * p.batch / p.total_kv for p in problems]
    assert min(skews) == 1
    assert max(skews) > 20
    assert 0 < ALPHAS[0] < ALPHAS[1]


@pytest.mark.parametrize("commit", ["", "6f11cea", "G" * 40, "A" * 40, "0" * 41])
def test_only_a_full_hash_will_do(commit: str) -> None:
    with pytest.raises(ValueError, match=r"^commit: expected a full hash, 40 lower-case hexadecimal digits, got "):
        draw(commit)


def test_a_committed_draw_is_what_its_commit_gives(tmp_path: Path) -> None:
    fresh = tmp_path / "study.toml"
    fresh.write_text(to_toml(draw(COMMIT)), encoding="utf-8")
    for path in (fresh, *ROOT.glob("reports/h200-unseen/study.toml")):
        text = path.read_text(encoding="utf-8")
        assert text == to_toml(draw(commit_of(text))), path
    with pytest.raises(ValueError, match=r"^title: expected 'drawn from commit' and a hash, got neither$"):
        commit_of("title = 'mine'")
