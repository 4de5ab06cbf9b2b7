"""flash-attn 2 and 3, each through its varlen function and through its paged KV-cache function.

What the varlen functions share is in :mod:`impls.varlen_plan`, what the paged ones share in
:mod:`impls.paged_plan`. The paged functions are not only another layout: flash-attn 2 splits a batch without
grouped heads there, and flash-attn 3 takes its schedule from the caller instead of making it in every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from math import ceil
from typing import Any

import torch

from impls.contract import TORCH_DTYPES, Scalar, check_tuning
from impls.libraries import distributions, import_library, sm_count
from impls.paged_plan import PagedImpl, PagedPlan, Pages
from impls.problem import DecodeProblem
from impls.varlen_plan import VarlenImpl, VarlenPlan, library_splits

FLASH_ATTN_3 = "flash_attn_interface"
"""The module that the Hopper builds are imported by."""

SCHEDULED_BY = ("plan", "call")
"""Who makes the schedule of flash-attn 3's paged function: ``plan``, or the library in every call."""

CHOSEN_ON_DEVICE = "chosen by the library for each sequence, on the device; not reported"
"""What the record says of flash-attn 3's splits."""


class FlashAttn2(VarlenImpl):
    """``flash_attn.flash_attn_varlen_func``."""

    name = "flash-attn-2"

    def __init__(self) -> None:
        super().__init__()
        library = import_library("flash_attn")
        self._function = library.flash_attn_varlen_func
        self._version = str(library.__version__)

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> VarlenPlan:
        """See :meth:`impls.contract.DecodeImpl.plan`; there is nothing to tune."""
        check_tuning(tuning, {})

        note = "one count for the whole batch, from its longest sequence"
        if problem.group == 1:
            note = "cannot split: varlen splits only where heads_q > heads_kv"
        config: dict[str, Scalar] = {
            "library": "flash-attn",
            "version": self._version,
            "function": "flash_attn.flash_attn_varlen_func",
            "num_splits": "auto",
            "splits_max": 1 if problem.group == 1 else splits_of_flash_attn_2(problem, sm_count(device)),
            "splits_note": note,
        }
        options = {"softmax_scale": problem.softmax_scale, "return_attn_probs": True}
        return VarlenPlan(problem, device, self._function, options, config)


class FlashAttn2Paged(PagedImpl):
    """``flash_attn.flash_attn_with_kvcache``: pages of 256 keys, the fewest that it takes."""

    name = "flash-attn-2-paged"
    page_size = 256

    def __init__(self) -> None:
        super().__init__()
        library = import_library("flash_attn")
        self._function = library.flash_attn_with_kvcache
        self._version = str(library.__version__)

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> PagedPlan:
        """See :meth:`impls.contract.DecodeImpl.plan`; ``num_splits`` 0 leaves the choice to the library."""
        num_splits = library_splits(check_tuning(tuning, {"num_splits": 0}))

        pages = Pages.of(problem, device, self.page_size)
        config: dict[str, Scalar] = {
            "library": "flash-attn",
            "version": self._version,
            "function": "flash_attn.flash_attn_with_kvcache",
            "num_splits": num_splits,
            "splits_max": num_splits or splits_of_flash_attn_2(problem, sm_count(device)),
            "splits_note": "one count for the whole batch, from its longest sequence",
        }
        options = {
            "block_table": pages.table,
            "cache_seqlens": pages.lengths,
            "softmax_scale": problem.softmax_scale,
            "num_splits": num_splits,
            "return_softmax_lse": True,
        }
        return PagedPlan(problem, device, self.page_size, self._function, options, config)


