"""The README's recipes, run as they stand there: what it writes is written, what it types is typed."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\S+/\S+\.py)\n")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a recipe may touch, copied, and a ``splitkv`` that runs the copy."""
    root = tmp_path_factory.mktemp("tree")
    for folder in ("impls", "harness", "reports/h200-decode", "reports/quick"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = root / "bin" / "splitkv"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m harness "$@"\n', encoding="utf-8")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return root


def run(tree: Path, *command: str) -> str:
    environment = os.environ | {
        "PATH": f"{tree / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.pinned
def test_the_recipes_of_the_readme_work(tree: Path) -> None:
    said = []
    for language, block in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        if language == "python" and (file := FILE.match(block)):
            (tree / file[1]).write_text(block.removeprefix(file[0]), encoding="utf-8")
        elif language == "python":
            said.append(run(tree, sys.executable, "-c", block))
        elif language == "sh":
            said.append(run(tree, "bash", "-euo", "pipefail", "-c", block))
    assert len(said) == 5
    advice, catalog, study, compared, table = said
    assert "tilelang-splitkv" in advice
    assert "this is an extrapolation" in advice
    assert catalog == ""
    assert len(re.findall(r"^my-kernel +ok +1 *$", study, flags=re.MULTILINE)) == 2, "checked, then timed"
    report = (tree / "reports" / "mine" / "README.md").read_text(encoding="utf-8")
    assert "`my-kernel` on 1" in report
    assert (tree / "reports" / "mine" / "report.html").is_file()
    assert "| `one_long` | `my-kernel` |" in compared
    assert "skew_1x128k_31x1k" in table


def test_the_verbs_that_the_readme_lists_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^splitkv (\w+)", text, flags=re.MULTILINE))
    help_text = subprocess.run(
        [sys.executable, "-m", "harness", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    known = set(re.findall(r"^│ (\w+)", help_text, flags=re.MULTILINE))
    assert listed <= known
    assert known - listed == set()


def test_every_file_that_the_readme_links_to_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    assert len(linked) >= 4
    assert [link for link in linked if not (ROOT / link).exists()] == []
