"""Split counts and split tables as pure integer functions, shared by both of our kernels.

A *split* is one contiguous range of one sequence's keys. A split table says which splits exist, in which
order they are launched, and where each one's partial goes. It is made on the host from lengths alone, so
planning never touches the device.

Ranges are cut in proportion: with ``S`` splits of ``n`` keys, split ``s`` is ``[n*s//S, n*(s+1)//S)``.
Every key belongs to exactly one split, and no two splits of a sequence differ by more than one key.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from impls.problem import INT32_MAX

IntArray = npt.NDArray[np.int32]

DIRECT = -1
"""The slot of a split that is its sequence's only one: it writes the output itself, there is no partial."""

MAX_SPLITS = 128
"""The most splits that ``auto`` gives one sequence."""

WAVES = (1, 1.5, 2, 3, 4)
"""Rounds of CTAs that ``auto`` considers for sequences of different lengths."""

WORTHWHILE = 0.98
"""More rounds, and so more partials to merge, are chosen only where they end this much earlier."""


@dataclass(frozen=True)
class SplitTable:
    """The splits of one batch.

    Args:
        items: ``[splits, 4]`` int32, one 16-byte row a split, longest first:
            ``(sequence, first row in packed K and V, keys, slot)``; the slot is :data:`DIRECT` where the
            split is its sequence's only one.
        merges: ``[merged sequences, 4]`` int32, one row a sequence with two splits or more:
            ``(sequence, first slot, splits, 0)``. A sequence's slots are consecutive, in key order.
        slots: partials that the workspace must hold.
        splits_max: the largest number of splits of one sequence; 0 for an empty batch.
    """

    items: IntArray
    merges: IntArray
    slots: int
    splits_max: int

    def workspace_bytes(self, heads_q: int, head_dim: int) -> int:
        """Bytes of the float32 partials ``[slots, Hq, D]`` and their LSE ``[slots, Hq]``."""
        return 4 * self.slots * heads_q * (head_dim + 1)


def equal_counts(kv_lens: Sequence[int], num_splits: int) -> IntArray:
    """The same number of splits for every sequence, but never more than it has keys, and at least one.

    Args:
        kv_lens: keys of each sequence.
        num_splits: what was asked, at least 1.

    Raises:
        ValueError: if ``num_splits`` is not an integer of at least 1.
    """
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 1:
        raise ValueError(f"num_splits: expected an integer >= 1 or 'auto', got {num_splits!r}")
    lens = np.asarray(kv_lens, dtype=np.int64)
    return np.minimum(np.maximum(lens, 1), num_splits).astype(np.int32)


