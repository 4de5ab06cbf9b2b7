"""What the loops share: which file a run may add to, and how a time is shown."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import record
from harness.loop import RunError, keep_to_gpu, time_text
from harness.worker import Ready
from tests.harness.test_runner import SETUP, make_study, run

GPU = {"device": "cuda", "gpu": "NVIDIA H200"}


def ready(device: str) -> Ready:
    return Ready(device=device, env={}, method="wall", cache="uncontrolled", has_bound=False, memory_bytes=None)


def runs(*envs: dict[str, Any]) -> list[record.Record]:
    return [record.run_record(f"r{i}", "study", env) for i, env in enumerate(envs)]


def test_a_gpu_s_file_gets_a_cpu_s_run_only_if_that_is_asked_for() -> None:
    path = Path("reports/x/records.jsonl")
    with pytest.raises(RunError) as caught:
        keep_to_gpu(path, runs({"device": "cpu"}, GPU), ready("cpu"), None)
    assert str(caught.value) == (
        "reports/x/records.jsonl: expected a GPU, as of its last run (NVIDIA H200), got none that torch can use; "
        "--device cpu adds a run on the CPU all the same"
    )
    keep_to_gpu(path, runs(GPU), ready("cpu"), "cpu")
    keep_to_gpu(path, runs(GPU), ready("cuda"), None)
    keep_to_gpu(path, runs(GPU, {"device": "cpu"}), ready("cpu"), None)
    keep_to_gpu(path, [], ready("cpu"), None)


def test_a_refused_run_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the worker, which looks for the best device
    study = make_study(tmp_path, "right")
    path = tmp_path / "records.jsonl"
    record.append(path, *runs(GPU))
    before = path.read_bytes()
    with pytest.raises(RunError, match="expected a GPU"):
        run(study, setup=replace(SETUP, device=None))
    assert path.read_bytes() == before


def test_a_finished_run_says_that_nothing_is_left(tmp_path: Path) -> None:
    study = make_study(tmp_path, "right")
    run_id = run(study).run_id
    console = Console(file=io.StringIO(), width=200)
    run(study, console=console)
    assert isinstance(console.file, io.StringIO)
    assert f"{run_id}: nothing left to run; --fresh begins a new run" in console.file.getvalue()


@pytest.mark.parametrize(
    ("us", "text"), [(2.5801, "2.58 µs"), (333.24, "333.2 µs"), (9999.4, "9999 µs"), (59_230.0, "59,230 µs")]
)
def test_a_time_has_no_exponent(us: float, text: str) -> None:
    assert time_text(us) == text
