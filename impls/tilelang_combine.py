"""The combine kernels of the TileLang implementation: one for few splits of a sequence, one for many.

Both merge normalised float32 partials with weights ``exp(lse_s - lse)``; see :mod:`impls.tilelang_splitkv`.
"""

import tilelang.language as T

from impls.tilelang_machines import Machine
from impls.tilelang_merge import LN_2, LOG2_E
from impls.tilelang_tile import combine_columns

BLOCK_S = 16
"""Splits that the combine kernel merges at a time, where there are no more; else :data:`MANY_S`."""

MANY_S = 128
"""Splits merged at a time where there are over :data:`BLOCK_S`: by :data:`GROUPS` groups of threads, 8 by each."""

GROUPS = 16
"""Groups of threads in a combine CTA for many splits."""

COMBINE_CONFIGS = {"tl.disable_safe_memory_legalize": True}
"""What the combine kernel for many splits asks of TileLang's passes: no guards against rows that no table names,
for each would make a branch of a load."""


def combine_kernel(machine: Machine, heads_q: int, head_dim: int, dtype: str, block_s: int, threads: int):
    """The combine kernel for few splits as a ``prim_func``: merge one sequence's partials for one query head.

    Every thread merges all splits of its columns, unrolled; :func:`many_combine_kernel` is for more than a few.
    Splits without keys (LSE minus infinity) are skipped by selection, never multiplied by 0: their partials may
    hold anything.

    Args:
        machine: buffers and loops of the target.
        heads_q: query heads, Hq.
        head_dim: elements per head, D.
        dtype: of Output.
        block_s: splits merged at a time; there may be more.
        threads: per CTA.
    """
    accum = "float32"
    batch, slots, merges = (T.dynamic(name) for name in ("batch", "slots", "merges"))

    @T.prim_func
    def combine(
        Partial: T.Tensor([slots, heads_q, head_dim], accum),
        Partial_lse: T.Tensor([slots, heads_q], accum),
        Merges: T.Tensor([merges, 4], "int32"),
        Output: T.Tensor([batch, heads_q, head_dim], dtype),
        Lse: T.Tensor([batch, heads_q], accum),
    ):
        with machine.kernel(merges * heads_q, threads=threads) as pid:
            bx = pid % heads_q
            by = pid // heads_q
            # Every thread merges whole columns, and follows the LSEs by itself: nothing to wait for but memory.
            partial = machine.fragment([block_s, head_dim], accum)
            acc_o = machine.fragment([head_dim], accum)
            weight = T.alloc_local([block_s], accum)
            lse_max = T.alloc_var(accum)
            lse_max_prev = T.alloc_var(accum)
            rescale = T.alloc_var(accum)
            logsum = T.alloc_var(accum)

            sequence = Merges[by, 0]
            first = Merges[by, 1]
            count = Merges[by, 2]

            machine.depend()
            lse_max = -T.infinity(accum)
            logsum = 0.0
            for d in machine.parallel(head_dim):
                acc_o[d] = 0.0
            for chunk in T.serial(T.ceildiv(count, block_s)):
                start = chunk * block_s
                for d in machine.parallel(head_dim):
                    for s in T.unroll(block_s):
                        partial[s, d] = T.if_then_else(start + s < count, Partial[first + start + s, bx, d], 0.0)
                for s in T.unroll(block_s):
                    weight[s] = T.if_then_else(
                        start + s < count, Partial_lse[first + start + s, bx], -T.infinity(accum)
                    )
                lse_max_prev = lse_max
                for s in T.unroll(block_s):
                    lse_max = T.max(lse_max, weight[s])
                # All splits so far may be empty: then the maximum is -inf, and -inf - -inf is not a weight.
                rescale = T.if_then_else(
                    lse_max_prev > -T.infinity(accum), T.exp2((lse_max_prev - lse_max) * LOG2_E), 0.0
                )
                logsum = logsum * rescale
                for s in T.unroll(block_s):
                    weight[s] = T.if_then_else(
                        weight[s] != -T.infinity(accum), T.exp2((weight[s] - lse_max) * LOG2_E), 0.0
                    )
                    logsum += weight[s]
                for d in machine.parallel(head_dim):
                    acc_o[d] *= rescale
                    for s in T.unroll(block_s):
                        acc_o[d] += T.if_then_else(weight[s] != 0, partial[s, d] * weight[s], 0.0)
            for d in machine.parallel(head_dim):
                Output[sequence, bx, d] = T.cast(T.if_then_else(logsum != 0, acc_o[d] / logsum, 0.0), dtype)
            for i in machine.parallel(1):
                Lse[sequence, bx + i] = T.if_then_else(
                    logsum != 0, lse_max + T.log2(logsum) * LN_2, -T.infinity(accum)
                )

    return combine


