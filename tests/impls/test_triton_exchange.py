"""Splits that merge by exchange in Triton: the merge of a complete mail, what compiles, and that it is right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.check import check_plan, poison_workspaces, same_bits
from harness.inputs import make_inputs
from impls import triton_splitkv
from impls.contract import DecodeOutput
from impls.exchange import mail_shape
from impls.problem import DecodeProblem
from impls.reference import reference
from impls.triton_exchange import merge, pairs_at_a_time, send
from impls.triton_splitkv import TritonPlan, TritonSplitKV
from impls.triton_tile import block_d
from tests.impls.cases import problem
from tests.impls.running import right_and_equal_in_bits

triton, tl = triton_splitkv.triton, triton_splitkv.tl

WARPS = 4


@triton.jit(do_not_specialize=["heads", "round"])
def send_kernel(
    mail_ptr, acc_ptr, top_ptr, total_ptr, heads, round, D: tl.constexpr, H: tl.constexpr, BD: tl.constexpr
):
    """Programs are slots; ``acc`` is [slots, heads, D], ``top`` and ``total`` [slots, heads]."""
    h = tl.arange(0, H)
    d = tl.arange(0, BD)
    real = h < heads
    rows = tl.program_id(0).to(tl.int64) * heads + h
    acc = tl.load(acc_ptr + rows[:, None] * D + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    top = tl.load(top_ptr + rows, mask=real, other=0.0)
    total = tl.load(total_ptr + rows, mask=real, other=0.0)
    send(mail_ptr, rows, real, acc, top, total, round, D, H, BD)


@triton.jit(do_not_specialize=["heads", "splits", "round"])
def merge_kernel(
    mail_ptr, out_ptr, lse_ptr, heads, splits, round, D: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr
):
    """Programs are splits of sequences, each of one head tile."""
    rank = tl.program_id(0) % splits
    sequence = (tl.program_id(0) // splits).to(tl.int64)
    mail_row = sequence * splits * heads
    out_row = sequence * heads
    merge(mail_ptr, out_ptr, lse_ptr, mail_row, out_row, heads, heads, rank, splits, round, D, PAIRS, WARPS)


def partials(sequences: int, splits: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, not normalised, maxima (base 2) and sums, of splits some of which have no keys."""
    draw = torch.Generator().manual_seed(splits + heads)
    acc = torch.randn((sequences, splits, heads, head_dim), generator=draw)
    top = 20 * torch.randn((sequences, splits, heads), generator=draw)
    total = 1 + 9 * torch.rand((sequences, splits, heads), generator=draw)
    empty = torch.rand((sequences, splits, heads), generator=draw) < 0.2
    empty[-1, :, 0] = True  # no split of this head has keys
    return acc.masked_fill(empty[..., None], 0), top.masked_fill(empty, -torch.inf), total.masked_fill(empty, 0)


