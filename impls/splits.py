"""Split counts and split tables as pure integer functions, shared by both of our kernels.

A *split* is one contiguous range of one sequence's keys. A split table says which splits exist, in which
order they are launched, and where each one's partial goes. It is made on the host from lengths alone, so
planning never touches the device.

Ranges are cut in proportion: with ``S`` splits of ``n`` keys, split ``s`` is ``[n*s//S, n*(s+1)//S)``.
Every key belongs to exactly one split, and no two splits of a sequence differ by more than one key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from impls.makespan import Schedule
from impls.problem import INT32_MAX

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Lengths = Sequence[int] | npt.NDArray[np.integer]
"""Keys of each sequence; int64 arrays are taken as they are."""

DIRECT = -1
"""The slot of a split that is its sequence's only one: it writes the output itself, there is no partial."""

MAX_SPLITS = 128
"""The most splits that ``auto`` gives one sequence."""

EVEN_WAVES = (1, 2, 3, 4, 5)
"""Rounds of CTAs that :func:`even_splits` weighs."""

WAVES = (1, 1.5, 2, 3, 4)
"""Rounds of CTAs that ``auto`` considers for sequences of different lengths."""

WORTHWHILE = 0.98
"""More rounds, and so more partials to merge, are chosen only where they end this much earlier."""


SLIGHTLY = 1.2
"""CTAs, of those that run at once, up to which it is asked whether somewhat fewer would not make one round."""

LESS = (0.95, 0.9, 0.8)
"""For how many CTAs, of those, that is then tried."""

FEW = 3
"""Splits up to which it is asked whether whole sequences would not end as soon, with nothing to merge."""

EVEN = 1.03
"""Splits are about equally long if each is so many times as long as it should be, or as much shorter, at most."""


@dataclass(frozen=True)
class SplitTable:
    """The splits of one batch.

    Args:
        rows: ``[splits + merged sequences, 4]`` int32, :attr:`items` and then :attr:`merges`: one array, so
            that one copy takes both to a device.
        splits: of all sequences.
        slots: partials that the workspace must hold.
        counts: ``[B]`` int64, splits of each sequence.
    """

    rows: Int32Array
    splits: int
    slots: int
    counts: Int64Array

    @property
    def items(self) -> Int32Array:
        """``[splits, 4]`` int32, one 16-byte row a split, longest first to within one key.

        ``(sequence, first row in packed K and V, keys, slot)``; the slot is :data:`DIRECT` where the split is
        its sequence's only one. The splits of a sequence are neighbours, in key order; sequences follow one
        another by their longest split. So where all have ``S`` splits, every ``S`` rows are one sequence, which
        the CTAs of one cluster can take.
        """
        return self.rows[: self.splits]

    @property
    def merges(self) -> Int32Array:
        """``[merged sequences, 4]`` int32, one row a sequence with two splits or more.

        ``(sequence, first slot, splits, 0)``. A sequence's slots are consecutive, in key order.
        """
        return self.rows[self.splits :]

    def ctas(self, tiles: int) -> Int32Array:
        """``[splits * tiles, 8]`` int32, one row a CTA of a kernel whose CTAs merge their splits by themselves.

        ``(sequence, first row in packed K and V, keys, slot, head tile, rank, splits, 0)``, the rank being the
        place of the split among the ``splits`` of its sequence. Sequences follow one another as in :attr:`items`;
        within a sequence the splits of one head tile are neighbours: those that wait for each other start together.

        Args:
            tiles: CTAs that one split launches: KV heads times head tiles.
        """
        sequence = self.items[:, 0]
        first = np.arange(self.splits)  # the first item of each item's sequence
        first[1:][sequence[1:] == sequence[:-1]] = 0
        first = np.maximum.accumulate(first).repeat(tiles)
        splits = self.counts.take(sequence).repeat(tiles)
        tile, rank = np.divmod(np.arange(len(first)) - tiles * first, splits)
        rows = np.zeros((len(first), 8), dtype=np.int32)
        rows[:, :4] = self.items.take(first + rank, axis=0)
        rows[:, 4] = tile
        rows[:, 5] = rank
        rows[:, 6] = splits
        return rows

    @property
    def splits_max(self) -> int:
        """The largest number of splits of one sequence; 0 for an empty batch."""
        return int(self.counts.max()) if len(self.counts) else 0

    def workspace_bytes(self, heads_q: int, head_dim: int) -> int:
        """Bytes of the float32 partials ``[slots, Hq, D]`` and their LSE ``[slots, Hq]``."""
        return 4 * self.slots * heads_q * (head_dim + 1)


