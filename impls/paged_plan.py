"""What functions that read K and V in pages share: packed rows seen as pages, a table of them, and the limits.

Packed K and V are a paged cache already wherever every sequence starts on a page: the pages are a *view* of the
packed rows, in order, and nothing is copied. That takes lengths that are whole pages. Only the last sequence
could end within a page, and that page would reach past the end of the tensor, into memory that is not its own:
such lengths are refused too, rather than padded in a copy.

The tables are made on the host from lengths alone and uploaded by ``plan``; ``run`` launches what the library
launches, and one fill where the batch holds a sequence without keys, whose LSE these libraries report as +inf.
A batch without any keys has no pages: two fills and no call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from impls.contract import DecodeInputs, DecodeOutput, PlanRefused, Scalar, empty_output
from impls.problem import DecodeProblem
from impls.varlen_plan import LibraryPlan, VarlenImpl, correct_empty, without_keys


def check_pages(problem: DecodeProblem, page_size: int) -> str | None:
    """The refusal of lengths that are not whole pages, or None where they are.

    Args:
        problem: what is to be computed.
        page_size: keys of a page.
    """
    for b, n in enumerate(problem.kv_lens):
        if n % page_size:
            return (
                f"kv_lens: expected multiples of {page_size} (pages are a view of the packed rows), "
                f"got kv_lens[{b}] = {n}"
            )
    return None


def as_pages(packed: Tensor, page_size: int) -> Tensor:
    """``[total_kv, Hkv, D]`` as ``[pages, page_size, Hkv, D]``: a view, whatever the strides of its rows."""
    return packed.view(-1, page_size, *packed.shape[1:])


@dataclass(frozen=True)
class Pages:
    """Which pages hold which sequence's keys, on the device.

    Args:
        size: keys of a page.
        width: pages of the longest sequence.
        table: ``[B, width]`` int32: the pages of each sequence, in order; past its last page 0.
        lengths: ``[B]`` int32: keys of each sequence.
    """

    size: int
    width: int
    table: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, problem: DecodeProblem, device: torch.device, size: int) -> Pages:
        """The pages of a problem whose lengths are multiples of ``size``.

        Raises:
            PlanRefused: for other lengths, as of :func:`check_pages`.
        """
        if refusal := check_pages(problem, size):
            raise PlanRefused(refusal)
        counts = np.asarray(problem.kv_lens, dtype=np.int64) // size
        width = int(counts.max(initial=0))
        column = np.arange(width)
        table = np.where(column < counts[:, None], (np.cumsum(counts) - counts)[:, None] + column, 0)
        return cls(
            size=size,
            width=width,
            table=torch.from_numpy(table.astype(np.int32)).to(device),
            lengths=torch.tensor(problem.kv_lens, dtype=torch.int32, device=device),
        )


class PagedPlan(LibraryPlan):
    """A plan around a KV-cache function of the flash-attn family.

    The function takes q ``[B, 1, Hq, D]`` and k and v in pages, and returns ``out [B, 1, Hq, D]``,
    ``lse [B, Hq, 1]`` float32, and whatever else.

    Args:
        problem: what is to be computed.
        device: where.
        page_size: keys of a page.
        function: the library's.
        options: its other arguments, the table and the lengths among them.
        config: what the record says about it.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        device: torch.device,
        page_size: int,
        function: Callable[..., tuple[Any, ...]],
        options: Mapping[str, Any],
        config: Mapping[str, Scalar],
    ) -> None:
        super().__init__(problem, device, function, options, {**config, "page_size": page_size})
        self._total_kv = problem.total_kv  # a sum over all lengths: not in every launch
        self._page_size = page_size

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Call the library on views of k and v; ``out`` is not used."""
        if not self._total_kv:
            return without_keys(empty_output(self._problem, self._device))
        k, v = as_pages(inputs.k, self._page_size), as_pages(inputs.v, self._page_size)
        result, lse, *_ = self._function(inputs.q.unsqueeze(1), k, v, **self._options)
        return correct_empty(DecodeOutput(out=result.squeeze(1), lse=lse.squeeze(2)), self._empty)


class PagedImpl(VarlenImpl):
    """What the paged functions of the flash-attn family share: their limits, and asking the build itself.

    Attributes:
        page_size: keys of a page.
    """

    page_size: int

    def __init__(self) -> None:
        super().__init__()
        self.tiny_kv = self.page_size

    def documented_refusal(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """As for the family, and lengths that are not whole pages."""
        return super().documented_refusal(problem, device) or check_pages(problem, self.page_size)
