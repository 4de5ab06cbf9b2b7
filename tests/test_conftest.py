"""The rule that a GPU run hides nothing, tried on suites of one test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pytest_on(folder: Path, test: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A pytest of its own, under our conftest."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_it.py").write_text(test)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            str(ROOT / "pyproject.toml"),
            "--rootdir",
            str(folder),
            folder,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
    )


def test_without_a_device_a_gpu_run_stops(tmp_path: Path) -> None:
    done = pytest_on(tmp_path, "def test(): pass\n", SPLITKV_REQUIRE_GPU="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 4, done.stdout
    assert "SPLITKV_REQUIRE_GPU=1: expected a CUDA device, got none" in done.stdout + done.stderr


def test_on_a_gpu_run_any_skip_is_a_failure(tmp_path: Path) -> None:
    pretend = "import pytest, torch\ntorch.cuda.is_available = lambda: True\n"
    skip = "def test(): pytest.skip('for no good reason')\n"
    assert pytest_on(tmp_path, pretend + skip, SPLITKV_REQUIRE_GPU="0").returncode == 0
    done = pytest_on(tmp_path, pretend + skip, SPLITKV_REQUIRE_GPU="1")
    assert done.returncode == 1, done.stdout
    assert "skipped under SPLITKV_REQUIRE_GPU=1" in done.stdout


def test_without_a_device_gpu_tests_are_skipped(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.gpu\ndef test(): raise AssertionError\n"
    done = pytest_on(tmp_path, test, SPLITKV_REQUIRE_GPU="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