def exchanged(
    acc: Tensor, top: Tensor, total: Tensor, dtype: torch.dtype, device: torch.device, *, late: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output and LSE by way of the mail, in round 7; the slot ``late`` is still of the round before."""
    sequences, splits, heads, head_dim = acc.shape
    mail = torch.zeros(mail_shape(sequences * splits, heads, head_dim), device=device)
    words = mail.view(torch.int64)
    parts = [x.to(device) for x in (acc, top, total)]
    block_h = triton.next_power_of_2(max(16, heads))
    send_kernel[(sequences * splits,)](words, *parts, heads, 7, head_dim, block_h, block_d(head_dim))
    if late is not None:
        mail.view(torch.int32)[late, ..., 1] = 6
    out = torch.full((sequences, heads, head_dim), torch.nan, dtype=dtype, device=device)
    lse = torch.full((sequences, heads), torch.nan, device=device)
    pairs = pairs_at_a_time(heads, block_h, head_dim, WARPS)
    with np.errstate(invalid="ignore"):
        merge_kernel[(sequences * splits,)](
            words, out, lse, heads, splits, 7, head_dim, pairs, WARPS, num_warps=WARPS
        )
    return out.cpu(), lse.cpu()


def expected(acc: Tensor, top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """The same in float64."""
    weight = torch.exp2(top.double() - top.double().amax(1, keepdim=True)).nan_to_num(0.0)
    sums = (total * weight).sum(1)
    out = (acc * weight[..., None]).sum(1) / torch.where(sums == 0, 1, sums)[..., None]
    return out, (top.double().amax(1) + torch.log2(torch.where(sums == 0, 1, sums))) * np.log(2)


@pytest.mark.parametrize(
    ("splits", "heads", "head_dim"),
    [
        (2, 4, 128),
        (3, 7, 64),
        (4, 16, 96),
        (5, 1, 80),
        (16, 8, 64),
        (17, 4, 32),
        (40, 3, 16),
        (64, 1, 16),
        (2, 33, 66),
    ],
)
def test_every_share_is_merged(device: torch.device, splits: int, heads: int, head_dim: int) -> None:
    """All of the output and the LSE is written, whatever the shares come to."""
    given = partials(2, splits, heads, head_dim)
    out, lse = exchanged(*given, torch.float32, device)
    want, want_lse = expected(*given)
    assert not out[-1, 0].any()
    assert lse[-1, 0] == -torch.inf
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)


def test_a_nan_is_of_every_share_that_it_belongs_to(device: torch.device) -> None:
    """A sum of NaN makes a head's output and LSE NaN, also where the maximum says that there are no keys."""
    acc, top, total = partials(1, 3, 4, 64)
    acc[0, 1, 2], total[0, 1, 2] = torch.nan, torch.nan
    acc[0, 2, 3], top[0, 2, 3], total[0, 2, 3] = torch.nan, -torch.inf, torch.nan
    out, lse = exchanged(acc, top, total, torch.float32, device)
    assert out[0, 2:].isnan().all()
    assert lse[0, 2:].isnan().all()
    assert not out[0, :2].isnan().any()
    assert not lse[0, :2].isnan().any()


def test_words_of_another_round_do_not_count() -> None:
    """On a GPU a program waits for them, for ever: there the tests of runs back to back show it."""
    if not triton_splitkv.INTERPRETED:
        return
    acc, top, total = (x.abs() for x in partials(1, 3, 4, 64))
    out, lse = exchanged(acc, top, total, torch.float32, torch.device("cpu"), late=1)
    assert out.isnan().all()
    assert lse.isnan().all()


# --- on a GPU ---------------------------------------------------------------------------------------------

GPU = torch.device("cuda")

SHAPES = [
    *(((8, 2), 128, splits) for splits in (2, 3, 8, 16, 40)),
    *((heads, 128, 2) for heads in ((2, 2), (14, 2), (32, 2), (64, 1), (70, 1))),
    *((heads, 96, 5) for heads in ((4, 4), (28, 4))),
    *((heads, 64, 16) for heads in ((8, 2), (64, 1))),
    *((heads, 256, 3) for heads in ((8, 2), (16, 1), (70, 1))),
]
LENGTHS = ((1001, 517), (4096,), (64, 63))  # about 10 keys a split and many


def plans(
    lens: tuple[int, ...], heads: tuple[int, int], head_dim: int, splits: int, merge: str = "exchange"
) -> tuple[DecodeProblem, TritonPlan]:
    shape = problem(*lens, heads=heads, head_dim=head_dim, dtype="bfloat16")
    return shape, TritonSplitKV().plan(shape, GPU, {"num_splits": splits, "merge": merge})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "head_dim", "splits"), SHAPES, ids=lambda value: str(value).replace(", ", "-").strip("()")
)
def test_an_exchange_is_right(heads: tuple[int, int], head_dim: int, splits: int) -> None:
    """With strided K and V too, in any launch of a plan, and as a combine kernel has it."""
    for lens in LENGTHS:
        for layout, family in (("packed", "normal"), ("interleaved", "normal"), ("packed", "needles")):
            shape, plan = plans(lens, heads, head_dim, splits)
            assert plan.config["merge"] == "exchange"
            inputs = make_inputs(shape, 7, GPU, family=family, layout=layout, split_counts=(plan.split_counts,))
            ref = reference(inputs)
            for _ in range(2):  # with poison in the mail
                result = check_plan(plan, inputs, ref)
                assert result.ok, (lens, layout, family, result.reason)
            _, other = plans(lens, heads, head_dim, splits, merge="combine")
            assert other.config["merge"] == "combine"
            mine, theirs = plan.run(inputs, None), other.run(inputs, None)
            assert mine.lse is not None
            assert theirs.lse is not None
            torch.testing.assert_close(mine.out, theirs.out, rtol=1.6e-2, atol=1e-3)
            torch.testing.assert_close(mine.lse, theirs.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim", "splits"), [((32, 8), 128, 2), ((8, 2), 64, 16), ((70, 1), 256, 40)])
def test_runs_back_to_back_are_equal_in_bits(heads: tuple[int, int], head_dim: int, splits: int) -> None:
    shape, plan = plans((1001,), heads, head_dim, splits)
    inputs = make_inputs(shape, 7, GPU)
    right_and_equal_in_bits(plan, inputs, 200)


@pytest.mark.gpu
def test_a_graph_of_an_exchange_is_replayed_on_other_values() -> None:
    """Rounds go on in a graph, and out of it again; poison between them is of no round."""
    shape, plan = plans((1001, 517), (32, 8), 128, 4)
    inputs, other = (make_inputs(shape, seed, GPU) for seed in (1, 2))
    expected = [plan.run(values, None) for values in (inputs, other)]
    target = plan.new_output()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            plan.run(inputs, target)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert same_bits(target, expected[0])
    for mine, new in zip((inputs.q, inputs.k, inputs.v), (other.q, other.k, other.v), strict=True):
        mine.copy_(new)
    poison_workspaces(plan)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(target, expected[1])
    assert same_bits(plan.run(other, None), expected[1])


@pytest.mark.gpu
def test_an_exchange_on_another_stream_waits_for_nobody_who_cannot_start() -> None:
    """While another stream keeps the device busy, and with a second plan beside it."""
    runs = [plans((1001,), (32, 8), 128, splits) for splits in (16, 8)]
    inputs = make_inputs(runs[0][0], 7, GPU)
    expected = [plan.run(inputs, None) for _, plan in runs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(GPU) for _ in runs]
    got: list[list[DecodeOutput]] = [[], []]
    busy = torch.randn((2048, 2048), device=GPU)
    outputs = [[plan.new_output() for _ in range(50)] for _, plan in runs]
    torch.cuda.synchronize()
    for i in range(50):
        busy @ busy
        for (_, plan), stream, outs, kept in zip(runs, streams, outputs, got, strict=True):
            with torch.cuda.stream(stream):
                kept.append(plan.run(inputs, outs[i]))
    torch.cuda.synchronize()
    for want, kept in zip(expected, got, strict=True):
        assert all(same_bits(want, output) for output in kept)


@pytest.mark.gpu
def test_a_nan_among_its_keys_is_in_the_output_of_its_sequence_alone() -> None:
    shape, _ = plans((1001, 517), (8, 2), 128, 4)
    inputs = make_inputs(shape, 7, GPU)
    inputs.k[700] = torch.nan
    for merging in ("exchange", "combine"):
        output = plans((1001, 517), (8, 2), 128, 4, merging)[1].run(inputs, None)
        assert output.lse is not None
        assert output.out[0].isnan().all()
        assert output.lse[0].isnan().all()
        assert not output.out[1].isnan().any()
        assert not output.lse[1].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "lens",
    [(700, 0), (700, 3), (0, 5, 1, 0), (2, 2), (4000, 900, 77, 3000, 1)],
    ids=lambda lens: "-".join(map(str, lens)),
)
def test_batches_of_different_lengths_are_right(lens: tuple[int, ...]) -> None:
    """Sequences of one split write their output in the same launch; empty ones too."""
    for num_splits in (4, "auto"):
        shape = problem(*lens, heads=(8, 2), head_dim=128, dtype="bfloat16")
        plan = TritonSplitKV().plan(shape, GPU, {"num_splits": num_splits})
        if (
            num_splits == "auto" and plan.config["merge"] == "combine"
        ):  # our rule's choice; what it takes is right too
            plan = TritonSplitKV().plan(shape, GPU, {"merge": "exchange"})
        assert plan.config["merge"] in ("exchange", None)
        inputs = make_inputs(shape, 7, GPU)
        for _ in range(3):
            result = check_plan(plan, inputs, reference(inputs))
            assert result.ok, result.reason


@pytest.mark.gpu
def test_more_programs_than_the_device_holds_leave_partials() -> None:
    shape = problem(*[64] * 300, heads=(8, 2), head_dim=128, dtype="bfloat16")
    assert TritonSplitKV().plan(shape, GPU, {"num_splits": 2}).config["merge"] == "combine"
    with pytest.raises(ValueError, match="merge: expected"):
        TritonSplitKV().plan(shape, GPU, {"num_splits": 2, "merge": "exchange"})
