"""Attention as torch ships it: the varlen function, and scaled_dot_product_attention sequence by sequence."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from impls.contract import (
    TORCH_DTYPES,
    DecodeInputs,
    DecodeOutput,
    ImplUnavailable,
    Scalar,
    check_tuning,
)
from impls.problem import DecodeProblem
from impls.varlen_plan import VarlenImpl, VarlenPlan


class TorchVarlen(VarlenImpl):
    """``torch.nn.attention.varlen.varlen_attn``: the flash-attn 2 that is built into torch."""

    name = "torch-varlen"

    def __init__(self) -> None:
        super().__init__()
        try:
            from torch.nn.attention.varlen import AuxRequest, varlen_attn
        except ImportError as error:
            raise ImplUnavailable(f"import torch.nn.attention.varlen: {error}") from error
        self._function: Any = varlen_attn
        self._options: dict[str, Any] = {"return_aux": AuxRequest(lse=True)}
        # Before the option existed, fewer KV heads needed no permission.
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            self._options["enable_gqa"] = True

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> VarlenPlan:
        """See :meth:`impls.contract.DecodeImpl.plan`; there is nothing to tune."""
        check_tuning(tuning, {})

        config: dict[str, Scalar] = {
            "library": "torch",
            "version": torch.__version__,
            "function": "torch.nn.attention.varlen.varlen_attn",
            "num_splits": "auto",
            "splits_max": None,
            "splits_note": "chosen by the flash-attn built into torch; not reported",
        }
        options = {"scale": problem.softmax_scale, **self._options}
        return VarlenPlan(problem, device, self._function, options, config)


class SdpaPlan:
    """One ``scaled_dot_product_attention`` a sequence; see :class:`impls.contract.DecodePlan`."""

    def __init__(self, problem: DecodeProblem, device: torch.device) -> None:
        self.config: Mapping[str, Scalar] = {
            "library": "torch",
            "version": torch.__version__,
            "function": "torch.nn.functional.scaled_dot_product_attention",
            "calls": sum(n > 0 for n in problem.kv_lens),
        }
        self._problem = problem
        self._shape = (problem.batch, problem.heads_q, problem.head_dim)
        self._dtype = TORCH_DTYPES[problem.dtype]
        self._device = device
        self._zeros = torch.zeros((1, *self._shape[1:]), dtype=self._dtype, device=device)

    def new_output(self) -> DecodeOutput:
        """A fresh output, without an LSE."""
        return DecodeOutput(out=torch.empty(self._shape, dtype=self._dtype, device=self._device), lse=None)

    def workspaces(self) -> tuple[Tensor, ...]:
        """None."""
        return ()

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Attend sequence by sequence, then gather the rows into the output."""
        out = out or self.new_output()
        rows = [self._row(inputs, b) for b in range(self._problem.batch)]
        if rows:
            torch.cat(rows, out=out.out)
        return out

    def _row(self, inputs: DecodeInputs, b: int) -> Tensor:
        """``[1, Hq, D]``: the output of sequence ``b``."""
        start, stop = self._problem.cu_seqlens[b : b + 2]
        if start == stop:
            return self._zeros
        row = scaled_dot_product_attention(
            inputs.q[b, :, None].unsqueeze(0),  # [1, Hq, 1, D]
            inputs.k[start:stop].transpose(0, 1).unsqueeze(0),  # [1, Hkv, keys, D]
            inputs.v[start:stop].transpose(0, 1).unsqueeze(0),
            scale=self._problem.softmax_scale,
            enable_gqa=True,
        )
        return row.squeeze(2)


class TorchSdpa:
    """``scaled_dot_product_attention`` with grouped heads; it returns no LSE."""

    name = "torch-sdpa"

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """Refuses nothing: torch falls back to plain products where no fused kernel fits."""
        return None

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> SdpaPlan:
        """See :meth:`impls.contract.DecodeImpl.plan`; there is nothing to tune."""
        check_tuning(tuning, {})
        return SdpaPlan(problem, device)
