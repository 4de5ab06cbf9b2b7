"""What the varlen functions of the flash-attn family share: one query token a sequence, and their limits.

The libraries allocate their own output and choose their own splits. The adapter adds nothing to the launches
but one fill where the batch holds a sequence without keys: these libraries report an LSE of +inf there, which
becomes -inf for exactly those sequences. A batch of no sequences, which they refuse, launches nothing.

A head dim that a build lacks is found by asking: one call on a single key (a single page, where the library
reads pages: :mod:`impls.paged_plan`), once per head dim, head counts and dtype. What the library answers is the
reason reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from impls.contract import TORCH_DTYPES, DecodeInputs, DecodeOutput, DecodePlan, Scalar, empty_output
from impls.problem import DecodeProblem


def empty_sequences(problem: DecodeProblem, device: torch.device) -> Tensor | None:
    """The indices, int64, of the sequences without keys; None if there are none."""
    empty = [b for b, n in enumerate(problem.kv_lens) if n == 0]
    return torch.tensor(empty, dtype=torch.int64, device=device) if empty else None


def correct_empty(out: DecodeOutput, empty: Tensor | None) -> DecodeOutput:
    """``out`` with an LSE of minus infinity, in place, where sequences have no keys.

    Args:
        out: of a library, which may say anything there.
        empty: of :func:`empty_sequences`.
    """
    if empty is not None and out.lse is not None:
        out.lse.index_fill_(0, empty, -inf)
    return out


def without_keys(out: DecodeOutput) -> DecodeOutput:
    """``out`` filled, in place, with what a batch without any keys has: 0, and an LSE of minus infinity."""
    out.out.zero_()
    if out.lse is not None:
        out.lse.fill_(-inf)
    return out


def library_splits(choice: Mapping[str, Scalar]) -> int:
    """The ``num_splits`` of a tuning as these libraries take it: 0 leaves the choice to them.

    Raises:
        ValueError: if that is not an integer of at least 0.
    """
    value = choice["num_splits"]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"num_splits: expected an integer >= 0 (0: the library chooses), got {value!r}")
    return value


class LibraryPlan:
    """A plan around a function that allocates its own output; see :class:`impls.contract.DecodePlan`.

    Args:
        problem: what is to be computed.
        device: where.
        function: the library's.
        options: its arguments that are no tensors of the inputs.
        config: what the record says about it.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        device: torch.device,
        function: Callable[..., tuple[Any, ...]],
        options: Mapping[str, Any],
        config: Mapping[str, Scalar],
    ) -> None:
        self.config = config
        self._problem = problem
        self._device = device
        self._function = function
        self._options = options
        self._empty = empty_sequences(problem, device)

    def new_output(self) -> None:
        """None: the library allocates its own output."""

    def workspaces(self) -> tuple[Tensor, ...]:
        """None that the plan owns: the library allocates them inside the call."""
        return ()


class VarlenPlan(LibraryPlan):
    """A plan around a varlen function of the flash-attn family.

    The function takes q, k, v, the offsets of queries and of keys and the longest of each, and returns
    ``out [B, Hq, D]``, ``lse [Hq, B]`` float32, and whatever else. The arguments are those of :class:`LibraryPlan`.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        device: torch.device,
        function: Callable[..., tuple[Any, ...]],
        options: Mapping[str, Any],
        config: Mapping[str, Scalar],
    ) -> None:
        super().__init__(problem, device, function, options, config)
        self._max_kv = problem.max_kv  # a maximum over all lengths: not in every launch
        self._cu_seqlens_q = torch.arange(problem.batch + 1, dtype=torch.int32, device=device)

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Call the library; ``out`` is not used."""
        if self._problem.batch == 0:
            return empty_output(self._problem, self._device)
        q, k, v, cu_seqlens_q, cu_seqlens_k = inputs.q, inputs.k, inputs.v, self._cu_seqlens_q, inputs.cu_seqlens_k
        result, lse, *_ = self._function(q, k, v, cu_seqlens_q, cu_seqlens_k, 1, self._max_kv, **self._options)
        return correct_empty(DecodeOutput(out=result, lse=lse.t()), self._empty)


class VarlenImpl:
    """What the functions of the flash-attn family share: their limits, and asking the build itself.

    Attributes:
        tiny_kv: keys of the one sequence on which a build is asked what it computes.
    """

    name: str
    tiny_kv = 1

    def __init__(self) -> None:
        self._answers: dict[DecodeProblem, str | None] = {}

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """Refuses what the library documents, then what this build of it refuses."""
        if (rule := self.documented_refusal(problem, device)) is not None:
            return rule
        tiny = replace(problem, kv_lens=(self.tiny_kv,))
        if tiny not in self._answers:
            self._answers[tiny] = self.refusal_of_build(tiny, device)
        return self._answers[tiny]

    def documented_refusal(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """The rule on device, dtype or head dim that the problem breaks, or None."""
        if device.type != "cuda":
            return f"device: expected cuda, got {device.type}"
        if problem.dtype == "float32":
            return f"dtype: expected float16 or bfloat16, got {problem.dtype}"
        if problem.head_dim > 256 or problem.head_dim % 8:
            return f"head_dim: expected a multiple of 8 up to 256, got {problem.head_dim}"
        return None

    def refusal_of_build(self, tiny: DecodeProblem, device: torch.device) -> str | None:
        """What the library answers to a problem of :attr:`tiny_kv` keys, or None if it computes it."""
        dtype = TORCH_DTYPES[tiny.dtype]
        q = torch.zeros((1, tiny.heads_q, tiny.head_dim), dtype=dtype, device=device)
        kv = torch.zeros((tiny.total_kv, tiny.heads_kv, tiny.head_dim), dtype=dtype, device=device)
        inputs = DecodeInputs(tiny, q, kv, kv, torch.tensor(tiny.cu_seqlens, dtype=torch.int32, device=device))
        try:
            self.plan(tiny, device).run(inputs, None)
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
    ) -> DecodePlan:
        """See :meth:`impls.contract.DecodeImpl.plan`."""
        raise NotImplementedError
