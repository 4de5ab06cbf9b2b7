"""The combine kernel of the Triton implementation, and how many of its programs share a head.

It merges normalised float32 partials with weights ``exp(lse_s - lse)``; see :mod:`impls.triton_splitkv`.

Imported by :mod:`impls.triton_splitkv`, which says first whether Triton compiles or interprets.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from impls.triton_exchange import LN_2, cast
from impls.triton_launch import Launch
from impls.triton_tile import block_d, machine_of

LOG2_E = tl.constexpr(math.log2(math.e))

FORMS = (16, 32, 64, 128)
"""Splits up to which there is a form each of the combine kernel: the splits that it merges at a time."""

WARP_ELEMENTS = 2048
"""Elements of partials that a warp asks for at once: 64 registers of each thread."""


@triton.jit(do_not_specialize=["heads_q"])
def combine_kernel(
    partial_ptr,  # [slots, Hq, D] float32
    partial_lse_ptr,  # [slots, Hq] float32
    merges_ptr,  # [merged sequences, 4] int32
    out_ptr,  # [B, Hq, D]
    lse_ptr,  # [B, Hq] float32
    heads_q,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a program
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge of one sequence's splits for some columns of one query head."""
    TILES: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    merge_ptr = merges_ptr + pid // TILES // heads_q * 4
    head = pid // TILES % heads_q
    sequence = tl.load(merge_ptr)
    first_slot = tl.load(merge_ptr + 1)
    splits = tl.load(merge_ptr + 2)

    if PDL:
        tl.extra.cuda.gdc_wait()

    offs_s = tl.arange(0, BLOCK_S)
    offs_d = pid % TILES * COLUMNS + tl.arange(0, COLUMNS)
    mask_d = offs_d < HEAD_DIM
    m_i = tl.full([], float("-inf"), tl.float32)
    l_i = tl.zeros([], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, splits, BLOCK_S):
        mask_s = offs_s < splits - start
        rows = (first_slot + start + offs_s).to(tl.int64) * heads_q + head
        lse = tl.load(partial_lse_ptr + rows, mask=mask_s, other=float("-inf"))  # [BLOCK_S]
        part_ptrs = partial_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :]
        part = tl.load(part_ptrs, mask=mask_s[:, None] & mask_d[None, :], other=0.0)  # [BLOCK_S, COLUMNS]
        # An empty split is left out, not weighted with 0: its partial may hold anything. Where all so far
        # are empty the maximum is -inf, and the reference point 0 keeps -inf - -inf out of the exponents.
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        m_ref = tl.where(m_new > float("-inf"), m_new, 0.0)
        weight = tl.exp2((lse - m_ref) * LOG2_E)
        alpha = tl.exp2((m_i - m_ref) * LOG2_E)
        l_i = l_i * alpha + tl.sum(weight, 0)
        part = tl.where((lse != float("-inf"))[:, None], part, 0.0)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        m_i = m_new

    l_safe = tl.where(l_i != 0, l_i, 1.0)
    row = sequence.to(tl.int64) * heads_q + head
    tl.store(lse_ptr + row, m_i + tl.log2(l_safe) * LN_2, mask=pid % TILES == 0)
    out = cast(acc / l_safe, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM + offs_d, out, mask=mask_d)


def combine(
    partial: Tensor, lse: Tensor, merges: Tensor, out: Tensor, out_lse: Tensor, splits_max: int = FORMS[0]
) -> None:
    """Merge the partials of every sequence in ``merges``; launches only.

    Args:
        partial: ``[slots, Hq, D]`` float32, contiguous: each split's normalised output.
        lse: ``[slots, Hq]`` float32, contiguous, natural logarithm; -inf marks an empty split.
        merges: ``[merged sequences, 4]`` int32: :attr:`impls.splits.SplitTable.merges`.
        out: ``[B, Hq, D]``, contiguous; only the merged sequences' rows are written.
        out_lse: ``[B, Hq]`` float32, contiguous; likewise.
        splits_max: of one sequence; says in which form (:func:`combine_form`). Any form takes any number.
    """
    heads_q, head_dim = out.shape[1:]
    launch = combine_launch(merges.shape[0], heads_q, head_dim, out.device, splits_max)
    launch((partial, lse, merges, out, out_lse))


@cache
def compile_forms(heads_q: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load every form of the combine kernel, by merging two splits with each; once for all tiles."""
    partial = torch.zeros((2, heads_q, head_dim), dtype=torch.float32, device=device)
    lse = torch.zeros((2, heads_q), dtype=torch.float32, device=device)
    merges = torch.tensor([[0, 0, 2, 0]], dtype=torch.int32, device=device)
    out = torch.empty((1, heads_q, head_dim), dtype=dtype, device=device)
    out_lse = torch.empty((1, heads_q), dtype=torch.float32, device=device)
    for splits_max in FORMS:
        combine(partial, lse, merges, out, out_lse, splits_max)


def combine_launch(merges: int, heads_q: int, head_dim: int, device: torch.device, splits_max: int) -> Launch:
    """The launch of the combine kernel over so many merges; it takes the tensors of :func:`combine`."""
    pdl = machine_of(device).pdl
    form, num_warps = combine_form(head_dim, splits_max)
    options = {"num_warps": num_warps, "launch_pdl": True} if pdl else {"num_warps": num_warps}
    programs = merges * heads_q * -(-head_dim // form["COLUMNS"])
    return Launch(combine_kernel, programs, (heads_q,), {**form, "PDL": pdl}, options)


def combine_form(head_dim: int, splits_max: int) -> tuple[dict[str, int], int]:
    """The constants of the combine kernel but for ``PDL``, and its warps.

    All that a program reads of up to 128 splits is asked for at once: one trip to memory. A warp holds
    :data:`WARP_ELEMENTS` of it, and is alone, for what crosses warps does so through shared memory. So the more
    splits, the fewer columns; few heads are work for many SMs then. Two warps only for 128 splits, of each of which
    one would be left less than the 128 bytes of a cache line, and where a program takes whole heads of over 128
    columns: with few splits there are many sequences, and every program more takes its time to start (measured:
    ``reports/NOTES.md``).
    """
    width = block_d(head_dim)
    splits = next((form for form in FORMS if splits_max <= form), FORMS[-1])
    num_warps = 2 if splits == 128 else max(1, width // 128) if splits == 16 else 1
    columns = min(width, WARP_ELEMENTS * num_warps // splits)
    return {"HEAD_DIM": head_dim, "COLUMNS": columns, "BLOCK_S": splits}, num_warps
