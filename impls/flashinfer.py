"""FlashInfer's batch attention over packed K and V.

FlashInfer has three kernels that read a batch's K and V for one query token a sequence, and all of them can read
packed rows where they lie; ``reader`` says which:

``ragged`` (the default)
    ``BatchPrefillWithRaggedKVCacheWrapper`` with its ``fa2`` kernel and one query token a sequence: it takes packed
    rows and offsets as they are, for any lengths. The query heads of a KV head share the rows of a tensor-core
    tile, and K and V are split. (Its ``fa3`` kernel, what ``auto`` takes on Hopper, does neither.)
``paged``
    ``BatchDecodeWithPagedKVCacheWrapper`` with ``use_tensor_cores=True``: the same kernel, which here looks up
    the page of every row. Pages are views of the packed rows, the largest of 64, 16 and 1 keys that lengths allow.
``paged-cuda-cores``
    The same wrapper with ``use_tensor_cores=False``, its decode kernel proper, for 1, 2, 3, 4 or 8 query heads a
    KV head. FlashInfer recommends the tensor cores for larger groups.

``plan`` of the wrapper chooses the splits, on the host, for exactly these lengths. That is why its
``use_cuda_graph`` stays off: it would pad the grid so that one graph serves other lengths, while here each plan
owns its buffers, and a graph of its ``run`` may be replayed as long as the plan lives.

The LSE comes in base 2; with ``lse=True`` one more kernel turns it into a natural logarithm. Nobody but this
project asks for that, so it is left out unless asked for, and FlashInfer's time is its own. For a sequence
without keys it is a finite number, corrected for exactly those sequences. Two limits of the library show in its
results: partials of the tensor-core kernel are stored in the dtype of the output, and -5e4 stands in for minus
infinity, so that the merge loses partials whose LSE (base 2) is below it, and the kernel scores (before their
scale) that are. Source: FlashInfer 0.5.3, ``decode.py``, ``prefill.py``,
``include/flashinfer/attention/{scheduler,prefill,decode,cascade}.cuh``.

FlashInfer compiles its kernels when they are first needed, with the machine's nvcc and ninja. Where that fails,
the implementation is unavailable, with what the compiler said.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor

from impls.contract import (
    TORCH_DTYPES,
    DecodeInputs,
    DecodeOutput,
    ImplUnavailable,
    InputError,
    PlanRefused,
    Scalar,
    check_tuning,
    empty_output,
)
from impls.libraries import check_capability, import_library, sm_count
from impls.paged_plan import as_pages, check_pages
from impls.problem import DecodeProblem
from impls.varlen_plan import correct_empty, empty_sequences, without_keys

READERS = ("ragged", "paged", "paged-cuda-cores")
"""What ``reader`` may be; see the module's text."""

TUNING: Mapping[str, Scalar] = {"reader": READERS[0], "lse": False}
"""What ``plan`` lets the caller choose."""

HEAD_DIMS = (64, 128, 256)
"""The head dims that FlashInfer's own dispatch knows, up to 256."""

CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
"""Query heads a KV head that the decode kernel on CUDA cores is written for."""

PAGE_SIZES = (64, 16, 1)
"""Keys of a page, in the order of preference: fewer pages are fewer look-ups."""

MIN_CHUNK = 128
"""The fewest keys that FlashInfer's planner gives a split."""

UINT32_MAX = 2**32 - 1

LN_2 = 0.6931471805599453


def tile_rows(problem: DecodeProblem) -> int:
    """Rows of the tensor-core tile, which hold query heads of one KV head (``FA2DetermineCtaTileQ``)."""
    if problem.group <= 16:
        return 16
    return 64 if problem.group <= 64 or problem.head_dim >= 256 else 128


