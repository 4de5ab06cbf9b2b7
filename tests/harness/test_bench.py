"""For which lengths a later plan is timed."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from harness.bench import _other_lengths
from impls.contract import DecodeImpl
from impls.paged_plan import check_pages
from impls.problem import DecodeProblem
from tests.impls.cases import problem


class Takes:
    """Supports lengths of whole pages alone, or only those it is told."""

    def __init__(self, page_size: int, alone: tuple[int, ...] | None = None) -> None:
        self.page_size = page_size
        self.alone = alone

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        if self.alone is not None and problem.kv_lens != self.alone:
            return "kv_lens: expected others"
        return check_pages(problem, self.page_size)


@pytest.mark.parametrize(
    ("impl", "lens", "others"),
    [
        (Takes(1), (5, 0, 70), (4, 1, 69)),
        (Takes(64), (64, 0, 640), (192, 256, 384)),
        (Takes(256), (256, 1024), (0, 768)),
        (Takes(1, alone=(5, 7)), (5, 7), (5, 7)),
        (Takes(1), (), ()),
    ],
)
def test_other_lengths_are_supported_ones(impl: Takes, lens: tuple[int, ...], others: tuple[int, ...]) -> None:
    other = _other_lengths(problem(*lens, head_dim=80), cast(DecodeImpl, impl), torch.device("cpu"))
    assert other == problem(*others, head_dim=80)
