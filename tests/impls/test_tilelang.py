"""The TileLang kernels beyond conformance: one body for every machine, what it lowers to, what it compiles."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tilelang
import torch
from tilelang import tvm

from harness.check import check_plan
from harness.inputs import make_inputs
from impls import tilelang_machines, tilelang_splitkv
from impls.contract import ImplUnavailable, InputError, Scalar
from impls.problem import DecodeProblem
from impls.reference import reference
from impls.splitkv_plan import SPLIT_TUNING
from impls.tilelang_tile import clustered_splits, ring_share, ring_tiles
from tests.impls.lowering import lowered

CPU = torch.device("cpu")


def lower(module: ModuleType, machine: str, head_dim: int = 128, **choice: int) -> str:
    """The CUDA source of the split kernel, for 32/8 heads, bfloat16 and the rule's tile."""
    target = module.MACHINES[machine]
    problem = DecodeProblem(kv_lens=(8192,), heads_q=32, heads_kv=8, head_dim=head_dim)
    tile = module.choose_tile(target, problem, {**module.TUNING, **choice})
    kernel = module.split_kernel(target, 32, 8, head_dim, "bfloat16", **vars(tile))
    configs = module.pass_configs(target, tile)
    with (
        tvm.transform.PassContext(opt_level=3, config=configs),
        tvm.target.Target({"kind": "cuda", "arch": machine}),
    ):
        source: str = tilelang.lower(kernel).kernel_source
    return source


@pytest.mark.parametrize("head_dim", tilelang_splitkv.HEAD_DIMS)
def test_lowers_for_hopper_with_tma(head_dim: int) -> None:
    source = lower(tilelang_splitkv, "sm_90a", head_dim)
    assert "tl::tma_load<tl::CacheHintSm90::EVICT_FIRST>(K_desc" in source
    assert "tl::tma_load<tl::CacheHintSm90::EVICT_FIRST>(V_desc" in source
    assert "cp_async" not in source
    assert "mma_sync" in source
    assert "blockIdx.y" not in source  # that axis ends at 65535, and a batch may have more splits


def test_lowers_for_hopper_with_wgmma_where_the_tile_has_64_rows() -> None:
    source = lower(tilelang_splitkv, "sm_90a", block_h=64, block_n=64)
    assert "wgmma" in source
    assert "tl::tma_load<tl::CacheHintSm90::EVICT_FIRST>(K_desc" in source


@pytest.mark.parametrize("head_dim", tilelang_splitkv.HEAD_DIMS)
def test_lowers_for_ampere_with_cp_async(head_dim: int) -> None:
    source = lower(tilelang_splitkv, "sm_80", head_dim)
    assert "cp_async_gs" in source
    assert "tma_load" not in source
    assert "wgmma" not in source


def test_each_cuda_machine_has_its_own_stages_and_policy() -> None:
    problem = DecodeProblem(kv_lens=(8192,), heads_q=32, heads_kv=8, head_dim=128)
    tiles = {
        name: tilelang_splitkv.choose_tile(tilelang_splitkv.MACHINES[name], problem, tilelang_splitkv.TUNING)
        for name in ("sm_90a", "sm_80")
    }
    assert (tiles["sm_90a"].block_n, tiles["sm_90a"].num_stages) == (128, 2)
    assert (tiles["sm_80"].block_n, tiles["sm_80"].num_stages) == (64, 2)
    # Two tiles in flight: of their four copies all but the oldest may be on their way when K or V is used.
    assert lower(tilelang_splitkv, "sm_80").count("cp_async_wait<3>") == 2


