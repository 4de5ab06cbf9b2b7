"""The contract between the harness and an implementation: tensors in, a plan, tensors out.

The one validator of inputs lives here (:class:`DecodeInputs`), so that every implementation refuses the
same bad input with the same words, and none of them pays for a check inside ``run``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from impls.problem import DecodeProblem

Scalar: TypeAlias = str | int | float | bool | None
"""A value of a plan's ``config`` or of ``tuning``: it must survive JSON."""

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


class ImplUnavailable(RuntimeError):
    """The library behind an implementation is not usable here; the message says what import said."""


class PlanRefused(ValueError):
    """A plan this implementation will not make (a workspace over its budget, an offset past a limit).

    The message states the rule and the number. The harness records it as ``unsupported``.
    """


class InputError(ValueError):
    """Tensors that do not fit their problem; the message names the tensor or index at fault."""


@dataclass(frozen=True)
class DecodeInputs:
    """The tensors of one problem, validated when made (this may synchronise with the device).

    Args:
        problem: what is to be computed.
        q: ``[B, Hq, D]``, last dimension contiguous.
        k: ``[total_kv, Hkv, D]``, packed; may be a strided view (rows or heads sliced out of a larger
            buffer) as long as the last dimension is contiguous.
        v: like ``k``.
        cu_seqlens_k: ``[B + 1]`` int32, contiguous: prefix sums of ``problem.kv_lens`` starting at 0.

    Raises:
        InputError: naming the tensor, what was expected and what was got.
    """

    problem: DecodeProblem
    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_k: Tensor

    def __post_init__(self) -> None:
        p = self.problem
        expected = {
            "q": (p.batch, p.heads_q, p.head_dim),
            "k": (p.total_kv, p.heads_kv, p.head_dim),
            "v": (p.total_kv, p.heads_kv, p.head_dim),
            "cu_seqlens_k": (p.batch + 1,),
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor):
                raise InputError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
            if tensor.dim() != len(shape):
                raise InputError(f"{name}: expected rank {len(shape)}, got rank {tensor.dim()}")
            if name != "cu_seqlens_k":
                dtype = TORCH_DTYPES[p.dtype]
                if tensor.dtype != dtype:
                    raise InputError(f"{name}: expected dtype {dtype}, got {tensor.dtype}")
            elif tensor.dtype != torch.int32:
                raise InputError(f"cu_seqlens_k: expected dtype torch.int32, got {tensor.dtype}")
            if tensor.device != self.q.device:
                raise InputError(f"{name}: expected device {self.q.device} (that of q), got {tensor.device}")
            if name == "cu_seqlens_k":
                # The values first: they say more than a shape that follows from them.
                self._check_cu_seqlens()
            if tuple(tensor.shape) != shape:
                raise InputError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
            if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise InputError(f"{name}: expected last dimension contiguous (stride 1), got {tensor.stride(-1)}")

    def _check_cu_seqlens(self) -> None:
        values = self.cu_seqlens_k.tolist()
        if len(values) != self.problem.batch + 1:
            raise InputError(
                f"cu_seqlens_k: expected {self.problem.batch + 1} values (batch + 1), got {len(values)}"
            )
        if values[0] != 0:
            raise InputError(f"cu_seqlens_k[0]: expected 0, got {values[0]}")
        for i in range(1, len(values)):
            if values[i] < values[i - 1]:
                raise InputError(f"cu_seqlens_k[{i}]: expected >= {values[i - 1]}, got {values[i]} (decreasing)")
        if values[-1] != self.k.shape[0]:
            raise InputError(
                f"cu_seqlens_k[{len(values) - 1}]: expected {self.k.shape[0]} (rows of k), got {values[-1]}"
            )
        for i, (got, want) in enumerate(zip(values, self.problem.cu_seqlens, strict=True)):
            if got != want:
                raise InputError(f"cu_seqlens_k[{i}]: expected {want} (from problem.kv_lens), got {got}")

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.q.device


@dataclass(frozen=True)
class DecodeOutput:
    """What an implementation returns.

    Args:
        out: ``[B, Hq, D]``, dtype of q.
        lse: ``[B, Hq]`` float32, natural logarithm; None where a library returns none.
    """

    out: Tensor
    lse: Tensor | None


@runtime_checkable
class DecodePlan(Protocol):
    """Everything decided on the host for one problem; running it only launches kernels."""

    @property
    def config(self) -> Mapping[str, Scalar]:
        """What was asked and what it came to, enough to repeat the run; goes into the record."""
        ...

    def new_output(self) -> DecodeOutput | None:
        """Fresh output tensors to pass to :meth:`run`; None where the library allocates its own."""
        ...

    def workspaces(self) -> tuple[Tensor, ...]:
        """Tensors this plan owns and writes in every run; may be empty.

        Those of floating point are scratch: whatever they hold before a run is of no account. Integer ones are
        tables and counters that a run reads.
        """
        ...

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Launch; no synchronisation, no allocation where ``out`` is given, capturable in a CUDA graph.

        Runs of one plan must not overlap, for they write the same workspaces: those on another stream wait for the
        ones before, and the plan is kept until its last run is done.
        """
        ...


@runtime_checkable
class DecodeImpl(Protocol):
    """One way to compute a :class:`DecodeProblem`. Constructing it raises :class:`ImplUnavailable`."""

    name: str

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """The rule by which this implementation refuses the problem on this device, or None."""
        ...

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> DecodePlan:
        """Compile, choose splits, upload tables, allocate workspace. Nothing here is ever timed as a kernel.

        Args:
            problem: what is to be computed.
            device: where.
            tuning: overrides of the implementation's own choices, e.g. ``{"num_splits": 4}``; keys an
                implementation does not know are a ``ValueError`` that lists the known ones.

        Raises:
            PlanRefused: for a plan over a limit, with the number.
        """
        ...


def empty_output(problem: DecodeProblem, device: torch.device) -> DecodeOutput:
    """Uninitialised ``out [B, Hq, D]`` and float32 ``lse [B, Hq]`` for a problem."""
    shape = (problem.batch, problem.heads_q, problem.head_dim)
    return DecodeOutput(
        out=torch.empty(shape, dtype=TORCH_DTYPES[problem.dtype], device=device),
        lse=torch.empty(shape[:2], dtype=torch.float32, device=device),
    )


def check_tuning(tuning: Mapping[str, Scalar] | None, known: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """``known`` (name -> default) overlaid with ``tuning``.

    Raises:
        ValueError: for a key that is not among ``known``.
    """
    merged = dict(known)
    for key, value in (tuning or {}).items():
        if key not in known:
            raise ValueError(f"tuning: expected keys among {', '.join(known) or 'none'}, got {key!r}")
        merged[key] = value
    return merged