def many_combine_kernel(machine: Machine, heads_q: int, head_dim: int, dtype: str, block_s: int, groups: int):
    """The combine kernel for many splits as a ``prim_func``; it computes what :func:`combine_kernel` does.

    A CTA merges some columns of one query head, so that few heads are work for many SMs. Its threads are groups, of
    which each merges every ``groups``-th split, four columns a thread, with a maximum and a sum of its own; at the
    end the groups meet in shared memory, once. A thread asks for all that it reads of ``block_s`` splits before it
    looks at an LSE: one trip to memory for them.

    Args:
        machine: buffers and threads of the target.
        heads_q: query heads, Hq.
        head_dim: elements per head, D.
        dtype: of Output.
        block_s: splits merged at a time, a multiple of ``groups``; there may be more.
        groups: of threads.
    """
    accum = "float32"
    columns = combine_columns(head_dim)
    tiles = head_dim // columns
    lanes = columns // 4
    threads = groups * lanes
    each = block_s // groups
    batch, slots, merges = (T.dynamic(name) for name in ("batch", "slots", "merges"))

    @T.prim_func
    def combine(
        Partial: T.Tensor([slots, heads_q, head_dim], accum),
        Partial_lse: T.Tensor([slots, heads_q], accum),
        Merges: T.Tensor([merges, 4], "int32"),
        Output: T.Tensor([batch, heads_q, head_dim], dtype),
        Lse: T.Tensor([batch, heads_q], accum),
    ):
        # The tiles are few, so that they can be the second axis, which ends at 65535.
        with machine.kernel(merges * heads_q, tiles, threads=threads) as (pid, tile):
            bx = pid % heads_q
            by = pid // heads_q
            left = tile * columns
            partial = T.alloc_local([each, 4], accum)
            partial_lse = T.alloc_local([each], accum)
            acc_o = T.alloc_local([4], accum)
            lse_max = T.alloc_var(accum)
            lse_max_prev = T.alloc_var(accum)
            lse_ref = T.alloc_var(accum)
            weight = T.alloc_var(accum)
            logsum = T.alloc_var(accum)
            out = T.alloc_var(accum)
            group_max = machine.shared([groups], accum)
            group_sum = machine.shared([groups], accum)
            group_o = machine.shared([groups, columns], accum)

            sequence = Merges[by, 0]
            first = Merges[by, 1]
            count = Merges[by, 2]

            machine.depend()
            for thread in machine.threads(threads):
                group = thread // lanes
                d = thread % lanes * 4
                lse_max = -T.infinity(accum)
                logsum = 0.0
                for e in T.vectorized(4):
                    acc_o[e] = 0.0
                for chunk in T.serial(T.ceildiv(count, block_s)):
                    start = chunk * block_s + group
                    for s in T.unroll(each):
                        partial_lse[s] = -T.infinity(accum)
                        if start + s * groups < count:
                            partial_lse[s] = Partial_lse[first + start + s * groups, bx]
                            for e in T.vectorized(4):
                                partial[s, e] = Partial[first + start + s * groups, bx, left + d + e]
                    lse_max_prev = lse_max
                    for s in T.unroll(each):
                        lse_max = T.max(lse_max, partial_lse[s])
                    # All splits so far may be empty: then the maximum is -inf, and the reference point is 0.
                    lse_ref = T.if_then_else(lse_max > -T.infinity(accum), lse_max, 0.0)
                    weight = T.exp2((lse_max_prev - lse_ref) * LOG2_E)
                    logsum = logsum * weight
                    for e in T.unroll(4):
                        acc_o[e] *= weight
                    for s in T.unroll(each):
                        weight = T.exp2((partial_lse[s] - lse_ref) * LOG2_E)
                        logsum += weight
                        if weight != 0:
                            for e in T.unroll(4):
                                acc_o[e] += partial[s, e] * weight
                group_max[group] = lse_max
                group_sum[group] = logsum
                for e in T.vectorized(4):
                    group_o[group, d + e] = acc_o[e]

            for d in machine.threads(threads):
                if d < columns:
                    lse_max = -T.infinity(accum)
                    logsum = 0.0
                    out = 0.0
                    for g in T.unroll(groups):
                        lse_max = T.max(lse_max, group_max[g])
                    lse_ref = T.if_then_else(lse_max > -T.infinity(accum), lse_max, 0.0)
                    # A group of empty splits has the sum 0 and columns of 0: no need to leave it out.
                    for g in T.unroll(groups):
                        weight = T.exp2((group_max[g] - lse_ref) * LOG2_E)
                        logsum += group_sum[g] * weight
                        out += group_o[g, d] * weight
                    Output[sequence, bx, left + d] = T.cast(T.if_then_else(logsum != 0, out / logsum, 0.0), dtype)
                    if left + d == 0:
                        Lse[sequence, bx] = T.if_then_else(
                            logsum != 0, lse_max + T.log2(logsum) * LN_2, -T.infinity(accum)
                        )

    return combine