def common_count(counts: Int64Array) -> int | None:
    """The number of splits that all sequences have, from the splits of each, ``[B]``; or None."""
    first: int | None = counts.item(0) if len(counts) else None
    return first if first is not None and (counts == first).all() else None


def as_array(kv_lens: Lengths) -> Int64Array:
    """Lengths as ``[B]`` int64; converted once, they need no conversion in the functions of this module."""
    if isinstance(kv_lens, np.ndarray):
        return np.asarray(kv_lens, dtype=np.int64)
    return np.fromiter(kv_lens, np.int64, len(kv_lens))  # a third faster than from a sequence of unknown dtype


def about_equal(sequences: int, longest: int, total: int) -> bool:
    """Whether no sequence is longer than the mean by over a quarter, from their number, longest and sum."""
    return 4 * longest * sequences <= 5 * total


def equal_counts(kv_lens: Lengths, num_splits: int) -> Int64Array:
    """The same number of splits for every sequence, but never more than it has keys, and at least one.

    Args:
        kv_lens: keys of each sequence.
        num_splits: what was asked, at least 1.

    Raises:
        ValueError: if ``num_splits`` is not an integer of at least 1.
    """
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 1:
        raise ValueError(f"num_splits: expected an integer >= 1 or 'auto', got {num_splits!r}")
    lens = as_array(kv_lens)
    return np.minimum(np.maximum(lens, 1), num_splits)


def proportional_counts(kv_lens: Lengths, *, tiles_per_split: int, slots: int, min_keys: int) -> Int64Array:
    """Splits in proportion to length, so that about ``slots`` CTAs run, each over about as many keys.

    ``chunk = ceil(total keys * tiles_per_split / slots)``, and a sequence of ``n`` keys gets
    ``max(1, round(n / chunk))`` splits, at most :data:`MAX_SPLITS`.

    Args:
        kv_lens: keys of each sequence.
        tiles_per_split: CTAs that one split launches: KV heads times head tiles.
        slots: CTAs that the device runs at once.
        min_keys: no split is planned shorter than this (a tile of the kernel).

    Returns:
        ``[B]`` int64, each at least 1.
    """
    lens = as_array(kv_lens)
    return _rounded(lens, _chunk(int(lens.sum()) * tiles_per_split, slots, min_keys))


