"""The environment record, with and without git, GPU and driver (behaviour 17)."""

from __future__ import annotations

import json
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from harness import env
from harness.env import GIT_VARIABLE, LIBRARIES, environment, git_commit


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "reports").mkdir()
    (tmp_path / "code.py").write_text("a = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_git_knows_the_commit_and_whether_the_code_differs(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GIT_VARIABLE, "stale")  # a repository knows better than a variable
    sha = git(repository, "rev-parse", "HEAD")
    assert git_commit(repository) == (sha, False)
    (repository / "reports" / "records.jsonl").write_text("{}\n")
    assert git_commit(repository) == (sha, False)
    (repository / "new.py").write_text("")
    assert git_commit(repository) == (sha, True)
    (repository / "new.py").unlink()
    (repository / "code.py").write_text("a = 2\n")
    assert git_commit(repository) == (sha, True)


@pytest.mark.parametrize(
    ("stated", "known"),
    [("", (None, None)), ("1a2b3c", ("1a2b3c", False)), ("1a2b3c-dirty", ("1a2b3c", True))],
)
def test_without_a_repository_the_variable_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: str, known: tuple[str | None, bool | None]
) -> None:
    monkeypatch.setenv(GIT_VARIABLE, stated)
    assert git_commit(tmp_path) == known


def test_a_copy_inside_another_repository_does_not_claim_its_commit(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GIT_VARIABLE, "ours")
    inside = repository / "site-packages"
    inside.mkdir()
    assert git_commit(inside) == ("ours", False)


def test_without_git_nothing_fails(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv(GIT_VARIABLE, raising=False)
    assert git_commit(repository) == (None, None)


def test_environment_of_a_cpu_run() -> None:
    got = environment("cpu")
    assert json.loads(json.dumps(got, allow_nan=False)) == got
    assert got["device"] == "cpu"
    assert [got[key] for key in ("gpu", "driver", "sm_count", "l2_bytes", "clocks")] == [None] * 5
    assert got["torch"] == metadata.version("torch")
    assert got["cpu"]
    assert {"git", "dirty", "python", *LIBRARIES} <= set(got)


def test_the_build_behind_a_shared_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"tokenspeed-fa3": "3.0.0"}

    def version(distribution: str) -> str:
        if distribution not in installed:
            raise metadata.PackageNotFoundError(distribution)
        return installed[distribution]

    monkeypatch.setattr(metadata, "version", version)
    got = environment("cpu")
    assert (got["torch"], got["flash_attn"]) == (None, None)
    assert got["flash_attn_3"] == "3.0.0 (tokenspeed-fa3)"
    installed["flash-attn-3"] = "3.1"
    assert environment("cpu")["flash_attn_3"] == "3.1"


def test_an_unknown_gpu_or_a_missing_driver_is_none() -> None:
    driver, clocks = env._nvml("GPU-00000000-0000-0000-0000-000000000000")
    assert clocks is None
    assert driver is None or driver[0].isdigit()


@pytest.mark.gpu
def test_environment_of_a_gpu_run() -> None:
    got = environment("cuda")
    assert json.loads(json.dumps(got, allow_nan=False)) == got
    assert got["gpu"]
    assert got["sm_count"] > 0
    assert got["l2_bytes"] > 2**20
