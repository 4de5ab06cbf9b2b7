"""Figures drawn by two processes: the same bytes, no process left behind, and errors where they always were."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from harness import record as rec
from harness.render import figures, helper, render_study
from harness.render.frame import load
from tests.harness import fake_records as fake


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small study that counts as a large one, on a machine of two cores."""
    monkeypatch.setattr(helper, "LARGE_BYTES", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    return fake.write(tmp_path / "study", fake.cpu_records())


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_helper_changes_no_byte_and_draws_what_it_takes(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[str] = []
    draw = figures.draw
    monkeypatch.setattr(
        figures, "draw", lambda comparison, name, to: here.append(name) or draw(comparison, name, to)
    )
    render_study([study])
    together = files_of(study)
    assert set(here) < set(figures.FIGURES)
    assert not multiprocessing.active_children()
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    here.clear()
    for file in study.rglob("figures/*"):
        file.unlink()
    render_study([study])
    assert sorted(here) == sorted(figures.FIGURES)
    assert files_of(study) == together


def test_a_small_study_and_a_single_core_have_no_process(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for patched, value in (("LARGE_BYTES", 10**9), ("os.cpu_count", lambda: 1)):
        with monkeypatch.context() as patch, helper.helping([study]):
            assert len(multiprocessing.active_children()) == 1
            patch.setattr(f"harness.render.helper.{patched}", value)
            with helper.helping([study]):
                assert len(multiprocessing.active_children()) == 1
    assert not multiprocessing.active_children()


def test_what_a_process_that_died_had_in_hand_is_drawn_here(study: Path) -> None:
    render_study([study])
    whole = files_of(study)
    comparison, folder = load([study]), study / "figures"
    with helper.helping([study]) as two:
        two.begin(comparison, folder, figures.FIGURES)
        [process] = multiprocessing.active_children()
        process.kill()
        process.join()
        for file in folder.iterdir():
            file.unlink()
        drawn = figures.draw_all(comparison, folder, two)
    assert list(drawn) == [name for name in figures.FIGURES if f"figures/{name}.png" in whole]
    assert files_of(study) == whole


def test_what_a_helper_cannot_draw_is_reported_as_without_one(study: Path) -> None:
    (study / "figures" / "latency.png").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"latency\.png"):
        render_study([study])
    assert not multiprocessing.active_children()


def test_no_process_outlives_records_that_cannot_be_read(study: Path) -> None:
    with (study / "records.jsonl").open("a", encoding="utf-8") as file:
        file.write("{}\n{}\n")
    with pytest.raises(rec.RecordError):
        render_study([study])
    assert not multiprocessing.active_children()