def _chunk(work: int, slots: int, min_keys: int) -> int:
    """Keys that one split should have, for ``slots`` CTAs to share ``work`` keys."""
    return max(min_keys, -(-work // slots), 1)


def _rounded(lens: Int64Array, chunk: int, merging: float = 0.0) -> Int64Array:
    """``lens`` in chunks, rounded half up in integers, within what is allowed.

    Args:
        lens: ``[B]``, keys of each sequence.
        chunk: keys that one split should have.
        merging: see :func:`most_splits`; 0 where merging costs nothing.
    """
    counts = lens + chunk // 2
    counts //= chunk
    return _capped(counts, lens, merging)


def _nearest(keys: int, chunk: int) -> int:
    """``keys`` in chunks, rounded half up, at least 1."""
    return max(1, (keys + chunk // 2) // max(1, chunk))


def _capped(counts: Int64Array, lens: Int64Array, merging: float) -> Int64Array:
    """``counts``, changed to no more than what is worth merging."""
    np.maximum(counts, 1, out=counts)
    # Counts grow with the length, what is worth merging with its root: the longest is the first to have too many,
    # but for what rounding makes of them.
    if merging and len(counts) and counts.item(at := lens.argmax()) + 1 >= most_splits(lens.item(at), merging):
        np.minimum(counts, np.maximum(1, np.sqrt(lens / (2 * merging))).astype(np.int64), out=counts)
    return np.minimum(counts, MAX_SPLITS, out=counts)


def most_splits(keys: int, merging: float) -> int:
    """The most splits of a sequence that are worth merging: one more would save less than twice what it costs.

    With ``s`` splits, a split of ``keys / s`` is read and ``s`` partials are merged, at ``merging`` keys each. One
    more saves ``keys / s²``, which is twice ``merging`` with ``sqrt(keys / (2 * merging))`` splits. The sum is
    least for 1.4 times as many, and so flat that fewer do as well.

    Args:
        keys: of the sequence.
        merging: what one more split to merge costs, in keys; 0 where that is nothing.
    """
    return min(MAX_SPLITS, max(1, math.isqrt(int(keys / (2 * merging))))) if merging else MAX_SPLITS


def balanced_counts(
    kv_lens: Lengths,
    *,
    tiles_per_split: int,
    ctas: int,
    min_keys: int,
    overhead: int,
    merging: float = 0.0,
    combine: int = 0,
    enough: int | None = None,
    together: int = 1,
    one_round: bool = False,
    whole_trips: bool = False,
) -> Int64Array:
    """The :func:`proportional_counts` under which the device's last CTA is expected to end first.

    One round of CTAs is best where it can be filled evenly: every further one costs another start and end.
    Among sequences of different lengths, the longest splits of a single round leave the other CTAs waiting,
    and shorter splits, handed out longest first, even that out. :class:`impls.makespan.Schedule` tells which
    it is; most batches are decided by what every schedule must take, an even share and the longest split.

    Sequences of about one length, none longer than the mean by over a quarter, are not split where a CTA for each
    takes four of five SMs and more, in one round: what is left is not worth a second one.

    Equally long sequences leave nothing to even out. In one round they need only as many splits as read at the
    memory's full speed, ``enough``: every further one is one more to merge. So do others, if so few splits are
    about equally long (:data:`EVEN`). Where ``enough`` is not known, or one round does not hold them, equally long
    sequences get as many splits as whole rounds of CTAs end first with (:func:`even_splits`).

    No sequence gets more splits than are worth merging (:func:`most_splits`). Among sequences of different lengths
    none is split where that ends no sooner than merging takes; but where one round of splits of ``min_keys`` holds
    everything, and a longer one needs a second trip to memory (``whole_trips``), none is longer.

    Where CTAs share an SM, a split that takes a round by itself does not have one for itself: with more CTAs than
    SMs, splits are planned for ``together`` rounds at least.

    Args:
        kv_lens: keys of each sequence.
        tiles_per_split: CTAs that one split launches: KV heads times head tiles.
        ctas: CTAs that the device runs at once.
        min_keys: no split is planned much shorter than this (it is rounded to the nearest count, or up, where
            :func:`even_splits` decides).
        overhead: what starting and ending a CTA costs, in keys.
        merging: what one more split to merge costs, in keys; 0 where that is nothing.
        combine: what it costs to merge at all, in keys.
        enough: CTAs that read at full speed by themselves, at most ``ctas``; None where that is not known.
        together: CTAs of the kernel that share an SM.
        one_round: whether it is asked, where that makes somewhat more CTAs than run at once, if fewer would not end
            sooner.
        whole_trips: whether a CTA has ``min_keys`` on their way at once, and waits again for more.

    Returns:
        ``[B]`` int64, each at least 1.
    """
    lens = as_array(kv_lens)
    total = int(lens.sum())
    longest = lens.item(at := lens.argmax()) if total else 0
    work = total * tiles_per_split
    whole = len(lens) * tiles_per_split
    if 5 * whole >= 4 * ctas and whole <= ctas and about_equal(len(lens), longest, total):
        return np.ones_like(lens)  # a CTA alone reads faster than its share of the memory's speed
    if longest * len(lens) == total:
        if enough is not None and 0 < whole <= ctas:
            splits = min(
                -(-enough // whole), ctas // whole, _nearest(longest, min_keys), most_splits(longest, merging)
            )
        else:
            splits = even_splits(
                longest,
                whole,
                ctas=ctas,
                min_keys=min_keys,
                overhead=overhead,
                merging=merging,
                whole_trips=whole_trips,
            )
        return np.full_like(lens, splits)
    negative = -lens  # minus the floor of minus a quotient is its ceiling
    if enough is not None and EVEN * lens.item(lens.argmin()) >= (chunk := _chunk(work, enough, min_keys)):
        counts = _rounded(lens, chunk, merging)
        keys = -(negative // counts)  # of the longest split of each sequence
        fits = int(counts.sum()) * tiles_per_split <= ctas
        if fits and keys.max() <= EVEN * chunk and EVEN * keys.min() >= chunk:
            return counts
    if whole_trips and work <= ctas * min_keys:
        counts = _capped(-(negative // min_keys), lens, merging)
        if int(counts.sum()) * tiles_per_split <= ctas:
            return counts

    def schedule(counts: Int64Array) -> Schedule:
        return Schedule(overhead - negative // counts, counts, copies=tiles_per_split, ctas=ctas)

    counts = _rounded(lens, _chunk(work, ctas, min_keys), merging)
    fewest = together if int(counts.sum()) * tiles_per_split > ctas else 1
    if fewest > 1:
        counts = _rounded(lens, _chunk(work, ctas * fewest, min_keys), merging)
    best, best_counts, splits = schedule(counts), counts, int(counts.sum())
    if one_round and ctas < splits * tiles_per_split <= SLIGHTLY * ctas:
        for places in LESS:
            counts = _rounded(lens, _chunk(work, int(places * ctas), min_keys), merging)
            if int(counts.sum()) * tiles_per_split <= ctas:
                fitting = schedule(counts)
                if fitting.ends_before(best, 1.0):
                    best, best_counts, splits = fitting, counts, int(counts.sum())
                break
    last = best
    for waves in WAVES:
        if waves <= fewest:
            continue
        chunk = _chunk(work, int(ctas * waves), min_keys)
        if 2 * longest < 3 * chunk:  # not even the longest sequence is split
            continue
        if not best.may_end_after(last.even_share / WORTHWHILE):
            break  # shorter chunks only add splits, and each of them a start and an end
        counts = _rounded(lens, chunk, merging)
        if (more := int(counts.sum())) == splits:
            continue
        splits = more
        last = schedule(counts)
        if last.ends_before(best, WORTHWHILE, later=merging * (counts.item(at) - best_counts.item(at))):
            best, best_counts = last, counts
    if combine and 1 < best_counts.item(at) <= FEW:
        unsplit = schedule(ones := np.ones_like(lens))
        if not best.ends_before(unsplit, 1.0, later=combine):
            return ones
    return best_counts


def exchangeable(
    lens: Int64Array, counts: Int64Array, *, most: int, saves: int, longest: int, places: int
) -> Int64Array:
    """Counts of at most ``most`` splits, where no split grows by as much as that saves.

    Args:
        lens: ``[B]`` keys of each sequence.
        counts: ``[B]`` splits of each.
        most: the most splits of a sequence that merge without a combine kernel.
        saves: what a combine kernel costs, in keys.
        longest: keys of the longest split that may merge without one.
        places: splits of which all CTAs are surely on the device at once, as they must be.
    """
    if places < len(counts) or not len(counts) or counts.item(counts.argmax()) <= most:
        return counts
    fewer = np.minimum(counts, most)
    keys = -(-lens // fewer)
    grows = keys + (-lens // counts)
    fits = int(fewer.sum()) <= places and int(keys.max()) <= longest
    return fewer if fits and int(grows.max()) < saves else counts


def even_splits(
    keys: int,
    whole: int,
    *,
    ctas: int,
    min_keys: int,
    overhead: int,
    merging: float = 0.0,
    whole_trips: bool = False,
) -> int:
    """Splits of equally long sequences with which the last of up to five rounds of CTAs ends first.

    ``n`` splits make ``ceil(n * whole / ctas)`` rounds of ``ceil(keys / n)`` keys and the overhead each. A further
    round must be worth its while. But for ``whole_trips``, splits of one or two tiles of ``min_keys`` are no more
    than make so many, for one of a key more than a tile takes as long as one of two, and two tiles are not split.

    Args:
        keys: of each sequence.
        whole: CTAs without splits.
        ctas: CTAs that the device runs at once.
        min_keys: as of :func:`balanced_counts`.
        overhead: what starting and ending a CTA costs, in keys.
        merging: as of :func:`balanced_counts`.
        whole_trips: as of :func:`balanced_counts`.
    """
    min_keys = max(1, min_keys)
    most = min(max(1, -(-keys // min_keys)), most_splits(keys, merging))
    best, least = 1, math.inf
    for waves in EVEN_WAVES:
        splits = min(max(1, waves * ctas // max(1, whole)), most)
        cost = -(-splits * whole // ctas) * (-(-keys // splits) + overhead)
        if cost < WORTHWHILE * least:
            best, least = splits, cost
    if whole_trips:
        return best
    if keys <= 2 * min_keys:
        return 1
    tiles = -(-keys // (best * min_keys))
    return -(-keys // (tiles * min_keys)) if tiles <= 2 else best


def plan_splits(
    kv_lens: Lengths,
    *,
    tiles_per_split: int,
    ctas: int,
    min_keys: int,
    overhead: int,
    merging: float = 0.0,
    combine: int = 0,
    exchanged: int = MAX_SPLITS,
    exchange_keys: int = 0,
    at_once: int = 0,
    enough: int | None = None,
    together: int = 1,
    one_round: bool = False,
    whole_trips: bool = False,
) -> SplitTable:
    """The table of :func:`balanced_counts`, from lengths in one call; arguments of the same names are the same.

    Args:
        exchanged: the most splits of a sequence that merge without a combine kernel (:func:`exchangeable`).
        exchange_keys: of the longest split that may do so.
        at_once: CTAs that may do so; 0 for none.
    """
    lens = as_array(kv_lens)
    counts = balanced_counts(
        lens,
        tiles_per_split=tiles_per_split,
        ctas=ctas,
        min_keys=min_keys,
        overhead=overhead,
        merging=merging,
        combine=combine,
        enough=enough,
        together=together,
        one_round=one_round,
        whole_trips=whole_trips,
    )
    counts = exchangeable(
        lens, counts, most=exchanged, saves=combine, longest=exchange_keys, places=at_once // tiles_per_split
    )
    return _table(lens, counts)


def make_table(kv_lens: Lengths, counts: npt.ArrayLike) -> SplitTable:
    """Cut every sequence into its number of splits; the sequence with the longest split comes first.

    Args:
        kv_lens: keys of each sequence.
        counts: ``[B]`` splits of each sequence, each between 1 and ``max(1, kv_lens[b])``.

    Raises:
        ValueError: if a count is out of range, naming the sequence.
    """
    lens = as_array(kv_lens)
    count = np.asarray(counts, dtype=np.int64)
    wrong = ((count < 1) | (count > np.maximum(lens, 1))).nonzero()[0]
    if len(wrong):
        b = int(wrong[0])
        raise ValueError(f"counts[{b}]: expected 1 <= splits <= {max(1, int(lens[b]))}, got {int(count[b])}")
    return _table(lens, count)


def _table(lens: Int64Array, counts: Int64Array) -> SplitTable:
    """The table for counts that are in range. It is made for every plan: each line counts, at about 0.5 µs."""
    row_end = np.add.accumulate(lens)
    first_row = row_end - lens
    merged = (counts > 1).nonzero()[0]
    if not len(merged):
        rows = np.empty((len(lens), 4), dtype=np.int32)
        rows[:, 0] = order = (-lens).argsort(kind="stable")
        rows[:, 1] = first_row.take(order)
        rows[:, 2] = lens.take(order)
        rows[:, 3] = DIRECT
        return SplitTable(rows, len(lens), 0, counts)

    last = np.add.accumulate(counts)
    splits = last.item(-1)
    sequence = np.arange(len(lens)).repeat(counts)
    split = np.arange(splits) - (last - counts).take(sequence)
    count = counts.take(sequence)
    start = np.empty(splits + 1, dtype=np.int64)  # of each split in packed K and V: where the one before it ends
    start[:-1] = lens.take(sequence) * split // count + first_row.take(sequence)
    start[-1] = row_end[-1]
    minus_longest = -lens // counts  # of each sequence: minus the keys of its longest split
    splits_merged = counts.take(merged)
    last_slot = np.add.accumulate(splits_merged)
    slots = last_slot.item(-1)

    unordered = np.empty((splits, 4), dtype=np.int32)
    unordered[:, 0] = sequence
    unordered[:, 1] = start[:-1]
    unordered[:, 2] = start[1:] - start[:-1]
    unordered[:, 3] = DIRECT
    unordered[count > 1, 3] = np.arange(slots)
    rows = np.empty((splits + len(merged), 4), dtype=np.int32)
    # Stable: the splits of a sequence, all with one key to sort by, stay together and in order.
    unordered.take(minus_longest.take(sequence).argsort(kind="stable"), axis=0, out=rows[:splits], mode="clip")
    merges = rows[splits:]
    merges[:, 0] = merged
    merges[:, 1] = last_slot - splits_merged
    merges[:, 2] = splits_merged
    merges[:, 3] = 0
    return SplitTable(rows, splits, slots, counts)


def check_offsets(elements: int, what: str) -> str | None:
    """The refusal for an element offset past int32, or None where it fits.

    Args:
        elements: the largest element offset that a kernel would form.
        what: the tensor, for the message.
    """
    if elements <= INT32_MAX:
        return None
    return f"{what}: expected element offsets <= {INT32_MAX} (int32), got {elements}"
