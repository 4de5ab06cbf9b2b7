"""Splits that merge inside of a thread block cluster: when they may, what it lowers to, and that it is right."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.check import check_plan, compare, same_bits
from harness.inputs import make_inputs
from impls.contract import DecodeInputs, Scalar
from impls.problem import DecodeProblem
from impls.reference import reference
from impls.tilelang_cluster import (
    CLUSTERS,
    MAX_CLUSTER,
    cluster_size,
    clusters_at_once,
    column_width,
    ctas_per_sm,
    static_bytes,
)
from impls.tilelang_machines import MACHINES
from impls.tilelang_splitkv import HEAD_DIMS, TUNING, TileLangSplitKV
from impls.tilelang_tile import choose_cluster, choose_tile, head_rows
from tests.impls.cases import problem
from tests.impls.lowering import lowered
from tests.impls.running import right_and_equal_in_bits

CPU = torch.device("cpu")
H200_SMS = 132


# --- how many run at once ---------------------------------------------------------------------------------


@st.composite
def gpcs_of_an_h200(draw: st.DrawFn) -> list[int]:
    """SMs of each of 8 GPCs: 132, in pairs, at least 14 each."""
    sms = [14] * 8
    for gpc in draw(st.lists(st.integers(0, 7), min_size=10, max_size=10)):
        sms[gpc] += 2
    return sms


ANY_GPCS = st.lists(st.integers(0, 12).map(lambda tpcs: 2 * tpcs), min_size=1, max_size=8)


@given(st.one_of(gpcs_of_an_h200(), ANY_GPCS), st.integers(2, MAX_CLUSTER), st.integers(1, 8))
def test_what_is_promised_fits_however_the_sms_lie(gpcs: list[int], cluster: int, held: int) -> None:
    fit = sum(held * sms // cluster for sms in gpcs)
    assert clusters_at_once(cluster, sum(gpcs), held) <= fit


@given(gpcs_of_an_h200(), st.integers(2, MAX_CLUSTER), st.integers(1, 4), st.integers(1, 64), st.integers(1, 64))
def test_clusters_that_the_rule_allows_are_all_on_the_device_at_once(
    gpcs: list[int], splits: int, held: int, batch: int, tiles: int
) -> None:
    sizes = range(2, MAX_CLUSTER + 1)
    size = cluster_size(np.full(batch, splits), tiles, H200_SMS, held, sizes)
    assert size in (1, splits)
    assert size == 1 or batch * tiles <= sum(held * sms // splits for sms in gpcs)


def test_the_clusters_of_an_h200() -> None:
    """Whole GPCs of 16 and 18 SMs lose nothing to pairs, at most 2 SMs to fours, 6 to eights, 14 to sixteens."""
    assert [clusters_at_once(size, H200_SMS, 1) for size in CLUSTERS] == [66, 29, 11, 2]
    assert [clusters_at_once(size, H200_SMS, 2) for size in CLUSTERS] == [132, 66, 29, 11]
    assert clusters_at_once(16, 2, 1) == 0


@pytest.mark.parametrize(
    ("counts", "tiles", "size"),
    [
        ([8], 8, 8),
        ([8], 12, 1),  # 11 are promised
        ([2] * 8, 8, 2),
        ([2] * 9, 8, 1),  # 72 of 66
        ([4, 4, 5], 1, 1),
        ([1, 1], 1, 1),
        ([3], 1, 1),  # none of our sizes
        ([32], 1, 1),
        ([], 8, 1),
    ],
)
def test_the_rule_takes_the_common_count_if_all_fit(counts: list[int], tiles: int, size: int) -> None:
    assert cluster_size(np.array(counts, dtype=np.int64), tiles, H200_SMS, 1) == size


def test_an_sm_holds_what_its_memory_and_registers_allow() -> None:
    assert ctas_per_sm(132 << 10, 128) == 1
    assert ctas_per_sm(113 << 10, 128) == 2  # and 2 x 1 KiB for the system: all of 228 KiB
    assert ctas_per_sm((113 << 10) + 1, 128) == 1
    assert ctas_per_sm(10 << 10, 128) == 2  # 256 registers a thread
    assert ctas_per_sm(300 << 10, 1024) == 1


# --- what a caller may ask for ----------------------------------------------------------------------------


def chosen(
    machine: str,
    shape: DecodeProblem,
    counts: list[int],
    asked: Scalar = None,
    **tile: int,
) -> int:
    target = MACHINES[machine]
    made = choose_tile(target, shape, {**TUNING, **tile})
    return choose_cluster(target, shape, made, asked, np.array(counts, dtype=np.int64), sms=H200_SMS)


def test_a_cluster_is_chosen_on_hopper_alone() -> None:
    shape = problem(1024, heads=(32, 8), head_dim=128)
    assert chosen("sm_90a", shape, [8]) == 8
    assert chosen("sm_90a", shape, [8], asked=1) == 1
    assert chosen("sm_90a", shape, [3], asked=3) == 3
    assert chosen("sm_90a", shape, [3]) == 1
    assert chosen("sm_90a", shape, [16]) == 1  # 8 clusters of 16 might not fit
    assert chosen("sm_90a", shape, [16], asked=16) == 16
    for machine in ("sm_80", "cpu"):
        assert chosen(machine, shape, [8]) == 1
        assert chosen(machine, shape, [8], asked=1) == 1


def test_more_than_two_are_chosen_only_where_a_split_fits_the_ring() -> None:
    """Two tiles of 128 keys."""
    for keys, size in ((2048, 8), (2049, 1), (65_536, 1)):
        assert chosen("sm_90a", problem(keys, heads=(32, 8), head_dim=128), [8]) == size
    assert chosen("sm_90a", problem(65_536, heads=(32, 8), head_dim=128), [2]) == 2


@pytest.mark.parametrize(
    ("machine", "counts", "asked", "message"),
    [
        ("sm_80", [8], 8, r"cluster: expected 1 on sm_80, got 8"),
        ("cpu", [8], 8, r"cluster: expected 1 on cpu, got 8"),
        ("sm_90a", [8], 0, r"cluster: expected an integer >= 1, got 0"),
        ("sm_90a", [8], True, r"cluster: expected an integer >= 1, got True"),
        ("sm_90a", [8], "many", r"cluster: expected an integer >= 1, got 'many'"),
        ("sm_90a", [32], 32, r"cluster: expected an integer <= 16, got 32"),
        ("sm_90a", [8], 4, r"cluster: expected the number of splits of every sequence \(8 to 8\), got 4"),
        ("sm_90a", [1, 8], 8, r"cluster: expected the number of splits of every sequence \(1 to 8\), got 8"),
        ("sm_90a", [], 8, r"cluster: expected the number of splits of every sequence \(none\), got 8"),
    ],
)
def test_what_cannot_be_is_refused(machine: str, counts: list[int], asked: Scalar, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(machine, problem(8192, heads=(32, 8), head_dim=128), counts, asked)


def test_what_cannot_be_received_is_not_chosen_and_refused_with_the_bytes() -> None:
    wide = problem(8192, heads=(64, 1), head_dim=256)
    assert chosen("sm_90a", wide, [2]) == 1
    with pytest.raises(
        ValueError, match=r"cluster: expected <= 49152 bytes of static shared memory a CTA, got 67584"
    ):
        chosen("sm_90a", wide, [2], asked=2)
    large = problem(8192, heads=(64, 1), head_dim=128)
    assert chosen("sm_90a", large, [2], num_stages=3) == 1
    with pytest.raises(
        ValueError, match=r"cluster: expected <= 232448 bytes of shared memory a CTA, got \d+ with 2"
    ):
        chosen("sm_90a", large, [2], asked=2, num_stages=3)


def test_on_a_cpu_a_plan_has_partials_and_says_so() -> None:
    shape = problem(300, 310)
    config = TileLangSplitKV().plan(shape, CPU, {"num_splits": 4}).config
    assert config["cluster"] == 1
    assert config["workspace_bytes"] > 0  # type: ignore[operator]
    with pytest.raises(ValueError, match="cluster: expected 1 on cpu, got 4"):
        TileLangSplitKV().plan(shape, CPU, {"num_splits": 4, "cluster": 4})


@given(st.sampled_from(HEAD_DIMS), st.integers(2, MAX_CLUSTER))
def test_every_column_has_one_owner_and_no_16_bytes_have_two(head_dim: int, cluster: int) -> None:
    width = column_width(head_dim, cluster)
    owned = [max(0, min(head_dim - rank * width, width)) for rank in range(cluster)]
    assert sum(owned) == head_dim
    assert all(columns % 4 == 0 for columns in (width, *owned))


# --- what it lowers to ------------------------------------------------------------------------------------


def declared_bytes(source: str) -> int:
    """Bytes of the arrays that a kernel declares ``__shared__``."""
    sizes = {"uint64_t": 8, "float": 4}
    found = re.findall(r"__shared__ __align__\(16\) (\w+) \w+\[(\d+)\];", source)
    return sum(sizes[dtype] * int(count) for dtype, count in found)


def test_a_cluster_pushes_its_partials_and_writes_none() -> None:
    source, dims, _ = lowered(problem(8192, heads=(32, 8), head_dim=128), 8)
    assert dims == [8, 1, 1]
    body = source[source.rindex('extern "C" __global__') :]
    assert "st.async.shared::cluster" in source
    assert "Partial" not in body
    for once in ("dsm_open(", "dsm_wait_open(", "dsm_push(", "dsm_receive("):
        assert body.count(once) == 1
    before_push = body.partition("dsm_push(")[0]
    assert "dsm_wait_open(" in before_push
    assert "Output[" not in before_push


def test_one_cta_is_no_cluster_and_needs_none_of_it() -> None:
    source, dims, _ = lowered(problem(8192, heads=(32, 8), head_dim=128), 1)
    assert dims is None
    assert "dsm_" not in source
    assert "(Partial + " in source


@pytest.mark.parametrize("cluster", [1, 4])
def test_nothing_is_read_before_the_kernels_before_are_done(cluster: int) -> None:
    """Programmatic dependent launch: the table, Q, K and V may be what an earlier kernel or copy writes."""
    source = lowered(problem(8192, heads=(32, 8), head_dim=128), cluster)[0]
    body = source[source.rindex('extern "C" __global__') :]
    before, _, after = body.partition("cudaGridDependencySynchronize();")
    assert "= Items[" in after
    assert not re.search(r"Items\[|tma_load<|Q \+", before)
    assert "cudaTriggerProgrammaticLaunchCompletion();" in after  # so the combine kernel may read its table at once


@pytest.mark.parametrize(
    ("heads", "head_dim", "cluster"),
    [
        ((8, 8), 128, 2),
        ((28, 4), 128, 16),
        ((24, 1), 64, 3),
        ((14, 2), 80, 16),
        ((8, 1), 256, 8),
        ((70, 1), 128, 16),
    ],
)
def test_it_receives_in_the_static_shared_memory_that_was_predicted(
    heads: tuple[int, int], head_dim: int, cluster: int
) -> None:
    shape = problem(8192, heads=heads, head_dim=head_dim)
    source, _, tile = lowered(shape, cluster)
    assert "(&(four[0]))" in source  # however few columns a thread would hold of a fragment: 16 bytes a push
    declared = declared_bytes(source)
    rows = head_rows(shape.group, tile.block_h)
    assert static_bytes(rows, head_dim, cluster, tile.num_stages) == -(-declared // 1024) * 1024


def test_it_lowers_where_the_tile_has_64_rows() -> None:
    source = lowered(problem(8192, heads=(32, 8), head_dim=128), 4, block_h=64, block_n=64)[0]
    assert "wgmma" in source
    assert "dsm_push(" in source


# --- on a GPU ---------------------------------------------------------------------------------------------

GPU = torch.device("cuda")


SHAPES = [
    *(((32, 8), 128, cluster) for cluster in (2, 3, 4, 8, 16)),
    *((heads, 128, 8) for heads in ((4, 4), (28, 4), (32, 4), (24, 1), (70, 1))),
    ((8, 2), 64, 3),
    ((14, 2), 80, 16),  # ten CTAs own 8 columns each, six own none
    ((8, 2), 256, 16),
    ((24, 1), 256, 4),
]
LENGTHS = [(1001, 517), (16, 17, 5000), (16,)]  # many keys, few and many, one each


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("heads", "head_dim", "cluster"), SHAPES, ids=lambda value: str(value).replace(", ", "-").strip("()")
)
def test_a_cluster_is_right(heads: tuple[int, int], head_dim: int, cluster: int) -> None:
    """And so are strided K and V, and equal in bits, run after run; nothing is left for a combine kernel."""
    for lens in LENGTHS:
        for layout, family in (("packed", "normal"), ("interleaved", "normal"), ("packed", "needles")):
            shape = problem(*lens, heads=heads, head_dim=head_dim, dtype="bfloat16")
            plan = TileLangSplitKV().plan(shape, GPU, {"num_splits": cluster, "cluster": cluster})
            assert (plan.config["cluster"], plan.config["workspace_bytes"]) == (cluster, 0)
            assert plan.config["splits_max"] == cluster
            assert sum(workspace.numel() for workspace in plan.workspaces()) == 0
            inputs = make_inputs(
                shape,
                7,
                GPU,
                family=family,
                layout=layout,
                split_counts=(plan.split_counts,),  # type: ignore[attr-defined]
            )
            result = check_plan(plan, inputs, reference(inputs))
            assert result.ok, (lens, layout, family, result.reason)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("cluster", [2, 16])
def test_runs_back_to_back_are_equal_in_bits(cluster: int) -> None:
    shape = problem(1001, 517, heads=(32, 8), head_dim=128, dtype="bfloat16")
    inputs = make_inputs(shape, 7, GPU)
    plan = TileLangSplitKV().plan(shape, GPU, {"num_splits": cluster, "cluster": cluster})
    right_and_equal_in_bits(plan, inputs, 200)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_a_graph_of_a_cluster_is_replayed_on_other_values() -> None:
    shape = problem(1001, 517, heads=(32, 8), head_dim=128, dtype="bfloat16")
    inputs, other = (make_inputs(shape, seed, GPU) for seed in (1, 2))
    plan = TileLangSplitKV().plan(shape, GPU, {"num_splits": 4, "cluster": 4})
    target = plan.new_output()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(inputs, target)
    for mine, new in zip((inputs.q, inputs.k, inputs.v), (other.q, other.k, other.v), strict=True):
        mine.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(target, plan.run(other, plan.new_output()))


def _first_keys(inputs: DecodeInputs, keys: int) -> DecodeInputs:
    """The same sequence, only so long."""
    shape = replace(inputs.problem, kv_lens=(keys,))
    ends = torch.tensor([0, keys], dtype=inputs.cu_seqlens_k.dtype, device=GPU)
    return replace(inputs, problem=shape, k=inputs.k[:keys], v=inputs.v[:keys], cu_seqlens_k=ends)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("cluster", [2, 8])
def test_splits_without_keys_are_left_out(cluster: int) -> None:
    """No table of ours has them in a cluster: the last split of the table is emptied, then all of them."""
    shape = problem(100 * cluster, heads=(32, 8), head_dim=128, dtype="bfloat16")
    inputs = make_inputs(shape, 7, GPU)
    plan = TileLangSplitKV().plan(shape, GPU, {"num_splits": cluster, "cluster": cluster})
    items = plan._items
    items[-1, 2] = 0
    shorter = _first_keys(inputs, 100 * (cluster - 1))
    result = compare(plan.run(inputs, plan.new_output()), reference(shorter), shorter.problem)
    assert result.ok, result.reason
    items[:, 2] = 0
    output = plan.run(inputs, plan.new_output())
    assert output.lse is not None
    assert not output.out.any()
    assert (output.lse == -torch.inf).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_our_rule_takes_clusters_and_other_batches_have_partials() -> None:
    """An empty sequence has one split, a short one as many as it has keys: such batches are not of one count."""
    impl = TileLangSplitKV()
    for lens, cluster in (((700, 701), 4), ((700, 0), 1), ((700, 3), 1), ((2, 2), 2)):
        shape = problem(*lens, heads=(8, 2), head_dim=128, dtype="bfloat16")
        plan = impl.plan(shape, GPU, {"num_splits": 4})
        assert plan.config["cluster"] == cluster, lens
        inputs = make_inputs(shape, 7, GPU)
        result = check_plan(plan, inputs, reference(inputs))
        assert result.ok, result.reason
