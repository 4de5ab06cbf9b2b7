"""The arithmetic of merging unnormalised splits, for the kernels of clusters and of exchanges in TileLang; and the
logarithms that all of ours change their base with."""

import tilelang.language as T

LN_2, LOG2_E = 0.6931471805599453, 1.4426950408889634


@T.macro
def merge_start(merged, columns):
    """Nothing merged yet: maximum -inf, sum 0 and columns 0 in ``merged``, ``[2 + columns]``."""
    merged[0] = -T.infinity("float32")
    for e in T.unroll(1, 2 + columns):
        merged[e] = 0.0


@T.macro
def merge_more(merged, maxima, sums, values, splits, columns, scale_log2):
    """Merge some columns of unnormalised splits into ``merged``; one without keys has the sum 0 and is left out.

    Selected, not multiplied by 0: its maximum is -inf, and its columns may hold anything.
    """
    before = T.alloc_var("float32")
    rescale = T.alloc_var("float32")
    before = merged[0]
    for s in T.unroll(splits):
        merged[0] = T.if_then_else(sums[s] != 0, T.max(merged[0], maxima[s]), merged[0])
    rescale = T.if_then_else(before > -T.infinity("float32"), T.exp2((before - merged[0]) * scale_log2), 0.0)
    for e in T.unroll(1, 2 + columns):
        merged[e] *= rescale
    for s in T.unroll(splits):
        rescale = T.exp2((maxima[s] - merged[0]) * scale_log2)
        merged[1] += T.if_then_else(sums[s] != 0, sums[s] * rescale, 0.0)
        for e in T.unroll(columns):
            merged[2 + e] += T.if_then_else(sums[s] != 0, values[s, e] * rescale, 0.0)


def merged_value(merged, column):
    """A column of the output, from what was merged: 0 without keys."""
    return T.if_then_else(merged[1] != 0, merged[2 + column] / merged[1], 0.0)


def merged_lse(merged, scale_log2):
    """The natural-log LSE of what was merged: -inf without keys."""
    return T.if_then_else(
        merged[1] != 0, (merged[0] * scale_log2 + T.log2(merged[1])) * LN_2, -T.infinity("float32")
    )
