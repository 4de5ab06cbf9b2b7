"""The spaces that a tuner tries: what they hold, on an H200 and on a CPU, and what of it is refused up front."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tilelang
import torch
import tvm

from harness.study import load_study
from impls import tilelang_splitkv, triton_splitkv
from impls.catalog import OURS, load
from impls.contract import DecodeImpl, check_tuning
from impls.problem import DecodeProblem
from impls.space import SPLIT_SPACE, Configuration, Tunable, expand
from impls.splitkv_plan import SPLIT_TUNING, Limits, choose_splits
from impls.triton_tile import sm_90
from tests.impls.test_triton import ask_compiler

CASES = load_study("reports/h200-decode").cases
H200 = torch.device("cuda", 0)
SM_COUNT, SHARED_BYTES = 132, 232448


@pytest.fixture(params=OURS)
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DecodeImpl:
    """Each of our kernels, told that the device is an H200."""
    properties = SimpleNamespace(multi_processor_count=SM_COUNT, shared_memory_per_block_optin=SHARED_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_splitkv, "machine_of", lambda device: sm_90(SM_COUNT))
    return load(request.param)


def space_of(impl: DecodeImpl, problem: DecodeProblem) -> list[Configuration]:
    assert isinstance(impl, Tunable)
    return list(impl.configurations(problem, H200))


def what_runs(impl: DecodeImpl, problem: DecodeProblem, configuration: Configuration) -> tuple[object, ...]:
    """The tile and the splits that a configuration comes to."""
    if impl.name == "triton-splitkv":
        choice = check_tuning(configuration.tuning, triton_splitkv.TUNING)
        tile: object = triton_splitkv.choose_tile(problem, sm_90(SM_COUNT), choice, work="long")
        block_n, block_h = tile.block_n, tile.block_h  # type: ignore[attr-defined]
    else:
        choice = check_tuning(configuration.tuning, tilelang_splitkv.TUNING)
        tile = tilelang_splitkv.choose_tile(tilelang_splitkv.MACHINES["sm_90a"], problem, choice)
        block_n, block_h = tile.block_n, tile.block_h
    tiles = problem.heads_kv * -(-problem.group // block_h)
    splits = {key: choice[key] for key in SPLIT_TUNING}
    table = choose_splits(problem, splits, sm_count=SM_COUNT, tiles_per_split=tiles, limits=Limits(block_n))
    return tile, tuple(table.counts.tolist())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_has_48_plans_that_fit_and_differ(impl: DecodeImpl, case) -> None:
    fit = [c for c in space_of(impl, case.problem) if c.refusal is None]
    assert len({what_runs(impl, case.problem, c) for c in fit}) >= 48
    assert (fit[0].tile, fit[0].splits) == ({}, {})
    assert len({tuple(sorted(c.tuning.items(), key=str)) for c in fit}) == len(fit)


@pytest.mark.parametrize("name", ["b1_1k", "b1_8k", "tp8_b32_8k", "trace_code_1200s", "b64_4k"])
def test_tilelang_says_of_each_configuration_what_is_compiled_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = next(case.problem for case in CASES if case.name == name)
    properties = SimpleNamespace(multi_processor_count=SM_COUNT, shared_memory_per_block_optin=SHARED_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    machine = tilelang_splitkv.MACHINES["sm_90a"]
    monkeypatch.setattr(tilelang_splitkv, "choose_machine", lambda device: machine)
    monkeypatch.setattr(tilelang_splitkv, "sms_of", lambda device: SM_COUNT)
    compiled: list[object] = []
    monkeypatch.setattr(tilelang_splitkv, "compiled_split", lambda *what: compiled.append(what))
    monkeypatch.setattr(tilelang_splitkv, "compiled_combine", lambda *what: compiled.append(what))
    ours = tilelang_splitkv.TileLangSplitKV.__new__(tilelang_splitkv.TileLangSplitKV)  # needs a GPU or a compiler
    found: dict[str, set[object]] = {}
    for configuration in ours.configurations(problem, torch.device("cpu")):
        if configuration.refusal is None and configuration.tile:
            compiled.clear()
            ours.plan(problem, torch.device("cpu"), configuration.tuning)
            assert len(compiled) in (1, 2), "a chosen tile compiles what these lengths need, and nothing ahead"
            found.setdefault(configuration.kernel, set()).add(tuple(compiled))
    kernels = [kernel for each in found.values() for kernel in each]
    assert len(kernels) == len(found) == len(set(kernels)) > 10


def test_tilelang_has_what_the_official_example_is_tuned_over() -> None:
    tiles = expand(tilelang_splitkv.SPACE)
    counts = [splits.get("num_splits") for splits in expand(SPLIT_SPACE)]
    assert {1, 2, 4, 8} <= set(counts)
    official = [
        {"block_h": 64, "block_n": block_n, "num_stages": stages} for block_n in (64, 128) for stages in (1, 2, 3)
    ]
    assert all(tile in tiles for tile in official)
    problem = DecodeProblem(kv_lens=(8192,), heads_q=32, heads_kv=8, head_dim=128)
    machine = tilelang_splitkv.MACHINES["sm_90a"]
    made = [
        tilelang_splitkv.choose_tile(machine, problem, {**tilelang_splitkv.TUNING, **tile}) for tile in official
    ]
    assert {tile.threads for tile in made} == {128}


def test_tiles_over_the_shared_memory_are_refused_with_the_numbers(impl: DecodeImpl) -> None:
    wide = DecodeProblem(kv_lens=(8192,), heads_q=8, heads_kv=8, head_dim=256)
    refused = {c.refusal for c in space_of(impl, wide) if c.refusal is not None}
    assert refused
    assert all(text.startswith("shared memory: expected <= 232448 bytes a CTA, got ") for text in refused)
    # Nothing else is: the tile of our own rule fits.
    assert space_of(impl, wide)[0].refusal is None


def test_on_a_cpu_tilelang_has_one_stage() -> None:
    problem = DecodeProblem(kv_lens=(100,), heads_q=8, heads_kv=2, head_dim=64)
    found = tilelang_splitkv.TileLangSplitKV().configurations(problem, torch.device("cpu"))
    refused = {c.tile["num_stages"] for c in found if c.refusal is not None}
    assert refused == {2, 3, 4}
    assert {c.tile.get("num_stages") for c in found if c.refusal is None} == {None, 1}


def test_triton_allots_the_shared_memory_that_was_predicted() -> None:
    for tile, (predicted, allotted) in ask_compiler("space").items():
        assert predicted == allotted, tile


@pytest.mark.parametrize("shape", [(16, 128, 2, 128), (64, 64, 3, 128), (16, 128, 2, 256), (64, 32, 1, 128)])
def test_tilelang_allots_the_shared_memory_that_was_predicted(shape: tuple[int, int, int, int]) -> None:
    problem = DecodeProblem(kv_lens=(8192,), heads_q=28, heads_kv=4, head_dim=128)
    machine, tile = tilelang_splitkv.MACHINES["sm_90a"], tilelang_splitkv.Tile(*shape)
    kernel = tilelang_splitkv.split_kernel(machine, 28, 4, 128, "bfloat16", **vars(tile))
    with tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}):
        module = tilelang.lower(kernel).device_mod
    (function,) = module.functions.values()
    assert int(function.attrs["dyn_shared_memory_buf"]) == tilelang_splitkv.tile_bytes(machine, problem, tile)
