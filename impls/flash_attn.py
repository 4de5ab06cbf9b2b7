"""flash-attn 2 and 3 through their varlen functions; see :mod:`impls.varlen_plan` for what they share."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import packages_distributions, version
from math import ceil
from types import ModuleType
from typing import Any

import torch

from impls.contract import ImplUnavailable, Scalar, check_tuning
from impls.problem import DecodeProblem
from impls.varlen_plan import VarlenImpl, VarlenPlan


class FlashAttn2(VarlenImpl):
    """``flash_attn.flash_attn_varlen_func``."""

    name = "flash-attn-2"

    def __init__(self) -> None:
        super().__init__()
        library = _import("flash_attn")
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
            "splits_max": splits_of_flash_attn_2(problem, _sm_count(device)),
            "splits_note": note,
        }
        options = {"softmax_scale": problem.softmax_scale, "return_attn_probs": True}
        return VarlenPlan(problem, device, self._function, options, config)


class FlashAttn3(VarlenImpl):
    """``flash_attn_interface.flash_attn_varlen_func``, the Hopper build."""

    name = "flash-attn-3"

    def __init__(self) -> None:
        super().__init__()
        library = _import("flash_attn_interface")
        self._function = library.flash_attn_varlen_func
        # Older builds return the LSE always, newer ones when asked.
        asks = "return_attn_probs" in inspect.signature(self._function).parameters
        self._asking: dict[str, Any] = {"return_attn_probs": True} if asks else {}
        names = packages_distributions().get("flash_attn_interface", ())
        self._version = ", ".join(f"{name} {version(name)}" for name in sorted(set(names))) or None

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """As for the family, and everything but Hopper."""
        if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device))[0] != 9:
            return f"device: expected compute capability 9.x (Hopper), got {capability[0]}.{capability[1]}"
        return super().unsupported(problem, device)

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> VarlenPlan:
        """See :meth:`impls.contract.DecodeImpl.plan`; ``num_splits`` 0 leaves the choice to the library."""
        num_splits = check_tuning(tuning, {"num_splits": 0})["num_splits"]

        config: dict[str, Scalar] = {
            "library": "flash-attn",
            "version": self._version,
            "function": "flash_attn_interface.flash_attn_varlen_func",
            "num_splits": num_splits,
            "splits_max": None,
            "splits_note": "chosen by the library for each sequence, on the device; not reported",
        }
        options = {"softmax_scale": problem.softmax_scale, "num_splits": num_splits, **self._asking}
        return VarlenPlan(problem, device, self._function, options, config)


def splits_of_flash_attn_2(problem: DecodeProblem, sm_count: int) -> int:
    """The split count that flash-attn 2's varlen function takes for one query token a sequence.

    It packs the query heads of a KV head into rows of one tile and only then splits, by one count for the
    whole batch: the smallest whose last wave of CTAs (two an SM) is at least 85 % as full as that of the
    best count, among those that change the number of key blocks in a split; 1 where the tiles alone fill
    80 % of a wave. Source: ``num_splits_heuristic`` and ``mha_varlen_fwd`` in flash-attn 2.8,
    ``csrc/flash_attn/flash_api.cpp``.

    Args:
        problem: what is computed.
        sm_count: SMs of the device.
    """
    if problem.group == 1:
        return 1
    tiles = problem.batch * problem.heads_kv * ceil(problem.group / 64)
    wave = 2 * sm_count
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


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except Exception as error:  # a build for another torch or CUDA fails in more ways than ImportError
        raise ImplUnavailable(f"import {name}: {type(error).__name__}: {error}") from error


def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
