"""Split-KV decode attention in TileLang: a split kernel, a combine kernel, packed variable-length K and V.

Algorithm. A table made on the host (:mod:`impls.splits`) cuts every sequence's keys into splits. The split
kernel runs one CTA per (split, KV head, head tile). It streams the split's K and V once, in tiles of
``block_n`` keys, through an online softmax in base 2 over ``block_h`` query heads that share the KV head. A
sequence's only split writes the output itself; otherwise each split writes a *normalised* float32 partial
and its natural-log LSE, and a combine kernel (:mod:`impls.tilelang_combine`) merges a sequence's partials, all
splits side by side, with weights ``exp(lse_s - lse)``. Without merges there is no second launch.

Clusters. On sm_90a, where all sequences have the same number of splits and their clusters fit the device at once,
the splits of a sequence are one thread block cluster and merge by themselves, through distributed shared memory
(:mod:`impls.tilelang_cluster`): no workspace, and none of the 1.5 to 2 µs that the combine kernel costs. More than
two splits do so only if all of a split's keys fit the ring (:func:`impls.tilelang_tile.choose_cluster`).

Exchange. On sm_90a, where no cluster does, but all CTAs are on the device at once and none is long, the splits of a
sequence merge by themselves too, through global memory (:mod:`impls.exchange`). The combine kernel is for the rest.

Tiling. K and V go through a ring of ``num_stages`` tiles in shared memory, filled ahead by TMA (sm_90a) or
``cp.async`` (sm_80) with no producer warp: the threads that have just finished a tile refill its stage. Every
warp owns 16 rows of scores. Where the heads of a tile are fewer than that makes rows, the rows are the same
heads again for another *part* of the tile's keys: each part has a running maximum, sum and output of its own, P
stays in registers, and the parts are merged once, at the end. Inside of a tile, warps meet only where a stage is
refilled. With 64 heads there is one part, and on sm_90a both products are ``wgmma``. The tile is chosen in
:mod:`impls.tilelang_tile`.

Splits. ``num_splits="auto"`` gives each sequence splits in proportion to its length, so that one round of CTAs
fills the SMs (on sm_90a half of them, if splits are equally long and the head dim is from 65 to 128: they read as
fast), or a few rounds where that ends sooner (:func:`impls.splits.balanced_counts`); or all the same number, where
they merge in clusters (:func:`impls.tilelang_tile.clustered_splits`, :func:`impls.tilelang_tile.pairs_end_sooner`).
An integer gives every sequence that many. The lengths
reach the kernel only through the table, whose rows come from the same prefix sums as ``cu_seqlens_k``: one row of
16 bytes, or 32 in an exchange, says where a CTA's keys are, without a chain of dependent loads.

Machines. The ``prim_func`` bodies serve sm_90a, sm_80 and the CPU (TileLang's C target). All that differs
is the :mod:`impls.tilelang_machines` object passed in. On the CPU, bfloat16 inputs compute in float32.

Differences from TileLang's official GQA decode example (``example_gqa_decode.py``): K and V are packed and
ragged instead of padded to one length with a mask tensor; splits follow the table instead of one count for
all; partials and LSE are float32 instead of the input's dtype; a split that is alone skips the workspace; the
LSE is returned; the ring is explicit instead of ``T.Pipelined`` with automatic warp specialisation. Differences
from ``impls/triton_splitkv.py``: the algorithm, the split tables and the workspace layouts are the same; here
the ring and its waits are written out, and the softmax denominator is summed across threads once, at the end.
One difference is of algorithm: Triton has no way to reach distributed shared memory, so there is no cluster.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from impls.contract import TORCH_DTYPES, DecodeInputs, ImplUnavailable, Scalar, check_tuning
from impls.exchange import STATS
from impls.libraries import check_capability, sm_count
from impls.problem import DecodeProblem
from impls.space import Configuration, configurations, too_large
from impls.splitkv_plan import (
    AMPLE,
    BUDGET,
    CPU_CTAS,
    SPLIT_TUNING,
    SplitKVPlan,
    Splitting,
    decide_splitting,
    leaves_plan,
    positive,
    rounds_splits,
    split_limits,
    stand_alone,
    stays_whole,
)

try:
    import tilelang
    import tilelang.language as T

    from impls.tilelang_cluster import column_width
    from impls.tilelang_combine import (
        BLOCK_S,
        COMBINE_CONFIGS,
        GROUPS,
        MANY_S,
        combine_kernel,
        many_combine_kernel,
    )
    from impls.tilelang_exchange import SPLITS_AT_ONCE
    from impls.tilelang_machines import (
        MACHINES,
        Machine,
        check_layout,
        choose_machine,
        compute_dtype,
        missing_compiler,
    )
    from impls.tilelang_merge import LN_2, LOG2_E, merge_more, merge_start, merged_lse, merged_value
    from impls.tilelang_tile import (
        SPACE,
        TILE_TUNING,
        Tile,
        at_once,
        choose_cluster,
        choose_tile,
        clustered_splits,
        combine_threads,
        head_rows,
        pairs_end_sooner,
        ring_share,
        ring_tiles,
        tile_bytes,
    )
except Exception as error:  # its native libraries fail in more ways than ImportError
    raise ImplUnavailable(f"import tilelang: {type(error).__name__}: {error}") from error

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
"""The head dims that are compiled and tested."""

EXAMPLE_SPLITS = 8
"""Splits of every sequence in TileLang's official example."""

