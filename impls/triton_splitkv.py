"""Split-KV decode attention in Triton: one split kernel, one combine kernel, packed variable-length K and V.

Algorithm. A table made on the host (:mod:`impls.splits`) cuts every sequence's keys into splits. The split
kernel runs one program per (split, KV head, head tile). It streams the split's K and V once, in tiles of
``BLOCK_N`` keys, through an online softmax in base 2 over ``BLOCK_H`` query heads that share the KV head. A
sequence's only split writes the output itself; otherwise each split writes a *normalised* float32 partial
and its natural-log LSE, and the combine kernel (:mod:`impls.triton_combine`), put in place while the split kernel
ends, merges a sequence's partials, all splits side by side, with weights ``exp(lse_s - lse)``. Without merges
there is no second launch; nor where all programs are on the device at once and none is long, for then those of a
sequence merge its splits by themselves, each a share of the elements of a head tile
(:mod:`impls.triton_exchange`).

Tiling. Decode is bound by reading K and V, so the tile is chosen for bytes in flight, not for the tensor
cores: from head dim 128 up, the buffers of K and V fill over half of an SM's shared memory, one CTA an SM;
work of other kinds than long has tiles of its own, most of them shorter, so that several CTAs hide each other's
start and end (:func:`choose_tile`). Up to head dim 64 each warp takes a part of every tile's keys, with a running
maximum, sum and output of its own, and the parts are merged at the end (:func:`parts`). Where starts matter, Q (if
it has 16 rows) comes with every tile, in the pipeline: a load before the loop would hold up the first of K and V
until it has landed.

Splits. ``num_splits="auto"`` gives each sequence splits in proportion to its length, so that one round of CTAs
fills the SMs, or a few where that ends sooner (:func:`impls.splits.balanced_counts`); an integer gives every
sequence that many.

Plans. Tile and splits are one choice, made on the host (:func:`impls.triton_rule.choose_plan`): every kind of work
has its tile (:func:`impls.triton_tile.choose_tile`), and where the splits that come with it show that another one
is wanted, that one is taken, with the splits that it gets. The rule needs neither Triton nor a GPU, so ``splitkv
recommend`` asks it about the GPU of its records. What is here compiles and launches what it chose.

Differences from TileLang's official GQA decode example (``example_gqa_decode.py``): K and V are packed and
ragged instead of padded to one length with a mask tensor; splits follow the table instead of one count for
all; partials and LSE are float32 instead of the input's dtype; a split that is alone skips the workspace;
the LSE is returned. Differences from ``impls/tilelang_splitkv.py``: the algorithm, the split tables and the
workspace layouts are the same. Here the compiler pipelines the loads (cp.async on sm_80 and sm_90, no TMA) and
lays out the tiles. Above head dim 64 the warps share the keys of a tile out for the scores and the head dim for
the output, because the parts of wider heads cost more to merge than they save. Splits never merge in clusters,
for Triton has no way into another CTA's shared memory. On a machine without CUDA the very same kernels run in
Triton's interpreter, with the operands of both products converted to float32 (its bfloat16 products are wrong, its
float16 ones slow), one program after another, so that none can wait for another.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from impls.contract import TORCH_DTYPES, DecodeInputs, ImplUnavailable, Scalar, check_tuning
from impls.exchange import may_exchange
from impls.libraries import check_capability
from impls.problem import DecodeProblem
from impls.space import Configuration, configurations, too_large
from impls.splitkv_plan import (
    BUDGET,
    SPLIT_TUNING,
    WORK,
    SplitKVPlan,
    Splitting,
    work_of,
)
from impls.triton_launch import Launch
from impls.triton_rule import (
    choose_plan,
    decide,
    places,
    refused_problem,
    tiles_of,
)
from impls.triton_tile import (
    SPACE,
    TILE_TUNING,
    Tile,
    block_d,
    choose_tile,
    holds_v,
    machine_of,
    parts,
    tile_bytes,
    uses_wgmma,
)

# Triton decides between compiler and interpreter when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
try:
    import triton
    import triton.language as tl

    from impls.triton_combine import combine_kernel, combine_launch, compile_forms
    from impls.triton_exchange import LN_2, cast, merge, pairs_at_a_time, send
except ImportError as error:
    raise ImplUnavailable(f"import triton: {error}") from error

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether this process runs Triton kernels in the interpreter, on CPU tensors, instead of compiling them."""

