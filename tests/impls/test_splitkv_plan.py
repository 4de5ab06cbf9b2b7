"""What our two plans share: one upload that nobody waits for, and tables and tiles that are chosen once."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.check import check_plan
from harness.inputs import make_inputs
from impls import triton_rule
from impls.contract import DecodeImpl, Scalar
from impls.problem import DecodeProblem
from impls.reference import reference
from impls.splitkv_plan import SPLIT_TUNING, WORK, split_limits, stays_whole, upload
from impls.tilelang_splitkv import TileLangSplitKV
from impls.triton_splitkv import TritonSplitKV
from tests.impls.cases import problem

OURS = [TileLangSplitKV, TritonSplitKV]
ROWS = np.arange(12, dtype=np.int32).reshape(3, 4)


def test_on_a_cpu_nothing_is_copied() -> None:
    rows = ROWS.copy()
    assert upload(rows, torch.device("cpu")).data_ptr() == rows.ctypes.data


def test_only_pinned_memory_is_copied_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = torch.from_numpy(ROWS.copy())
    asked: list[tuple[Tensor, Any, dict[str, Any]]] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned)
    monkeypatch.setattr(Tensor, "to", lambda self, device, **options: asked.append((self, device, options)))
    upload(ROWS, torch.device("cuda"))
    [(source, device, options)] = asked
    assert source is pinned
    assert (device, options) == (torch.device("cuda"), {"non_blocking": True})


@pytest.mark.parametrize("impl", OURS)
def test_items_and_merges_are_rows_of_one_upload(impl: type[DecodeImpl], device: torch.device) -> None:
    plan = impl().plan(problem(700, 0, 33), device, {"num_splits": 3, "merge": "combine"})
    items, merges = plan._items, plan._merges  # type: ignore[attr-defined]
    assert items.untyped_storage().data_ptr() == merges.untyped_storage().data_ptr()
    assert (items.stride(), merges.stride()) == ((4, 1), (4, 1))
    assert items.data_ptr() % 16 == merges.data_ptr() % 16 == 0
    assert sorted(items[:, 0].tolist()) == [0, 0, 0, 1, 2, 2, 2]
    assert merges.tolist() == [[0, 0, 3, 0], [2, 3, 3, 0]]
    assert plan.split_counts == (3, 1, 3)  # type: ignore[attr-defined]


def test_triton_chooses_its_tiles_once_for_all_lengths(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    chosen: list[str] = []
    choose = triton_rule.choose_tile

    def counted(*args: Any, work: str) -> triton_rule.Tile:
        chosen.append(work)
        return choose(*args, work=work)

    monkeypatch.setattr(triton_rule, "choose_tile", counted)
    impl = TritonSplitKV()
    for lens in ((5, 70), (900,), (3, 3, 3)):
        impl.plan(problem(*lens), device)
    assert chosen == list(WORK)
    plan = impl.plan(problem(5, 70), device, {"block_n": 16})
    assert chosen == list(WORK) * 2
    assert plan.config["block_n"] == 16


@pytest.mark.gpu
@pytest.mark.parametrize("impl", OURS)
def test_a_plan_for_other_lengths_waits_for_nothing(impl: type[DecodeImpl], device: torch.device) -> None:
    """Made while the GPU is busy, and again before the first one's upload is done: each has its own rows."""
    library = impl()
    shapes = [problem(700, 1, 33, heads=(8, 2)), problem(9, 2000, 5, heads=(8, 2))]
    inputs = [make_inputs(shape, 5, device) for shape in shapes]
    library.plan(shapes[0], device).run(inputs[0], None)  # compiles
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        plans = [library.plan(shape, device) for shape in shapes]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for plan, given in zip(plans, inputs, strict=True):
        result = check_plan(plan, given, reference(given))
        assert result.ok, result.reason


def test_what_reads_at_full_speed_is_bytes_in_flight_and_not_ctas() -> None:
    def limits(head_dim: int, block_n: int, *, sms: int = 132) -> tuple[int, int | None]:
        shape = DecodeProblem(kv_lens=(8192,), heads_q=8, heads_kv=8, head_dim=head_dim)
        return split_limits(sms, shape, block_n=block_n, num_stages=2, tma=True)[:2]

    assert limits(128, 128) == (256, 62)  # 128 KiB each
    assert limits(128, 64) == (128, 124)
    assert limits(64, 128) == (256, 124)
    assert limits(128, 16) == (32, 132)  # one an SM at most
    assert limits(128, 128, sms=1) == (256, 1)
    assert limits(256, 64) == (128, None)  # more to compute for each byte


@pytest.mark.parametrize(
    ("lens", "head_dim", "tma", "together", "one_round"),
    [
        ((20_000,) * 15 + (90_000,) * 2, 128, True, 1, False),
        ((20_000,) * 15 + (90_000,) * 2, 256, True, 1, True),  # a CTA has an SM to itself
        ((20_000,) * 15 + (90_000,) * 2, 256, False, 1, True),
        ((20_000,) * 15 + (90_000,) * 2, 128, False, 1, False),
        ((20_000,) * 15 + (90_000,) * 2, 64, False, 2, False),  # two CTAs share an SM
        ((600, 6000, 2000), 64, False, 1, False),  # short
        ((100,) * 30 + (1000,), 64, False, 2, True),  # tiny, but more CTAs than SMs
        ((300, 700), 64, False, 1, True),  # tiny
        ((20_000,) * 3 + (20_400,) * 3, 128, False, 1, True),  # about equally long
    ],
)
def test_which_ctas_share_an_sm_and_which_are_made_to_fit_one_round(
    lens: tuple[int, ...], head_dim: int, tma: bool, together: int, one_round: bool
) -> None:
    shape = DecodeProblem(kv_lens=lens, heads_q=32, heads_kv=8, head_dim=head_dim)
    limits = split_limits(132, shape, block_n=64, num_stages=3, tma=tma)
    assert (limits.together, limits.one_round) == (together, one_round)


@pytest.mark.parametrize(
    ("lens", "at_once", "chosen", "whole"),
    [
        ((1900,) * 37, 132, {}, True),  # 296 CTAs, 75 % of three rounds
        ((1900,) * 18, 132, {}, False),  # 144: a second round would be nearly empty
        ((1900,) * 18, 264, {}, True),  # all on the device at once
        ((1900,) * 18, 0, {}, False),
        ((1900,) * 16, 264, {}, False),  # even: fewer CTAs than SMs
        ((9000,) * 18, 264, {}, False),  # not packed
        ((1900,) * 37, 132, {"num_splits": 2}, False),
        ((1900,) * 37, 132, {"waves": 2}, False),
        ((1900,) * 37, 132, {"cluster": 2}, False),
    ],
)
def test_packed_work_stays_whole_where_it_fits_or_fills_its_rounds(
    lens: tuple[int, ...], at_once: int, chosen: dict[str, Scalar], whole: bool
) -> None:
    shape = DecodeProblem(kv_lens=lens, heads_q=32, heads_kv=8, head_dim=128)
    choice = {**SPLIT_TUNING, **chosen}
    assert stays_whole(shape, choice, sms=132, tiles_per_split=8, at_once=at_once) is whole