TUNING: Mapping[str, Scalar] = {**SPLIT_TUNING, **TILE_TUNING}
"""What ``plan`` lets the caller choose."""

logging.getLogger("tilelang").setLevel(logging.WARNING)  # one line for each compilation otherwise


def split_kernel(
    machine: Machine,
    heads_q: int,
    heads_kv: int,
    head_dim: int,
    dtype: str,
    block_h: int,
    block_n: int,
    num_stages: int,
    threads: int,
    cluster: int = 1,
    exchange: bool = False,
):
    """The split kernel as a ``prim_func``: attention of one head tile over one split.

    With ``cluster > 1`` every sequence has that many splits, and those of one head tile are a cluster.

    Args:
        machine: buffers, loops and ring of the target.
        heads_q: query heads, Hq.
        heads_kv: KV heads, Hkv.
        head_dim: elements per head, D.
        dtype: of Q, K, V and Output.
        block_h: query heads per tile; tiles never cross a KV head.
        block_n: keys per tile.
        num_stages: tiles in flight.
        threads: per CTA.
        cluster: CTAs that merge their splits by themselves, as a cluster.
        exchange: whether they do so through global memory (:mod:`impls.exchange`). With neither, each writes a
            partial for the combine kernel.
    """
    group = heads_q // heads_kv
    head_tiles = -(-group // block_h)
    dim = machine.padded(head_dim)
    accum = "float32"
    parts = machine.parts(block_h, threads)
    rows = parts * block_h
    part_n = block_n // parts
    tall = head_rows(group, block_h)
    width = column_width(head_dim, cluster)
    policy = T.GemmWarpPolicy.FullRow
    batch, total_kv, groups, slots = (T.dynamic(name) for name in ("batch", "total_kv", "groups", "slots"))
    k_row, k_head, v_row, v_head = (T.dynamic(name) for name in ("k_row", "k_head", "v_row", "v_head"))

    tiles = heads_kv * head_tiles
    # The table: a row a CTA of an exchange, else a row a split, those of a cluster together.
    items_shape = [groups, 1, 8] if exchange else [groups, cluster, 4]
    ctas = groups if exchange else groups * tiles * cluster
    partial_shape = [slots, heads_q, head_dim + STATS, 2] if exchange else [slots, heads_q, head_dim]

    @T.prim_func
    def split(
        scale_log2: T.float32,
        k_row: T.int32,
        k_head: T.int32,
        v_row: T.int32,
        v_head: T.int32,
        Q: T.Tensor([batch, heads_q, head_dim], dtype),
        K: machine.packed([total_kv, heads_kv, head_dim], [k_row, k_head, 1], dtype),
        V: machine.packed([total_kv, heads_kv, head_dim], [v_row, v_head, 1], dtype),
        Items: T.Tensor(items_shape, "int32"),
        Output: T.Tensor([batch, heads_q, head_dim], dtype),
        Lse: T.Tensor([batch, heads_q], accum),
        Partial: T.Tensor(partial_shape, accum),
        Partial_lse: T.Tensor([0 if exchange else slots, heads_q], accum),
        Rounds: T.Tensor([groups if exchange else 0], "int32"),
    ):
        # One axis: a grid's others end at 65535. A cluster is the splits of a sequence, all for one head tile; then
        # the heads of a split are neighbours, for they share its rows.
        with machine.kernel(ctas, threads=threads, cluster=cluster, exchange=exchange) as pid:
            member = pid % cluster
            by = pid if exchange else pid // (cluster * tiles)
            bx = 0 if exchange else pid // cluster % tiles
            Q_shared = machine.shared([rows, dim], dtype)
            K_ring = machine.ring(num_stages, block_n, dim, dtype)
            V_ring = machine.ring(num_stages, block_n, dim, dtype)
            P = machine.fragment([rows, part_n], dtype)
            acc_s = machine.fragment([rows, part_n], accum)
            acc_l = machine.fragment([rows, part_n], accum)
            acc_o = machine.fragment([rows, dim], accum)
            scores_max = machine.fragment([rows], accum)
            scores_max_prev = machine.fragment([rows], accum)
            scores_ref = machine.fragment([rows], accum)
            scores_scale = machine.fragment([rows], accum)
            logsum = machine.fragment([rows], accum)
            part_max = machine.shared([rows], accum)
            part_sum = machine.shared([rows], accum)
            part_o = machine.shared([rows, dim + 8], accum)  # 8 more, so that neighbouring rows share no bank
            full_k = machine.barriers(num_stages, threads)
            full_v = machine.barriers(num_stages, threads)

            own = machine.part(block_h, parts) * part_n

            if cluster > 1:
                # Static shared memory: the others write here while this CTA still uses its ring, and dynamic
                # buffers are laid over each other where their lives, as far as TileLang sees them, do not overlap.
                received = T.alloc_shared([cluster, tall, width], accum, scope="shared")
                stats = T.alloc_shared([cluster, tall, 2], accum, scope="shared")
                arrived = T.alloc_shared([1], "uint64", scope="shared")
                mine = T.max(T.min(head_dim - member * width, width), 0)
                heads = T.min(group - bx % head_tiles * block_h, block_h)
                machine.cluster_open(arrived, T.if_then_else(mine > 0, 4 * cluster * heads * (mine + 2), 0))
            # Put in place while the kernel before was still running, which may write what is read from here on, or
            # read what is written: it may be the combine kernel of the call before.
            machine.depend()
            # So may the next kernel be from now on: it waits by itself for this kernel's results.
            machine.trigger()

            sequence = Items[by, member, 0]
            row = Items[by, member, 1]
            keys = Items[by, member, 2]
            slot = Items[by, member, 3]
            if exchange:
                bx = Items[by, 0, 4]
            head_kv = bx // head_tiles
            head = head_kv * group + bx % head_tiles * block_h
            heads = T.min(group - bx % head_tiles * block_h, block_h)
            steps = T.ceildiv(keys, block_n)
            # K and V are on their way before anything else is read.
            for t in T.serial(num_stages):
                if t < steps:
                    machine.load(K, K_ring, full_k, t, row + t * block_n, head_kv, block_n, dim)
                    machine.load(V, V_ring, full_v, t, row + t * block_n, head_kv, block_n, dim)
                else:
                    machine.skip()
                    machine.skip()
            if exchange:
                current = T.alloc_var("int32")
                current = Rounds[pid] + 1
                rank = Items[by, 0, 5]
                splits = Items[by, 0, 6]
            for i, d in machine.parallel(rows, dim):
                if i % block_h < heads and d < head_dim:
                    Q_shared[i, d] = Q[sequence, head + i % block_h, d]
                else:
                    Q_shared[i, d] = T.cast(0, dtype)
            for i, d in machine.parallel(rows, dim):
                acc_o[i, d] = 0.0
            for i, j in machine.parallel(rows, part_n):
                acc_l[i, j] = 0.0
            for i in machine.parallel(rows):
                scores_max[i] = -T.infinity(accum)

            for t in T.serial(steps):
                stage = t % num_stages
                rest = keys - t * block_n
                ahead = t + num_stages
                machine.wait(full_k, stage, t // num_stages % 2, num_stages)
                T.gemm(
                    Q_shared,
                    machine.tile(K_ring, stage, own, part_n),
                    acc_s,
                    transpose_B=True,
                    policy=policy,
                    clear_accum=True,
                )
                # K is refilled while V is still to be used: half a tile more in flight.
                if ahead < steps:
                    machine.release()
                    machine.load(K, K_ring, full_k, stage, row + ahead * block_n, head_kv, block_n, dim)
                else:
                    machine.skip()
                if rest < block_n:
                    for i, j in machine.parallel(rows, part_n):
                        acc_s[i, j] = T.if_then_else(
                            i // block_h * part_n + j < rest, acc_s[i, j], -T.infinity(accum)
                        )
                for i in machine.parallel(rows):
                    scores_max_prev[i] = scores_max[i]
                machine.max_into(acc_s, scores_max, rows, part_n)
                # A part may be without keys so far: then its maximum is -inf, and the reference point is 0.
                for i in machine.parallel(rows):
                    scores_ref[i] = T.if_then_else(scores_max[i] > -T.infinity(accum), scores_max[i], 0.0)
                for i in machine.parallel(rows):
                    scores_scale[i] = T.exp2((scores_max_prev[i] - scores_ref[i]) * scale_log2)
                for i, j in machine.parallel(rows, part_n):
                    acc_s[i, j] = T.exp2((acc_s[i, j] - scores_ref[i]) * scale_log2)
                for i, j in machine.parallel(rows, part_n):
                    acc_l[i, j] = acc_l[i, j] * scores_scale[i] + acc_s[i, j]
                for i, j in machine.parallel(rows, part_n):
                    P[i, j] = T.cast(acc_s[i, j], dtype)
                for i, d in machine.parallel(rows, dim):
                    acc_o[i, d] *= scores_scale[i]
                machine.wait(full_v, stage, t // num_stages % 2, num_stages)
                if rest < block_n:
                    # The tile's last rows belong to nobody: they may hold NaN, and 0 x NaN would survive.
                    if parts > 1 and block_h == 16:  # every warp clears what it alone reads, and waits for no other
                        machine.clear_part(V_ring, stage, rest, own, part_n, dim)
                    else:
                        for j, d in machine.parallel(block_n, dim):
                            if j >= rest:
                                machine.zero(V_ring, stage, j, d)
                T.gemm(P, machine.tile(V_ring, stage, own, part_n), acc_o, policy=policy)
                if ahead < steps:
                    machine.release()
                    machine.load(V, V_ring, full_v, stage, row + ahead * block_n, head_kv, block_n, dim)
                else:
                    machine.skip()

            # The parts of a head meet in shared memory: first their maxima, then what is left of each beside them.
            machine.sum(acc_l, logsum, rows, part_n)
            for i in machine.parallel(rows):
                part_max[i] = scores_max[i]
            for i in machine.parallel(rows):
                scores_ref[i] = part_max[i % block_h]
            for p in T.serial(1, parts):
                for i in machine.parallel(rows):
                    scores_ref[i] = T.max(scores_ref[i], part_max[p * block_h + i % block_h])
            for i in machine.parallel(rows):
                scores_scale[i] = T.if_then_else(
                    scores_max[i] > -T.infinity(accum), T.exp2((scores_max[i] - scores_ref[i]) * scale_log2), 0.0
                )
            for i in machine.parallel(rows):
                part_sum[i] = logsum[i] * scores_scale[i]
            for i, d in machine.parallel(rows, dim):
                if i % block_h < heads:
                    part_o[i, d] = acc_o[i, d] * scores_scale[i]

            if cluster > 1 or exchange:
                top = T.alloc_var(accum)
                total = T.alloc_var(accum)
                four = T.alloc_local([4], accum)
                if cluster > 1:
                    machine.cluster_wait()
                for step in T.unroll(T.ceildiv(tall * dim // 4, threads)):
                    i = (step * threads + T.get_thread_binding()) // (dim // 4)
                    d = (step * threads + T.get_thread_binding()) % (dim // 4) * 4
                    if i < heads and d < head_dim:
                        top = part_max[i]
                        total = part_sum[i]
                        for e in T.vectorized(4):
                            four[e] = part_o[i, d + e]
                        for p in T.unroll(1, parts):
                            top = T.max(top, part_max[p * block_h + i])
                            total += part_sum[p * block_h + i]
                            for e in T.vectorized(4):
                                four[e] += part_o[p * block_h + i, d + e]
                        if cluster > 1:
                            machine.cluster_push(received, stats, arrived, member, i, d, width, four, top, total)
                        elif slot >= 0:
                            machine.mail_post(Partial, slot, head + i, d, four[0], four[1], current)
                            machine.mail_post(Partial, slot, head + i, d + 2, four[2], four[3], current)
                            if d == 0:
                                machine.mail_post(Partial, slot, head + i, head_dim, top, total, current)
                        else:  # the sequence's only split
                            for e in T.vectorized(4):
                                Output[sequence, head + i, d + e] = T.cast(
                                    T.if_then_else(total != 0, four[e] / total, 0.0), dtype
                                )
                            if d == 0:
                                Lse[sequence, head + i] = T.if_then_else(
                                    total != 0, (top * scale_log2 + T.log2(total)) * LN_2, -T.infinity(accum)
                                )
                if cluster > 1:
                    maxima = T.alloc_local([cluster], accum)
                    sums = T.alloc_local([cluster], accum)
                    values = T.alloc_local([cluster, 1], accum)
                    merged = T.alloc_local([3], accum)
                    machine.cluster_receive(arrived)
                    for step in T.serial(T.ceildiv(tall * width, threads)):
                        i = (step * threads + T.get_thread_binding()) // width
                        c = (step * threads + T.get_thread_binding()) % width
                        if i < heads and member * width + c < head_dim:
                            for s in T.unroll(cluster):
                                maxima[s] = stats[s, i, 0]
                                sums[s] = stats[s, i, 1]
                                values[s, 0] = received[s, i, c]
                            merge_start(merged, 1)
                            merge_more(merged, maxima, sums, values, cluster, 1, scale_log2)
                            Output[sequence, head + i, member * width + c] = T.cast(merged_value(merged, 0), dtype)
                            if member == 0 and c == 0:
                                Lse[sequence, head + i] = merged_lse(merged, scale_log2)
                else:
                    maxima = T.alloc_local([SPLITS_AT_ONCE], accum)
                    sums = T.alloc_local([SPLITS_AT_ONCE], accum)
                    values = T.alloc_local([SPLITS_AT_ONCE, 2], accum)
                    merged = T.alloc_local([4], accum)
                    # Of the tile's columns, by twos, an equal share for each of the splits.
                    begin = T.alloc_var("int32")
                    end = T.alloc_var("int32")
                    two = T.alloc_var("int32")
                    i = T.alloc_var("int32")
                    d = T.alloc_var("int32")
                    begin = T.truncdiv(heads * (head_dim // 2) * rank, splits)
                    end = T.if_then_else(slot < 0, 0, T.truncdiv(heads * (head_dim // 2) * (rank + 1), splits))
                    for step in T.serial(T.ceildiv(end - begin, threads)):
                        two = begin + step * threads + T.get_thread_binding()
                        i = T.truncdiv(two, head_dim // 2)
                        d = T.truncmod(two, head_dim // 2) * 2
                        if two < end:
                            merge_start(merged, 2)
                            for chunk in T.serial(T.ceildiv(splits, SPLITS_AT_ONCE)):
                                first = slot - rank + chunk * SPLITS_AT_ONCE
                                some = splits - chunk * SPLITS_AT_ONCE
                                machine.mail_collect(
                                    Partial, first, head + i, d, some, current, values, maxima, sums
                                )
                                merge_more(merged, maxima, sums, values, SPLITS_AT_ONCE, 2, scale_log2)
                            for e in T.vectorized(2):
                                Output[sequence, head + i, d + e] = T.cast(merged_value(merged, e), dtype)
                            if d == 0:
                                Lse[sequence, head + i] = merged_lse(merged, scale_log2)
                    if T.get_thread_binding() == 0:
                        Rounds[pid] = current
            else:
                out_max = machine.fragment([tall], accum)
                out_sum = machine.fragment([tall], accum)
                out_o = machine.fragment([tall, dim], accum)
                for i in machine.parallel(tall):
                    out_max[i] = part_max[i]
                    out_sum[i] = part_sum[i]
                for i, d in machine.parallel(tall, dim):
                    out_o[i, d] = part_o[i, d]
                for p in T.serial(1, parts):
                    for i in machine.parallel(tall):
                        out_max[i] = T.max(out_max[i], part_max[p * block_h + i])
                        out_sum[i] += part_sum[p * block_h + i]
                    for i, d in machine.parallel(tall, dim):
                        out_o[i, d] += part_o[p * block_h + i, d]
                for i, d in machine.parallel(tall, dim):
                    out_o[i, d] = T.if_then_else(out_sum[i] != 0, out_o[i, d] / out_sum[i], 0.0)
                for i in machine.parallel(tall):
                    out_sum[i] = T.if_then_else(
                        out_sum[i] != 0, (out_max[i] * scale_log2 + T.log2(out_sum[i])) * LN_2, -T.infinity(accum)
                    )
                if slot < 0:
                    for i, d in machine.parallel(tall, dim):
                        if i < heads and d < head_dim:
                            Output[sequence, head + i, d] = T.cast(out_o[i, d], dtype)
                    for i in machine.parallel(tall):
                        if i < heads:
                            Lse[sequence, head + i] = out_sum[i]
                else:
                    for i, d in machine.parallel(tall, dim):
                        if i < heads and d < head_dim:
                            Partial[slot, head + i, d] = out_o[i, d]
                    for i in machine.parallel(tall):
                        if i < heads:
                            Partial_lse[slot, head + i] = out_sum[i]

    return split


@cache
def compiled_split(
    machine: str, heads_q: int, heads_kv: int, head_dim: int, dtype: str, tile: Tile, cluster: int, exchange: bool
) -> Any:
    """The compiled split kernel; lengths, batch size and strides are run-time values."""
    target = MACHINES[machine]
    kernel = split_kernel(
        target, heads_q, heads_kv, head_dim, dtype, **asdict(tile), cluster=cluster, exchange=exchange
    )
    return _compile(target, kernel, pass_configs(target, tile))


@cache
def compile_ahead(
    machine: str, heads_q: int, heads_kv: int, head_dim: int, dtype: str, tiles: tuple[Tile, ...]
) -> None:
    """Compile what other lengths may need, which merge another way or take less of the ring: once for all.

    But for clusters: a kernel for each size, when it is first needed.
    """
    for tile, exchange in product(tiles, (False, True) if MACHINES[machine].exchanges else (False,)):
        compiled_split(machine, heads_q, heads_kv, head_dim, dtype, tile, 1, exchange)
    for many in (False, True):
        compiled_combine(machine, heads_q, head_dim, dtype, many)


@cache
def compiled_combine(machine: str, heads_q: int, head_dim: int, dtype: str, many: bool) -> Any:
    """The compiled combine kernel, for few splits or for many."""
    target = MACHINES[machine]
    if many:
        kernel = many_combine_kernel(target, heads_q, head_dim, dtype, MANY_S, GROUPS)
        return _compile(target, kernel, COMBINE_CONFIGS)
    kernel = combine_kernel(target, heads_q, head_dim, dtype, BLOCK_S, combine_threads(head_dim))
    return _compile(target, kernel, {})


def pass_configs(machine: Machine, tile: Tile) -> dict[str, bool]:
    """What the split kernel asks of TileLang's passes: warps of a ``wgmma`` share its operands, parts do not."""
    return {"tl.disable_wgmma": True} if machine.parts(tile.block_h, tile.threads) > 1 else {}


def compiled_variants() -> int:
    """How many compiled kernels this process holds."""
    return compiled_split.cache_info().currsize + compiled_combine.cache_info().currsize


def _compile(machine: Machine, kernel: Any, configs: Mapping[str, bool]) -> Any:
    if machine.target == "c":
        # Vectorised float16 code does not compile as C++.
        configs = {**configs, "tirx.disable_vectorize": True}
        return tilelang.compile(kernel, target="c", execution_backend="cython", pass_configs=configs)
    return tilelang.compile(kernel, target="cuda", pass_configs=dict(configs))


def combine(partial: Tensor, lse: Tensor, merges: Tensor, out: Tensor, out_lse: Tensor, many: bool = False) -> None:
    """Merge the partials of every sequence in ``merges``; launches only.

    Args:
        partial: ``[slots, Hq, D]`` float32, contiguous, 16-byte aligned: each split's normalised output.
        lse: ``[slots, Hq]`` float32, contiguous, natural logarithm; -inf marks an empty split.
        merges: ``[merged sequences, 4]`` int32: :attr:`impls.splits.SplitTable.merges`.
        out: ``[B, Hq, D]``, contiguous; only the merged sequences' rows are written.
        out_lse: ``[B, Hq]`` float32, contiguous; likewise.
        many: whether by the kernel for more than :data:`BLOCK_S` splits; either takes any number.
    """
    heads_q, head_dim = out.shape[1:]
    dtype = next(name for name, torch_dtype in TORCH_DTYPES.items() if torch_dtype == out.dtype)
    kernel = compiled_combine(choose_machine(out.device).name, heads_q, head_dim, dtype, many)
    kernel(partial, lse, merges, out, out_lse)


@dataclass(frozen=True)
class Decision:
    """What a tuning comes to for a problem on a machine, before anything is compiled.

    Args:
        tiles: those that our rule may take for other lengths.
        tile: the one that is taken.
        splitting: the splits, and how they merge.
    """

    tiles: tuple[Tile, ...]
    tile: Tile
    splitting: Splitting

    @property
    def many_splits(self) -> bool | None:
        """Whether the combine kernel has more than :data:`BLOCK_S` splits to merge; None where it has nothing."""
        if self.splitting.exchange or not self.splitting.slots:
            return None
        return self.splitting.table.splits_max > BLOCK_S


def decide(machine: Machine, problem: DecodeProblem, choice: Mapping[str, Scalar], sms: int) -> Decision:
    """Tile, splits and the way to merge them; host values only.

    Raises:
        PlanRefused: if the workspace would exceed its budget.
        ValueError: for a choice out of range.
    """
    tiles = ring_tiles(machine, problem, choice)
    tile = tiles[ring_share(problem, choice, tiles[2], sms) if 2 in tiles else 1]
    budget, ample = positive(choice, BUDGET), {**choice, BUDGET: AMPLE}
    splitting = _split(machine, problem, ample, tile, sms)
    free = leaves_plan(choice)
    if free and tile != tiles[1] and stand_alone(problem, splitting, sms):
        tile = tiles[1]
        splitting = _split(machine, problem, ample, tile, sms)
    if free and machine.clusters and pairs_end_sooner(problem, splitting, tile, sms=sms):
        pairs = _split(machine, problem, ample, tile, sms, num_splits=2)
        splitting = pairs if pairs.cluster == 2 else splitting
    if splitting.workspace_bytes > budget:
        splitting = _split(machine, problem, choice, tile, sms)
    return Decision(tuple(tiles.values()), tile, splitting)


def _split(
    machine: Machine,
    problem: DecodeProblem,
    choice: Mapping[str, Scalar],
    tile: Tile,
    sms: int,
    num_splits: int | None = None,
) -> Splitting:
    """Splits for a tile, and the way to merge them; ``num_splits`` of every sequence, where that is given."""
    limits = split_limits(sms, problem, block_n=tile.block_n, num_stages=tile.num_stages, tma=machine.tma)
    tiles_per_split, places = problem.tiles_per_split(tile.block_h), at_once(machine, problem, tile, sms)
    if num_splits is None:
        whole = problem.head_dim <= 128 and stays_whole(
            problem, choice, sms=sms, tiles_per_split=tiles_per_split, at_once=places
        )
        rounds = rounds_splits(problem, choice, sms=sms, tiles_per_split=tiles_per_split) if machine.tma else None
        num_splits = 1 if whole else rounds or clustered_splits(machine, problem, choice, tile, sms=sms)
    # Who asks for another way to merge has said no to clusters.
    asked = 1 if choice["cluster"] is None and choice["merge"] != "auto" else choice["cluster"]
    return decide_splitting(
        problem,
        choice,
        sm_count=sms,
        tiles_per_split=tiles_per_split,
        limits=limits,
        num_splits=num_splits,
        choose_cluster=lambda counts: choose_cluster(machine, problem, tile, asked, counts, sms=sms),
        at_once=places,
    )


def sms_of(device: torch.device) -> int:
    """SMs of a GPU; on a CPU, what stands in for them."""
    return sm_count(device) if device.type == "cuda" else CPU_CTAS


class TileLangPlan(SplitKVPlan):
    """The plan of one problem; see :class:`impls.contract.DecodePlan`.

    What other lengths may need is compiled with the first plan of a shape, but for clusters (four sizes, for a few
    sequences), unless the caller has chosen the tile: then only what these lengths need.
    """

    def __init__(self, problem: DecodeProblem, device: torch.device, choice: Mapping[str, Scalar]) -> None:
        machine = choose_machine(device)
        decision = decide(machine, problem, choice, sms_of(device))
        tile = decision.tile
        super().__init__(problem, device, choice, decision.splitting)
        dtype = compute_dtype(machine, problem.dtype)
        self._machine = machine
        self._groups = self._items.unflatten(0, (-1, self._cluster))  # [groups, CTAs of a cluster, 4 or 8]
        self._dtype = TORCH_DTYPES[dtype]
        self._scale_log2 = problem.softmax_scale * LOG2_E
        shape = (problem.heads_q, problem.heads_kv, problem.head_dim)
        if all(choice[name] is None for name in TILE_TUNING):
            compile_ahead(machine.name, *shape, dtype, decision.tiles)
        self._split = compiled_split(machine.name, *shape, dtype, tile, self._cluster, self._exchange)
        if (many := decision.many_splits) is not None:
            self._combine = compiled_combine(machine.name, problem.heads_q, problem.head_dim, dtype, many)
        self.config = {
            "library": "tilelang",
            "version": tilelang.__version__,
            "function": "impls.tilelang_splitkv",
            **self._split_config,
            "block_n": tile.block_n,
            "block_h": tile.block_h,
            "num_stages": tile.num_stages,
            "threads": tile.threads,
            "cluster": self._cluster,
            "merge": "cluster" if self._cluster > 1 else self._split_config["merge"],
            "machine": machine.name,
            "tma": machine.tma,
            "warp_specialize": False,
            "compute_dtype": dtype,
        }

    def launch_split(self, inputs: DecodeInputs, out: Tensor, lse: Tensor) -> None:
        """Launch the split kernel; on the CPU, a dtype it lacks is converted on the way in and out."""
        check_layout(self._machine, inputs)
        q, k, v = (x.to(self._dtype) for x in (inputs.q, inputs.k, inputs.v))
        result = out if out.dtype == self._dtype else torch.empty_like(out, dtype=self._dtype)
        strides = (*k.stride()[:2], *v.stride()[:2])
        partials = (self._partial, self._partial_lse, self._rounds)
        self._split(self._scale_log2, *strides, q, k, v, self._groups, result, lse, *partials)
        if result is not out:
            out.copy_(result)

    def launch_combine(self, out: Tensor, lse: Tensor) -> None:
        """Launch the combine kernel."""
        result = out if out.dtype == self._dtype else out.to(self._dtype)
        self._combine(self._partial, self._partial_lse, self._merges, result, lse)
        if result is not out:
            out.copy_(result)


def refused_problem(problem: DecodeProblem, *, gpu: bool) -> str | None:
    """Why no kernel is compiled for a problem, whatever the device of that kind; None where one is."""
    if problem.head_dim not in HEAD_DIMS:
        return f"head_dim: expected one of {', '.join(map(str, HEAD_DIMS))}, got {problem.head_dim}"
    if gpu and problem.dtype == "float32":
        return "dtype: expected float16 or bfloat16 on a GPU (float32 would go through TF32), got float32"
    return None


class TileLangSplitKV:
    """Our split-KV kernel in TileLang; see :class:`impls.contract.DecodeImpl`.

    Raises:
        ImplUnavailable: if there is neither a GPU nor the C++ compiler that the C target needs.
    """

    name = "tilelang-splitkv"

    def __init__(self) -> None:
        if not torch.cuda.is_available() and (missing := missing_compiler()):
            raise ImplUnavailable(missing)

    def unsupported(self, problem: DecodeProblem, device: torch.device) -> str | None:
        """Refuses head dims that are not compiled, float32 on a GPU, and GPUs before sm_80."""
        gpu = device.type == "cuda"
        if (reason := refused_problem(problem, gpu=gpu)) is not None:
            return reason
        if gpu:
            return check_capability(device, (8, 0))
        if device.type != "cpu":
            return f"device: expected cuda or cpu, got {device.type}"
        return None

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> TileLangPlan:
        """See :meth:`impls.contract.DecodeImpl.plan`; the tuning keys are those of :data:`TUNING`."""
        return TileLangPlan(problem, device, check_tuning(tuning, TUNING))

    def configurations(self, problem: DecodeProblem, device: torch.device) -> list[Configuration]:
        """:data:`SPACE` with every way to split; see :class:`impls.space.Tunable`.

        How splits merge is our rule's choice, and each way is a kernel of its own.
        """
        machine, sms = choose_machine(device), sms_of(device)

        def refusal(choice: Mapping[str, Scalar]) -> str | None:
            tile = choose_tile(machine, problem, {**TUNING, **choice})
            if machine.target == "c":
                return None if tile.num_stages == 1 else f"num_stages: expected 1 on cpu, got {tile.num_stages}"
            most: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
            return too_large(tile_bytes(machine, problem, tile), most)

        def kernel(choice: Mapping[str, Scalar]) -> str:
            decision = decide(machine, problem, {**TUNING, **choice}, sms)
            splitting = decision.splitting
            many = decision.many_splits
            return (
                f"{decision.tile}, cluster {splitting.cluster}, exchange {splitting.exchange}, many splits {many}"
            )

        return configurations(SPACE, refusal, kernel)


class TileLangEqualSplits(TileLangSplitKV):
    """The ablation: our kernels with as many splits for every sequence, as the official example has them.

    TileLang's GQA decode example launches a grid of batch, heads and ``num_split``, one number for all. Its
    configuration for every GPU but sm_89 says 8 (``get_heuristic_config`` in ``example_gqa_decode.py``).
    """

    name = "tilelang-equal-splits"

    def plan(
        self,
        problem: DecodeProblem,
        device: torch.device,
        tuning: Mapping[str, Scalar] | None = None,
    ) -> TileLangPlan:
        """As of :class:`TileLangSplitKV`, with :data:`EXAMPLE_SPLITS` splits unless the tuning says otherwise."""
        return super().plan(problem, device, {"num_splits": EXAMPLE_SPLITS, **(tuning or {})})
