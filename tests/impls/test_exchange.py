"""Splits that merge through global memory inside of the split kernel: when they may, and that TileLang is right."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.check import check_plan, compare, poison_workspaces, same_bits
from harness.inputs import make_inputs
from impls.contract import Scalar
from impls.exchange import mail_bytes, mail_shape, may_exchange, pays_to_exchange
from impls.problem import DecodeProblem
from impls.reference import reference
from impls.splitkv_plan import SPLIT_TUNING, Limits, SplitKVPlan, decide_splitting
from impls.splits import make_table
from impls.tilelang_splitkv import TileLangSplitKV
from tests.impls.cases import problem
from tests.impls.lowering import lowered
from tests.impls.running import right_and_equal_in_bits

CPU, GPU = torch.device("cpu"), torch.device("cuda")


# --- when they may ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ctas", "slots", "at_once", "may"),
    [
        (132, 2, 132, True),
        (133, 2, 132, False),
        (128, 0, 132, False),  # nothing to merge
        (2, 2, 0, False),  # a kernel that cannot
    ],
)
def test_all_ctas_must_be_on_the_device_at_once(ctas: int, slots: int, at_once: int, may: bool) -> None:
    assert may_exchange(ctas, slots, at_once) is may


@pytest.mark.parametrize(
    ("keys", "splits", "pays"),
    [(4096, 16, True), (4097, 16, False), (4096, 17, False), (0, 2, True)],
)
def test_our_rule_takes_short_ctas_and_no_more_splits_than_leave_room(keys: int, splits: int, pays: bool) -> None:
    """2 MiB are 4096 keys of head dim 128 in 16 bits; 16 are an eighth of an H200's SMs."""
    shape = problem(9999, heads=(1, 1), head_dim=128, dtype="float16")
    assert pays_to_exchange(shape, keys=keys, splits=splits, sms=132) is pays


class _Plan(SplitKVPlan):
    """What is decided for a kernel that can exchange, without one."""

    def __init__(self, shape: DecodeProblem, **choice: Scalar) -> None:
        tuning = {**SPLIT_TUNING, **choice}
        splitting = decide_splitting(
            shape, tuning, sm_count=132, tiles_per_split=8, limits=Limits(128), at_once=132
        )
        super().__init__(shape, CPU, tuning, splitting)
        self.config = self._split_config


@pytest.mark.parametrize(
    ("lens", "choice", "merge"),
    [
        ((8192,), {}, "exchange"),
        ((8192,), {"merge": "combine"}, "combine"),
        ((8192,), {"workspace_budget_bytes": 300_000}, "combine"),  # the mail is twice the partials
        ((8192,), {"num_splits": 17}, "combine"),  # 136 CTAs
        ((131_072,), {}, "combine"),
        ((131_072,), {"merge": "exchange"}, "exchange"),
        ((8192,) * 16, {}, None),
        ((8192,) * 16, {"merge": "combine"}, None),
    ],
)
def test_how_a_plan_merges(lens: tuple[int, ...], choice: dict[str, Scalar], merge: str | None) -> None:
    plan = _Plan(problem(*lens, heads=(32, 8), head_dim=128, dtype="bfloat16"), **choice)
    assert plan.config["merge"] == merge
    assert plan.config["workspace_bytes"] == sum(workspace.nbytes for workspace in plan.workspaces())
    assert len(plan._merges) == (len(lens) if merge == "combine" else 0)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 9))