TUNING: Mapping[str, Scalar] = {**SPLIT_TUNING, **TILE_TUNING}
"""What ``plan`` lets the caller choose."""


@triton.jit
def _over_parts(x):
    """[4, BLOCK_H, BLOCK_D] summed over the first axis: two exchanges of all warps, where ``tl.sum`` would make one
    for every element that a thread holds."""
    x = tl.permute(x, (1, 2, 0))
    a, b = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    a, b = tl.split(a + b)
    return a + b


@triton.jit(do_not_specialize=["heads_q", "group", "tiles", "head_tiles", "scale_log2"])
def split_kernel(
    q_ptr,  # [B, Hq, D]
    k_ptr,  # [total_kv, Hkv, D]
    v_ptr,  # [total_kv, Hkv, D]
    out_ptr,  # [B, Hq, D]
    lse_ptr,  # [B, Hq] float32
    partial_ptr,  # [slots, Hq, D] float32; with EXCHANGE the mail, [slots, Hq, D + 2] int64
    partial_lse_ptr,  # [slots, Hq] float32; not with EXCHANGE
    items_ptr,  # [splits, 4] int32; with EXCHANGE [programs, 8]
    rounds_ptr,  # [programs] int32, with EXCHANGE
    stride_qb,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    heads_q,
    group,  # query heads per KV head
    tiles,  # programs per split: KV heads x head tiles
    head_tiles,
    scale_log2,  # softmax scale x log2(e)
    zero,  # 0, which the compiler does not know
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,  # of a tile's keys: 1, or 4, one a warp
    OPERAND: tl.constexpr,  # dtype of both products' operands
    PDL: tl.constexpr,  # programmatic dependent launch
    EXCHANGE: tl.constexpr,  # pairs of columns that are merged here at a time; 0: splits do not merge here
    NUM_WARPS: tl.constexpr,
    EAGER: tl.constexpr,  # K and V are on their way before anything waits for Q
    HOLD: tl.constexpr,
):
    """Attention of one head tile over one split; with EXCHANGE also a share of the sequence's merge."""
    pid = tl.program_id(0)
    if EXCHANGE:
        item_ptr = items_ptr + pid * 8
        tile = tl.load(item_ptr + 4)
        rank = tl.load(item_ptr + 5)
        splits = tl.load(item_ptr + 6)
    else:  # the head tiles of a split are neighbours, so that all but the first read K and V from L2
        item_ptr = items_ptr + pid // tiles * 4
        tile = pid % tiles
    sequence = tl.load(item_ptr)
    first_row = tl.load(item_ptr + 1).to(tl.int64)
    keys = tl.load(item_ptr + 2)
    slot = tl.load(item_ptr + 3)
    if PDL:
        # Put in place while the kernel before ran, which may write what is read from here on, or read what is
        # written; the table is older. The next kernel may be put in place now: it waits for this one's results.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if EXCHANGE:
        round = tl.load(rounds_ptr + pid) + 1

    head_kv = (tile // head_tiles).to(tl.int64)
    first_g = tile % head_tiles * BLOCK_H
    offs_g = first_g + tl.arange(0, BLOCK_H)  # within the group: never crosses a KV head
    offs_h = (head_kv * group + offs_g).to(tl.int32)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < HEAD_DIM
    mask_hd = (offs_g < group)[:, None] & mask_d[None, :]

    # Row and head offsets are int64: a packed K of 2**31 elements and more is only 4 GiB.
    q_ptrs = q_ptr + sequence.to(tl.int64) * stride_qb + offs_h[:, None].to(tl.int64) * stride_qh + offs_d[None, :]
    if not EAGER:
        q = tl.load(q_ptrs, mask=mask_hd, other=0.0).to(OPERAND)
    m_i = tl.full([BLOCK_H], float("-inf"), tl.float32)
    SPREAD: tl.constexpr = BLOCK_H == 16  # the sum is added up over keys at the end; more rows lack the registers
    l_i = tl.zeros([BLOCK_H, BLOCK_N // PARTS] if SPREAD else [BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    if PARTS > 1:  # one axis more in front of all: no warp waits for another inside of a tile
        offs_n = tl.reshape(offs_n, [PARTS, BLOCK_N // PARTS])
        if not EAGER:
            q = tl.broadcast_to(q[None], [PARTS, BLOCK_H, BLOCK_D])
        m_i = tl.broadcast_to(m_i[None], [PARTS, BLOCK_H])
        l_i = tl.broadcast_to(l_i[None], [PARTS, BLOCK_H, BLOCK_N // PARTS])  # parts have 16 rows
        acc = tl.broadcast_to(acc[None], [PARTS, BLOCK_H, BLOCK_D])
    KEYS: tl.constexpr = 1 if PARTS == 1 else 2  # the axis of scores along which keys lie
    k_ptrs = k_ptr + first_row * stride_kn + head_kv * stride_kh
    k_ptrs = k_ptrs + tl.expand_dims(offs_n, -1).to(tl.int64) * stride_kn + offs_d
    v_ptrs = v_ptr + first_row * stride_vn + head_kv * stride_vh
    v_ptrs = v_ptrs + tl.expand_dims(offs_n, -1).to(tl.int64) * stride_vn + offs_d

    for start in range(0, keys, BLOCK_N):
        # Rows past the split are not read: what lies there may be NaN, and 0 x NaN would survive in V.
        mask_n = offs_n < keys - start
        mask_nd = tl.expand_dims(mask_n, -1) & mask_d
        if EAGER:  # in the pipeline, since the compiler does not know that zero is 0: nothing waits for Q alone
            q = tl.load(q_ptrs, mask=mask_hd, other=0.0).to(OPERAND)
            q_ptrs += zero
            if PARTS > 1:
                q = tl.broadcast_to(q[None], [PARTS, BLOCK_H, BLOCK_D])
        k = tl.load(k_ptrs, mask=mask_nd, other=0.0).to(OPERAND)  # [BLOCK_N, BLOCK_D]
        v = tl.load(v_ptrs, mask=mask_nd, other=0.0).to(OPERAND)  # [BLOCK_N, BLOCK_D]
        if HOLD:  # past this no load moves: V goes to registers while the maximum is found
            tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [start], dtype=tl.int32, is_pure=False, pack=1)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_H, BLOCK_N]
        s = tl.where(tl.expand_dims(mask_n, -2), s * scale_log2, float("-inf"))
        # A part may be without keys so far: then its maximum is -inf, and the reference point is 0.
        m_new = tl.maximum(m_i, tl.max(s, KEYS))
        m_ref = tl.where(m_new > float("-inf"), m_new, 0.0)
        alpha = tl.exp2(m_i - m_ref)
        p = tl.exp2(s - tl.expand_dims(m_ref, -1))
        l_i = l_i * tl.expand_dims(alpha, -1) + p if SPREAD else l_i * alpha + tl.sum(p, KEYS)
        acc = tl.dot(p.to(OPERAND), v, acc * tl.expand_dims(alpha, -1), input_precision="ieee")
        m_i = m_new
        k_ptrs += BLOCK_N * stride_kn
        v_ptrs += BLOCK_N * stride_vn

    if SPREAD:
        l_i = tl.sum(l_i, KEYS)
    if PARTS > 1:
        m_part = m_i
        m_i = tl.max(m_part, 0)
        weight = tl.exp2(m_part - tl.where(m_i > float("-inf"), m_i, 0.0)[None])
        l_i = tl.sum(l_i * weight, 0)
        acc = _over_parts(acc * tl.expand_dims(weight, -1))

    # Without keys the sum is 0 and the maximum -inf: output 0, LSE -inf. A sum of NaN stays one.
    l_safe = tl.where(l_i != 0, l_i, 1.0)
    lse = (m_i + tl.log2(l_safe)) * LN_2
    if slot < 0:  # the sequence's only split
        rows = sequence.to(tl.int64) * heads_q + offs_h
        tl.store(lse_ptr + rows, lse, mask=offs_g < group)
        out_ptrs = out_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(out_ptrs, cast(acc / l_safe[:, None], out_ptr.dtype.element_ty), mask=mask_hd)
    else:
        rows = slot.to(tl.int64) * heads_q + offs_h
        if EXCHANGE:
            send(partial_ptr, rows, offs_g < group, acc, m_i, l_i, round, HEAD_DIM, BLOCK_H, BLOCK_D)
            head = head_kv * group + first_g
            mail_row = (slot - rank).to(tl.int64) * heads_q + head
            out_row = sequence.to(tl.int64) * heads_q + head
            heads = tl.minimum(group - first_g, BLOCK_H)
            merge(
                partial_ptr, out_ptr, lse_ptr, mail_row, out_row, heads_q, heads, rank, splits, round,
                HEAD_DIM, EXCHANGE, NUM_WARPS,
            )  # fmt: skip
        else:
            tl.store(partial_lse_ptr + rows, lse, mask=offs_g < group)
            tl.store(partial_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :], acc / l_safe[:, None], mask=mask_hd)
    if EXCHANGE:
        tl.debug_barrier()  # every thread has read the counter
        tl.store(rounds_ptr + pid, round)


def compiled_variants() -> int:
    """How many compiled kernels this process holds; the interpreter compiles none."""
    if INTERPRETED:
        return 0
    return sum(len(kernels) for jit in (split_kernel, combine_kernel) for kernels, *_ in jit.device_caches.values())


class TritonPlan(SplitKVPlan):
    """The plan of one problem; see :class:`impls.contract.DecodePlan`."""

    def __init__(
        self,
        problem: DecodeProblem,
        device: torch.device,
        choice: Mapping[str, Scalar],
        tile: Tile,
        splitting: Splitting,
    ) -> None:
        super().__init__(problem, device, choice, splitting)
        tiles = splitting.tiles_per_split
        head_tiles = tiles // problem.heads_kv
        compute_dtype = "float32" if INTERPRETED else problem.dtype
        scale_log2 = problem.softmax_scale * math.log2(math.e)
        scalars = (problem.heads_q, problem.group, tiles, head_tiles, scale_log2, 0)
        pairs = pairs_at_a_time(problem.group, tile.block_h, problem.head_dim, tile.num_warps)
        constants = {
            "HEAD_DIM": problem.head_dim,
            "BLOCK_D": block_d(problem.head_dim),
            "BLOCK_H": tile.block_h,
            "BLOCK_N": tile.block_n,
            "PARTS": parts(problem, tile),
            "OPERAND": getattr(tl, compute_dtype),
            "PDL": machine_of(device).pdl,
            "EXCHANGE": pairs if self._exchange else 0,
            "NUM_WARPS": tile.num_warps,
            "EAGER": tile.eager,
            "HOLD": not INTERPRETED and holds_v(problem, tile),
        }
        self._sent = self._partial.view(torch.int64) if self._exchange else self._partial
        programs = len(self._items) * (1 if self._exchange else tiles)
        options = {"num_stages": tile.num_stages, "num_warps": tile.num_warps}
        if machine_of(device).pdl:
            options["launch_pdl"] = True
        self._split = Launch(split_kernel, programs, scalars, constants, options)
        splits_max = splitting.table.splits_max
        self._combine = combine_launch(len(self._merges), problem.heads_q, problem.head_dim, device, splits_max)
        self.config = {
            "library": "triton",
            "version": triton.__version__,
            "function": "impls.triton_splitkv",
            **self._split_config,
            **vars(tile),
            "tma": False,
            "warp_specialize": False,
            "compute_dtype": compute_dtype,
        }

    def launch_split(self, inputs: DecodeInputs, out: Tensor, lse: Tensor) -> None:
        """Launch the split kernel."""
        q, k, v = inputs.q, inputs.k, inputs.v
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
        tensors = (q, k, v, out, lse, self._sent, self._partial_lse, self._items, self._rounds)
        self._split(tensors, strides)

    def launch_combine(self, out: Tensor, lse: Tensor) -> None:
        """Launch the combine kernel."""
        self._combine((self._partial, self._partial_lse, self._merges, out, lse))


class TritonSplitKV:
    """Our split-KV kernel in Triton; see :class:`impls.contract.DecodeImpl`."""

    name = "triton-splitkv"

    def __init__(self) -> None:
        self._tiles: dict[tuple[object, ...], Mapping[str, Tile]] = {}
        self._compiled: set[tuple[object, ...]] = set()
        self._ahead: set[tuple[object, ...]] = set()

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """Refuses head dims over 256, GPUs before sm_80, and the device that Triton does not run on here."""
        runs_on = "cpu" if INTERPRETED else "cuda"
        if device.type != runs_on:
            mode = "interprets on cpu" if INTERPRETED else "compiles for cuda"
            return f"device: expected {runs_on} (Triton {mode} in this process), got {device.type}"
        if (reason := refused_problem(problem)) is not None:
            return reason
        return check_capability(device, (8, 0)) if device.type == "cuda" else None

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> TritonPlan:
        """See :meth:`impls.contract.DecodeImpl.plan`; the tuning keys are those of :data:`TUNING`.

        What other lengths may need is compiled with the first plan of a shape, unless the caller has chosen the
        tile: then only what these lengths need.
        """
        choice = check_tuning(tuning, TUNING)
        tiles = self._tiles_of(problem, device, choice)
        tile, splitting = choose_plan(problem, machine_of(device), choice, tiles)
        self._compile_once(problem, device, choice, [(tile, splitting.exchange)])
        shape = _shape(problem, device)
        if shape not in self._ahead and all(choice[name] == default for name, default in TILE_TUNING.items()):
            # A crowd has no splits to exchange: it is more CTAs than the device holds at once.
            ahead = [(tiles[work], False) for work in WORK] + [
                (tiles[work], True) for work in WORK if work != "crowd"
            ]
            self._compile_once(problem, device, choice, ahead)
            self._ahead.add(shape)
        return TritonPlan(problem, device, choice, tile, splitting)

    def configurations(self, problem: DecodeProblem, device: torch.device) -> list[Configuration]:
        """:data:`SPACE` with every way to split; see :class:`impls.space.Tunable`."""
        machine = machine_of(device)

        def refusal(choice: Mapping[str, Scalar]) -> str | None:
            if machine.interprets:
                return None
            tile = choose_tile(problem, machine, {**TUNING, **choice}, work=work_of(problem, machine.sms))
            return too_large(tile_bytes(problem, tile, wgmma=uses_wgmma(tile, machine)), machine.shared_bytes)

        def kernel(choice: Mapping[str, Scalar]) -> str:
            tuning = {**TUNING, **choice}
            tile, splitting = choose_plan(problem, machine, tuning, self._tiles_of(problem, device, tuning))
            return f"{tile}, exchange {splitting.exchange}"

        return configurations(SPACE, refusal, kernel)

    def _tiles_of(
        self, problem: DecodeProblem, device: torch.device, choice: Mapping[str, Scalar]
    ) -> Mapping[str, Tile]:
        """The tile of each kind of work, chosen once for all lengths and batch sizes."""
        key = (*_shape(problem, device), *(choice[name] for name in TILE_TUNING))
        if key not in self._tiles:
            self._tiles[key] = tiles_of(problem, machine_of(device), choice)
        return self._tiles[key]

    def _compile_once(
        self,
        problem: DecodeProblem,
        device: torch.device,
        choice: Mapping[str, Scalar],
        needed: Iterable[tuple[Tile, bool]],
    ) -> None:
        """Compile the kernels of these tiles that merge splits by themselves or do not, for any lengths."""
        for tile, exchange in needed:
            key = (*_shape(problem, device), tile, exchange)
            if key not in self._compiled:
                _compile(problem, device, choice, tile, exchange)
                self._compiled.add(key)


def _shape(problem: DecodeProblem, device: torch.device) -> tuple[object, ...]:
    return device, problem.heads_q, problem.heads_kv, problem.head_dim, problem.dtype


def _compile(
    problem: DecodeProblem, device: torch.device, choice: Mapping[str, Scalar], tile: Tile, exchange: bool
) -> None:
    """Compile and load the kernels of a plan by running them once, on two keys in two splits.

    The combine kernel is among them where the split kernel does not merge by itself. The first real run may be in a
    CUDA graph, where neither may happen.
    """
    if INTERPRETED:
        return
    tiny = replace(problem, kv_lens=(2,))
    dtype = TORCH_DTYPES[problem.dtype]
    q = torch.zeros((1, tiny.heads_q, tiny.head_dim), dtype=dtype, device=device)
    kv = torch.zeros((2, tiny.heads_kv, tiny.head_dim), dtype=dtype, device=device)
    cu_seqlens_k = torch.tensor(tiny.cu_seqlens, dtype=torch.int32, device=device)
    # Whatever exchanges has no fewer programs than this, so this does too.
    programs, machine = 2 * problem.tiles_per_split(tile.block_h), machine_of(device)
    merge = "exchange" if exchange and may_exchange(programs, 2, places(tiny, machine, tile)) else "combine"
    small = {**choice, "num_splits": 2, "merge": merge, BUDGET: SPLIT_TUNING[BUDGET]}
    plan = TritonPlan(tiny, device, small, tile, decide(tiny, machine, small, tile))
    plan.run(DecodeInputs(tiny, q, kv, kv, cu_seqlens_k), None)
    if merge == "combine":
        compile_forms(tiny.heads_q, tiny.head_dim, dtype, device)