def proportional_counts(kv_lens: Sequence[int], *, tiles_per_split: int, slots: int, min_keys: int) -> IntArray:
    """Splits in proportion to length, so that about ``slots`` CTAs run, each over about as many keys.

    ``chunk = ceil(total keys * tiles_per_split / slots)``, and a sequence of ``n`` keys gets
    ``max(1, round(n / chunk))`` splits, at most :data:`MAX_SPLITS`.

    Args:
        kv_lens: keys of each sequence.
        tiles_per_split: CTAs that one split launches: KV heads times head tiles.
        slots: CTAs that the device runs at once.
        min_keys: no split is planned shorter than this (a tile of the kernel).

    Returns:
        ``[B]`` int32, each at least 1.
    """
    lens = np.asarray(kv_lens, dtype=np.int64)
    chunk = max(min_keys, -(-int(lens.sum()) * tiles_per_split // slots), 1)
    counts = (2 * lens + chunk) // (2 * chunk)  # round half up, in integers
    return np.clip(counts, 1, MAX_SPLITS).astype(np.int32)


def balanced_counts(
    kv_lens: Sequence[int], *, tiles_per_split: int, ctas: int, min_keys: int, overhead: int
) -> IntArray:
    """The :func:`proportional_counts` under which the device's last CTA is expected to end first.

    One round of CTAs is best where it can be filled evenly: every further one costs another start and end.
    Among sequences of different lengths, the longest splits of a single round leave the other CTAs waiting,
    and shorter splits, handed out longest first, even that out. :func:`makespan` tells which it is.

    Args:
        kv_lens: keys of each sequence.
        tiles_per_split: CTAs that one split launches: KV heads times head tiles.
        ctas: CTAs that the device runs at once.
        min_keys: no split is planned shorter than this (a tile of the kernel).
        overhead: what starting and ending a CTA costs, in keys.

    Returns:
        ``[B]`` int32, each at least 1.
    """
    lens = np.asarray(kv_lens, dtype=np.int64)
    uneven = len(lens) > 1 and int(lens.min()) < int(lens.max())
    best, least = None, math.inf
    for waves in WAVES if uneven else WAVES[:1]:
        counts = proportional_counts(
            kv_lens, tiles_per_split=tiles_per_split, slots=int(ctas * waves), min_keys=min_keys
        )
        if best is not None and np.array_equal(counts, best):
            continue
        keys = np.repeat(-(-lens // counts) + overhead, counts)
        end = makespan(np.sort(keys)[::-1].tolist(), copies=tiles_per_split, ctas=ctas)
        if end < WORTHWHILE * least:
            best, least = counts, end
    assert best is not None
    return best


def makespan(keys: Sequence[int], *, copies: int, ctas: int) -> int:
    """When the last CTA ends if each split goes to whichever CTA is free first, in keys read by one CTA.

    Args:
        keys: of each split, in the order in which they are launched.
        copies: CTAs that each split launches, side by side.
        ctas: CTAs that run at once.
    """
    shared = math.gcd(copies, ctas)  # copies run in step: so many of them count as one
    free = [0] * (ctas // shared)
    for n in keys:
        for _ in range(copies // shared):
            heapq.heapreplace(free, free[0] + n)
    return max(free)


def make_table(kv_lens: Sequence[int], counts: IntArray) -> SplitTable:
    """Cut every sequence into its number of splits and order the splits, longest first.

    Args:
        kv_lens: keys of each sequence.
        counts: ``[B]`` splits of each sequence, each between 1 and ``max(1, kv_lens[b])``.

    Raises:
        ValueError: if a count is out of range, naming the sequence.
    """
    lens = np.asarray(kv_lens, dtype=np.int64)
    count = np.asarray(counts, dtype=np.int64)
    if len(lens) == 0:
        empty = np.zeros((0, 4), dtype=np.int32)
        return SplitTable(items=empty, merges=empty, slots=0, splits_max=0)
    wrong = np.flatnonzero((count < 1) | (count > np.maximum(lens, 1)))
    if len(wrong):
        b = int(wrong[0])
        raise ValueError(f"counts[{b}]: expected 1 <= splits <= {max(1, int(lens[b]))}, got {int(count[b])}")
    first_row = np.cumsum(lens) - lens
    merged = count > 1
    first_slot = np.cumsum(np.where(merged, count, 0)) - np.where(merged, count, 0)

    sequence = np.repeat(np.arange(len(lens)), count)
    split = np.arange(len(sequence)) - np.repeat(np.cumsum(count) - count, count)
    start = lens[sequence] * split // count[sequence]
    keys = lens[sequence] * (split + 1) // count[sequence] - start
    slot = np.where(merged[sequence], first_slot[sequence] + split, DIRECT)
    items = np.stack([sequence, first_row[sequence] + start, keys, slot], axis=1)
    order = np.argsort(-keys, kind="stable")

    of = np.flatnonzero(merged)
    merges = np.stack([of, first_slot[of], count[of], np.zeros_like(of)], axis=1)
    return SplitTable(
        items=np.ascontiguousarray(items[order], dtype=np.int32),
        merges=np.ascontiguousarray(merges, dtype=np.int32),
        slots=int(count[merged].sum()),
        splits_max=int(count.max()),
    )


def check_offsets(elements: int, what: str) -> str | None:
    """The refusal for an element offset past int32, or None where it fits.

    Args:
        elements: the largest element offset that a kernel would form.
        what: the tensor, for the message.
    """
    if elements <= INT32_MAX:
        return None
    return f"{what}: expected element offsets <= {INT32_MAX} (int32), got {elements}"