def test_every_cta_has_a_row_and_those_that_wait_for_each_other_are_neighbours(
    sequences: list[tuple[int, int]], tiles: int
) -> None:
    lens = [keys for keys, _ in sequences]
    table = make_table(lens, [min(splits, max(1, keys)) for keys, splits in sequences])
    rows = table.ctas(tiles)
    assert rows.shape == (table.splits * tiles, 8)
    for tile in range(tiles):
        mine = rows[rows[:, 4] == tile]
        assert (mine[:, :4] == table.items).all(), "each head tile has every item once, in order"
    splits = table.counts[rows[:, 0]]
    assert (rows[:, 6] == splits).all()
    starts = np.flatnonzero(rows[:, 5] == 0)
    for start in starts:
        group = rows[start : start + rows[start, 6]]
        assert group[:, 5].tolist() == list(range(len(group)))
        assert len({tuple(row) for row in group[:, [0, 4]].tolist()}) == 1
    assert splits[starts].sum() == len(rows)
    merged = rows[:, 3] >= 0
    first = {b: slot for b, slot, _, _ in table.merges.tolist()}
    assert (rows[merged, 3] - rows[merged, 5]).tolist() == [first[b] for b in rows[merged, 0].tolist()]


@given(st.integers(0, 100), st.integers(1, 64), st.integers(1, 256), st.integers(1, 1000))
def test_bytes_are_those_of_the_tensors(slots: int, heads: int, dim: int, ctas: int) -> None:
    words = torch.empty(mail_shape(slots, heads, dim), dtype=torch.float32, device="meta")
    rounds = torch.empty(ctas, dtype=torch.int32, device="meta")
    assert mail_bytes(slots, heads, dim, ctas) == words.nbytes + rounds.nbytes


def test_what_cannot_be_is_refused_with_what_was_expected() -> None:
    """No exchange on a CPU, whose kernels run one CTA after another."""
    shape = problem(300, 310)
    assert TileLangSplitKV().plan(shape, CPU, {"num_splits": 4}).config["merge"] == "combine"
    with pytest.raises(ValueError, match=r"merge: expected 'auto' or 'combine' \(.*\), got 'exchange'"):
        TileLangSplitKV().plan(shape, CPU, {"num_splits": 4, "merge": "exchange"})
    for splits in (1, 4):
        with pytest.raises(ValueError, match="merge: expected one of auto, combine, exchange, got 'atomics'"):
            TileLangSplitKV().plan(shape, CPU, {"num_splits": splits, "merge": "atomics"})


# --- what it lowers to ------------------------------------------------------------------------------------


def test_an_exchange_writes_words_and_waits_for_words() -> None:
    source, dims, _ = lowered(problem(8192, heads=(32, 8), head_dim=128), 1, exchange=True)
    assert dims is None
    body = source[source.rindex('extern "C" __global__') :]
    assert "st.relaxed.gpu.global.v2.b64" in source
    assert "ld.relaxed.gpu.global.v2.b64" in source
    assert "Partial_lse" not in body.partition(")")[2]
    assert body.index("mail_post(") < body.index("mail_collect<")
    assert not re.search(r"(Output \+|Output\[|Lse\[)", body.partition("mail_post(")[0])
    last = body.rpartition("mail_collect<")[2]
    assert "Rounds[" in last, "a round is counted when it is over"
    assert body.index("cudaGridDependencySynchronize()") < body.index("Rounds[")


@pytest.mark.parametrize("exchange", [False, True])
def test_warps_meet_twice_a_tile(exchange: bool) -> None:
    """Where K and where V are refilled; each warp clears V's last rows for itself."""
    source, _, _ = lowered(problem(8192, heads=(32, 8), head_dim=128), 1, exchange=exchange)
    body = source[source.rindex('extern "C" __global__') :]
    loop = body[body.index(".wait(") : body.index("AllReduce<tl::SumOp")]
    assert loop.count("__syncthreads()") == 2
    assert loop.count("__syncwarp()") == 1


# --- that it is right -------------------------------------------------------------------------------------

SHAPES = [
    ((32, 8), 128, 8),
    ((16, 4), 128, 16),
    ((32, 8), 64, 3),
    ((28, 4), 128, 5),
    ((8, 8), 128, 7),
    ((14, 2), 80, 33),
    ((8, 4), 96, 9),
    ((16, 2), 192, 2),
    ((8, 1), 256, 33),
    ((24, 1), 128, 12),
    ((64, 1), 128, 6),
    ((70, 1), 128, 31),
    ((4, 1), 128, 66),
]
LENGTHS = [(1001, 517), (64, 65), (5000,), (900, 0, 1)]


