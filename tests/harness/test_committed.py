"""What is committed is what its records give: every report and figure, byte for byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.record import CHECKS_FILE, IMPOSTORS_FILE, REPEAT_FILE, SELFTEST_FILE, TUNING_FILE, records_file
from harness.render import render_study

ROOT = Path(__file__).parents[2]
MADE_FROM = (records_file(), SELFTEST_FILE, IMPOSTORS_FILE, TUNING_FILE)
REPORTS = sorted(
    path.parent.name
    for path in (ROOT / "reports").glob("*/README.md")
    if path.parent.name != "quick"  # made by `make study`, and never committed
)


def test_every_folder_with_records_has_its_report() -> None:
    recorded = {path.parent.name for name in MADE_FROM for path in (ROOT / "reports").glob(f"*/{name}")}
    assert recorded - {"quick"} == set(REPORTS)


@pytest.mark.pinned
@pytest.mark.parametrize("name", REPORTS)
def test_a_committed_report_is_what_its_records_give(name: str, tmp_path: Path) -> None:
    committed, again = ROOT / "reports" / name, tmp_path / name
    again.mkdir()
    for file in committed.iterdir():
        if file.suffix in (".jsonl", ".toml"):
            shutil.copy(file, again)
    for file_name in (CHECKS_FILE, REPEAT_FILE, records_file()):  # of the same kernels, which a report may point to
        for beside in (ROOT / "reports").glob(f"*/{file_name}"):
            (tmp_path / beside.parent.name).mkdir(exist_ok=True)
            shutil.copy(beside, tmp_path / beside.parent.name)
    render_study([again])
    rendered = [p.relative_to(again) for p in again.rglob("*") if p.is_file()]
    kept = [p.relative_to(committed) for p in committed.rglob("*") if p.is_file() and p.name != "report.html"]
    assert sorted(rendered) == sorted(kept)
    for file in rendered:
        assert (again / file).read_bytes() == (committed / file).read_bytes(), file


def test_committed_records_come_from_committed_code() -> None:
    for name in (*MADE_FROM, REPEAT_FILE):
        for path in (ROOT / "reports").glob(f"*/{name}"):
            if path.parent.name == "quick":
                continue
            runs = [
                record
                for line in path.read_text("utf-8").splitlines()
                if (record := json.loads(line))["kind"] == "run"
            ]
            assert runs, path
            assert [run["run_id"] for run in runs if run["env"].get("dirty")] == [], path
