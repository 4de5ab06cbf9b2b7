"""What runs under ``compute-sanitizer`` is right by itself, so that a report there is about memory."""

from __future__ import annotations

import pytest
import torch

from impls.catalog import OURS
from tests.sanitize import BRANCHES, Branch, run


@pytest.mark.gpu
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("branch", BRANCHES, ids=lambda branch: branch.covers)
def test_every_branch_is_right(branch: Branch, name: str) -> None:
    reason = run(name, branch, torch.device("cuda"))
    assert reason is None or (branch.shape[3] == "float32" and reason.startswith("unsupported: dtype: "))