def _exchange_plan(shape: DecodeProblem, splits: int):  # type: ignore[no-untyped-def]
    plan = TileLangSplitKV().plan(shape, GPU, {"num_splits": splits, "merge": "exchange"})
    assert plan.config["merge"] == "exchange"
    assert plan.config["workspace_bytes"] == sum(t.nbytes for t in plan.workspaces())
    return plan


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("heads", "head_dim", "splits"), SHAPES, ids=lambda value: str(value).replace(", ", "-").strip("()")
)
def test_an_exchange_is_right(heads: tuple[int, int], head_dim: int, splits: int) -> None:
    for lens in LENGTHS:
        shape = problem(*lens, heads=heads, head_dim=head_dim, dtype="bfloat16")
        for layout, family in (("packed", "normal"), ("interleaved", "normal"), ("packed", "needles")):
            plan = _exchange_plan(shape, splits)
            inputs = make_inputs(shape, 7, GPU, family=family, layout=layout, split_counts=(plan.split_counts,))
            result = check_plan(plan, inputs, reference(inputs))
            assert result.ok, (lens, layout, family, result.reason)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("splits", [2, 8, 16])
def test_runs_back_to_back_are_equal_in_bits(splits: int) -> None:
    shape = problem(1001, heads=(32, 8), head_dim=128, dtype="bfloat16")
    inputs = make_inputs(shape, 7, GPU)
    plan = _exchange_plan(shape, splits)
    right_and_equal_in_bits(plan, inputs, 500)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_two_plans_in_turn_and_a_side_stream() -> None:
    """Each has rounds of its own; whatever is in the mail before a run is of no round."""
    shape = problem(4000, heads=(32, 8), head_dim=128, dtype="bfloat16")
    inputs = make_inputs(shape, 7, GPU)
    ref = reference(inputs)
    one, other = _exchange_plan(shape, 8), _exchange_plan(shape, 16)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for _ in range(20):
        for plan in (one, other, one):
            poison_workspaces(plan)
            result = compare(plan.run(inputs, plan.new_output()), ref, shape)
            assert result.ok, result.reason
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            output = one.run(inputs, one.new_output())
        torch.cuda.current_stream().wait_stream(side)
        result = compare(output, ref, shape)
        assert result.ok, result.reason


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_graph_of_an_exchange_is_replayed_on_other_values() -> None:
    """A graph replays the same arguments: the round is counted on the device."""
    shape = problem(1001, heads=(32, 8), head_dim=128, dtype="bfloat16")
    inputs, other = (make_inputs(shape, seed, GPU) for seed in (1, 2))
    plan = _exchange_plan(shape, 8)
    target = plan.new_output()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            plan.run(inputs, target)
    expected = [plan.run(values, plan.new_output()) for values in (inputs, other)]
    for _ in range(30):
        for values, right in zip((inputs, other), expected, strict=True):
            kept = [x.clone() for x in (inputs.q, inputs.k, inputs.v)]
            for mine, new in zip((inputs.q, inputs.k, inputs.v), (values.q, values.k, values.v), strict=True):
                mine.copy_(new)
            target.out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert same_bits(target, right)
            for mine, old in zip((inputs.q, inputs.k, inputs.v), kept, strict=True):
                mine.copy_(old)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_our_rule_exchanges_what_no_cluster_merges() -> None:
    impl = TileLangSplitKV()
    cases = (
        ((8192,), "exchange"),
        ((5000, 3000), "exchange"),
        ((1024,), "cluster"),
        ((131_072,), "combine"),
        ((512,) * 40, None),
    )
    for lens, merge in cases:
        shape = problem(*lens, heads=(32, 8), head_dim=128, dtype="bfloat16")
        plan = impl.plan(shape, GPU)
        assert plan.config["merge"] == merge, lens
        inputs = make_inputs(shape, 7, GPU)
        result = check_plan(plan, inputs, reference(inputs))
        assert result.ok, result.reason