def chunk_keys(problem: DecodeProblem, sms: int, page_size: int) -> int | None:
    """Keys of a split as the tensor-core planner chooses them, one number for the batch; None without splits.

    The smallest chunk, in whole pages and of at least 128 keys, under which splits, head tiles and KV heads
    together are no more than two CTAs an SM. Source: ``PrefillBinarySearchKVChunkSize`` and
    ``PrefillSplitQOKVIndptr`` in ``scheduler.cuh``.

    Args:
        problem: what is computed.
        sms: SMs of the device.
        page_size: keys of a page; 1 for ragged rows.
    """
    limit = 2 * sms // problem.heads_kv
    tiles = ceil(problem.group / tile_rows(problem))
    pages = [max(1, ceil(n / page_size)) for n in problem.kv_lens]
    longest = max(pages, default=1)
    low, high = max(1, MIN_CHUNK // page_size), longest
    while low < high:
        middle = (low + high) // 2
        if tiles * sum(ceil(n / middle) for n in pages) > limit:
            low = middle + 1
        else:
            high = middle
    return low * page_size if low < longest else None


def workspace_floats(problem: DecodeProblem, sms: int, reader: str) -> int:
    """An upper bound of the float32 numbers that a wrapper keeps partials and their LSE in.

    The tensor-core kernel stores whole tiles, where it splits: then of at most two CTAs an SM, and of no more
    than one a :data:`MIN_CHUNK` keys. The CUDA-core kernel stores rows, of at most 32 CTAs an SM.

    Args:
        problem: what is computed.
        sms: SMs of the device.
        reader: one of :data:`READERS`.
    """
    if reader == "paged-cuda-cores":
        rows = problem.group * 32 * sms
    else:
        tile = tile_rows(problem)
        chunks = ceil(problem.group / tile) * sum(max(1, ceil(n / MIN_CHUNK)) for n in problem.kv_lens)
        rows = problem.heads_q * tile * min(2 * sms // problem.heads_kv, chunks)
    return rows * (problem.head_dim + 1) + 64  # and room to align


class FlashInferPlan:
    """A planned wrapper; see :class:`impls.contract.DecodePlan`.

    Args:
        problem: what is to be computed.
        device: where.
        library: FlashInfer's module.
        reader: one of :data:`READERS`.
        lse: whether to return the LSE.

    Raises:
        PlanRefused: if the reader has no kernel for this many query heads a KV head.
    """

    def __init__(
        self, problem: DecodeProblem, device: torch.device, library: Any, *, reader: str, lse: bool
    ) -> None:
        if reader == "paged-cuda-cores" and problem.group not in CUDA_CORE_GROUPS:
            groups = ", ".join(map(str, CUDA_CORE_GROUPS))
            raise PlanRefused(
                f"heads_q: expected {groups} query heads a KV head on CUDA cores, got {problem.group}"
            )
        self._problem = problem
        self._total_kv = problem.total_kv  # a sum over all lengths: not in every launch
        self._device = device
        self._lse = lse
        self._paged = reader != "ragged"
        sizes = PAGE_SIZES if self._paged else (1,)
        self._page_size = next(size for size in sizes if check_pages(problem, size) is None)
        sms = sm_count(device)
        floats = workspace_floats(problem, sms, reader)
        self._workspace = torch.empty(floats, dtype=torch.float32, device=device)
        self._empty = empty_sequences(problem, device)
        self._wrapper = self._planned(library, reader) if self._total_kv else None
        self.config: Mapping[str, Scalar] = {
            "library": "flashinfer",
            "version": str(library.__version__),
            "function": f"flashinfer.{_wrapper_name(reader)}",
            "reader": reader,
            "page_size": self._page_size if self._paged else None,
            "num_splits": "auto",
            **_splits(problem, sms, self._page_size, reader),
            "lse": lse,
            "lse_note": "base 2; one more kernel makes it natural" if lse else "left out: see the module",
        }

    def _planned(self, library: Any, reader: str) -> Any:
        """The wrapper, planned for the problem's lengths."""
        problem, kind = self._problem, getattr(library, _wrapper_name(reader))
        offsets = torch.tensor(problem.cu_seqlens, dtype=torch.int32)  # on the host, where the planner reads them
        shape = (problem.heads_q, problem.heads_kv, problem.head_dim)
        options = {"q_data_type": TORCH_DTYPES[problem.dtype], "sm_scale": problem.softmax_scale}
        if not self._paged:
            wrapper = kind(self._workspace, "NHD", backend="fa2")
            wrapper.plan(torch.arange(problem.batch + 1, dtype=torch.int32), offsets, *shape, **options)
            return wrapper
        size = self._page_size
        wrapper = kind(self._workspace, "NHD", use_tensor_cores=reader == "paged")
        pages = torch.arange(self._total_kv // size, dtype=torch.int32, device=self._device)
        last = torch.tensor([size if n else 0 for n in problem.kv_lens], dtype=torch.int32)
        wrapper.plan(offsets // size, pages, last, *shape, size, **options)
        return wrapper

    def new_output(self) -> DecodeOutput:
        """Fresh output tensors; without an LSE if that is left out."""
        out = empty_output(self._problem, self._device)
        return out if self._lse else DecodeOutput(out=out.out, lse=None)

    def workspaces(self) -> tuple[Tensor, ...]:
        """The partials and their LSE, float32, as one row; how they lie in it is the library's business."""
        return (self._workspace,)

    def run(self, inputs: DecodeInputs, out: DecodeOutput | None) -> DecodeOutput:
        """Launch the kernel, its merge where it splits, and the LSE's change of base.

        Raises:
            InputError: for strides whose offsets the kernel's 32 bits do not hold.
        """
        out = out or self.new_output()
        if self._wrapper is None:
            return without_keys(out)
        self._wrapper.run(inputs.q, *self._keys_and_values(inputs), out=out.out, lse=out.lse, return_lse=self._lse)
        if out.lse is not None:
            out.lse.mul_(LN_2)
        return correct_empty(out, self._empty)

    def _keys_and_values(self, inputs: DecodeInputs) -> tuple[Any, ...]:
        """What ``run`` of the wrapper takes after q: k and v, or both of them in pages."""
        if self._paged:
            if inputs.k.stride() != inputs.v.stride():
                raise InputError(f"v: expected the strides of k, {inputs.k.stride()}, got {inputs.v.stride()}")
            return ((as_pages(inputs.k, self._page_size), as_pages(inputs.v, self._page_size)),)
        for name, x in (("k", inputs.k), ("v", inputs.v)):
            if (end := self._total_kv * x.stride(0)) > UINT32_MAX:
                raise InputError(f"{name}: expected element offsets <= {UINT32_MAX} (uint32), got {end}")
        return inputs.k, inputs.v


class FlashInfer:
    """FlashInfer's batch wrappers; see :class:`impls.contract.DecodeImpl`.

    Raises:
        ImplUnavailable: with what import said; ``plan`` raises it with what the compiler said.
    """

    name = "flashinfer"

    def __init__(self) -> None:
        # It looks for CUDA, a cache folder and other packages: anything may be missing.
        self._library = import_library("flashinfer")
        self._built: set[tuple[Scalar, ...]] = set()

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """Refuses what FlashInfer has no kernels for: other devices, float32, other head dims."""
        if device.type != "cuda":
            return f"device: expected cuda, got {device.type}"
        if (refusal := check_capability(device, (8, 0))) is not None:
            return refusal
        if problem.dtype == "float32":
            return f"dtype: expected float16 or bfloat16, got {problem.dtype}"
        if problem.head_dim not in HEAD_DIMS:
            return f"head_dim: expected one of {', '.join(map(str, HEAD_DIMS))}, got {problem.head_dim}"
        return None

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> FlashInferPlan:
        """See :meth:`impls.contract.DecodeImpl.plan`; the tuning keys are those of :data:`TUNING`.

        Raises:
            ImplUnavailable: if the kernels cannot be compiled or loaded, with what was said.
        """
        choice = check_tuning(tuning, TUNING)
        reader, lse = choice["reader"], choice["lse"]
        if reader not in READERS:
            raise ValueError(f"reader: expected one of {', '.join(READERS)}, got {reader!r}")
        if not isinstance(lse, bool):
            raise ValueError(f"lse: expected true or false, got {lse!r}")
        kernels = (str(reader) == "paged-cuda-cores", problem.head_dim, problem.dtype)
        try:
            plan = FlashInferPlan(problem, device, self._library, reader=str(reader), lse=lse)
        except (torch.AcceleratorError, torch.OutOfMemoryError, PlanRefused):
            raise
        except (OSError, RuntimeError) as error:
            if kernels in self._built:
                raise
            raise ImplUnavailable(f"flashinfer: {type(error).__name__}: {first_fault(str(error))}") from error
        if problem.total_kv:
            self._built.add(kernels)
        return plan


def first_fault(text: str) -> str:
    """The line that says what went wrong in what a compiler printed: the first with ``error:``, else the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line.lower()), lines[0] if lines else "no message")


def _wrapper_name(reader: str) -> str:
    return f"Batch{'PrefillWithRagged' if reader == 'ragged' else 'DecodeWithPaged'}KVCacheWrapper"


def _splits(problem: DecodeProblem, sms: int, page_size: int, reader: str) -> dict[str, Scalar]:
    """What the record says about splits."""
    if reader == "paged-cuda-cores":
        return {"splits_max": None, "splits_note": "chosen from the kernel's occupancy; not reported"}
    chunk = chunk_keys(problem, sms, page_size)
    return {
        "splits_max": 1 if chunk is None else ceil(problem.max_kv / chunk),
        "chunk_keys": chunk,
        "splits_note": "splits of one length for the whole batch",
    }
