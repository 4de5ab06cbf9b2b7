"""Records as a data frame, CSV and Parquet."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from harness import record as rec
from harness.cli import main
from harness.export import COLUMNS, export, to_pandas
from tests.harness import fake_records as fake

FAULTS = {("b1_8k", "flash-attn-3"): ("failed", "it hung")}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    cases = {name: fake.GPU_CASES[name] for name in ("b1_8k", "skew_1x128k_31x1k")}
    folder = fake.write(tmp_path / "study", fake.gpu_records(cases, faults=FAULTS, n=7))
    (folder / "study.toml").write_text('title = "x"\n', encoding="utf-8")
    return folder


def test_a_row_is_a_sample_with_all_that_is_known_of_it(study: Path) -> None:
    frame = to_pandas(study)
    assert list(frame.columns) == list(COLUMNS)
    assert {name: str(frame[name].dtype) for name in COLUMNS} == {name: kind for name, (kind, _) in COLUMNS.items()}
    # The read ceiling, two bounds and twelve measurements of seven samples, of which one failed and has one row.
    assert len(frame) == (1 + 2 + 11) * 7 + 1
    mine = frame[(frame["case"] == "b1_8k") & (frame["impl"] == "triton-splitkv")]
    line = (study / "records.jsonl").read_text(encoding="utf-8").splitlines()[int(mine["line"].iloc[0]) - 1]
    record = json.loads(line)
    assert mine["us"].tolist() == [sample["us"] for sample in record["timing"]["samples"]]
    assert mine["round"].tolist() == list(range(7))
    first = mine.iloc[0]
    assert (first["gpu"], first["num_splits"], first["splits_max"]) == ("NVIDIA H200", "auto", 16)
    assert (first["kv_lens"], first["kv_bytes"], first["method"]) == ("[8192]", 33_554_432, "graph")
    assert json.loads(first["config"]) == record["config"]


def test_what_has_no_sample_has_a_row_that_says_why(study: Path) -> None:
    frame = to_pandas(study / "records.jsonl")
    [row] = [row for row in frame.itertuples() if row.status == "failed"]
    assert (row.case, row.impl, row.reason) == ("b1_8k", "flash-attn-3", "it hung")
    assert pd.isna(row.us)
    assert pd.isna(row.round)


@pytest.mark.pinned
def test_csv_and_parquet_hold_the_frame(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = to_pandas(study)
    for target in (tmp_path / "all.csv", tmp_path / "all.parquet"):
        with pytest.raises(SystemExit) as caught:
            main(["export", str(study), "--to", str(target)])
        assert caught.value.code == 0
        assert f"{len(frame)} rows are in {target}" in capsys.readouterr().out
    kinds = {name: kind for name, (kind, _) in COLUMNS.items()}
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "all.csv", dtype=kinds), frame)
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "all.parquet"), frame)


def test_several_studies_make_one_frame(study: Path, tmp_path: Path) -> None:
    other = fake.write(tmp_path / "other", fake.cpu_records())
    both = to_pandas(study, other)
    assert list(dict.fromkeys(both["study"])) == ["h200-decode", "quick"]
    assert len(both) == len(to_pandas(study)) + len(to_pandas(other))


def test_errors_name_the_file_and_what_was_expected(study: Path, tmp_path: Path) -> None:
    with pytest.raises(rec.RecordError, match=re.escape("expected a file ending in .csv or .parquet, got '.xlsx'")):
        export([study], tmp_path / "all.xlsx")
    records = rec.read(study / "records.jsonl")
    rec.append(tmp_path / "lost.jsonl", records[2])
    with pytest.raises(rec.RecordError, match=r"lost\.jsonl:1: expected a run record of 20261130T101500Z-3fa2"):
        to_pandas(tmp_path / "lost.jsonl")
    with pytest.raises(FileNotFoundError):
        to_pandas(tmp_path / "nowhere")


def test_every_column_is_documented() -> None:
    assert all(len(text) > 4 for _, text in COLUMNS.values())
