"""What all tests share: the device, and the rule that a GPU run hides nothing.

Tests marked ``gpu`` are skipped where there is no CUDA device. With ``SPLITKV_REQUIRE_GPU=1`` a missing device
stops the run, and every skip, of any test, is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
import torch

REQUIRE_GPU = os.environ.get("SPLITKV_REQUIRE_GPU") == "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The best device here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    if REQUIRE_GPU:
        raise pytest.UsageError("SPLITKV_REQUIRE_GPU=1: expected a CUDA device, got none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if REQUIRE_GPU and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under SPLITKV_REQUIRE_GPU=1: {report.longrepr}"
    return report
