"""Fixtures of the kernels' tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def hopper() -> None:
    """Clusters and exchanges are of sm_90a; on another GPU there is nothing to compare."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90a")