@pytest.mark.parametrize("machine", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("group", [1, 4, 24, 70])
@pytest.mark.parametrize("head_dim", tilelang_splitkv.HEAD_DIMS)
def test_each_part_of_a_tile_has_the_keys_of_an_mma(machine: str, group: int, head_dim: int) -> None:
    target = tilelang_splitkv.MACHINES[machine]
    problem = DecodeProblem(kv_lens=(8192,), heads_q=group, heads_kv=1, head_dim=head_dim)
    for choice in ({}, {"block_n": 32}, {"block_n": 64}, {"block_h": 64}):
        tile = tilelang_splitkv.choose_tile(target, problem, {**tilelang_splitkv.TUNING, **choice})
        assert tile.block_n >= 16 * target.parts(tile.block_h, tile.threads)
        assert tile.block_h >= 16


def test_a_tile_that_no_warps_can_share_is_refused() -> None:
    problem = DecodeProblem(kv_lens=(8192,), heads_q=32, heads_kv=8, head_dim=128)
    choice = {**tilelang_splitkv.TUNING, "block_n": 32, "threads": 128}
    with pytest.raises(ValueError, match=r"block_h: expected 16, 32, 64 or 128, got 48"):
        tilelang_splitkv.choose_tile(
            tilelang_splitkv.MACHINES["sm_90a"], problem, {**tilelang_splitkv.TUNING, "block_h": 48}
        )
    with pytest.raises(ValueError, match=r"block_n: expected >= 64 with 128 threads and block_h 16 .*, got 32"):
        tilelang_splitkv.choose_tile(tilelang_splitkv.MACHINES["sm_90a"], problem, choice)


@pytest.mark.parametrize("machine", list(tilelang_splitkv.MACHINES))
@pytest.mark.parametrize("group", [1, 3, 7, 16, 24, 48, 70])
def test_the_rows_that_hold_the_heads_are_rows_of_the_tile(machine: str, group: int) -> None:
    """On a CPU, where a tile has just its heads, a power of two would be read past the end."""
    target = tilelang_splitkv.MACHINES[machine]
    problem = DecodeProblem(kv_lens=(100,), heads_q=group, heads_kv=1, head_dim=64)
    block_h = tilelang_splitkv.choose_tile(target, problem, tilelang_splitkv.TUNING).block_h
    rows = tilelang_splitkv.head_rows(group, block_h)
    assert min(group, block_h) <= rows <= block_h
    assert target.target == "c" or rows & (rows - 1) == 0


@pytest.mark.parametrize("block_h", [16, 32, 64])
def test_a_row_of_scores_lies_in_one_warp(block_h: int) -> None:
    """P stays in registers, and a row's maximum lies in four threads of one warp."""
    source = lower(tilelang_splitkv, "sm_80", block_h=block_h)
    assert "bfloat16_t P[" in source
    assert "AllReduce<tl::MaxOp, 4, 1" in source
    assert source.count("AllReduce<tl::MaxOp") == 1


@pytest.mark.parametrize(("group", "own"), [(4, True), (24, False), (48, False)])
def test_a_warp_clears_rows_of_v_by_itself_only_where_no_other_reads_them(group: int, own: bool) -> None:
    """Of 32 heads, two warps read the same part of the keys: racecheck found them writing what the other reads."""
    problem = DecodeProblem(kv_lens=(8192,), heads_q=group, heads_kv=1, head_dim=128)
    source, _, tile = lowered(problem, 1)
    assert (tile.block_h == 16) == own
    assert source.count("zero_16_bytes(") == (2 if own else 1)  # the definition, and a call


@pytest.mark.parametrize("machine", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("head_dim", tilelang_splitkv.HEAD_DIMS)
def test_combine_lowers(machine: str, head_dim: int) -> None:
    target = tilelang_splitkv.MACHINES[machine]
    threads = tilelang_splitkv.combine_threads(head_dim)
    kernel = tilelang_splitkv.combine_kernel(target, 32, head_dim, "bfloat16", tilelang_splitkv.BLOCK_S, threads)
    with tvm.target.Target({"kind": "cuda", "arch": machine}):
        source = tilelang.lower(kernel).kernel_source
    assert "combine_kernel" in source
    assert "blockIdx.y" not in source
    assert "__syncthreads" not in source  # each thread merges columns of its own


@pytest.mark.parametrize("machine", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("head_dim", tilelang_splitkv.HEAD_DIMS)
def test_combine_of_many_splits_lowers(machine: str, head_dim: int) -> None:
    target = tilelang_splitkv.MACHINES[machine]
    kernel = tilelang_splitkv.many_combine_kernel(
        target, 32, head_dim, "bfloat16", tilelang_splitkv.MANY_S, tilelang_splitkv.GROUPS
    )
    with (
        tvm.transform.PassContext(opt_level=3, config=tilelang_splitkv.COMBINE_CONFIGS),
        tvm.target.Target({"kind": "cuda", "arch": machine}),
    ):
        source = tilelang.lower(kernel).kernel_source
    assert "combine_kernel" in source
    assert source.count("*(float4*)(Partial + ") == 1  # 16 bytes a load
    assert source.count("__syncthreads") == 1  # where the groups meet
    assert "slots" not in source  # the count of splits guards a load, and nothing else
    assert all("blockIdx.y" not in line for line in source.splitlines() if "Merges[" in line)  # it ends at 65535
    if machine == "sm_90a":
        before, after = source.split("cudaGridDependencySynchronize();")
        assert "Merges[" in before
        assert "Partial_lse[" not in before
        assert "Merges[" not in after


@pytest.mark.parametrize(("splits", "many"), [(16, False), (17, True), (140, True)])
def test_a_plan_takes_the_combine_for_as_many_splits_as_it_has(
    splits: int, many: bool, device: torch.device
) -> None:
    problem = DecodeProblem(kv_lens=(300, 9), heads_q=4, heads_kv=2, head_dim=64, dtype="float16")
    tuning = {"num_splits": splits, "merge": "combine"}
    machine, sms = tilelang_splitkv.choose_machine(device), tilelang_splitkv.sms_of(device)
    choice = {**tilelang_splitkv.TUNING, **tuning}
    assert tilelang_splitkv.decide(machine, problem, choice, sms).many_splits is many
    inputs = make_inputs(problem, 0, device)
    result = check_plan(tilelang_splitkv.TileLangSplitKV().plan(problem, device, tuning), inputs, reference(inputs))
    assert result.ok, result.reason


FAULTS = {
    "wrong split edge": ("rest = keys - t * block_n", "rest = keys - 1 - t * block_n"),
    "missing scale": (
        "acc_s[i, j] = T.exp2((acc_s[i, j] - scores_ref[i]) * scale_log2)",
        "acc_s[i, j] = T.exp2(acc_s[i, j] - scores_ref[i])",
    ),
    "unnormalised partial": ("out_o[i, d] / out_sum[i], 0.0)", "out_o[i, d], 0.0)"),
}


def mutated(path: Path, right: str, wrong: str) -> ModuleType:
    """A copy of the kernel module with one expression of its body replaced."""
    source = Path(tilelang_splitkv.__file__).read_text()
    assert source.count(right) == 1
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_body_fails_on_the_cpu_and_reaches_sm_90a(fault: str, tmp_path: Path) -> None:
    module = mutated(tmp_path / f"mutated_{list(FAULTS).index(fault)}.py", *FAULTS[fault])
    problem = DecodeProblem(kv_lens=(150, 33), heads_q=4, heads_kv=2, head_dim=64, dtype="float32")
    inputs = make_inputs(problem, 0, CPU)
    expected = reference(inputs)
    tuning = {"num_splits": 2}
    right = check_plan(tilelang_splitkv.TileLangSplitKV().plan(problem, CPU, tuning), inputs, expected)
    wrong = check_plan(module.TileLangSplitKV().plan(problem, CPU, tuning), inputs, expected)
    assert right.ok, right.reason
    assert not wrong.ok
    assert lower(module, "sm_90a") != lower(tilelang_splitkv, "sm_90a")


def test_lengths_and_batch_sizes_never_recompile() -> None:
    impl = tilelang_splitkv.TileLangSplitKV()
    batches = [(1,), (7, 0), (64, 65), (129,), (3, 5, 1001), *((i, 2 * i + 1) for i in range(15))]
    variants = set()
    for lens in batches:
        problem = DecodeProblem(kv_lens=lens, heads_q=2, heads_kv=1, head_dim=64, dtype="float32")
        inputs = make_inputs(problem, 0, CPU)
        result = check_plan(impl.plan(problem, CPU, {"num_splits": 3}), inputs, reference(inputs))
        assert result.ok, (lens, result.reason)
        variants.add(tilelang_splitkv.compiled_variants())
    assert len(batches) == 20
    assert len(variants) == 1


def test_bfloat16_computes_in_float32_on_the_cpu_and_says_so() -> None:
    problem = DecodeProblem(kv_lens=(9,), heads_q=2, heads_kv=1, head_dim=64, dtype="bfloat16")
    config = tilelang_splitkv.TileLangSplitKV().plan(problem, CPU).config
    assert config["compute_dtype"] == "float32"
    assert config["machine"] == "cpu"


def test_config_names_what_a_rerun_needs() -> None:
    problem = DecodeProblem(kv_lens=(300, 5), heads_q=2, heads_kv=1, head_dim=64, dtype="float16")
    config = tilelang_splitkv.TileLangSplitKV().plan(problem, CPU, {"num_splits": 8}).config
    assert config["num_splits"] == 8
    assert config["splits_max"] == 8
    assert config["work_items"] == 8 + 5
    assert {"block_n", "block_h", "num_stages", "threads", "tma", "warp_specialize"} <= set(config)


@pytest.mark.parametrize("compiler", ["no-such-compiler", None])
def test_without_a_compiler_it_is_unavailable(monkeypatch: pytest.MonkeyPatch, compiler: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tilelang_machines, "get_cplus_compiler", lambda: compiler)
    expected = r"C\+\+ compiler \(TileLang's C target\): expected (one|no-such-compiler) on PATH, found none"
    with pytest.raises(ImplUnavailable, match=expected):
        tilelang_splitkv.TileLangSplitKV()


def test_refused_layouts_are_named() -> None:
    problem = DecodeProblem(kv_lens=(4,), heads_q=2, heads_kv=1, head_dim=64, dtype="float16")
    inputs = make_inputs(problem, 0, CPU)
    wide = torch.zeros(4, 1, 100, dtype=torch.float16)[:, :, :64]
    odd = type(inputs)(problem, inputs.q, wide, wide, inputs.cu_seqlens_k)
    with pytest.raises(InputError, match=r"k: expected a 16-byte aligned start"):
        tilelang_machines.check_layout(tilelang_machines.MACHINES["sm_90a"], odd)
    with pytest.raises(InputError, match=r"k: expected contiguous \(cp.async\)"):
        tilelang_machines.check_layout(tilelang_machines.MACHINES["sm_80"], odd)


def test_float32_is_refused_on_a_gpu_with_the_rule() -> None:
    problem = DecodeProblem(kv_lens=(4,), heads_q=2, heads_kv=1, head_dim=64, dtype="float32")
    reason = tilelang_splitkv.TileLangSplitKV().unsupported(problem, torch.device("cuda"))
    assert reason is not None
    assert reason.startswith("dtype: expected float16 or bfloat16 on a GPU")


def test_head_dims_that_are_not_compiled_are_refused_with_the_rule() -> None:
    problem = DecodeProblem(kv_lens=(4,), heads_q=2, heads_kv=1, head_dim=72)
    reason = tilelang_splitkv.TileLangSplitKV().unsupported(problem, CPU)
    assert reason == "head_dim: expected one of 64, 80, 96, 128, 192, 256, got 72"
    assert set(SPLIT_TUNING) <= set(tilelang_splitkv.TUNING)


def taken(machine: str, shape: DecodeProblem, **chosen: Scalar) -> tuple[int, int] | None:
    """Keys and stages of the part of the ring that a plan on an H200 takes, None for the whole."""
    choice = {**tilelang_splitkv.TUNING, **chosen}
    tiles = ring_tiles(tilelang_splitkv.MACHINES[machine], shape, choice)
    share = ring_share(shape, choice, tiles[2], 132) if 2 in tiles else 1
    return None if share == 1 else (tiles[share].block_n, tiles[share].num_stages)


@pytest.mark.parametrize(
    ("lens", "heads", "head_dim", "part"),
    [
        ((8192,) * 16, (32, 8), 128, (64, 2)),  # 128 CTAs, one round
        ((8192,) * 16, (32, 8), 64, (128, 2)),
        ((8192,) * 16, (32, 8), 256, None),
        ((8192,) * 2, (32, 8), 64, (128, 2)),  # more splits, but less to compute for each CTA
        ((8192,) * 16, (32, 8), 96, None),  # not measured
        ((8192,) * 17, (32, 8), 128, None),  # a second round
        ((8192,) * 8, (32, 8), 128, None),  # 64 CTAs read fast by the whole ring alone
        ((8192,) * 15 + (30_000,), (32, 8), 128, None),
        ((8192,) * 15 + (30_000,), (32, 8), 64, (128, 2)),
        ((8192,) * 16 + (30_000,), (32, 8), 64, None),
        ((700,) * 133 + (3900,), (8, 1), 64, (128, 2)),  # little for each SM
        ((600, 6000, 2000), (32, 8), 128, (64, 2)),  # a few of different lengths
        ((600, 6000, 2000), (32, 8), 256, None),
        ((60_000, 600_000, 200_000), (32, 8), 128, None),
        ((1024,) * 128, (32, 8), 128, (64, 2)),  # a crowd
        ((1024,) * 128, (32, 8), 64, (64, 2)),
        ((1024,) * 128, (32, 8), 256, None),
        ((430,) * 50, (32, 8), 128, (64, 2)),  # packed
        ((1877,) * 37, (32, 8), 128, None),
        ((1877,) * 37, (32, 8), 64, (64, 2)),
        ((1877,) * 24, (32, 8), 64, (128, 2)),
        ((200,) * 24, (32, 8), 64, (64, 2)),
        ((911,) * 50, (32, 8), 64, (128, 2)),  # three CTAs of half a ring fit an SM
        ((911,) * 60, (32, 8), 64, (64, 2)),
        ((5000,) * 30, (32, 8), 64, (64, 2)),  # rounds
        ((300, 548) * 60, (32, 8), 64, (64, 2)),  # a crowd
        ((500, 1036, 2400) * 20, (32, 8), 64, None),  # no crowd: one takes over half of what an SM reads
        ((1877,) * 37, (32, 8), 256, (64, 1)),
        ((1877,) * 20, (32, 8), 256, None),  # under one and a half CTAs an SM
        ((430,) * 20, (32, 8), 128, None),  # of over 320 keys, and neither 1.5 to 2 CTAs an SM nor over 2.6
        ((430,) * 30, (32, 8), 128, (64, 2)),
        ((430,) * 40, (32, 8), 128, None),
        ((300,) * 20, (32, 8), 128, (64, 2)),
        ((150, 250) * 10, (32, 8), 128, (64, 2)),
        ((430,) * 10, (32, 8), 128, (64, 2)),  # whole, on over half of the SMs
    ],
)
def test_a_part_of_the_ring_is_for_ctas_that_share_an_sm_and_for_one_even_round(
    lens: tuple[int, ...], heads: tuple[int, int], head_dim: int, part: tuple[int, int] | None
) -> None:
    shape = DecodeProblem(kv_lens=lens, heads_q=heads[0], heads_kv=heads[1], head_dim=head_dim)
    assert taken("sm_90a", shape) == part
    assert taken("sm_80", shape) is None
    for chosen in ({"block_n": 128}, {"num_splits": 2}, {"waves": 1}):
        assert taken("sm_90a", shape, **chosen) is None


@pytest.mark.parametrize(
    ("lens", "heads", "head_dim", "splits"),
    [
        ((3333, 2405, 1514, 1510), (8, 1), 64, 16),
        ((900, 700), (8, 1), 128, 8),  # of a tile each
        ((990, 700), (8, 1), 128, 4),  # tiles would be all but full
        ((900, 700) * 5, (8, 1), 128, 4),  # clusters of eight only on half of the SMs
        ((1074,), (40, 10), 64, 8),
        ((1024,), (32, 8), 128, 4),
        ((500, 300), (32, 8), 128, 4),
        ((994,) * 3, (32, 8), 128, 4),  # two splits would not read at full speed
        ((994,) * 4, (32, 8), 128, None),
        ((512,) * 8, (32, 8), 128, None),  # whole, they read at full speed already
        ((3333, 2405, 1514, 10), (8, 1), 64, None),  # fewer keys than splits
        ((9000, 700), (8, 1), 64, None),  # no cluster's rings hold them
        ((900, 700) * 40, (8, 1), 128, None),  # not all clusters at once
        ((200, 100), (8, 1), 128, 4),  # one trip to memory, but two tiles
        ((200, 100) * 6, (32, 8), 128, None),  # not an SM for each of two splits
        ((200,) * 8, (32, 8), 128, 2),
        ((200,) * 8, (64, 8), 128, None),  # eight query heads to merge
        ((200,) * 8, (64, 8), 64, 2),
        ((120, 100), (8, 1), 128, None),  # a tile each
    ],
)
def test_splits_that_all_fit_the_ring_merge_in_clusters(
    lens: tuple[int, ...], heads: tuple[int, int], head_dim: int, splits: int | None
) -> None:
    shape = DecodeProblem(kv_lens=lens, heads_q=heads[0], heads_kv=heads[1], head_dim=head_dim)
    machine, choice = tilelang_splitkv.MACHINES["sm_90a"], dict(tilelang_splitkv.TUNING)
    made = tilelang_splitkv.decide(machine, shape, choice, 132)
    rule = clustered_splits(machine, shape, choice, made.tile, sms=132)
    assert rule == splits
    if splits is not None:
        assert made.splitting.cluster == splits
        assert made.splitting.table.counts.tolist() == [splits] * len(lens)
    for chosen in ({"num_splits": 2}, {"waves": 1}, {"merge": "exchange"}, {"cluster": 1}):
        assert clustered_splits(machine, shape, {**choice, **chosen}, made.tile, sms=132) is None


@pytest.mark.parametrize("name", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("sms", [1, 6, 7, 8])
@pytest.mark.parametrize("lens", [(5000, 300), (2000,) * 9, (40_000,), (1, 1, 9000)])
def test_a_device_of_few_sms_is_planned_for(name: str, sms: int, lens: tuple[int, ...]) -> None:
    shape = DecodeProblem(kv_lens=lens, heads_q=8, heads_kv=2, head_dim=128)
    machine = tilelang_splitkv.MACHINES[name]
    counts = tilelang_splitkv.decide(machine, shape, tilelang_splitkv.TUNING, sms).splitting.table.counts
    assert ((counts >= 1) & (counts <= np.array(lens))).all()


def test_who_chooses_a_cluster_for_packed_work_gets_it() -> None:
    shape = DecodeProblem(kv_lens=(900,) * 20, heads_q=32, heads_kv=8, head_dim=128)
    choice = {**tilelang_splitkv.TUNING, "num_splits": 2, "cluster": 2}
    made = tilelang_splitkv.decide(tilelang_splitkv.MACHINES["sm_90a"], shape, choice, 132)
    assert (made.splitting.cluster, set(made.splitting.table.counts.tolist())) == (2, {2})


@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((32, 8), 64), ((16, 16), 64), ((32, 8), 128), ((8, 1), 128), ((40, 10), 256), ((8, 2), 96)],
)
def test_what_later_lengths_need_is_compiled_with_the_first_plan(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], head_dim: int
) -> None:
    """But for clusters. A plan may be made in front of a CUDA graph, for lengths of any kind."""
    machine = tilelang_splitkv.MACHINES["sm_90a"]
    ahead: set[tuple[object, ...]] = set()
    monkeypatch.setattr(tilelang_splitkv, "compiled_split", lambda *what: ahead.add(what[-3:]))
    monkeypatch.setattr(tilelang_splitkv, "compiled_combine", lambda *what: ahead.add(("combine", what[-1])))
    compile_ahead = tilelang_splitkv.compile_ahead.__wrapped__
    rng = np.random.default_rng(0)
    unlike = (3210, 2732, 2949, 1754, 2580, 2367, 2742, 2492, 2508, 1632, 1809, 2681, 2202)  # 208 CTAs of 16 heads
    batches = [
        unlike,
        (1024,),
        (8192,) * 10,
        (1024,) * 128,
        (600, 6000, 2000),
        (1877,) * 37,
        (430,) * 60,
        (200,) * 90,
        (),
    ]
    for _ in range(60):
        size, longest = int(rng.choice([1, 3, 10, 40, 150, 400])), int(rng.choice([200, 900, 5000, 90_000]))
        batches.append(tuple(rng.integers(1, longest, size).tolist()))
    first = DecodeProblem(kv_lens=(1024,), heads_q=heads[0], heads_kv=heads[1], head_dim=head_dim)
    tiles = tilelang_splitkv.decide(machine, first, tilelang_splitkv.TUNING, 132).tiles
    compile_ahead("sm_90a", *heads, head_dim, "bfloat16", tiles)
    for lens in batches:
        shape = replace(first, kv_lens=lens)
        made = tilelang_splitkv.decide(machine, shape, tilelang_splitkv.TUNING, 132)
        assert made.tiles == tiles
        if made.splitting.cluster == 1:
            assert (made.tile, 1, made.splitting.exchange) in ahead, lens
        if made.many_splits is not None:
            assert ("combine", made.many_splits) in ahead
