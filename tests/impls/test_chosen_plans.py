"""What our two rules make of a batch on an H200: the tile and the splits, weighed against each other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from impls import tilelang_splitkv, triton_splitkv, triton_tile
from impls.contract import PlanRefused, Scalar
from impls.problem import DecodeProblem
from impls.splitkv_plan import BUDGET, Splitting, rounds_splits, work_of
from impls.tilelang_splitkv import MACHINES
from impls.tilelang_tile import ring_share, ring_tiles
from impls.triton_rule import choose_plan, tiles_of
from impls.triton_tile import Machine, sm_90

OURS = ("tilelang", "triton")

ALONE = (674, 859, 8159, 418, 386, 508, 1578, 521, 436, 1137, 764, 1083, 515, 379, 798, 1391)
"""One of 8,159 keys cut in seven, the others whole: 176 CTAs of 64/8 heads."""

UNLIKE = (3210, 2732, 2949, 1754, 2580, 2367, 2742, 2492, 2508, 1632, 1809, 2681, 2202)


@pytest.fixture
def h200() -> Machine:
    """What the rules see of an H200."""
    return sm_90(132)


def batch(lens: tuple[int, ...], heads: tuple[int, int], head_dim: int) -> DecodeProblem:
    return DecodeProblem(kv_lens=lens, heads_q=heads[0], heads_kv=heads[1], head_dim=head_dim)


def planned(
    name: str, shape: DecodeProblem, machine: Machine, tuning: Mapping[str, Scalar] | None = None
) -> tuple[object, Splitting]:
    """The tile and the splits."""
    if name == "tilelang":
        choice = {**tilelang_splitkv.TUNING, **(tuning or {})}
        made = tilelang_splitkv.decide(MACHINES["sm_90a"], shape, choice, machine.sms)
        return made.tile, made.splitting
    choice = {**triton_splitkv.TUNING, **(tuning or {})}
    return choose_plan(shape, machine, choice, tiles_of(shape, machine, choice))


def by_kind(shape: DecodeProblem, machine: Machine, work: str) -> triton_tile.Tile:
    return triton_tile.choose_tile(shape, machine, triton_splitkv.TUNING, work=work)


@pytest.mark.parametrize(
    ("lens", "heads", "head_dim", "work", "instead"),
    [
        (ALONE, (64, 8), 128, "short", "long"),  # CTAs that stand alone
        ((600, 6000, 2000), (32, 8), 128, "short", "long"),
        ((90, 60), (32, 8), 128, "short", "short"),
        ((20_000,) * 12, (32, 8), 64, "steady", "rounds"),
        ((22_131, 1794, 1566, 1100, 900, 800, 700, 500), (32, 8), 64, "short", "rounds"),  # two rounds
        ((1500,) * 45, (32, 8), 64, "packed", "long"),  # 2.7 CTAs an SM
        ((1500,) * 30, (32, 8), 64, "packed", "packed"),
        ((1500,) * 52, (32, 8), 64, "packed", "packed"),
        ((1095,) * 45, (32, 8), 128, "packed", "spill"),
        ((1095,) * 30, (32, 8), 128, "packed", "packed"),
        ((4142,) * 5, (32, 32), 128, "spill", "spill"),
    ],
)
def test_triton_takes_another_tile_for_what_the_plan_shows(
    h200: Machine, lens: tuple[int, ...], heads: tuple[int, int], head_dim: int, work: str, instead: str
) -> None:
    shape = batch(lens, heads, head_dim)
    assert work_of(shape, 132) == work
    tile, _ = planned("triton", shape, h200)
    assert tile == by_kind(shape, h200, instead)
    tile, _ = planned("triton", shape, h200, {"num_splits": 2})
    assert tile == by_kind(shape, h200, work)  # who chooses the splits gets the tile of the kind


def test_two_rounds_where_an_exchange_would_share_sms(h200: Machine) -> None:
    shape = batch((22_131, 1794, 1566, 1100, 900, 800, 700, 500), (32, 8), 64)
    _, splitting = planned("triton", shape, h200)
    _, two = planned("triton", shape, h200, {"waves": 2})
    assert splitting.table.counts.tolist() == two.table.counts.tolist()
    assert splitting.ctas > 132


@pytest.mark.parametrize(
    ("lens", "heads", "head_dim", "tile"),
    [
        (ALONE, (64, 8), 128, (128, 2)),
        ((2290, 2071, 1944) + (870,) * 23, (64, 8), 64, (128, 4)),  # one outlasts the others, nothing is split
        ((350, 300, 250, 200, 300, 280, 280), (32, 32), 64, (64, 2)),
        (UNLIKE, (16, 16), 64, (64, 2)),
    ],
)
def test_tilelang_takes_the_long_tile_where_ctas_stand_alone(
    h200: Machine, lens: tuple[int, ...], heads: tuple[int, int], head_dim: int, tile: tuple[int, int]
) -> None:
    made, _ = planned("tilelang", batch(lens, heads, head_dim), h200)
    assert isinstance(made, tilelang_splitkv.Tile)
    assert (made.block_n, made.num_stages) == tile


@pytest.mark.parametrize(
    ("lens", "heads", "head_dim", "cluster"),
    [
        ((683, 550, 355, 330, 300), (32, 8), 128, 2),
        ((994, 800, 700, 900), (32, 8), 128, 2),
        ((3072, 2500, 2000, 1900, 1900), (40, 10), 128, 1),  # what is read takes longer than an exchange
        ((1964, 1054, 713), (16, 8), 128, 1),  # one outlasts the others
        ((4429,) * 4, (40, 10), 256, 1),
        ((512, 300, 290, 280, 270, 300, 300, 260, 250, 250, 300, 300), (28, 4), 256, 2),
    ],
)
def test_a_pair_in_a_cluster_where_that_ends_before_an_exchange(
    h200: Machine, lens: tuple[int, ...], heads: tuple[int, int], head_dim: int, cluster: int
) -> None:
    _, splitting = planned("tilelang", batch(lens, heads, head_dim), h200)
    assert splitting.cluster == cluster
    assert splitting.exchange == (cluster == 1)


@pytest.mark.parametrize(
    ("sequences", "splits"),
    [(25, 1), (20, 2), (19, 2), (49, 1), (84, 2)],  # 200, 160, 152, 392 and 672 CTAs on 132 SMs
)
def test_rounds_of_narrow_heads_are_whole_or_in_two(h200: Machine, sequences: int, splits: int) -> None:
    shape = batch((5000,) * sequences, (16, 8), 64)
    choice = triton_splitkv.TUNING
    assert rounds_splits(shape, choice, sms=132, tiles_per_split=8) == splits
    for name in OURS:
        _, splitting = planned(name, shape, h200)
        assert set(splitting.table.counts.tolist()) == {splits}
    for chosen in ({"waves": 1}, {"num_splits": 3}, {"block_n": 128}):
        assert rounds_splits(shape, {**choice, **chosen}, sms=132, tiles_per_split=8) is None
    wide = batch((5000,) * sequences, (16, 8), 128)
    assert rounds_splits(wide, choice, sms=132, tiles_per_split=8) is None


def random_batches(count: int) -> list[DecodeProblem]:
    rng = np.random.default_rng(7)
    shapes = [(32, 8), (8, 1), (16, 16), (64, 8), (28, 4), (40, 10)]
    made = []
    for _ in range(count):
        size, longest = int(rng.choice([1, 2, 4, 13, 30, 70])), int(rng.choice([90, 700, 4000, 60_000]))
        lens = rng.integers(1, longest, size)
        if rng.random() < 0.4:
            lens[:] = longest
        heads = shapes[int(rng.integers(len(shapes)))]
        made.append(batch(tuple(lens.tolist()), heads, int(rng.choice([64, 128, 256]))))
    return made


@pytest.mark.parametrize("name", OURS)
def test_a_plan_fits_a_budget_of_what_it_takes(name: str, h200: Machine) -> None:
    """No plan that is only weighed refuses it, or makes it another; and with a byte less it is no larger."""
    merged = 0
    for shape in random_batches(300):
        tile, splitting = planned(name, shape, h200)
        needed = splitting.workspace_bytes
        merged += needed > 0
        again = planned(name, shape, h200, {BUDGET: max(1, needed)})
        assert again[0] == tile
        assert again[1].table.counts.tolist() == splitting.table.counts.tolist()
        assert (again[1].cluster, again[1].exchange) == (splitting.cluster, splitting.exchange)
        if needed > 1:
            try:
                _, less = planned(name, shape, h200, {BUDGET: needed - 1})
            except PlanRefused:
                continue
            assert less.workspace_bytes < needed
    assert merged > 50


@pytest.mark.parametrize("name", OURS)
def test_who_asks_for_an_exchange_gets_it_with_the_tile_of_the_kind(name: str, h200: Machine) -> None:
    """The rule changes no plan into one that cannot do what was asked for."""
    exchanged = 0
    for shape in random_batches(300):
        tile, auto = planned(name, shape, h200, {"cluster": 1} if name == "tilelang" else None)
        if name == "tilelang":
            tiles = ring_tiles(MACHINES["sm_90a"], shape, tilelang_splitkv.TUNING)
            own: object = tiles[ring_share(shape, tilelang_splitkv.TUNING, tiles[2], 132)]
        else:
            own = by_kind(shape, h200, work_of(shape, 132))
        if auto.slots and not auto.exchange:  # too many splits, or CTAs
            continue
        if tile != own:  # the other tile is not looked at
            continue
        got, asked = planned(name, shape, h200, {"merge": "exchange"})
        assert got == own
        assert asked.exchange == (asked.slots > 0)
        exchanged += asked.exchange
    assert exchanged > 50
