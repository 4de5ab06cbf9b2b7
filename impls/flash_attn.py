"""flash-attn 2 and 3 through their varlen functions, one query token a sequence.

Both allocate their own output and choose their own splits. The adapters add nothing to the launches but one
fill where the batch holds a sequence without keys: flash-attn reports an LSE of +inf there, which becomes
-inf for exactly those sequences. A batch of no sequences, which flash-attn refuses, launches nothing.

A head dim that a build lacks is found by asking: one call on a single key, once per head dim, head counts and
dtype. What the library answers is the reason reported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import packages_distributions, version
from math import ceil, inf
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from impls.contract import (
    TORCH_DTYPES,
    DecodeInputs,
    DecodeOutput,
    ImplUnavailable,
    Scalar,
    check_tuning,
    empty_output,
)
from impls.problem import DecodeProblem

VarlenCall: TypeAlias = Callable[[DecodeInputs, Tensor], tuple[Tensor, Tensor]]
"""``(inputs, cu_seqlens_q [B + 1] int32)`` to ``out [B, Hq, D]`` and ``lse [Hq, B]`` float32."""


class VarlenPlan:
    """A plan around a varlen function of the flash-attn family; see :class:`impls.contract.DecodePlan`.

    Args:
        problem: what is to be computed.
        device: where.
        call: the library's function with everything but the tensors filled in.
        config: what the record says about it.
    """

    def __init__(
        self, problem: DecodeProblem, device: torch.device, call: VarlenCall, config: Mapping[str, Scalar]
    ) -> None:
        self.config = config
        self._problem = problem
        self._device = device
        self._call = call
        self._cu_seqlens_q = torch.arange(problem.batch + 1, dtype=torch.int32, device=device)
        empty = [b for b, n in enumerate(problem.kv_lens) if n == 0]
        self._empty = torch.tensor(empty, dtype=torch.int64, device=device) if empty else None

    def new_output(self) -> None:
        """None: the library allocates its own output."""

    def workspaces(self) -> tuple[Tensor, ...]:
        """None that the plan owns: the library allocates them inside the call."""
        return ()

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Call the library; ``out`` is not used."""
        if self._problem.batch == 0:
            return empty_output(self._problem, self._device)
        result, lse = self._call(inputs, self._cu_seqlens_q)
        lse = lse.t()  # [B, Hq]
        if self._empty is not None:
            lse.index_fill_(0, self._empty, -inf)
        return DecodeOutput(out=result, lse=lse)


class VarlenImpl:
    """What the varlen functions of the flash-attn family share: their limits, and asking the build itself."""

    name: str

    def __init__(self) -> None:
        self._answers: dict[DecodeProblem, str | None] = {}

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """Refuses what the library documents (device, dtype, head dim), then what this build of it refuses."""
        if device.type != "cuda":
            return f"device: expected cuda, got {device.type}"
        if problem.dtype == "float32":
            return f"dtype: expected float16 or bfloat16, got {problem.dtype}"
        if problem.head_dim > 256 or problem.head_dim % 8:
            return f"head_dim: expected a multiple of 8 up to 256, got {problem.head_dim}"
        tiny = replace(problem, kv_lens=(1,))
        if tiny not in self._answers:
            self._answers[tiny] = self._ask(tiny, device)
        return self._answers[tiny]

    def _ask(self, tiny: DecodeProblem, device: torch.device) -> str | None:
        """What the library says to one key of this shape, or None if it computes it."""
        dtype = TORCH_DTYPES[tiny.dtype]
        q = torch.zeros((1, tiny.heads_q, tiny.head_dim), dtype=dtype, device=device)
        kv = torch.zeros((1, tiny.heads_kv, tiny.head_dim), dtype=dtype, device=device)
        cu_seqlens_k = torch.tensor(tiny.cu_seqlens, dtype=torch.int32, device=device)
        plan = self.plan(tiny, device)
        try:
            plan.run(DecodeInputs(tiny, q, kv, kv, cu_seqlens_k), None)
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise  # a fault of the device, not an answer
        except (RuntimeError, ValueError) as error:
            return f"{self.name}: {str(error).splitlines()[0]}"
        return None

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> VarlenPlan:
        """See :meth:`impls.contract.DecodeImpl.plan`."""
        raise NotImplementedError


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

        def call(inputs: DecodeInputs, cu_seqlens_q: Tensor) -> tuple[Tensor, Tensor]:
            out, lse, _ = self._function(
                inputs.q,
                inputs.k,
                inputs.v,
                cu_seqlens_q,
                inputs.cu_seqlens_k,
                1,
                problem.max_kv,
                softmax_scale=problem.softmax_scale,
                return_attn_probs=True,
            )
            return out, lse

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
        return VarlenPlan(problem, device, call, config)


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

        def call(inputs: DecodeInputs, cu_seqlens_q: Tensor) -> tuple[Tensor, Tensor]:
            out, lse, *_ = self._function(
                inputs.q,
                inputs.k,
                inputs.v,
                cu_seqlens_q,
                inputs.cu_seqlens_k,
                1,
                problem.max_kv,
                softmax_scale=problem.softmax_scale,
                num_splits=num_splits,
                **self._asking,
            )
            return out, lse

        config: dict[str, Scalar] = {
            "library": "flash-attn",
            "version": self._version,
            "function": "flash_attn_interface.flash_attn_varlen_func",
            "num_splits": num_splits,
            "splits_max": None,
            "splits_note": "chosen by the library for each sequence, on the device; not reported",
        }
        return VarlenPlan(problem, device, call, config)


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
