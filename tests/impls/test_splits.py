"""Split counts and tables: every key once, bounded counts, longest split first. Properties, over any lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from impls.problem import INT32_MAX
from impls.splits import (
    DIRECT,
    EVEN,
    MAX_SPLITS,
    SLIGHTLY,
    WAVES,
    WORTHWHILE,
    Int64Array,
    SplitTable,
    balanced_counts,
    check_offsets,
    equal_counts,
    even_splits,
    exchangeable,
    make_table,
    most_splits,
    plan_splits,
    proportional_counts,
)
from tests.impls.lpt import makespan

LENS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 200_000)), max_size=40)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[int], list[int], SplitTable]:
    """Lengths, any counts that are allowed for them, and their table."""
    lens = draw(LENS)
    counts = [draw(st.integers(1, max(1, min(n, 300)))) for n in lens]
    return lens, counts, make_table(lens, np.array(counts, dtype=np.int32))


@given(tables())
def test_every_key_is_in_exactly_one_split(made: tuple[list[int], list[int], SplitTable]) -> None:
    lens, counts, table = made
    ends = np.cumsum([0, *lens])
    for b, count in enumerate(counts):
        rows = table.items[table.items[:, 0] == b]
        rows = rows[np.argsort(rows[:, 1], kind="stable")]
        assert len(rows) == count
        assert rows[0, 1] == ends[b]
        assert (rows[:-1, 1] + rows[:-1, 2] == rows[1:, 1]).all()
        assert rows[-1, 1] + rows[-1, 2] == ends[b + 1]


@given(tables())
def test_splits_of_a_sequence_differ_by_one_key_at_most(made: tuple[list[int], list[int], SplitTable]) -> None:
    lens, _, table = made
    for b, n in enumerate(lens):
        keys = table.items[table.items[:, 0] == b, 2]
        assert keys.max() - keys.min() <= 1
        assert keys.min() >= 1 or n == 0


@given(tables())
def test_the_longest_split_comes_first(made: tuple[list[int], list[int], SplitTable]) -> None:
    """To within the one key by which the splits of a sequence may differ."""
    table = made[2]
    keys = table.items[:, 2]
    assert (keys <= np.minimum.accumulate(keys) + 1).all()


@given(tables())
def test_a_sequences_splits_are_neighbours_in_key_order(made: tuple[list[int], list[int], SplitTable]) -> None:
    """And of the sequences the one with the longest split comes first, of equal ones the first of the batch."""
    lens, counts, table = made
    order = sorted(range(len(lens)), key=lambda b: lens[b] // -counts[b])
    assert table.items[:, 0].tolist() == [b for b in order for _ in range(counts[b])]
    same = table.items[1:, 0] == table.items[:-1, 0]
    assert (np.diff(table.items[:, 1])[same] > 0).all()


@given(tables())
def test_slots_are_consecutive_in_key_order_and_singles_have_none(
    made: tuple[list[int], list[int], SplitTable],
) -> None:
    _, counts, table = made
    used: list[int] = []
    for b, first, splits, zero in table.merges.tolist():
        rows = table.items[table.items[:, 0] == b]
        slots = rows[np.argsort(rows[:, 1]), 3].tolist()
        assert slots == list(range(first, first + splits))
        assert (splits, zero) == (counts[b], 0)
        used += slots
    assert used == list(range(table.slots))
    merged = set(table.merges[:, 0].tolist())
    assert merged == {b for b, count in enumerate(counts) if count > 1}
    single = [row for row in table.items.tolist() if row[0] not in merged]
    assert all(row[3] == DIRECT for row in single)
    assert table.splits_max == max(counts, default=0)


@pytest.mark.parametrize(
    ("lens", "num_splits", "edges"),
    [
        (1001, 8, [0, 125, 250, 375, 500, 625, 750, 875, 1001]),
        (127, 4, [0, 31, 63, 95, 127]),
        (5, 3, [0, 1, 3, 5]),
    ],
)
def test_ranges_are_cut_in_proportion(lens: int, num_splits: int, edges: list[int]) -> None:
    table = make_table([lens], equal_counts([lens], num_splits))
    starts = sorted(table.items[:, 1].tolist())
    assert [*starts, lens] == edges


def test_a_row_is_sixteen_bytes() -> None:
    table = make_table([5, 0], equal_counts([5, 0], 2))
    assert table.items.strides == (16, 4)
    assert table.merges.strides == (16, 4)
    assert table.items.tolist() == [[0, 0, 2, 0], [0, 2, 3, 1], [1, 5, 0, DIRECT]]
    assert table.merges.tolist() == [[0, 0, 2, 0]]


def test_the_workspace_holds_only_the_partials_that_exist() -> None:
    table = make_table([5, 9, 0], equal_counts([5, 9, 0], 3))
    assert table.slots == 6
    assert table.workspace_bytes(heads_q=8, head_dim=64) == 6 * 8 * (64 + 1) * 4
    assert make_table([5, 9], equal_counts([5, 9], 1)).workspace_bytes(8, 64) == 0


def test_the_table_of_none() -> None:
    table = make_table([], equal_counts([], 4))
    assert (table.items.shape, table.merges.shape) == ((0, 4), (0, 4))
    assert (table.slots, table.splits_max) == (0, 0)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, 0], r"counts\[1\]: expected 1 <= splits <= 3, got 0"),
        ([6, 1], r"counts\[0\]: expected 1 <= splits <= 5, got 6"),
    ],
)
def test_counts_out_of_range_are_named(counts: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_table([5, 3], np.array(counts, dtype=np.int32))


def test_lengths_of_any_integer_dtype_are_counted_in_64_bits() -> None:
    lens = [2**31 - 1 - 5, 5]
    shape = {"tiles_per_split": 8, "ctas": 132, "min_keys": 128, "overhead": 266}
    assert (
        plan_splits(np.array(lens, dtype=np.int32), **shape).rows.tolist()
        == plan_splits(lens, **shape).rows.tolist()
    )


def test_equal_counts_stop_at_the_keys() -> None:
    assert equal_counts([0, 1, 5, 100], 8).tolist() == [1, 1, 5, 8]


@pytest.mark.parametrize("num_splits", [0, -1, 2.0, True, "auto"])
def test_equal_counts_name_a_bad_request(num_splits: object) -> None:
    with pytest.raises(ValueError, match="num_splits: expected an integer >= 1 or 'auto'"):
        equal_counts([5], num_splits)  # type: ignore[arg-type]


SHAPES = {"tiles_per_split": st.integers(1, 64), "slots": st.integers(1, 1000), "min_keys": st.integers(1, 256)}


@given(LENS, st.fixed_dictionaries(SHAPES))
def test_proportional_counts_are_bounded_and_monotone(lens: list[int], shape: dict[str, int]) -> None:
    counts = proportional_counts(lens, **shape)
    assert ((counts >= 1) & (counts <= MAX_SPLITS)).all()
    assert (np.diff(counts[np.argsort(lens, kind="stable")]) >= 0).all()
    # Always a legal table: no split is empty but that of an empty sequence.
    table = make_table(lens, counts)
    assert len(table.items) == counts.sum()


@given(LENS, st.fixed_dictionaries(SHAPES))
def test_proportional_counts_fill_about_one_wave(lens: list[int], shape: dict[str, int]) -> None:
    """Rounding adds at most half a split to each sequence that is split, and every sequence has one."""
    counts = proportional_counts(lens, **shape)
    work = int(counts.sum()) * shape["tiles_per_split"]
    assert work <= shape["slots"] + 1.5 * len(lens) * shape["tiles_per_split"]


def test_proportional_counts_on_the_known_shapes() -> None:
    h200 = {"tiles_per_split": 8, "slots": 132, "min_keys": 64}
    assert proportional_counts([8192], **h200).tolist() == [16]
    assert proportional_counts([131072], **h200).tolist() == [16]
    assert proportional_counts([8192] * 16, **h200).tolist() == [1] * 16
    skewed = proportional_counts([131072] + [1024] * 31, **h200)
    assert skewed.tolist() == [13] + [1] * 31


@pytest.mark.parametrize(("elements", "refused"), [(INT32_MAX, False), (INT32_MAX + 1, True)])
def test_offsets_are_refused_with_the_number(elements: int, refused: bool) -> None:
    reason = check_offsets(elements, "k")
    assert (reason is not None) == refused
    assert reason is None or reason == f"k: expected element offsets <= {INT32_MAX} (int32), got {elements}"


DEVICES = {
    "tiles_per_split": st.sampled_from([1, 2, 4, 5, 8, 32]),
    "ctas": st.integers(1, 300),
    "min_keys": st.integers(1, 200),
    "overhead": st.sampled_from([0, 136, 266]),
    "merging": st.sampled_from([0.0, 0.5, 2.0, 100.0]),
    "combine": st.sampled_from([0, 100, 10_000]),
    "enough": st.sampled_from([None, 1, 64]),
    "together": st.sampled_from([1, 2]),
    "one_round": st.booleans(),
    "whole_trips": st.booleans(),
}
EXCHANGES = {
    "exchanged": st.integers(1, 16),
    "exchange_keys": st.sampled_from([0, 500, 10**6]),
    "at_once": st.integers(0, 600),
}


@given(LENS, st.fixed_dictionaries(DEVICES))
def test_balanced_counts_are_bounded_and_monotone(lens: list[int], shape: dict[str, Any]) -> None:
    counts = balanced_counts(lens, **shape)
    assert counts.shape == (len(lens),)
    assert ((counts >= 1) & (counts <= np.clip(lens, 1, MAX_SPLITS))).all()
    assert (np.diff(counts[np.argsort(lens, kind="stable")]) >= 0).all()


@given(LENS, st.fixed_dictionaries(DEVICES))
def test_a_planned_table_is_that_of_its_counts(lens: list[int], shape: dict[str, Any]) -> None:
    """The checked way and the short way to the table are one; the properties of tables above hold for it."""
    planned = plan_splits(lens, **shape)
    checked = make_table(lens, balanced_counts(lens, **shape))
    assert planned.rows.tolist() == checked.rows.tolist()
    assert planned.counts.tolist() == checked.counts.tolist()
    assert (planned.splits, planned.slots) == (checked.splits, checked.slots)


@given(LENS, st.fixed_dictionaries(DEVICES), st.randoms(use_true_random=False))
def test_the_order_of_the_batch_is_of_no_account(lens: list[int], shape: dict[str, Any], random: Random) -> None:
    order = list(range(len(lens)))
    random.shuffle(order)
    counts = balanced_counts(lens, **shape)
    assert balanced_counts([lens[b] for b in order], **shape).tolist() == counts[order].tolist()


@given(st.integers(1, 400), st.integers(0, 100_000))
def test_equal_lengths_get_as_many_splits_as_whole_rounds_end_first_with(batch: int, keys: int) -> None:
    """Of all counts of up to five rounds none ends by over 2 % sooner, and none as soon with fewer splits; but
    splits of one or two tiles are as few as make so many."""
    shape = {"ctas": 132, "min_keys": 128, "overhead": 266}
    splits = even_splits(keys, batch * 8, **shape)
    counts = set(balanced_counts([keys] * batch, tiles_per_split=8, **shape).tolist())
    assert counts == {1 if 0.8 * 132 <= batch * 8 <= 132 else splits}

    def end(n: int) -> int:
        return -(-n * batch * 8 // 132) * (-(-keys // n) + 266)

    most = max(1, -(-keys // 128))
    rounds = [n for n in range(1, most + 1) if n == 1 or n * batch * 8 <= 5 * 132]
    assert splits in rounds
    tiles = -(-keys // (splits * 128))
    if tiles > 2:
        assert WORTHWHILE * end(splits) <= min(end(n) for n in rounds)
        assert all(end(n) > end(splits) for n in range(1, splits))
    else:
        assert splits == 1 or -(-keys // ((splits - 1) * 128)) > tiles
        assert any(
            WORTHWHILE * end(n) <= min(end(n) for n in rounds) and -(-keys // (n * 128)) <= 2 for n in rounds
        )


def test_equal_lengths_get_no_more_splits_than_there_may_be() -> None:
    assert even_splits(10**6, 1, ctas=10**5, min_keys=1, overhead=0) == MAX_SPLITS
    assert even_splits(0, 0, ctas=132, min_keys=128, overhead=266) == 1


@given(st.integers(1, 140), st.integers(1, 100_000), st.integers(1, 132))
def test_equal_lengths_get_no_more_splits_than_read_at_full_speed(batch: int, keys: int, enough: int) -> None:
    """As few as do, of those that make one round and are not too short; rounds are counted where one is too few."""
    shape = {"tiles_per_split": 1, "ctas": 132, "min_keys": 128, "overhead": 266}
    (splits,) = set(balanced_counts([keys] * batch, **shape, enough=enough).tolist())
    if batch > 132:
        assert splits == even_splits(keys, batch, ctas=132, min_keys=128, overhead=266)
        return
    assert splits == 1 or (splits - 1) * batch < enough
    assert splits * batch <= 132
    if 5 * batch >= 4 * 132:  # one round of whole sequences is all but full
        assert splits == 1
    more = splits + 1
    assert splits * batch >= enough or more * batch > 132 or more > min(MAX_SPLITS, (keys + 64) / 128)


def test_a_few_ctas_over_one_round_are_cut_into_rounds_that_are_full() -> None:
    """136 CTAs are one round and one for four; 544 are four and one."""
    shape = {"tiles_per_split": 8, "ctas": 132, "min_keys": 256, "overhead": 266}
    assert set(balanced_counts([10_692] * 17, **shape, enough=62).tolist()) == {4}


@given(LENS, st.integers(1, 3))
def test_ctas_that_share_an_sm_are_cut_for_as_many_rounds(lens: list[int], together: int) -> None:
    shape = {"tiles_per_split": 8, "min_keys": 128}
    alone = balanced_counts(lens, ctas=132, overhead=266, **shape)
    shared = balanced_counts(lens, ctas=132, overhead=266, together=together, **shape)
    one_round = proportional_counts(lens, slots=132, **shape)
    if len(set(lens)) == 1 or 8 * one_round.sum() <= 132:
        assert shared.tolist() == alone.tolist()
    else:
        assert (shared >= proportional_counts(lens, slots=132 * together, **shape)).all()


@given(LENS, st.integers(1, 132))
def test_others_get_what_is_enough_where_it_cuts_them_evenly(lens: list[int], enough: int) -> None:
    shape = {"tiles_per_split": 8, "ctas": 132, "min_keys": 128, "overhead": 266}
    counts = balanced_counts(lens, **shape, enough=enough)
    if len(set(lens)) > 1 and counts.tolist() != balanced_counts(lens, **shape).tolist():
        fewest = proportional_counts(lens, tiles_per_split=8, slots=enough, min_keys=128)
        assert counts.tolist() == fewest.tolist()
        assert 8 * counts.sum() <= 132
        keys = -(-np.array(lens) // counts)
        assert keys.max() <= EVEN**2 * keys.min()


def test_two_long_sequences_need_no_more_ctas_than_read_at_full_speed() -> None:
    counts = balanced_counts([43370, 30014], tiles_per_split=1, ctas=132, min_keys=256, overhead=266, enough=62)
    assert counts.tolist() == [37, 25]


@given(LENS, st.sampled_from([0.5, 2.0, 8.0]))
def test_no_sequence_has_more_splits_than_are_worth_merging(lens: list[int], merging: float) -> None:
    """The last split of each, if it has several, shortens the others by at least about twice what it costs."""
    shape = {"tiles_per_split": 1, "ctas": 132, "min_keys": 1, "overhead": 266}
    counts = balanced_counts(lens, **shape, merging=merging)
    most = np.array([most_splits(keys, merging) for keys in lens], dtype=np.int64)
    assert (counts <= most).all()
    keys = np.array(lens)[most > 1]
    splits = most[most > 1]
    assert (keys / splits**2 >= 2 * merging).all()
    assert (keys / (splits + 1) ** 2 < 2 * merging)[splits < MAX_SPLITS].all()


@given(st.lists(st.integers(1, 700), min_size=2, max_size=40))
def test_short_work_has_no_split_longer_than_one_trip_to_memory(lens: list[int]) -> None:
    """Where one round holds that, and does not hold whole sequences of about one length. Without trips, counts of
    unlike sequences are rounded to the nearest."""
    shape = {"tiles_per_split": 1, "ctas": 132, "min_keys": 256, "overhead": 266, "combine": 100}
    counts = balanced_counts(lens, **shape, whole_trips=True)
    if len(set(lens)) > 1 and sum(lens) <= 132 * 256:  # 40 sequences are no round
        assert counts.tolist() == [-(-keys // 256) for keys in lens]
    assert balanced_counts([257, 300], **shape, whole_trips=True).tolist() == [2, 2]
    assert balanced_counts([257, 300], **shape).tolist() == [1, 1]
    assert even_splits(257, 8, ctas=132, min_keys=256, overhead=266, whole_trips=True) == 2
    assert even_splits(257, 8, ctas=132, min_keys=256, overhead=266) == 1  # two tiles
    assert even_splits(158, 16, ctas=132, min_keys=64, overhead=266) == 3
    assert even_splits(385, 16, ctas=132, min_keys=64, overhead=266) == 7
    assert (
        even_splits(420, 20, ctas=132, min_keys=64, overhead=266) == 4
    )  # 6 splits of 70 keys are two tiles each too


@given(LENS, st.integers(0, 500))
def test_what_whole_sequences_do_as_soon_is_not_split(lens: list[int], combine: int) -> None:
    shape = {"tiles_per_split": 8, "ctas": 132, "min_keys": 128, "overhead": 266}
    without = balanced_counts(lens, **shape)
    counts = balanced_counts(lens, **shape, combine=combine)
    ones = np.ones_like(counts)
    if counts.tolist() != without.tolist():
        assert counts.tolist() == ones.tolist()
        assert end(lens, ones) <= 1.05 * (end(lens, without) + combine)


def test_a_sequence_is_not_halved_for_what_merging_takes_longer() -> None:
    """Of three sequences with 32 heads, halving the longest shortens the last CTA from 1,734 to 1,500 keys."""
    lens, shape = [1734, 1500, 1434], {"tiles_per_split": 32, "ctas": 132, "min_keys": 256, "overhead": 532}
    assert balanced_counts(lens, **shape).tolist() == [2, 1, 1]
    assert balanced_counts(lens, **shape, combine=100).tolist() == [2, 1, 1]
    assert balanced_counts(lens, **shape, combine=234).tolist() == [1, 1, 1]


def test_more_splits_must_end_sooner_by_what_merging_them_costs() -> None:
    lens, shape = [30784, 17280, 16832, 15680, 8896] + [1500] * 59, {"tiles_per_split": 8, "ctas": 132}
    shape |= {"min_keys": 128, "overhead": 266}
    finer = balanced_counts(lens, **shape)
    assert finer.max() > proportional_counts(lens, tiles_per_split=8, slots=132, min_keys=128).max()
    free = balanced_counts(lens, **shape, merging=0.01)
    dear = balanced_counts(lens, **shape, merging=2000.0)
    assert free.tolist() == finer.tolist()
    assert dear.max() < finer.max()


def test_a_few_ctas_more_than_one_round_are_made_to_fit_it() -> None:
    """133 CTAs: one would wait for the others, and then read alone."""
    lens = [2326, 2254, 2203, 2101, 1999, 1876, 1760, 1699, 1530, 1422, 1300, 1180, 1099, 960, 1230]
    shape = {"tiles_per_split": 1, "ctas": 132, "min_keys": 128, "overhead": 266}
    assert 132 < proportional_counts(lens, tiles_per_split=1, slots=132, min_keys=128).sum() <= SLIGHTLY * 132
    assert balanced_counts(lens, **shape, one_round=True).sum() <= 132
    assert balanced_counts(lens, **shape).sum() > 132


@given(LENS, st.fixed_dictionaries({**DEVICES, **EXCHANGES}))
def test_planned_counts_are_bounded_and_monotone(lens: list[int], shape: dict[str, Any]) -> None:
    counts = plan_splits(lens, **shape).counts
    assert ((counts >= 1) & (counts <= np.clip(lens, 1, MAX_SPLITS))).all()
    assert (np.diff(counts[np.argsort(lens, kind="stable")]) >= 0).all()


@given(LENS, st.integers(1, 16), st.integers(0, 300), st.integers(0, 200), st.integers(1, 200_000))
def test_somewhat_too_many_splits_are_as_many_as_merge_by_themselves(
    lens: list[int], most: int, saves: int, places: int, longest: int
) -> None:
    keys = np.array(lens, dtype=np.int64)
    counts = proportional_counts(lens, tiles_per_split=1, slots=132, min_keys=16)
    fewer = exchangeable(keys, counts, most=most, saves=saves, longest=longest, places=places)
    if fewer.tolist() == counts.tolist():
        return
    assert fewer.tolist() == np.minimum(counts, most).tolist()
    assert fewer.sum() <= places
    assert (-(-keys // fewer)).max() <= longest
    assert (-(-keys // fewer) + -keys // counts).max() < saves


def test_twenty_splits_become_sixteen_where_that_saves_a_kernel() -> None:
    keys, counts = np.array([3333, 300]), np.array([20, 2])
    shape = {"most": 16, "saves": 200, "longest": 1000, "places": 132}
    assert exchangeable(keys, counts, **shape).tolist() == [16, 2]
    for other in ({"saves": 42}, {"places": 17}, {"places": 0}, {"longest": 208}):
        assert exchangeable(keys, counts, **{**shape, **other}).tolist() == [20, 2]
    assert exchangeable(keys[:0], counts[:0], **shape).tolist() == []
    h200 = {"tiles_per_split": 1, "ctas": 132, "min_keys": 64, "overhead": 532, "merging": 4.0, "combine": 200}
    lens = [3333, 2405, 1514, 1510]
    assert plan_splits(lens, **h200).counts.max() == 20
    assert plan_splits(lens, **h200, exchanged=16, exchange_keys=8192, at_once=132).counts.tolist() == [
        16,
        16,
        13,
        13,
    ]


def test_a_long_tail_is_cut_finer_than_one_round_would() -> None:
    """One round leaves half of the longest sequence as the last to end."""
    lens = [30784, 17280, 16832, 15680, 8896] + [1500] * 59
    one_round = proportional_counts(lens, tiles_per_split=8, slots=132, min_keys=128)
    balanced = balanced_counts(lens, tiles_per_split=8, ctas=132, min_keys=128, overhead=266)
    assert balanced.max() > one_round.max()
    assert end(lens, balanced) < 0.9 * end(lens, one_round)


def end(lens: list[int], counts: Int64Array, *, tiles: int = 8) -> int:
    """When an H200's last CTA ends, simulated exactly."""
    keys = -(-np.array(lens) // counts) + 266
    return makespan(np.sort(keys.repeat(counts))[::-1].tolist(), copies=tiles, ctas=132)


def batches() -> Iterator[list[int]]:
    """Batches of 3 to 256 sequences: of similar lengths, of any, with a long tail, with a few long ones."""
    random = Random(0)
    for i in range(80):
        size, longest = random.choice([3, 8, 16, 48, 96, 256]), random.choice([700, 5000, 30_000, 131_072])
        draw: Callable[[], float] = (
            lambda: random.uniform(0.7, 1),
            lambda: random.uniform(0, 1),
            lambda: 1 / (1 + 60 * random.random() ** 0.5),
            lambda: 1 if random.random() < 0.1 else random.uniform(0.02, 0.03),
        )[i % 4]
        yield [1 + int(longest * draw()) for _ in range(size)]


@pytest.mark.parametrize("tiles", [1, 8])
def test_the_choice_is_about_as_good_as_if_every_candidate_were_simulated(tiles: int) -> None:
    """Against the same rule on exact ends: a candidate replaces the best where it ends WORTHWHILE earlier."""
    ratios = []
    for lens in batches():
        if 4 * max(lens) * len(lens) <= 5 * sum(lens) and 0.8 * 132 <= len(lens) * tiles <= 132:
            continue  # read whole, whatever that says
        best = None
        for waves in WAVES if min(lens) < max(lens) else WAVES[:1]:
            counts = proportional_counts(lens, tiles_per_split=tiles, slots=int(132 * waves), min_keys=128)
            if best is None or end(lens, counts, tiles=tiles) < WORTHWHILE * end(lens, best, tiles=tiles):
                best = counts
        assert best is not None
        chosen = balanced_counts(lens, tiles_per_split=tiles, ctas=132, min_keys=128, overhead=266)
        ratios.append(end(lens, chosen, tiles=tiles) / end(lens, best, tiles=tiles))
    assert max(ratios) < 1.05
    assert np.mean(ratios) < 1.002