class FlashAttn3(VarlenImpl):
    """``flash_attn_interface.flash_attn_varlen_func``, the Hopper build."""

    name = "flash-attn-3"

    def __init__(self) -> None:
        super().__init__()
        library = import_library(FLASH_ATTN_3)
        self._function = library.flash_attn_varlen_func
        # Older builds return the LSE always, newer ones when asked.
        asks = "return_attn_probs" in inspect.signature(self._function).parameters
        self._asking: dict[str, Any] = {"return_attn_probs": True} if asks else {}
        self._version = distributions(FLASH_ATTN_3)

    def documented_refusal(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """As for the family, and everything but Hopper."""
        return _not_hopper(device) or super().documented_refusal(problem, device)

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> VarlenPlan:
        """See :meth:`impls.contract.DecodeImpl.plan`; ``num_splits`` 0 leaves the choice to the library."""
        num_splits = library_splits(check_tuning(tuning, {"num_splits": 0}))

        config: dict[str, Scalar] = {
            "library": "flash-attn",
            "version": self._version,
            "function": "flash_attn_interface.flash_attn_varlen_func",
            "num_splits": num_splits,
            "splits_max": None,
            "splits_note": CHOSEN_ON_DEVICE,
        }
        options = {"softmax_scale": problem.softmax_scale, "num_splits": num_splits, **self._asking}
        return VarlenPlan(problem, device, self._function, options, config)


class FlashAttn3Paged(PagedImpl):
    """``flash_attn_interface.flash_attn_with_kvcache``: pages of 64 keys, the schedule made by ``plan``.

    ``get_scheduler_metadata`` decides on the device how each sequence is split; the varlen function does the
    same in every call, and so does this one where it is given none (``scheduled_by="call"``). The metadata end
    with a counter that a call uses and leaves at 0 again: ``flash_api.cpp`` sets
    ``skip_scheduler_metadata_computation``, and the combine kernel, or a fill where nothing is split, resets it.
    """

    name = "flash-attn-3-paged"
    page_size = 64

    def __init__(self) -> None:
        super().__init__()
        library = import_library(FLASH_ATTN_3)
        self._function = library.flash_attn_with_kvcache
        self._schedule = library.get_scheduler_metadata
        self._version = distributions(FLASH_ATTN_3)

    def documented_refusal(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """As for the paged functions, and everything but Hopper."""
        return _not_hopper(device) or super().documented_refusal(problem, device)

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> PagedPlan:
        """See :meth:`impls.contract.DecodeImpl.plan`.

        Of the tuning, ``num_splits`` 0 leaves the choice to the library, and ``scheduled_by`` is one of
        :data:`SCHEDULED_BY`.
        """
        choice = check_tuning(tuning, {"num_splits": 0, "scheduled_by": SCHEDULED_BY[0]})
        num_splits, scheduled_by = library_splits(choice), choice["scheduled_by"]
        if scheduled_by not in SCHEDULED_BY:
            raise ValueError(f"scheduled_by: expected one of {', '.join(SCHEDULED_BY)}, got {scheduled_by!r}")

        pages = Pages.of(problem, device, self.page_size)
        config: dict[str, Scalar] = {
            "library": "flash-attn",
            "version": self._version,
            "function": "flash_attn_interface.flash_attn_with_kvcache",
            "num_splits": num_splits,
            "splits_max": None,
            "splits_note": CHOSEN_ON_DEVICE,
            "scheduler_metadata": f"made by {scheduled_by}",
        }
        options = {
            "page_table": pages.table,
            "cache_seqlens": pages.lengths,
            "softmax_scale": problem.softmax_scale,
            "scheduler_metadata": self.schedule(problem, pages, num_splits) if scheduled_by == "plan" else None,
            "num_splits": num_splits,
            "return_softmax_lse": True,
        }
        return PagedPlan(problem, device, self.page_size, self._function, options, config)

    def schedule(self, problem: DecodeProblem, pages: Pages, num_splits: int = 0) -> Any:
        """Launch the kernel that plans, and return what it makes: int32, of a size that the library knows.

        Args:
            problem: what is to be computed.
            pages: of its keys.
            num_splits: as for :meth:`plan`.

        Returns:
            The metadata; None without a page.
        """
        if not pages.width:
            return None  # nothing to schedule, and nothing will be called
        return self._schedule(
            problem.batch,
            1,  # query tokens
            pages.width * pages.size,  # what the function takes for the longest sequence
            problem.heads_q,
            problem.heads_kv,
            problem.head_dim,
            pages.lengths,
            qkv_dtype=TORCH_DTYPES[problem.dtype],
            page_size=pages.size,
            num_splits=num_splits,
        )


def splits_of_flash_attn_2(problem: DecodeProblem, sms: int) -> int:
    """The split count that flash-attn 2 takes for one query token a sequence, where it splits at all.

    It packs the query heads of a KV head into rows of one tile and splits by one count for the whole batch:
    the smallest whose last wave of CTAs (two an SM) is at least 85 % as full as that of the best count, among
    those that change the number of key blocks in a split; 1 where the tiles alone fill 80 % of a wave. The
    varlen function splits only where it packs, that is, where a KV head has several query heads. Source:
    ``num_splits_heuristic``, ``mha_varlen_fwd`` and ``mha_fwd_kvcache`` in flash-attn 2.8,
    ``csrc/flash_attn/flash_api.cpp``.

    Args:
        problem: what is computed.
        sms: SMs of the device.
    """
    tiles = problem.batch * problem.heads_kv * ceil(problem.group / 64)
    wave = 2 * sms
    if tiles >= 0.8 * wave:
        return 1
    block_n = 256 if problem.head_dim <= 64 else 128 if problem.head_dim <= 128 else 64
    blocks = ceil(problem.max_kv / block_n)
    fullness = {1: 0.0}
    for splits in range(1, min(128, wave, blocks) + 1):
        if splits == 1 or ceil(blocks / splits) != ceil(blocks / (splits - 1)):
            waves = tiles * splits / wave
            fullness[splits] = waves / max(1, ceil(waves))
    enough = 0.85 * max(fullness.values())
    return next(splits for splits, full in fullness.items() if full >= enough)


def _not_hopper(device: torch.device) -> str | None:
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device))[0] != 9:
        return f"device: expected compute capability 9.x (Hopper), got {capability[0]}.{capability[1]}"
    return None
